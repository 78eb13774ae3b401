use proptest::prelude::*;
use vmferry_types::HostId;

use super::slot::{Caps, Full, Holder, Kind, Limit, Limits, Wanted, grant};
use super::*;

fn id(number: u128) -> MigrationId {
    MigrationId::from_u128(number)
}

fn host(name: &str) -> HostId {
    name.parse().unwrap()
}

fn waiting(number: u128, priority: Priority, asked: u64) -> Waiting {
    Waiting {
        id: id(number),
        priority,
        asked: Timestamp(asked),
        blocked_since: Some(Timestamp(asked)),
        deadline: Timestamp(7_200_000),
        note: "fleet_at_capacity: b: 4 GiB of memory needed, 1 GiB free".into(),
    }
}

fn ids(places: &[Place]) -> Vec<u128> {
    places.iter().map(|place| place.id.as_u128()).collect()
}

#[test]
fn the_oldest_is_first_within_a_priority_and_maintenance_before_all() {
    let queue = [
        waiting(1, Priority::Operator, 10),
        waiting(2, Priority::Drain, 20),
        waiting(3, Priority::Maintenance, 40),
        waiting(4, Priority::Maintenance, 30),
        waiting(5, Priority::Operator, 5),
    ];
    let places = order(&queue, &Ranking::default());
    assert_eq!(ids(&places), [4, 3, 2, 5, 1]);
    assert_eq!(places[4].to_string(), "5 of 5 in the queue, 3 of a higher priority before it");
    let line = told(&queue[0], &places[4], Timestamp(60_010));
    let expected = "5 of 5 in the queue, 3 of a higher priority before it, for 1 min, given up in \
                    118 min: fleet_at_capacity: b: 4 GiB of memory needed, 1 GiB free";
    assert_eq!(line, expected);
}

#[test]
fn the_ranking_is_a_policy_that_names_each_once() {
    use Priority::{Drain, Maintenance, Operator};
    let operators = Ranking::new([Operator, Maintenance, Drain]).unwrap();
    let queue = [waiting(1, Maintenance, 10), waiting(2, Operator, 20)];
    assert_eq!(ids(&order(&queue, &operators)), [2, 1]);
    assert_eq!(Ranking::new([Drain, Drain, Operator]), Err(RankedTwice(Drain)));
    assert_eq!(Ranking::new([Drain, Operator, Operator]), Err(RankedTwice(Operator)));
    for priority in Priority::ALL {
        assert_eq!(Priority::from_label(priority.label()), Some(*priority));
    }
}

#[test]
fn who_waits_for_its_own_job_only_is_told_from_who_waits_for_room() {
    let note = note_of_own_limit("4c", 2, 2);
    assert_eq!(note, "max_parallel: 2 of 2 migrations of 4c are at it");
    assert!(waits_for_own_limit(&note));
    assert!(!waits_for_own_limit(&waiting(1, Priority::Operator, 1).note));
}

fn limits() -> Limits {
    let transferring = Caps { fleet: 5, per_source: 2, per_destination: 3 };
    let preparing = Caps { fleet: 8, per_source: 4, per_destination: 2 };
    Limits { preparing, transferring, own_outbound: BTreeMap::new() }
}

fn wants(number: u128, kind: Kind, source: &str, destination: &str) -> Wanted {
    Wanted { id: id(number), source: host(source), destination: host(destination), kind }
}

fn holds(number: u128, kind: Kind, source: &str, destination: &str) -> Holder {
    let Wanted { id, source, destination, kind } = wants(number, kind, source, destination);
    Holder { id, source, destination, kind, since: Timestamp(number.try_into().unwrap()) }
}

#[test]
fn one_drain_does_not_fill_the_slots_of_the_fleet() {
    let mut wanted: Vec<Wanted> =
        (1..=20).map(|n| wants(n, Kind::Transferring, "a", ["c", "d"][n as usize % 2])).collect();
    wanted.push(wants(21, Kind::Transferring, "b", "c"));
    wanted.push(wants(22, Kind::Transferring, "b", "d"));
    let granted = grant(&limits(), &[], &wanted, Timestamp(100));
    assert_eq!(granted.go, [1, 2, 21, 22].map(id));
    let (_, full) = &granted.wait[0];
    assert_eq!(full.len(), 1);
    assert_eq!(full[0].to_string(), "2 of 2 transferring from a");
}

#[test]
fn a_host_says_itself_how_many_may_leave_it() {
    let own_outbound = BTreeMap::from([(host("a"), 1), (host("b"), 3)]);
    let limits = Limits { own_outbound, ..limits() };
    let of = |n, source| wants(n, Kind::Transferring, source, if n % 2 == 0 { "d" } else { "e" });
    let wanted =
        [of(1, "a"), of(2, "a"), of(3, "b"), of(4, "b"), of(5, "b"), of(6, "c"), of(7, "b")];
    let granted = grant(&limits, &[], &wanted, Timestamp(100));
    assert_eq!(granted.go, [1, 3, 4, 5, 6].map(id));
    let told: Vec<String> =
        granted.wait.iter().map(|(_, full)| full.last().unwrap().to_string()).collect();
    assert_eq!(told[0], "1 of 1 transferring from a");
    // The receiver's slot is no link of the source: its own word does not count there.
    let prepares = [wants(8, Kind::Preparing, "a", "d"), wants(9, Kind::Preparing, "a", "e")];
    assert_eq!(grant(&limits, &[], &prepares, Timestamp(100)).go, [8, 9].map(id));
}

#[test]
fn a_prepared_receiver_waits_while_the_link_is_busy_and_holds_only_its_own_slot() {
    let holders = [
        holds(1, Kind::Transferring, "a", "c"),
        holds(2, Kind::Transferring, "a", "d"),
        holds(3, Kind::Preparing, "a", "c"),
    ];
    let wanted = [wants(3, Kind::Transferring, "a", "c"), wants(4, Kind::Preparing, "a", "c")];
    let granted = grant(&limits(), &holders, &wanted, Timestamp(100));
    assert_eq!(granted.go, [id(4)]);
    let since = Some(Timestamp(2));
    let limit = Limit::Source(host("a"));
    let full = Full { limit, kind: Kind::Transferring, running: 2, max: 2, since };
    assert_eq!(granted.wait, [(id(3), vec![full])]);
    let freed = grant(&limits(), &holders[1..], &wanted, Timestamp(100));
    assert_eq!(freed.go, [id(3), id(4)]);
}

#[test]
fn every_limit_that_is_in_the_way_is_named() {
    let none = Caps { fleet: 0, per_source: 0, per_destination: 0 };
    let own_outbound = BTreeMap::new();
    let limits = Limits { preparing: none, transferring: Caps::NONE, own_outbound };
    let granted = grant(&limits, &[], &[wants(1, Kind::Preparing, "a", "b")], Timestamp(1));
    let told: Vec<String> = granted.wait[0].1.iter().map(ToString::to_string).collect();
    let expected =
        ["0 of 0 preparing in the fleet", "0 of 0 preparing from a", "0 of 0 preparing to b"];
    assert_eq!(told, expected);
}

proptest! {
    #[test]
    fn the_order_of_the_rows_never_matters(
        rows in prop::collection::vec((0usize..3, 0u64..5), 0..20),
        turn in 0usize..20,
    ) {
        let queue: Vec<Waiting> = (0u128..)
            .zip(rows)
            .map(|(number, (priority, asked))| waiting(number, Priority::ALL[priority], asked))
            .collect();
        let places = order(&queue, &Ranking::default());
        let mut turned = queue.clone();
        turned.rotate_left(turn % queue.len().max(1));
        prop_assert_eq!(&order(&turned, &Ranking::default()), &places);
        let positions: Vec<u32> = places.iter().map(|place| place.position).collect();
        prop_assert!(positions.iter().copied().eq(1..=u32::try_from(queue.len()).unwrap()));
    }

    /// Whoever wants what: no limit is passed, and nobody waits for a limit that is not reached.
    #[test]
    fn slots_are_never_given_above_a_limit(
        wanted in prop::collection::vec((any::<bool>(), 0usize..3, 0usize..3), 0..40),
    ) {
        let names = ["a", "b", "c"];
        let kind = |transfers| if transfers { Kind::Transferring } else { Kind::Preparing };
        let wanted: Vec<Wanted> = (0u128..)
            .zip(wanted)
            .map(|(n, (transfers, from, to))| wants(n, kind(transfers), names[from], names[to]))
            .collect();
        let granted = grant(&limits(), &[], &wanted, Timestamp(1));
        prop_assert_eq!(granted.go.len() + granted.wait.len(), wanted.len());
        let gone: Vec<&Wanted> = wanted.iter().filter(|one| granted.go.contains(&one.id)).collect();
        for (kind, caps) in
            [(Kind::Preparing, limits().preparing), (Kind::Transferring, limits().transferring)]
        {
            let of = |test: &dyn Fn(&Wanted) -> bool| {
                u32::try_from(gone.iter().filter(|one| one.kind == kind && test(one)).count())
            };
            prop_assert!(of(&|_| true).unwrap() <= caps.fleet);
            for name in names {
                prop_assert!(of(&|one| one.source == host(name)).unwrap() <= caps.per_source);
                let to = of(&|one| one.destination == host(name)).unwrap();
                prop_assert!(to <= caps.per_destination);
            }
        }
        for (_, full) in &granted.wait {
            prop_assert!(full.iter().all(|one| one.running >= one.max));
        }
    }
}
