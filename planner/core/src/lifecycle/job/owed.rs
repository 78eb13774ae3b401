//! What a job owes the world, and what the store holds true beside its row.

use vmferry_types::{Generation, HostId, MigrationId, VmId};

use super::{Job, MoveState, Phase, Return, ReturnState};
use crate::fleet::Lifecycle;
use crate::maintenance::Mode;

/// One thing that a job wants done. Each is safe to do twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Open a migration under a new id, with [`Event::Begun`](super::Event::Begun) in the same
    /// transaction. Refused for good, it is [`Event::NotBegun`](super::Event::NotBegun); where
    /// waiting may help, the migration waits in the queue.
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
    /// As `Begin`, to the host that is back: there or nowhere, and never in the queue.
    BringBack {
        /// Which VM.
        vm: VmId,
        /// Where it is, if nobody moved it since.
        from: HostId,
        /// The generation under which it is there, if nobody did.
        generation: Generation,
        /// How.
        mode: Mode,
    },
}

impl Effect {
    /// Returns the one spelling of this effect.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Begin { .. } => "begin",
            Self::Cancel { .. } => "cancel",
            Self::AskWhetherEmpty => "ask_whether_empty",
            Self::BringBack { .. } => "bring_back",
        }
    }
}

/// What becomes of a job's own cordon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cordoned {
    /// It is held.
    Held,
    /// It is lifted. Those of other owners stay.
    Lifted,
    /// It is left as it is: only an operator lifts it.
    AsItIs,
}

/// What the store holds true beside a job's row, written in the same transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Books {
    /// The job's cordon.
    pub cordon: Cordoned,
    /// What the host is to everyone else.
    pub lifecycle: Lifecycle,
}

impl Job {
    /// Returns what the store holds beside the row.
    #[must_use]
    pub const fn books(&self) -> Books {
        let (cordon, lifecycle) = match self.phase {
            Phase::Planned | Phase::Blocked | Phase::Completed { .. } | Phase::Cancelled { .. } => {
                (Cordoned::Lifted, Lifecycle::Active)
            }
            Phase::Running | Phase::Verifying { .. } | Phase::Stopping { .. } => {
                (Cordoned::Held, Lifecycle::Draining)
            }
            Phase::Maintenance { .. } => (Cordoned::Held, Lifecycle::Maintenance),
            Phase::Failed { .. } => (Cordoned::AsItIs, Lifecycle::Active),
        };
        Books { cordon, lifecycle }
    }

    /// Returns everything that is owed, in the order in which it is to be done.
    ///
    /// More VMs may be named than may move at once: [`step`](super::step) keeps to the limit.
    #[must_use]
    pub fn outstanding(&self) -> Vec<Effect> {
        match &self.phase {
            Phase::Running => self
                .moves
                .iter()
                .filter(|one| one.state == MoveState::Waiting)
                .map(|one| Effect::Begin {
                    vm: one.vm,
                    planned: one.planned.clone(),
                    mode: one.mode,
                })
                .collect(),
            Phase::Verifying { .. } => vec![Effect::AskWhetherEmpty],
            Phase::Stopping { .. } => self.to_take_back(),
            Phase::Completed { back, .. } => {
                back.iter().filter(|one| one.state == ReturnState::Waiting).map(bring).collect()
            }
            Phase::Planned
            | Phase::Blocked
            | Phase::Maintenance { .. }
            | Phase::Failed { .. }
            | Phase::Cancelled { .. } => Vec::new(),
        }
    }

    fn to_take_back(&self) -> Vec<Effect> {
        self.moves
            .iter()
            .filter_map(|one| match one.state {
                MoveState::Begun { migration } => Some(Effect::Cancel { vm: one.vm, migration }),
                MoveState::Waiting
                | MoveState::Cancelling { .. }
                | MoveState::Moved { .. }
                | MoveState::Left { .. }
                | MoveState::Failed { .. }
                | MoveState::Cancelled { .. }
                | MoveState::NotBegun => None,
            })
            .collect()
    }
}

fn bring(one: &Return) -> Effect {
    Effect::BringBack {
        vm: one.vm,
        from: one.from.clone(),
        generation: one.generation,
        mode: one.mode,
    }
}
