//! Moves that nothing disturbs.

use std::time::Duration;

use anyhow::{Result, bail};
use futures::StreamExt as _;
use vmferry_proto::v1::{GetMigrationRequest, Host, MigrateVmRequest, Migration};

use super::{Case, MOVE_BOUND, Note, Tier, move_vm, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::{GuestSpec, Load};
use crate::lab::PLANNER_ADDRESS;
use crate::rest;

/// How often a guest goes there and back.
const ROUNDS: usize = 5;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("idle-guest-moves", Tier::Subset, |cluster| Box::pin(idle(cluster))),
        Case::new("dirtying-guest-with-a-raw-disk-moves", Tier::Subset, |cluster| {
            Box::pin(with_disk(cluster, "pc", "raw"))
        }),
        Case::new("dirtying-guest-with-a-qcow2-disk-moves", Tier::All, |cluster| {
            Box::pin(with_disk(cluster, "q35", "qcow2"))
        }),
        Case::new("guest-goes-there-and-back-five-times", Tier::All, |cluster| {
            Box::pin(there_and_back(cluster))
        }),
        Case::new("two-guests-cross", Tier::Subset, |cluster| Box::pin(cross(cluster))),
        Case::new("planner-chooses-the-destination", Tier::Subset, |cluster| {
            Box::pin(chosen(cluster))
        })
        .on_three_hosts(),
        Case::new("progress-is-streamed", Tier::Subset, |cluster| Box::pin(streamed(cluster)))
            .in_plain_text(),
        Case::new("same-request-is-the-same-migration", Tier::All, |cluster| {
            Box::pin(repeated(cluster))
        }),
        Case::new("linux-guest-with-disk-moves", Tier::All, |cluster| Box::pin(linux(cluster)))
            .with_linux(),
    ]
}

async fn idle(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("idle").with_load(Load::Idle), "a").await?;
    move_vm(cluster, &vm, "b").await?;
    Ok(pause_note(&vm))
}

async fn with_disk(
    cluster: &mut Cluster<'_>,
    machine: &'static str,
    format: &'static str,
) -> Result<Note> {
    let disk = cluster.disk_path(&format!("busy.{format}"));
    let mut spec = GuestSpec::rom("busy").with_load(Load::Busy).with_disk(&disk, format);
    spec.machine = machine;
    let vm = cluster.start_vm(&spec, "a").await?;
    vm.serial.wait_ticks(60, MOVE_BOUND).await?;
    let written = last_turn(&vm);
    if written == 0 {
        bail!("the guest does not write to its disk");
    }
    move_vm(cluster, &vm, "b").await?;
    let written_after = last_turn(&vm);
    if written_after <= written {
        bail!("the guest wrote turn {written} before its move and {written_after} after it");
    }
    Ok(pause_note(&vm))
}

fn last_turn(vm: &crate::cluster::GuestVm) -> u64 {
    vm.serial.history().ticks.last().map_or(0, |tick| tick.disk_seq)
}

async fn there_and_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let disk = cluster.disk_path("pendulum.raw");
    let vm = cluster.start_vm(&GuestSpec::rom("pendulum").with_disk(&disk, "raw"), "a").await?;
    let mut longest = Duration::ZERO;
    for _ in 0..ROUNDS {
        for host in ["b", "a"] {
            move_vm(cluster, &vm, host).await?;
            longest = longest
                .max(Duration::from_micros(vm.serial.history().hand_over_us().unwrap_or_default()));
        }
    }
    let processes = vm.serial.connections();
    if usize::try_from(processes)? != 1 + 2 * ROUNDS {
        bail!("{processes} QEMU processes were started for {} moves", 2 * ROUNDS);
    }
    Ok(format!("longest pause {:.1} ms", longest.as_secs_f64() * 1e3))
}

async fn cross(cluster: &mut Cluster<'_>) -> Result<Note> {
    let east = cluster.start_vm(&GuestSpec::rom("east"), "a").await?;
    let west = cluster.start_vm(&GuestSpec::rom("west"), "b").await?;
    let (eastward, westward) = (move_to(&east, "b"), move_to(&west, "a"));
    let (eastward, westward) =
        tokio::try_join!(request(cluster, &eastward), request(cluster, &westward))?;
    tokio::try_join!(
        settle(cluster, &east, &eastward.id, End::Done),
        settle(cluster, &west, &westward.id, End::Done)
    )?;
    Ok(format!("{}; {}", pause_note(&east), pause_note(&west)))
}

async fn chosen(cluster: &mut Cluster<'_>) -> Result<Note> {
    // Two VMs on b: c has more room.
    cluster.start_vm(&GuestSpec::rom("ballast"), "b").await?;
    let vm = cluster.start_vm(&GuestSpec::rom("free"), "a").await?;
    let migration =
        request(cluster, &MigrateVmRequest { target_host: String::new(), ..move_to(&vm, "") })
            .await?;
    let migration = settle(cluster, &vm, &migration.id, End::Done).await?;
    if migration.target_host != "c" {
        let hosts = cluster.clients.hosts().await?;
        let free = |h: &Host| format!("{} {} MiB", h.id, h.free_memory_bytes >> 20);
        let free: Vec<_> = hosts.iter().map(free).collect();
        bail!("the planner chose {}; free now: {free:?}", migration.target_host);
    }
    Ok(pause_note(&vm))
}

async fn streamed(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("slow"), "a").await?;
    // Slow enough that the copying takes a second.
    let slow = MigrateVmRequest { bandwidth_mbps: 240, ..move_to(&vm, "b") };
    let migration = request(cluster, &slow).await?;
    let mut planner = cluster.clients.planner();
    let watched = async {
        let request = GetMigrationRequest { id: migration.id.clone() };
        let mut stream = planner.watch_migration(request).await?.into_inner();
        let mut seen: Vec<Migration> = Vec::new();
        while let Some(next) = stream.next().await {
            seen.push(next?);
        }
        anyhow::Ok(seen)
    };
    let path = format!("/api/migrations/{}/events", migration.id);
    let address = format!("{PLANNER_ADDRESS}:9095");
    let (watched, events) = tokio::try_join!(watched, rest::events(&address, &path, MOVE_BOUND))?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    let copying =
        watched.iter().filter(|m| m.phase == "admitted" && m.bytes_transferred > 0).count();
    if copying < 2 {
        bail!("the watcher saw the copying {copying} times: {:?}", phases(&watched));
    }
    if watched.last().is_none_or(|last| last.phase != "done") {
        bail!("the watcher's stream did not end with the end: {:?}", phases(&watched));
    }
    if events.last().is_none_or(|last| last["phase"] != "done") {
        bail!("the event stream did not end with the end: {events:?}");
    }
    Ok(format!("{} updates, {} events", watched.len(), events.len()))
}

fn phases(seen: &[Migration]) -> Vec<&str> {
    seen.iter().map(|migration| migration.phase.as_str()).collect()
}

async fn repeated(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("once"), "a").await?;
    let wanted = move_to(&vm, "b");
    let first = request(cluster, &wanted).await?;
    let second = request(cluster, &wanted).await?;
    settle(cluster, &vm, &first.id, End::Done).await?;
    let third = request(cluster, &wanted).await?;
    if first.id != second.id || first.id != third.id {
        bail!("one request made {}, {} and {}", first.id, second.id, third.id);
    }
    Ok(pause_note(&vm))
}

async fn linux(cluster: &mut Cluster<'_>) -> Result<Note> {
    let disk = cluster.disk_path("linux.qcow2");
    let spec =
        GuestSpec::linux("linux", "10.88.0.11").with_disk(&disk, "qcow2").with_load(Load::Busy);
    let vm = cluster.start_vm(&spec, "a").await?;
    move_vm(cluster, &vm, "b").await?;
    move_vm(cluster, &vm, "a").await?;
    Ok(pause_note(&vm))
}
