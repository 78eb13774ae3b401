//! Guests that are shut down for their move and started anew, or were off.

use anyhow::{Result, bail};
use vmferry_proto::v1::{MigrateVmRequest, Migration, StopVmRequest, VmObservation};

use super::death::kill_qemu;
use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, move_vm, request, settle};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::{Button, GuestSpec};
use crate::wait::{Holds, Level, wait_for};

/// Where the planner has just written down that the guest is off.
const DOWN: &str = "after_commit.down";
/// How many turns of its disk a guest makes until none is left from the boot before.
const ALL_OF_ITS_DISK: u64 = 66;

/// Who dies while the guest is off.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Planner,
    SourceAgent,
    DestinationAgent,
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("cold-move-there-and-back-loses-nothing", Tier::Subset, |cluster| {
            Box::pin(there_and_back(cluster))
        }),
        Case::new(
            "cold-move-of-a-guest-that-ignores-its-button-is-aborted",
            Tier::Subset,
            |cluster| Box::pin(ignored(cluster)),
        ),
        Case::new("cold-move-of-a-stopped-vm-takes-its-definition", Tier::Subset, |cluster| {
            Box::pin(stopped(cluster))
        }),
        Case::new(
            "cold-move-whose-receiver-dies-starts-the-guest-again",
            Tier::Subset,
            |cluster| Box::pin(receiver_dies(cluster)),
        ),
        Case::new("cold-move-that-is-cancelled-starts-the-guest-again", Tier::All, |cluster| {
            Box::pin(cancelled(cluster))
        }),
    ];
    for victim in [Victim::Planner, Victim::SourceAgent, Victim::DestinationAgent] {
        let name = match victim {
            Victim::Planner => "cold-move-whose-planner-dies-goes-on",
            Victim::SourceAgent => "cold-move-whose-source-agent-dies-goes-on",
            Victim::DestinationAgent => "cold-move-whose-destination-agent-dies-goes-on",
        };
        cases.push(Case::new(name, Tier::All, move |cluster| Box::pin(killed(cluster, victim))));
    }
    cases
}

fn cold(vm: &GuestVm, host: &str) -> MigrateVmRequest {
    MigrateVmRequest {
        method: "cold".into(),
        migration_type: String::new(),
        allow_shutdown: true,
        ..move_to(vm, host)
    }
}

async fn start(cluster: &mut Cluster<'_>, format: &'static str) -> Result<std::sync::Arc<GuestVm>> {
    let disk = cluster.disk_path(&format!("cold.{format}"));
    let vm = cluster.start_vm(&GuestSpec::rom("cold").with_disk(&disk, format), "a").await?;
    written(&vm, 3).await?;
    Ok(vm)
}

/// Waits until the guest has made so many turns of its disk.
async fn written(vm: &GuestVm, turns: u64) -> Result<()> {
    wait_for("the guest to write to its disk", MOVE_BOUND, || async {
        let seq = vm.serial.history().ticks.last().map_or(0, |tick| tick.disk_seq);
        Ok(Level::from_condition(Holds::from(seq >= turns), || format!("turn {seq}")))
    })
    .await
}

/// Asks for a cold move and brings it to where the guest is off; what its last boot has printed and
/// written is checked, and what the next one prints is its own.
async fn up_to_down(cluster: &mut Cluster<'_>, vm: &GuestVm, host: &str) -> Result<Migration> {
    cluster.planner.faults.hold(DOWN)?;
    let migration = request(cluster, &cold(vm, host)).await?;
    cluster.planner.faults.wait_reached(DOWN, POINT_BOUND).await?;
    is_off(cluster, vm)?;
    Ok(migration)
}

fn is_off(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<()> {
    cluster.expect_one_guest(vm)?;
    let history = vm.serial.history();
    if let (Some(disk), Some(boot)) = (&vm.spec.disk, history.boot_id()) {
        let (seq, printed) = (crate::disk::check(disk, boot)?, history.ticks.last());
        if printed.is_some_and(|tick| seq < tick.disk_seq) {
            bail!("the guest's last turns are not on its disk, which ends at {seq}");
        }
    }
    vm.serial.forget();
    Ok(())
}

/// Proves that the guest has booted anew on `host`, and has all of its disk.
async fn booted(cluster: &Cluster<'_>, vm: &GuestVm, host: &str) -> Result<()> {
    cluster.expect_running(vm, host).await?;
    written(vm, ALL_OF_ITS_DISK).await
}

async fn arrived(cluster: &Cluster<'_>, vm: &GuestVm, id: &str, host: &str) -> Result<Migration> {
    let migration = cluster.clients.expect_end(id, End::Done, MOVE_BOUND).await?;
    let record = (migration.method.as_str(), migration.migration_type.as_str());
    if record != ("cold", "offline") || migration.state != "completed" {
        bail!("the record says {record:?}, {}", migration.state);
    }
    booted(cluster, vm, host).await?;
    Ok(migration)
}

async fn there_and_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = start(cluster, "qcow2").await?;
    // Without the grant nothing is touched.
    let refused = cluster.cli(&["vm", "migrate", "cold", "--method", "cold"]).await?;
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    if refused.status.success() || !told.contains("allow_shutdown") {
        bail!("a guest would be shut down without leave: {told}");
    }
    written(&vm, ALL_OF_ITS_DISK).await?;
    for host in ["b", "a"] {
        let migration = up_to_down(cluster, &vm, host).await?;
        cluster.planner.faults.release(DOWN)?;
        arrived(cluster, &vm, &migration.id, host).await?;
    }
    // It is as good as any other.
    move_vm(cluster, &vm, "b").await?;
    Ok(Note::new())
}

async fn ignored(cluster: &mut Cluster<'_>) -> Result<Note> {
    let spec = GuestSpec { button: Button::Ignored, ..GuestSpec::rom("stubborn") };
    let vm = cluster.start_vm(&spec, "a").await?;
    let soon = MigrateVmRequest { shutdown_limit_ms: 1_500, ..cold(&vm, "b") };
    let migration = request(cluster, &soon).await?;
    let migration = settle(cluster, &vm, &migration.id, End::Aborted).await?;
    if migration.state != "failed" || !migration.error.starts_with("shutdown_refused") {
        bail!("it ended as {}: {}", migration.state, migration.error);
    }
    // Asked to be taken back meanwhile, it may yet turn itself off: that is waited for.
    let later = MigrateVmRequest { shutdown_limit_ms: 4_000, ..cold(&vm, "b") };
    let migration = request(cluster, &later).await?;
    let asked = |seen: &VmObservation| seen.shutdown_asked && seen.migration_id == migration.id;
    cluster.clients.wait_observation("a", &vm, MOVE_BOUND, asked).await?;
    cluster.clients.cancel(&migration.id).await?;
    let migration = settle(cluster, &vm, &migration.id, End::Aborted).await?;
    if migration.state != "cancelled" {
        bail!("it ended as {}: {}", migration.state, migration.error);
    }
    move_vm(cluster, &vm, "b").await?;
    Ok(migration.error)
}

async fn stopped(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = start(cluster, "raw").await?;
    let stop = StopVmRequest {
        vm: vm.uuid.to_string(),
        how: "powerdown".into(),
        deadline_ms: 10_000,
        wait_ms: 15_000,
    };
    cluster.clients.planner().stop_vm(stop).await?;
    is_off(cluster, &vm)?;
    let asked = MigrateVmRequest { migration_type: String::new(), ..move_to(&vm, "b") };
    let migration = request(cluster, &asked).await?;
    let migration = cluster.clients.expect_end(&migration.id, End::Done, MOVE_BOUND).await?;
    if migration.method != "cold" {
        bail!("the record says {}", migration.method);
    }
    cluster
        .clients
        .wait_vm(&vm, MOVE_BOUND, |seen| seen.host == "b" && seen.power == "stopped")
        .await?;
    let there = |seen: &VmObservation| seen.role == "stopped" && !seen.ready;
    cluster.clients.wait_observation("b", &vm, MOVE_BOUND, there).await?;
    cluster.clients.wait_observation("a", &vm, MOVE_BOUND, |seen| seen.role == "absent").await?;
    crate::proof::expect_processes(cluster.lab, &cluster.host_names(), &[]).await?;
    if !cluster.cli(&["vm", "start", "cold", "--wait"]).await?.status.success() {
        bail!("it does not start where it was moved to");
    }
    booted(cluster, &vm, "b").await?;
    Ok(Note::new())
}

/// The receiver dies before ownership has moved.
async fn receiver_dies(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = start(cluster, "raw").await?;
    let migration = up_to_down(cluster, &vm, "b").await?;
    let point = "before_commit.restored";
    cluster.planner.faults.hold(point)?;
    cluster.planner.faults.release(DOWN)?;
    cluster.planner.faults.wait_reached(point, POINT_BOUND).await?;
    cluster.planner.faults.kill_at("after_commit.committed")?;
    kill_qemu(cluster, &vm, "b").await?;
    cluster.planner.faults.release(point)?;
    cluster.planner.daemon.wait_end(POINT_BOUND).await?;
    cluster.planner.faults.disarm()?;
    cluster.planner.daemon.start()?;
    // It never ran there, and its journal says so: back, under the next generation.
    let migration = cluster.clients.expect_end(&migration.id, End::Aborted, MOVE_BOUND).await?;
    booted(cluster, &vm, "a").await?;
    Ok(migration.error)
}

async fn cancelled(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = start(cluster, "raw").await?;
    let migration = up_to_down(cluster, &vm, "b").await?;
    cluster.clients.cancel(&migration.id).await?;
    cluster.planner.faults.release(DOWN)?;
    let migration = cluster.clients.expect_end(&migration.id, End::Aborted, MOVE_BOUND).await?;
    if migration.state != "cancelled" {
        bail!("it ended as {}: {}", migration.state, migration.error);
    }
    booted(cluster, &vm, "a").await?;
    Ok(migration.error)
}

async fn killed(cluster: &mut Cluster<'_>, victim: Victim) -> Result<Note> {
    let vm = start(cluster, "raw").await?;
    match victim {
        Victim::Planner => {
            cluster.planner.faults.kill_at(DOWN)?;
            let migration = request(cluster, &cold(&vm, "b")).await?;
            cluster.planner.daemon.wait_end(POINT_BOUND).await?;
            is_off(cluster, &vm)?;
            cluster.planner.faults.disarm()?;
            cluster.planner.daemon.start()?;
            arrived(cluster, &vm, &migration.id, "b").await?;
        }
        Victim::SourceAgent => {
            cluster.host("a")?.faults.kill_at("after_journal.shut_down_guest")?;
            cluster.planner.faults.hold(DOWN)?;
            let migration = request(cluster, &cold(&vm, "b")).await?;
            cluster.host("a")?.agent.wait_end(POINT_BOUND).await?;
            cluster.host("a")?.faults.disarm()?;
            cluster.host("a")?.agent.start()?;
            cluster.planner.faults.wait_reached(DOWN, POINT_BOUND).await?;
            is_off(cluster, &vm)?;
            cluster.planner.faults.release(DOWN)?;
            arrived(cluster, &vm, &migration.id, "b").await?;
        }
        Victim::DestinationAgent => {
            cluster.host("b")?.faults.kill_at("before_answer.start_receiver")?;
            let migration = up_to_down(cluster, &vm, "b").await?;
            cluster.planner.faults.release(DOWN)?;
            cluster.host("b")?.agent.wait_end(POINT_BOUND).await?;
            cluster.host("b")?.faults.disarm()?;
            cluster.host("b")?.agent.start()?;
            arrived(cluster, &vm, &migration.id, "b").await?;
        }
    }
    Ok(Note::new())
}
