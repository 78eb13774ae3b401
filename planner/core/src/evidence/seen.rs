//! What one agent saw of one VM.

use vmferry_types::{Claim, Generation, HostId, MigrationId, Millis, Role, Timestamp};

use crate::migration::{GoneProof, Listener, Process, Tuning};

/// How far an agent's word on a VM reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// It has not finished to learn; it refuses destructive commands.
    Learning,
    /// Journal and process agree.
    Known,
    /// The process is there, its monitor is silent.
    Unresponsive,
    /// The journal is new, lost or broken: it proves nothing.
    Unreadable,
    /// The journal is whole and knows nothing of this VM.
    UnknownVm,
}

/// Declares an enum of QEMU's words, with a variant for those we do not know.
macro_rules! qemu_words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[cfg_attr(
            feature = "serde",
            derive(serde::Serialize, serde::Deserialize),
            serde(rename_all = "kebab-case")
        )]
        pub enum $name {
            $($(#[$vdoc])* $variant,)+
            /// Unread, or a word that this release does not know: proves nothing.
            Unknown,
        }

        impl $name {
            /// Reads QEMU's word.
            #[must_use]
            pub fn from_qemu(word: &str) -> Self {
                match word { $($word => Self::$variant,)+ _ => Self::Unknown }
            }

            /// Returns QEMU's word.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ Self::Unknown => "unknown" }
            }
        }
    };
}

qemu_words! {
    /// QEMU's run state.
    RunState {
        /// vCPUs run.
        Running = "running",
        /// vCPUs stand still.
        Paused = "paused",
        /// A receiver waits for its guest, or is getting it.
        InMigrate = "inmigrate",
        /// A source has stopped its guest and is sending the rest.
        FinishMigrate = "finish-migrate",
        /// A source has sent everything.
        PostMigrate = "postmigrate",
        /// Started and never run.
        Prelaunch = "prelaunch",
        /// The guest has shut down and QEMU has not ended yet.
        Shutdown = "shutdown",
        /// The guest's own kernel gave up.
        GuestPanicked = "guest-panicked",
        /// A disk failed and the guest waits.
        IoError = "io-error",
        /// The emulation failed.
        InternalError = "internal-error",
        /// The guest's watchdog fired.
        Watchdog = "watchdog",
    }
}

impl RunState {
    /// Says whether the guest is or has been running under this state, as itself decides.
    #[must_use]
    pub const fn has_run(self) -> bool {
        match self {
            Self::Running
            | Self::Shutdown
            | Self::GuestPanicked
            | Self::IoError
            | Self::InternalError
            | Self::Watchdog => true,
            Self::Paused
            | Self::InMigrate
            | Self::FinishMigrate
            | Self::PostMigrate
            | Self::Prelaunch
            | Self::Unknown => false,
        }
    }
}

qemu_words! {
    /// QEMU's migration status, of this attempt.
    TransferState {
        /// No `migrate` was issued.
        None = "none",
        /// Connecting.
        Setup = "setup",
        /// Memory crosses.
        Active = "active",
        /// The guest stands still and waits for the order.
        PreSwitchover = "pre-switchover",
        /// Device state crosses.
        Device = "device",
        /// Being taken back.
        Cancelling = "cancelling",
        /// Taken back.
        Cancelled = "cancelled",
        /// Everything crossed.
        Completed = "completed",
        /// Given up.
        Failed = "failed",
        /// Waits for an unplugged device.
        WaitUnplug = "wait-unplug",
        /// The guest went first, its memory follows.
        PostcopyActive = "postcopy-active",
        /// The same, and the channel is broken.
        PostcopyPaused = "postcopy-paused",
        /// The source connects anew.
        PostcopyRecoverSetup = "postcopy-recover-setup",
        /// Both halves tell each other what has arrived.
        PostcopyRecover = "postcopy-recover",
    }
}

impl TransferState {
    /// Reads what an agent says of this attempt: nothing at all before `migrate` was issued.
    #[must_use]
    pub fn from_agent(word: &str) -> Self {
        if word.is_empty() { Self::None } else { Self::from_qemu(word) }
    }

    /// Says whether this attempt moves nothing, and will not any more unless it is begun anew.
    #[must_use]
    pub const fn is_over(self) -> bool {
        match self {
            Self::None | Self::Cancelled | Self::Failed => true,
            Self::Setup
            | Self::Active
            | Self::PreSwitchover
            | Self::Device
            | Self::Cancelling
            | Self::Completed
            | Self::WaitUnplug
            | Self::PostcopyActive
            | Self::PostcopyPaused
            | Self::PostcopyRecoverSetup
            | Self::PostcopyRecover
            | Self::Unknown => false,
        }
    }

    /// Says whether the guest went first and its memory follows: QEMU takes nothing back any more.
    #[must_use]
    pub const fn is_divided(self) -> bool {
        match self {
            Self::PostcopyActive
            | Self::PostcopyPaused
            | Self::PostcopyRecoverSetup
            | Self::PostcopyRecover => true,
            Self::None
            | Self::Setup
            | Self::Active
            | Self::PreSwitchover
            | Self::Device
            | Self::Cancelling
            | Self::Cancelled
            | Self::Completed
            | Self::Failed
            | Self::WaitUnplug
            | Self::Unknown => false,
        }
    }
}

/// Whether the order of the switchover is journalled at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handed {
    /// It is not.
    No,
    /// It is: QEMU may have heard it.
    Yes,
}

/// Whether the guest is held by this migration: stopped on purpose, by the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It is not.
    No,
    /// It is, and something of it is still switched off.
    Yes,
}

/// Whether a `cont` of this incarnation is journalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continued {
    /// The journal is whole and has none.
    No,
    /// It has: the guest may have run.
    Yes,
    /// The journal cannot tell.
    Unknown,
}

/// Whether an agent still answers, beside what it said last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It answered within the last moments.
    Now,
    /// It has not answered since, so its host may be gone by now. What it said stays true of what
    /// was over by then; that its QEMU lives, or can go on, it does not say any more.
    Before,
}

/// Whether the guest was asked to turn itself off for this migration, by the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// It was not.
    Unasked,
    /// It was: whether it hears that is its own business.
    Asked,
}

/// Whether a receiver needs nothing more, since nothing is sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// It does, or there is none.
    No,
    /// Its QEMU stands still, with the disks locked; or it has the definition of a VM that is off.
    Yes,
}

/// How a QEMU process that is gone came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The agent does not say: it counts as lost.
    Unsaid,
    /// The guest turned itself off.
    ByGuest,
}

/// What one agent saw of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The agent's host.
    pub host: HostId,
    /// The claim that it answers to.
    pub claim: Claim,
    /// Whether it still answers.
    pub heard: Heard,
    /// How far its word reaches.
    pub knowledge: Knowledge,
    /// What it has of the VM.
    pub role: Role,
    /// The newest generation that it knows.
    pub generation: Generation,
    /// The admission that its journal holds as open or last.
    pub migration: Option<MigrationId>,
    /// The QEMU process of this role that lives.
    pub process: Option<Process>,
    /// Proof that the QEMU process of this role is gone.
    pub gone: Option<GoneProof>,
    /// How it came to its end, if it is gone.
    pub ended: Ended,
    /// QEMU's run state.
    pub run_state: RunState,
    /// The transfer of this attempt, as this side's QEMU sees it; [`TransferState::None`] if what
    /// QEMU says is about another one.
    pub transfer: TransferState,
    /// QEMU's error text, to be shown.
    pub transfer_error: String,
    /// How often it has gone over the guest's memory, the present pass included.
    pub passes: u64,
    /// Why the transfer will not converge, as its agent sees it; empty if it may.
    pub diverges: String,
    /// How it says that its transfer is tuned. `None` if it sends nothing, or cannot say.
    pub tuning: Option<Tuning>,
    /// Where the destination's half of a divided guest waits for the other. `None` if it does not.
    pub waits_at: Option<Listener>,
    /// Whether the order is journalled.
    pub handed: Handed,
    /// Why it took the transfer back, journalled. `None` if it did not.
    pub gave_up: Option<String>,
    /// Whether the guest is held.
    pub held: Held,
    /// Whether the guest was asked to turn itself off.
    pub shutdown: Shutdown,
    /// Whether a receiver that is sent nothing is there.
    pub ready: Ready,
    /// Whether a `cont` is journalled.
    pub continued: Continued,
    /// When the guest last stopped in this migration, in microseconds of the host's monotonic clock; zero if it did not.
    pub stopped_at_us: u64,
    /// When it last resumed, alike.
    pub resumed_at_us: u64,
    /// How long the guest has stood still at the switchover.
    pub still: Millis,
    /// What kept the agent from reading more, for people; empty if nothing did.
    pub trouble: String,
    /// When it saw this, by its own clock.
    pub at: Timestamp,
}

impl Seen {
    /// Makes what stands for a host that was declared dead: no agent will ever answer for it.
    ///
    /// Whether its guest ever ran is unknown.
    #[must_use]
    pub fn dead(claim: Claim, generation: Generation, role: Role, proof: GoneProof) -> Self {
        Self {
            host: proof.host.clone(),
            claim,
            heard: Heard::Now,
            knowledge: Knowledge::Known,
            role,
            generation,
            migration: None,
            process: None,
            ended: Ended::Unsaid,
            run_state: RunState::Unknown,
            transfer: TransferState::Unknown,
            transfer_error: String::new(),
            passes: 0,
            diverges: String::new(),
            tuning: None,
            waits_at: None,
            handed: Handed::No,
            gave_up: None,
            held: Held::No,
            shutdown: Shutdown::Unasked,
            ready: Ready::No,
            continued: Continued::Unknown,
            stopped_at_us: 0,
            resumed_at_us: 0,
            still: Millis::ZERO,
            trouble: String::new(),
            at: proof.at,
            gone: Some(proof),
        }
    }
}

impl Seen {
    /// Says whether the guest resumed here after it last stopped in this migration.
    #[must_use]
    pub const fn ran_again(&self) -> bool {
        self.resumed_at_us > 0 && self.resumed_at_us >= self.stopped_at_us
    }
}

/// What both agents answered to one driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sides {
    /// The driver's claim: what was answered under another counts for nothing.
    pub claim: Claim,
    /// The source's last answer. `None` until it answered this driver.
    pub source: Option<Seen>,
    /// The destination's last answer. `None` until it answered this driver.
    pub destination: Option<Seen>,
}

/// The planner's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Now.
    pub now: Timestamp,
    /// When the present phase was entered.
    pub entered: Timestamp,
}
