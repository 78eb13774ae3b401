//! Why a host cannot take a VM.

use std::fmt;

use vmferry_types::{Bytes, HostId, MilliCpu, Millis};

use crate::capacity::Unreadable;
use crate::fleet::Cordon;
use crate::migration::Blocker;

/// How much it would take for a reason to pass, lightest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Others leave.
    Room,
    /// The host is heard again.
    Unreadable,
    /// An operator says so.
    Closed,
    /// It does not pass by waiting.
    Never,
}

/// One reason why a host cannot take a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There is no such host.
    UnknownHost,
    /// The VM is there.
    SameHost,
    /// It is in another cluster.
    OtherCluster {
        /// The cluster that the VM may not leave.
        wanted: String,
        /// The host's.
        is: String,
    },
    /// The VM may only be on another host.
    Pinned {
        /// Which.
        to: HostId,
    },
    /// It lacks a label.
    LabelMissing {
        /// The label's key.
        key: String,
        /// The value that the VM requires.
        value: String,
    },
    /// Its processors are of another kind.
    Architecture {
        /// What the VM needs.
        wanted: String,
    },
    /// Its QEMU lacks the accelerator.
    Accelerator {
        /// What the VM needs.
        wanted: String,
    },
    /// Its QEMU lacks the machine type.
    MachineType {
        /// What the VM needs.
        wanted: String,
    },
    /// Its QEMU lacks the CPU model.
    CpuModel {
        /// What the VM needs.
        wanted: String,
    },
    /// It lacks a bridge.
    Bridge {
        /// What the VM needs.
        wanted: String,
    },
    /// Its QEMU is older than the one that would send to it.
    QemuOlder {
        /// The version that would send.
        source: String,
        /// The version that is there.
        is: String,
    },
    /// It does not share a path with other hosts.
    Path {
        /// What the VM needs.
        wanted: String,
    },
    /// It is retired.
    Retired,
    /// It is in maintenance.
    InMaintenance,
    /// It is being emptied.
    Draining,
    /// Someone holds it cordoned.
    Cordoned(Cordon),
    /// Its agent is not heard.
    NotConnected,
    /// Its agent has not finished to learn.
    Learning,
    /// Its last report is too old.
    StaleReport {
        /// How old.
        age: Millis,
        /// How old it may be.
        max: Millis,
    },
    /// Its figures cannot be used.
    Unreadable(Unreadable),
    /// As many migrations as allowed are on their way to it.
    InboundCap {
        /// How many are.
        running: u32,
        /// How many may be.
        max: u32,
    },
    /// As many migrations as allowed are on their way from it.
    OutboundCap {
        /// How many are.
        running: u32,
        /// How many may be.
        max: u32,
    },
    /// It has not enough memory left.
    Memory {
        /// What the VM takes.
        needed: Bytes,
        /// What is left.
        free: Bytes,
    },
    /// It has not enough CPU left.
    Cpu {
        /// What the VM takes.
        needed: MilliCpu,
        /// What is left.
        free: MilliCpu,
    },
}

impl Reason {
    /// Returns the stable code of this reason.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::UnknownHost => "unknown_host",
            Self::SameHost => "same_host",
            Self::OtherCluster { .. } => "cluster",
            Self::Pinned { .. } => "pinned",
            Self::LabelMissing { .. } => "required_label",
            Self::Architecture { .. } => "architecture",
            Self::Accelerator { .. } => "accelerator_missing",
            Self::MachineType { .. } => "machine_type_missing",
            Self::CpuModel { .. } => "cpu_model_missing",
            Self::Bridge { .. } => "missing_bridge",
            Self::QemuOlder { .. } => "qemu_older",
            Self::Path { .. } => "missing_path",
            Self::Retired => "retired",
            Self::InMaintenance => "in_maintenance",
            Self::Draining => "draining",
            Self::Cordoned(_) => "cordoned",
            Self::NotConnected => "not_connected",
            Self::Learning => "learning",
            Self::StaleReport { .. } => "stale_report",
            Self::Unreadable(_) => "unreadable",
            Self::InboundCap { .. } => "inbound_cap",
            Self::OutboundCap { .. } => "outbound_cap",
            Self::Memory { .. } => "memory",
            Self::Cpu { .. } => "cpu",
        }
    }

    /// Says what it would take for this reason to pass.
    #[must_use]
    pub const fn weight(&self) -> Weight {
        match self {
            Self::UnknownHost
            | Self::SameHost
            | Self::OtherCluster { .. }
            | Self::Pinned { .. }
            | Self::LabelMissing { .. }
            | Self::Architecture { .. }
            | Self::Accelerator { .. }
            | Self::MachineType { .. }
            | Self::CpuModel { .. }
            | Self::Bridge { .. }
            | Self::QemuOlder { .. }
            | Self::Path { .. }
            | Self::Retired => Weight::Never,
            Self::InMaintenance | Self::Draining | Self::Cordoned(_) => Weight::Closed,
            Self::NotConnected
            | Self::Learning
            | Self::StaleReport { .. }
            | Self::Unreadable(_) => Weight::Unreadable,
            Self::InboundCap { .. }
            | Self::OutboundCap { .. }
            | Self::Memory { .. }
            | Self::Cpu { .. } => Weight::Room,
        }
    }

    /// Returns the reason in the form that callers are told.
    #[must_use]
    pub fn blocker(&self, host: &HostId) -> Blocker {
        Blocker {
            code: self.code().to_owned(),
            message: format!("host {host}: {self}"),
            host: Some(host.clone()),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownHost => f.write_str("there is no such host"),
            Self::SameHost => f.write_str("the VM is there already"),
            Self::OtherCluster { wanted, is } => {
                write!(f, "it is in cluster {is}, the VM may not leave cluster {wanted}")
            }
            Self::Pinned { to } => write!(f, "the VM is pinned to host {to}"),
            Self::LabelMissing { key, value } => {
                write!(f, "it lacks the label {key}={value} that the VM requires")
            }
            Self::Architecture { wanted } => write!(f, "its architecture is not {wanted}"),
            Self::Accelerator { wanted } => write!(f, "its QEMU lacks the accelerator {wanted}"),
            Self::MachineType { wanted } => write!(f, "its QEMU lacks the machine type {wanted}"),
            Self::CpuModel { wanted } => write!(f, "its QEMU lacks the CPU model {wanted}"),
            Self::Bridge { wanted } => write!(f, "it lacks the bridge {wanted}"),
            Self::QemuOlder { source, is } => {
                write!(f, "its QEMU is {is}, the one that would send to it is {source}")
            }
            Self::Path { wanted } => write!(f, "it does not share {wanted} with other hosts"),
            Self::Retired => f.write_str("it is retired"),
            Self::InMaintenance => f.write_str("it is in maintenance"),
            Self::Draining => f.write_str("it is being drained"),
            Self::Cordoned(cordon) => {
                write!(f, "it is cordoned by {}: {}", cordon.owner, cordon.reason)
            }
            Self::NotConnected => f.write_str("its agent is not connected"),
            Self::Learning => f.write_str("its agent is still learning what runs there"),
            Self::StaleReport { age, max } => {
                write!(f, "its last report is {} ms old, past {} ms", age.value(), max.value())
            }
            Self::Unreadable(why) => why.fmt(f),
            Self::InboundCap { running, max } => {
                write!(f, "{running} of {max} migrations are on their way to it")
            }
            Self::OutboundCap { running, max } => {
                write!(f, "{running} of {max} migrations are on their way from it")
            }
            Self::Memory { needed, free } => {
                write!(f, "{needed} of memory needed, {free} free")
            }
            Self::Cpu { needed, free } => {
                write!(f, "{} milli-vCPU needed, {} free", needed.value(), free.value())
            }
        }
    }
}
