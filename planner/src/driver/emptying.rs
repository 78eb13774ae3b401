//! Drives what empties a host: a maintenance job, a drain, a retirement.
//!
//! It decides nothing by itself: what was seen is read into the row, the row says what is owed, and
//! each thing owed is done and written down before the next. Start-up, timer and commit come by the
//! same path.

mod begin;
pub mod facts;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{Instrument as _, debug, error, info, info_span, warn};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, EmptyingId, Refusal, drain, job};
use vmferry_types::{MigrationId, VmId};

use self::facts::{Asking, Facts};
use crate::api::ApiError;
use crate::clock;
use crate::plan::Described;
use crate::planner::Planner;
use crate::store::{Commit, EmptyingChange, EmptyingRow, StoreError, TakeEmptying};
use crate::telemetry::Chain;

/// What is owed is looked at this often though nothing rang.
const TICK: Duration = Duration::from_secs(1);
/// A host that is empty is asked this often whether it still is.
const WATCH: Duration = Duration::from_secs(10);

/// Drives an emptying until nothing is owed, or another driver has it.
pub async fn drive(planner: &Arc<Planner>, id: EmptyingId, nudge: &Notify) {
    let taken = take_over(planner, id).await;
    let row = match taken {
        Ok(TakeEmptying::Taken(row)) => *row,
        Ok(TakeEmptying::Busy) => {
            debug!(emptying_id = %id, "another driver has it");
            return;
        }
        Ok(TakeEmptying::Ended) => return,
        Err(error) => {
            error!(emptying_id = %id, error = %Chain(&error), "emptying could not be taken over");
            return;
        }
    };
    let span = info_span!(parent: None, "emptying", emptying_id = %id,
        host_id = %row.emptying.host(), kind = row.emptying.kind().label(), claim = %row.claim);
    let now = Instant::now();
    let mut run = Run {
        planner,
        row,
        lease_due: now + planner.lease_renewal(),
        watch_due: now,
        described: Described::default(),
        begins_due: BTreeMap::new(),
    };
    async {
        match run.finish(nudge).await {
            Ok(Outcome::Ended) => {}
            Ok(Outcome::Superseded) => debug!("another driver has it"),
            Err(error) => {
                error!(error = %Chain(&error), "driver stopped; the row stays as it is");
            }
        }
    }
    .instrument(span)
    .await;
    planner.hosts_changed();
}

async fn take_over(planner: &Planner, id: EmptyingId) -> Result<TakeEmptying, StoreError> {
    let (now, until) = planner.lease().await?;
    planner.store().take_over_emptying(id, &planner.owner, until, now).await
}

/// How driving ended.
enum Outcome {
    /// Nothing is owed.
    Ended,
    /// Another driver has the row.
    Superseded,
}

/// What became of a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// The row has moved on.
    Moved,
    /// Someone else wrote it: it was read again.
    Reread,
    /// The event changes nothing.
    Nothing,
    /// Another driver has it.
    Superseded,
}

/// Driving under one claim.
struct Run<'a> {
    planner: &'a Arc<Planner>,
    row: EmptyingRow,
    lease_due: Instant,
    watch_due: Instant,
    described: Described,
    /// When a VM that could not be begun is tried again.
    begins_due: BTreeMap<VmId, Instant>,
}

impl Run<'_> {
    async fn finish(&mut self, nudge: &Notify) -> Result<Outcome, StoreError> {
        let mut tick = tokio::time::interval(TICK.min(self.planner.lease_renewal()));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ends = self.planner.host_changes();
        loop {
            if self.turn().await? == Written::Superseded {
                return Ok(Outcome::Superseded);
            }
            if !self.row.emptying.is_driven() {
                return Ok(Outcome::Ended);
            }
            tokio::select! {
                biased;
                () = nudge.notified() => {}
                changed = ends.changed() => {
                    if changed.is_err() {
                        return Ok(Outcome::Superseded);
                    }
                }
                _ = tick.tick() => {}
            }
            if !self.keep_lease().await? || self.reread().await? == Written::Superseded {
                return Ok(Outcome::Superseded);
            }
        }
    }

    /// Reads what is seen, writes what follows from it, and does what is owed.
    async fn turn(&mut self) -> Result<Written, StoreError> {
        loop {
            let asking = self.asking();
            let facts = facts::gather(self.planner, &self.row, &mut self.described, asking).await?;
            let now = clock::now();
            let (changes, owed) = match (&self.row.emptying, facts) {
                (of @ Emptying::Job(row), Facts::Job(facts)) => {
                    of_job(of, &job::step(row, &facts, now))
                }
                (of @ Emptying::Drain(row), Facts::Drain(facts)) => {
                    of_drain(of, &drain::step(row, &facts, now))
                }
                (Emptying::Job(_), Facts::Drain(_)) | (Emptying::Drain(_), Facts::Job(_)) => {
                    return Ok(Written::Nothing);
                }
            };
            if !changes.is_empty() {
                match self.commit(changes).await? {
                    Written::Moved => {}
                    Written::Reread => continue,
                    end @ (Written::Superseded | Written::Nothing) => return Ok(end),
                }
            }
            let mut moved = false;
            for one in owed {
                match self.perform(one).await? {
                    Written::Superseded => return Ok(Written::Superseded),
                    Written::Moved | Written::Reread => moved = true,
                    Written::Nothing => {}
                }
                if !self.keep_lease().await? {
                    return Ok(Written::Superseded);
                }
            }
            if !moved {
                return Ok(Written::Nothing);
            }
        }
    }

    /// Says whether the agent is asked now what is on its host.
    fn asking(&mut self) -> Asking {
        let owed = match &self.row.emptying {
            Emptying::Job(row) => row.outstanding().contains(&job::Effect::AskWhetherEmpty),
            Emptying::Drain(row) => match row.phase {
                drain::Phase::Empty { .. } => {
                    let due = Instant::now() >= self.watch_due;
                    if due {
                        self.watch_due = Instant::now() + WATCH;
                    }
                    due
                }
                drain::Phase::Emptying
                | drain::Phase::Granted { .. }
                | drain::Phase::Cancelled { .. }
                | drain::Phase::Died { .. } => {
                    row.outstanding().contains(&drain::Effect::AskWhetherEmpty)
                }
            },
        };
        if owed { Asking::Agent } else { Asking::Nobody }
    }

    async fn perform(&mut self, owed: Owed) -> Result<Written, StoreError> {
        match owed {
            Owed::Begin(begin) => self.begin(begin).await,
            Owed::Cancel { vm, migration } => self.take_back(vm, migration).await,
        }
    }

    /// Asks a migration to go back. It may be too late for that, and then it is seen to its end.
    async fn take_back(&mut self, vm: VmId, migration: MigrationId) -> Result<Written, StoreError> {
        match self.planner.cancel_migration(&migration.to_string()).await {
            Ok(_) => {}
            Err(ApiError::Store(error)) => return Err(error),
            Err(error) => {
                info!(migration_id = %migration, error = %Chain(&error), "migration goes on");
            }
        }
        self.apply(match &self.row.emptying {
            Emptying::Job(_) => EmptyingEvent::Job(job::Event::CancelAsked { vm }),
            Emptying::Drain(_) => EmptyingEvent::Drain(drain::Event::CancelAsked { vm }),
        })
        .await
    }

    /// Writes down that a VM was not begun, for good or for a while.
    async fn not_begun(&mut self, vm: VmId, error: String) -> Result<Written, StoreError> {
        let at = clock::now();
        self.apply(match &self.row.emptying {
            Emptying::Job(_) => EmptyingEvent::Job(job::Event::NotBegun { vm, error, at }),
            Emptying::Drain(_) => EmptyingEvent::Drain(drain::Event::NotBegun { vm, error, at }),
        })
        .await
    }

    async fn apply(&mut self, event: EmptyingEvent) -> Result<Written, StoreError> {
        match self.row.emptying.apply(&event) {
            Ok(after) => self.commit(vec![EmptyingChange { event, after }]).await,
            Err(Refusal::Stale) => Ok(Written::Nothing),
            Err(refusal @ (Refusal::Illegal | Refusal::Denied)) => {
                warn!(event = event.label(), phase = self.row.emptying.label(), %refusal,
                    "event cannot happen here");
                Ok(Written::Nothing)
            }
        }
    }

    async fn commit(&mut self, changes: Vec<EmptyingChange>) -> Result<Written, StoreError> {
        let points = crate::faults::emptying_points(&self.row.emptying, &changes);
        self.planner.parts.faults.pass_all("before_commit", &points).await;
        let before = self.row.emptying.label();
        match self.planner.store().commit_emptying(&self.row, &changes, clock::now_us()).await? {
            Commit::Raced => self.reread().await,
            Commit::Done(row) => {
                self.row = *row;
                self.planner.parts.faults.pass_all("after_commit", &points).await;
                self.log(before, &changes);
                self.planner.hosts_changed();
                Ok(Written::Moved)
            }
        }
    }

    fn log(&self, before: &'static str, changes: &[EmptyingChange]) {
        let mut phase = before;
        for change in changes {
            let after = change.after.label();
            if after == phase {
                debug!(event = change.event.label(), phase, "emptying goes on");
            } else {
                info!(phase = after, event = change.event.label(), "phase changed");
            }
            phase = after;
        }
    }

    async fn reread(&mut self) -> Result<Written, StoreError> {
        match self.planner.store().emptying(self.row.id()).await? {
            Some(row) if row.claim == self.row.claim => {
                self.row = row;
                Ok(Written::Reread)
            }
            Some(_) | None => Ok(Written::Superseded),
        }
    }

    async fn keep_lease(&mut self) -> Result<bool, StoreError> {
        let now = Instant::now();
        if now < self.lease_due {
            return Ok(true);
        }
        self.lease_due = now + self.planner.lease_renewal();
        let (_, until) = self.planner.lease().await?;
        self.planner.store().renew_emptying_lease(&self.row, &self.planner.owner, until).await
    }
}

/// One thing that is to be done now.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Owed {
    Begin(begin::Begin),
    Cancel { vm: VmId, migration: MigrationId },
}

fn of_job(row: &Emptying, step: &job::Step) -> (Vec<EmptyingChange>, Vec<Owed>) {
    let changes = replayed(row, step.events.iter().cloned().map(EmptyingEvent::Job));
    let owed = step.effects.iter().filter_map(|effect| match effect {
        job::Effect::Begin { vm, planned, mode } => Some(Owed::Begin(begin::Begin {
            vm: *vm,
            planned: planned.clone(),
            mode: *mode,
            way: begin::Way::Out,
            from: step.after.host.clone(),
        })),
        job::Effect::BringBack { vm, mode, from, .. } => Some(Owed::Begin(begin::Begin {
            vm: *vm,
            planned: step.after.host.clone(),
            mode: *mode,
            way: begin::Way::Back,
            from: from.clone(),
        })),
        job::Effect::Cancel { vm, migration } => {
            Some(Owed::Cancel { vm: *vm, migration: *migration })
        }
        // It was asked with the facts.
        job::Effect::AskWhetherEmpty => None,
    });
    (changes, owed.collect())
}

fn of_drain(row: &Emptying, step: &drain::Step) -> (Vec<EmptyingChange>, Vec<Owed>) {
    let changes = replayed(row, step.events.iter().cloned().map(EmptyingEvent::Drain));
    let owed = step.effects.iter().filter_map(|effect| match effect {
        drain::Effect::Begin { vm, planned, mode } => Some(Owed::Begin(begin::Begin {
            vm: *vm,
            planned: planned.clone(),
            mode: *mode,
            way: begin::Way::Drained,
            from: step.after.host.clone(),
        })),
        drain::Effect::Cancel { vm, migration } => {
            Some(Owed::Cancel { vm: *vm, migration: *migration })
        }
        drain::Effect::Replan | drain::Effect::AskWhetherEmpty => None,
    });
    (changes, owed.collect())
}

/// Returns the events of a step, each with the row after it.
fn replayed(row: &Emptying, events: impl Iterator<Item = EmptyingEvent>) -> Vec<EmptyingChange> {
    let mut changes: Vec<EmptyingChange> = Vec::new();
    for event in events {
        let before = changes.last().map_or(row, |change| &change.after);
        let Ok(after) = before.apply(&event) else { break };
        changes.push(EmptyingChange { event, after });
    }
    changes
}
