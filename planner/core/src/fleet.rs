//! One immutable snapshot of all hosts: what operators want of them, and what was last seen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vmferry_types::{Bytes, HostId, MilliCpu, Millis, Percent, Role, Timestamp, VmId};

/// What placement may count on, and how old a report may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Share of a host's memory that is kept for what is not VMs.
    pub reserve_memory: Percent,
    /// Share of a host's CPU that is kept for what is not VMs.
    pub reserve_cpu: Percent,
    /// vCPUs that may be promised for each hundred that there are; 100 is no overcommit.
    pub cpu_overcommit_percent: u32,
    /// Past this age a report proves nothing.
    pub report_max_age: Millis,
    /// How many migrations may be on their way to one host.
    pub inbound_max: u32,
    /// How many migrations may be on their way from one host.
    pub outbound_max: u32,
}

/// What a VM takes of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Demand {
    /// Memory, its ceiling and QEMU's own part included.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub memory: Bytes,
    /// vCPUs.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub cpu: MilliCpu,
}

impl Demand {
    /// Returns what a VM has to be given: the worse of what it may use and what it was seen to use.
    #[must_use]
    pub fn of(configured: Bytes, observed: Bytes, cpu: MilliCpu) -> Self {
        Self { memory: configured.max(observed), cpu }
    }

    /// Returns both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self { memory: self.memory.plus(other.memory), cpu: self.cpu.plus(other.cpu) }
    }

    /// Returns the worse of both, figure by figure.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), cpu: self.cpu.max(other.cpu) }
    }
}

/// What a host reports of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmUse {
    /// What it has of the VM. One without a QEMU process takes no memory.
    pub role: Role,
    /// What the VM may use.
    pub configured: Bytes,
    /// What it was seen to use.
    pub observed: Bytes,
    /// Its vCPUs.
    pub cpu: MilliCpu,
}

/// Someone's word that a host takes no placements.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cordon {
    /// Whose word it is.
    pub owner: String,
    /// Why.
    pub reason: String,
}

/// Where a host is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lifecycle {
    /// It takes part.
    Active,
    /// It is being emptied.
    Draining,
    /// It is in maintenance.
    Maintenance,
    /// It is retired.
    Retired,
}

impl Lifecycle {
    /// Every stage.
    pub const ALL: &'static [Self] =
        &[Self::Active, Self::Draining, Self::Maintenance, Self::Retired];

    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Maintenance => "maintenance",
            Self::Retired => "retired",
        }
    }

    /// Reads a label; `None` if there is no such stage.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.label() == label)
    }
}

/// What operators want of a host. Agents have no say in any of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    /// The cluster that it belongs to.
    pub cluster: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Those who hold it cordoned.
    pub cordons: BTreeSet<Cordon>,
    /// Where it is in its life.
    pub lifecycle: Lifecycle,
}

/// Whether a host's agent is heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// It is.
    Connected,
    /// It is, and has not finished to learn what runs on its host.
    Learning,
    /// It is not.
    Disconnected,
}

/// What QEMU on a host can carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// The processor's architecture; empty if unsaid.
    pub architecture: String,
    /// Accelerators.
    pub accelerators: BTreeSet<String>,
    /// Machine types, versioned.
    pub machine_types: BTreeSet<String>,
    /// CPU models.
    pub cpu_models: BTreeSet<String>,
    /// Bridges.
    pub bridges: BTreeSet<String>,
    /// QEMU's version; empty if unsaid.
    pub qemu_version: String,
    /// Folders that it shares with other hosts. `None` if unsaid.
    pub shared_paths: Option<BTreeSet<String>>,
}

/// What a host last said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// When it arrived, by the planner's clock.
    pub at: Timestamp,
    /// Why it proves nothing, by the agent's own word. `None` if its journal is whole.
    pub unreadable: Option<String>,
    /// The host's memory.
    pub total_memory: Bytes,
    /// What of it is available.
    pub available_memory: Bytes,
    /// The host's CPU.
    pub total_cpu: MilliCpu,
    /// Its VMs. `None` if it could not list them.
    pub vms: Option<BTreeMap<VmId, VmUse>>,
    /// What its QEMU can carry. Shared: hosts of one kind say the same.
    pub capabilities: Arc<Capabilities>,
}

/// One host in the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its id.
    pub id: HostId,
    /// What operators want of it.
    pub policy: HostPolicy,
    /// Whether its agent is heard.
    pub availability: Availability,
    /// What it last said. `None` until it first did: a host that never spoke is not one gone quiet.
    ///
    /// Shared, so that a snapshot of many hosts costs no copy of their VMs.
    pub report: Option<Arc<Report>>,
    /// What is held on it, by VM: migrations on their way, starts, and VMs not reported yet.
    pub reservations: BTreeMap<VmId, Demand>,
    /// How many migrations are on their way to it.
    pub inbound: u32,
    /// How many migrations are on their way from it.
    pub outbound: u32,
}

/// All hosts at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// The planner's clock.
    pub now: Timestamp,
    /// What placement may count on.
    pub policy: Policy,
    /// The hosts.
    pub hosts: BTreeMap<HostId, Host>,
}

impl Fleet {
    /// Returns every host that has promised more than it has, with what is missing.
    ///
    /// For tests and for doctors: placement alone never brings a host here, a report may.
    #[must_use]
    pub fn check(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        for host in self.hosts.values() {
            let Ok(figures) = crate::capacity::figures(host, &self.policy) else { continue };
            let limit = figures.total_memory.less(figures.reserve_memory);
            if figures.committed_memory > limit {
                violations.push(Violation::MemoryPromisedTwice {
                    host: host.id.clone(),
                    by: figures.committed_memory.less(limit),
                });
            }
            let limit = figures.usable_cpu;
            if figures.committed_cpu > limit {
                violations.push(Violation::CpuPromisedTwice {
                    host: host.id.clone(),
                    by: figures.committed_cpu.less(limit),
                });
            }
        }
        violations
    }
}

/// A host above its capacity (invariant I3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// More memory is promised than may be.
    MemoryPromisedTwice {
        /// Where.
        host: HostId,
        /// How much too much.
        by: Bytes,
    },
    /// More CPU is promised than may be.
    CpuPromisedTwice {
        /// Where.
        host: HostId,
        /// How much too much.
        by: MilliCpu,
    },
}
