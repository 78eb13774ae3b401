//! Migrations that are called back.

use anyhow::{Result, bail};
use vmferry_proto::v1::{MigrateVmRequest, Migration};

use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, move_vm, request, settle};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("cancel-while-copying-keeps-the-guest", Tier::Subset, |cluster| {
            Box::pin(copying(cluster))
        }),
        Case::new("cancel-at-the-switchover-keeps-the-guest", Tier::Subset, |cluster| {
            Box::pin(at_switchover(cluster))
        }),
        Case::new("cancel-after-the-order-comes-too-late", Tier::Subset, |cluster| {
            Box::pin(too_late(cluster))
        }),
    ]
}

/// Prepares a migration whose copying never ends: the guest dirties twice what may cross.
pub(crate) fn endless(vm: &GuestVm) -> MigrateVmRequest {
    MigrateVmRequest { bandwidth_mbps: 80, ..move_to(vm, "b") }
}

/// Starts a migration whose copying never ends, and waits until data crosses.
pub(crate) async fn start_endless(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<Migration> {
    let migration = request(cluster, &endless(vm)).await?;
    let copying = |m: &Migration| m.phase == "admitted" && m.bytes_transferred > 0;
    cluster.clients.wait_migration(&migration.id, "to copy", MOVE_BOUND, copying).await
}

/// Waits for a migration to end as its cancel wants, and proves that the guest stayed.
pub(super) async fn expect_cancelled(cluster: &Cluster<'_>, vm: &GuestVm, id: &str) -> Result<()> {
    let migration = settle(cluster, vm, id, End::Aborted).await?;
    if migration.state != "cancelled" || !migration.cancel_requested {
        bail!("a cancelled migration says {}: {:?}", migration.state, migration.error);
    }
    Ok(())
}

async fn copying(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    let migration = start_endless(cluster, &vm).await?;
    cluster.clients.cancel(&migration.id).await?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    move_vm(cluster, &vm, "b").await?;
    Ok(Note::new())
}

async fn at_switchover(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    cluster.planner.faults.hold("before_commit.ordered")?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner.faults.wait_reached("before_commit.ordered", POINT_BOUND).await?;
    cluster.clients.cancel(&migration.id).await?;
    cluster.planner.faults.release("before_commit.ordered")?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    move_vm(cluster, &vm, "b").await?;
    Ok(Note::new())
}

async fn too_late(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("gone"), "a").await?;
    cluster.planner.faults.hold("before_commit.committed")?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner.faults.wait_reached("before_commit.committed", POINT_BOUND).await?;
    // Taken as a wish or refused as too late: both are honest, a half-way is not.
    let answer = cluster.clients.cancel(&migration.id).await;
    cluster.planner.faults.release("before_commit.committed")?;
    let over = |m: &Migration| matches!(m.phase.as_str(), "done" | "aborted" | "failed");
    let ended = cluster.clients.wait_migration(&migration.id, "to end", MOVE_BOUND, over).await?;
    let end = match ended.phase.as_str() {
        "done" => End::Done,
        "aborted" => End::Aborted,
        phase => bail!("a late cancel ended the migration as {phase}: {:?}", ended.error),
    };
    settle(cluster, &vm, &migration.id, end).await?;
    Ok(format!("{}, ended {}", if answer.is_ok() { "taken" } else { "refused" }, ended.phase))
}
