//! A fleet without room: what waits says for what, since when and at which place, and goes on once
//! there is room.

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use vmferry_proto::v1::{MigrateVmRequest, StartVmRequest, StopVmRequest};

use super::{BOUND, cli_tells};
use crate::cases::{Case, Note, Tier, request};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::lab::PLANNER_ADDRESS;
use crate::rest;
use crate::story::Moment;

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("full-fleet-queues-and-then-frees", Tier::Subset, |cluster| {
        Box::pin(full(cluster))
    })]
}

fn growing(name: &str, max_memory: &str) -> GuestSpec {
    let mut spec = GuestSpec::rom(name);
    spec.extra_toml.push_str(&format!("max_memory = \"{max_memory}\"\n"));
    spec
}

/// Returns the queue, if the command line and REST agree on it.
async fn queue(cluster: &Cluster<'_>) -> Result<Vec<Value>> {
    let printed = cli_tells(cluster, "queue -o json", 0, &[]).await?;
    let told: Value = serde_json::from_str(&printed).context("read the queue")?;
    let entries = told["entries"].as_array().cloned().unwrap_or_default();
    let address = format!("{PLANNER_ADDRESS}:9095");
    let over_rest = rest::request(&address, "GET", "/api/queue", None).await?.body;
    let other = over_rest["entries"].as_array().cloned().unwrap_or_default();
    for key in ["vm_name", "kind", "priority", "position", "of", "blocked_since", "deadline"] {
        let of = |entries: &[Value]| entries.iter().map(|one| one[key].clone()).collect::<Vec<_>>();
        if of(&entries) != of(&other) {
            bail!("the queue is told in two ways: {told}, {over_rest}");
        }
    }
    Ok(entries)
}

/// Checks that an entry says at which place it waits, since when, and for what in figures, and that
/// the table says the same.
async fn expect_waiting(
    cluster: &Cluster<'_>,
    entry: &Value,
    (name, place): (&str, &str),
    figures: &[&str],
) -> Result<()> {
    let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    let (since, note) = (text("blocked_since"), text("note"));
    let at = format!("{}/{}", entry["position"], entry["of"]);
    if text("vm_name") != name || at != place || since.is_empty() {
        bail!("not {name} at {place}: {entry}");
    }
    if let Some(missing) = figures.iter().find(|figure| !note.contains(**figure)) {
        bail!("{missing:?} is not in what {name} waits for: {note}");
    }
    cli_tells(cluster, "queue", 0, &[place, name, &since, &note]).await?;
    Ok(())
}

/// Returns the free memory of a host, as `vmferry host show` writes it.
async fn free(cluster: &Cluster<'_>, host: &str) -> Result<String> {
    let printed = cli_tells(cluster, &format!("host show {host}"), 0, &[]).await?;
    let line = printed.lines().find_map(|line| line.trim().strip_prefix("free"));
    Ok(format!("{} free", line.context("no free memory is shown")?.trim()))
}

async fn stop(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<()> {
    let stop = StopVmRequest {
        vm: vm.uuid.to_string(),
        how: "quit".to_owned(),
        deadline_ms: 5_000,
        wait_ms: 10_000,
    };
    cluster.clients.planner().stop_vm(stop).await.context("stop one")?;
    Ok(())
}

async fn full(cluster: &mut Cluster<'_>) -> Result<Note> {
    // Two hosts of 2 GiB, each filled by one guest that may grow.
    let east = cluster.start_vm(&growing("east", "1536MiB"), "a").await?;
    let west = cluster.start_vm(&growing("west", "1536MiB"), "b").await?;
    cluster.wait_heard().await?;
    let (late, asked) = cluster.define_vm(&growing("late", "1GiB"), "")?;
    let asked = StartVmRequest { wait_ms: 0, ..asked };
    let waits = cluster.clients.planner().start_vm(asked).await?.into_inner();
    if waits.queued.is_none() {
        bail!("a start without room is {}: {}", waits.power, waits.error);
    }
    let moving =
        request(cluster, &MigrateVmRequest { target_host: String::new(), ..move_to(&east, "") })
            .await?;
    let before = queue(cluster).await?;
    let (a, b) = (free(cluster, "a").await?, free(cluster, "b").await?);
    let [first, second] = &before[..] else { bail!("the queue is {before:?}") };
    expect_waiting(cluster, first, ("late", "1/2"), &["1 GiB of memory needed", &a, &b]).await?;
    expect_waiting(cluster, second, ("east", "2/2"), &["1.5 GiB of memory needed", &b]).await?;
    cli_tells(cluster, "vm show late", 0, &["1 of 2", &b]).await?;
    cli_tells(cluster, &format!("migration show {}", moving.id), 0, &["2 of 2", &b]).await?;
    // They wait on, over a restart of their planner, as long as they did.
    cluster.planner.daemon.kill().await?;
    cluster.planner.daemon.start()?;
    cluster.wait_heard().await?;
    let after = queue(cluster).await?;
    let kept = |of: &[Value]| {
        let part = |one: &Value| (one["id"].clone(), one["blocked_since"].clone());
        of.iter().map(part).collect::<Vec<_>>()
    };
    if kept(&after) != kept(&before) {
        bail!("the queue is {after:?} after a restart, and was {before:?}");
    }
    let both = [east.clone(), west.clone()];
    for host in ["a", "b"] {
        Moment::of(cluster, host, &both).await?;
    }
    // Room for the older one only: the other waits on, now the first.
    stop(cluster, &west).await?;
    late.serial.wait_ticks(3, BOUND).await?;
    cluster.expect_running(&late, "b").await?;
    cluster.expect_running(&east, "a").await?;
    let left = queue(cluster).await?;
    let [only] = &left[..] else { bail!("the queue is {left:?}") };
    let b = free(cluster, "b").await?;
    expect_waiting(cluster, only, ("east", "1/1"), &[&b]).await?;
    stop(cluster, &late).await?;
    cluster.clients.expect_end(&moving.id, End::Done, BOUND).await?;
    cluster.expect_running(&east, "b").await?;
    cli_tells(cluster, "queue", 0, &["nothing waits for room"]).await?;
    Ok(first["note"].as_str().unwrap_or_default().to_owned())
}
