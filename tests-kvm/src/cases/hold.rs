//! A planner that is away while the guest stands still.

use std::time::Duration;

use anyhow::{Result, bail};
use vmferry_proto::v1::MigrateVmRequest;

use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;
use crate::wait::let_pass;

/// Long enough to tell that a guest stands still: it prints a line every 10 ms.
const SILENCE: Duration = Duration::from_millis(300);

/// How the planner's absence relates to the hold limit.
#[derive(Clone, Copy, Debug)]
struct Absence {
    hold_limit: Duration,
    away: Duration,
}

const SHORT: Absence = Absence { hold_limit: Duration::from_secs(2), away: Duration::from_secs(3) };
const MINUTE: Absence =
    Absence { hold_limit: Duration::from_secs(10), away: Duration::from_secs(60) };

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (label, tier, absence) in
        [("past-the-hold-limit", Tier::Subset, SHORT), ("for-a-minute", Tier::All, MINUTE)]
    {
        cases.push(Case::new(
            format!("planner-away-{label}-not-ordered-is-aborted"),
            tier,
            move |cluster| Box::pin(not_told(cluster, "before_commit.ordered", absence)),
        ));
        cases.push(Case::new(
            format!("planner-away-{label}-ordered-goes-on"),
            tier,
            move |cluster| Box::pin(ordered(cluster, absence)),
        ));
    }
    cases.push(Case::new(
        "planner-away-after-an-unsent-order-is-aborted",
        Tier::Subset,
        |cluster| Box::pin(not_told(cluster, "after_commit.ordered", SHORT)),
    ));
    cases.push(Case::new("planner-away-within-the-hold-limit-goes-on", Tier::Subset, |cluster| {
        Box::pin(within(cluster))
    }));
    cases
}

fn limited(vm: &crate::cluster::GuestVm, absence: Absence) -> Result<MigrateVmRequest> {
    Ok(MigrateVmRequest {
        hold_limit_ms: u64::try_from(absence.hold_limit.as_millis())?,
        ..move_to(vm, "b")
    })
}

/// The guest stands still, nobody told its host to go on: the host lets it run after a while, and
/// refuses an order that comes later, even one that was written down before.
async fn not_told(cluster: &mut Cluster<'_>, point: &str, absence: Absence) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("held"), "a").await?;
    cluster.planner.faults.kill_at(point)?;
    let migration = request(cluster, &limited(&vm, absence)?).await?;
    cluster.planner.daemon.wait_end(POINT_BOUND).await?;
    cluster.planner.faults.disarm()?;
    vm.serial.wait_still(SILENCE, MOVE_BOUND).await?;
    // With the planner still away: the guest must not need it.
    vm.serial.wait_ticks(20, absence.hold_limit + Duration::from_secs(5)).await?;
    let stood_us = vm.serial.history().longest_gap_us(0);
    let_pass(absence.away.saturating_sub(absence.hold_limit)).await;
    cluster.planner.daemon.start()?;
    let migration = settle(cluster, &vm, &migration.id, End::Aborted).await?;
    if migration.state != "failed" {
        bail!("nobody asked for it, but the state is {}", migration.state);
    }
    Ok(format!(
        "stood still for {:.1} s; {}",
        Duration::from_micros(stood_us).as_secs_f64(),
        migration.error
    ))
}

/// The switchover was ordered and both ends have finished: it waits for the planner, whatever the limit.
async fn ordered(cluster: &mut Cluster<'_>, absence: Absence) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("held"), "a").await?;
    cluster.planner.faults.kill_at("before_commit.restored")?;
    let migration = request(cluster, &limited(&vm, absence)?).await?;
    cluster.planner.daemon.wait_end(POINT_BOUND).await?;
    cluster.planner.faults.disarm()?;
    let printed = vm.serial.history().ticks.len();
    let_pass(absence.away).await;
    // A line that was under way may still have come; a guest that runs would have printed hundreds.
    if vm.serial.history().ticks.len() > printed + 5 {
        bail!("the guest went on although its switchover was ordered and nobody had committed it");
    }
    cluster.planner.daemon.start()?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

/// A planner that is back in time finishes what it began.
async fn within(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("held"), "a").await?;
    cluster.planner.faults.kill_at("before_commit.ordered")?;
    let patient = Absence { hold_limit: Duration::from_secs(20), away: Duration::ZERO };
    let migration = request(cluster, &limited(&vm, patient)?).await?;
    cluster.planner.daemon.wait_end(POINT_BOUND).await?;
    cluster.planner.faults.disarm()?;
    vm.serial.wait_still(SILENCE, MOVE_BOUND).await?;
    cluster.planner.daemon.start()?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}
