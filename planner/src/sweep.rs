//! VMs of hosts that are dead.
//!
//! A declaration marks what runs on its host as lost in its own transaction. This is for what came
//! to be there by a race with it: an admission that ended after. What an open admission owns is
//! left to that admission's driver.

use std::sync::Arc;
use std::time::Duration;

use tracing::{error, warn};
use vmferry_types::PowerState;

use crate::clock;
use crate::inventory::words_of_death;
use crate::planner::Planner;
use crate::store::{HostsMark, Lost, Sharing, StoreError};
use crate::telemetry::Chain;

/// What other planners declare is read this often.
const REREAD: Duration = Duration::from_secs(1);
/// Hosts are read again after so many of those, though none seems to have been written.
const REREAD_WHOLE: u32 = 60;
/// VMs are looked through this often, in units of [`REREAD`], while a host is dead.
const SWEEP: u32 = 5;

/// Runs until the planner ends.
pub(crate) async fn run(planner: &Arc<Planner>) {
    let mut tick = tokio::time::interval(REREAD);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = 0_u32;
    let mut known = None;
    loop {
        tick.tick().await;
        if ticks.is_multiple_of(REREAD_WHOLE) {
            known = None;
        }
        let looked = match reread(planner, &mut known).await {
            Ok(()) if ticks.is_multiple_of(SWEEP) => look_through(planner).await,
            reread @ (Ok(()) | Err(_)) => reread,
        };
        ticks = ticks.wrapping_add(1);
        if let Err(error) = looked {
            error!(error = %Chain(&error), "VMs of dead hosts could not be looked through");
        }
    }
}

/// Reads the hosts again, unless none was written since.
async fn reread(planner: &Planner, known: &mut Option<HostsMark>) -> Result<(), StoreError> {
    if planner.store().sharing() == Sharing::Alone {
        return Ok(());
    }
    // Read first: what is written after is read the next time.
    let mark = planner.store().hosts_mark().await?;
    if mark.is_none() || mark != *known {
        planner.parts.inventory.reread(planner.store()).await?;
        *known = mark;
    }
    Ok(())
}

async fn look_through(planner: &Planner) -> Result<(), StoreError> {
    let dead = planner.parts.inventory.all_dead();
    if dead.is_empty() {
        return Ok(());
    }
    for vm in planner.store().vms().await? {
        let on = dead.iter().find(|(host, _)| vm.host.as_ref() == Some(host));
        let Some((host, declaration)) = on else { continue };
        if vm.power != PowerState::Running || vm.admission.is_some() {
            continue;
        }
        let lost = Lost {
            vm: vm.id,
            host: host.clone(),
            generation: vm.generation,
            claim: vm.claim,
            cause: format!("host {host} was {}", words_of_death(declaration)),
        };
        if planner.store().mark_lost(&lost, clock::now()).await? {
            warn!(vm_id = %vm.id, host_id = %host, "VM is lost: its host is dead");
        }
    }
    Ok(())
}
