use std::sync::Arc;

use proptest::prelude::*;
use vmferry_types::{Millis, Percent, Role, Timestamp};

use super::*;
use crate::capacity::{Unreadable, figures, promised};
use crate::fleet::{
    Availability, Capabilities, Cordon, HostPolicy, Lifecycle, Policy, Report, VmUse,
};

const GIB: u64 = 1 << 30;
const VM: VmId = VmId::from_u128(99);

fn policy() -> Policy {
    Policy {
        reserve_memory: Percent::new(10).unwrap(),
        reserve_cpu: Percent::new(0).unwrap(),
        cpu_overcommit_percent: 100,
        report_max_age: Millis(30_000),
        inbound_max: 2,
        outbound_max: 2,
    }
}

fn id(text: &str) -> HostId {
    text.parse().unwrap()
}

/// A host of 10 GiB and 8 vCPUs with `available` GiB left.
fn host(name: &str, available: u64) -> Host {
    Host {
        id: id(name),
        policy: HostPolicy {
            cluster: "default".into(),
            labels: BTreeMap::new(),
            cordons: BTreeSet::new(),
            lifecycle: Lifecycle::Active,
        },
        availability: Availability::Connected,
        report: Some(Arc::new(Report {
            at: Timestamp(100_000),
            unreadable: None,
            total_memory: Bytes(10 * GIB),
            available_memory: Bytes(available * GIB),
            total_cpu: MilliCpu(8_000),
            vms: Some(BTreeMap::new()),
            capabilities: Arc::new(Capabilities::default()),
        })),
        reservations: BTreeMap::new(),
        inbound: 0,
        outbound: 0,
    }
}

fn report(host: &mut Host) -> &mut Report {
    Arc::make_mut(host.report.as_mut().unwrap())
}

fn fleet(hosts: impl IntoIterator<Item = Host>) -> Fleet {
    let hosts = hosts.into_iter().map(|host| (host.id.clone(), host)).collect();
    Fleet { now: Timestamp(105_000), policy: policy(), hosts }
}

fn request(gib: u64) -> Request {
    Request {
        vm: VM,
        demand: Demand { memory: Bytes(gib * GIB), cpu: MilliCpu(1_000) },
        source: None,
        destination: None,
        needs: Needs::default(),
    }
}

fn vm_use(role: Role, gib: u64) -> VmUse {
    VmUse { role, configured: Bytes(gib * GIB), observed: Bytes(GIB), cpu: MilliCpu(500) }
}

fn codes(refusal: &NoPlacement) -> Vec<&'static str> {
    refusal.rejected.iter().flat_map(|one| one.reasons.iter().map(Reason::code)).collect()
}

#[test]
fn the_emptiest_host_is_chosen_and_a_tie_goes_to_the_lower_id() {
    let placed = place(&fleet([host("a", 5), host("b", 8), host("c", 8)]), &request(2)).unwrap();
    assert_eq!(placed.host, id("b"));
    assert_eq!(placed.remaining_memory, Bytes(5 * GIB));
    assert!(placed.rejected.is_empty());
}

#[test]
fn an_exact_fit_fits_and_a_byte_more_does_not() {
    let fleet = fleet([host("a", 5)]);
    let mut exact = request(4);
    assert_eq!(place(&fleet, &exact).unwrap().remaining_memory, Bytes::ZERO);
    exact.demand.memory = Bytes(4 * GIB + 1);
    assert_eq!(place(&fleet, &exact).unwrap_err().refused, Refused::FleetAtCapacity);
}

#[test]
fn cpu_is_a_limit_too_unless_it_may_be_overcommitted() {
    let mut fleet = fleet([host("a", 9)]);
    let mut wide = request(1);
    wide.demand.cpu = MilliCpu(9_000);
    assert_eq!(codes(&place(&fleet, &wide).unwrap_err()), ["cpu"]);
    fleet.policy.cpu_overcommit_percent = 200;
    assert!(place(&fleet, &wide).is_ok());
}

#[test]
fn a_vm_that_is_reported_and_reserved_counts_once_by_its_worst_figure() {
    let mut host = host("a", 10);
    let vm = VmId::from_u128(1);
    let reserved = Demand { memory: Bytes(3 * GIB), cpu: MilliCpu(1_000) };
    host.reservations.insert(vm, reserved);
    let promised = figures(&host, &policy()).unwrap();
    assert_eq!(promised.committed_memory, Bytes(3 * GIB));
    assert_eq!(promised.reserved_memory, Bytes(3 * GIB));
    let vms = BTreeMap::from([(vm, vm_use(Role::Receiver, 4))]);
    report(&mut host).vms = Some(vms);
    let promised = figures(&host, &policy()).unwrap();
    assert_eq!(promised.committed_memory, Bytes(4 * GIB));
    assert_eq!(promised.committed_cpu, MilliCpu(1_000));
    assert_eq!(promised.reserved_memory, Bytes::ZERO);
}

#[test]
fn a_stopped_vm_takes_no_memory() {
    let mut host = host("a", 10);
    let vms = (1..7).map(|at| (VmId::from_u128(at), vm_use(Role::Stopped, 8)));
    report(&mut host).vms = Some(vms.collect());
    assert_eq!(figures(&host, &policy()).unwrap().free_memory, Bytes(9 * GIB));
}

#[test]
fn what_a_vm_has_on_a_host_already_is_not_counted_against_it_there() {
    let mut host = host("a", 10);
    let reserved = Demand { memory: Bytes(8 * GIB), cpu: MilliCpu(8_000) };
    host.reservations.insert(VM, reserved);
    assert!(place(&fleet([host]), &request(8)).is_ok());
}

#[test]
fn figures_that_cannot_be_are_not_used() {
    let unreadable = |change: fn(&mut Report)| {
        let mut host = host("a", 5);
        change(report(&mut host));
        figures(&host, &policy()).unwrap_err()
    };
    assert_eq!(unreadable(|r| r.total_memory = Bytes::ZERO), Unreadable::NoMemory);
    assert_eq!(
        unreadable(|r| r.available_memory = Bytes(11 * GIB)),
        Unreadable::MoreAvailableThanTotal { available: Bytes(11 * GIB), total: Bytes(10 * GIB) }
    );
    assert_eq!(unreadable(|r| r.vms = None), Unreadable::VmsUnanswered);
    let why = unreadable(|r| r.unreadable = Some("the journal is new".into()));
    assert_eq!(why.to_string(), "its agent says: the journal is new");
    let silent = Host { report: None, ..host("a", 5) };
    assert_eq!(figures(&silent, &policy()), Err(Unreadable::NeverReported));
}

#[test]
fn a_host_fails_closed() {
    let cordon = Cordon { owner: "job 7".into(), reason: "new disks".into() };
    let with = |change: &dyn Fn(&mut Host)| {
        let mut host = host("a", 9);
        change(&mut host);
        codes(&place(&fleet([host]), &request(1)).unwrap_err())
    };
    assert_eq!(with(&|h| h.availability = Availability::Disconnected), ["not_connected"]);
    assert_eq!(with(&|h| h.availability = Availability::Learning), ["learning"]);
    assert_eq!(with(&|h| h.policy.lifecycle = Lifecycle::Draining), ["draining"]);
    assert_eq!(with(&|h| h.policy.lifecycle = Lifecycle::Maintenance), ["in_maintenance"]);
    assert_eq!(with(&|h| h.policy.lifecycle = Lifecycle::Retired), ["retired"]);
    assert_eq!(with(&|h| report(h).at = Timestamp(74_999)), ["stale_report"]);
    assert_eq!(with(&|h| report(h).vms = None), ["unreadable"]);
    assert_eq!(with(&|h| h.inbound = 2), ["inbound_cap"]);
    assert_eq!(with(&|h| h.policy.cordons = BTreeSet::from([cordon.clone()])), ["cordoned"]);
}

#[test]
fn a_report_of_just_the_greatest_age_still_counts() {
    let mut host = host("a", 9);
    report(&mut host).at = Timestamp(75_000);
    assert!(place(&fleet([host]), &request(1)).is_ok());
}

#[test]
fn every_reason_is_told_at_once() {
    let mut full = host("a", 1);
    report(&mut full).capabilities = Arc::new(Capabilities {
        architecture: "x86_64".into(),
        cpu_models: BTreeSet::from(["EPYC".into()]),
        qemu_version: "9.2.1".into(),
        shared_paths: Some(BTreeSet::from(["/share".into()])),
        ..Capabilities::default()
    });
    full.availability = Availability::Disconnected;
    full.policy.lifecycle = Lifecycle::Draining;
    let mut asking = request(8);
    asking.source = Some(id("a"));
    asking.demand.cpu = MilliCpu(9_000);
    asking.needs = Needs {
        cluster: Some("other".into()),
        pin: Some(id("z")),
        required_labels: BTreeMap::from([("rack".into(), "1".into())]),
        architecture: Some("aarch64".into()),
        accelerator: Some("kvm".into()),
        machine_type: Some("pc-q35-10.0".into()),
        cpu_model: Some("host".into()),
        bridges: BTreeSet::from(["br0".into(), "br1".into()]),
        qemu_version: Some("10.0.2".into()),
        shared_paths: BTreeSet::from(["/shared/a.raw".into()]),
    };
    let refusal = place(&fleet([full]), &asking).unwrap_err();
    let expected = [
        "draining",
        "not_connected",
        "same_host",
        "cluster",
        "pinned",
        "required_label",
        "architecture",
        "accelerator_missing",
        "machine_type_missing",
        "cpu_model_missing",
        "qemu_older",
        "missing_bridge",
        "missing_bridge",
        "missing_path",
        "memory",
        "cpu",
    ];
    assert_eq!(codes(&refusal), expected);
    assert_eq!(refusal.blockers().len(), expected.len());
}

#[test]
fn a_refusal_says_which_kind_it_is() {
    let kind = |hosts: Vec<Host>| place(&fleet(hosts), &request(4)).unwrap_err().refused;
    let full = || host("a", 1);
    let mut stale = host("b", 9);
    report(&mut stale).at = Timestamp(1);
    let closed = || {
        let mut host = host("c", 9);
        host.policy.lifecycle = Lifecycle::Maintenance;
        host
    };
    let mut retired = host("d", 9);
    retired.policy.lifecycle = Lifecycle::Retired;
    assert_eq!(kind(vec![full(), closed()]), Refused::FleetAtCapacity);
    assert_eq!(kind(vec![full(), stale.clone()]), Refused::FleetAtCapacity);
    assert_eq!(kind(vec![stale.clone(), closed()]), Refused::FleetUnreadable);
    assert_eq!(kind(vec![closed()]), Refused::NoneAvailable);
    assert_eq!(kind(vec![retired]), Refused::NotCapable);
    assert_eq!(kind(vec![]), Refused::FleetUnreadable);
    let note = place(&fleet([full(), stale]), &request(4)).unwrap_err().note();
    assert!(note.contains("a: 4 GiB of memory needed, 0 B free"), "{note}");
    assert!(note.contains("b: its last report"), "{note}");
}

#[test]
fn what_an_unheard_host_can_carry_is_unknown_not_missing() {
    let silent = Host { report: None, ..host("a", 9) };
    let mut asking = request(1);
    asking.needs.machine_type = Some("pc-q35-10.0".into());
    let refusal = place(&fleet([silent]), &asking).unwrap_err();
    assert_eq!(refusal.refused, Refused::FleetUnreadable);
}

#[test]
fn a_host_that_was_asked_for_is_taken_or_refused_with_all_reasons() {
    let mut cordoned = host("b", 2);
    cordoned.policy.lifecycle = Lifecycle::Draining;
    let fleet = fleet([host("a", 9), cordoned, host("c", 5)]);
    let asking = |name: &str| Request { destination: Some(id(name)), ..request(3) };
    assert_eq!(place(&fleet, &asking("c")).unwrap().host, id("c"));
    let refusal = place(&fleet, &asking("b")).unwrap_err();
    assert_eq!(refusal.refused, Refused::DestinationRefused);
    assert!(!refusal.refused.queues());
    assert_eq!(codes(&refusal), ["draining", "memory"]);
    assert_eq!(codes(&place(&fleet, &asking("z")).unwrap_err()), ["unknown_host"]);
}

#[test]
fn a_source_that_sends_as_many_as_it_may_waits_although_there_is_room() {
    let mut sending = host("a", 1);
    sending.outbound = 2;
    let mut fleet = fleet([sending, host("b", 9)]);
    let asking = Request { source: Some(id("a")), ..request(1) };
    let refusal = place(&fleet, &asking).unwrap_err();
    assert_eq!(refusal.refused, Refused::SourceBusy);
    assert!(refusal.refused.queues());
    assert_eq!(refusal.note(), "source_busy: a: 2 of 2 migrations are on their way from it");
    fleet.policy.outbound_max = 3;
    assert_eq!(place(&fleet, &asking).unwrap().host, id("b"));
    let elsewhere = Request { destination: Some(id("z")), ..asking };
    fleet.policy.outbound_max = 2;
    let refusal = place(&fleet, &elsewhere).unwrap_err();
    assert_eq!(refusal.refused, Refused::DestinationRefused);
}

#[test]
fn a_few_pages_more_are_no_reason_to_prefer_a_host_whose_cpu_is_short() {
    let mut tight = host("a", 5);
    report(&mut tight).available_memory = Bytes(5 * GIB + 4096);
    report(&mut tight).total_cpu = MilliCpu(2_000);
    assert_eq!(place(&fleet([tight, host("b", 5)]), &request(1)).unwrap().host, id("b"));
}

#[test]
fn what_a_vm_needs_of_qemu_and_the_host_is_asked_of_what_the_agent_reports() {
    let carries = |needs: Needs, has: Capabilities| {
        let mut host = host("a", 9);
        report(&mut host).capabilities = Arc::new(has);
        let refusal = place(&fleet([host]), &Request { needs, ..request(1) });
        refusal.map_or_else(|refusal| codes(&refusal), |_| vec![])
    };
    let set = |text: &str| BTreeSet::from([text.to_owned()]);
    let of = |version: &str| Capabilities { qemu_version: version.into(), ..Default::default() };
    let from = |version: &str| Needs { qemu_version: Some(version.into()), ..Needs::default() };
    assert_eq!(carries(from("10.0.2"), of("9.2.4")), ["qemu_older"]);
    assert!(carries(from("9.2.4"), of("10.0.2")).is_empty());
    assert!(carries(from("10.0.2"), of("10.0.2")).is_empty());
    assert!(carries(from("10.0.2"), of("")).is_empty(), "unsaid is not older");
    let on = |path: &str| Needs { shared_paths: set(path), ..Needs::default() };
    let shares = |path: &str| Capabilities { shared_paths: Some(set(path)), ..Default::default() };
    assert!(carries(on("/images/a.raw"), shares("/images/")).is_empty());
    assert_eq!(carries(on("/images2/a.raw"), shares("/images")), ["missing_path"]);
    assert!(carries(on("/images/a.raw"), of("")).is_empty(), "unsaid is not missing");
    let model = Needs { cpu_model: Some("EPYC".into()), ..Needs::default() };
    let models = |name: &str| Capabilities { cpu_models: set(name), ..Default::default() };
    assert_eq!(carries(model.clone(), models("qemu64")), ["cpu_model_missing"]);
    assert!(carries(model.clone(), models("EPYC")).is_empty());
    assert!(carries(model, of("")).is_empty(), "unsaid is not missing");
    let on = Needs { architecture: Some("aarch64".into()), ..Needs::default() };
    let is = |name: &str| Capabilities { architecture: name.into(), ..Default::default() };
    assert_eq!(carries(on.clone(), is("x86_64")), ["architecture"]);
    assert!(carries(on, is("")).is_empty(), "unsaid is not another");
}

#[test]
fn a_host_that_promised_more_than_it_has_is_a_violation() {
    let mut host = host("a", 9);
    let demand = Demand { memory: Bytes(10 * GIB), cpu: MilliCpu(9_000) };
    host.reservations.insert(VmId::from_u128(1), demand);
    assert_eq!(fleet([host]).check().len(), 2);
    assert!(fleet([self::host("a", 9)]).check().is_empty());
}

fn any_host(name: String) -> impl Strategy<Value = Host> {
    let figures = (0u64..16, 0u64..16, 0u64..12_000);
    let vms =
        prop::collection::btree_map(0u128..8, (0u64..6, 0u64..6, 0u64..3_000, 0usize..5), 0..4);
    let reservations = prop::collection::btree_map(0u128..8, (0u64..6, 0u64..3_000), 0..4);
    let policy = (0u32..8, 0u32..4, 0u64..50_000);
    (figures, vms, reservations, policy).prop_map(
        move |((total, available, cpu), vms, reservations, (state, inbound, age))| {
            let mut host = host(&name, 0);
            let said = report(&mut host);
            said.at = Timestamp(105_000 - age);
            said.total_memory = Bytes(total * GIB);
            said.available_memory = Bytes(available * GIB);
            said.total_cpu = MilliCpu(cpu);
            let roles = [Role::Running, Role::Held, Role::Receiver, Role::Stopped, Role::Absent];
            let reported = vms.into_iter().map(|(vm, (configured, observed, cpu, role))| {
                let role = roles[role];
                let (configured, observed) = (Bytes(configured * GIB), Bytes(observed * GIB));
                (VmId::from_u128(vm), VmUse { role, configured, observed, cpu: MilliCpu(cpu) })
            });
            said.vms = (state != 7).then(|| reported.collect());
            host.reservations = reservations
                .into_iter()
                .map(|(vm, (memory, cpu))| {
                    let demand = Demand { memory: Bytes(memory * GIB), cpu: MilliCpu(cpu) };
                    (VmId::from_u128(vm), demand)
                })
                .collect();
            host.availability =
                if state == 6 { Availability::Disconnected } else { Availability::Connected };
            host.inbound = inbound;
            host
        },
    )
}

fn any_fleet() -> impl Strategy<Value = Fleet> {
    prop::collection::vec(0u32..1, 1..6)
        .prop_flat_map(|hosts| {
            let named = |at: usize| any_host(format!("h{at}"));
            (0..hosts.len()).map(named).collect::<Vec<_>>()
        })
        .prop_map(fleet)
}

fn any_request() -> impl Strategy<Value = Request> {
    (0u64..6, 0u64..4_000).prop_map(|(gib, cpu)| {
        let mut asking = request(gib);
        asking.demand.cpu = MilliCpu(cpu);
        asking
    })
}

fn sorted(hosts: &[HostId]) -> BTreeSet<&HostId> {
    hosts.iter().collect()
}

/// The same, of hosts in the order of their standing, up to one past those that are wanted.
fn shortlist_in_order(fleet: &Fleet, asking: &Request, count: usize) -> Shortlist {
    let standing = |host: &Host| {
        let report = host.report.as_deref()?;
        Some(Standing::of(&host.id, (report, promised(report)?), &fleet.policy))
    };
    let in_order: BTreeSet<Standing> = fleet.hosts.values().filter_map(standing).collect();
    let mut ranking = Ranking::new(asking, &fleet.policy, fleet.now);
    for standing in &in_order {
        if ranking.found() > count {
            break;
        }
        let Some(host) = fleet.hosts.get(standing.host()) else { continue };
        let Some(report) = host.report.as_deref() else { continue };
        let Some(promised) = promised(report) else { continue };
        let HostPolicy { cluster, labels, .. } = &host.policy;
        ranking.offer(Candidate { host: &host.id, cluster, labels, report, promised });
    }
    ranking.best(count)
}

/// Ranks the hosts as a planner does that knows nothing but what they report.
fn shortlist(fleet: &Fleet, asking: &Request, count: usize) -> Shortlist {
    let mut ranking = Ranking::new(asking, &fleet.policy, fleet.now);
    for host in fleet.hosts.values() {
        let Some(report) = host.report.as_deref() else { continue };
        let Some(promised) = promised(report) else { continue };
        let HostPolicy { cluster, labels, .. } = &host.policy;
        ranking.offer(Candidate { host: &host.id, cluster, labels, report, promised });
    }
    ranking.best(count)
}

proptest! {
    #[test]
    fn a_shortlist_that_decides_gives_the_answer_of_the_whole_fleet(
        fleet in any_fleet(),
        mut asking in any_request(),
        count in 1usize..4,
        vm in 0u128..12,
    ) {
        // Hosts may speak of the first eight.
        asking.vm = VmId::from_u128(vm);
        let list = shortlist(&fleet, &asking, count);
        let in_order = shortlist_in_order(&fleet, &asking, count);
        prop_assert_eq!(sorted(in_order.hosts()), sorted(list.hosts()));
        let speaks = |host: &Host| {
            let vms = host.report.as_ref().and_then(|report| report.vms.as_ref());
            vms.is_some_and(|vms| vms.contains_key(&asking.vm))
        };
        let listed = |host: &Host| list.hosts().contains(&host.id) || speaks(host);
        let hosts = fleet.hosts.iter().filter(|(_, host)| listed(host));
        let hosts = hosts.map(|(id, host)| (id.clone(), host.clone())).collect();
        let few = Fleet { hosts, ..fleet.clone() };
        prop_assert!(list.hosts().len() <= count);
        let whole = place(&fleet, &asking);
        match place(&few, &asking) {
            Ok(found) if list.decides(&few, &found) => {
                prop_assert_eq!(whole.map(|placed| placed.host), Ok(found.host));
            }
            Ok(_) => prop_assert!(list.hosts().len() == count),
            // None of the list takes it: with nobody left out, none at all does.
            Err(_) => prop_assert!(list.hosts().len() == count || whole.is_err()),
        }
    }

    #[test]
    fn the_same_fleet_gives_the_same_answer(fleet in any_fleet(), asking in any_request()) {
        prop_assert_eq!(place(&fleet, &asking), place(&fleet.clone(), &asking));
    }

    #[test]
    fn nothing_is_placed_above_a_limit(fleet in any_fleet(), asking in any_request()) {
        if let Ok(placed) = place(&fleet, &asking) {
            let host = &fleet.hosts[&placed.host];
            let before = figures(host, &fleet.policy).unwrap();
            prop_assert!(before.free_memory >= asking.demand.memory);
            let mut after = host.clone();
            after.reservations.insert(asking.vm, asking.demand);
            let figures = figures(&after, &fleet.policy).unwrap();
            let limit = figures.total_memory.less(figures.reserve_memory);
            prop_assert!(figures.committed_memory <= limit.max(before.committed_memory));
            // A host may have promised too much before; nothing is added to that but nothing.
            prop_assert!(figures.committed_cpu <= figures.usable_cpu.max(before.committed_cpu));
        }
    }

    #[test]
    fn every_host_is_either_the_place_or_ruled_out_or_merely_worse(
        fleet in any_fleet(),
        asking in any_request(),
    ) {
        match place(&fleet, &asking) {
            Ok(placed) => {
                let ruled_out: BTreeSet<_> = placed.rejected.iter().map(|one| &one.host).collect();
                prop_assert!(!ruled_out.contains(&placed.host));
                for (id, host) in &fleet.hosts {
                    let reasons = reasons_against(&fleet, host, &asking);
                    prop_assert_eq!(ruled_out.contains(id), !reasons.is_empty());
                }
            }
            Err(refusal) => {
                prop_assert_eq!(refusal.rejected.len(), fleet.hosts.len());
                prop_assert!(refusal.rejected.iter().all(|one| !one.reasons.is_empty()));
            }
        }
    }

    #[test]
    fn more_room_never_gives_a_worse_answer(
        fleet in any_fleet(),
        asking in any_request(),
        at in 0usize..6,
        more in 0u64..8,
    ) {
        let mut roomier = fleet.clone();
        let count = roomier.hosts.len();
        if let Some(host) = roomier.hosts.values_mut().nth(at % count) {
            let said = report(host);
            let readable = said.total_memory > Bytes::ZERO
                && said.available_memory <= said.total_memory;
            if readable {
                said.total_memory = said.total_memory.plus(Bytes(more * GIB));
                said.available_memory = said.available_memory.plus(Bytes(more * GIB));
            }
        }
        match (place(&fleet, &asking), place(&roomier, &asking)) {
            (Ok(before), Ok(after)) => {
                // Hosts are ranked by whole MiB.
                let mib = |placed: &Placement| placed.remaining_memory.value() >> 20;
                prop_assert!(mib(&after) >= mib(&before));
            }
            (Ok(before), Err(after)) => prop_assert!(false, "{before:?} became {after:?}"),
            (Err(_), Ok(_) | Err(_)) => {}
        }
    }
}
