//! Gives every open row a driver, and every queued one another chance.
//!
//! It takes no input: what it does follows from the rows alone, whether it was woken by a change,
//! by its timer, or by the start of the planner.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{error, warn};
use vmferry_types::{Claim, MigrationId, PhaseLabel, Seq, Timestamp};

use crate::clock;
use crate::planner::{Drives, Planner};
use crate::queue;
use crate::store::{EmptyingFilter, Filter, OnlyOpen, Sharing, StoreError, Which, lease_holds};
use crate::telemetry::Chain;
use crate::{sharing, sweep};

/// Rows without a driver are looked for this often, though nothing woke it; more often where
/// leases are short, so that one that has ended is found at once.
const TICK: Duration = Duration::from_secs(1);

/// Runs until the planner ends.
///
/// The queue runs beside, so that a source that does not answer keeps no other row waiting.
pub async fn run(planner: Arc<Planner>) {
    tokio::join!(
        drivers(&planner),
        queue::run(&planner),
        sweep::run(&planner),
        sharing::run(&planner)
    );
}

async fn drivers(planner: &Arc<Planner>) {
    let mut tick = tokio::time::interval(TICK.min(planner.parts.config.policy.lease / 2));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut known = Known::default();
    loop {
        tokio::select! {
            biased;
            () = planner.wake.notified() => {}
            _ = tick.tick() => {}
        }
        if let Err(error) = once(planner, &mut known).await {
            error!(error = %Chain(&error), "open rows could not be read");
        }
    }
}

/// The open rows as they were read last. Another planner may write to any of them.
type Known = BTreeMap<MigrationId, (Claim, Seq)>;

async fn once(planner: &Arc<Planner>, known: &mut Known) -> Result<(), StoreError> {
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let rows = planner.store().migrations(&open).await?;
    let actions = planner.store().open_power().await?;
    planner.live.sweep(|id| {
        rows.iter().any(|row| row.migration.id == id) || actions.iter().any(|of| of.id == id)
    });
    if planner.store().sharing() == Sharing::Shared {
        let migrations = rows.iter().map(|row| (row.migration.id, (row.claim, row.seq)));
        let power = actions.iter().map(|action| (action.id, (action.claim, action.seq)));
        tell_changes(planner, known, migrations.chain(power).collect());
    }
    let starts = planner.store().queued_starts().await?;
    let queued =
        rows.iter().any(|row| row.migration.label() == PhaseLabel::Queued) || !starts.is_empty();
    planner.queue_waits.store(queued, Ordering::Relaxed);
    if queued {
        planner.room.notify_one();
    }
    let (now, term) = (planner.lease_clock().await?, planner.lease_term());
    let free = |owner: Option<&String>, until: Timestamp| {
        let Some(owner) = owner.filter(|owner| **owner != planner.owner) else { return true };
        let holds = lease_holds(until, now, term);
        if !holds && until > now {
            warn!(%owner, until = clock::rfc3339(until), now = clock::rfc3339(now),
                "a lease reaches further ahead than one can: a clock was wrong, and it is taken for ended");
        }
        !holds
    };
    for row in rows.iter().filter(|row| row.migration.label() != PhaseLabel::Queued) {
        if free(row.lease_owner.as_ref(), row.lease_until) {
            planner.drive(Drives::Migration(row.migration.id));
        } else {
            planner.live.driven_elsewhere(row.migration.id);
        }
    }
    for action in actions {
        if free(action.lease_owner.as_ref(), action.lease_until) {
            planner.drive(Drives::Power(action.id));
        } else {
            planner.live.driven_elsewhere(action.id);
        }
    }
    let driven = EmptyingFilter { which: Which::Driven, ..EmptyingFilter::default() };
    for row in planner.store().emptyings(&driven).await? {
        if free(row.lease_owner.as_ref(), row.lease_until) {
            planner.drive(Drives::Emptying(row.id()));
        }
    }
    Ok(())
}

/// Tells drivers, and those who wait, of rows that have changed since: a cancel, an admission from
/// the queue or an end may have been written by another planner.
fn tell_changes(planner: &Planner, known: &mut Known, read: Known) {
    for (id, row) in &read {
        if known.get(id) != Some(row) {
            planner.nudge(*id);
        }
    }
    let mut ended = known.keys().filter(|id| !read.contains_key(*id)).peekable();
    if ended.peek().is_some() {
        planner.power_changed();
        planner.hosts_changed();
    }
    for id in ended {
        planner.nudge(*id);
    }
    *known = read;
}
