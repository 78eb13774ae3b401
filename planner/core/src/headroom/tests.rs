use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::{
    ProptestConfig, Strategy as Arbitrarily, prop, prop_assert, prop_assert_eq, proptest,
};
use vmferry_types::{Millis, Percent, Role, Timestamp, VmId};

use super::*;
use crate::fleet::{Capabilities, Cordon, HostPolicy, Lifecycle, Policy, Report, VmUse};
use crate::maintenance::{Code, Live, PlanState};
use crate::placement::{Needs, Request, place};

const MIB: u64 = 1 << 20;

fn id(text: &str) -> HostId {
    text.parse().unwrap()
}

/// A host of so many MiB, of which so many are available, and vCPUs, with VMs of a size each.
fn host(name: &str, (total, available, cpus): (u64, u64, u64), vms: &[(u128, u64)]) -> Host {
    let uses = vms.iter().map(|(vm, mib)| {
        let configured = Bytes(mib * MIB);
        let cpu = MilliCpu(1_000);
        let one = VmUse { role: Role::Running, configured, observed: Bytes(MIB), cpu };
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

fn fleet(hosts: impl IntoIterator<Item = Host>) -> Fleet {
    let policy = Policy {
        reserve_memory: Percent::new(10).unwrap(),
        reserve_cpu: Percent::new(0).unwrap(),
        cpu_overcommit_percent: 100,
        report_max_age: Millis(30_000),
        inbound_max: 2,
        outbound_max: 2,
    };
    let hosts = hosts.into_iter().map(|host| (host.id.clone(), host)).collect();
    Fleet { now: Timestamp(100_000), policy, hosts }
}

fn demand(mib: u64, cpus: u64) -> Demand {
    Demand { memory: Bytes(mib * MIB), cpu: MilliCpu(cpus * 1_000) }
}

fn workload(host: &str, vm: u128, mib: u64) -> Workload {
    Workload {
        vm: VmId::from_u128(vm),
        host: Some(id(host)),
        demand: demand(mib, 1),
        live: Live::Able,
        needs: Needs::default(),
    }
}

#[test]
fn what_binds_is_what_the_greater_share_of_is_gone() {
    for (host, expected) in [
        (host("a", (1000, 900, 8), &[(1, 500)]), Binds::CommittedMemory),
        (host("a", (1000, 100, 8), &[(1, 500)]), Binds::ObservedMemory),
        (host("a", (1000, 1000, 2), &[(1, 100)]), Binds::Cpu),
        (host("a", (1000, 1000, 0), &[]), Binds::Cpu),
        (host("a", (1000, 1000, 4), &[]), Binds::CommittedMemory),
    ] {
        let fleet = fleet([host]);
        let (rooms, totals) = rooms(&fleet);
        let figures = rooms[0].figures.clone().unwrap();
        assert_eq!(binds(&figures), expected, "{figures:?}");
        assert_eq!(totals, Totals { open: 1, closed: 0, figures: Some(figures) });
    }
}

#[test]
fn hosts_that_take_nothing_are_told_and_not_counted() {
    let mut cordoned = host("b", (1000, 1000, 8), &[]);
    cordoned.policy.cordons.insert(Cordon { owner: "operator".into(), reason: "new disks".into() });
    let mut unreadable = host("c", (1000, 1000, 8), &[]);
    Arc::make_mut(unreadable.report.as_mut().unwrap()).unreadable = Some("no memory".into());
    let fleet = fleet([host("a", (1000, 1000, 8), &[]), cordoned, unreadable]);
    let (rooms, totals) = rooms(&fleet);
    let open: Vec<bool> = rooms.iter().map(HostRoom::is_open).collect();
    assert_eq!(open, [true, false, false]);
    assert_eq!((totals.open, totals.closed), (1, 2));
    assert_eq!(totals.figures.unwrap().free_memory, Bytes(900 * MIB));
    assert_eq!(left(&rooms).keys().map(HostId::as_str).collect::<Vec<_>>(), ["a"]);
}

#[test]
fn as_many_fit_as_the_scarcer_of_memory_and_cpu_allows() {
    let fleet = fleet([host("a", (1000, 1000, 2), &[]), host("b", (500, 500, 8), &[])]);
    let fits = fit(&left(&rooms(&fleet).0), demand(150, 1));
    assert_eq!(fits.hosts, BTreeMap::from([(id("a"), 2), (id("b"), 3)]));
    assert_eq!(fits.count, 5);
    assert_eq!(fit(&left(&rooms(&fleet).0), demand(0, 0)).count, u64::MAX);
}

#[test]
fn a_host_can_be_lost_whether_it_answers_or_not_and_a_vm_that_may_only_be_there_cannot() {
    for availability in [Availability::Connected, Availability::Disconnected] {
        let mut lost = host("a", (1000, 500, 8), &[(1, 400), (2, 100)]);
        lost.availability = availability;
        let fleet = fleet([lost, host("b", (1000, 1000, 8), &[])]);
        let mut workloads = [workload("a", 1, 400), workload("a", 2, 100)];
        let plan = without(&fleet, &id("a"), Crossing::Refused, &workloads);
        assert_eq!(plan.state(), PlanState::Planned);
        assert_eq!(plan.left[&id("b")].memory, Bytes(400 * MIB));
        workloads[0].needs.pin = Some(id("a"));
        let plan = without(&fleet, &id("a"), Crossing::Refused, &workloads);
        assert_eq!((plan.assignments.len(), plan.blocked.len()), (1, 1));
        assert_eq!(plan.blocked[0].code, Code::PinnedToSource);
    }
}

/// Hosts of any size and state, `host-0` first; the VMs of the first are to be placed anew.
fn fleets() -> impl Arbitrarily<Value = Fleet> {
    let vms = || prop::collection::vec(1..400_u64, 0..5);
    let one = (0..2_000_u64, 0..100_u64, 0..12_u64, vms(), 0..6_u8);
    prop::collection::vec(one, 1..6).prop_map(|hosts| {
        fleet(hosts.into_iter().enumerate().map(|(at, (total, percent, cpus, vms, state))| {
            let numbered: Vec<(u128, u64)> = vms
                .into_iter()
                .enumerate()
                .map(|(vm, mib)| (u128::try_from(at * 100 + vm).unwrap(), mib))
                .collect();
            let figures = (total, total * percent / 100, cpus);
            let mut host = host(&format!("host-{at}"), figures, &numbered);
            match state {
                0 => host.availability = Availability::Disconnected,
                1 => host.policy.lifecycle = Lifecycle::Draining,
                _ => {}
            }
            host
        }))
    })
}

fn workloads_of(fleet: &Fleet, name: &str) -> Vec<Workload> {
    let report = fleet.hosts[&id(name)].report.as_ref().unwrap();
    let vms = report.vms.as_ref().unwrap();
    vms.iter()
        .map(|(vm, of)| Workload {
            vm: *vm,
            demand: Demand::of(of.configured, of.observed, of.cpu),
            ..workload(name, 0, 0)
        })
        .collect()
}

/// The same fleet with more memory and CPU on one host.
fn roomier(fleet: &Fleet, name: &HostId, mib: u64, cpus: u64) -> Fleet {
    let mut fleet = fleet.clone();
    let host = fleet.hosts.get_mut(name).unwrap();
    let report = Arc::make_mut(host.report.as_mut().unwrap());
    report.total_memory = report.total_memory.plus(Bytes(mib * MIB));
    report.available_memory = report.available_memory.plus(Bytes(mib * MIB));
    report.total_cpu = report.total_cpu.plus(MilliCpu(cpus * 1_000));
    fleet
}

fn request(demand: Demand) -> Request {
    let vm = VmId::from_u128(u128::MAX);
    Request { vm, demand, source: None, destination: None, needs: Needs::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn as_many_fit_as_placement_then_takes_one_by_one(
        fleet in fleets(), mib in 50..600_u64, cpus in 1..4_u64,
    ) {
        let size = demand(mib, cpus);
        let told = fit(&left(&rooms(&fleet).0), size).count;
        let mut fleet = fleet;
        // Where more is observed than committed, a reservation does not show until it is used.
        let shows = fleet.hosts.values().all(|host| {
            figures(host, &fleet.policy).map_or(true, |of| of.observed_memory <= of.committed_memory)
        });
        let mut taken = 0;
        while let Ok(placement) = place(&fleet, &request(size)) {
            let vm = VmId::from_u128(u128::from(taken) + (1 << 80));
            let host = fleet.hosts.get_mut(&placement.host).unwrap();
            host.reservations.insert(vm, size);
            taken += 1;
        }
        prop_assert!(taken >= told);
        prop_assert!(!shows || taken == told);
    }

    #[test]
    fn more_room_never_lets_fewer_fit(
        fleet in fleets(), more in 0..4_000_u64, cpus in 0..8_u64, mib in 1..600_u64,
    ) {
        let size = demand(mib, 1);
        let before = fit(&left(&rooms(&fleet).0), size);
        for name in fleet.hosts.keys() {
            let after = fit(&left(&rooms(&roomier(&fleet, name, more, cpus)).0), size);
            prop_assert!(after.count >= before.count);
            for (host, count) in &before.hosts {
                prop_assert!(after.hosts[host] >= *count);
            }
        }
        // And a VM that has a place keeps one.
        if place(&fleet, &request(size)).is_ok() {
            for name in fleet.hosts.keys() {
                prop_assert!(place(&roomier(&fleet, name, more, cpus), &request(size)).is_ok());
            }
        }
    }

    #[test]
    fn a_loss_is_planned_alike_in_any_order_and_nothing_goes_above_what_is_free(
        fleet in fleets(),
    ) {
        let lost = id("host-0");
        let mut workloads = workloads_of(&fleet, "host-0");
        let plan = without(&fleet, &lost, Crossing::Refused, &workloads);
        workloads.reverse();
        prop_assert_eq!(&without(&fleet, &lost, Crossing::Refused, &workloads), &plan);
        prop_assert_eq!(plan.assignments.len() + plan.blocked.len(), workloads.len());
        let free = left(&rooms(&fleet).0);
        let mut taken: BTreeMap<HostId, Demand> = BTreeMap::new();
        for one in &plan.assignments {
            let demand = workloads.iter().find(|of| of.vm == one.vm).unwrap().demand;
            let entry = taken.entry(one.destination.clone()).or_default();
            *entry = entry.plus(demand);
        }
        for (host, demand) in taken {
            prop_assert!(host != lost);
            prop_assert!(demand.memory <= free[&host].memory && demand.cpu <= free[&host].cpu);
            prop_assert_eq!(plan.left[&host].memory, free[&host].memory.less(demand.memory));
        }
    }

    #[test]
    fn with_another_host_that_is_large_enough_any_host_can_be_lost(fleet in fleets()) {
        let workloads = workloads_of(&fleet, "host-0");
        let mut fleet = fleet;
        let spare = host("spare", (1 << 20, 1 << 20, 1 << 10), &[]);
        fleet.hosts.insert(spare.id.clone(), spare);
        let plan = without(&fleet, &id("host-0"), Crossing::Refused, &workloads);
        prop_assert_eq!(plan.state(), PlanState::Planned);
    }
}
