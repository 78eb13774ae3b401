//! A host dies while it is drained.

use std::sync::Arc;

use anyhow::{Result, bail};
use vmferry_proto::v1::StartVmRequest;

use super::{BOUND, cli_tells, drain, see, start_all};
use crate::cases::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier};
use crate::cluster::{Cluster, GuestVm};
use crate::story::Moment;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("host-that-dies-while-it-drains-is-told-so", Tier::All, |cluster| {
            Box::pin(died(cluster))
        })
        .on_three_hosts(),
    ]
}

async fn died(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two", "three"], "a").await?;
    let planner = &cluster.planner.faults;
    let mut asked = drain("a");
    asked.policy =
        Some(vmferry_proto::v1::MaintenancePolicy { max_parallel: Some(1), ..Default::default() });
    planner.hold("before_commit.committed")?;
    let drained = cluster.clients.planner().drain_host(asked).await?.into_inner();
    planner.wait_reached("before_commit.committed", POINT_BOUND).await?;
    // The first leaves; the second is held where its memory has not crossed.
    planner.hold("after_commit.armed")?;
    planner.release("before_commit.committed")?;
    let seen = see(cluster, &drained.id, "one further", BOUND, |seen| {
        let progress = seen.progress.unwrap_or_default();
        progress.moved == 1 && progress.running == 1
    })
    .await?;
    planner.wait_reached("after_commit.armed", POINT_BOUND).await?;
    let gone = seen.moves.iter().find(|one| one.state == "done").map(|one| one.vm_id.clone());
    let (left, stayed): (Vec<_>, Vec<_>) =
        vms.iter().cloned().partition(|vm| Some(vm.uuid.to_string()) == gone);
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["1 of 3 VMs have left, 1 is on its way", "waits for migration"])?;
    let lab = cluster.lab;
    cluster.host("a")?.crash(lab).await?;
    // Silence is no death: the drain waits for the agent.
    let mut told = Moment::of(cluster, "a", &left).await?;
    while !told.story().contains("waits for the agent of host a to answer") {
        told = Moment::of(cluster, "a", &left).await?;
    }
    told.tells(&["it is disconnected", "1 of 3 VMs have left"])?;
    let reason = ["host", "declare-dead", "a", "--i-have-powered-it-off", "--reason", "it burned"];
    let output = cluster.cli(&reason).await?;
    if !output.status.success() {
        bail!("declare a dead: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    cluster.planner.faults.release("after_commit.armed")?;
    see(cluster, &drained.id, "ended by the death", BOUND, |seen| seen.state == "DIED").await?;
    for vm in &stayed {
        cluster.clients.wait_vm(vm, MOVE_BOUND, |seen| seen.power == "lost").await?;
        vm.serial.forget();
    }
    let moment = Moment::of(cluster, "a", &left).await?;
    moment.tells(&[
        "it is dead and takes no placements",
        "cordoned by drain:",
        "1 of 3 VMs have left",
        "host a died while it was emptied, 2 VMs had not left it",
    ])?;
    if moment.seen.on("a").next().is_some() {
        bail!("a dead host runs {:?}", moment.seen.processes);
    }
    start_elsewhere(cluster, &stayed).await?;
    cluster.host("a")?.boot()?;
    super::wait_heard_from(cluster).await?;
    // It is back, and stays closed until an operator says so.
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["it is connected and takes no placements", "cordoned by drain:"])?;
    cli_tells(cluster, "host uncordon a", 0, &["it takes placements"]).await?;
    for vm in &vms {
        let host = moment.seen.runs_on[&vm.name].clone();
        cluster.expect_running(vm, &host).await?;
    }
    cluster.wait_heard().await?;
    Ok("2 lost, started elsewhere".to_owned())
}

async fn start_elsewhere(cluster: &Cluster<'_>, lost: &[Arc<GuestVm>]) -> Result<()> {
    for vm in lost {
        let elsewhere = StartVmRequest {
            vm: vm.uuid.to_string(),
            host: "c".to_owned(),
            wait_ms: 20_000,
            ..StartVmRequest::default()
        };
        cluster.clients.planner().start_vm(elsewhere).await?;
        vm.serial.wait_ticks(10, MOVE_BOUND).await?;
    }
    Ok(())
}
