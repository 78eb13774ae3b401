//! Labels of states: one spelling for code, SQL, JSON, metrics and logs.

/// Declares a fieldless enum whose every variant has one label.
macro_rules! labelled {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $label:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// Every value, in the order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the one spelling of this value.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label),+ }
            }

            /// Reads a label; `None` if there is no such value.
            #[must_use]
            pub fn from_label(label: &str) -> Option<Self> {
                match label { $($label => Some(Self::$variant),)+ _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.label())
            }
        }
    };
}

labelled! {
    /// How far a migration has come.
    PhaseLabel {
        /// No host has room now; nothing is held.
        Queued = "queued",
        /// The destination is reserved; the guest runs on the source.
        Admitted = "admitted",
        /// The guest stands still on the source, nothing is lost.
        Captured = "captured",
        /// The destination has everything and stands still.
        Restored = "restored",
        /// Ownership is the destination's.
        Committed = "committed",
        /// The guest is on the destination and was seen so.
        Attached = "attached",
        /// The source is released.
        Done = "done",
        /// Decided to go back; not all is undone yet.
        RollingBack = "rolling_back",
        /// The source owns the VM, as before.
        Aborted = "aborted",
        /// Loss is proven, or neither way is safe.
        Failed = "failed",
    }
}

impl PhaseLabel {
    /// Says whether nothing more happens to a migration in this phase.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        match self {
            Self::Done | Self::Aborted | Self::Failed => true,
            Self::Queued
            | Self::Admitted
            | Self::Captured
            | Self::Restored
            | Self::Committed
            | Self::Attached
            | Self::RollingBack => false,
        }
    }
}

labelled! {
    /// How a migration carries the guest.
    Method {
        /// Memory crosses while the guest runs; it stops for the rest.
        Precopy = "precopy",
        /// The guest moves first, its memory follows.
        Postcopy = "postcopy",
        /// The guest is stopped, its state streamed or filed, and loaded.
        Snapshot = "snapshot",
        /// The guest is shut down and started elsewhere.
        Cold = "cold",
        /// Disks are copied by rsync over SSH.
        DiskCopy = "disk_copy",
    }
}

labelled! {
    /// What the caller asked for.
    MigrationType {
        /// The guest goes on.
        Live = "live",
        /// The guest may be stopped: the word is the grant.
        Offline = "offline",
        /// Disks move only.
        Storage = "storage",
    }
}

labelled! {
    /// A migration's state in the words of its users.
    UserState {
        /// It waits for room or has not begun.
        Pending = "pending",
        /// The destination is being prepared.
        Precheck = "precheck",
        /// Data is crossing while the guest runs.
        Syncing = "syncing",
        /// The guest changes sides, or is being brought back.
        Switching = "switching",
        /// The guest is on the destination.
        Completed = "completed",
        /// It did not move.
        Failed = "failed",
        /// It did not move, as asked.
        Cancelled = "cancelled",
    }
}

labelled! {
    /// What a host has of a VM.
    Role {
        /// Nothing runs here; only the highest generation and claim are remembered.
        Absent = "absent",
        /// The guest runs here, or is paused by its user.
        Running = "running",
        /// The guest is kept still on purpose, durably.
        Held = "held",
        /// A QEMU process waits for the guest to arrive.
        Receiver = "receiver",
        /// The VM is defined here and has no QEMU process.
        Stopped = "stopped",
    }
}

labelled! {
    /// What the planner has written down about a VM's power.
    PowerState {
        /// Defined, and no QEMU process.
        Stopped = "stopped",
        /// A start was admitted and has not been seen to succeed.
        Starting = "starting",
        /// A QEMU process of it runs.
        Running = "running",
        /// A stop was admitted and has not been seen to succeed.
        Stopping = "stopping",
        /// Its QEMU process is proven gone without anyone's word.
        Lost = "lost",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_read_back() {
        for phase in PhaseLabel::ALL {
            assert_eq!(PhaseLabel::from_label(phase.label()), Some(*phase));
        }
        assert_eq!(Role::from_label("nope"), None);
    }

    #[test]
    fn three_phases_are_terminal() {
        let terminal: Vec<_> =
            PhaseLabel::ALL.iter().filter(|p| p.is_terminal()).map(|p| p.label()).collect();
        assert_eq!(terminal, ["done", "aborted", "failed"]);
    }
}
