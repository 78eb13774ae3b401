//! What empties hosts.

use futures::future::join_all;
use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::drain::{self, Drain, Goal};
use vmferry_planner_core::lifecycle::emptiness::Presence;
use vmferry_planner_core::lifecycle::job::{self, Job};
use vmferry_planner_core::lifecycle::request::{Asked, Denied};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, EmptyingId, Policy};
use vmferry_planner_core::maintenance::{
    Assignment, Crossing, Left, Live, Mode, PinsToSource, Plan, Strategy, Workload,
};
use vmferry_planner_core::placement::Needs;
use vmferry_planner_core::queue::Ranking;
use vmferry_planner_core::queue::slot::{Caps, Limits};
use vmferry_types::{DrainId, JobId, Percent, Seq, Timestamp, VmId};

use super::{MEMORY, NOW, NOW_US, admitted, grant, host, id, known_vm, power, request, room};
use crate::store::{
    Admission, AdmitPower, AskHost, BegunFor, Commit, Cordon, EmptyingChange, EmptyingFilter,
    EmptyingRow, FromQueue, HostAnswer, HostDone, HostRow, NewEmptying, NewMigration, NewPower,
    PowerKind, QueueStart, QueuedStart, Refused, SavedHost, Slot, Store, TakeEmptying, TakeOver,
    Which,
};

fn policy() -> Policy {
    Policy {
        strategy: Strategy::PreferLive,
        max_parallel: std::num::NonZeroU32::new(2).unwrap(),
        reserve_cpu_percent: Percent::default(),
        reserve_memory_percent: Percent::default(),
        crossing: Crossing::Refused,
        pins: PinsToSource::Hold,
        dry_run: false,
    }
}

async fn known_host(store: &dyn Store) {
    let row = HostRow {
        id: host("a"),
        name: "host-a".to_owned(),
        boot_id: "boot".to_owned(),
        agent_address: "a:1".to_owned(),
        last_report: NOW,
        declared_dead: None,
    };
    assert_eq!(store.save_host(&row).await.unwrap(), SavedHost::Saved);
}

fn ask(asked: Asked, opens: Option<NewEmptying>) -> AskHost {
    AskHost {
        host: host("a"),
        asked,
        presence: Presence::Heard,
        by: "alice".to_owned(),
        cordon: None,
        opens,
    }
}

/// A job that is to move VM 1, begun at once.
fn job(of: u128) -> NewEmptying {
    let assignment = Assignment {
        vm: VmId::from_u128(1),
        destination: host("b"),
        mode: Mode::Live,
        left: Left { memory: MEMORY, cpu: vmferry_types::MilliCpu(1) },
        rejected: vec![],
    };
    let plan = Plan {
        assignments: vec![assignment],
        blocked: vec![],
        left: std::collections::BTreeMap::new(),
        closed: vec![],
    };
    let workload = Workload {
        vm: VmId::from_u128(1),
        host: Some(host("a")),
        demand: vmferry_planner_core::fleet::Demand::default(),
        live: Live::Able,
        needs: Needs::default(),
    };
    let opening = job::Opening {
        id: JobId::from_u128(of),
        host: host("a"),
        policy: policy(),
        by: "alice".to_owned(),
        at: NOW,
    };
    let emptying = Emptying::Job(Job::open(opening, &plan, &[workload]));
    let event = EmptyingEvent::Job(job::Event::ExecuteRequested { at: NOW });
    let after = emptying.apply(&event).unwrap();
    let changes = vec![EmptyingChange { event, after }];
    NewEmptying { emptying, changes, boot_id: "boot".to_owned() }
}

fn drained(of: u128, goal: Goal) -> NewEmptying {
    let opening = drain::Opening {
        id: DrainId::from_u128(of),
        host: host("a"),
        goal,
        policy: policy(),
        by: "alice".to_owned(),
        at: NOW,
    };
    NewEmptying {
        emptying: Emptying::Drain(Drain::open(opening)),
        changes: Vec::new(),
        boot_id: "boot".to_owned(),
    }
}

async fn done(store: &dyn Store, ask: &AskHost) -> HostDone {
    match store.ask_host(ask, NOW_US).await.unwrap() {
        HostAnswer::Done(done) => *done,
        other @ (HostAnswer::Denied(_) | HostAnswer::UnknownHost) => panic!("{other:?}"),
    }
}

async fn taken(store: &dyn Store, id: EmptyingId) -> EmptyingRow {
    match store.take_over_emptying(id, "me", Timestamp(NOW.value() + 10), NOW).await.unwrap() {
        TakeEmptying::Taken(row) => *row,
        other @ (TakeEmptying::Busy | TakeEmptying::Ended) => panic!("{other:?}"),
    }
}

fn change(row: &EmptyingRow, event: EmptyingEvent) -> EmptyingChange {
    let after = row.emptying.apply(&event).unwrap();
    EmptyingChange { event, after }
}

pub async fn one_word_at_a_time_empties_a_host(store: &dyn Store) {
    known_host(store).await;
    let asked: Vec<AskHost> =
        (1..=4).map(|of| ask(Asked::Drain, Some(drained(of, Goal::Drain)))).collect();
    let all = join_all(asked.iter().map(|one| store.ask_host(one, NOW_US))).await;
    let opened: Vec<_> = all
        .iter()
        .filter_map(|answer| match answer.as_ref().unwrap() {
            HostAnswer::Done(done) => done.opened.as_ref().map(EmptyingRow::id),
            HostAnswer::Denied(_) | HostAnswer::UnknownHost => None,
        })
        .collect();
    assert_eq!(opened.len(), 1);
    let EmptyingId::Drain(first) = opened[0] else { panic!("{opened:?}") };
    let second = store.ask_host(&ask(Asked::Execute, Some(job(9))), NOW_US).await.unwrap();
    assert_eq!(second, HostAnswer::Denied(Denied::Draining { host: host("a"), drain: first }));
    let cordons = store.cordons(NOW).await.unwrap();
    assert_eq!(cordons.len(), 1);
    assert_eq!(cordons[0].owner, format!("drain:{first}"));
    assert_eq!(store.lifecycles().await.unwrap()[&host("a")], Lifecycle::Draining);
}

pub async fn an_operators_word_lifts_the_cordon_and_cancels_the_drain(store: &dyn Store) {
    known_host(store).await;
    let opened = done(store, &ask(Asked::Drain, Some(drained(1, Goal::Drain)))).await.opened;
    let held = Cordon {
        host: host("a"),
        owner: "bob".to_owned(),
        reason: "disks".to_owned(),
        since: NOW,
        expires: None,
    };
    let cordon = AskHost { cordon: Some(held), ..ask(Asked::Cordon, None) };
    done(store, &cordon).await;
    let done = done(store, &ask(Asked::Uncordon, None)).await;
    assert_eq!(done.ended.unwrap().emptying.label(), "CANCELLED");
    let left = store.cordons(NOW).await.unwrap();
    assert_eq!(left.iter().map(|of| of.owner.as_str()).collect::<Vec<_>>(), ["bob"]);
    assert!(store.lifecycles().await.unwrap().is_empty());
    let row = store.emptying(opened.unwrap().id()).await.unwrap().unwrap();
    assert!(row.ended_us.is_some() && !row.emptying.is_driven());
}

pub async fn a_migration_is_begun_with_the_row_that_names_it_or_not_at_all(store: &dyn Store) {
    known_host(store).await;
    let vm = known_vm(store, 1).await;
    let opened = done(store, &ask(Asked::Execute, Some(job(1)))).await.opened.unwrap();
    let row = taken(store, opened.id()).await;
    let begun = |row: &EmptyingRow, of| {
        let event = job::Event::Begun { vm: vm.id, migration: id(of) };
        let change = change(row, EmptyingEvent::Job(event));
        NewMigration {
            begun_for: Some(Box::new(BegunFor { row: row.clone(), change })),
            ..request(of, &vm, Ok(grant("b", room(9))))
        }
    };
    // One that lost its lease begins nothing.
    let stale = begun(&opened, 10);
    assert_eq!(store.admit(&stale, NOW_US).await.unwrap(), Admission::Raced);
    assert!(store.migration(id(10)).await.unwrap().is_none());
    assert!(store.reservations().await.unwrap().is_empty());
    let new = begun(&row, 11);
    assert!(matches!(store.admit(&new, NOW_US).await.unwrap(), Admission::Admitted(_)));
    let after = store.emptying(row.id()).await.unwrap().unwrap();
    assert_eq!(after.emptying.open_migrations(), [(vm.id, id(11))]);
    assert_eq!(after.seq, row.seq.next());
}

pub async fn a_planner_that_lost_an_emptying_lands_no_write(store: &dyn Store) {
    known_host(store).await;
    let opened = done(store, &ask(Asked::Drain, Some(drained(1, Goal::Retire)))).await.opened;
    let mine = taken(store, opened.unwrap().id()).await;
    let later = Timestamp(NOW.value() + 11);
    let busy = store.take_over_emptying(mine.id(), "other", later, NOW).await.unwrap();
    assert_eq!(busy, TakeEmptying::Busy);
    let theirs = store.take_over_emptying(mine.id(), "other", later, later).await.unwrap();
    assert!(matches!(theirs, TakeEmptying::Taken(_)));
    let event = drain::Event::Appeared { vm: VmId::from_u128(1), at: NOW };
    let changes = [change(&mine, EmptyingEvent::Drain(event))];
    assert_eq!(store.commit_emptying(&mine, &changes, NOW_US).await.unwrap(), Commit::Raced);
    assert!(!store.renew_emptying_lease(&mine, "me", later).await.unwrap());
}

pub async fn the_log_of_an_emptying_replays_to_the_row(store: &dyn Store) {
    known_host(store).await;
    let opened = done(store, &ask(Asked::Execute, Some(job(1)))).await.opened.unwrap();
    let row = taken(store, opened.id()).await;
    let event = job::Event::CancelRequested { by: "bob".to_owned(), at: NOW };
    let changes = [change(&row, EmptyingEvent::Job(event))];
    let Commit::Done(last) = store.commit_emptying(&row, &changes, NOW_US).await.unwrap() else {
        panic!("raced");
    };
    let log = store.emptying_log(row.id()).await.unwrap();
    let mut replayed: Emptying = serde_json::from_str(&log[0].body).unwrap();
    let mut seq = Seq::FIRST;
    for entry in &log[1..] {
        seq = seq.next();
        assert_eq!(entry.seq, seq);
        let event: EmptyingEvent = serde_json::from_str(&entry.body).unwrap();
        replayed = replayed.apply(&event).unwrap();
        assert_eq!(entry.phase, replayed.label());
    }
    assert_eq!((replayed, seq), (last.emptying.clone(), last.seq));
    // Over: the cordon is lifted, and nobody drives it.
    assert!(store.cordons(NOW).await.unwrap().is_empty());
    let driven = EmptyingFilter { host: None, which: Which::Driven };
    assert!(store.emptyings(&driven).await.unwrap().is_empty());
    assert_eq!(store.emptyings(&EmptyingFilter::default()).await.unwrap(), [*last]);
}

pub async fn a_deleted_host_comes_back_only_from_another_boot(store: &dyn Store) {
    known_host(store).await;
    store.hear_hosts(&[host("a")], "one", NOW).await.unwrap();
    let denied = store.ask_host(&ask(Asked::Delete, None), NOW_US).await.unwrap();
    assert_eq!(denied, HostAnswer::Denied(Denied::NotRetired { host: host("a") }));
    let dead = AskHost {
        presence: Presence::Dead { how: "smoke".to_owned() },
        ..ask(Asked::Delete, None)
    };
    done(store, &dead).await;
    assert!(store.hosts().await.unwrap().is_empty());
    let again = HostRow {
        id: host("a"),
        name: "host-a".to_owned(),
        boot_id: "boot".to_owned(),
        agent_address: "a:1".to_owned(),
        last_report: NOW,
        declared_dead: None,
    };
    assert_eq!(store.save_host(&again).await.unwrap(), SavedHost::Deleted { at: NOW });
    let booted = HostRow { boot_id: "next".to_owned(), ..again };
    assert_eq!(store.save_host(&booted).await.unwrap(), SavedHost::Saved);
    // Who heard it before is forgotten with it.
    assert_eq!(store.heard_by_another(&host("a"), "another").await.unwrap(), None);
}

pub async fn links_are_given_in_order_and_kept_to_the_end(store: &dyn Store) {
    let limits = Limits {
        preparing: Caps::NONE,
        transferring: Caps { fleet: 9, per_source: 1, per_destination: 9 },
        own_outbound: std::collections::BTreeMap::new(),
    };
    let ranking = Ranking::default();
    let mut rows = Vec::new();
    for of in [1, 2] {
        let vm = known_vm(store, of).await;
        rows.push(admitted(store, 10 + of, &vm).await);
    }
    let now = |later| Timestamp(NOW.value() + later);
    let slot = |row, at| store.take_slot(row, &limits, &ranking, at);
    assert_eq!(slot(&rows[0], now(0)).await.unwrap(), Slot::Held);
    let Slot::Full(full) = slot(&rows[1], now(1)).await.unwrap() else { panic!("two at once") };
    assert_eq!(full[0].to_string(), "1 of 1 transferring from a");
    // Asked again, by whoever drives it by then, it has it still.
    assert_eq!(slot(&rows[0], now(2)).await.unwrap(), Slot::Held);
    let cancelled =
        super::commit(store, &rows[0], vmferry_planner_core::migration::Event::CancelRequested)
            .await;
    assert!(cancelled.ended_us.is_none());
    // What goes back sends nothing any more. The driver before takes no link for the one after.
    let until = Timestamp(NOW.value() + 10_000);
    let TakeOver::Taken(next) = store.take_over(id(12), "next", until, NOW).await.unwrap() else {
        panic!("not taken");
    };
    assert_eq!(slot(&rows[1], now(3)).await.unwrap(), Slot::Full(Vec::new()));
    assert_eq!(slot(&next, now(3)).await.unwrap(), Slot::Held);
    assert_eq!(slot(&rows[1], now(4)).await.unwrap(), Slot::Full(Vec::new()));
}

pub async fn a_start_waits_once_and_starts_under_the_same_id(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let lost = crate::store::Lost {
        vm: vm.id,
        host: host("a"),
        generation: vm.generation,
        claim: vm.claim,
        cause: "signal 9".to_owned(),
    };
    assert!(store.mark_lost(&lost, NOW).await.unwrap());
    let start = |of| QueuedStart {
        id: id(of),
        request: Some(format!("start-{of}")),
        vm: vm.id,
        asked_host: None,
        priority: vmferry_planner_core::queue::Priority::Operator,
        seq: Seq::FIRST,
        asked_us: NOW_US,
        blocked_since: NOW,
        deadline: Timestamp(NOW.value() + 100),
        note: "full".to_owned(),
        ended_us: None,
        outcome: String::new(),
    };
    let QueueStart::Queued(first) = store.queue_start(&start(20), NOW).await.unwrap() else {
        panic!("not queued");
    };
    assert_eq!(store.queue_start(&start(20), NOW).await.unwrap(), QueueStart::Known(first.clone()));
    let second = store.queue_start(&start(21), NOW).await.unwrap();
    assert_eq!(second, QueueStart::Refused(Refused::InFlight { admission: id(20) }));
    assert!(store.note_queued_start(first.id, first.seq, "fuller").await.unwrap());
    assert!(!store.note_queued_start(first.id, first.seq, "late").await.unwrap());
    let waiting = store.queued_starts().await.unwrap();
    assert_eq!((waiting[0].note.as_str(), waiting[0].blocked_since), ("fuller", NOW));
    // A blocker may be in an agent's words.
    assert!(store.note_queued_start(first.id, waiting[0].seq, "no \0 bridge").await.unwrap());
    let new = NewPower { from_queue: FromQueue::Yes, ..power(20, &vm, PowerKind::Start) };
    assert!(matches!(store.admit_power(&new, NOW_US).await.unwrap(), AdmitPower::Admitted(_)));
    assert!(store.queued_starts().await.unwrap().is_empty());
    let waited = store.queued_start(id(20)).await.unwrap().unwrap();
    assert!(!store.end_queued_start(waited.id, waited.seq, "late", NOW_US).await.unwrap());
    assert_eq!(store.vm(vm.id).await.unwrap().unwrap().admission, Some(id(20)));
}

pub async fn a_start_that_is_given_up_frees_its_vm(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let lost = crate::store::Lost {
        vm: vm.id,
        host: host("a"),
        generation: vm.generation,
        claim: vm.claim,
        cause: "signal 9".to_owned(),
    };
    assert!(store.mark_lost(&lost, NOW).await.unwrap());
    let start = QueuedStart {
        id: id(20),
        request: None,
        vm: vm.id,
        asked_host: Some(host("b")),
        priority: vmferry_planner_core::queue::Priority::Operator,
        seq: Seq::FIRST,
        asked_us: NOW_US,
        blocked_since: NOW,
        deadline: NOW,
        note: "full".to_owned(),
        ended_us: None,
        outcome: String::new(),
    };
    assert!(matches!(store.queue_start(&start, NOW).await.unwrap(), QueueStart::Queued(_)));
    assert!(
        store.end_queued_start(id(20), start.seq, "too late: no \0 bridge", NOW_US).await.unwrap()
    );
    let row = store.vm(vm.id).await.unwrap().unwrap();
    assert_eq!(row.admission, None);
    assert!(row.error.starts_with("too late: no "), "{}", row.error);
}
