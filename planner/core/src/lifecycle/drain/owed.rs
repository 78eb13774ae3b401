//! What a drain owes the world, and what the store holds true beside its row.

use vmferry_types::{HostId, MigrationId, VmId};

use super::{Drain, Phase, State};
use crate::fleet::Lifecycle;
use crate::lifecycle::job::Cordoned;
use crate::maintenance::Mode;

/// One thing that a drain wants done. Each is safe to do twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Plan the residents anew ([`Drain::to_plan`]), and begin what has a place.
    Replan,
    /// Open a migration under a new id, with [`Event::Begun`](super::Event::Begun) in the same
    /// transaction. Refused, it is [`Event::NotBegun`](super::Event::NotBegun).
    Begin {
        /// Which VM.
        vm: VmId,
        /// Where the plan puts it.
        planned: HostId,
        /// How.
        mode: Mode,
    },
    /// Ask a migration to go back, then [`Event::CancelAsked`](super::Event::CancelAsked).
    Cancel {
        /// Of which VM.
        vm: VmId,
        /// Which.
        migration: MigrationId,
    },
    /// Ask the agent what is on its host now.
    AskWhetherEmpty,
}

impl Effect {
    /// Returns the one spelling of this effect.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Replan => "replan",
            Self::Begin { .. } => "begin",
            Self::Cancel { .. } => "cancel",
            Self::AskWhetherEmpty => "ask_whether_empty",
        }
    }
}

/// What the store holds true beside a drain's row, written in the same transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Books {
    /// The drain's cordon.
    pub cordon: Cordoned,
    /// What the host is to everyone else.
    pub lifecycle: Lifecycle,
}

impl Drain {
    /// Returns what the store holds beside the row.
    #[must_use]
    pub const fn books(&self) -> Books {
        let (cordon, lifecycle) = match self.phase {
            Phase::Emptying | Phase::Empty { .. } => (Cordoned::Held, Lifecycle::Draining),
            Phase::Granted { .. } => (Cordoned::Held, Lifecycle::Retired),
            Phase::Cancelled { .. } => (Cordoned::Lifted, Lifecycle::Active),
            Phase::Died { .. } => (Cordoned::AsItIs, Lifecycle::Active),
        };
        Books { cordon, lifecycle }
    }

    /// Returns everything that is owed by the row alone. What `Replan` begins is for the plan to
    /// say, so `Begin` is never here but in what [`step`](super::step) returns.
    #[must_use]
    pub fn outstanding(&self) -> Vec<Effect> {
        match self.phase {
            Phase::Emptying if self.residents.is_empty() => vec![Effect::AskWhetherEmpty],
            Phase::Emptying => vec![Effect::Replan],
            Phase::Cancelled { .. } => self.to_take_back(),
            // Nothing of a dead host is taken back: its migrations decide by what is proven.
            Phase::Empty { .. } | Phase::Granted { .. } | Phase::Died { .. } => Vec::new(),
        }
    }

    fn to_take_back(&self) -> Vec<Effect> {
        self.residents
            .iter()
            .filter_map(|one| match one.state {
                State::Begun { migration } => Some(Effect::Cancel { vm: one.vm, migration }),
                State::Waiting
                | State::Blocked { .. }
                | State::Cancelling { .. }
                | State::Resting { .. } => None,
            })
            .collect()
    }
}
