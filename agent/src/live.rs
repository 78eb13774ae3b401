//! What is seen of a VM right now, beside what the journal says.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use vmferry_agent_core::journal::{Gone, Identity, VmRecord};
use vmferry_agent_core::tuning::Tuned;
use vmferry_proto::v1;
use vmferry_qmp::{MigrateInfo, MigrationStatus, RunState};
use vmferry_types::{Millis, VmId};

use crate::accounting::Footprint;
use crate::actions::Waiting;
use crate::clock;
use crate::process::{GuestEnd, GuestRecord, QemuProcess};

/// How well a VM is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Knowledge {
    /// Its process was not asked yet since the agent started.
    Learning,
    /// Journal and process agree.
    Known,
    /// Its process is there and says nothing.
    Unresponsive,
    /// Its record cannot be read.
    Unreadable,
}

/// What is seen of a VM.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    pub(crate) knowledge: Knowledge,
    /// Who its process is. `None` if there is none.
    pub(crate) identity: Option<Identity>,
    /// `None` until QEMU said it.
    pub(crate) run_state: Option<RunState>,
    pub(crate) migrate: MigrateInfo,
    /// By `CLOCK_MONOTONIC`, in microseconds; 0 if it was not seen.
    pub(crate) stopped_at_us: u64,
    pub(crate) resumed_at_us: u64,
    /// How long the guest has stood still for the order.
    pub(crate) still: Millis,
    /// What crossed lately, in bytes per second.
    pub(crate) rate: u64,
    pub(crate) judged: Judged,
    pub(crate) disks: Disks,
    /// Set once the process is proven gone.
    pub(crate) gone: Option<Gone>,
    /// What kept the agent from seeing more, for people.
    pub(crate) trouble: String,
}

/// What is made of a transfer, by the limits that it had then.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Judged {
    /// How long the guest could stand still, and what else limited it.
    pub(crate) by: (u64, Tuned),
    /// Why it will not converge; empty if it may.
    pub(crate) diverges: String,
    /// What is expected of it.
    pub(crate) forecast: String,
    pub(crate) eta: Option<Millis>,
}

/// Whether the guest may write its disks here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disks {
    Active,
    Inactive,
}

impl Sight {
    /// What is seen where there is no process.
    pub(crate) fn nothing(knowledge: Knowledge) -> Self {
        Self {
            knowledge,
            identity: None,
            run_state: None,
            migrate: MigrateInfo::default(),
            stopped_at_us: 0,
            resumed_at_us: 0,
            still: Millis::ZERO,
            rate: 0,
            judged: Judged::default(),
            disks: Disks::Inactive,
            gone: None,
            trouble: String::new(),
        }
    }

    /// Says whether the guest runs.
    pub(crate) fn running(&self) -> bool {
        self.run_state == Some(RunState::Running) && self.gone.is_none()
    }

    /// Says whether a run state is about to follow a migration that has completed.
    pub(crate) fn settling(&self) -> bool {
        self.gone.is_none()
            && self.migrate.status == Some(MigrationStatus::Completed)
            && matches!(self.run_state, Some(RunState::FinishMigrate | RunState::InMigrate))
    }

    /// Says whether data is crossing, so that figures change all the time.
    pub(crate) fn busy(&self) -> bool {
        self.gone.is_none() && self.migrate.status.as_ref().is_some_and(|status| !status.settled())
    }
}

/// What one VM's lane, its observer and whoever asks share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: VmId,
    /// The record as it is on the disk.
    pub(crate) record: watch::Sender<Arc<VmRecord>>,
    pub(crate) sight: watch::Sender<Sight>,
    process: Mutex<Option<Arc<QemuProcess>>>,
    /// Where half of a divided guest waits for the other. `None` if it does not, as far as this agent
    /// knows: to wait anew does no harm.
    waiting: Mutex<Option<Waiting>>,
    /// What its process took when it was last looked at.
    footprint: Mutex<Footprint>,
    /// Rises whenever what was read before counts no more.
    era: AtomicU64,
    /// When a driver was last heard, by `CLOCK_MONOTONIC`, in milliseconds.
    heard_ms: AtomicU64,
}

impl Shared {
    pub(crate) fn new(record: VmRecord, sight: Sight) -> Self {
        Self {
            id: record.vm,
            record: watch::Sender::new(Arc::new(record)),
            sight: watch::Sender::new(sight),
            process: Mutex::new(None),
            waiting: Mutex::new(None),
            footprint: Mutex::new(Footprint::default()),
            era: AtomicU64::new(0),
            heard_ms: AtomicU64::new(clock::monotonic().value()),
        }
    }

    /// Returns the process, if its monitor was last seen to answer.
    pub(crate) fn process(&self) -> Option<Arc<QemuProcess>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_process(&self, process: Option<Arc<QemuProcess>>) {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = process;
    }

    /// Returns where half of a divided guest waits for the other.
    pub(crate) fn waits_at(&self) -> Option<v1::Listener> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.as_ref().map(Waiting::listener)
    }

    /// Notes that half of a divided guest waits for the other.
    pub(crate) fn wait_at(&self, waiting: Waiting) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(waiting);
        // Whoever watches is told of it.
        self.sight.send_modify(|_| {});
    }

    /// Notes QEMU's migration status: what is connected again, or over, waits no more.
    pub(crate) fn saw_status(&self, status: Option<&MigrationStatus>) {
        if status != Some(&MigrationStatus::PostcopyPaused) {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            drop(waiting.take());
        }
    }

    pub(crate) fn footprint(&self) -> Footprint {
        self.footprint.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn note_footprint(&self, found: Footprint) {
        *self.footprint.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    /// Returns the era in which something is read.
    pub(crate) fn era(&self) -> u64 {
        self.era.load(Ordering::SeqCst)
    }

    /// Begins a new attempt to send: what QEMU said of the last one, and what is being read of it
    /// now, counts no more.
    pub(crate) fn begin_attempt(&self) {
        self.begin_held_attempt();
        self.sight.send_modify(|sight| {
            sight.stopped_at_us = 0;
            sight.resumed_at_us = 0;
        });
    }

    /// The same for a guest that is held: since when it stands still is known.
    pub(crate) fn begin_held_attempt(&self) {
        self.era.fetch_add(1, Ordering::SeqCst);
        self.sight.send_modify(|sight| {
            sight.migrate = MigrateInfo::default();
            sight.rate = 0;
            sight.judged = Judged::default();
        });
    }

    /// Takes up what the shim heard of the guest while nobody else listened.
    pub(crate) fn recall(&self, guest: &GuestRecord) {
        self.sight.send_if_modified(|sight| {
            let before = (sight.stopped_at_us, sight.resumed_at_us);
            let joined = guest.joined(before);
            (sight.stopped_at_us, sight.resumed_at_us) = joined;
            let ended = guest.end.filter(|_| sight.gone.is_some()).map(|end| match end {
                GuestEnd::Shutdown => RunState::Shutdown,
                GuestEnd::Panicked => RunState::GuestPanicked,
            });
            let end = ended.is_some() && ended != sight.run_state;
            if end {
                sight.run_state = ended;
            }
            end || joined != before
        });
    }

    /// Notes that the driver was heard.
    pub(crate) fn hear(&self) {
        self.heard_ms.fetch_max(clock::monotonic().value(), Ordering::Relaxed);
    }

    pub(crate) fn heard(&self) -> Millis {
        Millis(self.heard_ms.load(Ordering::Relaxed))
    }

    /// Waits until what is seen satisfies `wanted`, at most for `limit`; returns what is seen then.
    pub(crate) async fn wait(
        &self,
        limit: Duration,
        wanted: impl FnMut(&Sight) -> bool,
    ) -> Result<Sight, Sight> {
        let mut seen = self.sight.subscribe();
        let outcome = tokio::time::timeout(limit, seen.wait_for(wanted)).await;
        match outcome {
            Ok(Ok(sight)) => Ok(sight.clone()),
            Ok(Err(_)) | Err(_) => Err(self.sight.borrow().clone()),
        }
    }
}
