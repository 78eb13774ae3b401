//! The fleet as it answered, and the store as it was read after that.

use vmferry_types::{Claim, Generation, HostId, MigrationId, PowerState, Role, Timestamp, VmId};

use crate::evidence::{Continued, Handed, Knowledge, RunState};

/// Everything that is compared. The store has to be read after the hosts have answered: what it
/// knows more by then is no contradiction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Now.
    pub now: Timestamp,
    /// Every host that ever introduced itself.
    pub hosts: Vec<HostSaid>,
    /// Every VM of the store.
    pub vms: Vec<Known>,
    /// Migrations of the store that matter here: all open ones, and those that ended.
    pub moves: Vec<Move>,
    /// What waits for room, in its order.
    pub queue: Vec<Waits>,
}

/// A start or a migration that waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// Which.
    pub id: MigrationId,
    /// Of which VM.
    pub vm: VmId,
    /// What it is, for people: a start, or a migration.
    pub what: &'static str,
    /// Since when, at which position, for what and how long still.
    pub words: String,
}

/// One host, as it answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSaid {
    /// Which.
    pub id: HostId,
    /// Whether it did, and how far its word reaches.
    pub answer: Answer,
    /// The boot that it answered from, or was last heard from.
    pub boot_id: String,
    /// The last declaration of its death.
    pub declared: Option<Declared>,
    /// What it has of VMs. Empty if it did not answer.
    pub vms: Vec<Remains>,
    /// QEMU processes there that are not its agent's, each in a line.
    pub strangers: Vec<String>,
    /// What is left there of VMs that it does not own.
    pub orphans: Vec<Orphan>,
}

/// How a host answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Whole.
    Whole,
    /// It is still learning: what it does not name may be there.
    Learning,
    /// Its journal is new, lost or broken: what it does not name may be there.
    Unreadable,
    /// Not at all.
    Silent {
        /// What the transport said.
        reason: String,
        /// When it was last heard by this planner. `None` if it never was.
        heard: Option<Timestamp>,
    },
}

/// That somebody declared a host dead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// When.
    pub at: Timestamp,
    /// Who.
    pub by: String,
    /// Why.
    pub reason: String,
    /// What it is worth now.
    pub standing: Standing,
}

/// What a declaration of death is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is proof now: the host was not heard since.
    Holds,
    /// The host is back under another boot, which proves the same.
    History,
    /// The host was heard from the same boot again: it was not dead.
    Void {
        /// When that was found.
        at: Timestamp,
    },
}

/// What a host has of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remains {
    /// Which.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// As what.
    pub role: Role,
    /// How far the agent's word on it reaches.
    pub knowledge: Knowledge,
    /// Its QEMU process.
    pub process: Process,
    /// QEMU's run state.
    pub run_state: RunState,
    /// The newest generation that the agent knows.
    pub generation: Generation,
    /// The newest claim.
    pub claim: Claim,
    /// The admission that its journal holds as open or last.
    pub migration: Option<MigrationId>,
    /// Whether the order of that migration's switchover is journalled, and not taken back.
    pub handed: Handed,
    /// Whether the source has taken its attempt to send back, by its journal.
    pub gave_up: GaveUp,
    /// Whether a `cont` is journalled.
    pub continued: Continued,
}

/// Whether a source has taken its attempt to send back: its guest goes on there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GaveUp {
    /// It has not.
    No,
    /// It has, and refuses what belongs to that attempt.
    Yes,
}

/// What is known of a QEMU process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Process {
    /// It is there.
    Alive,
    /// It is proven gone, with how it ended.
    Gone(String),
    /// The role has none.
    None,
}

impl Remains {
    /// Says whether its vCPUs run here, or may: a QEMU that does not answer is taken to run.
    #[must_use]
    pub fn runs(&self) -> bool {
        let has_guest = match self.role {
            Role::Running => true,
            // A receiver that was continued runs, whatever its agent calls it.
            Role::Receiver => self.continued == Continued::Yes,
            Role::Held | Role::Stopped | Role::Absent => false,
        };
        let still = match self.run_state {
            RunState::Paused
            | RunState::InMigrate
            | RunState::FinishMigrate
            | RunState::PostMigrate
            | RunState::Prelaunch
            | RunState::Shutdown => true,
            RunState::Running
            | RunState::GuestPanicked
            | RunState::IoError
            | RunState::InternalError
            | RunState::Watchdog
            | RunState::Unknown => false,
        };
        self.process == Process::Alive && has_guest && !still
    }

    /// Says whether the guest is here, though it may stand still.
    #[must_use]
    pub fn has_guest(&self) -> bool {
        let here = match self.role {
            Role::Running | Role::Held => true,
            Role::Receiver => self.continued == Continued::Yes,
            Role::Stopped | Role::Absent => false,
        };
        self.process == Process::Alive && here
    }
}

/// Something that is left of a VM where it does not belong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// The VM, if its id can be read.
    pub vm: Option<VmId>,
    /// Its name, or else its id.
    pub name: String,
    /// What it is.
    pub kind: String,
    /// Which.
    pub detail: String,
}

/// What the store holds of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Which.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// The host that owns it.
    pub host: Option<HostId>,
    /// What it was brought to.
    pub power: PowerState,
    /// Who may run it.
    pub generation: Generation,
    /// The newest claim given out.
    pub claim: Claim,
    /// What is under way for it.
    pub under: Under,
    /// Why it is lost: the real text.
    pub error: String,
}

/// What is under way for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Under {
    /// Nothing.
    Nothing,
    /// A start that waits for room: nothing is done yet.
    Queued(MigrationId),
    /// A start or a stop.
    Power(MigrationId),
    /// A migration.
    Migration(MigrationId),
}

/// What the store holds of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Which.
    pub id: MigrationId,
    /// Of which VM.
    pub vm: VmId,
    /// When nothing more was owed.
    pub ended: Option<Timestamp>,
    /// Why it does not get on, and what it waits for.
    pub stuck: Option<(String, String)>,
    /// Whether a human has to say which side is the right one.
    pub undecided: bool,
}
