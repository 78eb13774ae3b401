//! What is kept of VMs, lost and deleted: a planner that begins with nothing, and a VM that is to be
//! forgotten.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::task::JoinSet;
use vmferry_proto::v1::{DoctorReply, DoctorRequest, GetVmRequest};

use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, move_vm, request};
use crate::client::move_to;
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::proof::qemu_processes;
use crate::wait::{Holds, Level, let_pass, wait_for};

/// Several reports of each host: whoever acted on one of them would have done so.
const REPORTS: Duration = Duration::from_secs(4);

/// Where both sides have said that all has arrived, and nothing of that is written down.
const HANDED: &str = "before_commit.restored";

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new(
        "planner-on-an-empty-store-rebuilds-and-touches-nothing",
        Tier::Subset,
        |cluster| Box::pin(emptied(cluster)),
    )];
    for moment in ["before_journal", "after_journal", "before_answer"] {
        let name = "agent-killed-while-it-forgets-a-vm-leaves-nothing-that-runs";
        let name = match moment {
            "before_journal" => name.to_owned(),
            _later => format!("{name}-{}", moment.replace('_', "-")),
        };
        cases.push(Case::new(name, Tier::All, move |cluster| Box::pin(forgets(cluster, moment))));
    }
    cases
}

/// Returns who runs, as the kernel sees it.
fn processes(cluster: &Cluster<'_>) -> Result<Vec<(String, String, i32)>> {
    let found = qemu_processes(cluster.lab, cluster.host_names())?;
    let mut found: Vec<_> = found.into_iter().map(|q| (q.uuid, q.host, q.pid)).collect();
    found.sort();
    Ok(found)
}

async fn stop(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<()> {
    let stop = crate::matrix::scenario::stop(vm);
    cluster.clients.planner().stop_vm(stop).await.context("stop the VM")?;
    Ok(())
}

/// Waits until a planner that knew nothing sees a VM so.
async fn expect_known(
    cluster: &Cluster<'_>,
    vm: &GuestVm,
    (host, power, generation): (&str, &str, u64),
) -> Result<()> {
    wait_for(format_args!("{} to be known again", vm.name), MOVE_BOUND, || async {
        let asked = GetVmRequest { vm: vm.uuid.to_string() };
        match cluster.clients.planner().get_vm(asked).await {
            Ok(reply) => {
                let seen = reply.into_inner();
                let found = (seen.host.as_str(), seen.power.as_str(), seen.generation);
                let same = found == (host, power, generation);
                Ok(Level::from_condition(Holds::from(same), || format!("{found:?}")))
            }
            Err(status) => Ok(Level::NotYet(status.to_string())),
        }
    })
    .await
}

/// Checks what the doctor says of one VM that runs, and of one whose move nobody drives.
fn expect_told(told: &DoctorReply, well: &GuestVm, half: &GuestVm) -> Result<()> {
    let id = well.uuid.to_string();
    let named = told.vms.iter().find(|vm| vm.id == id);
    if named.is_none_or(|vm| (vm.runners.as_str(), vm.runs_on.as_str()) != ("one", "b")) {
        bail!("the doctor does not name the runner of {}: {named:?}", well.name);
    }
    let id = half.uuid.to_string();
    let halves: Vec<_> = told
        .halves
        .iter()
        .filter(|half| half.vm_id == id)
        .map(|half| (half.side.as_str(), half.host.as_str(), half.handed, half.ever_continued))
        .collect();
    let source = ("source", "a");
    let there = halves.iter().any(|(side, host, handed, _)| (*side, *host) == source && *handed)
        && halves.iter().any(|(side, host, _, ran)| (*side, *host) == ("destination", "b") && !ran);
    if halves.len() != 2 || !there {
        bail!("the halves of {} are not shown: {:?}", half.name, told.halves);
    }
    Ok(())
}

async fn emptied(cluster: &mut Cluster<'_>) -> Result<Note> {
    let off = cluster.start_vm(&GuestSpec::rom("off"), "b").await?;
    stop(cluster, &off).await?;
    let well = cluster.start_vm(&GuestSpec::rom("well"), "a").await?;
    move_vm(cluster, &well, "b").await?;
    let half = cluster.start_vm(&GuestSpec::rom("half"), "a").await?;
    cluster.planner.faults.hold(HANDED)?;
    let id = request(cluster, &move_to(&half, "b")).await?.id;
    cluster.planner.faults.wait_reached(HANDED, POINT_BOUND).await?;
    cluster.planner.daemon.kill().await?;
    cluster.planner.faults.disarm()?;
    let before = processes(cluster)?;
    let store = cluster.dir().join("pl/s");
    fs::remove_dir_all(&store).context("lose the store")?;
    fs::create_dir_all(&store).context("make an empty store's directory")?;
    cluster.planner.daemon.start()?;
    cluster.wait_ready().await?;
    expect_known(cluster, &well, ("b", "running", 2)).await?;
    expect_known(cluster, &off, ("b", "stopped", 1)).await?;
    let_pass(REPORTS).await;
    if processes(cluster)? != before {
        bail!("a planner without a store touched something: {:?}, {before:?}", processes(cluster)?);
    }
    well.serial.wait_ticks(20, MOVE_BOUND).await?;
    half.serial.wait_still(Duration::from_millis(300), MOVE_BOUND).await?;
    let told = cluster.clients.planner().doctor(DoctorRequest { vm: String::new() }).await;
    expect_told(&told.context("ask the doctor")?.into_inner(), &well, &half)?;
    let keep = ["migration", "resolve", &id, "--keep", "source", "--i-have-checked"];
    let resolved = cluster.cli(&keep).await?;
    if !resolved.status.success() {
        bail!("keep the source: {}", String::from_utf8_lossy(&resolved.stderr).trim());
    }
    cluster.expect_running(&half, "a").await?;
    move_vm(cluster, &half, "b").await?;
    move_vm(cluster, &well, "a").await?;
    Ok(String::from_utf8_lossy(&resolved.stdout).trim().replace('\n', " "))
}

async fn forgets(cluster: &mut Cluster<'_>, moment: &str) -> Result<Note> {
    let point = format!("{moment}.forget_vm");
    let vm = cluster.start_vm(&GuestSpec::rom("unwanted"), "a").await?;
    stop(cluster, &vm).await?;
    let faults = cluster.host("a")?.faults.clone();
    faults.hold(&point)?;
    let mut deleting = JoinSet::new();
    deleting.spawn({
        let binary = cluster.artifacts.binaries.join("vmferry");
        let whom = cluster.cli_options(crate::lab::PLANNER_ADDRESS);
        let mut command = tokio::process::Command::new(binary);
        command.args(whom).args(["vm", "delete", "unwanted"]);
        async move { command.output().await }
    });
    faults.wait_reached(&point, POINT_BOUND).await?;
    cluster.host("a")?.agent.kill().await?;
    faults.disarm()?;
    cluster.host("a")?.agent.start()?;
    let deleted = deleting.join_next().await.context("nothing was called")?;
    let deleted = deleted.context("wait for the command")?.context("delete the VM")?;
    cluster.wait_ready().await?;
    let_pass(REPORTS).await;
    let asked = GetVmRequest { vm: vm.uuid.to_string() };
    if let Ok(known) = cluster.clients.planner().get_vm(asked).await {
        bail!("a deleted VM came back: {known:?}");
    }
    let hosts = cluster.clients.hosts().await?;
    let id = vm.uuid.to_string();
    let left = hosts.iter().flat_map(|host| &host.orphans).find(|orphan| orphan.vm_id == id);
    let left = left.map_or_else(|| "nothing".to_owned(), |orphan| orphan.kind.clone());
    if !processes(cluster)?.is_empty() || !["nothing", "definition"].contains(&left.as_str()) {
        bail!("left of a deleted VM: {left}, {:?}", processes(cluster)?);
    }
    Ok(format!("left {left}; {}", String::from_utf8_lossy(&deleted.stderr).trim()))
}
