//! Tries again for migrations that found no room: the oldest first, for room that is freed goes to
//! who waited longest.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{error, info};
use vmferry_planner_core::migration::{Event, Phase};
use vmferry_types::{HostId, MigrationId};

use crate::admission::{self, Found};
use crate::planner::Planner;
use crate::store::{Commit, Filter, Granted, MigrationRow, OnlyOpen, StoreError};
use crate::telemetry::Chain;
use crate::{clock, faults};

/// However often the queue is woken, a row is not tried more often than this.
const PACE: Duration = Duration::from_secs(1);

/// Runs until the planner ends.
pub(crate) async fn run(planner: &Arc<Planner>) {
    let retry = planner.parts.config.policy.queue_retry;
    let mut tick = tokio::time::interval(retry);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut tried: BTreeMap<MigrationId, Instant> = BTreeMap::new();
    loop {
        tokio::select! {
            biased;
            () = planner.room.notified() => {}
            _ = tick.tick() => {}
        }
        if let Err(error) = once(planner, &mut tried).await {
            error!(error = %Chain(&error), "queued rows could not be tried");
        }
    }
}

async fn once(
    planner: &Arc<Planner>,
    tried: &mut BTreeMap<MigrationId, Instant>,
) -> Result<(), StoreError> {
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let mut rows = planner.store().migrations(&open).await?;
    rows.retain(|row| matches!(row.migration.phase, Phase::Queued { .. }));
    rows.reverse();
    tried.retain(|id, _| rows.iter().any(|row| row.migration.id == *id));
    let pace = PACE.min(planner.parts.config.policy.queue_retry);
    for row in rows {
        let now = Instant::now();
        let due = tried
            .get(&row.migration.id)
            .is_none_or(|before| now.saturating_duration_since(*before) >= pace);
        if due {
            tried.insert(row.migration.id, now);
            try_admit(planner, row).await?;
        }
    }
    Ok(())
}

/// Says whether a host was heard lately: asking one that was not would only wait for a deadline.
fn is_heard(planner: &Planner, host: &HostId) -> bool {
    let limit = u64::try_from(planner.parts.config.policy.report_max_age.as_millis());
    let limit = limit.unwrap_or(u64::MAX);
    let now = clock::now();
    let fresh = |heard: &crate::inventory::KnownHost| now.since(heard.at).value() <= limit;
    planner.parts.inventory.heard(host).as_ref().is_some_and(fresh)
}

/// Tries once to find room for a queued migration.
async fn try_admit(planner: &Arc<Planner>, row: MigrationRow) -> Result<(), StoreError> {
    let Phase::Queued { deadline, blocked } = &row.migration.phase else { return Ok(()) };
    if clock::now() >= *deadline {
        return apply(planner, &row, Event::QueueExpired).await;
    }
    if !is_heard(planner, &row.migration.source) {
        return Ok(());
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
            // A host that does not answer now is not a reason for good, whatever speaks against the others.
            if blockers.iter().any(|blocker| passes(&blocker.code)) {
                return Ok(());
            }
            apply(planner, &row, Event::Refused { blockers }).await
        }
    }
}

/// Says whether a reason against a host is only that nobody could ask it now.
fn passes(code: &str) -> bool {
    matches!(code, "not_connected" | "learning" | "unreadable" | "stale_report")
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
    let points = faults::points(&row.migration, &entries);
    planner.parts.faults.pass_all("before_commit", &points).await;
    match planner.store().commit(row, &entries, &row.notes, clock::now_us()).await? {
        Commit::Done(after) => {
            planner.parts.faults.pass_all("after_commit", &points).await;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_host_itself_may_take_back_passes() {
        for code in ["not_connected", "learning", "unreadable", "stale_report"] {
            assert!(passes(code), "{code}");
        }
        for code in ["disk_missing", "pinned", "cpu_model_missing", "qemu_blocked", ""] {
            assert!(!passes(code), "{code}");
        }
    }
}
