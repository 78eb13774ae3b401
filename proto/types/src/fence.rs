//! What every command to an agent carries, and how it is refused (rule R2).

use crate::{Claim, Generation, MigrationId, Step, VmId};

/// Says for whom and by whose word a command is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The VM that is commanded.
    pub vm: VmId,
    /// The admission that the command belongs to: a migration, a start, a stop.
    pub migration: MigrationId,
    /// Who may run the VM while the command is carried out.
    pub generation: Generation,
    /// The driver's claim.
    pub claim: Claim,
    /// The command's place among those of the driver.
    pub step: Step,
}

/// Says why an agent did not take a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceRefusal {
    /// The VM is owned under a newer generation.
    StaleGeneration {
        /// The newest that the agent knows.
        known: Generation,
    },
    /// Another driver holds a newer claim, or this driver already gave a later command.
    StaleClaim {
        /// The newest claim that the agent knows.
        known: Claim,
        /// The newest step under that claim.
        step: Step,
    },
    /// The step is the last one, but the command is another: one of the two was never meant.
    StepReused {
        /// The step in question.
        step: Step,
    },
    /// A counter is further above the known one than anybody counts in one go.
    Leap {
        /// The counter's name in [`Fence`].
        field: &'static str,
        /// The newest generation that the agent knows.
        generation: Generation,
        /// The newest claim.
        claim: Claim,
        /// The newest step under that claim.
        step: Step,
    },
}
