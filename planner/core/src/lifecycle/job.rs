//! A maintenance job: one host emptied once, by a plan.
//!
//! ```text
//! PLANNED ─► RUNNING ─► MAINTENANCE ─► COMPLETED        BLOCKED, PLANNED, RUNNING ─► CANCELLED
//!               └─────► FAILED
//! ```
//!
//! A running job moves its VMs, then waits until the host's own agent says that it is empty. At the
//! first failure nothing more is begun, what is under way is taken back where that is possible and
//! else driven to its end, and the host stays cordoned: opening it is the operator's word. A
//! completed job is over for everyone else; it may still be bringing VMs back.
//!
//! | phase | it is true that | still owed |
//! |---|---|---|
//! | `Planned`, `Blocked` | nothing was touched | – |
//! | `Running` | the host is cordoned; VMs leave it | begin the next, up to the limit |
//! | `Verifying` | every VM has left | ask the agent whether its host is empty |
//! | `Stopping` | nothing more is begun | take back what is under way, see it end |
//! | `Maintenance` | the agent said that its host is empty | – |
//! | `Completed` | the host takes placements again | bring back what was asked for |
//! | `Failed` | the host is as it was left, and cordoned | a human |
//! | `Cancelled` | the cordon is as it was before the job | – |

mod event;
mod owed;
mod progress;
mod read;
mod table;

pub use event::{Event, Returning};
pub use owed::{Books, Cordoned, Effect};
pub use progress::{Crossed, Progress, progress};
pub use read::{Facts, Step, VERIFY_LIMIT, read, step};

use vmferry_types::{Generation, HostId, JobId, MigrationId, Timestamp, VmId};

use super::emptiness::Emptiness;
use super::policy::{Policy, Refusal, Unplaced};
use crate::fleet::Demand;
use crate::maintenance::{Mode, Plan, Workload};

/// One host that is to be emptied for an operator's work on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Job {
    /// Names the job.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub id: JobId,
    /// The host.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub host: HostId,
    /// How it may be emptied.
    pub policy: Policy,
    /// Who asked.
    pub by: String,
    /// When.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub opened: Timestamp,
    /// The VMs that are to leave, in the order in which they were placed.
    pub moves: Vec<Move>,
    /// The VMs that cannot.
    pub unplaced: Vec<Unplaced>,
    /// How far it has come.
    pub phase: Phase,
}

/// One VM that a job moves.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Move {
    /// The VM.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub vm: VmId,
    /// What it takes.
    pub demand: Demand,
    /// How it is carried.
    pub mode: Mode,
    /// Where the plan puts it.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub planned: HostId,
    /// How far it is.
    pub state: MoveState,
}

/// How far one move of a job is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "state")
)]
pub enum MoveState {
    /// Its turn has not come.
    Waiting,
    /// Its migration is open.
    Begun {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// Its migration was asked to go back; it may be too late for that.
    Cancelling {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// It is elsewhere.
    Moved {
        /// By which migration.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
        /// Where.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// The generation under which it arrived: who moves it later takes the next.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// It was no longer on the host when its turn came.
    Left {
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// It did not move.
    Failed {
        /// By which migration. `None` if none was opened.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text_option", default))]
        migration: Option<MigrationId>,
        /// Why, in the words of what went wrong.
        error: String,
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// It was taken back with the job.
    Cancelled {
        /// Which migration.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// The job ended before its turn came.
    NotBegun,
}

impl MoveState {
    /// Returns the one spelling of this state.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Begun { .. } => "running",
            Self::Cancelling { .. } => "cancelling",
            Self::Moved { .. } => "done",
            Self::Left { .. } => "left",
            Self::Failed { .. } => "failed",
            Self::Cancelled { .. } => "cancelled",
            Self::NotBegun => "not_begun",
        }
    }

    /// Returns the migration that is open.
    #[must_use]
    pub const fn open(&self) -> Option<MigrationId> {
        match self {
            Self::Begun { migration } | Self::Cancelling { migration } => Some(*migration),
            Self::Waiting
            | Self::Moved { .. }
            | Self::Left { .. }
            | Self::Failed { .. }
            | Self::Cancelled { .. }
            | Self::NotBegun => None,
        }
    }
}

/// Why a job begins nothing more.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Stop {
    /// Something failed: the first, in its own words.
    Failure {
        /// What it said.
        error: String,
    },
    /// The host is proven dead.
    Died {
        /// How that is known, and what had failed before.
        error: String,
    },
    /// It was asked for.
    Asked {
        /// By whom.
        by: String,
    },
}

/// Why a job was cancelled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Cancelled {
    /// It was asked for.
    Asked {
        /// By whom.
        by: String,
    },
    /// The host was planned anew before this plan was carried out.
    Superseded {
        /// By which job.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        by: JobId,
    },
}

/// One VM that a completed job is asked to bring back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Return {
    /// The VM.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub vm: VmId,
    /// Where this job had put it.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub from: HostId,
    /// The generation under which it arrived there. Another one says that somebody moved it since.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub generation: Generation,
    /// How it is carried.
    pub mode: Mode,
    /// How far it is.
    pub state: ReturnState,
}

/// How far one return is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "state")
)]
pub enum ReturnState {
    /// Its turn has not come.
    Waiting,
    /// Its migration is open.
    Begun {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// It is back.
    Returned {
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// It stays where it is.
    Stays {
        /// Why.
        reason: String,
        /// When that was known.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
}

/// How far a job has come.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "phase")
)]
pub enum Phase {
    /// Every VM has a place.
    Planned,
    /// At least one has none: the plan is never carried out.
    Blocked,
    /// VMs leave.
    Running,
    /// All have left.
    Verifying {
        /// When the last one had, or the job began if there was none.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        since: Timestamp,
    },
    /// Nothing more is begun; something is still under way.
    Stopping {
        /// Why.
        why: Stop,
    },
    /// The host is empty.
    Maintenance {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        since: Timestamp,
        /// How that is known.
        proof: Emptiness,
    },
    /// The host is back in service.
    Completed {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// What was asked to come back.
        back: Vec<Return>,
    },
    /// The host was not emptied, or not seen empty.
    Failed {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// Why: the first failure's own words, and what came after.
        error: String,
    },
    /// It was given up before it was over.
    Cancelled {
        /// Since when.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// Why.
        why: Cancelled,
    },
}

/// What users are told of a job's phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Label {
    /// It can be carried out.
    Planned,
    /// It cannot.
    Blocked,
    /// It is being carried out.
    Running,
    /// The host is empty and out of service.
    Maintenance,
    /// The host is back.
    Completed,
    /// It failed.
    Failed,
    /// It was given up.
    Cancelled,
}

impl Label {
    /// Every label.
    pub const ALL: &'static [Self] = &[
        Self::Planned,
        Self::Blocked,
        Self::Running,
        Self::Maintenance,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Planned => "PLANNED",
            Self::Blocked => "BLOCKED",
            Self::Running => "RUNNING",
            Self::Maintenance => "MAINTENANCE",
            Self::Completed => "COMPLETED",
            Self::Failed => "FAILED",
            Self::Cancelled => "CANCELLED",
        }
    }
}

impl Job {
    /// Opens a job: what a plan found, and nothing touched.
    ///
    /// `workloads` are those that were planned; they say what each VM takes.
    #[must_use]
    pub fn open(opening: Opening, plan: &Plan, workloads: &[Workload]) -> Self {
        let Opening { id, host, policy, by, at } = opening;
        let demand = |vm| {
            let asked = workloads.iter().find(|workload| workload.vm == vm);
            asked.map(|workload| workload.demand).unwrap_or_default()
        };
        let moves = plan.assignments.iter().map(|assignment| Move {
            vm: assignment.vm,
            demand: demand(assignment.vm),
            mode: assignment.mode,
            planned: assignment.destination.clone(),
            state: MoveState::Waiting,
        });
        let unplaced: Vec<Unplaced> = plan.blocked.iter().map(Unplaced::of).collect();
        let phase = if unplaced.is_empty() { Phase::Planned } else { Phase::Blocked };
        let moves = moves.collect();
        Self { id, host, policy, by, opened: at, moves, unplaced, phase }
    }

    /// Returns the job after `event`.
    ///
    /// # Errors
    ///
    /// Says whether the event is stale (drop it), illegal (a bug: count it) or a request that
    /// cannot be granted (tell the caller). The job is as it was.
    pub fn apply(&self, event: &Event) -> Result<Self, Refusal> {
        table::next(self, event)
    }

    /// Returns the phase as users are told it.
    #[must_use]
    pub const fn label(&self) -> Label {
        match self.phase {
            Phase::Planned => Label::Planned,
            Phase::Blocked => Label::Blocked,
            Phase::Running | Phase::Verifying { .. } | Phase::Stopping { .. } => Label::Running,
            Phase::Maintenance { .. } => Label::Maintenance,
            Phase::Completed { .. } => Label::Completed,
            Phase::Failed { .. } => Label::Failed,
            Phase::Cancelled { .. } => Label::Cancelled,
        }
    }

    /// Returns how the host stands to this job: whether another one may be asked for.
    #[must_use]
    pub fn hold(&self) -> Hold {
        match &self.phase {
            Phase::Planned | Phase::Blocked => Hold::Plan,
            Phase::Running | Phase::Verifying { .. } | Phase::Stopping { .. } => Hold::Emptying,
            Phase::Maintenance { .. } => Hold::Maintenance,
            Phase::Completed { back, .. } if back.iter().any(Return::is_open) => Hold::Returning,
            Phase::Completed { .. } | Phase::Failed { .. } | Phase::Cancelled { .. } => Hold::Over,
        }
    }

    /// Returns the migrations that are open.
    pub fn open_migrations(&self) -> impl Iterator<Item = (VmId, MigrationId)> + '_ {
        let leaving = self.moves.iter().filter_map(|one| Some((one.vm, one.state.open()?)));
        let back = match &self.phase {
            Phase::Completed { back, .. } => back.as_slice(),
            Phase::Planned
            | Phase::Blocked
            | Phase::Running
            | Phase::Verifying { .. }
            | Phase::Stopping { .. }
            | Phase::Maintenance { .. }
            | Phase::Failed { .. }
            | Phase::Cancelled { .. } => &[],
        };
        leaving.chain(back.iter().filter_map(|one| match one.state {
            ReturnState::Begun { migration } => Some((one.vm, migration)),
            ReturnState::Waiting | ReturnState::Returned { .. } | ReturnState::Stays { .. } => None,
        }))
    }
}

impl Return {
    /// Says whether something is still owed for it.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        match self.state {
            ReturnState::Waiting | ReturnState::Begun { .. } => true,
            ReturnState::Returned { .. } | ReturnState::Stays { .. } => false,
        }
    }
}

/// What a job has of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// A plan, which touches nothing: a newer one takes its place.
    Plan,
    /// It is emptying it.
    Emptying,
    /// It is in maintenance.
    Maintenance,
    /// It is back in service, and VMs are coming back.
    Returning,
    /// Nothing.
    Over,
}

/// What a new job is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Names the job.
    pub id: JobId,
    /// The host.
    pub host: HostId,
    /// How it may be emptied.
    pub policy: Policy,
    /// Who asks.
    pub by: String,
    /// When.
    pub at: Timestamp,
}

#[cfg(test)]
pub(in crate::lifecycle) mod tests;
