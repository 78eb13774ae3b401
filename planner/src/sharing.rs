//! Tells other planners which hosts this one hears: in one write for all of them, well within the
//! time that it counts for, and at once of a host that is heard for the first time or again.

use std::sync::Arc;
use std::time::Duration;

use tracing::error;
use vmferry_types::Millis;

use crate::planner::{Planner, millis};
use crate::store::{Sharing, StoreError};
use crate::telemetry::Chain;

/// What was heard is gathered for so long.
const TICK: Duration = Duration::from_secs(1);

/// Runs until the planner ends; alone, it has nobody to tell.
pub(crate) async fn run(planner: &Arc<Planner>) {
    if planner.store().sharing() == Sharing::Alone {
        return;
    }
    let age = planner.parts.config.policy.report_max_age;
    let mut tick = tokio::time::interval(TICK.min(age / 4));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = planner.parts.inventory.newly_heard() => {}
            _ = tick.tick() => {}
        }
        if let Err(error) = share(planner, millis(age / 2)).await {
            error!(error = %Chain(&error), "other planners could not be told which hosts are heard");
        }
    }
}

async fn share(planner: &Planner, every: Millis) -> Result<(), StoreError> {
    let at = planner.lease_clock().await?;
    let hosts = planner.parts.inventory.to_be_shared(at, every);
    if hosts.is_empty() {
        return Ok(());
    }
    planner.store().hear_hosts(&hosts, &planner.owner, at).await?;
    planner.parts.inventory.note_shared(&hosts, at);
    Ok(())
}
