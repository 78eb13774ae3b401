//! A host is drained while planners and agents are killed.

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::Emptying;

use super::{EMPTY_BOUND, drain, expect_off, open, see, start_all, wait_heard_from};
use crate::cases::{Case, Note, Tier};
use crate::cluster::Cluster;
use crate::story::Moment;

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
    ]
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
    if drained.progress.unwrap_or_default().total != 6 {
        bail!("a drain of six begins with {:?}", drained.progress);
    }
    let mut strikes = 0;
    let mut told = Vec::new();
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
        let moment = Moment::of(cluster, "a", &vms).await?;
        let progress = &moment.emptying()["progress"];
        told.push(format!("{}/{}", progress["moved"], progress["total"]));
    }
    let done =
        see(cluster, &drained.id, "empty", EMPTY_BOUND, |seen| seen.state == "EMPTY").await?;
    wait_heard_from(cluster).await?;
    for address in cluster.store.addresses() {
        let moment = Moment::told_by(cluster, address, "a", &vms).await?;
        moment.tells(&["drained: its own agent said"])?;
    }
    expect_off(cluster, &vms, &["a"]).await?;
    let took = done.progress.unwrap_or_default().elapsed_ms;
    open(cluster, "a").await?;
    let failed = done.log.iter().filter(|entry| entry.event != "begun");
    let failed = failed.filter(|entry| entry.note.contains(": "));
    let failed: Vec<_> = failed.map(|entry| format!("; {}", entry.note)).collect();
    let told = told.join(" ");
    Ok(format!("{strikes} kills, told {told}, empty after {took} ms{}", failed.concat()))
}
