//! Hosts that are emptied: drained, maintained and retired, whatever dies meanwhile; and what waits
//! for room. What is told of a host at each moment is held against where its guests really are.

mod commits;
mod death;
mod full;
mod killed;
mod maintenance;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::{
    CancelEmptyingRequest, DeleteHostRequest, DrainHostRequest, Emptying, GetEmptyingRequest,
    GetVmRequest, ListHostsRequest, ListMigrationsRequest, UncordonHostRequest,
};

use super::{Case, Note, Tier};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::story::Moment;
use crate::wait::{Holds, Level, wait_for};

/// How long a host of six guests may take to be empty, on a busy machine and with daemons killed.
const EMPTY_BOUND: Duration = Duration::from_secs(90);
/// How long a single thing may take.
const BOUND: Duration = Duration::from_secs(30);

pub(super) fn cases() -> Vec<Case> {
    [
        killed::cases(),
        commits::cases(),
        maintenance::cases(),
        vec![
            Case::new("host-retired-to-the-grant-and-deleted", Tier::Subset, |cluster| {
                Box::pin(retired(cluster))
            })
            .on_three_hosts(),
        ],
        full::cases(),
        vec![
            Case::new("two-hosts-drained-at-once", Tier::All, |cluster| Box::pin(two(cluster)))
                .on_three_hosts(),
        ],
        death::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
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

/// Waits until every host was heard by a planner that was started just now.
async fn wait_heard_from(cluster: &Cluster<'_>) -> Result<()> {
    wait_for("every host to be heard", BOUND, || async {
        let hosts = match cluster.clients.planner().list_hosts(ListHostsRequest {}).await {
            Ok(reply) => reply.into_inner().hosts,
            Err(status) if cluster.clients.is_away(&status) => {
                return Ok(Level::NotYet(status.to_string()));
            }
            Err(status) => return Err(status.into()),
        };
        let heard = hosts.iter().all(|host| host.status == "connected");
        Ok(Level::from_condition(Holds::from(heard), || format!("{hosts:?}")))
    })
    .await
}

/// Runs the command line, and returns what it printed and how it ended.
async fn cli(cluster: &Cluster<'_>, command: &str) -> Result<(i32, String)> {
    let arguments: Vec<&str> = command.split(' ').collect();
    let output = cluster.cli(&arguments).await?;
    let printed = [output.stdout, output.stderr].concat();
    let code = output.status.code().context("the command line was killed")?;
    Ok((code, String::from_utf8_lossy(&printed).into_owned()))
}

/// The same, and fails unless it ends with `code` and prints each of `parts`.
async fn cli_tells(
    cluster: &Cluster<'_>,
    command: &str,
    code: i32,
    parts: &[&str],
) -> Result<String> {
    let (ended, printed) = cli(cluster, command).await?;
    let missing = parts.iter().find(|part| !printed.contains(**part));
    if ended != code || missing.is_some() {
        bail!("`vmferry {command}` ended with {ended}, not told: {missing:?}\n{printed}");
    }
    Ok(printed)
}

async fn retired(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two"], "a").await?;
    cli_tells(cluster, "host delete a", 3, &["retire it first"]).await?;
    let retired = cluster.clients.planner().retire_host(drain("a")).await?.into_inner();
    see(cluster, &retired.id, "granted", EMPTY_BOUND, |seen| seen.state == "GRANTED").await?;
    expect_off(cluster, &vms, &["a"]).await?;
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["retired since", "its own agent said that it is empty", "may be deleted"])?;
    let delete = DeleteHostRequest { host: "a".to_owned(), by: "e2e".to_owned() };
    cluster.clients.planner().delete_host(delete).await.context("delete the retired host")?;
    // Its agent reports on, and is told that its host was deleted: it does not come back by itself.
    let log = cluster.host("a")?.agent.log().to_owned();
    wait_for("the agent of the deleted host to be told so", BOUND, || async {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let told = text.contains("host a was deleted");
        Ok(Level::from_condition(Holds::from(told), || "it is not in its log".to_owned()))
    })
    .await?;
    let hosts = cluster.clients.hosts().await?;
    let left: Vec<&str> = hosts.iter().map(|host| host.id.as_str()).collect();
    if left != ["b", "c"] {
        bail!("the hosts are {left:?} after a was deleted");
    }
    cli_tells(cluster, "host show a", 2, &["host"]).await?;
    expect_off(cluster, &vms, &["a"]).await?;
    Ok("deleted".to_owned())
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
    for host in ["a", "b"] {
        let moment = Moment::of(cluster, host, &vms).await?;
        moment.tells(&["drained: its own agent said", "and it is kept so"])?;
    }
    Moment::of(cluster, "c", &vms).await?.tells(&["it takes placements"])?;
    let all = ListMigrationsRequest::default();
    let all = clients.planner().list_migrations(all).await?.into_inner().migrations;
    if let Some(wrong) = all.iter().find(|one| one.target_host != "c") {
        bail!("a VM went from one drained host to another: {}", crate::client::describe(wrong));
    }
    open(cluster, "a").await?;
    let cancel = CancelEmptyingRequest { id: b.id.clone(), by: "e2e".to_owned() };
    cluster.clients.planner().cancel_emptying(cancel).await.context("cancel")?;
    see(cluster, &b.id, "cancelled", BOUND, |seen| seen.state == "CANCELLED").await?;
    cluster.wait_heard().await?;
    for host in ["a", "b"] {
        let moment = Moment::of(cluster, host, &vms).await?;
        moment.tells(&["it takes placements", "was given up", "3 of 3 VMs have left"])?;
    }
    Ok(format!("all on c after {} migrations", all.len()))
}
