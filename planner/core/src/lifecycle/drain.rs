//! A host that is emptied for as long as the word stands: a drain, or a retirement.
//!
//! ```text
//! EMPTYING ◄─► EMPTY            a drain: the host stays empty, whatever turns up
//! EMPTYING ──► GRANTED          a retirement: the host may be deleted
//! any ──► CANCELLED             the cordon is lifted at once; what is under way is taken back
//! EMPTYING, EMPTY ──► DIED
//! ```
//!
//! Every tick the residents are planned anew, so nothing has to be remembered of an old plan: a VM
//! that finds room moves, one that does not is a blocker with every reason, and one whose migration
//! failed rests for a while that doubles, and is tried again for ever. Nothing is given up silently
//! and nothing is tried hot.
//!
//! What a row keeps is what cannot be planned again: which migrations are open, who rests until
//! when, and since when a VM is blocked.

mod event;
mod owed;
mod read;
mod table;

pub use event::Event;
pub use owed::{Books, Effect};
pub use read::{Facts, Step, read, step};

use vmferry_types::{DrainId, HostId, MigrationId, Millis, Timestamp, VmId};

use super::emptiness::Emptiness;
use super::policy::{Policy, Refusal, Unplaced};

/// What a drain is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Goal {
    /// To keep the host empty.
    Drain,
    /// To be rid of it.
    Retire,
}

impl Goal {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Retire => "retire",
        }
    }
}

/// One host that is being emptied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Drain {
    /// Names the drain.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub id: DrainId,
    /// The host.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub host: HostId,
    /// What it is for.
    pub goal: Goal,
    /// How it may be emptied.
    pub policy: Policy,
    /// Who asked.
    pub by: String,
    /// When.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub opened: Timestamp,
    /// When it was last known that a VM had left, or that one was there; before that the agent's
    /// word of an empty host proves nothing.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub last: Timestamp,
    /// The VMs that are there, by id.
    pub residents: Vec<Resident>,
    /// The VMs that it moved, by id, with where each last went.
    pub moved: Vec<Moved>,
    /// How far it has come.
    pub phase: Phase,
}

/// A VM that is still on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Resident {
    /// The VM.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub vm: VmId,
    /// How many of its migrations did not move it.
    pub failures: u32,
    /// How it stands.
    pub state: State,
}

/// How a resident stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "state")
)]
pub enum State {
    /// Its turn has not come.
    Waiting,
    /// It has no place to go.
    Blocked {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        since: Timestamp,
        /// When the reasons were last written down.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        noted: Timestamp,
        /// Why.
        why: Unplaced,
    },
    /// Its migration is open.
    Begun {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// Its migration was asked to go back, for the drain was cancelled.
    Cancelling {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// Its last migration did not move it: it is left alone for a while.
    Resting {
        /// Until when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        until: Timestamp,
        /// Why, in the words of what went wrong.
        error: String,
    },
}

impl State {
    /// Returns the one spelling of this state.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Blocked { .. } => "blocked",
            Self::Begun { .. } => "running",
            Self::Cancelling { .. } => "cancelling",
            Self::Resting { .. } => "resting",
        }
    }

    /// Says whether it has no place to go.
    #[must_use]
    pub const fn is_blocked(&self) -> bool {
        match self {
            Self::Blocked { .. } => true,
            Self::Waiting | Self::Begun { .. } | Self::Cancelling { .. } | Self::Resting { .. } => {
                false
            }
        }
    }

    /// Returns the migration that is open.
    #[must_use]
    pub const fn open(&self) -> Option<MigrationId> {
        match self {
            Self::Begun { migration } | Self::Cancelling { migration } => Some(*migration),
            Self::Waiting | Self::Blocked { .. } | Self::Resting { .. } => None,
        }
    }
}

/// A VM that a drain moved.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Moved {
    /// The VM.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub vm: VmId,
    /// Where.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub destination: HostId,
    /// When that was known.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub at: Timestamp,
}

/// How far a drain has come.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "phase")
)]
pub enum Phase {
    /// Something is there, or the agent has not said that nothing is.
    Emptying,
    /// The agent says that its host is empty.
    Empty {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        since: Timestamp,
        /// How that is known.
        proof: Emptiness,
    },
    /// The host is retired: it may be deleted.
    Granted {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// How it is known that it was empty.
        proof: Emptiness,
    },
    /// The host is in service again.
    Cancelled {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// By whom.
        by: String,
    },
    /// The host died before it was empty. It stays cordoned.
    Died {
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// How, and how many VMs were there.
        error: String,
    },
}

impl Phase {
    /// Returns the one spelling of this phase.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Emptying => "EMPTYING",
            Self::Empty { .. } => "EMPTY",
            Self::Granted { .. } => "GRANTED",
            Self::Cancelled { .. } => "CANCELLED",
            Self::Died { .. } => "DIED",
        }
    }
}

/// How a host stands to its drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It is being emptied, or kept empty.
    Draining,
    /// It is retired.
    Retired,
    /// It is not held any more.
    Over,
}

/// How long a VM rests after its first failed migration.
///
/// Long enough that a host that refuses is not asked all the time, short enough that an agent that
/// was restarted costs a drain no time that anybody would notice.
const REST_FIRST: Millis = Millis(30_000);

/// How long a VM rests at most. A drain goes on for ever, and shows meanwhile what it rests for.
const REST_MAX: Millis = Millis(1_800_000);

impl Drain {
    /// Opens a drain. The store cordons the host in the same transaction.
    #[must_use]
    pub fn open(opening: Opening) -> Self {
        let Opening { id, host, goal, policy, by, at } = opening;
        let (residents, moved) = (Vec::new(), Vec::new());
        let phase = Phase::Emptying;
        Self { id, host, goal, policy, by, opened: at, last: at, residents, moved, phase }
    }

    /// Returns the drain after `event`.
    ///
    /// # Errors
    ///
    /// Says whether the event is stale (drop it), illegal (a bug: count it) or a request that
    /// cannot be granted (tell the caller). The drain is as it was.
    pub fn apply(&self, event: &Event) -> Result<Self, Refusal> {
        table::next(self, event)
    }

    /// Returns how the host stands to it.
    #[must_use]
    pub const fn hold(&self) -> Hold {
        match self.phase {
            Phase::Emptying | Phase::Empty { .. } => Hold::Draining,
            Phase::Granted { .. } => Hold::Retired,
            Phase::Cancelled { .. } | Phase::Died { .. } => Hold::Over,
        }
    }

    /// Says whether nothing more will happen: over, and nothing of it under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        match self.phase {
            Phase::Emptying | Phase::Empty { .. } => false,
            Phase::Granted { .. } | Phase::Cancelled { .. } | Phase::Died { .. } => {
                self.open_migrations().next().is_none()
            }
        }
    }

    /// Returns the migrations that are open.
    pub fn open_migrations(&self) -> impl Iterator<Item = (VmId, MigrationId)> + '_ {
        self.residents.iter().filter_map(|one| Some((one.vm, one.state.open()?)))
    }

    /// Returns the residents that are to be planned now, by id: those that nothing carries yet and
    /// that do not rest.
    #[must_use]
    pub fn to_plan(&self, now: Timestamp) -> Vec<VmId> {
        let due = |one: &&Resident| match &one.state {
            State::Waiting | State::Blocked { .. } => true,
            State::Resting { until, .. } => *until <= now,
            State::Begun { .. } | State::Cancelling { .. } => false,
        };
        match self.phase {
            Phase::Emptying => self.residents.iter().filter(due).map(|one| one.vm).collect(),
            Phase::Empty { .. }
            | Phase::Granted { .. }
            | Phase::Cancelled { .. }
            | Phase::Died { .. } => Vec::new(),
        }
    }
}

/// Returns how long a VM rests after so many failures in a row.
#[must_use]
pub fn rest(failures: u32) -> Millis {
    let doublings = failures.saturating_sub(1).min(16);
    Millis(REST_FIRST.value().saturating_mul(1 << doublings)).min(REST_MAX)
}

/// What a new drain is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Names the drain.
    pub id: DrainId,
    /// The host.
    pub host: HostId,
    /// What it is for.
    pub goal: Goal,
    /// How it may be emptied.
    pub policy: Policy,
    /// Who asks.
    pub by: String,
    /// When.
    pub at: Timestamp,
}

#[cfg(test)]
pub(in crate::lifecycle) mod tests;
