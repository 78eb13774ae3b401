//! What the store keeps, as values.

mod emptying;
mod power;
mod queue;

use std::fmt;

use serde::{Deserialize, Serialize};
use vmferry_planner_core::lifecycle::cordon;
use vmferry_planner_core::maintenance::{Crossing, PinsToSource};
use vmferry_planner_core::migration::{Entry, Migration, Refusal};
use vmferry_planner_core::queue::Priority;
use vmferry_planner_core::stuck::Trouble;
use vmferry_proto::v1;
use vmferry_types::{
    Bytes, Claim, Generation, HostId, MigrationId, MilliCpu, Millis, PhaseLabel, PowerState, Seq,
    Timestamp, VmId,
};

pub use self::emptying::{
    AskHost, BegunFor, EmptyingChange, EmptyingFilter, EmptyingLogRow, EmptyingNotes, EmptyingRow,
    HostAnswer, HostDone, NewEmptying, TakeEmptying, Which,
};
pub use self::power::{
    AdmitPower, Ends, FromQueue, NewPower, PowerAction, PowerKind, PowerPhase, PowerRecord,
};
pub use self::queue::{QueueStart, QueuedStart, Slot, SlotRow, SlotState, slot_of};
use super::StoreError;

/// A host as its agent introduced itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRow {
    /// Names the host.
    pub id: HostId,
    /// Its display name, unique in the fleet.
    pub name: String,
    /// The boot that it last reported from.
    pub boot_id: String,
    /// Where its agent is reached.
    pub agent_address: String,
    /// When it last introduced itself anew.
    pub last_report: Timestamp,
    /// That an operator or a fence command declared it dead, the last time.
    pub declared_dead: Option<Declaration>,
}

/// That a host is dead, by somebody's word or deed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// The boot that the host was last heard from. What ran under it, or under one before, is gone.
    pub boot_id: String,
    /// When it was declared.
    pub at: Timestamp,
    /// By whom.
    pub by: String,
    /// On what ground.
    pub kind: DeclarationKind,
    /// Why, in the words of who declared it.
    pub reason: String,
    /// What shows it: the output of a fence command.
    pub evidence: String,
    /// When the host was heard from the same boot again: from then on the declaration proves nothing.
    pub void: Option<Timestamp>,
}

impl Declaration {
    /// Says whether the declaration proves that what ran under a boot is gone.
    #[must_use]
    pub fn proves_gone(&self, boot_id: &str) -> bool {
        self.void.is_none() && !self.boot_id.is_empty() && self.boot_id == boot_id
    }
}

/// On what ground a host was declared dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclarationKind {
    /// An operator says so.
    Operator,
    /// A fence command succeeded.
    FenceCommand,
}

impl DeclarationKind {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::FenceCommand => "fence_command",
        }
    }

    /// Reads a label.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        [Self::Operator, Self::FenceCommand].into_iter().find(|kind| kind.label() == label)
    }
}

/// What became of a declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Declared {
    /// It is written. These VMs ran there with nothing under way: they are lost.
    Written {
        /// The VMs.
        lost: Vec<VmId>,
    },
    /// There is no such host.
    UnknownHost,
    /// The host was heard from another boot since.
    Rebooted {
        /// The boot.
        boot_id: String,
    },
}

/// What became of a host's introduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedHost {
    /// It is written.
    Saved,
    /// Another host has its name.
    NameTaken {
        /// That host.
        by: HostId,
    },
    /// It was deleted, and was not switched off since.
    Deleted {
        /// When.
        at: Timestamp,
    },
}

/// What the planner holds to be true of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmRow {
    /// Names the VM for life.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// The host that owns it; the last one if it is stopped.
    pub host: Option<HostId>,
    /// What it was brought to.
    pub power: PowerState,
    /// Who may run it; below [`Generation::FIRST`] if nobody ever did.
    pub generation: Generation,
    /// The newest claim given out.
    pub claim: Claim,
    /// The open admission, if any: a migration, a start or a stop.
    pub admission: Option<MigrationId>,
    /// Why it is lost, or could not be started: the real text.
    pub error: String,
    /// Its definition.
    pub definition: String,
    /// The versioned machine type recorded at its first start.
    pub resolved_machine: String,
    /// What it needs, with its ceiling and QEMU's overhead.
    pub memory: Bytes,
    /// Its vCPUs.
    pub cpu: MilliCpu,
}

/// What differs whenever a host came, went, introduced itself anew or was declared dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostsMark {
    /// How many there are.
    pub hosts: u64,
    /// The sum of when each introduced itself last.
    pub introduced: u64,
    /// The sum of when each was declared dead last.
    pub declared: u64,
    /// The sum of when those declarations became void.
    pub voided: u64,
}

/// What differs whenever a VM of a host was written, came or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// How many VMs the host owns, or owned last.
    pub vms: u64,
    /// The sum of their claims, which never go back.
    pub claims: u64,
    /// The sum of when they were written.
    pub written: u64,
}

impl Mark {
    /// That of a host without VMs.
    pub const NONE: Self = Self { vms: 0, claims: 0, written: 0 };

    /// Returns the mark of some VMs, where nobody keeps when they were written.
    #[must_use]
    pub fn of(vms: &[VmRow]) -> Self {
        let sum = |of: fn(&VmRow) -> u64| vms.iter().map(of).fold(0, u64::wrapping_add);
        Self {
            vms: u64::try_from(vms.len()).unwrap_or(u64::MAX),
            claims: sum(|vm| vm.claim.value()),
            written: sum(|vm| vm.generation.value()),
        }
    }
}

/// What became of a new VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Defined {
    /// It is written, so. One that was deleted before goes on counting where it ended.
    New(VmRow),
    /// Its id or name belongs to this one.
    Taken(VmRow),
}

/// What became of a VM that a host reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adopted {
    /// It is written.
    New,
    /// It is known.
    Known(VmRow),
    /// It was deleted: what the host has of it is an orphan.
    Deleted(Tombstone),
}

/// What stays of a VM that was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The VM.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// The host that owned it last.
    pub host: Option<HostId>,
    /// The newest generation.
    pub generation: Generation,
    /// The newest claim.
    pub claim: Claim,
    /// When it was deleted.
    pub deleted: Timestamp,
}

/// What became of a VM that was to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// It is gone from every list.
    Done,
    /// There is none, or none any more.
    Unknown,
    /// Something is under way for it, or it is neither stopped nor lost.
    Refused(Refused),
}

/// That a VM's process is proven gone without anyone's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The VM.
    pub vm: VmId,
    /// Where it ran.
    pub host: HostId,
    /// Under which generation.
    pub generation: Generation,
    /// The newest claim that the host knew.
    pub claim: Claim,
    /// How it ended: the real text.
    pub cause: String,
}

/// That something was done to a VM without the planner, under a newer generation or claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    /// The VM.
    pub vm: VmId,
    /// Where it is.
    pub host: HostId,
    /// What it was brought to.
    pub power: PowerState,
    /// Under which generation.
    pub generation: Generation,
    /// By which claim.
    pub claim: Claim,
}

/// Who holds a host back, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cordon {
    /// The host.
    pub host: HostId,
    /// In whose name.
    pub owner: String,
    /// Why.
    pub reason: String,
    /// Since when.
    pub since: Timestamp,
    /// Until when, if it ends by itself.
    pub expires: Option<Timestamp>,
}

impl Cordon {
    /// Returns it in the words of the core.
    #[must_use]
    pub fn in_core(&self) -> cordon::Cordon {
        let operator = || cordon::Owner::Operator { name: self.owner.clone() };
        cordon::Cordon {
            host: self.host.clone(),
            owner: self.owner.parse().unwrap_or_else(|_| operator()),
            reason: self.reason.clone(),
            since: self.since,
            expires: self.expires,
        }
    }
}

/// Capacity promised to a VM on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// By which admission.
    pub admission: MigrationId,
    /// Where.
    pub host: HostId,
    /// For whom.
    pub vm: VmId,
    /// How much memory.
    pub memory: Bytes,
    /// How much CPU.
    pub cpu: MilliCpu,
}

/// Says whether a host still has room beside what is reserved there, which is read under the lock.
pub struct Room(Box<RoomCheck>);

type RoomCheck = dyn Fn(&[Reservation]) -> Result<(), String> + Send + Sync;

impl Room {
    /// Wraps a check that answers with the reason why there is no room.
    pub fn new(
        check: impl Fn(&[Reservation]) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self(Box::new(check))
    }

    /// Checks beside the given reservations.
    ///
    /// # Errors
    ///
    /// Says why there is no room.
    pub fn check(&self, reserved: &[Reservation]) -> Result<(), String> {
        (self.0)(reserved)
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Room")
    }
}

/// A caller's request id with what kind of request it was.
pub type Request = Option<String>;

/// What the store keeps of a migration beside its machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// What was asked for, as it came.
    pub asked: v1::MigrateVmRequest,
    /// The VM's demand for memory when it was admitted, in bytes.
    pub memory_bytes: u64,
    /// Its demand for CPU, in thousandths of a vCPU.
    pub cpu_milli: u64,
    /// The last figures of the transfer that were seen.
    pub transfer: v1::TransferStatus,
    /// When the present phase was entered, in microseconds since 1970.
    pub entered_us: u64,
    /// Host clock from STOP on the source to RESUME on the destination; 0 if unknown.
    pub pause_us: u64,
    /// STOP on the source by the clock of the boot `source_boot`.
    pub stopped_at_us: u64,
    /// The source's boot id when it stopped.
    pub source_boot: String,
    /// What the source's QEMU said last, for people.
    pub source_status: String,
    /// What the destination's QEMU said last, for people.
    pub destination_status: String,
    /// For whose sake it was asked for, and what that allows.
    pub sake: Sake,
}

/// For whose sake a migration was asked for, and what that allows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sake {
    /// Who is served first.
    pub priority: Priority,
    /// The maintenance job, drain or retirement that began it; empty if an operator did.
    pub emptying: String,
    /// Whether the VM may leave its cluster.
    pub crossing: Crossing,
    /// Whether it may leave the host that it is pinned to.
    pub pins: PinsToSource,
    /// Share of the destination's memory that is left free; the planner's own if it is not said.
    pub reserve_memory_percent: Option<u8>,
    /// Share of its CPU.
    pub reserve_cpu_percent: Option<u8>,
    /// How many migrations of the emptying may hold a destination at once. `None` has no limit.
    pub max_parallel: Option<u32>,
}

/// A migration as it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct MigrationRow {
    /// The machine.
    pub migration: Migration,
    /// The VM's name when it was opened.
    pub vm_name: String,
    /// The caller's id of the request.
    pub request: Request,
    /// The claim of its driver.
    pub claim: Claim,
    /// Its optimistic lock.
    pub seq: Seq,
    /// Who drives it.
    pub lease_owner: Option<String>,
    /// Until when nobody else may.
    pub lease_until: Timestamp,
    /// What kept it from going on, as its driver saw it last.
    pub trouble: Option<Trouble>,
    /// When it was opened, in microseconds since 1970.
    pub created_us: u64,
    /// When it last changed.
    pub updated_us: u64,
    /// When nothing more was owed.
    pub ended_us: Option<u64>,
    /// What is kept beside the machine.
    pub notes: Notes,
}

/// A destination that was found for a migration.
#[derive(Debug)]
pub struct Grant {
    /// The host.
    pub destination: HostId,
    /// Whether it still has room.
    pub room: Room,
    /// How many migrations it may receive at once.
    pub inbound_max: u32,
    /// Whether the VM may leave the host that its definition pins it to.
    pub pins: PinsToSource,
}

impl Grant {
    /// Says whether the definition's pin keeps a VM from the destination.
    #[must_use]
    pub fn pinned_elsewhere(&self, pin: Option<HostId>, source: Option<&HostId>) -> Option<HostId> {
        let may_leave = self.pins == PinsToSource::MayLeave;
        pin.filter(|pin| *pin != self.destination && !(may_leave && Some(pin) == source))
    }
}

/// A migration that asks to be admitted.
#[derive(Debug)]
pub struct NewMigration {
    /// The opened machine.
    pub migration: Migration,
    /// The VM's name.
    pub vm_name: String,
    /// The caller's id of the request.
    pub request: Request,
    /// What is kept beside it.
    pub notes: Notes,
    /// Where it may go; `Err` says why there is no room now, and queues it.
    pub grant: Result<Grant, String>,
    /// The emptying that begins it, written in the same transaction.
    pub begun_for: Option<Box<BegunFor>>,
}

/// What became of a migration that asked to be admitted.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// It is a row.
    Admitted(Box<MigrationRow>),
    /// The same request came before, and led to this one.
    Known(Box<MigrationRow>),
    /// It is no row.
    Refused(Refused),
    /// The emptying that begins it was another by then: nothing is written.
    Raced,
}

/// Says why a transaction did not admit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such VM.
    #[error("the VM is not known")]
    UnknownVm,
    /// Something else is under way for the VM.
    #[error("another migration, start or stop of the VM is under way ({admission})")]
    InFlight {
        /// Its id.
        admission: MigrationId,
    },
    /// The VM is not in a state that allows it.
    #[error("the VM is {power}")]
    Power {
        /// Its state.
        power: PowerState,
    },
    /// The VM is elsewhere by now, or owned under another generation.
    #[error("the VM has moved on since it was looked at; ask again")]
    Moved {
        /// Where it is.
        host: Option<HostId>,
    },
    /// Somebody holds the destination back.
    #[error("host {host} is cordoned")]
    Cordoned {
        /// The destination.
        host: HostId,
    },
    /// The destination receives as many as it may.
    #[error("host {host} already receives {inbound} migrations, the most allowed at once")]
    InboundCap {
        /// The destination.
        host: HostId,
        /// How many.
        inbound: u32,
    },
    /// As many migrations of the same emptying hold a destination as may.
    #[error("{}", vmferry_planner_core::queue::note_of_own_limit(emptying, *running, *max))]
    OwnLimit {
        /// The emptying.
        emptying: String,
        /// How many.
        running: u32,
        /// How many may.
        max: u32,
    },
    /// The VM may only run elsewhere.
    #[error("the VM is pinned to host {pin}")]
    Pinned {
        /// Where it may run.
        pin: HostId,
    },
    /// The destination has no room.
    #[error("{note}")]
    NoRoom {
        /// Why.
        note: String,
    },
}

impl Refused {
    /// Says whether waiting can help.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::NoRoom { .. } | Self::InboundCap { .. } | Self::OwnLimit { .. } => true,
            Self::UnknownVm
            | Self::InFlight { .. }
            | Self::Power { .. }
            | Self::Moved { .. }
            | Self::Cordoned { .. }
            | Self::Pinned { .. } => false,
        }
    }
}

/// What became of a write that named its claim and seq.
#[derive(Clone, Debug, PartialEq)]
pub enum Commit<T> {
    /// It is written; the row as it is now.
    Done(T),
    /// The row was another by then: nothing is written.
    Raced,
}

/// What became of a queued migration for which a destination was found.
#[derive(Clone, Debug, PartialEq)]
pub enum Granted {
    /// It is admitted.
    Done(Box<MigrationRow>),
    /// The row was another by then.
    Raced,
    /// The destination would not do after all.
    Refused(Refused),
}

/// Says whether a lease until `until` still keeps others away, where leases last for `term`.
///
/// Nobody gives one that reaches further ahead than that: twice the term allows for clocks, and for
/// planners, that differ a little. What is beyond was written by a clock that was wrong since, and
/// would block its row for as long as that clock was ahead.
#[must_use]
pub fn lease_holds(until: Timestamp, now: Timestamp, term: Millis) -> bool {
    until > now && until.since(now) <= term.plus(term)
}

/// What became of an attempt to drive a migration.
#[derive(Clone, Debug, PartialEq)]
pub enum TakeOver {
    /// It is the caller's, under a claim of its own.
    Taken(Box<MigrationRow>),
    /// Another driver's lease holds.
    Busy,
    /// Nothing is owed any more.
    Ended,
}

/// What became of an attempt to drive a start or stop.
#[derive(Clone, Debug, PartialEq)]
pub enum TakePower {
    /// It is the caller's, under a claim of its own.
    Taken(Box<PowerAction>),
    /// Another driver's lease holds.
    Busy,
    /// Nothing is owed any more.
    Ended,
}

/// Which migrations to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only those of this VM.
    pub vm: Option<VmId>,
    /// Only those that still owe something.
    pub open: OnlyOpen,
    /// At most so many; zero is all.
    pub limit: u32,
}

/// Whether migrations that have ended are read too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnlyOpen {
    /// They are.
    #[default]
    All,
    /// They are not.
    Open,
}

/// One entry of a migration's log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogRow {
    /// Its place.
    pub seq: Seq,
    /// When, in microseconds since 1970.
    pub at_us: u64,
    /// The event's label; `opened` for the first.
    pub event: String,
    /// The phase that it led to.
    pub phase: PhaseLabel,
    /// What a person should know of it.
    pub note: String,
    /// The event as JSON, enough to replay it; of `opened`, the machine itself.
    pub body: String,
}

/// One change of a migration: an event, and the machine after it.
pub type Change = Entry;

/// Checks that each change is what the machine makes of its event, beginning at `before`. A store
/// does so before it writes: what does not follow is a bug of whoever decided it.
///
/// # Errors
///
/// Says why the machine refuses a change.
pub fn check_changes(before: &Migration, changes: &[Change]) -> Result<(), StoreError> {
    let mut machine = before;
    for change in changes {
        let after = machine.apply(&change.event);
        let after = after.map_err(|source| StoreError::Machine { source })?;
        if after != change.after {
            return Err(StoreError::Machine { source: Refusal::Illegal });
        }
        machine = &change.after;
    }
    Ok(())
}
