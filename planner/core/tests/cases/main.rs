//! Plans and admissions distilled from public bug reports, as files.
//!
//! Each file holds an input, what a planner has to answer, and the arithmetic by hand.

mod input;
mod told;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use vmferry_planner_core::fleet::{
    Availability, Capabilities, Cordon, Demand, Fleet, Host, HostPolicy, Lifecycle, Policy, Report,
    VmUse,
};
use vmferry_planner_core::maintenance::{
    Crossing, Live, Order, PinsToSource, Plan, Strategy, Workload, plan,
};
use vmferry_planner_core::migration::{Event, Migration, NotConverging, Opening, Phase};
use vmferry_planner_core::placement::{Needs, Refused, Request, place};
use vmferry_types::{Bytes, HostId, MilliCpu, Millis, Percent, Role, Timestamp, VmId};

use input::{
    Admission, Case, Expected, ExpectedAssignment, ExpectedBlocker, HostInput, Input, Status,
    StrategyInput, WorkloadInput,
};

const NOW: Timestamp = Timestamp(10_000_000);

/// Gives ids to names, in the order of their bytes.
struct Names(Vec<String>);

impl Names {
    fn of(hosts: &[HostInput], workloads: &[WorkloadInput]) -> Self {
        let names: BTreeSet<String> = hosts
            .iter()
            .flat_map(|host| {
                let vms = host.vms.iter().map(|vm| vm.id.clone());
                vms.chain(host.inbound_reservations.iter().map(|held| held.vm_id.clone()))
            })
            .chain(workloads.iter().map(|workload| workload.id.clone()))
            .collect();
        Self(names.into_iter().collect())
    }

    fn id(&self, name: &str) -> VmId {
        let at = self.0.iter().position(|known| known == name).expect("the name is collected");
        VmId::from_u128(at as u128)
    }

    fn name(&self, id: VmId) -> String {
        self.0[usize::try_from(id.as_u128()).expect("ids are positions")].clone()
    }
}

fn host_id(text: &str) -> HostId {
    text.parse().expect("cases name hosts well")
}

fn mib(value: u64) -> Bytes {
    Bytes(value << 20)
}

fn percent(value: u8) -> Percent {
    Percent::new(value).expect("cases hold percentages")
}

fn host(input: &HostInput, names: &Names) -> Host {
    let lifecycle = match input.status {
        Status::Connected | Status::Disconnected => Lifecycle::Active,
        Status::Maintenance => Lifecycle::Maintenance,
        Status::Draining => Lifecycle::Draining,
        Status::Retired => Lifecycle::Retired,
    };
    let availability = match input.status {
        Status::Disconnected => Availability::Disconnected,
        Status::Connected | Status::Maintenance | Status::Draining | Status::Retired => {
            Availability::Connected
        }
    };
    let cordon = Cordon { owner: "operator".into(), reason: "maintenance".into() };
    let vms = input.vms.iter().map(|vm| {
        let figures = VmUse {
            role: Role::Running,
            configured: mib(vm.configured_memory_mib),
            observed: mib(vm.observed_memory_mib),
            cpu: MilliCpu(vm.cpu_milli),
        };
        (names.id(&vm.id), figures)
    });
    let reservations = input.inbound_reservations.iter().map(|held| {
        let demand = Demand { memory: mib(held.memory_mib), cpu: MilliCpu(held.cpu_milli) };
        (names.id(&held.vm_id), demand)
    });
    Host {
        id: host_id(&input.id),
        policy: HostPolicy {
            cluster: input.cluster.clone(),
            labels: input.labels.clone(),
            cordons: if input.cordoned { BTreeSet::from([cordon]) } else { BTreeSet::new() },
            lifecycle,
        },
        availability,
        report: Some(Arc::new(Report {
            at: Timestamp(NOW.value() - input.report_age_s * 1_000),
            unreadable: (!input.readable).then(|| "the journal is new".to_owned()),
            total_memory: mib(input.total_memory_mib),
            available_memory: mib(input.available_memory_mib),
            total_cpu: MilliCpu(input.total_cpu_milli),
            vms: Some(vms.collect()),
            capabilities: Arc::new(Capabilities::default()),
        })),
        inbound: u32::try_from(input.inbound_reservations.len()).expect("a few"),
        outbound: 0,
        reservations: reservations.collect(),
    }
}

fn fleet(hosts: &[HostInput], names: &Names, policy: Policy) -> Fleet {
    let hosts = hosts.iter().map(|input| (host_id(&input.id), host(input, names))).collect();
    Fleet { now: NOW, policy, hosts }
}

fn workload(input: &WorkloadInput, names: &Names) -> Workload {
    let reason = input.not_live_migratable_reason.clone().unwrap_or_default();
    Workload {
        vm: names.id(&input.id),
        host: input.host.as_deref().map(host_id),
        demand: Demand::of(
            mib(input.configured_memory_mib),
            mib(input.observed_memory_mib),
            MilliCpu(input.cpu_milli),
        ),
        live: if input.live_migratable { Live::Able } else { Live::Unable { reason } },
        needs: Needs {
            pin: input.pinned_host.as_deref().map(host_id),
            required_labels: input.required_labels.clone(),
            ..Needs::default()
        },
    }
}

fn order(input: &Input) -> Order {
    Order {
        source: host_id(&input.source_host),
        strategy: match input.policy.strategy {
            StrategyInput::LiveOnly => Strategy::LiveOnly,
            StrategyInput::PreferLive => Strategy::PreferLive,
            StrategyInput::ColdOnly => Strategy::ColdOnly,
        },
        crossing: if input.policy.allow_cross_cluster {
            Crossing::Allowed
        } else {
            Crossing::Refused
        },
        pins: if input.policy.allow_pinned { PinsToSource::MayLeave } else { PinsToSource::Hold },
    }
}

fn planned(input: &Input, names: &Names) -> Plan {
    let policy = Policy {
        reserve_memory: percent(input.policy.reserve_memory_percent),
        reserve_cpu: percent(input.policy.reserve_cpu_percent),
        cpu_overcommit_percent: 100,
        report_max_age: Millis(input.max_report_age_s * 1_000),
        inbound_max: 2,
        outbound_max: 2,
    };
    let workloads: Vec<Workload> =
        input.workloads.iter().map(|input| workload(input, names)).collect();
    plan(&fleet(&input.hosts, names, policy), &order(input), &workloads)
}

fn answer(plan: &Plan, names: &Names) -> Expected {
    Expected {
        plan_state: plan.state().label().to_owned(),
        assignments_in_order: plan
            .assignments
            .iter()
            .map(|assignment| ExpectedAssignment {
                vm: names.name(assignment.vm),
                target: assignment.destination.to_string(),
                mode: assignment.mode.label().to_owned(),
            })
            .collect(),
        blockers: plan
            .blocked
            .iter()
            .map(|blocked| ExpectedBlocker {
                vm: names.name(blocked.vm),
                code: blocked.code.label().to_owned(),
            })
            .collect(),
    }
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases"))
}

fn read(name: &str) -> String {
    fs::read_to_string(folder().join(name)).expect("the case is committed")
}

#[test]
fn every_planning_case_is_answered_as_expected() {
    let mut seen = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.ends_with(".json") || name.starts_with("C29") {
            continue;
        }
        let case: Case =
            serde_json::from_str(&read(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let names = Names::of(&case.input.hosts, &case.input.workloads);
        let plan = planned(&case.input, &names);
        assert_eq!(answer(&plan, &names), case.expected, "{name}");
        for (host, derived) in &case.derived {
            let left = plan.left.get(&host_id(host));
            if let (Some(expected), Some(left)) = (derived.free_mib_after, left) {
                // By hand the reserve is rounded up to a whole MiB, here to a byte.
                let rounding = left.memory.less(mib(expected));
                assert!(left.memory >= mib(expected), "{name}: memory left on {host}");
                assert!(rounding < mib(1), "{name}: {rounding} too much left on {host}");
            }
            if let (Some(expected), Some(left)) = (derived.free_cpu_after, left) {
                assert_eq!(left.cpu, MilliCpu(expected), "{name}: CPU left on {host}");
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 15);
}

#[test]
fn the_order_of_the_input_never_matters() {
    for entry in fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.ends_with(".json") || name.starts_with("C29") {
            continue;
        }
        let mut case: Case = serde_json::from_str(&read(&name)).unwrap();
        case.input.workloads.reverse();
        case.input.hosts.reverse();
        let names = Names::of(&case.input.hosts, &case.input.workloads);
        assert_eq!(answer(&planned(&case.input, &names), &names), case.expected, "{name}");
    }
}

#[test]
fn a_host_without_memory_is_named_with_its_reason() {
    let case: Case = serde_json::from_str(&read("C13-zero-total-memory.json")).unwrap();
    let names = Names::of(&case.input.hosts, &case.input.workloads);
    let plan = planned(&case.input, &names);
    let closed: Vec<String> = plan
        .closed
        .iter()
        .flat_map(|rejected| rejected.blockers().map(|blocker| blocker.message))
        .collect();
    assert_eq!(closed, ["host h2: unreadable: total memory 0"]);
}

#[test]
fn a_dead_source_blocks_every_vm_under_every_strategy() {
    for strategy in [StrategyInput::LiveOnly, StrategyInput::PreferLive, StrategyInput::ColdOnly] {
        let mut case: Case = serde_json::from_str(&read("C19-source-unavailable.json")).unwrap();
        case.input.policy.strategy = strategy;
        let names = Names::of(&case.input.hosts, &case.input.workloads);
        assert_eq!(answer(&planned(&case.input, &names), &names), case.expected);
    }
}

#[test]
fn under_no_strategy_is_a_vm_stopped_without_a_place() {
    for (strategy, modes, blocked) in [
        (StrategyInput::PreferLive, vec!["cold", "live"], vec![]),
        (StrategyInput::LiveOnly, vec!["live"], vec!["live_migration_required"]),
        (StrategyInput::ColdOnly, vec!["cold", "cold"], vec![]),
    ] {
        let mut case: Case = serde_json::from_str(&read("C27-prefer-live-modes.json")).unwrap();
        case.input.policy.strategy = strategy;
        let names = Names::of(&case.input.hosts, &case.input.workloads);
        let plan = planned(&case.input, &names);
        let found: Vec<_> = plan.assignments.iter().map(|one| one.mode.label()).collect();
        assert_eq!(found, modes);
        let found: Vec<_> = plan.blocked.iter().map(|one| one.code.label()).collect();
        assert_eq!(found, blocked);
    }
}

/// Minutes and seconds of the case's one hour, as a moment.
fn moment(text: &str) -> Timestamp {
    let of = |range: std::ops::Range<usize>| text[range].parse::<u64>().expect("a number");
    Timestamp((of(14..16) * 60 + of(17..19)) * 1_000)
}

#[test]
fn a_request_that_meets_a_full_fleet_waits_from_its_first_refusal_and_not_for_ever() {
    let case: Admission = serde_json::from_str(&read("C29-fleet-at-capacity.json")).unwrap();
    let names = Names(vec!["vm-new".into()]);
    let policy = Policy {
        reserve_memory: percent(case.policy.reserve_memory_percent),
        reserve_cpu: percent(case.policy.reserve_cpu_percent),
        cpu_overcommit_percent: 100,
        report_max_age: Millis(case.policy.max_report_age_s * 1_000),
        inbound_max: 2,
        outbound_max: 2,
    };
    let fleet = fleet(&case.hosts, &names, policy);
    let demand =
        Demand { memory: mib(case.request.memory_mib), cpu: MilliCpu(case.request.cpu_milli) };
    let request = Request {
        vm: names.id("vm-new"),
        demand,
        source: None,
        destination: None,
        needs: Needs { cluster: Some(case.policy.cluster.clone()), ..Needs::default() },
    };
    let received = moment(&case.request.received_at);
    let wait = case.policy.max_capacity_wait_s * 1_000;
    let mut row = opened(Timestamp(received.value() + wait));
    for step in &case.expected_steps {
        let at = moment(&step.at);
        let refusal = place(&fleet, &request).unwrap_err();
        assert_eq!(refusal.refused, Refused::FleetAtCapacity);
        assert_eq!(step.reason, "FleetAtCapacity");
        assert!(refusal.refused.queues());
        let Phase::Queued { deadline, .. } = row.phase else { panic!("{:?}", row.phase) };
        if at >= deadline {
            row = row.apply(&Event::QueueExpired).unwrap();
            assert_eq!(step.result, "refused");
            let cause = row.phase.cause().unwrap();
            assert_eq!(cause.label(), "capacity_wait_expired");
            assert!(cause.to_string().contains("fleet_at_capacity"), "{cause}");
            continue;
        }
        row = row.apply(&Event::NoRoom { at, note: refusal.note() }).unwrap();
        assert_eq!(step.result, "queued");
        let Phase::Queued { blocked: Some(blocked), .. } = &row.phase else {
            panic!("{:?}", row.phase)
        };
        assert_eq!(Some(blocked.since), step.capacity_blocked_since.as_deref().map(moment));
    }
    assert!(row.label().is_terminal());
}

fn opened(deadline: Timestamp) -> Migration {
    use vmferry_planner_core::migration::{AutoConverge, Downgrade, Gates, Guest, Terms};
    use vmferry_types::{BytesPerSec, Generation, Method, MigrationId};

    Migration::open(Opening {
        id: MigrationId::from_u128(1),
        vm: VmId::from_u128(0),
        source: host_id("h9"),
        method: Method::Precopy,
        terms: Terms {
            not_converging: NotConverging::Abort,
            asked_destination: None,
            hold_limit: Millis(10_000),
            downtime_limit: Millis(100),
            transfer_timeout: Millis(3_600_000),
            stall_limit: Millis(30_000),
            switchover_limit: Millis(30_000),
            shutdown_limit: Millis(120_000),
            max_bandwidth: BytesPerSec(0),
            auto_converge: AutoConverge::Off,
            gates: Gates::OPEN,
            gate_deadline: Millis(600_000),
            downgrade: Downgrade::Never,
        },
        found: Guest::Present,
        generation: Generation::FIRST,
        deadline,
    })
    .expect("precopy is carried out")
}
