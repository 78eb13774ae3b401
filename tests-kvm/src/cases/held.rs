//! Moves whose guest is held still while its memory crosses: asked for, or since the live one was
//! refused.

use std::time::Duration;

use anyhow::{Result, bail};
use vmferry_proto::v1::{MigrateVmRequest, Migration};

use super::cancel::{endless, expect_cancelled};
use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, move_vm, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::wait::let_pass;

/// Long enough to tell that a guest stands still: it prints a line every 10 ms.
const SILENCE: Duration = Duration::from_millis(300);

/// Where the planner has just written down that the guest is held, and has sent nothing yet.
const HELD: &str = "after_commit.held";

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("held-move-loses-nothing", Tier::Subset, |cluster| Box::pin(asked_for(cluster))),
        Case::new("live-move-that-cannot-converge-goes-on-held", Tier::All, |cluster| {
            Box::pin(downgraded(cluster))
        }),
        Case::new(
            "live-move-that-cannot-converge-ends-where-nobody-allowed-more",
            Tier::All,
            |cluster| Box::pin(not_allowed(cluster)),
        ),
        Case::new(
            "cancel-of-a-move-that-became-a-held-one-keeps-the-guest",
            Tier::All,
            |cluster| Box::pin(cancelled(cluster)),
        ),
        Case::new(
            "agent-killed-while-its-guest-is-held-keeps-it-still-and-goes-on",
            Tier::All,
            |cluster| Box::pin(agent_killed(cluster)),
        ),
        Case::new("planner-away-while-the-guest-is-held-is-aborted", Tier::All, |cluster| {
            Box::pin(planner_away(cluster))
        }),
    ]
}

fn held(vm: &GuestVm) -> MigrateVmRequest {
    MigrateVmRequest { method: "snapshot".into(), ..move_to(vm, "b") }
}

/// A live move whose guest dirties twice what may cross, and is given four seconds.
fn hopeless(vm: &GuestVm, downgrade: &str) -> MigrateVmRequest {
    MigrateVmRequest { timeout_ms: 4_000, downgrade: downgrade.into(), ..endless(vm) }
}

/// Checks that the record says how, and why, the guest came to be held.
fn expect_downgraded(migration: &Migration) -> Result<()> {
    let how = (migration.method.as_str(), migration.downgraded_from.as_str());
    if how != ("snapshot", "precopy") || !migration.downgrade_cause.contains("not reached") {
        bail!("the record says {how:?}: {:?}", migration.downgrade_cause);
    }
    Ok(())
}

async fn asked_for(cluster: &mut Cluster<'_>) -> Result<Note> {
    let disk = cluster.disk_path("held.raw");
    let vm = cluster.start_vm(&GuestSpec::rom("held").with_disk(&disk, "raw"), "a").await?;
    let migration = request(cluster, &held(&vm)).await?;
    let migration = settle(cluster, &vm, &migration.id, End::Done).await?;
    if migration.method != "snapshot" || !migration.downgraded_from.is_empty() {
        bail!("the record says {} from {:?}", migration.method, migration.downgraded_from);
    }
    // What it had in memory is looked at by the guest itself.
    vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    Ok(pause_note(&vm))
}

async fn downgraded(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("busy"), "a").await?;
    let migration = request(cluster, &hopeless(&vm, "snapshot")).await?;
    let migration = settle(cluster, &vm, &migration.id, End::Done).await?;
    expect_downgraded(&migration)?;
    vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    move_vm(cluster, &vm, "a").await?;
    Ok(format!("{}; {}", pause_note(&vm), migration.downgrade_cause))
}

async fn not_allowed(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("busy"), "a").await?;
    let migration = request(cluster, &hopeless(&vm, "never")).await?;
    let migration = settle(cluster, &vm, &migration.id, End::Aborted).await?;
    if migration.method != "precopy" || !migration.downgraded_from.is_empty() {
        bail!("the record says {} from {:?}", migration.method, migration.downgraded_from);
    }
    Ok(migration.error)
}

/// Brings a live move that cannot converge to where its guest has just been held.
async fn up_to_the_hold(cluster: &mut Cluster<'_>, vm: &GuestVm) -> Result<Migration> {
    cluster.planner.faults.hold(HELD)?;
    let migration = request(cluster, &hopeless(vm, "snapshot")).await?;
    cluster.planner.faults.wait_reached(HELD, POINT_BOUND).await?;
    vm.serial.wait_still(SILENCE, MOVE_BOUND).await?;
    let held = |seen: &vmferry_proto::v1::VmObservation| {
        seen.role == "held" && seen.run_state == "paused" && seen.switched_off == ["vcpus"]
    };
    cluster.clients.wait_observation("a", vm, MOVE_BOUND, held).await?;
    Ok(migration)
}

async fn cancelled(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    let migration = up_to_the_hold(cluster, &vm).await?;
    cluster.clients.cancel(&migration.id).await?;
    cluster.planner.faults.release(HELD)?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    let ended = cluster.clients.wait_migration(&migration.id, "its record", MOVE_BOUND, |_| true);
    expect_downgraded(&ended.await?)?;
    move_vm(cluster, &vm, "b").await?;
    Ok(pause_note(&vm))
}

async fn agent_killed(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("still"), "a").await?;
    let migration = up_to_the_hold(cluster, &vm).await?;
    let printed = vm.serial.history().ticks.len();
    let agent = &mut cluster.host("a")?.agent;
    agent.kill().await?;
    agent.start()?;
    let held =
        |seen: &vmferry_proto::v1::VmObservation| seen.role == "held" && seen.run_state == "paused";
    cluster.clients.wait_observation("a", &vm, MOVE_BOUND, held).await?;
    let_pass(Duration::from_secs(1)).await;
    if vm.serial.history().ticks.len() > printed {
        bail!("the guest went on though it was held and its agent was only restarted");
    }
    cluster.planner.faults.release(HELD)?;
    let migration = settle(cluster, &vm, &migration.id, End::Done).await?;
    expect_downgraded(&migration)?;
    Ok(pause_note(&vm))
}

async fn planner_away(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("held"), "a").await?;
    cluster.planner.faults.kill_at(HELD)?;
    let asked = MigrateVmRequest { hold_limit_ms: 2_000, ..held(&vm) };
    let migration = request(cluster, &asked).await?;
    cluster.planner.daemon.wait_end(POINT_BOUND).await?;
    cluster.planner.faults.disarm()?;
    vm.serial.wait_still(SILENCE, MOVE_BOUND).await?;
    // With the planner still away: the guest must not need it.
    vm.serial.wait_ticks(20, Duration::from_secs(10)).await?;
    cluster.planner.daemon.start()?;
    let migration = settle(cluster, &vm, &migration.id, End::Aborted).await?;
    Ok(migration.error)
}
