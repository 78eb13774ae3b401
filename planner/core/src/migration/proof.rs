//! What was seen that makes a decision safe. Stored beside the decision.

use vmferry_types::{HostId, Timestamp};

use crate::evidence::{RunState, TransferState};

/// What shows that a QEMU process does not exist (rule R1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum ProofKind {
    /// The shim recorded the exit.
    ExitRecord,
    /// Pid and start time are absent under the same boot id.
    ProcessAbsent,
    /// The host's boot id is another.
    NewBoot,
    /// The journal, which is whole, never held such a process.
    NeverStarted,
    /// An operator or a fence command declared the host dead.
    HostDeclaredDead,
}

impl ProofKind {
    /// Returns the one spelling of this kind.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ExitRecord => "exit_record",
            Self::ProcessAbsent => "process_absent",
            Self::NewBoot => "new_boot",
            Self::NeverStarted => "never_started",
            Self::HostDeclaredDead => "host_declared_dead",
        }
    }
}

/// Proof that a QEMU process does not exist. Silence is never one (rule R1).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GoneProof {
    /// What shows it.
    pub kind: ProofKind,
    /// The host where it is gone.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub host: HostId,
    /// The boot of that host in which it is proven.
    pub boot_id: String,
    /// The process; zero if there never was one.
    pub pid: u32,
    /// Its start time, in the kernel's clock ticks since boot.
    pub start_time: u64,
    /// How it ended, for people: "exit 1", "signal 9".
    pub ended: String,
    /// When it was proven, by the host's clock.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub at: Timestamp,
    /// The last of what it wrote to stderr.
    pub stderr_tail: String,
}

impl std::fmt::Display for GoneProof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QEMU on host {} is gone ({}", self.host, self.kind.label())?;
        if !self.ended.is_empty() {
            write!(f, ", {}", self.ended)?;
        }
        f.write_str(")")?;
        let tail = self.stderr_tail.trim();
        if tail.is_empty() { Ok(()) } else { write!(f, ": {tail}") }
    }
}

/// One incarnation of a VM on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Its start time, in the kernel's clock ticks since boot.
    pub start_time: u64,
    /// The boot in which it was started.
    pub boot_id: String,
}

/// What one QEMU said when a decision rested on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Word {
    /// Which process said it.
    pub process: Process,
    /// Its migration status, of this attempt.
    pub transfer: TransferState,
    /// Its run state.
    pub run_state: RunState,
    /// When, by the host's clock.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub at: Timestamp,
}

/// What is known of the source when the destination has everything.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum SourceWord {
    /// It said that all was acknowledged, and stands still.
    Completed(Word),
    /// It is proven gone: there is no way back.
    Gone(GoneProof),
    /// It stands still and serves the memory that has not arrived yet: there is no way back.
    Serves(Word),
    /// The guest is shut down there, with its disks closed: it can be started again from them.
    ShutDown(GoneProof),
}

/// Why ownership may move: what both QEMUs said.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Handover {
    /// What is known of the source.
    pub source: SourceWord,
    /// What the destination said.
    pub destination: Word,
}
