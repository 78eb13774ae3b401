//! The use cases, with one error type. Edges decode, call these, and encode.

mod capacity;
mod doctor;
mod hosts;
mod lifecycle;
mod limits;
mod migrate;
mod native;
mod power;
mod read;
mod resolve;

use vmferry_planner_core::lifecycle::request::Denied;
use vmferry_planner_core::migration::{Blocker, Refusal};
use vmferry_types::{HostId, MigrationId, VmId};

use crate::agents::AgentError;
use crate::store::{MigrationRow, Refused, StoreError};

/// Says why a use case did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// There is no such thing.
    #[error("there is no {kind} `{name}`")]
    NotFound {
        /// What kind of thing.
        kind: &'static str,
        /// The name or id that was given.
        name: String,
    },
    /// Several VMs have the name.
    #[error("`{name}` names {count} VMs; use the id")]
    Ambiguous {
        /// The name.
        name: String,
        /// How many.
        count: usize,
    },
    /// A field cannot be used.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// Something is in the way: all of it is named.
    #[error("{}", list(.blockers))]
    Blocked {
        /// All reasons.
        blockers: Vec<Blocker>,
    },
    /// The store did not admit it.
    #[error(transparent)]
    NotAdmitted(#[from] Refused),
    /// The name or id is taken.
    #[error("the {field} `{value}` belongs to the VM {vm}")]
    Taken {
        /// Which of the two.
        field: &'static str,
        /// Its value.
        value: String,
        /// Whose it is.
        vm: VmId,
    },
    /// It came too late.
    #[error("migration {migration} is {phase}: {refusal}")]
    TooLate {
        /// The migration.
        migration: MigrationId,
        /// Its phase.
        phase: vmferry_types::PhaseLabel,
        /// Why.
        refusal: Refusal,
    },
    /// A gate was to be opened that is not waited at.
    #[error("migration {migration}: {why}")]
    NotAtGate {
        /// The migration.
        migration: MigrationId,
        /// Where it is instead.
        why: String,
    },
    /// A start or stop failed; the VM is as it was.
    #[error("{what} of VM {vm} failed: {error}")]
    Failed {
        /// Which of the two.
        what: &'static str,
        /// The VM.
        vm: String,
        /// The real text.
        error: String,
    },
    /// Something else has the host: it is named.
    #[error(transparent)]
    HostHeld(#[from] Denied),
    /// A job or drain is in a phase that does not allow it.
    #[error("{kind} {id} is {phase}: it cannot {what} now")]
    NotInPhase {
        /// What was asked.
        what: &'static str,
        /// What kind of emptying it is.
        kind: &'static str,
        /// Its id.
        id: String,
        /// Its phase.
        phase: &'static str,
    },
    /// The fence command proved nothing.
    #[error(
        "the fence command for host {host} failed, which proves nothing: {how}{}",
        printed(.output)
    )]
    FenceFailed {
        /// The host.
        host: HostId,
        /// How it ended.
        how: String,
        /// The last of what it printed.
        output: String,
    },
    /// An agent did not do what was needed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Writes what a command printed, after how it ended.
fn printed(output: &str) -> String {
    if output.is_empty() { String::new() } else { format!("; it printed: {output}") }
}

fn list(blockers: &[Blocker]) -> String {
    match blockers {
        [] => "it was refused without a reason".to_owned(),
        [one] => one.message.clone(),
        [first, ..] => {
            format!("{} reasons are in the way; the first: {}", blockers.len(), first.message)
        }
    }
}

/// What kind of failure it is, for an edge to say in its dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request cannot be used.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// The state of things does not allow it.
    Conflict,
    /// No room.
    Capacity,
    /// Someone did not answer.
    Unavailable,
    /// Ours.
    Internal,
}

impl ApiError {
    /// Returns the stable code, for programs.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Ambiguous { .. } => "ambiguous",
            Self::Invalid { .. } => "invalid",
            Self::Blocked { .. } => "blocked",
            Self::NotAdmitted(refused) => refused_code(refused),
            Self::Taken { .. } => "taken",
            Self::TooLate { .. } => "too_late",
            Self::NotAtGate { .. } => "not_at_gate",
            Self::Failed { .. } => "failed",
            Self::HostHeld(denied) => denied.code(),
            Self::NotInPhase { .. } => "not_in_phase",
            Self::FenceFailed { .. } => "fence_failed",
            Self::Agent(AgentError::Unreachable { .. }) => "not_connected",
            Self::Agent(AgentError::Refused { detail, .. }) => {
                if detail.code.is_empty() {
                    "refused"
                } else {
                    &detail.code
                }
            }
            Self::Store(_) => "internal",
        }
    }

    /// Returns what kind of failure it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::NotFound { .. } => Kind::NotFound,
            Self::Ambiguous { .. } | Self::Invalid { .. } => Kind::Invalid,
            Self::Blocked { .. }
            | Self::Taken { .. }
            | Self::TooLate { .. }
            | Self::NotAtGate { .. }
            | Self::Failed { .. }
            | Self::HostHeld(_)
            | Self::NotInPhase { .. }
            | Self::FenceFailed { .. }
            | Self::Agent(AgentError::Refused { .. }) => Kind::Conflict,
            Self::NotAdmitted(refused) if refused.is_transient() => Kind::Capacity,
            Self::NotAdmitted(_) => Kind::Conflict,
            Self::Agent(AgentError::Unreachable { .. }) => Kind::Unavailable,
            Self::Store(_) => Kind::Internal,
        }
    }

    /// Returns the field that is wrong; empty if it is none.
    #[must_use]
    pub const fn field(&self) -> &str {
        match self {
            Self::Invalid { field, .. } => field,
            Self::NotFound { .. }
            | Self::Ambiguous { .. }
            | Self::Blocked { .. }
            | Self::NotAdmitted(_)
            | Self::Taken { .. }
            | Self::TooLate { .. }
            | Self::NotAtGate { .. }
            | Self::Failed { .. }
            | Self::HostHeld(_)
            | Self::NotInPhase { .. }
            | Self::FenceFailed { .. }
            | Self::Agent(_)
            | Self::Store(_) => "",
        }
    }

    /// Returns all reasons.
    #[must_use]
    pub fn blockers(&self) -> &[Blocker] {
        match self {
            Self::Blocked { blockers } => blockers,
            Self::NotFound { .. }
            | Self::Ambiguous { .. }
            | Self::Invalid { .. }
            | Self::NotAdmitted(_)
            | Self::Taken { .. }
            | Self::TooLate { .. }
            | Self::NotAtGate { .. }
            | Self::Failed { .. }
            | Self::HostHeld(_)
            | Self::NotInPhase { .. }
            | Self::FenceFailed { .. }
            | Self::Agent(_)
            | Self::Store(_) => &[],
        }
    }
}

fn refused_code(refused: &Refused) -> &'static str {
    match refused {
        Refused::UnknownVm => "not_found",
        Refused::InFlight { .. } => "migration_open",
        Refused::Power { .. } => "vm_not_running",
        Refused::Moved { .. } => "moved",
        Refused::Cordoned { .. } => "cordoned",
        Refused::InboundCap { .. } => "inbound_cap",
        Refused::OwnLimit { .. } => "max_parallel",
        Refused::Pinned { .. } => "pinned",
        Refused::NoRoom { .. } => "no_room",
    }
}

/// Reads the id of a migration.
fn migration_id(text: &str) -> Result<MigrationId, ApiError> {
    text.parse().map_err(|_| ApiError::NotFound { kind: "migration", name: text.to_owned() })
}

/// Says that a migration is past what was asked.
fn too_late(row: &MigrationRow, refusal: Refusal) -> ApiError {
    ApiError::TooLate { migration: row.migration.id, phase: row.migration.label(), refusal }
}
