//! Hosts in maintenance: the plan, who cannot leave, the way in and the way back.

use anyhow::{Context as _, Result, bail};

use super::{
    BOUND, EMPTY_BOUND, cli, cli_tells, drain, expect_off, open, see, start_all, wait_heard_from,
};
use crate::cases::{Case, Note, POINT_BOUND, Tier};
use crate::cluster::Cluster;
use crate::guest::{GuestDisk, GuestSpec, Sharing};
use crate::story::Moment;

/// Where each migration of a job waits while the host is looked at.
const UNDER_WAY: &str = "after_commit.armed";

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("maintenance-with-guests-that-cannot-leave", Tier::Subset, |cluster| {
            Box::pin(unmovable(cluster))
        })
        .on_three_hosts(),
        Case::new("maintenance-and-back", Tier::Subset, |cluster| {
            Box::pin(there_and_back(cluster))
        })
        .on_three_hosts(),
    ]
}

async fn unmovable(cluster: &mut Cluster<'_>) -> Result<Note> {
    let mut pinned = GuestSpec::rom("pinned");
    pinned.extra_toml.push_str("pin = \"a\"\n");
    let pinned = cluster.start_vm(&pinned, "a").await?;
    let mut rooted = GuestSpec::rom("rooted");
    let path = cluster.disk_path("rooted.raw");
    rooted.disk = Some(GuestDisk { path, format: "raw", sharing: Sharing::Local });
    let rooted = cluster.start_vm(&rooted, "a").await?;
    let vms = start_all(cluster, &["one", "two"], "a").await?;
    let all = [&vms[..], &[pinned.clone(), rooted.clone()]].concat();
    // A plan, and a job, say it all and touch nothing.
    let local = format!("disk0 ({}) is this host's own", cluster.disk_path("rooted.raw").display());
    let reasons = ["BLOCKED", "pinned_to_source", "--allow-pinned", &local, "what to do"];
    for verb in ["plan", "execute"] {
        cli_tells(cluster, &format!("host maintenance {verb} a"), 3, &reasons).await?;
        let moment = Moment::of(cluster, "a", &all).await?;
        moment.tells(&["it takes placements", "nothing was touched", "2 VMs have no place"])?;
    }
    // A drain moves whom it can, and shows the rest for as long as it takes.
    let drained = cluster.clients.planner().drain_host(drain("a")).await?.into_inner();
    let seen = see(cluster, &drained.id, "short of two", EMPTY_BOUND, |seen| {
        seen.progress.unwrap_or_default().moved == 2 && seen.blocked.len() == 2
    })
    .await?;
    if seen.state != "EMPTYING" {
        bail!("a drain with guests that cannot leave is {}: {:?}", seen.state, seen.blocked);
    }
    let moment = Moment::of(cluster, "a", &all).await?;
    moment.tells(&[
        "2 of 4 VMs have left",
        "VM pinned cannot leave since",
        "VM rooted cannot leave since",
        "to do: allow pinned VMs to leave (--allow-pinned), or stop it",
        "waits for a place for VM pinned",
    ])?;
    expect_off(cluster, &vms, &["a"]).await?;
    for vm in [&pinned, &rooted] {
        cluster.expect_running(vm, "a").await?;
    }
    open(cluster, "a").await?;
    see(cluster, &drained.id, "cancelled", BOUND, |seen| seen.state == "CANCELLED").await?;
    let moment = Moment::of(cluster, "a", &all).await?;
    moment.tells(&["it takes placements", "was given up", "cancelled by e2e"])?;
    let why = seen.blocked.iter().map(|one| format!("{}: {}", one.vm_name, one.message));
    Ok(why.collect::<Vec<_>>().join("; "))
}

async fn there_and_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two", "three"], "a").await?;
    let cordon = ["host", "cordon", "a", "--reason", "a fan is loud"];
    if !cluster.cli(&cordon).await?.status.success() {
        bail!("host a was not cordoned");
    }
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["it is connected and takes no placements", "a fan is loud"])?;
    cli_tells(cluster, "host uncordon a", 0, &["it takes placements"]).await?;
    cli_tells(cluster, "host maintenance plan a", 0, &["PLANNED", "one", "two", "three"]).await?;
    cluster.planner.faults.hold(UNDER_WAY)?;
    let (code, begun) = cli(cluster, "host maintenance execute a -o json").await?;
    let begun: serde_json::Value = serde_json::from_str(&begun).context("read the job")?;
    let id = begun["id"].as_str().context("the job has no id")?.to_owned();
    if code != 0 {
        bail!("the job was refused: {begun}");
    }
    cluster.planner.faults.wait_reached(UNDER_WAY, POINT_BOUND).await?;
    see(cluster, &id, "under way", BOUND, |seen| seen.progress.unwrap_or_default().running == 2)
        .await?;
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["0 of 3 VMs have left, 2 are on their way", "waits for migration"])?;
    let again = cli(cluster, "host drain a").await?;
    if again.0 != 3 || !again.1.contains(&id) {
        bail!("a second request is answered with {again:?}, and the first is {id}");
    }
    cluster.planner.faults.release(UNDER_WAY)?;
    let done = see(cluster, &id, "in maintenance", EMPTY_BOUND, |seen| seen.state == "MAINTENANCE")
        .await?;
    expect_off(cluster, &vms, &["a"]).await?;
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["in maintenance since", "its own agent said that it is empty"])?;
    // Its agent is stopped, as for an update: it is told that nobody hears it.
    cluster.host("a")?.agent.kill().await?;
    let silent = async || -> Result<bool> {
        Ok(Moment::of(cluster, "a", &vms).await?.story().contains("it is disconnected"))
    };
    let until = tokio::time::Instant::now() + POINT_BOUND;
    while !silent().await? {
        if tokio::time::Instant::now() > until {
            bail!("a host in maintenance whose agent is gone is never told to be disconnected");
        }
    }
    cluster.host("a")?.agent.start()?;
    wait_heard_from(cluster).await?;
    let back = format!("host maintenance complete {id} --return --wait");
    cli_tells(cluster, &back, 0, &["COMPLETED", "3 of 3 VMs came back"]).await?;
    for vm in &vms {
        cluster.expect_running(vm, "a").await?;
    }
    let moment = Moment::of(cluster, "a", &vms).await?;
    moment.tells(&["it takes placements", "back in service after", "3 of 3 VMs came back"])?;
    Ok(format!("in maintenance after {} ms", done.progress.unwrap_or_default().elapsed_ms))
}
