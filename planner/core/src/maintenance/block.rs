//! Why one VM cannot leave its host.

use std::fmt;
use std::sync::Arc;

use vmferry_types::{HostId, VmId};

use crate::placement::Rejected;

/// The first reason, in a fixed order, why a VM cannot leave.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "code")
)]
pub enum Code {
    /// The host to be emptied is not connected, or does not exist.
    SourceHostUnavailable,
    /// The VM is not there, or no longer.
    WorkloadNotOnSource,
    /// Only running VMs may be moved, and this one cannot be.
    LiveMigrationRequired {
        /// Why not.
        reason: String,
    },
    /// It is pinned to the host to be emptied.
    PinnedToSource,
    /// The host that it is pinned to takes no placements, or does not exist.
    PinnedTargetUnavailable {
        /// Which.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        pin: HostId,
    },
    /// No host could take it, room or not.
    NoEligibleTarget,
    /// A host could take it, and none has room.
    InsufficientCapacity,
}

impl Code {
    /// Returns the one spelling of this code.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::SourceHostUnavailable => "source_host_unavailable",
            Self::WorkloadNotOnSource => "workload_not_on_source",
            Self::LiveMigrationRequired { .. } => "live_migration_required",
            Self::PinnedToSource => "pinned_to_source",
            Self::PinnedTargetUnavailable { .. } => "pinned_target_unavailable",
            Self::NoEligibleTarget => "no_eligible_target",
            Self::InsufficientCapacity => "insufficient_capacity",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SourceHostUnavailable => {
                f.write_str("the host to be emptied is not connected: bring its agent back first")
            }
            Self::WorkloadNotOnSource => f.write_str("the VM is not on the host to be emptied"),
            Self::LiveMigrationRequired { reason } => {
                write!(f, "the VM cannot move while it runs ({reason}), and may not be stopped")
            }
            Self::PinnedToSource => f.write_str("the VM is pinned to the host to be emptied"),
            Self::PinnedTargetUnavailable { pin } => {
                write!(f, "host {pin}, which the VM is pinned to, cannot take it")
            }
            Self::NoEligibleTarget => f.write_str("no host can take the VM"),
            Self::InsufficientCapacity => f.write_str("no host that can take the VM has room"),
        }
    }
}

/// A VM that cannot leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// The VM.
    pub vm: VmId,
    /// Why.
    pub code: Code,
    /// Every host with all the reasons that ruled it out; empty where no host was looked at.
    pub rejected: Vec<Arc<Rejected>>,
}
