//! Cases that are told in words, as inputs of placement and capacity.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vmferry_planner_core::capacity::figures;
use vmferry_planner_core::fleet::{
    Availability, Capabilities, Demand, Fleet, Host, HostPolicy, Lifecycle, Policy, Report, VmUse,
};
use vmferry_planner_core::placement::{Needs, Refused, Request, place};
use vmferry_types::{Bytes, HostId, MilliCpu, Millis, Percent, Role, Timestamp, VmId};

const NOW: Timestamp = Timestamp(10_000_000);
const VM: VmId = VmId::from_u128(1);
const MIB: u64 = 1 << 20;

fn id(name: &str) -> HostId {
    name.parse().expect("hosts are named well")
}

fn host(name: &str, total_mib: u64, available_mib: u64) -> Host {
    Host {
        id: id(name),
        policy: HostPolicy {
            cluster: "c1".into(),
            labels: BTreeMap::from([("rack".into(), "1".into())]),
            cordons: BTreeSet::new(),
            lifecycle: Lifecycle::Active,
        },
        availability: Availability::Connected,
        report: Some(Arc::new(Report {
            at: NOW,
            unreadable: None,
            total_memory: Bytes(total_mib * MIB),
            available_memory: Bytes(available_mib * MIB),
            total_cpu: MilliCpu(64_000),
            vms: Some(BTreeMap::new()),
            capabilities: Arc::new(Capabilities::default()),
        })),
        inbound: 0,
        outbound: 0,
        reservations: BTreeMap::new(),
    }
}

fn runs(host: &mut Host, vm: u128, role: Role, mib: u64) {
    let report = Arc::make_mut(host.report.as_mut().expect("it has reported"));
    let vms = report.vms.as_mut().expect("its list is there");
    let configured = Bytes(mib * MIB);
    let entry = VmUse { role, configured, observed: Bytes::ZERO, cpu: MilliCpu(1_000) };
    vms.insert(VmId::from_u128(vm), entry);
}

fn fleet(hosts: impl IntoIterator<Item = Host>) -> Fleet {
    let policy = Policy {
        reserve_memory: Percent::new(10).expect("a percentage"),
        reserve_cpu: Percent::new(0).expect("a percentage"),
        cpu_overcommit_percent: 100,
        report_max_age: Millis(30_000),
        inbound_max: 2,
        outbound_max: 2,
    };
    let hosts = hosts.into_iter().map(|host| (host.id.clone(), host)).collect();
    Fleet { now: NOW, policy, hosts }
}

fn demand(mib: u64) -> Demand {
    Demand { memory: Bytes(mib * MIB), cpu: MilliCpu(1_000) }
}

fn request(mib: u64) -> Request {
    Request {
        vm: VM,
        demand: demand(mib),
        source: None,
        destination: None,
        needs: Needs::default(),
    }
}

/// C32: what is waited for is what was refused, not what merely is configured.
#[test]
fn who_is_blocked_by_memory_is_not_said_to_wait_for_a_label_that_is_there() {
    let labels = BTreeMap::from([("rack".to_owned(), "1".to_owned())]);
    let asking =
        Request { needs: Needs { required_labels: labels, ..Needs::default() }, ..request(4096) };
    let full = place(&fleet([host("h2", 8192, 2048)]), &asking).unwrap_err();
    assert_eq!(full.refused, Refused::FleetAtCapacity);
    let codes: Vec<String> = full.blockers().into_iter().map(|of| of.code).collect();
    assert_eq!(codes, ["memory"]);
    let freed = place(&fleet([host("h2", 8192, 8192)]), &asking).unwrap();
    assert_eq!(freed.host, id("h2"));
}

/// C33: a VM that is stopped holds no memory.
#[test]
fn a_host_whose_vms_are_all_stopped_has_room() {
    let mut h2 = host("h2", 65_536, 65_536 - 2048);
    for vm in 10..16 {
        runs(&mut h2, vm, Role::Stopped, 8192);
    }
    let fleet = fleet([h2]);
    let room = figures(&fleet.hosts[&id("h2")], &fleet.policy).unwrap();
    // By hand the reserve is rounded up to a whole MiB, here to a byte.
    assert_eq!(room.free_memory.value() / MIB, 56_934);
    assert_eq!(place(&fleet, &request(50_000)).unwrap().host, id("h2"));
}

/// C35: nothing is remembered against a host: the same fleet has the same answer the next day.
#[test]
fn a_host_that_failed_once_is_a_place_again() {
    let both = fleet([host("h2", 65_536, 65_536), host("h3", 65_536, 32_768)]);
    assert_eq!(place(&both, &request(8192)).unwrap().host, id("h2"));
    let mut without = both.clone();
    without.hosts.remove(&id("h2"));
    assert_eq!(place(&without, &request(8192)).unwrap().host, id("h3"));
    assert_eq!(place(&both, &request(8192)).unwrap().host, id("h2"));
}

/// C37: whenever reports come while a VM moves, it counts once on each end that it is on.
#[test]
fn a_vm_on_its_way_counts_once_on_each_end_whenever_they_report() {
    let vm = 1;
    let of = |roles: (Option<Role>, Option<Role>), reserved: bool| {
        let (mut source, mut destination) =
            (host("h1", 65_536, 65_536), host("h2", 65_536, 65_536));
        for (host, role) in [(&mut source, roles.0), (&mut destination, roles.1)] {
            if let Some(role) = role {
                runs(host, vm, role, 8192);
            }
            if reserved {
                host.reservations.insert(VM, demand(8192));
            }
        }
        let fleet = fleet([source, destination]);
        ["h1", "h2"].map(|name| {
            figures(&fleet.hosts[&id(name)], &fleet.policy).unwrap().committed_memory.value() / MIB
        })
    };
    // Before it is admitted; admitted, and neither has reported since; the receiver is reported;
    // the guest runs there; the source is clear and what was held is let go.
    assert_eq!(of((Some(Role::Running), None), false), [8192, 0]);
    assert_eq!(of((Some(Role::Running), None), true), [8192, 8192]);
    assert_eq!(of((Some(Role::Running), Some(Role::Receiver)), true), [8192, 8192]);
    assert_eq!(of((Some(Role::Held), Some(Role::Running)), true), [8192, 8192]);
    assert_eq!(of((None, Some(Role::Running)), true), [8192, 8192]);
    assert_eq!(of((None, Some(Role::Running)), false), [0, 8192]);
}
