//! Moves whose guest is held still while its memory crosses: asked for, or since the live one was
//! refused.

use anyhow::Result;
use vmferry_proto::v1::{MigrateVmRequest, Migration};

use super::{Asked, Stage, guest, hold, hold_planners, stage, start, under_way, wait_planner};
use crate::cases::{MOVE_BOUND, request};
use crate::client::move_to;
use crate::cluster::{Cluster, GuestVm};
use crate::matrix::Cell;

/// Where the live attempt is taken back, and its receiver is to go.
const CLEARED: &str = "after_commit.clearing_live";

fn held(vm: &GuestVm) -> MigrateVmRequest {
    MigrateVmRequest { method: "snapshot".into(), ..move_to(vm, "b") }
}

/// A live move whose guest dirties twice what may cross, and which is given two seconds.
fn hopeless(vm: &GuestVm) -> MigrateVmRequest {
    MigrateVmRequest {
        bandwidth_mbps: 80,
        timeout_ms: 2_000,
        downgrade: "snapshot".into(),
        ..move_to(vm, "b")
    }
}

pub(super) async fn moves(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    let vm = start(cluster, &guest(cluster)).await?;
    hold(cluster, cell.point)?;
    let asked = Asked::Migrate(held(&vm));
    stage(cluster, vm, asked, None).await
}

pub(super) async fn cancelled(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    let vm = start(cluster, &guest(cluster)).await?;
    let slow = MigrateVmRequest { bandwidth_mbps: 40, ..held(&vm) };
    let migration = request(cluster, &slow).await?;
    let crosses = |m: &Migration| m.phase == "captured" && m.bytes_transferred > 0;
    cluster.clients.wait_migration(&migration.id, "to be held", MOVE_BOUND, crosses).await?;
    hold(cluster, cell.point)?;
    stage(cluster, vm, Asked::Cancel(migration.id), None).await
}

/// What the cell is about comes after the live attempt has begun, which passes some of the same
/// points.
pub(super) async fn downgraded(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    let vm = start(cluster, &guest(cluster)).await?;
    let stage = under_way(cluster, vm.clone(), hopeless(&vm), None).await?;
    hold(cluster, cell.point)?;
    Ok(stage)
}

pub(super) async fn downgrade_cancelled(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    let vm = start(cluster, &guest(cluster)).await?;
    if let Some(second) = &mut cluster.second {
        // Or it would take over from the driver that waits.
        second.daemon.stop().await?;
    }
    hold_planners(cluster, CLEARED)?;
    let migration = request(cluster, &hopeless(&vm)).await?;
    wait_planner(cluster, CLEARED).await?;
    // The driver stays there until the victim has died: the call is what comes to the cell's point.
    hold(cluster, cell.point)?;
    stage(cluster, vm, Asked::Cancel(migration.id), None).await
}
