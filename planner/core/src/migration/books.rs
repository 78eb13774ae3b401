//! What the store must hold true beside the row, as a function of the phase alone.

use std::collections::BTreeSet;

use vmferry_types::{Generation, HostId, PowerState};

use super::Migration;
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
        let both =
            |destination: &HostId| BTreeSet::from([self.source.clone(), destination.clone()]);
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
            | Phase::Restored { destination, .. } => Books {
                host: self.source.clone(),
                generation: self.generation,
                power: None,
                reserved: both(destination),
                flight: Flight::Held,
            },
            Phase::Committed { destination, generation, .. }
            | Phase::Attached { destination, generation, .. } => Books {
                host: destination.clone(),
                generation: *generation,
                power: None,
                reserved: both(destination),
                flight: Flight::Held,
            },
            Phase::RollingBack { destination, generation, .. } => Books {
                host: self.source.clone(),
                generation: *generation,
                power: None,
                reserved: both(destination),
                flight: Flight::Held,
            },
            Phase::Done { destination, generation, guest, .. } => Books {
                host: destination.clone(),
                generation: *generation,
                power: Some(guest.power()),
                reserved: BTreeSet::new(),
                flight: Flight::Released,
            },
            Phase::Aborted { destination, generation, guest, .. } => Books {
                host: self.source.clone(),
                generation: *generation,
                power: destination.as_ref().map(|_| guest.power()),
                reserved: BTreeSet::new(),
                flight: Flight::Released,
            },
            Phase::Failed { destination, owner, generation, cleanup, .. } => Books {
                host: owner.clone(),
                generation: *generation,
                power: match cleanup {
                    Cleanup::Nothing | Cleanup::Receiver | Cleanup::Source => {
                        Some(PowerState::Lost)
                    }
                    Cleanup::Undecided => None,
                },
                reserved: match cleanup {
                    Cleanup::Nothing => BTreeSet::new(),
                    Cleanup::Undecided => both(destination),
                    Cleanup::Receiver => BTreeSet::from([destination.clone()]),
                    Cleanup::Source => BTreeSet::from([self.source.clone()]),
                },
                flight: match cleanup {
                    Cleanup::Nothing => Flight::Released,
                    Cleanup::Receiver | Cleanup::Source | Cleanup::Undecided => Flight::Held,
                },
            },
        }
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
