//! The planner dies around the commits for which a caller waits: an admission, a cancel. Nothing
//! was written, and the caller asks again; or it was, and holds without that.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::{ListMigrationsRequest, MigrateVmRequest, Migration, StopVmRequest};

use super::cancel::{expect_cancelled, start_endless};
use super::{Case, Note, POINT_BOUND, Tier, request, settle};
use crate::client::{Clients, End, describe, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;

/// How long the planner may take to come to the point at which it kills itself.
const DEATH_BOUND: Duration = Duration::from_secs(15);

/// On which side of the commit the planner dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    Before,
    After,
}

impl Death {
    const EACH: [Self; 2] = [Self::Before, Self::After];

    const fn label(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
        }
    }

    fn point(self, commit: &str) -> String {
        format!("{}_commit.{commit}", self.label())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for death in Death::EACH {
        let side = death.label();
        let tier = match death {
            Death::Before => Tier::All,
            Death::After => Tier::Subset,
        };
        cases.push(Case::new(
            format!("planner-killed-{side}-admission-makes-one-migration"),
            tier,
            move |cluster| Box::pin(admission(cluster, death)),
        ));
        cases.push(Case::new(
            format!("planner-killed-{side}-queueing-makes-one-migration"),
            Tier::All,
            move |cluster| Box::pin(queueing(cluster, death)),
        ));
        cases.push(Case::new(
            format!("planner-killed-{side}-a-cancel-is-written-is-cancelled"),
            Tier::All,
            move |cluster| Box::pin(cancel(cluster, death)),
        ));
        cases.push(Case::new(
            format!("planner-killed-{side}-a-cancel-in-the-queue-is-cancelled"),
            Tier::All,
            move |cluster| Box::pin(cancel_in_the_queue(cluster, death)),
        ));
    }
    cases
}

/// Waits until the planner has killed itself, and starts it again.
async fn rise_again(cluster: &mut Cluster<'_>) -> Result<()> {
    cluster.planner.daemon.wait_end(DEATH_BOUND).await?;
    cluster.planner.faults.disarm()?;
    cluster.planner.daemon.start()?;
    cluster.wait_ready().await
}

/// Returns every migration of a VM, ended ones too.
async fn migrations_of(clients: &Clients, vm: &GuestVm) -> Result<Vec<Migration>> {
    let all = ListMigrationsRequest { vm: vm.uuid.to_string(), ..Default::default() };
    Ok(clients
        .planner()
        .list_migrations(all)
        .await
        .context("list migrations")?
        .into_inner()
        .migrations)
}

async fn expect_one(clients: &Clients, vm: &GuestVm, id: &str) -> Result<()> {
    let found = migrations_of(clients, vm).await?;
    if found.len() != 1 || found.iter().any(|found| found.id != id) {
        let found: Vec<_> = found.iter().map(describe).collect();
        bail!("one request should have made {id} alone: {found:?}");
    }
    Ok(())
}

/// Kills the planner at a commit of what is asked, and asks again with the same request id. Returns
/// the only migration that came of both.
async fn ask_twice(
    cluster: &mut Cluster<'_>,
    vm: &GuestVm,
    wanted: &MigrateVmRequest,
    (death, commit): (Death, &str),
) -> Result<Migration> {
    cluster.planner.faults.kill_at(&death.point(commit))?;
    if let Ok(answer) = cluster.clients.migrate(wanted).await {
        bail!("the planner answered before it died: {}", describe(&answer));
    }
    rise_again(cluster).await?;
    let written = migrations_of(&cluster.clients, vm).await?;
    match (death, written.as_slice()) {
        (Death::Before, []) | (Death::After, [_]) => {}
        (Death::Before | Death::After, found) => {
            let found: Vec<_> = found.iter().map(describe).collect();
            bail!("killed {} the commit, the planner has {found:?}", death.label());
        }
    }
    let migration = cluster.clients.migrate_until_answered(wanted).await?;
    expect_one(&cluster.clients, vm, &migration.id).await?;
    Ok(migration)
}

async fn admission(cluster: &mut Cluster<'_>, death: Death) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("asked"), "a").await?;
    let migration = ask_twice(cluster, &vm, &move_to(&vm, "b"), (death, "admitted")).await?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    expect_one(&cluster.clients, &vm, &migration.id).await?;
    Ok(super::pause_note(&vm))
}

/// Fills the other host, and prepares a request that has to wait for room there.
async fn without_room(
    cluster: &mut Cluster<'_>,
) -> Result<(Arc<GuestVm>, Arc<GuestVm>, MigrateVmRequest)> {
    let large = |name: &str| GuestSpec { memory_mib: 1100, ..GuestSpec::rom(name) };
    let ballast = cluster.start_vm(&large("ballast"), "b").await?;
    let vm = cluster.start_vm(&large("patient"), "a").await?;
    // Any host: one that was asked for by name and has no room is refused.
    let anywhere = MigrateVmRequest { target_host: String::new(), ..move_to(&vm, "") };
    Ok((ballast, vm, anywhere))
}

async fn wait_queued(cluster: &Cluster<'_>, id: &str) -> Result<()> {
    let waits = |m: &Migration| m.phase == "queued";
    cluster.clients.wait_migration(id, "to wait for room", POINT_BOUND, waits).await?;
    Ok(())
}

async fn queueing(cluster: &mut Cluster<'_>, death: Death) -> Result<Note> {
    let (ballast, vm, anywhere) = without_room(cluster).await?;
    let migration = ask_twice(cluster, &vm, &anywhere, (death, "queued")).await?;
    wait_queued(cluster, &migration.id).await?;
    let stop = StopVmRequest {
        vm: ballast.uuid.to_string(),
        how: "quit".into(),
        deadline_ms: 5_000,
        wait_ms: 10_000,
    };
    cluster.clients.planner().stop_vm(stop).await.context("make room")?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    expect_one(&cluster.clients, &vm, &migration.id).await?;
    Ok(super::pause_note(&vm))
}

/// Kills the planner at the commit of a cancel. What was written holds; what was not is asked again.
async fn cancel_twice(
    cluster: &mut Cluster<'_>,
    id: &str,
    (death, commit): (Death, &str),
) -> Result<()> {
    cluster.planner.faults.kill_at(&death.point(commit))?;
    if let Ok(answer) = cluster.clients.cancel(id).await {
        bail!("the planner answered before it died: {}", describe(&answer));
    }
    rise_again(cluster).await?;
    match death {
        Death::After => Ok(()),
        Death::Before => {
            let untouched = |m: &Migration| !m.cancel_requested;
            cluster
                .clients
                .wait_migration(id, "to be as before the cancel", POINT_BOUND, untouched)
                .await?;
            cluster.clients.cancel(id).await.context("cancel again")?;
            Ok(())
        }
    }
}

async fn cancel(cluster: &mut Cluster<'_>, death: Death) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    let migration = start_endless(cluster, &vm).await?;
    cancel_twice(cluster, &migration.id, (death, "cancelling")).await?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    expect_one(&cluster.clients, &vm, &migration.id).await?;
    Ok(Note::new())
}

async fn cancel_in_the_queue(cluster: &mut Cluster<'_>, death: Death) -> Result<Note> {
    let (_ballast, vm, anywhere) = without_room(cluster).await?;
    let migration = request(cluster, &anywhere).await?;
    wait_queued(cluster, &migration.id).await?;
    cancel_twice(cluster, &migration.id, (death, "aborted")).await?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    expect_one(&cluster.clients, &vm, &migration.id).await?;
    Ok(Note::new())
}
