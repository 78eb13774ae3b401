//! Daemons that are killed in every phase and started again: the migration ends
//! as if they had not been, forward or back.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::{MigrateVmRequest, Migration, StopVmRequest};

use super::cancel::{expect_cancelled, start_endless};
use super::death::kill_qemu;
use super::{Case, Note, POINT_BOUND, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;

/// The planner's commits in a migration that goes well, after its admission. `ordered` is the
/// capture: both are one statement.
const COMMITS: [&str; 5] = ["ordered", "restored", "committed", "attached", "done"];

/// What the agents are told, and on which host, in a migration that goes well.
const ACTIONS: [(&str, &str); 5] = [
    ("arm_receiver", "b"),
    ("start_transfer", "a"),
    ("order_switchover", "a"),
    ("continue_destination", "b"),
    ("release_source", "a"),
];

/// What the agents are told, and on which host, in a migration that is cancelled while copying.
const ACTIONS_OF_A_CANCEL: [(&str, &str); 2] =
    [("cancel_transfer", "a"), ("destroy_receiver", "b")];

/// How long a daemon may take to come to the point at which it kills itself.
const DEATH_BOUND: Duration = Duration::from_secs(15);

/// Who is killed.
#[derive(Clone, Copy, Debug)]
enum Victims {
    Planner,
    SourceAgent,
    DestinationAgent,
    All,
}

impl Victims {
    const EACH: [Self; 4] = [Self::Planner, Self::SourceAgent, Self::DestinationAgent, Self::All];

    const fn label(self) -> &'static str {
        match self {
            Self::Planner => "planner",
            Self::SourceAgent => "source-agent",
            Self::DestinationAgent => "destination-agent",
            Self::All => "all-daemons",
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for victims in Victims::EACH {
        let name = format!("{}-killed-while-copying-goes-on", victims.label());
        cases.push(Case::new(name, Tier::Subset, move |cluster| {
            Box::pin(while_copying(cluster, victims))
        }));
        // The planner has points of its own.
        for commit in COMMITS
            .iter()
            .filter(|commit| **commit != "done" && !matches!(victims, Victims::Planner))
        {
            let tier =
                if matches!(*commit, "ordered" | "committed") { Tier::Subset } else { Tier::All };
            let name = format!("{}-killed-at-{commit}-goes-on", victims.label());
            cases
                .push(Case::new(name, tier, move |cluster| Box::pin(at(cluster, victims, commit))));
        }
    }
    for commit in COMMITS {
        for side in ["before_commit", "after_commit"] {
            let name = format!("planner-killed-{}-{commit}-goes-on", side.replace("_commit", ""));
            // `restored` is committed together with `committed`.
            let usual = side == "after_commit" && !matches!(commit, "restored" | "done");
            let tier = if usual { Tier::Subset } else { Tier::All };
            cases.push(Case::new(name, tier, move |cluster| {
                Box::pin(planner_at_point(cluster, format!("{side}.{commit}")))
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
    cases.extend(on_the_way_back());
    cases.push(Case::new("planner-killed-while-queued-goes-on", Tier::Subset, |cluster| {
        Box::pin(queued(cluster))
    }));
    cases
}

/// Returns the cases in which a migration is rolling back.
fn on_the_way_back() -> Vec<Case> {
    let mut cases = Vec::new();
    for victims in Victims::EACH {
        let tier = if matches!(victims, Victims::All) { Tier::Subset } else { Tier::All };
        let name = format!("{}-killed-while-rolling-back-is-aborted", victims.label());
        cases.push(Case::new(name, tier, move |cluster| {
            Box::pin(while_rolling_back(cluster, victims))
        }));
    }
    for (action, host) in ACTIONS_OF_A_CANCEL {
        for side in ["before_journal", "after_journal", "before_answer"] {
            let (side_name, action_name) = (side.replace('_', "-"), action.replace('_', "-"));
            let name = format!("agent-killed-{side_name}-{action_name}-is-aborted");
            cases.push(Case::new(name, Tier::All, move |cluster| {
                Box::pin(agent_in_a_cancel(cluster, host, format!("{side}.{action}")))
            }));
        }
    }
    for side in ["before_journal", "after_journal", "before_answer"] {
        let name = format!("agent-killed-{}-resume-source-is-aborted", side.replace('_', "-"));
        let tier = if side == "after_journal" { Tier::Subset } else { Tier::All };
        cases.push(Case::new(name, tier, move |cluster| {
            Box::pin(agent_at_resume(cluster, format!("{side}.resume_source")))
        }));
    }
    cases
}

/// Kills daemons with SIGKILL, all of them before the first is started again.
async fn kill_and_start(cluster: &mut Cluster<'_>, victims: Victims) -> Result<()> {
    let (planner, agents): (bool, &[&str]) = match victims {
        Victims::Planner => (true, &[]),
        Victims::SourceAgent => (false, &["a"]),
        Victims::DestinationAgent => (false, &["b"]),
        Victims::All => (true, &["a", "b"]),
    };
    if planner {
        cluster.planner.daemon.kill().await?;
    }
    for host in agents {
        cluster.host(host)?.agent.kill().await?;
    }
    cluster.planner.faults.disarm()?;
    for host in agents {
        cluster.host(host)?.agent.start()?;
    }
    if planner { cluster.planner.daemon.start() } else { Ok(()) }
}

/// Kills daemons while memory crosses.
async fn while_copying(cluster: &mut Cluster<'_>, victims: Victims) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    let slow = MigrateVmRequest { bandwidth_mbps: 240, ..move_to(&vm, "b") };
    let migration = request(cluster, &slow).await?;
    let copying = |m: &Migration| m.phase == "admitted" && m.bytes_transferred > 0;
    cluster.clients.wait_migration(&migration.id, "to copy", POINT_BOUND, copying).await?;
    kill_and_start(cluster, victims).await?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

/// Kills daemons while the planner waits after a commit.
async fn at(cluster: &mut Cluster<'_>, victims: Victims, commit: &str) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    let point = format!("after_commit.{commit}");
    cluster.planner.faults.hold(&point)?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner.faults.wait_reached(&point, POINT_BOUND).await?;
    kill_and_start(cluster, victims).await?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}

/// Kills the planner at a point of its own, starts it again, and expects the move to go on.
async fn planner_at_point(cluster: &mut Cluster<'_>, point: String) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    cluster.planner.faults.kill_at(&point)?;
    let wanted = move_to(&vm, "b");
    // The planner may die before it answers: whoever asked asks again with the same id.
    let first = cluster.clients.migrate(&wanted).await;
    cluster.planner.daemon.wait_end(DEATH_BOUND).await?;
    cluster.planner.faults.release(&point)?;
    cluster.planner.daemon.start()?;
    let migration = cluster.clients.migrate_until_answered(&wanted).await?;
    if let Ok(first) = first
        && first.id != migration.id
    {
        bail!("one request made {} and {}", first.id, migration.id);
    }
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

/// Kills daemons while a migration that was cancelled is taken back: its source's agent has the word
/// to cancel and has not acted on it.
async fn while_rolling_back(cluster: &mut Cluster<'_>, victims: Victims) -> Result<Note> {
    let point = "before_journal.cancel_transfer";
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    let migration = start_endless(cluster, &vm).await?;
    let source_faults = cluster.host("a")?.faults.clone();
    source_faults.hold(point)?;
    cluster.clients.cancel(&migration.id).await?;
    source_faults.wait_reached(point, POINT_BOUND).await?;
    kill_and_start(cluster, victims).await?;
    source_faults.release(point)?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    Ok(Note::new())
}

/// Kills an agent at a point of its own while a cancelled migration is taken back.
async fn agent_in_a_cancel(cluster: &mut Cluster<'_>, host: &str, point: String) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    let migration = start_endless(cluster, &vm).await?;
    cluster.host(host)?.faults.kill_at(&point)?;
    cluster.clients.cancel(&migration.id).await?;
    let host = cluster.host(host)?;
    host.agent.wait_end(DEATH_BOUND).await?;
    host.faults.release(&point)?;
    host.agent.start()?;
    expect_cancelled(cluster, &vm, &migration.id).await?;
    Ok(Note::new())
}

/// Kills the source's agent while it lets the guest go on after an ordered switchover whose
/// receiver died.
async fn agent_at_resume(cluster: &mut Cluster<'_>, point: String) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    cluster.planner.faults.hold("before_commit.restored")?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner.faults.wait_reached("before_commit.restored", POINT_BOUND).await?;
    cluster.host("a")?.faults.kill_at(&point)?;
    kill_qemu(cluster, &vm, "b").await?;
    cluster.planner.faults.release("before_commit.restored")?;
    let host = cluster.host("a")?;
    host.agent.wait_end(DEATH_BOUND).await?;
    host.faults.release(&point)?;
    host.agent.start()?;
    Ok(settle(cluster, &vm, &migration.id, End::Aborted).await?.error)
}

/// Kills the planner while a migration waits for room, and makes room.
async fn queued(cluster: &mut Cluster<'_>) -> Result<Note> {
    let large = |name: &str| GuestSpec { memory_mib: 1100, ..GuestSpec::rom(name) };
    let ballast = cluster.start_vm(&large("ballast"), "b").await?;
    let vm = cluster.start_vm(&large("patient"), "a").await?;
    // Any host: one that was asked for by name and has no room is refused.
    let anywhere = MigrateVmRequest { target_host: String::new(), ..move_to(&vm, "") };
    let migration = request(cluster, &anywhere).await?;
    let waits = |m: &Migration| m.phase == "queued" && !m.capacity_note.is_empty();
    let waiting = cluster
        .clients
        .wait_migration(&migration.id, "to wait for room", POINT_BOUND, waits)
        .await?;
    kill_and_start(cluster, Victims::Planner).await?;
    cluster.wait_ready().await?;
    let stop = StopVmRequest {
        vm: ballast.uuid.to_string(),
        how: "quit".into(),
        deadline_ms: 5_000,
        wait_ms: 10_000,
    };
    cluster.clients.planner().stop_vm(stop).await.context("make room")?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(waiting.capacity_note)
}
