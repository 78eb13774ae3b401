//! What can happen to a drain.

use vmferry_types::{MigrationId, Timestamp, VmId};

use crate::lifecycle::emptiness::Emptiness;
use crate::lifecycle::{Ended, Unplaced};

/// What happened to a drain. Facts are levels: the same may be told twice or late.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "event")
)]
pub enum Event {
    /// A VM is on the host that was not known to be.
    Appeared {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// A VM is not on the host any more, and the drain did not move it.
    Left {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// A VM has no place to go.
    Blocked {
        /// Which, and why.
        why: Unplaced,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// A VM that had none has a place again.
    Unblocked {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
    },
    /// A migration was opened, in the transaction that commits this.
    Begun {
        /// Of which VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// The new migration.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        migration: MigrationId,
    },
    /// None was opened: it was refused.
    NotBegun {
        /// Of which VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        vm: VmId,
        /// Why.
        error: String,
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
    /// The agent says that its host is empty.
    FoundEmpty {
        /// How that is known.
        proof: Emptiness,
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// The agent does not say so any more, though no VM that is known is there.
    FoundNotEmpty {
        /// When.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
    },
    /// Someone asked to take the host back into service.
    CancelRequested {
        /// Who.
        by: String,
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
}

impl Event {
    /// Returns the one spelling of this event.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Appeared { .. } => "appeared",
            Self::Left { .. } => "left",
            Self::Blocked { .. } => "blocked",
            Self::Unblocked { .. } => "unblocked",
            Self::Begun { .. } => "begun",
            Self::NotBegun { .. } => "not_begun",
            Self::CancelAsked { .. } => "cancel_asked",
            Self::MigrationEnded { .. } => "migration_ended",
            Self::FoundEmpty { .. } => "found_empty",
            Self::FoundNotEmpty { .. } => "found_not_empty",
            Self::CancelRequested { .. } => "cancel_requested",
            Self::HostDied { .. } => "host_died",
        }
    }
}
