//! Migration and run states under QEMU's own names.
//!
//! Every enum has an `Unknown` variant with QEMU's word: later versions add
//! states (`postcopy-device`, `failing`), and not to know one must never read
//! as another one.

use serde::{Deserialize, Serialize};

macro_rules! wire_enum {
    ($(#[$outer:meta])* $name:ident { $($(#[$inner:meta])* $variant:ident = $label:literal,)* }) => {
        $(#[$outer])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(from = "String", into = "String")]
        pub enum $name {
            $($(#[$inner])* $variant,)*
            /// A word this code does not know, as QEMU said it.
            Unknown(String),
        }

        impl $name {
            /// Every variant but `Unknown`.
            pub const KNOWN: &'static [Self] = &[$(Self::$variant,)*];

            /// QEMU's word.
            #[must_use]
            pub fn label(&self) -> &str {
                match self {
                    $(Self::$variant => $label,)*
                    Self::Unknown(word) => word,
                }
            }
        }

        impl From<&str> for $name {
            fn from(word: &str) -> Self {
                match word {
                    $($label => Self::$variant,)*
                    other => Self::Unknown(other.to_owned()),
                }
            }
        }

        impl From<String> for $name {
            fn from(word: String) -> Self {
                Self::from(word.as_str())
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.label().to_owned()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.label())
            }
        }
    };
}

wire_enum! {
    /// Where QEMU's migration stands, on either side.
    MigrationStatus {
        /// No migration was started.
        None = "none",
        /// Connecting, or on the destination waiting for the source.
        Setup = "setup",
        /// A cancel is in progress.
        Cancelling = "cancelling",
        /// Cancelled; the source runs.
        Cancelled = "cancelled",
        /// Precopy moves memory.
        Active = "active",
        /// The destination runs and faults pages in.
        PostcopyActive = "postcopy-active",
        /// The channel broke in postcopy; both halves wait for recovery.
        PostcopyPaused = "postcopy-paused",
        /// Recovery connects.
        PostcopyRecoverSetup = "postcopy-recover-setup",
        /// Recovery compares what both sides have.
        PostcopyRecover = "postcopy-recover",
        /// Everything is over there.
        Completed = "completed",
        /// It failed.
        Failed = "failed",
        /// COLO, which vmferry does not use.
        Colo = "colo",
        /// The guest stands still and waits for `migrate-continue`.
        PreSwitchover = "pre-switchover",
        /// Device state is being sent.
        Device = "device",
        /// Waits for the guest to let go of a failover device.
        WaitUnplug = "wait-unplug",
    }
}

impl MigrationStatus {
    /// Tells whether QEMU will not change this status by itself any more.
    #[must_use]
    pub fn settled(&self) -> bool {
        match self {
            Self::None | Self::Cancelled | Self::Completed | Self::Failed => true,
            Self::Setup
            | Self::Cancelling
            | Self::Active
            | Self::PostcopyActive
            | Self::PostcopyPaused
            | Self::PostcopyRecoverSetup
            | Self::PostcopyRecover
            | Self::Colo
            | Self::PreSwitchover
            | Self::Device
            | Self::WaitUnplug
            | Self::Unknown(_) => false,
        }
    }

    /// Tells whether the point of no return of a postcopy lies behind.
    #[must_use]
    pub fn postcopy(&self) -> bool {
        match self {
            Self::PostcopyActive
            | Self::PostcopyPaused
            | Self::PostcopyRecoverSetup
            | Self::PostcopyRecover => true,
            // Newer QEMUs have more of them, all named alike.
            Self::Unknown(word) => word.starts_with("postcopy"),
            Self::None
            | Self::Setup
            | Self::Cancelling
            | Self::Cancelled
            | Self::Active
            | Self::Completed
            | Self::Failed
            | Self::Colo
            | Self::PreSwitchover
            | Self::Device
            | Self::WaitUnplug => false,
        }
    }
}

wire_enum! {
    /// What the guest of one QEMU process is doing.
    RunState {
        /// Stopped by the debugger stub.
        Debug = "debug",
        /// Waits for, or receives, a migration.
        InMigrate = "inmigrate",
        /// Stopped by an error inside QEMU or KVM.
        InternalError = "internal-error",
        /// Stopped by a disk error.
        IoError = "io-error",
        /// Stopped by a command, or received and not yet continued.
        Paused = "paused",
        /// Stopped: everything was sent away.
        PostMigrate = "postmigrate",
        /// Started with `-S` and never continued.
        PreLaunch = "prelaunch",
        /// Stopped to send the rest.
        FinishMigrate = "finish-migrate",
        /// Loads a snapshot.
        RestoreVm = "restore-vm",
        /// The vCPUs run.
        Running = "running",
        /// Writes a snapshot.
        SaveVm = "save-vm",
        /// The guest powered off and QEMU was told to stay.
        Shutdown = "shutdown",
        /// The guest sleeps.
        Suspended = "suspended",
        /// Stopped by the watchdog device.
        Watchdog = "watchdog",
        /// The guest's kernel panicked.
        GuestPanicked = "guest-panicked",
        /// COLO, which vmferry does not use.
        Colo = "colo",
    }
}

/// The answer to `query-migrate`.
///
/// Everything is optional: it is `{}` before the first migration, only
/// `status` on a destination that is done, and `ram` is gone after a failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrateInfo {
    /// Where it stands; `None` before the first migration.
    pub status: Option<MigrationStatus>,
    /// Memory figures, on the source.
    pub ram: Option<RamStats>,
    /// Time since the start, in milliseconds.
    pub total_time: Option<u64>,
    /// How long the guest stood still, in milliseconds; once completed.
    pub downtime: Option<u64>,
    /// What QEMU expects the downtime to be, in milliseconds; while active.
    pub expected_downtime: Option<u64>,
    /// How long the set-up took, in milliseconds.
    pub setup_time: Option<u64>,
    /// How much the vCPUs are throttled; while auto-converge does.
    pub cpu_throttle_percentage: Option<u64>,
    /// QEMU's text for what went wrong. Shown, never parsed.
    pub error_desc: Option<String>,
    /// What makes this guest unable to migrate, in QEMU's words.
    pub blocked_reasons: Vec<String>,
    /// How long all vCPUs waited for pages in postcopy, in milliseconds.
    pub postcopy_blocktime: Option<u64>,
    /// Where a destination listens, as QEMU's socket addresses.
    pub socket_address: Vec<serde_json::Value>,
    /// VFIO figures.
    pub vfio: Option<VfioStats>,
}

/// Memory figures of a running or completed migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamStats {
    /// What went over the wire, in bytes.
    pub transferred: Option<u64>,
    /// What is still to be sent, in bytes.
    pub remaining: Option<u64>,
    /// The guest's memory, in bytes.
    pub total: Option<u64>,
    /// Pages that were zero.
    pub duplicate: Option<u64>,
    /// Pages that were sent whole.
    pub normal: Option<u64>,
    /// The same, in bytes.
    pub normal_bytes: Option<u64>,
    /// How fast the guest dirties memory, in pages per second.
    pub dirty_pages_rate: Option<u64>,
    /// Throughput in megabits per second. Keeps its last value on a stall.
    pub mbps: Option<f64>,
    /// How often the dirty bitmap was read.
    pub dirty_sync_count: Option<u64>,
    /// Pages that the destination asked for.
    pub postcopy_requests: Option<u64>,
    /// Bytes of one page.
    pub page_size: Option<u64>,
    /// What went over the multifd channels, in bytes.
    pub multifd_bytes: Option<u64>,
    /// Pages sent per second.
    pub pages_per_second: Option<u64>,
    /// What was sent while the guest ran on the source, in bytes.
    pub precopy_bytes: Option<u64>,
    /// What was sent while the guest stood still, in bytes.
    pub downtime_bytes: Option<u64>,
    /// What was sent in postcopy, in bytes.
    pub postcopy_bytes: Option<u64>,
}

/// VFIO figures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct VfioStats {
    /// What was sent for VFIO devices, in bytes.
    pub transferred: Option<u64>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_status_reads_as_what_it_writes() {
        for status in MigrationStatus::KNOWN {
            assert_eq!(MigrationStatus::from(status.label()), *status);
        }
        for state in RunState::KNOWN {
            assert_eq!(RunState::from(state.label()), *state);
        }
    }

    #[test]
    fn an_unknown_status_is_neither_settled_nor_lost() {
        let info: MigrateInfo =
            serde_json::from_value(json!({"status": "postcopy-device", "novel": [1]})).unwrap();
        let status = info.status.unwrap();
        assert!(!status.settled());
        assert!(status.postcopy());
        assert_eq!(status.to_string(), "postcopy-device");
    }

    #[test]
    fn before_the_first_migration_there_is_nothing() {
        let info: MigrateInfo = serde_json::from_value(json!({})).unwrap();
        assert_eq!(info, MigrateInfo::default());
    }
}
