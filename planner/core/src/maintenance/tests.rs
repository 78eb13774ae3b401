use std::collections::BTreeSet;

use proptest::prelude::{
    ProptestConfig, Strategy as Arbitrarily, prop, prop_assert, prop_assert_eq, proptest,
};
use vmferry_types::{Millis, Percent, Role, Timestamp};

use super::*;
use crate::capacity::figures;
use crate::fleet::{Capabilities, Cordon, HostPolicy, Lifecycle, Policy, Report, VmUse};

const MIB: u64 = 1 << 20;

fn id(text: &str) -> HostId {
    text.parse().unwrap()
}

fn policy(reserve: u8) -> Policy {
    Policy {
        reserve_memory: Percent::new(reserve).unwrap(),
        reserve_cpu: Percent::new(0).unwrap(),
        cpu_overcommit_percent: 100,
        report_max_age: Millis(30_000),
        inbound_max: 2,
        outbound_max: 2,
    }
}

/// A host of so many MiB and vCPUs, with VMs of a size each.
fn host(name: &str, (total, available, cpus): (u64, u64, u64), vms: &[(u128, u64)]) -> Host {
    let uses = vms.iter().map(|(vm, mib)| {
        let memory = Bytes(mib * MIB);
        let one = VmUse {
            role: Role::Running,
            configured: memory,
            observed: memory,
            cpu: MilliCpu(1_000),
        };
        (VmId::from_u128(*vm), one)
    });
    Host {
        id: id(name),
        policy: HostPolicy {
            cluster: "c".into(),
            labels: BTreeMap::new(),
            cordons: BTreeSet::new(),
            lifecycle: Lifecycle::Active,
        },
        availability: Availability::Connected,
        report: Some(Arc::new(Report {
            at: Timestamp(100_000),
            unreadable: None,
            total_memory: Bytes(total * MIB),
            available_memory: Bytes(available * MIB),
            total_cpu: MilliCpu(cpus * 1_000),
            vms: Some(uses.collect()),
            capabilities: Arc::new(Capabilities::default()),
        })),
        reservations: BTreeMap::new(),
        inbound: 0,
        outbound: 0,
    }
}

fn fleet(reserve: u8, hosts: Vec<Host>) -> Fleet {
    let hosts = hosts.into_iter().map(|host| (host.id.clone(), host)).collect();
    Fleet { now: Timestamp(100_000), policy: policy(reserve), hosts }
}

fn order() -> Order {
    Order {
        source: id("source"),
        strategy: Strategy::PreferLive,
        crossing: Crossing::Refused,
        pins: PinsToSource::Hold,
    }
}

fn workload(vm: u128, mib: u64) -> Workload {
    Workload {
        vm: VmId::from_u128(vm),
        host: Some(id("source")),
        demand: Demand { memory: Bytes(mib * MIB), cpu: MilliCpu(1_000) },
        live: Live::Able,
        needs: Needs::default(),
    }
}

#[test]
fn a_stopped_vm_moves_cold_even_where_only_running_ones_may() {
    let fleet = fleet(0, vec![host("source", (64, 64, 8), &[(1, 8)]), host("b", (64, 64, 8), &[])]);
    let stopped = Workload { live: Live::Stopped, ..workload(1, 8) };
    let order = Order { strategy: Strategy::LiveOnly, ..order() };
    let plan = plan(&fleet, &order, &[stopped]);
    assert_eq!(plan.assignments[0].mode, Mode::Cold);
}

#[test]
fn every_reason_of_every_host_is_told_for_a_vm_that_goes_nowhere() {
    let mut cordoned = host("b", (64, 4, 8), &[]);
    let cordon = Cordon { owner: "operator".into(), reason: "new disks".into() };
    cordoned.policy.cordons.insert(cordon);
    let mut far = host("c", (64, 4, 8), &[]);
    far.policy.cluster = "other".into();
    let hosts = vec![host("source", (64, 64, 8), &[(1, 8)]), cordoned, far];
    let plan = plan(&fleet(0, hosts), &order(), &[workload(1, 8)]);
    let [blocked] = plan.blocked.as_slice() else { panic!("{plan:?}") };
    assert_eq!(blocked.code, Code::NoEligibleTarget);
    let told: Vec<(&str, Vec<&str>)> = blocked
        .rejected
        .iter()
        .map(|one| (one.host.as_str(), one.reasons.iter().map(|reason| reason.code()).collect()))
        .collect();
    assert_eq!(told, [("b", vec!["cordoned"]), ("c", vec!["cluster", "memory"])]);
}

#[test]
fn reasons_of_a_full_host_follow_what_is_left_of_it() {
    let hosts =
        vec![host("source", (64, 64, 8), &[(1, 8), (2, 8), (3, 8)]), host("b", (12, 12, 8), &[])];
    let workloads = [workload(1, 8), workload(2, 8), workload(3, 5)];
    let plan = plan(&fleet(0, hosts), &order(), &workloads);
    let told: Vec<String> = plan
        .blocked
        .iter()
        .flat_map(|blocked| blocked.rejected.iter().flat_map(|one| one.blockers()))
        .map(|blocker| blocker.message)
        .collect();
    let expected = [
        "host b: 8 MiB of memory needed, 4 MiB free",
        "host b: 5 MiB of memory needed, 4 MiB free",
    ];
    assert_eq!(told, expected);
}

/// Inventories of 2 to 12 hosts and up to 80 VMs, a sixth of them on the source.
fn any_inventory() -> impl Arbitrarily<Value = (Fleet, Vec<Workload>)> {
    let hosts = prop::collection::vec((0u64..4_096, 0u64..4_096, 0u64..64, 0u8..8), 2..=12);
    let vms = prop::collection::vec((0usize..12, 1u64..700, 0u64..8_000, 0usize..14), 0..80);
    (hosts, vms, 0u8..=60).prop_map(|(sizes, vms, reserve)| {
        let name = |at: usize| if at == 0 { "source".to_owned() } else { format!("h{at}") };
        let count = sizes.len();
        let mut hosts = Vec::new();
        for (at, (total, available, cpus, state)) in sizes.into_iter().enumerate() {
            let here: Vec<(u128, u64)> = vms
                .iter()
                .enumerate()
                .filter(|(_, (on, ..))| on % count == at)
                .map(|(vm, (_, mib, ..))| (vm as u128, *mib))
                .collect();
            let mut host = host(&name(at), (total, available, cpus), &here);
            if at != 0 && state == 0 {
                host.policy.lifecycle = Lifecycle::Draining;
            }
            hosts.push(host);
        }
        let workloads = vms
            .iter()
            .enumerate()
            .filter(|(_, (on, ..))| on % count == 0)
            .map(|(vm, (_, mib, cpu, pin))| {
                let mut workload = workload(vm as u128, *mib);
                workload.demand.cpu = MilliCpu(*cpu);
                workload.needs.pin = (*pin >= 11).then(|| id(&name(*pin - 10)));
                workload
            })
            .collect();
        (fleet(reserve, hosts), workloads)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Each host that was given something has its reserve and all that it promised within its total.
    #[test]
    fn no_plan_puts_a_host_above_its_limits((fleet, workloads) in any_inventory()) {
        let plan = plan(&fleet, &order(), &workloads);
        let mut given: BTreeMap<&HostId, Demand> = BTreeMap::new();
        for assignment in &plan.assignments {
            let workload = workloads.iter().find(|one| one.vm == assignment.vm).unwrap();
            let sum = given.entry(&assignment.destination).or_default();
            *sum = sum.plus(workload.demand);
        }
        for (host, given) in given {
            let figures = figures(&fleet.hosts[host], &fleet.policy).unwrap();
            let used = figures.observed_memory.max(figures.committed_memory);
            let full = used.plus(given.memory).plus(figures.reserve_memory);
            prop_assert!(full <= figures.total_memory, "{host}: {full} of {}", figures.total_memory);
            prop_assert!(figures.committed_cpu.plus(given.cpu) <= figures.usable_cpu);
            let left = plan.left[host];
            prop_assert_eq!(left.memory, figures.free_memory.less(given.memory));
        }
    }

    #[test]
    fn every_workload_is_placed_or_blocked_once_whatever_their_order(
        (fleet, workloads) in any_inventory(),
        turn in 0usize..80,
    ) {
        let before = plan(&fleet, &order(), &workloads);
        prop_assert_eq!(before.assignments.len() + before.blocked.len(), workloads.len());
        let mut turned = workloads;
        turned.reverse();
        let by = turn % turned.len().max(1);
        turned.rotate_left(by);
        prop_assert_eq!(plan(&fleet, &order(), &turned), before);
    }

    /// A blocked VM says why for each host, and what is placed was not ruled out.
    #[test]
    fn a_plan_explains_itself((fleet, workloads) in any_inventory()) {
        let plan = plan(&fleet, &order(), &workloads);
        for assignment in &plan.assignments {
            let mut rejected = assignment.rejected.iter();
            prop_assert!(rejected.all(|one| one.host != assignment.destination));
            let vm = workloads.iter().find(|one| one.vm == assignment.vm).unwrap();
            prop_assert!(vm.needs.pin.as_ref().is_none_or(|pin| *pin == assignment.destination));
        }
        for blocked in &plan.blocked {
            if blocked.code != Code::PinnedToSource {
                prop_assert_eq!(blocked.rejected.len(), fleet.hosts.len() - 1);
                prop_assert!(blocked.rejected.iter().all(|one| !one.reasons.is_empty()));
            }
        }
    }
}
