//! Tries again for those that found no room: migrations, and VMs that are to be started.
//!
//! In the order of the core's queue: by priority, the oldest first. Each is tried by itself, so one
//! that fits is not held up by an older one that does not.

mod start;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{error, info};
use vmferry_planner_core::migration::{Blocked, Event, Phase};
use vmferry_planner_core::queue::{Place, Waiting, order};
use vmferry_types::{HostId, MigrationId, Timestamp};

use crate::admission::{self, Found};
use crate::planner::Planner;
use crate::store::{
    Commit, Filter, Granted, MigrationRow, OnlyOpen, QueuedStart, Refused, StoreError,
};
use crate::telemetry::Chain;
use crate::{clock, faults};

/// However often the queue is woken, a row is not tried more often than this.
const PACE: Duration = Duration::from_secs(1);

/// One that waits for room.
#[derive(Clone, Debug)]
pub enum Row {
    /// A migration.
    Migration(Box<MigrationRow>),
    /// A start.
    Start(Box<QueuedStart>),
}

impl Row {
    /// Returns its id.
    #[must_use]
    pub fn id(&self) -> MigrationId {
        match self {
            Self::Migration(row) => row.migration.id,
            Self::Start(start) => start.id,
        }
    }
}

/// One that waits for room, and where it stands.
#[derive(Clone, Debug)]
pub struct Queued {
    /// What waits.
    pub row: Row,
    /// For what, since when and until when.
    pub waiting: Waiting,
    /// At which position.
    pub place: Place,
}

/// Reads all that wait, in the order in which they are tried.
///
/// # Errors
///
/// Fails if the store does.
pub async fn queued(planner: &Planner) -> Result<Vec<Queued>, StoreError> {
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let migrations = planner.store().migrations(&open).await?.into_iter();
    let starts = planner.store().queued_starts().await?.into_iter();
    let mut rows: BTreeMap<MigrationId, (Row, Waiting)> = migrations
        .filter_map(|row| Some((row.migration.id, (of_migration(&row)?, row))))
        .map(|(id, (waiting, row))| (id, (Row::Migration(Box::new(row)), waiting)))
        .chain(
            starts.map(|start| (start.id, (Row::Start(Box::new(start.clone())), of_start(&start)))),
        )
        .collect();
    let waiting: Vec<Waiting> = rows.values().map(|(_, waiting)| waiting.clone()).collect();
    let places = order(&waiting, &planner.parts.config.policy.ranking);
    Ok(places
        .into_iter()
        .filter_map(|place| {
            let (row, waiting) = rows.remove(&place.id)?;
            Some(Queued { row, waiting, place })
        })
        .collect())
}

fn of_migration(row: &MigrationRow) -> Option<Waiting> {
    let Phase::Queued { blocked, deadline } = &row.migration.phase else { return None };
    Some(Waiting {
        id: row.migration.id,
        priority: row.notes.sake.priority,
        asked: Timestamp(row.created_us),
        blocked_since: blocked.as_ref().map(|blocked| blocked.since),
        deadline: *deadline,
        note: blocked.as_ref().map(|blocked| blocked.note.clone()).unwrap_or_default(),
    })
}

fn of_start(start: &QueuedStart) -> Waiting {
    Waiting {
        id: start.id,
        priority: start.priority,
        asked: Timestamp(start.asked_us),
        blocked_since: Some(start.blocked_since),
        deadline: start.deadline,
        note: start.note.clone(),
    }
}

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
    let rows = queued(planner).await?;
    tried.retain(|id, _| rows.iter().any(|of| of.row.id() == *id));
    let pace = PACE.min(planner.parts.config.policy.queue_retry);
    for of in rows {
        let now = Instant::now();
        let due = tried
            .get(&of.row.id())
            .is_none_or(|before| now.saturating_duration_since(*before) >= pace);
        if due {
            tried.insert(of.row.id(), now);
            match of.row {
                Row::Migration(row) => try_admit(planner, *row).await?,
                Row::Start(start) => start::try_start(planner, &start).await?,
            }
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
    let sake = &row.notes.sake;
    let how = (row.migration.method, sake);
    match admission::destination(planner, &vm, &row.migration.source, asked, how).await? {
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
                // Its own job's driver has to know that the next turn is its.
                Granted::Refused(refused @ Refused::OwnLimit { .. }) => {
                    return wait(planner, &row, blocked.as_ref(), refused.to_string()).await;
                }
                Granted::Raced | Granted::Refused(_) => {}
            }
            Ok(())
        }
        Found::Wait { note, .. } => wait(planner, &row, blocked.as_ref(), note).await,
        Found::Never { blockers } => {
            // A host that does not answer now is not a reason for good, whatever speaks against the others.
            if blockers.iter().any(|blocker| passes(&blocker.code)) {
                return Ok(());
            }
            apply(planner, &row, Event::Refused { blockers }).await
        }
    }
}

/// Writes down why it waits, if that is news.
async fn wait(
    planner: &Arc<Planner>,
    row: &MigrationRow,
    blocked: Option<&Blocked>,
    note: String,
) -> Result<(), StoreError> {
    if blocked.is_some_and(|blocked| blocked.note == note) {
        return Ok(());
    }
    apply(planner, row, Event::NoRoom { at: clock::now(), note }).await
}

/// Says whether a reason against a host is only that nobody could ask it now.
pub(crate) fn passes(code: &str) -> bool {
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
                planner.hosts_changed();
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
