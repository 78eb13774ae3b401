//! What the store must hold true beside the row, as a function of the phase alone.

use std::collections::BTreeSet;

use vmferry_types::{Generation, HostId, PowerState};

use super::Migration;
use super::cause::Cause;
use super::phase::{Cleanup, Guest, Phase};

/// Whether the VM may be given to another admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flight {
    /// This migration still has it.
    Held,
    /// It is free.
    Released,
}

/// What is true of the VM and of reservations in a phase.
///
/// Written in the same transaction as the row. It is a level, not an edge: writing it again
/// changes nothing, and a store that compares finds exactly what a phase moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Books {
    /// The host that owns the VM.
    pub host: HostId,
    /// The generation under which it does; commands of the migration go out under it.
    pub generation: Generation,
    /// What the VM's power is. `None`: the migration has no say yet.
    pub power: Option<PowerState>,
    /// The hosts where memory and CPU are held for the VM.
    pub reserved: BTreeSet<HostId>,
    /// Whether another admission may have the VM.
    pub flight: Flight,
}

impl Migration {
    /// Returns what the store must hold true beside the row.
    #[must_use]
    pub fn books(&self) -> Books {
        match &self.phase {
            Phase::Queued { .. } => Books {
                host: self.source.clone(),
                generation: self.generation,
                power: None,
                reserved: BTreeSet::new(),
                flight: Flight::Held,
            },
            Phase::Admitted { destination, .. }
            | Phase::Captured { destination, .. }
            | Phase::Restored { destination, .. } => {
                self.under_way(&self.source, self.generation, destination)
            }
            Phase::Committed { destination, generation, .. }
            | Phase::Attached { destination, generation, .. } => {
                self.under_way(destination, *generation, destination)
            }
            Phase::RollingBack { destination, generation, .. } => {
                self.under_way(&self.source, *generation, destination)
            }
            Phase::Done { destination, generation, guest, .. } => {
                over(destination, *generation, Some(guest.power()))
            }
            Phase::Aborted { destination, generation, guest, .. } => {
                let power = destination.as_ref().map(|_| guest.power());
                over(&self.source, *generation, power)
            }
            // What the row says of the VM is not true any more: its hosts say what is.
            Phase::Failed { owner, generation, cause: Cause::Overtaken { .. }, .. } => {
                over(owner, *generation, None)
            }
            // Both hosts have half of it.
            Phase::Failed {
                destination,
                owner,
                generation,
                cause: Cause::Severed { .. },
                cleanup: Cleanup::Receiver,
                ..
            } => self.lost(owner, *generation, (destination, Cleanup::Half)),
            Phase::Failed { destination, owner, generation, cleanup, .. } => {
                self.lost(owner, *generation, (destination, *cleanup))
            }
        }
    }

    /// Both ends are reserved.
    fn under_way(&self, host: &HostId, generation: Generation, destination: &HostId) -> Books {
        Books {
            host: host.clone(),
            generation,
            power: None,
            reserved: BTreeSet::from([self.source.clone(), destination.clone()]),
            flight: Flight::Held,
        }
    }

    /// The guest is lost, or nobody can say; what is still to be cleared away stays reserved.
    fn lost(
        &self,
        owner: &HostId,
        generation: Generation,
        (destination, cleanup): (&HostId, Cleanup),
    ) -> Books {
        let held = self.under_way(owner, generation, destination);
        let lost = Some(PowerState::Lost);
        match cleanup {
            Cleanup::Nothing => over(owner, generation, lost),
            Cleanup::Receiver => {
                Books { power: lost, reserved: BTreeSet::from([destination.clone()]), ..held }
            }
            Cleanup::Source => {
                Books { power: lost, reserved: BTreeSet::from([self.source.clone()]), ..held }
            }
            Cleanup::Half => Books { power: lost, ..held },
            Cleanup::Undecided => held,
        }
    }
}

/// Nothing is held any more.
fn over(host: &HostId, generation: Generation, power: Option<PowerState>) -> Books {
    Books {
        host: host.clone(),
        generation,
        power,
        reserved: BTreeSet::new(),
        flight: Flight::Released,
    }
}

impl Guest {
    /// Returns what a VM with such a guest has been brought to.
    const fn power(self) -> PowerState {
        match self {
            Self::Present => PowerState::Running,
            Self::PoweredOff => PowerState::Stopped,
        }
    }
}
