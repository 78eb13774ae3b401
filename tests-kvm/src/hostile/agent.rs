//! Calls to an agent that cannot be carried out.

use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{
    ArmReceiver, CancelTransfer, CheckDestinationRequest, ClaimRequest, ContinueDestination,
    DescribeSourceRequest, DestroyReceiver, Disk, ExecuteRequest, Fence, ForgetVm,
    GetReportRequest, GoneProof, KillSource, Listener, Nic, ObserveRequest, OrderSwitchover,
    RecoverReceiver, ReleaseSource, ResumeSource, ResumeTransfer, SetLimits, SourceDescription,
    StartPostcopy, StartTransfer, StartVm, StopVm, TransferLimits, TransferPolicy,
};

use super::dice::Dice;
use super::grpc::Call;
use super::{Prey, definition, noise};

const SERVICE: &str = "/vmferry.v1.Agent";

const METHODS: [&str; 9] = [
    "Claim",
    "Execute",
    "Observe",
    "Watch",
    "DescribeSource",
    "CheckDestination",
    "GetReport",
    "NoSuchMethod",
    "",
];

fn path(method: &str) -> String {
    format!("{SERVICE}/{method}")
}

/// Makes a call, broken now and then.
pub(super) fn call(prey: &Prey, dice: &mut Dice) -> Call {
    if dice.below(3) > 0 {
        return whole(prey, dice);
    }
    let prey = prey.without_vm(dice);
    whole(&prey, dice).break_it(dice)
}

fn whole(prey: &Prey, dice: &mut Dice) -> Call {
    match dice.below(10) {
        0 => Call::broken(&path(dice.pick(&METHODS)), noise::protobuf(dice, 8)),
        1 if dice.below(8) == 0 => Call::broken(&path(dice.pick(&METHODS)), noise::nested(2000)),
        1 => looks(prey, dice),
        2 | 3 => Call::new(&path("Claim"), &claim(prey, dice)),
        4 => Call::new(
            &path("CheckDestination"),
            &CheckDestinationRequest { source: (dice.below(5) > 0).then(|| source(prey, dice)) },
        ),
        _ => Call::new(&path("Execute"), &execute(prey, dice)),
    }
}

fn looks(prey: &Prey, dice: &mut Dice) -> Call {
    let vm_id = match dice.below(30) {
        0 => "x".repeat(10 << 20),
        1..11 => prey.vm.clone(),
        _ => noise::text(dice),
    };
    match dice.below(5) {
        0 => Call::new(&path("DescribeSource"), &DescribeSourceRequest { vm_id }),
        1 => Call::new(&path("GetReport"), &GetReportRequest {}),
        2 => Call::new(&path("Observe"), &ObserveRequest { vm_id, claim: noise::leap(dice) }),
        // Opened, looked at once, and dropped.
        _ => Call::new(&path("Watch"), &ObserveRequest { vm_id, claim: noise::leap(dice) }),
    }
}

/// A claim that is not taken: of no VM, or with counters that the VM's fence does not take. Now
/// and then one of a VM that nobody else ever heard of, which is.
fn claim(prey: &Prey, dice: &mut Dice) -> ClaimRequest {
    if dice.below(8) == 0 {
        return ClaimRequest {
            vm_id: dice.uuid().to_string(),
            migration_id: dice.uuid().to_string(),
            generation: 1,
            claim: 1,
            hold_limit_ms: noise::number(dice),
        };
    }
    let known = dice.below(2) == 0;
    ClaimRequest {
        vm_id: if known { prey.vm.clone() } else { noise::text(dice) },
        migration_id: if dice.below(4) == 0 { noise::text(dice) } else { dice.uuid().to_string() },
        generation: noise::leap(dice),
        claim: noise::leap(dice),
        hold_limit_ms: noise::number(dice),
    }
}

fn execute(prey: &Prey, dice: &mut Dice) -> ExecuteRequest {
    let fence = match dice.below(12) {
        0 => None,
        // Claimed by nobody else, and each newer than the one before.
        1..6 => Some(Fence {
            vm_id: prey.nobody.clone(),
            migration_id: dice.uuid().to_string(),
            generation: 1,
            claim: 1 + dice.turn(),
            step: 1,
        }),
        6..8 => Some(Fence {
            vm_id: prey.vm.clone(),
            migration_id: dice.uuid().to_string(),
            generation: noise::leap(dice),
            claim: noise::leap(dice),
            step: noise::number(dice),
        }),
        8 => Some(Fence {
            vm_id: noise::text(dice),
            migration_id: noise::text(dice),
            generation: noise::number(dice),
            claim: noise::number(dice),
            step: noise::number(dice),
        }),
        // Of a VM that nobody ever spoke of, and of nothing wrong otherwise.
        _ => Some(Fence {
            vm_id: dice.uuid().to_string(),
            migration_id: dice.uuid().to_string(),
            generation: 1,
            claim: 1,
            step: 1,
        }),
    };
    let vm_id = fence.as_ref().map_or_else(String::new, |fence| fence.vm_id.clone());
    ExecuteRequest { fence, action: action(prey, &vm_id, dice) }
}

fn action(prey: &Prey, vm_id: &str, dice: &mut Dice) -> Option<Action> {
    let cause = noise::text(dice);
    Some(match dice.below(17) {
        0 => return None,
        1 => Action::StartVm(StartVm {
            definition: definition_of(vm_id, dice),
            resolved_machine: noise::text(dice),
        }),
        2 => Action::StopVm(StopVm {
            how: noise::small(dice).cast_signed(),
            deadline_ms: noise::number(dice),
        }),
        3 => Action::ArmReceiver(ArmReceiver {
            source: (dice.below(4) > 0).then(|| source(prey, dice)),
            policy: Some(policy(dice)),
        }),
        4 => Action::StartTransfer(StartTransfer {
            listener: (dice.below(4) > 0).then(|| Listener {
                address: noise::text(dice),
                port: noise::small(dice),
                ..Listener::default()
            }),
            policy: Some(policy(dice)),
            receiver_host: noise::text(dice),
        }),
        5 => Action::OrderSwitchover(OrderSwitchover {}),
        6 => Action::CancelTransfer(CancelTransfer { cause }),
        7 => Action::ResumeSource(ResumeSource {
            receiver_gone: (dice.below(2) == 0).then(|| GoneProof {
                kind: noise::small(dice).cast_signed(),
                host_id: noise::text(dice),
                ..GoneProof::default()
            }),
        }),
        8 => Action::ContinueDestination(ContinueDestination {}),
        9 => Action::DestroyReceiver(DestroyReceiver { cause, source_gone: None }),
        10 => Action::ReleaseSource(ReleaseSource::default()),
        11 => Action::KillSource(KillSource { cause }),
        12 => Action::StartPostcopy(StartPostcopy {}),
        13 => Action::RecoverReceiver(RecoverReceiver {}),
        14 => Action::ResumeTransfer(ResumeTransfer {
            listener: (dice.below(4) > 0).then(|| Listener {
                address: noise::text(dice),
                port: noise::small(dice),
                doorbell: noise::small(dice),
                ..Listener::default()
            }),
        }),
        15 => Action::SetLimits(SetLimits {
            limits: (dice.below(4) > 0).then(|| TransferLimits {
                max_bandwidth: noise::number(dice),
                downtime_limit_ms: noise::number(dice),
                throttle: dice.below(2) == 0,
            }),
        }),
        _ => Action::ForgetVm(ForgetVm {}),
    })
}

fn definition_of(vm_id: &str, dice: &mut Dice) -> String {
    match dice.below(12) {
        0 => definition::of_many_disks(vm_id, 10_000),
        1..8 => definition::unusable_at_agent(vm_id, dice),
        _ => definition::unusable(dice),
    }
}

fn policy(dice: &mut Dice) -> TransferPolicy {
    TransferPolicy {
        max_bandwidth: noise::number(dice),
        downtime_limit_ms: noise::number(dice),
        auto_converge: dice.below(2) == 0,
        timeout_ms: noise::number(dice),
        stall_ms: noise::number(dice),
        switchover_ms: noise::number(dice),
        postcopy: noise::small(dice).cast_signed(),
        may_throttle: dice.below(2) == 0,
    }
}

fn source(prey: &Prey, dice: &mut Dice) -> SourceDescription {
    let vm_id = if dice.below(2) == 0 { prey.vm.clone() } else { dice.uuid().to_string() };
    SourceDescription {
        definition: definition_of(&vm_id, dice),
        from_disks: dice.below(4) == 0,
        vm_id,
        vm_name: noise::text(dice),
        resolved_machine: noise::text(dice),
        accelerator: noise::text(dice),
        cpu_model: noise::text(dice),
        qemu_version: noise::text(dice),
        vcpus: noise::small(dice),
        memory_bytes: noise::number(dice),
        disks: vec![Disk {
            id: noise::text(dice),
            path: noise::text(dice),
            format: noise::text(dice),
            shared: true,
            virtual_bytes: noise::number(dice),
        }],
        nics: vec![Nic {
            id: noise::text(dice),
            mac: noise::text(dice),
            bridge: noise::text(dice),
        }],
        devices: (0..dice.below(20)).map(|_| noise::text(dice)).collect(),
        capabilities: vec![noise::text(dice)],
        blockers: Vec::new(),
        run_state: noise::text(dice),
        cpu_features: vec![noise::text(dice)],
        tls_host: String::new(),
    }
}
