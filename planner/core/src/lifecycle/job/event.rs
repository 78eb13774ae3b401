//! What can happen to a maintenance job.

use vmferry_types::{JobId, MigrationId, Timestamp, VmId};

use crate::lifecycle::Ended;
use crate::lifecycle::emptiness::Emptiness;

/// Whether a completed job brings its VMs back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Returning {
    /// They stay where they are.
    Stay,
    /// Those that this job moved, and nobody since, come back where there is room.
    Return,
}

/// What happened to a job.
///
/// Facts are levels: the same may be told twice, late, or by another planner.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "event")
)]
pub enum Event {
    /// Someone asked to carry the plan out. The store cordons the host in the same transaction.
    ExecuteRequested {
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// Someone asked to give it up.
    CancelRequested {
        /// Who.
        by: String,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// The host was planned anew.
    Superseded {
        /// By which job.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        by: JobId,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// A migration was opened, in the transaction that commits this: a VM leaves, or comes back.
    Begun {
        /// Which VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// The new migration.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// None was opened: it was refused for good.
    NotBegun {
        /// Which VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// Why, all reasons.
        error: String,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// A VM whose turn had not come is not on the host any more; or, on its way back, was moved by
    /// somebody since.
    Left {
        /// Which VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// A migration was asked to go back, whatever it answered.
    CancelAsked {
        /// Of which VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
    },
    /// A migration is over, and all of it cleared away.
    MigrationEnded {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
        /// How.
        how: Ended,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// The host is proven dead.
    HostDied {
        /// How that is known.
        how: String,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// The agent says that its host is empty.
    FoundEmpty {
        /// How that is known.
        proof: Emptiness,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// The agent did not say so in time.
    VerifyExpired {
        /// What is in the way.
        note: String,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// Someone asked to take the host back into service.
    CompleteRequested {
        /// Whether its VMs come back.
        returning: Returning,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
}

impl Event {
    /// Returns the one spelling of this event.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::ExecuteRequested { .. } => "execute_requested",
            Self::CancelRequested { .. } => "cancel_requested",
            Self::Superseded { .. } => "superseded",
            Self::Begun { .. } => "begun",
            Self::NotBegun { .. } => "not_begun",
            Self::Left { .. } => "left",
            Self::CancelAsked { .. } => "cancel_asked",
            Self::MigrationEnded { .. } => "migration_ended",
            Self::HostDied { .. } => "host_died",
            Self::FoundEmpty { .. } => "found_empty",
            Self::VerifyExpired { .. } => "verify_expired",
            Self::CompleteRequested { .. } => "complete_requested",
        }
    }
}
