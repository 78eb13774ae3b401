//! Moves that are made step by step: each waits at its gates for the operator.

use std::time::Duration;

use anyhow::{Result, bail};
use vmferry_proto::v1::{ListMigrationsRequest, MigrateVmRequest, Migration, OpenGateRequest};

use super::surface::cli;
use super::{Case, MOVE_BOUND, Note, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::wait::let_pass;

/// The gates, in their order.
const GATES: [&str; 3] = ["start", "switchover", "commit"];

/// Long enough to tell that a guest stands still: it prints a line every 10 ms.
const SILENCE: Duration = Duration::from_millis(300);

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("move-step-by-step-waits-at-each-gate-there-and-back", Tier::Subset, |cluster| {
            Box::pin(there_and_back(cluster))
        }),
        Case::new("gate-that-nobody-opens-gives-the-guest-back", Tier::Subset, |cluster| {
            Box::pin(deadline(cluster))
        }),
        Case::new("planner-killed-at-each-gate-waits-there-again", Tier::All, |cluster| {
            Box::pin(killed(cluster))
        }),
        Case::new("receiver-taken-back-at-the-commit-gate-keeps-the-guest", Tier::All, |cluster| {
            Box::pin(taken_back(cluster))
        }),
    ]
}

fn gated(vm: &GuestVm, host: &str, gates: &[&str]) -> MigrateVmRequest {
    let gates = gates.iter().map(|gate| (*gate).to_owned()).collect();
    MigrateVmRequest { gates, ..move_to(vm, host) }
}

async fn at_gate(cluster: &Cluster<'_>, id: &str, gate: &str) -> Result<Migration> {
    let there = |seen: &Migration| seen.waits_at_gate == gate;
    let what = format!("to wait at the {gate} gate");
    cluster.clients.wait_migration(id, &what, MOVE_BOUND, there).await
}

async fn open(cluster: &Cluster<'_>, id: &str, gate: &str) -> Result<Migration> {
    let asked =
        OpenGateRequest { id: id.to_owned(), gate: gate.to_owned(), ..OpenGateRequest::default() };
    Ok(cluster.clients.planner().open_gate(asked).await?.into_inner())
}

async fn there_and_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("stepped"), "a").await?;
    cli(cluster, "vm migrate stepped --to b --step-by-step --wait", 0).await?;
    let open_ones = ListMigrationsRequest { open: true, ..ListMigrationsRequest::default() };
    let listed = cluster.clients.planner().list_migrations(open_ones).await?;
    let Some(begun) = listed.into_inner().migrations.pop() else {
        bail!("the migration is not listed as open");
    };
    at_gate(cluster, &begun.id, "start").await?;
    // Nothing is sent, and the guest does not notice.
    vm.serial.wait_ticks(20, MOVE_BOUND).await?;
    let network = cli(cluster, "vm network stepped", 0).await?;
    cli(cluster, &format!("migration go {} --wait", begun.id), 0).await?;
    vm.serial.wait_still(SILENCE, MOVE_BOUND).await?;
    let held = at_gate(cluster, &begun.id, "switchover").await?;
    if held.guest_still_ms == 0 {
        bail!("a guest that stands still is shown as if it ran");
    }
    cli(cluster, &format!("migration go {} --gate switchover --wait", begun.id), 0).await?;
    at_gate(cluster, &begun.id, "commit").await?;
    cli(cluster, &format!("migration go {} --all --wait", begun.id), 0).await?;
    settle(cluster, &vm, &begun.id, End::Done).await?;
    vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    let back = request(cluster, &gated(&vm, "a", &["switchover"])).await?;
    at_gate(cluster, &back.id, "switchover").await?;
    open(cluster, &back.id, "switchover").await?;
    settle(cluster, &vm, &back.id, End::Done).await?;
    Ok(format!("{}; {}", pause_note(&vm), network.lines().next().unwrap_or_default()))
}

async fn deadline(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("waited"), "a").await?;
    let mut causes = Vec::new();
    for gate in GATES {
        let asked = MigrateVmRequest { gate_deadline_ms: 1_000, ..gated(&vm, "b", &[gate]) };
        let migration = request(cluster, &asked).await?;
        let ended = settle(cluster, &vm, &migration.id, End::Aborted).await?;
        if !ended.error.contains(&format!("nobody opened the {gate} gate")) {
            bail!("given up at the {gate} gate, the record says {:?}", ended.error);
        }
        vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
        causes.push(ended.error);
    }
    super::move_vm(cluster, &vm, "b").await?;
    Ok(causes.join("; "))
}

async fn killed(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("stepped"), "a").await?;
    // Longer than a planner takes to come back: until the order the source's agent lets its guest go
    // on by itself.
    let asked = MigrateVmRequest { hold_limit_ms: 30_000, ..gated(&vm, "b", &GATES) };
    let migration = request(cluster, &asked).await?;
    for gate in GATES {
        at_gate(cluster, &migration.id, gate).await?;
        cluster.planner.daemon.kill().await?;
        let_pass(Duration::from_millis(500)).await;
        cluster.planner.daemon.start()?;
        cluster.wait_ready().await?;
        at_gate(cluster, &migration.id, gate).await?;
        open(cluster, &migration.id, gate).await?;
    }
    settle(cluster, &vm, &migration.id, End::Done).await?;
    vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    Ok(pause_note(&vm))
}

async fn taken_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("wanted"), "a").await?;
    let migration = request(cluster, &gated(&vm, "b", &["commit"])).await?;
    at_gate(cluster, &migration.id, "commit").await?;
    vm.serial.wait_still(SILENCE, MOVE_BOUND).await?;
    cluster.clients.cancel(&migration.id).await?;
    super::cancel::expect_cancelled(cluster, &vm, &migration.id).await?;
    vm.serial.wait_ticks(vm.spec.ticks_per_check(), MOVE_BOUND).await?;
    super::move_vm(cluster, &vm, "b").await?;
    Ok(Note::new())
}
