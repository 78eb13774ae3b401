//! Moves whose guest goes before its memory, and channels that break meanwhile.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::process::Command;
use vmferry_proto::v1::{MigrateVmRequest, Migration, VmObservation};

use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::{GuestSpec, Load};
use crate::lab::host_address;

/// How long a move may take whose channel is cut three times, for twenty seconds each.
const CUTS_BOUND: Duration = Duration::from_secs(180);
/// How long a half may take to say that the channel is broken: its agent's own rule says five
/// seconds, and TCP a quarter of an hour.
const PAUSE_BOUND: Duration = Duration::from_secs(19);
/// How long each cut lasts.
const CUT: Duration = Duration::from_secs(20);

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "postcopy-of-a-busy-guest-loses-nothing-there-and-back",
            Tier::Subset,
            |cluster| Box::pin(there_and_back(cluster, Load::Busy)),
        ),
        Case::new("postcopy-of-an-idle-guest-loses-nothing-there-and-back", Tier::All, |cluster| {
            Box::pin(there_and_back(cluster, Load::Idle))
        }),
        Case::new("precopy-that-does-not-converge-goes-on-as-postcopy", Tier::All, |cluster| {
            Box::pin(diverging(cluster))
        }),
        Case::new(
            "cancel-after-the-order-of-a-postcopy-is-refused-by-name",
            Tier::All,
            |cluster| Box::pin(cancelled(cluster)),
        ),
        Case::new("planner-killed-in-a-postcopy-goes-on", Tier::All, |cluster| {
            Box::pin(planner_killed(cluster))
        }),
        Case::new("agents-killed-in-a-postcopy-go-on", Tier::All, |cluster| {
            Box::pin(agents_killed(cluster))
        }),
        Case::new("postcopy-survives-three-cut-links-of-20-s", Tier::All, |cluster| {
            Box::pin(three_cuts(cluster))
        }),
        Case::new("source-qemu-lost-before-the-last-page-fails-by-name", Tier::All, |cluster| {
            Box::pin(lost(cluster, "a"))
        }),
        Case::new("destination-qemu-lost-in-a-postcopy-fails-by-name", Tier::All, |cluster| {
            Box::pin(lost(cluster, "b"))
        }),
    ]
}

/// A move whose memory takes seconds, and goes over once before the guest goes first.
fn postcopy(vm: &GuestVm, host: &str) -> MigrateVmRequest {
    MigrateVmRequest { method: "postcopy".into(), bandwidth_mbps: 80, ..move_to(vm, host) }
}

async fn busy_vm(cluster: &mut Cluster<'_>, name: &str) -> Result<std::sync::Arc<GuestVm>> {
    let disk = cluster.disk_path(&format!("{name}.raw"));
    let spec = GuestSpec::rom(name).with_load(Load::Busy).with_disk(&disk, "raw");
    cluster.start_vm(&spec, "a").await
}

async fn there_and_back(cluster: &mut Cluster<'_>, load: Load) -> Result<Note> {
    let disk = cluster.disk_path("parted.raw");
    let spec = GuestSpec::rom("parted").with_load(load).with_disk(&disk, "raw");
    let vm = cluster.start_vm(&spec, "a").await?;
    for host in ["b", "a"] {
        let migration = request(cluster, &postcopy(&vm, host)).await?;
        let migration = settle(cluster, &vm, &migration.id, End::Done).await?;
        let went_first = migration.proof.contains("serves");
        if migration.method != "postcopy" || (load == Load::Busy && !went_first) {
            bail!("the record says {}: {}", migration.method, migration.proof);
        }
        vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    }
    Ok(pause_note(&vm))
}

async fn diverging(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = busy_vm(cluster, "diverging").await?;
    let asked = MigrateVmRequest {
        method: String::new(),
        not_converging: "postcopy".into(),
        ..postcopy(&vm, "b")
    };
    let migration = request(cluster, &asked).await?;
    let migration = cluster.clients.expect_end(&migration.id, End::Done, CUTS_BOUND).await?;
    cluster.expect_running(&vm, "b").await?;
    let how = (migration.method.as_str(), migration.downgraded_from.as_str());
    if how != ("postcopy", "precopy") || !migration.downgrade_cause.contains("will not converge") {
        bail!("the record says {how:?}: {:?}", migration.downgrade_cause);
    }
    Ok(format!("{}, {}", migration.downgrade_cause, pause_note(&vm)))
}

async fn cancelled(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = busy_vm(cluster, "late").await?;
    cluster.planner.faults.hold("after_commit.ordered")?;
    let migration = request(cluster, &postcopy(&vm, "b")).await?;
    cluster.planner.faults.wait_reached("after_commit.ordered", POINT_BOUND).await?;
    let refused = cluster.clients.cancel(&migration.id).await;
    cluster.planner.faults.release("after_commit.ordered")?;
    match refused {
        Err(status) if status.message().contains("no return") => {}
        other => bail!("a cancel past the order was answered {other:?}"),
    }
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

async fn planner_killed(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = busy_vm(cluster, "orphan").await?;
    let mut ids = Vec::new();
    for (host, point) in [("b", "after_commit.ordered"), ("a", "after_commit.committed")] {
        cluster.planner.faults.kill_at(point)?;
        let migration = request(cluster, &postcopy(&vm, host)).await?;
        cluster.planner.daemon.wait_end(POINT_BOUND).await?;
        cluster.planner.daemon.start()?;
        cluster.wait_ready().await?;
        settle(cluster, &vm, &migration.id, End::Done).await?;
        ids.push(migration.id);
    }
    Ok(format!("{} moves, {}", ids.len(), pause_note(&vm)))
}

async fn agents_killed(cluster: &mut Cluster<'_>) -> Result<Note> {
    shape(cluster, "a").await?;
    let outcome = agents_killed_on_a_thin_link(cluster).await;
    restore(cluster).await;
    outcome
}

async fn agents_killed_on_a_thin_link(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = busy_vm(cluster, "unwatched").await?;
    let migration = request(cluster, &postcopy(&vm, "b")).await?;
    divided(cluster, &vm, &migration).await?;
    for host in ["a", "b"] {
        cluster.host(host)?.agent.kill().await?;
        cluster.host(host)?.agent.start()?;
    }
    cluster.clients.expect_end(&migration.id, End::Done, CUTS_BOUND).await?;
    cluster.expect_running(&vm, "b").await?;
    Ok(pause_note(&vm))
}

async fn three_cuts(cluster: &mut Cluster<'_>) -> Result<Note> {
    shape(cluster, "a").await?;
    let outcome = three_cuts_on_a_thin_link(cluster).await;
    restore(cluster).await;
    outcome
}

async fn three_cuts_on_a_thin_link(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = busy_vm(cluster, "cut").await?;
    let migration = request(cluster, &postcopy(&vm, "b")).await?;
    divided(cluster, &vm, &migration).await?;
    let paused = |seen: &VmObservation| status(seen) == "postcopy-paused";
    for round in 0..3 {
        cut(cluster, "a", "b").await?;
        let until = tokio::time::Instant::now() + CUT;
        for host in ["a", "b"] {
            cluster.clients.wait_observation(host, &vm, PAUSE_BOUND, paused).await?;
        }
        tokio::time::sleep_until(until).await;
        join(cluster, "a", "b").await?;
        if round < 2 {
            let flows = |seen: &VmObservation| status(seen) == "postcopy-active";
            for host in ["a", "b"] {
                cluster.clients.wait_observation(host, &vm, MOVE_BOUND, flows).await?;
            }
        }
    }
    let migration = cluster.clients.expect_end(&migration.id, End::Done, CUTS_BOUND).await?;
    cluster.expect_running(&vm, "b").await?;
    if migration.channel_breaks < 3 || migration.channel_broken {
        bail!("the record says that the channel broke {} times", migration.channel_breaks);
    }
    Ok(format!("the channel broke {} times, {}", migration.channel_breaks, pause_note(&vm)))
}

async fn lost(cluster: &mut Cluster<'_>, host: &str) -> Result<Note> {
    shape(cluster, "a").await?;
    let outcome = lost_on_a_thin_link(cluster, host).await;
    restore(cluster).await;
    outcome
}

async fn lost_on_a_thin_link(cluster: &mut Cluster<'_>, host: &str) -> Result<Note> {
    let vm = busy_vm(cluster, "halved").await?;
    let migration = request(cluster, &postcopy(&vm, "b")).await?;
    divided(cluster, &vm, &migration).await?;
    let seen = cluster.clients.wait_observation(host, &vm, MOVE_BOUND, |_| true).await?;
    let pid = seen.qemu.context("there is a QEMU")?.pid;
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(pid)?),
        nix::sys::signal::Signal::SIGKILL,
    )?;
    let migration = cluster.clients.expect_end(&migration.id, End::Failed, CUTS_BOUND).await?;
    if !migration.error.contains(&format!("host {host} is gone")) {
        bail!("the cause does not name it: {}", migration.error);
    }
    Ok(migration.error)
}

fn status(seen: &VmObservation) -> &str {
    seen.transfer.as_ref().map_or("", |transfer| transfer.status.as_str())
}

/// Waits until the guest runs at the destination, and its source serves its memory.
async fn divided(cluster: &Cluster<'_>, vm: &GuestVm, migration: &Migration) -> Result<()> {
    let runs =
        |seen: &VmObservation| status(seen).starts_with("postcopy") && seen.run_state == "running";
    cluster.clients.wait_observation("b", vm, CUTS_BOUND, runs).await.with_context(|| {
        format!("migration {} does not let its guest go before its memory", migration.id)
    })?;
    Ok(())
}

/// Lets little leave a host, so that memory takes a while to follow.
async fn shape(cluster: &Cluster<'_>, host: &str) -> Result<()> {
    let tbf = ["tc", "qdisc", "replace", "dev", "mgmt0", "root", "tbf"];
    let limits = ["rate", "24mbit", "burst", "64kb", "latency", "400ms"];
    inside(cluster, host, &[&tbf[..], &limits[..]].concat()).await
}

/// Cuts the way between two hosts, and only that: what is sent goes to nobody.
async fn cut(cluster: &Cluster<'_>, one: &str, other: &str) -> Result<()> {
    for (host, peer) in [(one, other), (other, one)] {
        let address = host_address(peer);
        let nobody = ["ip", "neigh", "replace", &address, "lladdr", "02:00:00:00:00:01"];
        let how = ["dev", "mgmt0", "nud", "permanent"];
        inside(cluster, host, &[&nobody[..], &how[..]].concat()).await?;
    }
    Ok(())
}

/// Makes the network what it was, for the cases that follow.
async fn restore(cluster: &Cluster<'_>) {
    // What is not there cannot be taken away: that is what was wanted.
    inside(cluster, "a", &["tc", "qdisc", "del", "dev", "mgmt0", "root"]).await.ok();
    join(cluster, "a", "b").await.ok();
}

async fn join(cluster: &Cluster<'_>, one: &str, other: &str) -> Result<()> {
    for (host, peer) in [(one, other), (other, one)] {
        let address = host_address(peer);
        inside(cluster, host, &["ip", "neigh", "del", &address, "dev", "mgmt0"]).await?;
    }
    Ok(())
}

async fn inside(cluster: &Cluster<'_>, host: &str, command: &[&str]) -> Result<()> {
    let namespace = cluster.lab.namespace(host);
    let output = Command::new("ip")
        .args(["netns", "exec", &namespace])
        .args(command)
        .output()
        .await
        .context("run ip")?;
    if !output.status.success() {
        bail!("{command:?} on {host}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
