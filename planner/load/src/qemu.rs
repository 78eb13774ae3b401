//! One simulated QEMU process: what QEMU 10 was seen to do, and nothing better.
//!
//! It guards nothing: it takes `cont` on a source that has sent everything, and it lets a source
//! go on by itself when its channel breaks at the switchover.

use vmferry_types::{HostId, VmId};

/// A QEMU process of a host: the host and the process id.
pub(crate) type Place = (HostId, u32);

/// QEMU's run states, those that come up here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    InMigrate,
    Running,
    FinishMigrate,
    PostMigrate,
    Paused,
}

impl Run {
    /// Returns QEMU's name of it.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::InMigrate => "inmigrate",
            Self::Running => "running",
            Self::FinishMigrate => "finish-migrate",
            Self::PostMigrate => "postmigrate",
            Self::Paused => "paused",
        }
    }
}

/// QEMU's migration statuses, those that come up here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    None,
    Setup,
    Active,
    PreSwitchover,
    Device,
    Completed,
    Cancelled,
    Failed,
}

impl Transfer {
    /// Returns QEMU's name of it; empty before `migrate` was issued.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// Whether a migration is under way.
    pub(crate) const fn busy(self) -> bool {
        match self {
            Self::Setup | Self::Active | Self::PreSwitchover | Self::Device => true,
            Self::None | Self::Completed | Self::Cancelled | Self::Failed => false,
        }
    }
}

/// One QEMU process.
#[derive(Clone, Debug)]
pub(crate) struct Qemu {
    pub(crate) vm: VmId,
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    pub(crate) run: Run,
    pub(crate) transfer: Transfer,
    /// How many times it was told to send: tells one attempt from the next.
    pub(crate) attempt: u32,
    /// The run state that the transfer began in, and that a guest called back returns to.
    pub(crate) began_in: Run,
    pub(crate) error: String,
    pub(crate) bytes: u64,
    /// Which past of the guest it holds; zero is none.
    pub(crate) image: u64,
    /// Where it listens.
    pub(crate) port: Option<u16>,
    /// When vCPUs last stopped and ran again, in microseconds of the hosts' one clock.
    pub(crate) stopped_at_us: u64,
    pub(crate) resumed_at_us: u64,
}

impl Qemu {
    /// Makes a process that waits to receive a guest.
    pub(crate) const fn receiver(vm: VmId, pid: u32, start_time: u64, port: u16) -> Self {
        Self {
            vm,
            pid,
            start_time,
            run: Run::InMigrate,
            transfer: Transfer::Setup,
            attempt: 1,
            began_in: Run::Running,
            error: String::new(),
            bytes: 0,
            image: 0,
            port: Some(port),
            stopped_at_us: 0,
            resumed_at_us: 0,
        }
    }

    /// `migrate`: begins to send.
    pub(crate) fn migrate(&mut self) -> Result<(), &'static str> {
        if self.transfer.busy() {
            return Err("There's a migration process in progress");
        }
        match self.run {
            Run::Running => (self.stopped_at_us, self.resumed_at_us) = (0, 0),
            Run::Paused => {}
            Run::InMigrate | Run::FinishMigrate | Run::PostMigrate => {
                return Err("Guest cannot be sent as it is");
            }
        }
        self.began_in = self.run;
        self.transfer = Transfer::Setup;
        self.attempt += 1;
        self.bytes = 0;
        self.error.clear();
        Ok(())
    }

    /// `migrate-continue`: the order; taken at `pre-switchover` only.
    pub(crate) fn order(&mut self) -> Result<(), &'static str> {
        if self.transfer != Transfer::PreSwitchover {
            return Err("Migration not in expected state: pre-switchover");
        }
        self.transfer = Transfer::Device;
        Ok(())
    }
}
