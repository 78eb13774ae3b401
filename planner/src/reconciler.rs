//! Gives every open row a driver, and every queued one another chance.
//!
//! It takes no input: what it does follows from the rows alone, whether it was woken by a change,
//! by its timer, or by the start of the planner.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{error, info};
use vmferry_planner_core::migration::{Event, Phase};
use vmferry_types::{MigrationId, PhaseLabel};

use crate::admission::{self, Found};
use crate::clock;
use crate::planner::{Drives, Planner};
use crate::store::{Commit, Filter, Granted, MigrationRow, OnlyOpen, StoreError};
use crate::telemetry::Chain;

/// Rows without a driver are looked for this often, though nothing woke it.
const TICK: Duration = Duration::from_secs(1);
/// However often it is woken, a queued row is not tried more often than this.
const QUEUE_PACE: Duration = Duration::from_secs(1);

/// Runs until the planner ends.
pub async fn run(planner: Arc<Planner>) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut queue = Queue::default();
    loop {
        let woken = tokio::select! {
            biased;
            () = planner.wake.notified() => Woken::ByChange,
            _ = tick.tick() => Woken::ByTimer,
        };
        if let Err(error) = once(&planner, &mut queue, woken).await {
            error!(error = %Chain(&error), "open rows could not be read");
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    ByChange,
    ByTimer,
}

/// When each queued row was last tried.
#[derive(Default)]
struct Queue {
    tried: BTreeMap<MigrationId, Instant>,
}

impl Queue {
    /// Says whether a row is due: after a change soon, else at the pace of the policy.
    fn due(&mut self, id: MigrationId, woken: Woken, retry: Duration) -> bool {
        let now = Instant::now();
        let pace = match woken {
            Woken::ByChange => QUEUE_PACE.min(retry),
            Woken::ByTimer => retry,
        };
        let due = self.tried.get(&id).is_none_or(|at| now.duration_since(*at) >= pace);
        if due {
            self.tried.insert(id, now);
        }
        due
    }
}

async fn once(planner: &Arc<Planner>, queue: &mut Queue, woken: Woken) -> Result<(), StoreError> {
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let mut rows = planner.store().migrations(&open).await?;
    // The oldest first: room that is freed goes to who waited longest.
    rows.reverse();
    queue.tried.retain(|id, _| rows.iter().any(|row| row.migration.id == *id));
    let actions = planner.store().open_power().await?;
    planner.live.sweep(|id| {
        rows.iter().any(|row| row.migration.id == id) || actions.iter().any(|of| of.id == id)
    });
    let queued = rows.iter().any(|row| row.migration.label() == PhaseLabel::Queued);
    planner.queue_waits.store(queued, Ordering::Relaxed);
    for row in rows {
        if let Phase::Queued { .. } = row.migration.phase {
            if queue.due(row.migration.id, woken, planner.parts.config.policy.queue_retry) {
                try_admit(planner, row).await?;
            }
        } else {
            planner.drive(row.migration.id, Drives::Migration);
        }
    }
    for action in actions {
        planner.drive(action.id, Drives::Power);
    }
    Ok(())
}

/// Tries once to find room for a queued migration.
async fn try_admit(planner: &Arc<Planner>, row: MigrationRow) -> Result<(), StoreError> {
    let Phase::Queued { deadline, blocked } = &row.migration.phase else { return Ok(()) };
    if clock::now() >= *deadline {
        return apply(planner, &row, Event::QueueExpired).await;
    }
    let Some(vm) = planner.store().vm(row.migration.vm).await? else { return Ok(()) };
    let asked = row.migration.terms.asked_destination.as_ref();
    match admission::destination(planner, &vm, &row.migration.source, asked).await? {
        Found::Destination(grant) => {
            planner.parts.faults.pass("before_commit", "admitted").await;
            match planner.store().grant(&row, &grant, clock::now_us()).await? {
                Granted::Done(after) => {
                    planner.parts.faults.pass("after_commit", "admitted").await;
                    info!(migration_id = %row.migration.id, destination = %grant.destination,
                        phase = "admitted", "phase changed");
                    planner.live.ring(row.migration.id);
                    planner.take_up(&after);
                }
                Granted::Raced | Granted::Refused(_) => {}
            }
            Ok(())
        }
        Found::Wait { note, .. } => {
            if blocked.as_ref().is_some_and(|blocked| blocked.note == note) {
                return Ok(());
            }
            apply(planner, &row, Event::NoRoom { at: clock::now(), note }).await
        }
        Found::Never { blockers } => {
            // A source that does not answer now is not a reason for good.
            if blockers.iter().all(|blocker| blocker.code == "not_connected") {
                return Ok(());
            }
            apply(planner, &row, Event::Refused { blockers }).await
        }
    }
}

async fn apply(planner: &Arc<Planner>, row: &MigrationRow, event: Event) -> Result<(), StoreError> {
    let label = event.label();
    let entries = match row.migration.advance(event) {
        Ok(entries) => entries,
        Err(refusal) => {
            error!(migration_id = %row.migration.id, event = label, %refusal, "queued row refused");
            return Ok(());
        }
    };
    match planner.store().commit(row, &entries, &row.notes, clock::now_us()).await? {
        Commit::Done(after) => {
            if after.migration.label() != row.migration.label() {
                info!(migration_id = %row.migration.id, phase = after.migration.label().label(),
                    event = label, "phase changed");
            }
            planner.live.ring(row.migration.id);
            if after.ended_us.is_some() {
                planner.live.end(row.migration.id);
            }
        }
        Commit::Raced => {}
    }
    Ok(())
}
