//! Hosts that are emptied: drained, maintained and retired, whatever dies meanwhile; and what waits
//! for room.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::{
    CancelEmptyingRequest, CompleteMaintenanceRequest, DeleteHostRequest, DrainHostRequest,
    Emptying, GetEmptyingRequest, GetHostRequest, GetVmRequest, Host, ListQueueRequest,
    MaintenanceRequest, StartVmRequest, StopVmRequest, UncordonHostRequest,
};

use super::{Case, Note, Tier};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::wait::{Holds, Level, wait_for};

/// How long a host of six guests may take to be empty, on a busy machine and with daemons killed.
const EMPTY_BOUND: Duration = Duration::from_secs(90);
/// How long a single thing may take.
const BOUND: Duration = Duration::from_secs(30);

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("six-guests-drained-while-daemons-are-killed", Tier::Subset, |cluster| {
            Box::pin(killed(cluster))
        })
        .on_three_hosts(),
        Case::new("six-guests-drained-while-two-planners-are-killed", Tier::All, |cluster| {
            Box::pin(killed(cluster))
        })
        .on_three_hosts()
        .on_postgres(),
        Case::new("planner-killed-at-each-commit-of-a-retirement", Tier::All, |cluster| {
            Box::pin(at_each_commit(cluster, Asked::Retire))
        })
        .on_three_hosts(),
        Case::new("planner-killed-at-each-commit-of-a-job", Tier::All, |cluster| {
            Box::pin(at_each_commit(cluster, Asked::Maintain))
        })
        .on_three_hosts(),
        Case::new("maintenance-with-a-guest-that-cannot-leave", Tier::Subset, |cluster| {
            Box::pin(unmovable(cluster))
        })
        .on_three_hosts(),
        Case::new("maintenance-and-back", Tier::Subset, |cluster| {
            Box::pin(there_and_back(cluster))
        })
        .on_three_hosts(),
        Case::new("host-retired-to-the-grant-and-deleted", Tier::Subset, |cluster| {
            Box::pin(retired(cluster))
        })
        .on_three_hosts(),
        Case::new("full-fleet-queues-and-then-frees", Tier::Subset, |cluster| {
            Box::pin(full(cluster))
        }),
        Case::new("two-hosts-drained-at-once", Tier::Subset, |cluster| Box::pin(two(cluster)))
            .on_three_hosts(),
    ]
}

async fn start_all(
    cluster: &mut Cluster<'_>,
    names: &[&str],
    host: &str,
) -> Result<Vec<Arc<GuestVm>>> {
    let mut vms = Vec::new();
    for name in names {
        vms.push(cluster.start_vm(&GuestSpec::rom(name), host).await?);
    }
    cluster.wait_heard().await?;
    Ok(vms)
}

fn drain(host: &str) -> DrainHostRequest {
    DrainHostRequest { host: host.to_owned(), policy: None, by: "e2e".to_owned() }
}

async fn look(cluster: &Cluster<'_>, id: &str) -> Result<Level<Emptying>> {
    let request = GetEmptyingRequest { id: id.to_owned() };
    match cluster.clients.planner().get_emptying(request).await {
        Ok(reply) => Ok(Level::Reached(reply.into_inner())),
        Err(status) if cluster.clients.is_away(&status) => Ok(Level::NotYet(status.to_string())),
        Err(status) => Err(status.into()),
    }
}

/// Waits until an emptying is as wanted; its planner may be away meanwhile.
async fn see(
    cluster: &Cluster<'_>,
    id: &str,
    what: &str,
    bound: Duration,
    wanted: impl Fn(&Emptying) -> bool,
) -> Result<Emptying> {
    wait_for(format!("{id} to be {what}"), bound, || async {
        Ok(match look(cluster, id).await? {
            Level::Reached(seen) if wanted(&seen) => Level::Reached(seen),
            Level::Reached(seen) => Level::NotYet(format!("{seen:?}")),
            Level::NotYet(away) => Level::NotYet(away),
        })
    })
    .await
}

async fn show(cluster: &Cluster<'_>, host: &str) -> Result<Host> {
    let request = GetHostRequest { host: host.to_owned() };
    let reply = cluster.clients.planner().get_host(request).await;
    Ok(reply.context("show a host")?.into_inner())
}

/// Proves that each guest runs once, and not where it was.
async fn expect_off(cluster: &Cluster<'_>, vms: &[Arc<GuestVm>], off: &[&str]) -> Result<()> {
    for vm in vms {
        let request = GetVmRequest { vm: vm.uuid.to_string() };
        let seen = cluster.clients.planner().get_vm(request).await?.into_inner();
        if off.contains(&seen.host.as_str()) {
            bail!("{} is on {} still", vm.name, seen.host);
        }
        cluster.expect_running(vm, &seen.host).await?;
    }
    Ok(())
}

/// Takes a host back, so that the case ends with nothing held.
async fn open(cluster: &Cluster<'_>, host: &str) -> Result<()> {
    let request = UncordonHostRequest { host: host.to_owned(), by: "e2e".to_owned() };
    cluster.clients.planner().uncordon_host(request).await.context("uncordon")?;
    Ok(())
}

async fn strike(cluster: &mut Cluster<'_>, round: u32) -> Result<()> {
    let two = cluster.planners().count() > 1;
    match round % 3 {
        0 => {
            cluster.planner.daemon.kill().await?;
            cluster.planner.daemon.start()
        }
        1 => {
            cluster.host("a")?.agent.kill().await?;
            cluster.host("a")?.agent.start()
        }
        _ => {
            if two {
                let second = cluster.planners().nth(1).context("the second planner")?;
                second.daemon.kill().await?;
                second.daemon.start()?;
            }
            cluster.host("b")?.agent.kill().await?;
            cluster.host("b")?.agent.start()
        }
    }
}

async fn killed(cluster: &mut Cluster<'_>) -> Result<Note> {
    let names = ["one", "two", "three", "four", "five", "six"];
    let vms = start_all(cluster, &names, "a").await?;
    let drained = cluster.clients.planner().drain_host(drain("a")).await?.into_inner();
    let mut strikes = 0;
    loop {
        let moved = |seen: &Emptying| seen.progress.unwrap_or_default().moved;
        let next = u32::min(strikes, 6);
        let seen = see(cluster, &drained.id, "further", EMPTY_BOUND, |seen| {
            moved(seen) >= next || seen.state != "EMPTYING"
        })
        .await?;
        if seen.state != "EMPTYING" || strikes >= 6 {
            break;
        }
        strike(cluster, strikes).await?;
        strikes += 1;
    }
    let done =
        see(cluster, &drained.id, "empty", EMPTY_BOUND, |seen| seen.state == "EMPTY").await?;
    wait_heard_from(cluster).await?;
    let story = show(cluster, "a").await?.story.join("; ");
    if !story.contains("empty since") {
        bail!("the story of an empty host is: {story}");
    }
    expect_off(cluster, &vms, &["a"]).await?;
    let took = done.progress.unwrap_or_default().elapsed_ms;
    open(cluster, "a").await?;
    Ok(format!("{strikes} kills, empty after {took} ms"))
}

/// What is asked of host a.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Retire,
    Maintain,
}

impl Asked {
    /// The commits that it comes to, in order.
    const fn points(self) -> &'static [&'static str] {
        match self {
            Self::Retire => &["emptying_begun", "drain_granted"],
            Self::Maintain => &["emptying_begun", "job_verifying", "job_maintenance"],
        }
    }

    const fn opened(self) -> &'static str {
        match self {
            Self::Retire => "drain_opened",
            Self::Maintain => "job_opened",
        }
    }

    const fn end(self) -> &'static str {
        match self {
            Self::Retire => "GRANTED",
            Self::Maintain => "MAINTENANCE",
        }
    }

    async fn ask(self, cluster: &Cluster<'_>) -> Result<Emptying, tonic::Status> {
        let mut planner = cluster.clients.planner();
        let reply = match self {
            Self::Retire => planner.retire_host(drain("a")).await?,
            Self::Maintain => {
                let asked =
                    MaintenanceRequest { host: "a".to_owned(), policy: None, by: "e2e".to_owned() };
                planner.execute_maintenance(asked).await?
            }
        };
        Ok(reply.into_inner())
    }
}

async fn at_each_commit(cluster: &mut Cluster<'_>, asked: Asked) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two"], "a").await?;
    let mut deaths = 0;
    for side in ["before_commit", "after_commit"] {
        cluster.planner.faults.kill_at(&format!("{side}.{}", asked.opened()))?;
        if asked.ask(cluster).await.is_ok() {
            bail!("a planner answered that was to die at {side}.{}", asked.opened());
        }
        cluster.planner.daemon.wait_end(BOUND).await?;
        deaths += 1;
        if side == "before_commit" {
            cluster.planner.daemon.start()?;
            cluster.wait_heard().await?;
        }
    }
    for point in asked.points() {
        for side in ["before_commit", "after_commit"] {
            cluster.planner.faults.kill_at(&format!("{side}.{point}"))?;
            cluster.planner.daemon.start()?;
            cluster.planner.daemon.wait_end(EMPTY_BOUND).await?;
            deaths += 1;
        }
    }
    cluster.planner.daemon.start()?;
    let known = wait_for("the planner to tell of host a", BOUND, || async {
        let asked = GetHostRequest { host: "a".to_owned() };
        match cluster.clients.planner().get_host(asked).await {
            Ok(reply) => {
                let of = reply.into_inner().emptying;
                Ok(Level::from_option(of, || "nothing empties it".to_owned()))
            }
            Err(status) if cluster.clients.is_away(&status) => {
                Ok(Level::NotYet(status.to_string()))
            }
            Err(status) => Err(status.into()),
        }
    })
    .await?;
    see(cluster, &known.id, asked.end(), EMPTY_BOUND, |seen| seen.state == asked.end()).await?;
    wait_heard_from(cluster).await?;
    expect_off(cluster, &vms, &["a"]).await?;
    Ok(format!("{deaths} deaths"))
}

/// Waits until every host was heard by a planner that was started just now.
async fn wait_heard_from(cluster: &Cluster<'_>) -> Result<()> {
    wait_for("every host to be heard", BOUND, || async {
        let hosts = cluster.clients.hosts().await?;
        let heard = hosts.iter().all(|host| host.status == "connected");
        Ok(Level::from_condition(Holds::from(heard), || format!("{hosts:?}")))
    })
    .await
}

async fn unmovable(cluster: &mut Cluster<'_>) -> Result<Note> {
    let mut pinned = GuestSpec::rom("stays");
    pinned.extra_toml.push_str("pin = \"a\"\n");
    let stays = cluster.start_vm(&pinned, "a").await?;
    let vms = start_all(cluster, &["one", "two"], "a").await?;
    let mut planner = cluster.clients.planner();
    let asked = MaintenanceRequest { host: "a".to_owned(), policy: None, by: "e2e".to_owned() };
    let job = planner.execute_maintenance(asked).await?.into_inner();
    if job.state != "BLOCKED" || job.blocked.len() != 1 || job.moves.len() != 2 {
        bail!("a job with a pinned guest is {}: {job:?}", job.state);
    }
    if !show(cluster, "a").await?.cordons.is_empty() {
        bail!("a blocked job has cordoned its host");
    }
    let drained = planner.drain_host(drain("a")).await?.into_inner();
    let seen = see(cluster, &drained.id, "short of one", EMPTY_BOUND, |seen| {
        seen.progress.unwrap_or_default().moved == 2
    })
    .await?;
    let code = seen.blocked.first().map(|one| one.code.clone()).unwrap_or_default();
    if seen.state != "EMPTYING" || code != "pinned_to_source" {
        bail!("a drain with a pinned guest is {}: {:?}", seen.state, seen.blocked);
    }
    expect_off(cluster, &vms, &["a"]).await?;
    cluster.expect_running(&stays, "a").await?;
    open(cluster, "a").await?;
    see(cluster, &drained.id, "cancelled", BOUND, |seen| seen.state == "CANCELLED").await?;
    Ok(seen.blocked.first().map(|one| one.message.clone()).unwrap_or_default())
}

async fn there_and_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two", "three"], "a").await?;
    let mut planner = cluster.clients.planner();
    let asked = MaintenanceRequest { host: "a".to_owned(), policy: None, by: "e2e".to_owned() };
    let job = planner.execute_maintenance(asked).await?.into_inner();
    let done =
        see(cluster, &job.id, "in maintenance", EMPTY_BOUND, |seen| seen.state == "MAINTENANCE")
            .await?;
    expect_off(cluster, &vms, &["a"]).await?;
    let asked =
        CompleteMaintenanceRequest { id: job.id.clone(), return_vms: true, by: "e2e".to_owned() };
    planner.complete_maintenance(asked).await?;
    see(cluster, &job.id, "back", EMPTY_BOUND, |seen| {
        seen.returns.len() == 3 && seen.returns.iter().all(|one| one.state == "returned")
    })
    .await?;
    for vm in &vms {
        cluster.expect_running(vm, "a").await?;
    }
    Ok(format!("in maintenance after {} ms", done.progress.unwrap_or_default().elapsed_ms))
}

async fn retired(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two"], "a").await?;
    let mut planner = cluster.clients.planner();
    let delete = DeleteHostRequest { host: "a".to_owned(), by: "e2e".to_owned() };
    if planner.delete_host(delete.clone()).await.is_ok() {
        bail!("a host with guests was deleted");
    }
    let retired = planner.retire_host(drain("a")).await?.into_inner();
    see(cluster, &retired.id, "granted", EMPTY_BOUND, |seen| seen.state == "GRANTED").await?;
    expect_off(cluster, &vms, &["a"]).await?;
    planner.delete_host(delete).await.context("delete the retired host")?;
    let hosts = cluster.clients.hosts().await?;
    let left: Vec<&str> = hosts.iter().map(|host| host.id.as_str()).collect();
    if left != ["b", "c"] {
        bail!("the hosts are {left:?} after a was deleted");
    }
    Ok("deleted".to_owned())
}

async fn full(cluster: &mut Cluster<'_>) -> Result<Note> {
    // Two hosts of 2 GiB, each filled by one guest that may grow.
    let mut vms = Vec::new();
    for (name, host) in [("east", "a"), ("west", "b")] {
        let mut spec = GuestSpec::rom(name);
        spec.extra_toml.push_str("max_memory = \"1536MiB\"\n");
        vms.push(cluster.start_vm(&spec, host).await?);
    }
    cluster.wait_heard().await?;
    let mut late = GuestSpec::rom("late");
    late.extra_toml.push_str("max_memory = \"1GiB\"\n");
    let (late, request) = cluster.define_vm(&late, "")?;
    let mut planner = cluster.clients.planner();
    let request = StartVmRequest { wait_ms: 0, ..request };
    let waits = planner.start_vm(request).await?.into_inner();
    let Some(entry) = waits.queued else { bail!("a start without room is {}", waits.power) };
    // It waits on, over a restart of its planner.
    cluster.planner.daemon.kill().await?;
    cluster.planner.daemon.start()?;
    cluster.wait_heard().await?;
    let queue = cluster.clients.planner().list_queue(ListQueueRequest {}).await?.into_inner();
    let kept = queue.entries.first().is_some_and(|kept| kept.blocked_since == entry.blocked_since);
    if !kept || queue.entries.len() != 1 {
        bail!("the queue is {:?} after a restart", queue.entries);
    }
    let stop = StopVmRequest {
        vm: vms[0].uuid.to_string(),
        how: "quit".to_owned(),
        deadline_ms: 5_000,
        wait_ms: 10_000,
    };
    cluster.clients.planner().stop_vm(stop).await.context("stop one")?;
    late.serial.wait_ticks(3, BOUND).await?;
    cluster.expect_running(&late, "a").await?;
    Ok(entry.note)
}

async fn two(cluster: &mut Cluster<'_>) -> Result<Note> {
    let mut vms = start_all(cluster, &["one", "two", "three"], "a").await?;
    vms.extend(start_all(cluster, &["four", "five", "six"], "b").await?);
    let clients = cluster.clients.clone();
    let (mut east, mut west) = (clients.planner(), clients.planner());
    let (a, b) = tokio::try_join!(east.drain_host(drain("a")), west.drain_host(drain("b")))?;
    let (a, b) = (a.into_inner(), b.into_inner());
    for of in [&a, &b] {
        see(cluster, &of.id, "empty", EMPTY_BOUND, |seen| seen.state == "EMPTY").await?;
    }
    expect_off(cluster, &vms, &["a", "b"]).await?;
    open(cluster, "a").await?;
    let cancel = CancelEmptyingRequest { id: b.id.clone(), by: "e2e".to_owned() };
    cluster.clients.planner().cancel_emptying(cancel).await.context("cancel")?;
    see(cluster, &b.id, "cancelled", BOUND, |seen| seen.state == "CANCELLED").await?;
    wait_for("both hosts to take placements", BOUND, || async {
        let hosts = cluster.clients.hosts().await?;
        let fit = hosts.iter().all(|host| host.blockers.is_empty());
        Ok(Level::from_condition(Holds::from(fit), || format!("{hosts:?}")))
    })
    .await?;
    Ok("all on c".to_owned())
}
