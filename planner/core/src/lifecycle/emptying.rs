//! Maintenance jobs, drains and retirements as one kind of thing: what empties a host.
//!
//! Whoever stores and drives them need not tell them apart: a row, its events, the cordon that it
//! holds, and what its host is to everyone else meanwhile.

use std::fmt;

use vmferry_types::{DrainId, HostId, JobId, MigrationId, VmId};

use super::cordon::Owner;
use super::drain::{self, Drain, Goal};
use super::job::{self, Cordoned, Job, MoveState};
use super::policy::{Policy, Refusal};
use crate::fleet::Lifecycle;
use crate::queue::Priority;

/// What empties a host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Emptying {
    /// A maintenance job.
    Job(Job),
    /// A drain or a retirement.
    Drain(Drain),
}

/// Names what empties a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EmptyingId {
    /// A maintenance job.
    Job(JobId),
    /// A drain or a retirement.
    Drain(DrainId),
}

impl EmptyingId {
    /// Returns the number behind the id; no two things in a store share one.
    #[must_use]
    pub const fn as_u128(self) -> u128 {
        match self {
            Self::Job(id) => id.as_u128(),
            Self::Drain(id) => id.as_u128(),
        }
    }

    /// Returns whose cordon it is.
    #[must_use]
    pub const fn owner(self) -> Owner {
        match self {
            Self::Job(id) => Owner::Job(id),
            Self::Drain(id) => Owner::Drain(id),
        }
    }
}

impl fmt::Display for EmptyingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(id) => id.fmt(f),
            Self::Drain(id) => id.fmt(f),
        }
    }
}

/// What kind of emptying it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A maintenance job.
    Maintenance,
    /// A drain.
    Drain,
    /// A retirement.
    Retire,
}

impl Kind {
    /// Every kind.
    pub const ALL: &'static [Self] = &[Self::Maintenance, Self::Drain, Self::Retire];

    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Maintenance => "maintenance",
            Self::Drain => "drain",
            Self::Retire => "retire",
        }
    }

    /// Reads a label; `None` if there is no such kind.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.label() == label)
    }

    /// Returns for whose sake its migrations wait.
    #[must_use]
    pub const fn priority(self) -> Priority {
        match self {
            Self::Maintenance => Priority::Maintenance,
            Self::Drain | Self::Retire => Priority::Drain,
        }
    }
}

/// What happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum EmptyingEvent {
    /// To a maintenance job.
    Job(job::Event),
    /// To a drain or a retirement.
    Drain(drain::Event),
}

impl EmptyingEvent {
    /// Returns the one spelling of this event.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Job(event) => event.label(),
            Self::Drain(event) => event.label(),
        }
    }
}

impl Emptying {
    /// Returns its id.
    #[must_use]
    pub const fn id(&self) -> EmptyingId {
        match self {
            Self::Job(job) => EmptyingId::Job(job.id),
            Self::Drain(drain) => EmptyingId::Drain(drain.id),
        }
    }

    /// Returns its kind.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Job(_) => Kind::Maintenance,
            Self::Drain(drain) => match drain.goal {
                Goal::Drain => Kind::Drain,
                Goal::Retire => Kind::Retire,
            },
        }
    }

    /// Returns the host that it empties.
    #[must_use]
    pub const fn host(&self) -> &HostId {
        match self {
            Self::Job(job) => &job.host,
            Self::Drain(drain) => &drain.host,
        }
    }

    /// Returns how its host may be emptied.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        match self {
            Self::Job(job) => &job.policy,
            Self::Drain(drain) => &drain.policy,
        }
    }

    /// Returns who asked for it.
    #[must_use]
    pub fn by(&self) -> &str {
        match self {
            Self::Job(job) => &job.by,
            Self::Drain(drain) => &drain.by,
        }
    }

    /// Returns its phase as users are told it.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Job(job) => job.label().label(),
            Self::Drain(drain) => drain.phase.label(),
        }
    }

    /// Returns it after `event`.
    ///
    /// # Errors
    ///
    /// As the machine that it is; an event of the other kind is illegal.
    pub fn apply(&self, event: &EmptyingEvent) -> Result<Self, Refusal> {
        match (self, event) {
            (Self::Job(job), EmptyingEvent::Job(event)) => job.apply(event).map(Self::Job),
            (Self::Drain(drain), EmptyingEvent::Drain(event)) => {
                drain.apply(event).map(Self::Drain)
            }
            (Self::Job(_), EmptyingEvent::Drain(_)) | (Self::Drain(_), EmptyingEvent::Job(_)) => {
                Err(Refusal::Illegal)
            }
        }
    }

    /// Returns what becomes of its cordon.
    #[must_use]
    pub const fn cordon(&self) -> Cordoned {
        match self {
            Self::Job(job) => job.books().cordon,
            Self::Drain(drain) => drain.books().cordon,
        }
    }

    /// Returns what its host is to everyone else for its sake.
    #[must_use]
    pub const fn lifecycle(&self) -> Lifecycle {
        match self {
            Self::Job(job) => job.books().lifecycle,
            Self::Drain(drain) => drain.books().lifecycle,
        }
    }

    /// Returns why its host is cordoned, for people.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Job(job) => format!("maintenance asked for by {}", job.by),
            Self::Drain(drain) => match drain.goal {
                Goal::Drain => format!("drain asked for by {}", drain.by),
                Goal::Retire => format!("retirement asked for by {}", drain.by),
            },
        }
    }

    /// Returns its migrations that are open.
    #[must_use]
    pub fn open_migrations(&self) -> Vec<(VmId, MigrationId)> {
        match self {
            Self::Job(job) => job.open_migrations().collect(),
            Self::Drain(drain) => drain.open_migrations().collect(),
        }
    }

    /// Says whether it has to be driven: something is owed, under way, or to be kept so.
    #[must_use]
    pub fn is_driven(&self) -> bool {
        match self {
            Self::Job(job) => match job.hold() {
                job::Hold::Emptying | job::Hold::Returning => true,
                job::Hold::Plan | job::Hold::Maintenance | job::Hold::Over => {
                    job.open_migrations().next().is_some()
                }
            },
            Self::Drain(drain) => match drain.hold() {
                drain::Hold::Draining => true,
                drain::Hold::Retired | drain::Hold::Over => !drain.is_settled(),
            },
        }
    }

    /// Says whether nothing more will become of it, by anybody's word.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let held = match self {
            Self::Job(job) => job.hold() != job::Hold::Over,
            Self::Drain(drain) => drain.hold() != drain::Hold::Over,
        };
        !held && !self.is_driven()
    }

    /// Returns the states of those of a kind that are not over.
    #[must_use]
    pub const fn open_labels(kind: Kind) -> &'static [&'static str] {
        match kind {
            Kind::Maintenance => &["PLANNED", "BLOCKED", "RUNNING", "MAINTENANCE", "COMPLETED"],
            Kind::Drain => &["EMPTYING", "EMPTY", "CANCELLED"],
            Kind::Retire => &["EMPTYING", "EMPTY", "GRANTED", "CANCELLED"],
        }
    }

    /// Counts the VMs that have yet to leave. A plan that nobody carries out empties nothing.
    #[must_use]
    pub fn still_there(&self) -> StillThere {
        match self {
            Self::Job(job) => StillThere {
                left: match job.hold() {
                    job::Hold::Emptying => {
                        job.moves.iter().filter(|one| is_there(&one.state)).count()
                    }
                    job::Hold::Plan
                    | job::Hold::Maintenance
                    | job::Hold::Returning
                    | job::Hold::Over => 0,
                },
                // One that has a VM without a place is never begun.
                blocked: match job.phase {
                    job::Phase::Blocked => job.unplaced.len(),
                    job::Phase::Planned
                    | job::Phase::Running
                    | job::Phase::Verifying { .. }
                    | job::Phase::Stopping { .. }
                    | job::Phase::Maintenance { .. }
                    | job::Phase::Completed { .. }
                    | job::Phase::Failed { .. }
                    | job::Phase::Cancelled { .. } => 0,
                },
            },
            Self::Drain(drain) => match drain.hold() {
                drain::Hold::Draining => StillThere {
                    left: drain.residents.len(),
                    blocked: drain.residents.iter().filter(|one| one.state.is_blocked()).count(),
                },
                drain::Hold::Retired | drain::Hold::Over => StillThere::default(),
            },
        }
    }

    /// Returns the migrations that it ever began, as far as the row still knows.
    #[must_use]
    pub fn migrations(&self) -> Vec<MigrationId> {
        match self {
            Self::Job(job) => job.moves.iter().filter_map(|one| of_move(&one.state)).collect(),
            Self::Drain(drain) => drain.open_migrations().map(|(_, id)| id).collect(),
        }
    }
}

/// How many VMs have yet to leave a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StillThere {
    /// All of them.
    pub left: usize,
    /// Those that have no place to go.
    pub blocked: usize,
}

const fn is_there(state: &MoveState) -> bool {
    match state {
        MoveState::Waiting | MoveState::Begun { .. } | MoveState::Cancelling { .. } => true,
        MoveState::Moved { .. }
        | MoveState::Left { .. }
        | MoveState::Failed { .. }
        | MoveState::Cancelled { .. }
        | MoveState::NotBegun => false,
    }
}

const fn of_move(state: &MoveState) -> Option<MigrationId> {
    match state {
        MoveState::Begun { migration }
        | MoveState::Cancelling { migration }
        | MoveState::Moved { migration, .. }
        | MoveState::Cancelled { migration, .. } => Some(*migration),
        MoveState::Failed { migration, .. } => *migration,
        MoveState::Waiting | MoveState::Left { .. } | MoveState::NotBegun => None,
    }
}
