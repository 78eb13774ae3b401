//! Moves that are made at the hosts' agents, while no planner is there.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{Case, MOVE_BOUND, Note, Tier, move_vm, pause_note};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;
use crate::lab::host_address;
use crate::wait::{Holds, Level, let_pass, wait_for};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "runtime-move-needs-no-planner-and-is-known-to-it-later",
            Tier::Subset,
            |cluster| Box::pin(without_planner(cluster, Deaths::None)),
        ),
        Case::new("runtime-move-goes-on-over-the-death-of-both-agents", Tier::All, |cluster| {
            Box::pin(without_planner(cluster, Deaths::BothAgents))
        }),
        Case::new(
            "runtime-move-that-was-killed-is-resumed-by-its-journal",
            Tier::Subset,
            |cluster| Box::pin(without_planner(cluster, Deaths::TheRun)),
        ),
    ]
}

/// Who is killed while memory crosses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deaths {
    None,
    BothAgents,
    TheRun,
}

async fn without_planner(cluster: &mut Cluster<'_>, deaths: Deaths) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("alone"), "a").await?;
    cluster.planner.daemon.kill().await?;
    let journal = cluster.dir().join("run.json").display().to_string();
    let (a, b) = (host_address("a"), host_address("b"));
    // Three seconds of memory: long enough to die in.
    let begin: Vec<&str> = vec![
        "runtime",
        "migrate",
        "alone",
        "--from",
        &a,
        "--to",
        &b,
        "--journal",
        &journal,
        "--bandwidth",
        "240",
    ];
    let mut child = cluster.cli_command(&begin).spawn().context("run vmferry")?;
    if deaths != Deaths::None {
        wait_for("memory to cross", MOVE_BOUND, || async {
            let text = std::fs::read_to_string(&journal).unwrap_or_default();
            let crosses = text.contains("\"transferring\"");
            Ok(Level::from_condition(Holds::from(crosses), || text))
        })
        .await?;
    }
    match deaths {
        Deaths::None => {}
        Deaths::BothAgents => {
            for host in ["a", "b"] {
                let agent = &mut cluster.host(host)?.agent;
                agent.kill().await?;
                agent.start()?;
                let_pass(Duration::from_millis(300)).await;
            }
        }
        Deaths::TheRun => {
            child.kill().await.context("kill the run")?;
            let resume = ["runtime", "migrate", "--resume", &journal];
            child = cluster.cli_command(&resume).spawn().context("run vmferry")?;
        }
    }
    let ended =
        tokio::time::timeout(MOVE_BOUND, child.wait()).await.context("the run to end")??;
    if ended.code() != Some(0) {
        bail!("the run ended with {ended}");
    }
    vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    if std::path::Path::new(&journal).exists() {
        bail!("a run that is done leaves its journal behind");
    }
    cluster.planner.daemon.start()?;
    cluster.wait_ready().await?;
    cluster.expect_running(&vm, "b").await?;
    let note = pause_note(&vm);
    move_vm(cluster, &vm, "a").await?;
    Ok(note)
}
