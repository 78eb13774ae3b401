//! Daemons that are killed in every phase and started again: the migration ends
//! as if they had not been.

use std::time::Duration;

use anyhow::{Result, bail};

use super::{Case, Note, POINT_BOUND, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;

/// The phases of a migration that goes well.
const PHASES: [&str; 6] = ["admitted", "captured", "restored", "committed", "attached", "done"];

/// What the agents are told, and on which host, in a migration that goes well.
const ACTIONS: [(&str, &str); 5] = [
    ("arm_receiver", "b"),
    ("start_transfer", "a"),
    ("order_switchover", "a"),
    ("continue_destination", "b"),
    ("release_source", "a"),
];

/// How long a daemon may take to come to the point at which it kills itself.
const DEATH_BOUND: Duration = Duration::from_secs(15);

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for phase in PHASES {
        for side in ["before_commit", "after_commit"] {
            let name = format!("planner-killed-{}-{phase}-goes-on", side.replace("_commit", ""));
            let tier = if side == "after_commit" { Tier::Subset } else { Tier::All };
            cases.push(Case::new(name, tier, move |cluster| {
                Box::pin(planner(cluster, format!("{side}.{phase}")))
            }));
        }
    }
    for phase in &PHASES[..5] {
        for (label, host) in [("source", "a"), ("destination", "b")] {
            let name = format!("{label}-agent-killed-at-{phase}-goes-on");
            let tier =
                if matches!(*phase, "captured" | "committed") { Tier::Subset } else { Tier::All };
            cases.push(Case::new(name, tier, move |cluster| {
                Box::pin(agent_held(cluster, host, phase))
            }));
        }
    }
    for (action, host) in ACTIONS {
        for side in ["before_journal", "after_journal", "before_answer"] {
            let name = format!(
                "agent-killed-{}-{}-goes-on",
                side.replace('_', "-"),
                action.replace('_', "-")
            );
            let tier = if side == "after_journal" { Tier::Subset } else { Tier::All };
            cases.push(Case::new(name, tier, move |cluster| {
                Box::pin(agent_at_point(cluster, host, format!("{side}.{action}")))
            }));
        }
    }
    for phase in &PHASES[..5] {
        let tier = if *phase == "restored" { Tier::Subset } else { Tier::All };
        cases.push(Case::new(
            format!("all-daemons-killed-at-{phase}-goes-on"),
            tier,
            move |cluster| Box::pin(everything(cluster, phase)),
        ));
    }
    cases
}

/// Kills the planner at a point of its own, starts it again, and expects the move to go on.
async fn planner(cluster: &mut Cluster<'_>, point: String) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    cluster.planner_faults.kill_at(&point)?;
    let wanted = move_to(&vm, "b");
    // The planner may die before it answers: whoever asked asks again with the same id.
    let first = cluster.clients.migrate(&wanted).await;
    cluster.planner.wait_end(DEATH_BOUND).await?;
    cluster.planner_faults.release(&point)?;
    cluster.planner.start()?;
    let migration = cluster.clients.migrate_until_answered(&wanted).await?;
    if let Ok(first) = first
        && first.id != migration.id
    {
        bail!("one request made {} and {}", first.id, migration.id);
    }
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

/// Kills an agent while the planner waits in a phase.
async fn agent_held(cluster: &mut Cluster<'_>, host: &str, phase: &str) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    let point = format!("after_commit.{phase}");
    cluster.planner_faults.hold(&point)?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner_faults.wait_reached(&point, POINT_BOUND).await?;
    let agent = &mut cluster.host(host)?.agent;
    agent.kill().await?;
    agent.start()?;
    cluster.planner_faults.release(&point)?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

/// Kills an agent at a point of its own, starts it again, and expects the move to go on.
async fn agent_at_point(cluster: &mut Cluster<'_>, host: &str, point: String) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    cluster.host(host)?.faults.kill_at(&point)?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    let host = cluster.host(host)?;
    host.agent.wait_end(DEATH_BOUND).await?;
    host.faults.release(&point)?;
    host.agent.start()?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

/// Kills planner and agents while the planner waits in a phase, as when a rack loses power but for
/// the guests.
async fn everything(cluster: &mut Cluster<'_>, phase: &str) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    let point = format!("after_commit.{phase}");
    cluster.planner_faults.hold(&point)?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner_faults.wait_reached(&point, POINT_BOUND).await?;
    cluster.planner.kill().await?;
    cluster.planner_faults.release(&point)?;
    for host in cluster.host_names() {
        let agent = &mut cluster.host(host)?.agent;
        agent.kill().await?;
        agent.start()?;
    }
    cluster.planner.start()?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}
