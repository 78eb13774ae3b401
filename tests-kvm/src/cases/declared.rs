//! Hosts that die and do not come back: nothing is decided until an operator declares them dead.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::{GetMigrationRequest, Migration, StartVmRequest, VmObservation};

use super::cancel::start_endless;
use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, move_vm, request};
use crate::client::{End, describe, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::wait::{Holds, Level, let_pass, wait_for};

/// Longer than a lease and a report: whoever takes silence for death would have done so.
const SILENCE: Duration = Duration::from_secs(3);

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("source-host-dead-at-release-is-done-once-declared", Tier::Subset, |cluster| {
            Box::pin(at_release(cluster))
        }),
        Case::new(
            "destination-host-dead-on-the-way-back-is-aborted-once-declared",
            Tier::All,
            |cluster| Box::pin(on_the_way_back(cluster)),
        ),
        Case::new("vm-of-a-dead-host-starts-elsewhere-once-declared", Tier::Subset, |cluster| {
            Box::pin(without_a_move(cluster))
        }),
        Case::new("host-that-answers-is-not-declared-dead", Tier::All, |cluster| {
            Box::pin(alive(cluster))
        }),
    ]
}

/// Declares a host dead; fails with what the command line said if that is refused.
async fn declare(cluster: &Cluster<'_>, host: &str) -> Result<()> {
    let arguments = ["--i-have-powered-it-off", "--reason", "its power supply burned"];
    let output = cluster.cli(&[&["host", "declare-dead", host][..], &arguments].concat()).await?;
    if !output.status.success() {
        bail!("declare {host} dead: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

async fn migration(cluster: &Cluster<'_>, id: &str) -> Result<Migration> {
    let request = GetMigrationRequest { id: id.to_owned() };
    let reply = cluster.clients.planner().get_migration(request).await;
    Ok(reply.context("ask for the migration")?.into_inner())
}

/// Proves that silence alone decides nothing.
async fn expect_undecided(cluster: &Cluster<'_>, id: &str, phase: &str) -> Result<()> {
    let_pass(SILENCE).await;
    let seen = migration(cluster, id).await?;
    if seen.phase != phase {
        bail!("a silent host is not a dead one, but the migration went on: {}", describe(&seen));
    }
    Ok(())
}

/// The host comes back under another boot id, and has nothing of what it had.
async fn come_back(cluster: &mut Cluster<'_>, host: &str) -> Result<()> {
    cluster.host(host)?.boot()?;
    cluster.wait_ready().await
}

/// A host that is back after it was declared dead has nothing of the VM but what its journal says,
/// and lists that: nobody drives anything there any more.
async fn expect_left_behind(cluster: &Cluster<'_>, vm: &GuestVm, host: &str) -> Result<()> {
    let gone = |seen: &VmObservation| seen.gone.is_some();
    cluster.clients.wait_observation(host, vm, POINT_BOUND, gone).await?;
    let id = vm.uuid.to_string();
    wait_for("the host to list what is left there", POINT_BOUND, || async {
        let hosts = cluster.clients.hosts().await?;
        let left = hosts.iter().find(|there| there.id == host).map(|there| &there.orphans);
        let listed = left.is_some_and(|left| {
            left.iter().any(|orphan| orphan.vm_id == id && orphan.kind == "journal")
        });
        Ok(Level::from_condition(Holds::from(listed), || format!("{left:?}")))
    })
    .await
}

async fn at_release(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("survivor"), "a").await?;
    cluster.planner.faults.hold("after_commit.attached")?;
    let id = request(cluster, &move_to(&vm, "b")).await?.id;
    cluster.planner.faults.wait_reached("after_commit.attached", POINT_BOUND).await?;
    let lab = cluster.lab;
    cluster.host("a")?.crash(lab).await?;
    cluster.planner.faults.release("after_commit.attached")?;
    expect_undecided(cluster, &id, "attached").await?;
    declare(cluster, "a").await?;
    let done = cluster.clients.expect_end(&id, End::Done, MOVE_BOUND).await?;
    come_back(cluster, "a").await?;
    expect_left_behind(cluster, &vm, "a").await?;
    move_vm(cluster, &vm, "a").await?;
    Ok(format!("generation {}", done.generation))
}

async fn on_the_way_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("survivor"), "a").await?;
    let id = start_endless(cluster, &vm).await?.id;
    let lab = cluster.lab;
    cluster.host("b")?.crash(lab).await?;
    cluster.clients.cancel(&id).await.context("cancel")?;
    expect_undecided(cluster, &id, "rolling_back").await?;
    declare(cluster, "b").await?;
    let ended = cluster.clients.expect_end(&id, End::Aborted, MOVE_BOUND).await?;
    come_back(cluster, "b").await?;
    cluster.expect_running(&vm, "a").await?;
    move_vm(cluster, &vm, "b").await?;
    Ok(ended.error)
}

async fn without_a_move(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("survivor"), "a").await?;
    let lab = cluster.lab;
    cluster.host("a")?.crash(lab).await?;
    let_pass(SILENCE).await;
    let elsewhere = StartVmRequest {
        vm: vm.uuid.to_string(),
        host: "b".to_owned(),
        wait_ms: 20_000,
        ..StartVmRequest::default()
    };
    if cluster.clients.planner().start_vm(elsewhere.clone()).await.is_ok() {
        bail!("a VM of a silent host was started elsewhere");
    }
    declare(cluster, "a").await?;
    let lost = cluster.clients.wait_vm(&vm, MOVE_BOUND, |seen| seen.power == "lost").await?;
    vm.serial.forget();
    cluster.clients.planner().start_vm(elsewhere).await.context("start it elsewhere")?;
    vm.serial.wait_ticks(10, MOVE_BOUND).await?;
    come_back(cluster, "a").await?;
    expect_left_behind(cluster, &vm, "a").await?;
    move_vm(cluster, &vm, "a").await?;
    Ok(lost.error)
}

async fn alive(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("survivor"), "a").await?;
    let refused = declare(cluster, "a").await;
    let Err(refusal) = refused else { bail!("a host that answers was declared dead") };
    cluster.expect_running(&vm, "a").await?;
    wait_for("the host to take placements as before", POINT_BOUND, || async {
        let hosts = cluster.clients.hosts().await?;
        let fit = hosts.iter().any(|host| host.id == "a" && host.blockers.is_empty());
        Ok(Level::from_condition(Holds::from(fit), || format!("{hosts:?}")))
    })
    .await?;
    Ok(refusal.to_string())
}
