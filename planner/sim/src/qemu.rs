//! One simulated QEMU process: what QEMU 10 was seen to do, and nothing better.
//!
//! QEMU itself guards nothing: it takes `cont` on a source that sent everything, makes a receiver
//! that still waits start by itself, and lets a source go on by itself when its channel breaks.

use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_types::VmId;

use crate::world::ChannelId;

/// One QEMU process.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that are true or not, each by itself, as a world has them"
)]
pub(crate) struct Qemu {
    pub(crate) vm: VmId,
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    pub(crate) launch: u64,
    pub(crate) run: RunState,
    /// What the run state was when it was told to send: it is that again when it is done with it.
    pub(crate) before: RunState,
    pub(crate) transfer: TransferState,
    /// How many times it was told to send or to receive: tells its figures of one from another.
    pub(crate) attempt: u32,
    pub(crate) error: String,
    pub(crate) bytes: u64,
    /// It has sent everything once, in whatever attempt.
    pub(crate) sent: bool,
    /// Which past of the guest it holds; zero is none.
    pub(crate) image: u64,
    /// Its monitor does not answer.
    pub(crate) silent: bool,
    /// `cont` came while it waited: it will start by itself.
    pub(crate) autostart: bool,
    pub(crate) port: Option<u16>,
    /// Its guest is to go before its memory.
    pub(crate) parts: bool,
    /// Pages that a guest that went first has not got yet.
    pub(crate) pages: u64,
    pub(crate) channel: Option<ChannelId>,
}

/// What `query-migrate` says, to be compared later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) transfer: TransferState,
    pub(crate) attempt: u32,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self { transfer: TransferState::None, attempt: 0 }
    }
}

/// Why QEMU refuses a command, in its words.
pub(crate) type Refused = &'static str;

impl Qemu {
    pub(crate) const fn snapshot(&self) -> Snapshot {
        Snapshot { transfer: self.transfer, attempt: self.attempt }
    }

    /// Whether a migration of its own is under way.
    pub(crate) const fn busy(&self) -> bool {
        match self.transfer {
            TransferState::Setup
            | TransferState::Active
            | TransferState::PreSwitchover
            | TransferState::Device
            | TransferState::Cancelling
            | TransferState::WaitUnplug
            | TransferState::PostcopyActive
            | TransferState::PostcopyPaused
            | TransferState::PostcopyRecoverSetup
            | TransferState::PostcopyRecover => true,
            TransferState::None
            | TransferState::Cancelled
            | TransferState::Completed
            | TransferState::Failed
            | TransferState::Unknown => false,
        }
    }

    /// `migrate`: begins to send.
    pub(crate) fn migrate(&mut self) -> Result<(), Refused> {
        if self.busy() {
            return Err("There's a migration process in progress");
        }
        if self.run == RunState::InMigrate {
            return Err("Guest is waiting for an incoming migration");
        }
        self.before = self.run;
        self.transfer = TransferState::Setup;
        self.attempt += 1;
        self.bytes = 0;
        self.parts = false;
        self.error.clear();
        Ok(())
    }

    /// `migrate-start-postcopy`, of a guest that was stopped before: whatever becomes of it, QEMU lets
    /// it go on by itself no more.
    pub(crate) fn part(&mut self, pages: u64) -> Result<(), Refused> {
        if !matches!(self.transfer, TransferState::Setup | TransferState::Active) {
            return Err("Postcopy must be started after migration has been started");
        }
        self.parts = true;
        self.pages = pages;
        self.before = RunState::Paused;
        Ok(())
    }

    /// `migrate-recover`: a half that is paused listens anew.
    pub(crate) fn wait(&mut self, port: u16) -> Result<(), Refused> {
        if self.transfer != TransferState::PostcopyPaused {
            return Err("Migrate recover can only be run when postcopy is paused.");
        }
        self.port = Some(port);
        Ok(())
    }

    /// `migrate` with `resume`: a half that is paused connects anew.
    pub(crate) fn resume(&mut self) -> Result<(), Refused> {
        if self.transfer != TransferState::PostcopyPaused {
            return Err("Cannot resume if there is no paused migration");
        }
        self.transfer = TransferState::PostcopyRecoverSetup;
        Ok(())
    }

    /// `migrate-incoming`: begins to listen.
    pub(crate) fn listen(&mut self, port: u16) -> Result<(), Refused> {
        if self.run != RunState::InMigrate || self.transfer != TransferState::None {
            return Err("The incoming migration has already been started");
        }
        self.transfer = TransferState::Setup;
        self.attempt += 1;
        self.port = Some(port);
        Ok(())
    }

    /// `migrate-continue`: the order; taken at `pre-switchover` only.
    pub(crate) fn order(&mut self) -> Result<(), Refused> {
        if self.transfer != TransferState::PreSwitchover {
            return Err("Migration not in expected state: pre-switchover");
        }
        self.transfer = TransferState::Device;
        Ok(())
    }

    /// `migrate_cancel`: says whether the guest stood still and goes on by that.
    pub(crate) fn cancel(&mut self) -> Resumes {
        match self.transfer {
            TransferState::Setup | TransferState::Active => {
                self.transfer = TransferState::Cancelled;
                Resumes::No
            }
            TransferState::PreSwitchover | TransferState::Device => {
                self.transfer = TransferState::Cancelled;
                self.back()
            }
            TransferState::None
            | TransferState::Cancelling
            | TransferState::Cancelled
            | TransferState::Completed
            | TransferState::Failed
            | TransferState::WaitUnplug
            | TransferState::PostcopyActive
            | TransferState::PostcopyPaused
            | TransferState::PostcopyRecoverSetup
            | TransferState::PostcopyRecover
            | TransferState::Unknown => Resumes::No,
        }
    }

    /// The transfer is over without its guest having left: it is as it was before.
    pub(crate) fn back(&mut self) -> Resumes {
        if self.run != RunState::FinishMigrate {
            return Resumes::No;
        }
        if self.before == RunState::Running {
            return Resumes::Yes;
        }
        self.run = self.before;
        Resumes::No
    }

    /// `cont`: says whether vCPUs run by that.
    pub(crate) fn cont(&mut self) -> Result<Resumes, Refused> {
        match self.run {
            RunState::InMigrate => {
                self.autostart = true;
                Ok(Resumes::No)
            }
            RunState::FinishMigrate => Err("Migration is not finalized yet"),
            RunState::Running => Ok(Resumes::No),
            RunState::Paused | RunState::PostMigrate | RunState::Prelaunch => Ok(Resumes::Yes),
            RunState::Shutdown
            | RunState::GuestPanicked
            | RunState::IoError
            | RunState::InternalError
            | RunState::Watchdog
            | RunState::Unknown => Err("Resetting the Virtual Machine is required"),
        }
    }
}

/// Whether a command makes vCPUs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resumes {
    No,
    Yes,
}
