//! Commands that come late, twice or from a driver that was replaced: refused at the agents.

use anyhow::{Context as _, Result, bail};
use tonic::{Code, Status};
use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{
    ClaimRequest, ContinueDestination, ExecuteRequest, Fence, GoneProof, KillSource,
    OrderSwitchover, ProofKind, ReleaseSource, ResumeSource, StartVm, VmObservation,
};

use super::{Case, MOVE_BOUND, Note, Tier, move_vm};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("late-commands-are-refused", Tier::Subset, |cluster| Box::pin(late(cluster)))]
}

async fn late(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("settled"), "a").await?;
    let migration = move_vm(cluster, &vm, "b").await?;
    let seen =
        |host: &'static str| cluster.clients.wait_observation(host, &vm, MOVE_BOUND, |_| true);
    let (left, arrived) = (seen("a").await?, seen("b").await?);
    if arrived.generation != migration.generation || left.generation > arrived.generation {
        bail!("generations: {} left, {} arrived", left.generation, arrived.generation);
    }
    let at = |observation: &VmObservation| Fence {
        vm_id: vm.uuid.to_string(),
        migration_id: migration.id.clone(),
        generation: observation.generation,
        claim: observation.claim,
        step: observation.step,
    };
    let older_claim =
        |fence: Fence| Fence { claim: fence.claim - 1, step: fence.step + 100, ..fence };
    let older_generation =
        |fence: Fence| Fence { generation: fence.generation - 1, step: fence.step + 1, ..fence };
    let first_step = |fence: Fence| Fence { step: 1, ..fence };
    let nothing_there = GoneProof {
        kind: ProofKind::NeverStarted.into(),
        host_id: "b".into(),
        ..GoneProof::default()
    };
    let resume =
        || Action::ResumeSource(ResumeSource { receiver_gone: Some(nothing_there.clone()) });
    let start = || Action::StartVm(StartVm::default());
    let attempts: [(&str, Fence, Action); 8] = [
        ("a", older_claim(at(&left)), resume()),
        ("a", first_step(at(&left)), resume()),
        ("a", older_claim(at(&left)), start()),
        ("a", older_claim(at(&left)), Action::OrderSwitchover(OrderSwitchover {})),
        ("b", older_claim(at(&arrived)), Action::ContinueDestination(ContinueDestination {})),
        ("b", older_generation(at(&arrived)), Action::ReleaseSource(ReleaseSource::default())),
        ("b", older_claim(at(&arrived)), Action::KillSource(KillSource { cause: "late".into() })),
        ("b", first_step(at(&arrived)), Action::ReleaseSource(ReleaseSource::default())),
    ];
    for (host, fence, action) in attempts {
        expect_refused(cluster, host, fence, action).await?;
    }
    for (host, observation) in [("a", &left), ("b", &arrived)] {
        expect_claim_refused(cluster, &vm, host, observation).await?;
    }
    cluster.expect_running(&vm, "b").await?;
    if vm.serial.connections() != 2 {
        bail!("a late command started a QEMU process");
    }
    Ok(Note::new())
}

async fn expect_refused(
    cluster: &Cluster<'_>,
    host: &str,
    fence: Fence,
    action: Action,
) -> Result<()> {
    let what = format!("{action:?} under {fence:?} at {host}");
    let request = ExecuteRequest { fence: Some(fence), action: Some(action) };
    let answer = cluster.clients.agent(host)?.execute(request).await;
    expect_aborted(&answer.err().with_context(|| format!("{what} was carried out"))?, &what)
}

async fn expect_claim_refused(
    cluster: &Cluster<'_>,
    vm: &GuestVm,
    host: &str,
    observation: &VmObservation,
) -> Result<()> {
    let request = ClaimRequest {
        vm_id: vm.uuid.to_string(),
        migration_id: uuid::Uuid::new_v4().to_string(),
        generation: observation.generation,
        claim: observation.claim,
        hold_limit_ms: 0,
    };
    let what = format!("claim {} of another admission at {host}", observation.claim);
    let answer = cluster.clients.agent(host)?.claim(request).await;
    expect_aborted(&answer.err().with_context(|| format!("{what} was taken"))?, &what)
}

fn expect_aborted(status: &Status, what: &str) -> Result<()> {
    if status.code() != Code::Aborted {
        bail!("{what} was refused as {:?}: {status}", status.code());
    }
    Ok(())
}
