//! Calls to the planner that cannot be carried out.

use vmferry_proto::v1::{
    CancelMigrationRequest, Capacity, GetHostRequest, GetMigrationRequest, GetVmRequest, GoneProof,
    HostReport, HugePages, Knowledge, ListHostsRequest, ListMigrationsRequest, ListVmsRequest,
    MigrateVmRequest, Orphan, SetMigrationLimitsRequest, StartVmRequest, StopVmRequest, VmReport,
};

use super::dice::Dice;
use super::grpc::Call;
use super::{Prey, definition, noise};

const SERVICE: &str = "/vmferry.v1.Planner";

const METHODS: [&str; 15] = [
    "Report",
    "ListHosts",
    "GetHost",
    "ListVms",
    "GetVm",
    "StartVm",
    "StopVm",
    "MigrateVm",
    "ListMigrations",
    "GetMigration",
    "CancelMigration",
    "SetMigrationLimits",
    "WatchMigration",
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
    match dice.below(8) {
        0 => Call::broken(&path(dice.pick(&METHODS)), noise::protobuf(dice, 8)),
        1 if dice.below(8) == 0 => Call::broken(&path(dice.pick(&METHODS)), noise::nested(2000)),
        1 => looks(dice),
        2 | 3 => Call::new(&path("Report"), &report(prey, dice)),
        4 => Call::new(&path("StartVm"), &start(prey, dice)),
        5 => Call::new(&path("StopVm"), &stop(prey, dice)),
        _ => Call::new(&path("MigrateVm"), &migrate(prey, dice)),
    }
}

fn looks(dice: &mut Dice) -> Call {
    let text = noise::text(dice);
    match dice.below(9) {
        7 => Call::new(
            &path("SetMigrationLimits"),
            &SetMigrationLimitsRequest {
                id: text,
                bandwidth_mbps: Some(noise::number(dice)),
                downtime_limit_ms: (dice.below(2) == 0).then(|| noise::number(dice)),
            },
        ),
        0 => Call::new(&path("GetHost"), &GetHostRequest { host: text }),
        1 => Call::new(&path("ListVms"), &ListVmsRequest { host: text }),
        2 => Call::new(&path("GetVm"), &GetVmRequest { vm: text }),
        3 => Call::new(&path("GetMigration"), &GetMigrationRequest { id: text }),
        4 => Call::new(&path("WatchMigration"), &GetMigrationRequest { id: text }),
        5 => Call::new(&path("CancelMigration"), &CancelMigrationRequest { id: text }),
        6 => Call::new(&path("ListHosts"), &ListHostsRequest {}),
        _ => Call::new(
            &path("ListMigrations"),
            &ListMigrationsRequest { vm: text, limit: noise::small(dice), ..Default::default() },
        ),
    }
}

/// A report of a host that is none. It never speaks in the name of one that is, and what it says
/// of a VM that runs is older than what is known, or newer than anybody counts.
fn report(prey: &Prey, dice: &mut Dice) -> HostReport {
    let host_id = match dice.below(3) {
        0 => noise::text(dice),
        _ => format!("evil-{}", dice.below(4)),
    };
    let count = match dice.below(40) {
        0 => 10_001,
        1 => 500,
        _ => dice.below(4),
    };
    let long = || "x".repeat(10 << 20);
    HostReport {
        name: if dice.below(60) == 0 { long() } else { noise::text(dice) },
        host_id,
        boot_id: noise::text(dice),
        agent_instance: noise::text(dice),
        agent_version: noise::text(dice),
        agent_address: noise::text(dice),
        sequence: noise::number(dice),
        sent_at_ms: noise::number(dice),
        learning: dice.below(4) == 0,
        journal_unreadable: dice.below(4) == 0,
        capacity: (dice.below(3) > 0).then(|| capacity(dice)),
        capabilities: None,
        vms: (0..count).map(|_| vm_report(prey, dice)).collect(),
        strangers: vec![noise::text(dice)],
        orphans: vec![orphan(dice)],
    }
}

fn capacity(dice: &mut Dice) -> Capacity {
    Capacity {
        total_memory_bytes: noise::number(dice),
        available_memory_bytes: noise::number(dice),
        cpu_total_milli: noise::number(dice),
        hugepages: vec![HugePages {
            page_bytes: noise::number(dice),
            total: noise::number(dice),
            free: noise::number(dice),
            reserved: noise::number(dice),
        }],
        memory_pressure: Some(noise::small(dice)),
        cpu_pressure: Some(noise::small(dice)),
        unreadable: vec![noise::text(dice); usize::from(dice.below(2) == 0)],
    }
}

fn vm_report(prey: &Prey, dice: &mut Dice) -> VmReport {
    let (vm_id, roles) = match dice.below(3) {
        0 => (prey.vm.clone(), ["running", "held", "stopped", "receiver"]),
        // Nobody's VM that is said to run would have to be found by whoever looks after it.
        1 => (dice.uuid().to_string(), ["receiver", "absent", "no such role", ""]),
        _ => (noise::text(dice), ["running", "stopped", "receiver", "\0"]),
    };
    let known = dice.pick(&[Knowledge::Known, Knowledge::Unresponsive, Knowledge::Unreadable]);
    VmReport {
        role: if uuid::Uuid::try_parse(&vm_id).is_ok() && vm_id != prey.vm {
            "receiver".to_owned()
        } else {
            dice.pick(&roles).to_owned()
        },
        vm_id,
        vm_name: noise::text(dice),
        generation: noise::leap(dice),
        claim: noise::leap(dice),
        knowledge: known.into(),
        configured_memory_bytes: noise::number(dice),
        observed_memory_bytes: noise::number(dice),
        cpu_milli: noise::number(dice),
        run_state: noise::text(dice),
        migration_id: noise::text(dice),
        definition: noise::text(dice),
        resolved_machine: noise::text(dice),
        gone: (dice.below(2) == 0).then(|| GoneProof {
            kind: noise::small(dice).cast_signed(),
            host_id: noise::text(dice),
            stderr_tail: noise::text(dice),
            ..GoneProof::default()
        }),
        guest_end: noise::text(dice),
        handed: dice.below(2) == 0,
        gave_up: dice.below(2) == 0,
        ever_continued: dice.below(2) == 0,
        overhead_memory_bytes: noise::number(dice),
        overhead_measured_bytes: noise::number(dice),
    }
}

fn orphan(dice: &mut Dice) -> Orphan {
    Orphan {
        vm_id: noise::text(dice),
        vm_name: noise::text(dice),
        kind: noise::text(dice),
        detail: noise::text(dice),
        generation: noise::number(dice),
    }
}

fn start(prey: &Prey, dice: &mut Dice) -> StartVmRequest {
    let definition = definition::unusable(dice);
    match dice.below(4) {
        // It runs already, and not there.
        0 => StartVmRequest {
            vm: prey.vm.clone(),
            host: noise::text(dice),
            request_id: "no request id".to_owned(),
            wait_ms: noise::number(dice),
            ..StartVmRequest::default()
        },
        1 => StartVmRequest {
            vm: noise::text(dice),
            host: noise::text(dice),
            request_id: noise::text(dice),
            wait_ms: 100,
            ..StartVmRequest::default()
        },
        _ => StartVmRequest {
            vm: noise::text(dice),
            definition,
            host: prey.host.clone(),
            wait_ms: 1000,
            ..StartVmRequest::default()
        },
    }
}

fn stop(prey: &Prey, dice: &mut Dice) -> StopVmRequest {
    let (vm, how) = if dice.below(2) == 0 {
        (prey.vm.clone(), "by magic".to_owned())
    } else {
        (noise::text(dice), noise::text(dice))
    };
    StopVmRequest { vm, how, deadline_ms: noise::number(dice), wait_ms: 100 }
}

/// A migration that comes to nothing: to where the VM is, or of nothing, or in no way that is known.
fn migrate(prey: &Prey, dice: &mut Dice) -> MigrateVmRequest {
    let mut request = MigrateVmRequest {
        vm_name: prey.name.clone(),
        target_host: prey.host.clone(),
        bandwidth_mbps: noise::number(dice),
        downtime_limit_ms: noise::number(dice),
        timeout_ms: noise::number(dice),
        hold_limit_ms: noise::number(dice),
        queue_deadline_ms: noise::number(dice),
        compress: dice.below(4) == 0,
        ..MigrateVmRequest::default()
    };
    match dice.below(5) {
        0 => request.vm_name = noise::text(dice),
        1 => request.migration_type = "by magic".to_owned(),
        2 => request.method = noise::text(dice),
        3 => request.request_id = "no request id".to_owned(),
        _ => {}
    }
    request
}
