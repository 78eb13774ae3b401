//! A driver that is none: it claims a VM that runs, and commands what cannot be.

use anyhow::{Context as _, Result, bail};
use prost::Message as _;
use tonic::Code;
use uuid::Uuid;
use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{
    ArmReceiver, CancelTransfer, ClaimRequest, ContinueDestination, DestroyReceiver, ErrorDetail,
    ExecuteRequest, Fence, ForgetVm, GoneProof, KillSource, Listener, OrderSwitchover, ProofKind,
    ReleaseSource, ResumeSource, SourceDescription, StartTransfer, StartVm, StopHow, StopVm,
    TransferPolicy, VmObservation,
};

use crate::cases::{MOVE_BOUND, Note, move_vm};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;

/// Everything that is refused or comes to nothing. Then the planner moves the VM as ever.
pub(super) async fn commands(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("coveted"), "a").await?;
    let known = cluster.clients.wait_observation("a", &vm, MOVE_BOUND, |_| true).await?;
    let claim = ClaimRequest {
        vm_id: vm.uuid.to_string(),
        migration_id: Uuid::new_v4().to_string(),
        generation: known.generation,
        // As far as an agent lets anybody leap, so that the next one is still to be had.
        claim: known.claim + (1 << 32),
        hold_limit_ms: u64::MAX,
    };
    let mut agent = cluster.clients.agent("a")?;
    let taken = agent.claim(claim.clone()).await.context("claim the VM")?.into_inner();
    let mut refusals = Vec::new();
    for (step, action) in (1..).zip(impossible(&taken)) {
        let what = format!("{action:?}");
        let fence = Fence {
            vm_id: claim.vm_id.clone(),
            migration_id: claim.migration_id.clone(),
            generation: claim.generation,
            claim: claim.claim,
            step,
        };
        let request = ExecuteRequest { fence: Some(fence), action: Some(action) };
        let Err(status) = agent.execute(request).await else { continue };
        let detail = ErrorDetail::decode(status.details()).context("read the refusal's details")?;
        if matches!(status.code(), Code::Internal | Code::Unknown) || status.message().is_empty() {
            bail!("{what} was refused as {status}");
        }
        refusals.push(detail.code);
    }
    expect_untouched(cluster, &vm).await?;
    // The planner hears of the claim, and the next one is above it.
    cluster.clients.wait_vm(&vm, MOVE_BOUND, |seen| seen.claim >= claim.claim).await?;
    move_vm(cluster, &vm, "b").await?;
    refusals.sort_unstable();
    refusals.dedup();
    Ok(format!("refused as {}", refusals.join(", ")))
}

async fn expect_untouched(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<()> {
    cluster.expect_running(vm, "a").await?;
    if vm.serial.connections() != 1 {
        bail!("another QEMU process of the VM was started");
    }
    Ok(())
}

/// What nobody can do with a guest that runs here: each is refused, or is a transfer to nowhere.
fn impossible(vm: &VmObservation) -> Vec<Action> {
    let cause = || "because".to_owned();
    let policies = [
        TransferPolicy {
            max_bandwidth: u64::MAX,
            downtime_limit_ms: u64::MAX,
            auto_converge: true,
            timeout_ms: u64::MAX,
            stall_ms: u64::MAX,
            switchover_ms: u64::MAX,
            postcopy: i32::MAX,
            may_throttle: false,
        },
        TransferPolicy {
            max_bandwidth: 1,
            downtime_limit_ms: 1,
            timeout_ms: 1,
            stall_ms: 1,
            ..TransferPolicy::default()
        },
    ];
    let listeners = [
        ("", 49152),
        ("\0", 49152),
        ("unix:/tmp/x", 1),
        ("exec:reboot", 1),
        ("10.77.0.2", 0),
        ("10.77.0.2", 65_536),
        ("10.77.0.2", u32::MAX),
        ("10.77.0.2,server", 1),
        ("localhost", 1),
        // Where nobody listens.
        ("127.0.0.1", 1),
        ("::1", 1),
    ];
    let transfers = listeners.iter().flat_map(|(address, port)| {
        let listener =
            Listener { address: (*address).to_owned(), port: *port, ..Listener::default() };
        policies.iter().map(move |policy| {
            let (listener, policy) = (Some(listener.clone()), Some(*policy));
            Action::StartTransfer(StartTransfer { listener, policy, ..StartTransfer::default() })
        })
    });
    let forged = GoneProof {
        kind: ProofKind::NeverStarted.into(),
        host_id: vm.host_id.clone(),
        ..GoneProof::default()
    };
    let proofs = [None, Some(GoneProof::default()), Some(forged)];
    let resumes = proofs.map(|receiver_gone| Action::ResumeSource(ResumeSource { receiver_gone }));
    let definition = format!("uuid = \"{}\"\n[[disk]]\npath = \"../x\"", vm.vm_id);
    let source =
        SourceDescription { definition: definition.clone(), ..SourceDescription::default() };
    let stops = [StopHow::Unspecified as i32, 7, i32::MIN]
        .map(|how| Action::StopVm(StopVm { how, deadline_ms: u64::MAX }));
    let others = [
        Action::StartVm(StartVm { definition, resolved_machine: "\0".to_owned() }),
        Action::ArmReceiver(ArmReceiver { source: None, policy: None }),
        Action::ArmReceiver(ArmReceiver { source: Some(source), policy: None }),
        Action::ContinueDestination(ContinueDestination {}),
        Action::DestroyReceiver(DestroyReceiver { cause: cause(), source_gone: None }),
        Action::ReleaseSource(ReleaseSource::default()),
        Action::KillSource(KillSource { cause: cause() }),
        Action::ForgetVm(ForgetVm {}),
        Action::OrderSwitchover(OrderSwitchover {}),
        Action::StartTransfer(StartTransfer::default()),
    ];
    let back = [Action::CancelTransfer(CancelTransfer { cause: "x".repeat(100_000) })];
    others.into_iter().chain(stops).chain(resumes).chain(transfers).chain(back).collect()
}
