//! Gives every open row a driver, and every queued one another chance.
//!
//! It takes no input: what it does follows from the rows alone, whether it was woken by a change,
//! by its timer, or by the start of the planner.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::error;
use vmferry_types::PhaseLabel;

use crate::planner::{Drives, Planner};
use crate::queue;
use crate::store::{Filter, OnlyOpen, StoreError};
use crate::telemetry::Chain;

/// Rows without a driver are looked for this often, though nothing woke it.
const TICK: Duration = Duration::from_secs(1);

/// Runs until the planner ends.
///
/// The queue runs beside, so that a source that does not answer keeps no other row waiting.
pub async fn run(planner: Arc<Planner>) {
    tokio::join!(drivers(&planner), queue::run(&planner));
}

async fn drivers(planner: &Arc<Planner>) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = planner.wake.notified() => {}
            _ = tick.tick() => {}
        }
        if let Err(error) = once(planner).await {
            error!(error = %Chain(&error), "open rows could not be read");
        }
    }
}

async fn once(planner: &Arc<Planner>) -> Result<(), StoreError> {
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let rows = planner.store().migrations(&open).await?;
    let actions = planner.store().open_power().await?;
    planner.live.sweep(|id| {
        rows.iter().any(|row| row.migration.id == id) || actions.iter().any(|of| of.id == id)
    });
    let queued = rows.iter().any(|row| row.migration.label() == PhaseLabel::Queued);
    planner.queue_waits.store(queued, Ordering::Relaxed);
    if queued {
        planner.room.notify_one();
    }
    for row in rows.iter().filter(|row| row.migration.label() != PhaseLabel::Queued) {
        planner.drive(row.migration.id, Drives::Migration);
    }
    for action in actions {
        planner.drive(action.id, Drives::Power);
    }
    Ok(())
}
