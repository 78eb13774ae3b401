//! Watches one QEMU process: its events, its figures, its end.
//!
//! Events are published the moment they come; what they leave open is asked for at once and
//! published when QEMU answers. While data crosses the figures are read several times a second,
//! and the transfer's limits are watched; what is due is told to the VM's lane, which decides.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Fuse};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use vmferry_agent_core::convergence::{Convergence, Figures, Slowed};
use vmferry_agent_core::journal::{Order, Outgoing, Parting};
use vmferry_agent_core::outgoing::{self, Attempt, Limits, Sending, Watchdog};
use vmferry_agent_core::tuning::{THROTTLE_MAX, Throttle, Tuned};
use vmferry_qmp::command::{QueryMigrate, QueryNamedBlockNodes, QueryStatus};
use vmferry_qmp::event::Origin;
use vmferry_qmp::{Event, EventView, MigrateInfo, MigrationStatus, RunState};
use vmferry_types::{MigrationId, Millis};

use crate::agent::Agent;
use crate::clock;
use crate::error::chain;
use crate::learning::{self, Learned};
use crate::live::{Disks, Judged, Knowledge, Shared, Sight};
use crate::monitor::{Heard, MonitorError};
use crate::process::{ProcessDir, QemuProcess};
use crate::shim::ShimClient;
use crate::vm::LaneSender;
use crate::wire;

/// How often figures are read while data crosses.
const BUSY_POLL: Duration = Duration::from_millis(200);
/// How often a source that has just sent everything is asked whether its run state says so too: it
/// takes it up a moment after the last event, the guest stands still meanwhile, and no event tells.
const SETTLING_POLL: Duration = Duration::from_millis(2);
/// How often a QEMU that does nothing is asked whether it still answers.
const IDLE_POLL: Duration = Duration::from_secs(5);
/// The least time over which a rate is taken: over less it says nothing.
const RATE_SPAN: Millis = Millis(100);
/// How long a host counts as learning because of one VM of which nothing can be found out.
const LEARN_LIMIT: Duration = Duration::from_secs(60);
/// How long a shim may take to say what it heard.
const SHIM: Duration = Duration::from_secs(1);
/// How long a QEMU that says that it ends is left alone. A command that reaches it once its monitor
/// has stopped dispatching ends it by a signal, or hangs it (seen with QEMU 10.0); one that was
/// started with `-no-shutdown` stays, and is asked then.
const ENDING: Duration = Duration::from_secs(1);
/// How long to wait before a process that could not be reached is tried again.
const RETRY: Duration = Duration::from_millis(250);

/// What QEMU answered.
struct Reading {
    /// When it was asked for.
    era: u64,
    run_state: RunState,
    migrate: MigrateInfo,
    disks: Option<Disks>,
}

/// How much to ask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    Figures,
    WithDisks,
}

/// Watches the process until it is gone or the watch is cancelled.
pub(crate) async fn watch(
    agent: Arc<Agent>,
    shared: Arc<Shared>,
    lane: LaneSender,
    launched: Option<QemuProcess>,
    stop: CancellationToken,
) {
    let cancelled = stop.clone();
    tokio::select! {
        biased;
        () = cancelled.cancelled() => {}
        () = watch_on(agent, shared, lane, launched) => {}
    }
}

async fn watch_on(
    agent: Arc<Agent>,
    shared: Arc<Shared>,
    lane: LaneSender,
    launched: Option<QemuProcess>,
) {
    let mut next = launched;
    loop {
        let process = match next.take() {
            Some(process) => process,
            None => match find(&agent, &shared).await {
                Some(process) => process,
                None => {
                    lane.gone();
                    return;
                }
            },
        };
        Observer::new(&agent, &shared, &lane, Arc::new(process)).run().await;
        shared.set_process(None);
    }
}

/// Looks for the process until it answers or is gone (`None`).
async fn find(agent: &Agent, shared: &Shared) -> Option<QemuProcess> {
    let begun = Instant::now();
    loop {
        let record = shared.record.borrow().clone();
        let written = record.process()?;
        match learning::learn(shared.id, written, &agent.boot_id).await {
            Learned::Alive(process) => {
                recall(shared, process.dir());
                return Some(*process);
            }
            Learned::Gone(gone) => {
                tracing::info!(vm_id = %shared.id, ended = %gone.ended, "process is gone");
                shared.sight.send_modify(|sight| {
                    sight.knowledge = Knowledge::Known;
                    sight.gone = Some(gone);
                    sight.trouble.clear();
                });
                recall(shared, &ProcessDir::new(&written.dir));
                agent.changed();
                return None;
            }
            Learned::Unresponsive { identity, cause } => {
                let status = last_heard(&ProcessDir::new(&written.dir)).await;
                shared.saw_status(status.as_ref());
                shared.sight.send_modify(|sight| {
                    sight.knowledge = Knowledge::Unresponsive;
                    sight.identity = Some(identity);
                    sight.trouble = cause;
                    // Its main loop may wait for a page of its own guest: what its shim heard goes on.
                    if status.is_some() {
                        sight.migrate.status = status;
                    }
                });
            }
            Learned::NotYet { cause } => {
                // What was known before is not known any more. One VM that cannot be learnt of does
                // not keep its host from being known.
                let lasting = begun.elapsed() >= LEARN_LIMIT;
                let knowledge = if lasting { Knowledge::Unresponsive } else { Knowledge::Learning };
                shared.sight.send_modify(|sight| {
                    sight.knowledge = knowledge;
                    sight.trouble = cause;
                });
            }
        }
        agent.changed();
        sleep(RETRY).await;
    }
}

/// Returns what the shim heard last of QEMU's migration.
async fn last_heard(dir: &ProcessDir) -> Option<MigrationStatus> {
    let status = ShimClient::new(dir).status(SHIM).await.ok()?;
    status.migrations.last().map(|seen| seen.status.clone())
}

/// Takes up what the shim wrote down of the guest.
fn recall(shared: &Shared, dir: &ProcessDir) {
    match dir.read_guest() {
        Ok(Some(guest)) => shared.recall(&guest),
        Ok(None) => {}
        Err(error) => {
            tracing::warn!(vm_id = %shared.id, error = %chain(&error), "what the guest did is not known");
        }
    }
}

struct Observer<'a> {
    agent: &'a Agent,
    shared: &'a Shared,
    lane: &'a LaneSender,
    process: Arc<QemuProcess>,
    /// Of which attempt: its migration, and whether its guest is held.
    watchdog: Option<((MigrationId, bool), Watchdog)>,
    /// Of the present transfer, by the limits that it has.
    convergence: (Convergence, Option<(u64, Tuned)>),
    /// When which number of bytes had crossed, for the rate.
    crossed: (Millis, u64),
    /// Until when QEMU is asked nothing, since it said that it ends.
    ending: Option<Instant>,
}

impl<'a> Observer<'a> {
    fn new(
        agent: &'a Agent,
        shared: &'a Shared,
        lane: &'a LaneSender,
        process: Arc<QemuProcess>,
    ) -> Self {
        shared.set_process(Some(process.clone()));
        Self {
            agent,
            shared,
            lane,
            process,
            watchdog: None,
            convergence: (Convergence::default(), None),
            crossed: (Millis::ZERO, 0),
            ending: None,
        }
    }

    /// Watches until the monitor's connection ends.
    async fn run(mut self) {
        let mut events = self.process.events();
        let mut reading = self.read(Depth::WithDisks);
        let mut again = None;
        let mut poll = Instant::now() + BUSY_POLL;
        loop {
            tokio::select! {
                biased;
                heard = events.next() => match heard {
                    None => return,
                    Some(Heard::Event(event)) => {
                        again = again.max(self.handle_event(&event));
                    }
                    Some(Heard::Lagged(_)) => {
                        // The shim may have heard what was missed here.
                        recall(self.shared, self.process.dir());
                        again = Some(Ask::AllAnew);
                    }
                },
                read = &mut reading => match again {
                    // What was read may be older than the event that came since.
                    Some(_) => {}
                    None => {
                        self.handle_reading(read);
                        if self.shared.sight.borrow().settling() {
                            poll = Instant::now() + SETTLING_POLL;
                        }
                    }
                },
                () = sleep_until(poll) => {
                    again = again.max(Some(Ask::Figures));
                    self.mind_limits();
                }
            }
            if let Some(left_alone) = self.ending.filter(|until| Instant::now() < *until) {
                poll = left_alone;
            } else if let Some(ask) = again
                && futures::future::FusedFuture::is_terminated(&reading)
            {
                again = None;
                reading = self.read(match ask {
                    Ask::Figures => Depth::Figures,
                    Ask::AllAnew => Depth::WithDisks,
                });
                let pause = if self.watchful() { BUSY_POLL } else { IDLE_POLL };
                poll = Instant::now() + pause;
            } else if Instant::now() >= poll {
                poll = Instant::now() + BUSY_POLL;
            }
        }
    }

    fn read(&self, depth: Depth) -> Fuse<BoxFuture<'static, Result<Reading, MonitorError>>> {
        let process = self.process.clone();
        let era = self.shared.era();
        async move {
            let monitor = process.monitor();
            let disks = async {
                match depth {
                    Depth::Figures => Ok(None),
                    Depth::WithDisks => {
                        let nodes =
                            monitor.execute(QueryNamedBlockNodes { flat: Some(true) }).await?;
                        let idle = nodes.iter().any(|node| !node.ro && node.active == Some(false));
                        Ok(Some(if idle { Disks::Inactive } else { Disks::Active }))
                    }
                }
            };
            let (status, migrate, disks) = tokio::try_join!(
                monitor.execute(QueryStatus {}),
                monitor.execute(QueryMigrate {}),
                disks
            )?;
            Ok(Reading { era, run_state: status.status, migrate, disks })
        }
        .boxed()
        .fuse()
    }

    /// Says whether something is under way whose limits have to be kept.
    fn watchful(&self) -> bool {
        self.shared.record.borrow().hold().is_some() || self.shared.sight.borrow().busy()
    }

    /// Publishes what an event says by itself; returns what it leaves open.
    fn handle_event(&mut self, event: &Event) -> Option<Ask> {
        let now_us = clock::monotonic_us();
        if matches!(event.view(), EventView::Shutdown { .. } | EventView::GuestPanicked) {
            self.ending = Some(Instant::now() + ENDING);
        }
        let ask = match event.view() {
            EventView::Migration(status) => {
                tracing::debug!(vm_id = %self.shared.id, status = status.label(), "migration event");
                self.shared.saw_status(Some(&status));
                // A failure is told with its reason, which QEMU says when it is asked.
                if status != MigrationStatus::Failed {
                    self.shared.sight.send_modify(|sight| sight.migrate.status = Some(status));
                }
                Some(Ask::Figures)
            }
            EventView::Stop => {
                self.shared.sight.send_modify(|sight| sight.stopped_at_us = now_us);
                Some(Ask::Figures)
            }
            EventView::Resume => {
                self.shared.sight.send_modify(|sight| {
                    sight.resumed_at_us = now_us;
                    sight.run_state = Some(RunState::Running);
                });
                Some(Ask::AllAnew)
            }
            EventView::MigrationPass(_) => Some(Ask::Figures),
            EventView::Shutdown { origin: Origin::Guest, reason: "guest-shutdown" } => {
                // QEMU ends right after it: nobody could ask for this any more.
                self.shared.sight.send_modify(|sight| sight.run_state = Some(RunState::Shutdown));
                Some(Ask::AllAnew)
            }
            EventView::Shutdown { origin: Origin::Guest | Origin::Host, .. }
            | EventView::Suspend
            | EventView::Wakeup => Some(Ask::AllAnew),
            EventView::GuestPanicked => {
                // QEMU may end right after it.
                self.shared
                    .sight
                    .send_modify(|sight| sight.run_state = Some(RunState::GuestPanicked));
                Some(Ask::AllAnew)
            }
            EventView::Reset
            | EventView::Powerdown
            | EventView::JobStatus { .. }
            | EventView::BlockJobReady { .. }
            | EventView::BlockJobCompleted { .. }
            | EventView::BlockJobCancelled { .. }
            | EventView::BlockJobError { .. }
            | EventView::BlockExportDeleted { .. }
            | EventView::BlockIoError { .. }
            | EventView::BalloonChange { .. }
            | EventView::DeviceDeleted { .. }
            | EventView::UnplugPrimary { .. }
            | EventView::Other => None,
        };
        self.mind_limits();
        ask
    }

    fn handle_reading(&mut self, read: Result<Reading, MonitorError>) {
        let mut reading = match read {
            Ok(reading) => reading,
            Err(error) => {
                // A connection that ended is told by the events as well.
                self.shared.sight.send_modify(|sight| {
                    sight.knowledge = Knowledge::Unresponsive;
                    sight.trouble = chain(&error);
                });
                self.agent.changed();
                return;
            }
        };
        if reading.era != self.shared.era() {
            // It may be about an earlier attempt; the next reading is not.
            return;
        }
        self.shared.saw_status(reading.migrate.status.as_ref());
        self.judge_convergence(&reading.migrate);
        keep_figures(&mut reading.migrate, &self.shared.sight.borrow().migrate);
        let rate = self.rate(&reading.migrate);
        let identity = wire::identity(self.process.identity());
        let mut changed = false;
        let now_us = clock::monotonic_us();
        self.shared.sight.send_if_modified(|sight| {
            // It runs, and was last known to stand: whoever began to listen since has not heard it
            // go on, and its shim may not have written so yet.
            let went_on =
                reading.run_state == RunState::Running && sight.stopped_at_us > sight.resumed_at_us;
            if went_on {
                sight.resumed_at_us = now_us;
            }
            changed = went_on
                || sight.knowledge != Knowledge::Known
                || sight.run_state.as_ref() != Some(&reading.run_state)
                || sight.migrate.status != reading.migrate.status;
            let same = !changed
                && sight.migrate == reading.migrate
                && reading.disks.is_none_or(|disks| disks == sight.disks);
            if same {
                return false;
            }
            sight.knowledge = Knowledge::Known;
            sight.identity = Some(identity);
            sight.run_state = Some(reading.run_state);
            sight.migrate = reading.migrate;
            sight.rate = rate;
            sight.disks = reading.disks.unwrap_or(sight.disks);
            sight.gone = None;
            sight.trouble.clear();
            true
        });
        if changed {
            self.agent.changed();
        }
        self.mind_limits();
    }

    /// Returns what crossed per second since the last look.
    fn rate(&mut self, migrate: &MigrateInfo) -> u64 {
        let now = clock::monotonic();
        let bytes = migrate.ram.as_ref().and_then(|ram| ram.transferred).unwrap_or(0);
        let (then, before) = self.crossed;
        let span = now.less(then);
        if span < RATE_SPAN {
            return self.shared.sight.borrow().rate;
        }
        self.crossed = (now, bytes);
        bytes.saturating_sub(before).saturating_mul(1000) / span.value()
    }

    /// Judges whether a transfer converges, pass by pass; anew once its limits change.
    fn judge_convergence(&mut self, seen: &MigrateInfo) {
        let record = self.shared.record.borrow().clone();
        let open = record.outgoing().filter(|sent| sent.order == Order::Open);
        let (Some(sent), Some(MigrationStatus::Active)) = (open, &seen.status) else {
            self.convergence = (Convergence::default(), None);
            return;
        };
        let by = (sent.downtime_ms, sent.tuned);
        if self.convergence.1 != Some(by) {
            self.convergence = (Convergence::default(), Some(by));
        }
        let convergence = &mut self.convergence.0;
        convergence.saw(clock::monotonic(), figures(sent, seen));
        let judged = Judged {
            by,
            diverges: convergence.verdict().unwrap_or_default().to_owned(),
            forecast: convergence.forecast().to_owned(),
            eta: convergence.eta(),
        };
        self.shared.sight.send_if_modified(|sight| {
            let news = sight.judged != judged;
            if sight.judged.diverges != judged.diverges {
                tracing::info!(vm_id = %self.shared.id, verdict = judged.diverges, "transfer judged");
            }
            sight.judged = judged;
            news
        });
    }

    /// Watches the limits of a transfer and tells the lane what is due.
    fn mind_limits(&mut self) {
        let record = self.shared.record.borrow().clone();
        // Of whichever admission: a guest must not stand still because another one began.
        let (sent, hold) = (record.sent(), record.hold());
        let Some(migration) =
            hold.map(|hold| hold.migration).or_else(|| sent.map(|sent| sent.migration))
        else {
            self.watchdog = None;
            return;
        };
        let now = clock::monotonic();
        let seen = self.shared.sight.borrow().clone();
        let attempt = Attempt {
            sending: sending_of(sent, &seen),
            order: sent.map(|sent| &sent.order),
            held: hold.map(|hold| hold.holding),
            parting: sent.map_or(Parting::No, |sent| sent.parting),
        };
        let bytes = seen.migrate.ram.as_ref().and_then(|ram| ram.transferred).unwrap_or(0);
        // One that is held is another attempt than the live one before it.
        let key = (migration, hold.is_some());
        let (_, watchdog) = match &mut self.watchdog {
            Some(watched) if watched.0 == key => watched,
            other => other.insert((key, Watchdog::new(now))),
        };
        watchdog.heard(self.shared.heard());
        watchdog.saw(now, attempt, bytes);
        let still = watchdog.still(now);
        let limits = Limits::new(sent, record.hold_limit_ms);
        let due = watchdog.due(now, attempt, limits);
        let silent = watchdog.silent(now, attempt, limits);
        self.shared.sight.send_if_modified(|sight| {
            let moved = sight.still != still;
            sight.still = still;
            moved
        });
        if let Some(cause) = due {
            self.lane.give_up(migration, cause);
        }
        if silent.is_some() {
            self.lane.silent(migration);
        }
    }
}

/// Returns what QEMU says that a transfer is judged by.
fn figures(sent: &Outgoing, seen: &MigrateInfo) -> Figures {
    let ram = seen.ram.clone().unwrap_or_default();
    let limit = match sent.downtime_ms {
        0 => outgoing::DOWNTIME_LIMIT,
        asked => Millis(asked),
    };
    let slowed = match sent.tuned.throttle {
        Throttle::Off | Throttle::Ready => Slowed::Not,
        Throttle::On if seen.cpu_throttle_percentage >= Some(THROTTLE_MAX) => Slowed::Fully,
        Throttle::On => Slowed::More,
    };
    Figures {
        pass: ram.dirty_sync_count.unwrap_or(0),
        sent: ram.transferred.unwrap_or(0),
        remaining: ram.remaining.unwrap_or(0),
        dirty: ram.dirty_pages_rate.unwrap_or(0).saturating_mul(ram.page_size.unwrap_or(4096)),
        downtime: Millis(seen.expected_downtime.unwrap_or(0)),
        limit,
        slowed,
    }
}

/// Keeps how much had crossed before a transfer failed or was called back: QEMU does not say it
/// any more, and it is part of the reason.
fn keep_figures(now: &mut MigrateInfo, before: &MigrateInfo) {
    let over = matches!(
        now.status,
        Some(MigrationStatus::Failed | MigrationStatus::Cancelling | MigrationStatus::Cancelled)
    );
    if over && now.ram.is_none() {
        now.ram.clone_from(&before.ram);
    }
}

/// What the last event or tick leaves to be asked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ask {
    Figures,
    AllAnew,
}

/// Says what a source's QEMU is doing, by what is seen.
pub(crate) fn sending_of(sent: Option<&Outgoing>, sight: &Sight) -> Sending {
    let run = sight.run_state.clone().unwrap_or(RunState::Unknown(String::new()));
    outgoing::classify(sent, &run, &sight.migrate)
}
