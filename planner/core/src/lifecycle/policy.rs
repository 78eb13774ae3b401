//! What jobs and drains share: how VMs may be carried, and how a migration of theirs ended.

use std::num::NonZeroU32;
use std::sync::Arc;

use vmferry_types::{Generation, HostId, Percent, VmId};

use crate::maintenance::{Blocked, Code, Crossing, Order, PinsToSource, Strategy};
use crate::migration::Blocker;
use crate::placement::Rejected;

/// How a host may be emptied. Its JSON form is the one that operators write.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
pub struct Policy {
    /// How VMs may be carried.
    pub strategy: Strategy,
    /// How many of its migrations may be open at once.
    pub max_parallel: NonZeroU32,
    /// Share of each destination's CPU that is left free.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::percent"))]
    pub reserve_cpu_percent: Percent,
    /// Share of each destination's memory that is left free.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::percent"))]
    pub reserve_memory_percent: Percent,
    /// Whether VMs may leave their cluster.
    #[cfg_attr(feature = "serde", serde(rename = "allow_cross_cluster", with = "crossing"))]
    pub crossing: Crossing,
    /// Whether VMs that are pinned to the host may leave it.
    #[cfg_attr(feature = "serde", serde(rename = "allow_pinned", with = "pins"))]
    pub pins: PinsToSource,
    /// Only plan.
    pub dry_run: bool,
}

impl Policy {
    /// Returns the order to plan by.
    #[must_use]
    pub fn order(&self, source: &HostId) -> Order {
        Order {
            source: source.clone(),
            strategy: self.strategy,
            crossing: self.crossing,
            pins: self.pins,
        }
    }
}

/// Says why an event does not change a job or a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is late or known already: dropped.
    #[error("the event is late or known already")]
    Stale,
    /// It cannot happen here: a bug, counted.
    #[error("the event cannot happen in this phase")]
    Illegal,
    /// It was a request, and cannot be granted in this phase: the caller is told.
    #[error("that cannot be done in this phase")]
    Denied,
}

/// How a migration ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Ended {
    /// The VM is elsewhere.
    Moved {
        /// Where.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// The generation under which it runs there.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
    },
    /// It was taken back because somebody asked.
    Cancelled,
    /// It was not moved, or is lost.
    Failed {
        /// The real error text.
        error: String,
    },
}

/// A VM that a plan found no place for, as it is kept in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Unplaced {
    /// The VM.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub vm: VmId,
    /// The first reason, in the published order.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub code: Code,
    /// Every reason of every host, up to [`REASONS_MAX`].
    pub blockers: Vec<Blocker>,
    /// How many more reasons there were.
    pub more: u32,
}

/// How many reasons a row keeps of one VM.
///
/// A thousand hosts give a thousand, mostly the same; the whole matrix is made anew by planning
/// again. Sixty-four name each host of a rack or two.
pub const REASONS_MAX: usize = 64;

impl Unplaced {
    /// Keeps what a plan says of a blocked VM.
    #[must_use]
    pub fn of(blocked: &Blocked) -> Self {
        let (blockers, more) = told(&blocked.rejected);
        Self { vm: blocked.vm, code: blocked.code.clone(), blockers, more }
    }

    /// Says whether another finding means the same: the same code, and the same kinds of reasons on
    /// the same hosts. Figures change with every report and mean nothing new.
    #[must_use]
    pub fn means(&self, other: &Self) -> bool {
        let kinds = |one: &Self| -> Vec<_> {
            one.blockers.iter().map(|b| (b.code.clone(), b.host.clone())).collect()
        };
        self.code == other.code && self.more == other.more && kinds(self) == kinds(other)
    }
}

fn told(rejected: &[Arc<Rejected>]) -> (Vec<Blocker>, u32) {
    let mut all = rejected.iter().flat_map(|one| one.blockers());
    let blockers: Vec<Blocker> = all.by_ref().take(REASONS_MAX).collect();
    (blockers, u32::try_from(all.count()).unwrap_or(u32::MAX))
}

/// Whether VMs may cross: as a yes or no.
#[cfg(feature = "serde")]
mod crossing {
    use serde::{Deserialize as _, Deserializer, Serializer};

    use super::Crossing;

    pub(super) fn serialize<S: Serializer>(
        value: &Crossing,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bool(*value == Crossing::Allowed)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Crossing, D::Error> {
        let allowed = bool::deserialize(deserializer)?;
        Ok(if allowed { Crossing::Allowed } else { Crossing::Refused })
    }
}

/// Whether pins hold: as a yes or no.
#[cfg(feature = "serde")]
mod pins {
    use serde::{Deserialize as _, Deserializer, Serializer};

    use super::PinsToSource;

    pub(super) fn serialize<S: Serializer>(
        value: &PinsToSource,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bool(*value == PinsToSource::MayLeave)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<PinsToSource, D::Error> {
        let allowed = bool::deserialize(deserializer)?;
        Ok(if allowed { PinsToSource::MayLeave } else { PinsToSource::Hold })
    }
}
