//! Moves whose guest, or whose source, falls silent by itself.

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::{Asked, Stage, guest, hold, stage, start, under_way};
use crate::cases::POINT_BOUND;
use crate::cases::cancel::endless;
use crate::client::move_to;
use crate::cluster::Cluster;
use crate::matrix::Cell;
use crate::monitor::{Monitor, Monitors};
use crate::proof::qemu_processes;
use crate::wait::{Holds, Level, wait_for};

/// Where the source's agent has written the order down, and QEMU has not heard of it.
const ORDERED: &str = "after_journal.order_switchover";

/// Shorter than any of the matrix's bounds: it is waited for.
const IMPATIENT: &str = "[migration]\nswitchover_limit = \"1s\"\n";

/// The source's agent dies with the order in its journal. QEMU is given it all the same, sends its
/// last, and hangs.
pub(super) async fn forward(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    for planner in cluster.planners() {
        planner.daemon.stop().await?;
        planner.configure(IMPATIENT)?;
        planner.daemon.start()?;
    }
    cluster.wait_ready().await?;
    let monitors = Monitors::listen(&cluster.dir().join("m"))?;
    let mut spec = guest(cluster);
    spec.extra_args.extend(monitors.qemu_arguments());
    let vm = start(cluster, &spec).await?;
    let mut source = monitors.next().await?;
    cluster.host("a")?.faults.hold(ORDERED)?;
    let asked = Asked::Migrate(move_to(&vm, "b"));
    let mut stage = stage(cluster, vm, asked, Some(monitors)).await?;
    cluster.host("a")?.faults.wait_reached(ORDERED, POINT_BOUND).await?;
    let agent = cluster.host("a")?;
    agent.agent.kill().await?;
    agent.faults.disarm()?;
    send_the_last(&mut source).await?;
    stage.frozen = Some(freeze(cluster, &stage)?);
    // Whoever comes to the point comes there after this.
    hold(cluster, cell.point)?;
    cluster.host("a")?.agent.start()?;
    Ok(stage)
}

async fn send_the_last(source: &mut Monitor) -> Result<()> {
    source
        .execute("migrate-continue", json!({"state": "pre-switchover"}))
        .await
        .context("order the switchover")?;
    // One after the other: a monitor has one user.
    let source = tokio::sync::Mutex::new(source);
    wait_for("the source to have sent its last", POINT_BOUND, || async {
        let seen = source.lock().await.execute("query-migrate", json!({})).await?;
        let sent = seen["status"] == "completed";
        Ok(Level::from_condition(Holds::from(sent), || seen.to_string()))
    })
    .await
}

fn freeze(cluster: &Cluster<'_>, stage: &Stage) -> Result<Pid> {
    let uuid = stage.vm.uuid.to_string();
    let found = qemu_processes(cluster.lab, ["a"])?;
    let process = found.iter().find(|process| process.uuid == uuid);
    let pid = Pid::from_raw(process.context("the source has no QEMU process")?.pid);
    kill(pid, Signal::SIGSTOP).with_context(|| format!("stop {pid}"))?;
    Ok(pid)
}

/// The guest turns itself off while its agent is away, which then finds its end: seen in the act,
/// QEMU may first say that it called its transfer back.
pub(super) async fn powers_off(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    let monitors = Monitors::listen(&cluster.dir().join("m"))?;
    let mut spec = guest(cluster);
    spec.extra_args.extend(monitors.qemu_arguments());
    let vm = start(cluster, &spec).await?;
    let mut source = monitors.next().await?;
    let stage = under_way(cluster, vm.clone(), endless(&vm), Some(monitors)).await?;
    cluster.host("a")?.agent.kill().await?;
    source.execute("system_powerdown", json!({})).await.context("press the power button")?;
    let uuid = vm.uuid.to_string();
    wait_for("the guest to turn itself off", POINT_BOUND, || async {
        let found = qemu_processes(cluster.lab, ["a"])?;
        let gone = found.iter().all(|process| process.uuid != uuid);
        Ok(Level::from_condition(Holds::from(gone), || format!("{found:?}")))
    })
    .await?;
    hold(cluster, cell.point)?;
    cluster.host("a")?.agent.start()?;
    Ok(stage)
}
