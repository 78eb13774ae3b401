//! Starts and stops, as values.

use serde::{Deserialize, Serialize};
use vmferry_proto::v1;
use vmferry_types::{
    Bytes, Claim, Generation, HostId, MigrationId, MilliCpu, PowerState, Seq, Timestamp, VmId,
};

use super::{Refused, Request, Room, VmRow};

/// What a start or stop is about to be.
#[derive(Debug)]
pub struct NewPower {
    /// Names the admission.
    pub id: MigrationId,
    /// The caller's id of the request.
    pub request: Request,
    /// The VM.
    pub vm: VmId,
    /// Where it is started or stopped.
    pub host: HostId,
    /// Which of the two.
    pub kind: PowerKind,
    /// How it is stopped.
    pub how: String,
    /// How long the guest has to end by itself.
    pub deadline_ms: u64,
    /// Memory that it needs.
    pub memory: Bytes,
    /// CPU that it needs.
    pub cpu: MilliCpu,
    /// Whether the host has room for a start.
    pub room: Room,
    /// Whether it waited for that.
    pub from_queue: FromQueue,
}

/// Whether a start waited in the queue under the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromQueue {
    /// It did not.
    No,
    /// It did, and its row is taken out.
    Yes,
}

impl NewPower {
    /// Gives a VM to a start or a stop; returns what has to be known to take that back.
    ///
    /// A start elsewhere changes who may run the VM. That its last process is gone was proven when
    /// its row became `stopped` or `lost`: nothing else makes it so.
    #[must_use]
    pub fn begin(&self, vm: &mut VmRow) -> PowerRecord {
        let record = PowerRecord {
            how: self.how.clone(),
            deadline_ms: self.deadline_ms,
            power_before: vm.power.label().to_owned(),
            host_before: vm.host.as_ref().map(ToString::to_string),
            ..PowerRecord::default()
        };
        if self.kind == PowerKind::Start {
            if vm.generation < Generation::FIRST {
                vm.generation = Generation::FIRST;
            } else if vm.host.as_ref().is_some_and(|host| *host != self.host) {
                vm.generation = vm.generation.next();
            }
            vm.host = Some(self.host.clone());
        }
        vm.claim = vm.claim.next();
        vm.admission = Some(self.id);
        vm.error = String::new();
        vm.power = self.kind.under_way();
        record
    }
}

/// Start or stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerKind {
    /// Start.
    Start,
    /// Stop.
    Stop,
}

impl PowerKind {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
        }
    }

    /// Reads a label.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        [Self::Start, Self::Stop].into_iter().find(|kind| kind.label() == label)
    }

    /// Returns what the VM is while it is under way.
    #[must_use]
    pub const fn under_way(self) -> PowerState {
        match self {
            Self::Start => PowerState::Starting,
            Self::Stop => PowerState::Stopping,
        }
    }
}

/// How far a start or stop has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerPhase {
    /// It is owed.
    Open,
    /// It is done.
    Done,
    /// It was refused; the VM is as before.
    Failed,
}

impl PowerPhase {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    /// Reads a label.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        [Self::Open, Self::Done, Self::Failed].into_iter().find(|phase| phase.label() == label)
    }
}

/// What is kept of a start or stop beside its columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PowerRecord {
    /// How it is stopped: `powerdown` or `quit`.
    pub how: String,
    /// How long the guest has to end by itself.
    pub deadline_ms: u64,
    /// What the VM was before.
    pub power_before: String,
    /// Where it was before.
    pub host_before: Option<String>,
    /// Why it failed.
    pub error: String,
    /// That the process is gone.
    pub gone: Option<v1::GoneProof>,
}

/// A start or a stop as it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct PowerAction {
    /// Names the admission.
    pub id: MigrationId,
    /// The caller's id of the request.
    pub request: Request,
    /// The VM.
    pub vm: VmId,
    /// Where it is started or stopped.
    pub host: HostId,
    /// Which of the two.
    pub kind: PowerKind,
    /// How far it has come.
    pub phase: PowerPhase,
    /// The generation that it acts under.
    pub generation: Generation,
    /// The claim of its driver.
    pub claim: Claim,
    /// Its optimistic lock.
    pub seq: Seq,
    /// Who drives it.
    pub lease_owner: Option<String>,
    /// Until when nobody else may.
    pub lease_until: Timestamp,
    /// When it was admitted, in microseconds since 1970.
    pub created_us: u64,
    /// When it ended.
    pub ended_us: Option<u64>,
    /// What is kept beside.
    pub record: PowerRecord,
}

/// What became of a start or stop that asked to be admitted.
#[derive(Clone, Debug, PartialEq)]
pub enum AdmitPower {
    /// It is a row.
    Admitted(PowerAction),
    /// The same request came before, and led to this one.
    Known(PowerAction),
    /// It is no row.
    Refused(Refused),
}

/// How a start or stop ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Ends {
    /// Done or failed.
    pub phase: PowerPhase,
    /// What the VM is from now on.
    pub power: PowerState,
    /// Why it failed; empty if it did not.
    pub error: String,
    /// That the process is gone, if it is.
    pub gone: Option<v1::GoneProof>,
    /// The versioned machine type that it was started with; empty keeps what is known.
    pub resolved_machine: String,
}
