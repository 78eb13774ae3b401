//! What every store must do, written once, for every store there is.
//!
//! Each function is one promise. [`store_contract!`](crate::store_contract) makes a test of each.

#![expect(clippy::unwrap_used, clippy::panic, missing_docs, reason = "these are tests")]

use vmferry_planner_core::migration::{
    AutoConverge, Downgrade, Event, Gates, Listener, Migration, Opening, Refusal, Terms,
};
use vmferry_types::{
    Bytes, BytesPerSec, Claim, Generation, HostId, Method, MigrationId, MilliCpu, Millis,
    PhaseLabel, PowerState, Seq, Timestamp, VmId,
};

use super::{
    Admission, AdmitPower, Adopted, Commit, Cordon, Defined, Ends, Filter, Followed, Grant,
    Granted, HostRow, LogRow, Lost, MigrationRow, NewMigration, NewPower, Notes, OnlyOpen,
    PowerAction, PowerKind, PowerPhase, Refused, Room, SavedHost, Store, TakeOver, TakePower,
    VmRow,
};

/// Makes a test of each promise, for the store that `$open` returns with what keeps it.
#[macro_export]
macro_rules! store_contract {
    ($open:path) => {
        $crate::store_contract! { $open:
            admission_reserves_both_ends_and_takes_the_next_claim,
            admission_refuses_what_does_not_fit,
            admission_refuses_a_vm_that_does_not_run,
            one_admission_at_a_time,
            admission_refuses_a_vm_that_moved_on,
            admission_refuses_a_cordoned_host_until_the_cordon_ends,
            a_destination_receives_no_more_than_its_cap,
            admission_keeps_to_the_pin_of_the_definition,
            the_same_request_is_answered_with_the_same_migration,
            a_write_lands_only_on_the_row_that_it_was_decided_on,
            a_row_reads_back_as_it_was_written,
            the_log_replays_to_the_row,
            a_driver_that_takes_over_fences_the_one_before,
            a_claim_is_above_every_claim_that_an_agent_has_seen,
            an_end_closes_reservations_once_and_frees_the_vm,
            a_cancel_and_a_step_forward_do_not_both_land,
            a_queued_migration_holds_nothing_until_it_is_granted,
            a_start_elsewhere_takes_the_next_generation,
            a_start_or_stop_ends_once_and_under_its_own_claim,
            a_vm_is_lost_only_under_its_owner_and_with_nothing_under_way,
            a_vm_follows_only_what_is_newer,
            names_are_unique_where_a_person_gives_them,
        }
    };
    ($open:path: $($name:ident),+ $(,)?) => {
        $(#[tokio::test]
        async fn $name() {
            let (store, _keep) = $open().await;
            $crate::store::contract::$name(store.as_ref()).await;
        })+
    };
}

const NOW_US: u64 = 1_000_000_000;
const NOW: Timestamp = Timestamp(NOW_US / 1000);
const MEMORY: Bytes = Bytes(1 << 30);

fn host(name: &str) -> HostId {
    name.parse().unwrap()
}

fn vm_id(of: u128) -> VmId {
    VmId::from_u128(of)
}

fn id(of: u128) -> MigrationId {
    MigrationId::from_u128(of)
}

fn vm(of: u128, name: &str) -> VmRow {
    VmRow {
        id: vm_id(of),
        name: name.to_owned(),
        host: Some(host("a")),
        power: PowerState::Running,
        generation: Generation::FIRST,
        claim: Claim::FIRST,
        admission: None,
        error: String::new(),
        definition: String::new(),
        resolved_machine: "pc-q35-10.0".to_owned(),
        memory: MEMORY,
        cpu: MilliCpu(1000),
    }
}

async fn known_vm(store: &dyn Store, of: u128) -> VmRow {
    let row = vm(of, &format!("vm{of}"));
    assert_eq!(store.adopt_vm(&row, NOW).await.unwrap(), Adopted::New);
    row
}

fn opened(of: u128, vm: &VmRow) -> Migration {
    Migration::open(Opening {
        id: id(of),
        vm: vm.id,
        source: host("a"),
        method: Method::Precopy,
        terms: Terms {
            asked_destination: None,
            hold_limit: Millis(1),
            downtime_limit: Millis(1),
            transfer_timeout: Millis(1),
            stall_limit: Millis(1),
            switchover_limit: Millis(1),
            max_bandwidth: BytesPerSec(0),
            auto_converge: AutoConverge::Off,
            gates: Gates::OPEN,
            downgrade: Downgrade::Never,
        },
        generation: vm.generation,
        deadline: Timestamp(u64::MAX),
    })
    .unwrap()
}

/// Room for `vms` VMs beside those that are reserved.
fn room(vms: usize) -> Room {
    Room::new(move |reserved| {
        if reserved.len() < vms { Ok(()) } else { Err(format!("{} reserved", reserved.len())) }
    })
}

fn grant(destination: &str, room: Room) -> Grant {
    Grant { destination: host(destination), room, inbound_max: 2 }
}

fn request(of: u128, vm: &VmRow, grant: Result<Grant, String>) -> NewMigration {
    NewMigration {
        migration: opened(of, vm),
        vm_name: vm.name.clone(),
        request: Some(format!("request-{of}")),
        notes: Notes { memory_bytes: MEMORY.value(), cpu_milli: 1000, ..Notes::default() },
        grant,
    }
}

async fn admitted(store: &dyn Store, of: u128, vm: &VmRow) -> MigrationRow {
    let new = request(of, vm, Ok(grant("b", room(9))));
    match store.admit(&new, NOW_US).await.unwrap() {
        Admission::Admitted(row) => *row,
        other @ (Admission::Known(_) | Admission::Refused(_)) => panic!("{other:?}"),
    }
}

async fn refusal(store: &dyn Store, new: &NewMigration) -> Refused {
    match store.admit(new, NOW_US).await.unwrap() {
        Admission::Refused(refused) => refused,
        other @ (Admission::Known(_) | Admission::Admitted(_)) => panic!("{other:?}"),
    }
}

async fn commit(store: &dyn Store, row: &MigrationRow, event: Event) -> MigrationRow {
    let entries = row.migration.advance(event).unwrap();
    match store.commit(row, &entries, &row.notes, NOW_US + 1).await.unwrap() {
        Commit::Done(row) => *row,
        Commit::Raced => panic!("raced"),
    }
}

fn armed() -> Event {
    Event::ReceiverArmed { listener: Listener { address: "10.0.0.2".to_owned(), port: 49_152 } }
}

pub async fn admission_reserves_both_ends_and_takes_the_next_claim(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    assert_eq!(row.migration.label(), PhaseLabel::Admitted);
    assert_eq!(row.claim, vm.claim.next());
    let reserved = store.reservations().await.unwrap();
    let hosts: Vec<&str> = reserved.iter().map(|of| of.host.as_str()).collect();
    assert_eq!(hosts, ["a", "b"]);
    assert!(reserved.iter().all(|of| of.memory == MEMORY && of.vm == vm.id));
    let after = store.vm(vm.id).await.unwrap().unwrap();
    assert_eq!(after.admission, Some(id(10)));
    assert_eq!(after.claim, row.claim);
    assert_eq!(after.host, Some(host("a")));
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), row);
}

pub async fn admission_refuses_what_does_not_fit(store: &dyn Store) {
    let (first, second) = (known_vm(store, 1).await, known_vm(store, 2).await);
    let fits = request(10, &first, Ok(grant("b", room(1))));
    assert!(matches!(store.admit(&fits, NOW_US).await.unwrap(), Admission::Admitted(_)));
    let full = request(11, &second, Ok(grant("b", room(1))));
    assert_eq!(refusal(store, &full).await, Refused::NoRoom { note: "1 reserved".to_owned() });
    assert_eq!(store.vm(second.id).await.unwrap().unwrap().admission, None);
    assert_eq!(store.migration(id(11)).await.unwrap(), None);
}

pub async fn admission_refuses_a_vm_that_does_not_run(store: &dyn Store) {
    let row = VmRow { power: PowerState::Stopped, ..vm(1, "vm1") };
    store.adopt_vm(&row, NOW).await.unwrap();
    let new = request(10, &row, Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &new).await, Refused::Power { power: PowerState::Stopped });
    let unknown = request(11, &vm(2, "vm2"), Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &unknown).await, Refused::UnknownVm);
}

pub async fn one_admission_at_a_time(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    admitted(store, 10, &vm).await;
    let second = request(11, &vm, Ok(grant("c", room(9))));
    assert_eq!(refusal(store, &second).await, Refused::InFlight { admission: id(10) });
    let stop = store.admit_power(&power(12, &vm, PowerKind::Stop), NOW_US).await.unwrap();
    assert_eq!(stop, AdmitPower::Refused(Refused::InFlight { admission: id(10) }));
}

pub async fn admission_refuses_a_vm_that_moved_on(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let mut old = request(10, &vm, Ok(grant("b", room(9))));
    old.migration.generation = Generation::FIRST.next();
    assert!(matches!(refusal(store, &old).await, Refused::Moved { .. }));
    let mut elsewhere = request(10, &vm, Ok(grant("b", room(9))));
    elsewhere.migration.source = host("c");
    assert!(matches!(refusal(store, &elsewhere).await, Refused::Moved { .. }));
}

pub async fn admission_refuses_a_cordoned_host_until_the_cordon_ends(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let cordon = Cordon {
        host: host("b"),
        owner: "operator".to_owned(),
        reason: "disks".to_owned(),
        since: NOW,
        expires: None,
    };
    store.cordon(&cordon).await.unwrap();
    let new = request(10, &vm, Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &new).await, Refused::Cordoned { host: host("b") });
    store.cordon(&Cordon { expires: Some(NOW), ..cordon.clone() }).await.unwrap();
    assert!(store.cordons(NOW).await.unwrap().is_empty());
    store.cordon(&cordon).await.unwrap();
    assert_eq!(store.cordons(NOW).await.unwrap(), [cordon]);
    store.uncordon(&host("b"), "operator").await.unwrap();
    assert!(matches!(store.admit(&new, NOW_US).await.unwrap(), Admission::Admitted(_)));
}

pub async fn a_destination_receives_no_more_than_its_cap(store: &dyn Store) {
    let vms = [known_vm(store, 1).await, known_vm(store, 2).await, known_vm(store, 3).await];
    admitted(store, 10, &vms[0]).await;
    let second = admitted(store, 11, &vms[1]).await;
    let third = request(12, &vms[2], Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &third).await, Refused::InboundCap { host: host("b"), inbound: 2 });
    let refused = Event::Refused { blockers: Vec::new() };
    let mut row = commit(store, &second, refused).await;
    while row.ended_us.is_none() {
        row = commit(store, &row, gone()).await;
    }
    assert!(matches!(store.admit(&third, NOW_US).await.unwrap(), Admission::Admitted(_)));
}

/// The proof that ends a rollback before the transfer began.
fn gone() -> Event {
    use vmferry_planner_core::migration::{GoneProof, ProofKind, Ran};
    let proof = GoneProof {
        kind: ProofKind::NeverStarted,
        host: host("b"),
        boot_id: "boot".to_owned(),
        pid: 0,
        start_time: 0,
        ended: String::new(),
        at: NOW,
        stderr_tail: String::new(),
    };
    Event::ReceiverGone { proof, ran: Ran::Never }
}

pub async fn admission_keeps_to_the_pin_of_the_definition(store: &dyn Store) {
    let definition =
        format!("name = \"vm1\"\nuuid = \"{}\"\nmemory = \"1GiB\"\npin = \"a\"\n", vm_id(1));
    let row = VmRow { definition, ..vm(1, "vm1") };
    store.adopt_vm(&row, NOW).await.unwrap();
    let new = request(10, &row, Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &new).await, Refused::Pinned { pin: host("a") });
}

pub async fn the_same_request_is_answered_with_the_same_migration(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let mut again = request(11, &vm, Ok(grant("b", room(9))));
    again.request = Some("request-10".to_owned());
    assert_eq!(store.admit(&again, NOW_US).await.unwrap(), Admission::Known(Box::new(row.clone())));
    assert_eq!(store.migration_of_request("request-10").await.unwrap(), Some(row));
    assert_eq!(store.migration_of_request("request-99").await.unwrap(), None);
}

pub async fn a_write_lands_only_on_the_row_that_it_was_decided_on(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let entries = row.migration.advance(armed()).unwrap();
    let stale_seq = MigrationRow { seq: Seq::from_stored(9), ..row.clone() };
    let stale_claim = MigrationRow { claim: Claim::from_stored(1), ..row.clone() };
    for stale in [stale_seq, stale_claim] {
        let raced = store.commit(&stale, &entries, &row.notes, NOW_US).await.unwrap();
        assert_eq!(raced, Commit::Raced);
    }
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), row);
    assert_eq!(store.log(id(10)).await.unwrap().len(), 2);
    let after = commit(store, &row, armed()).await;
    assert_eq!(after.seq, row.seq.next());
    let again = store.commit(&row, &entries, &row.notes, NOW_US).await.unwrap();
    assert_eq!(again, Commit::Raced);
}

pub async fn a_row_reads_back_as_it_was_written(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let entries = row.migration.advance(armed()).unwrap();
    let notes = Notes { pause_us: 7, source_boot: "boot".to_owned(), ..row.notes.clone() };
    let Commit::Done(after) = store.commit(&row, &entries, &notes, NOW_US + 1).await.unwrap()
    else {
        panic!("raced");
    };
    let read = store.migration(id(10)).await.unwrap().unwrap();
    assert_eq!(read, *after);
    assert_eq!(read.migration, entries[0].after);
    assert_eq!(read.notes.pause_us, 7);
}

pub async fn the_log_replays_to_the_row(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let mut row = admitted(store, 10, &vm).await;
    row = commit(store, &row, armed()).await;
    row = commit(store, &row, Event::SourceStopped).await;
    assert_eq!(replayed(&store.log(id(10)).await.unwrap()), row.migration);
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap().migration, row.migration);
}

fn replayed(log: &[LogRow]) -> Migration {
    let (first, rest) = log.split_first().unwrap();
    assert_eq!(first.event, "opened");
    let mut migration: Migration = serde_json::from_str(&first.body).unwrap();
    for entry in rest {
        let event: Event = serde_json::from_str(&entry.body).unwrap();
        assert_eq!(event.label(), entry.event);
        migration = migration.apply(&event).unwrap();
        assert_eq!(migration.label(), entry.phase);
    }
    migration
}

pub async fn a_driver_that_takes_over_fences_the_one_before(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let until = Timestamp(NOW.value() + 10_000);
    let TakeOver::Taken(first) =
        store.take_over(row.migration.id, "one", until, NOW).await.unwrap()
    else {
        panic!("not taken");
    };
    assert_eq!(first.claim, row.claim.next());
    let busy = store.take_over(id(10), "two", until, NOW).await.unwrap();
    assert_eq!(busy, TakeOver::Busy);
    assert!(store.renew_lease(&first, "one", until).await.unwrap());
    let TakeOver::Taken(second) = store.take_over(id(10), "two", until, until).await.unwrap()
    else {
        panic!("not taken");
    };
    assert!(second.claim > first.claim);
    assert!(!store.renew_lease(&first, "one", until).await.unwrap());
    let entries = first.migration.advance(armed()).unwrap();
    let late = store.commit(&first, &entries, &first.notes, NOW_US).await.unwrap();
    assert_eq!(late, Commit::Raced);
    commit(store, &second, armed()).await;
    store.clear_leases().await.unwrap();
    let anew = store.take_over(id(10), "three", until, NOW).await.unwrap();
    assert!(matches!(anew, TakeOver::Taken(_)));
}

pub async fn a_claim_is_above_every_claim_that_an_agent_has_seen(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    store.raise_claim(vm.id, Claim::from_stored(40), NOW).await.unwrap();
    store.raise_claim(vm.id, Claim::from_stored(30), NOW).await.unwrap();
    let TakeOver::Taken(taken) = store.take_over(row.migration.id, "one", NOW, NOW).await.unwrap()
    else {
        panic!("not taken");
    };
    assert_eq!(taken.claim, Claim::from_stored(41));
}

pub async fn an_end_closes_reservations_once_and_frees_the_vm(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let mut row = commit(store, &row, Event::Refused { blockers: Vec::new() }).await;
    assert_eq!(row.migration.label(), PhaseLabel::RollingBack);
    assert_eq!(store.reservations().await.unwrap().len(), 2);
    row = commit(store, &row, gone()).await;
    assert_eq!(row.migration.label(), PhaseLabel::Aborted);
    assert!(store.reservations().await.unwrap().is_empty());
    assert_eq!(store.vm(vm.id).await.unwrap().unwrap().admission, None);
    assert_eq!(row.migration.advance(gone()).unwrap_err(), Refusal::Stale);
    assert_eq!(store.take_over(id(10), "one", NOW, NOW).await.unwrap(), TakeOver::Ended);
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    assert!(store.migrations(&open).await.unwrap().is_empty());
    assert_eq!(store.migrations(&Filter::default()).await.unwrap().len(), 1);
    admitted(store, 11, &vm).await;
}

pub async fn a_cancel_and_a_step_forward_do_not_both_land(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let row = commit(store, &row, armed()).await;
    let forward = row.migration.advance(Event::SourceStopped).unwrap();
    let cancelled = commit(store, &row, Event::CancelRequested).await;
    assert_eq!(cancelled.migration.label(), PhaseLabel::RollingBack);
    let raced = store.commit(&row, &forward, &row.notes, NOW_US).await.unwrap();
    assert_eq!(raced, Commit::Raced);
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), cancelled);
}

pub async fn a_queued_migration_holds_nothing_until_it_is_granted(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let new = request(10, &vm, Err("full".to_owned()));
    let Admission::Admitted(row) = store.admit(&new, NOW_US).await.unwrap() else {
        panic!("not queued");
    };
    assert_eq!(row.migration.label(), PhaseLabel::Queued);
    assert!(store.reservations().await.unwrap().is_empty());
    let refused = store.grant(&row, &grant("b", room(0)), NOW_US).await.unwrap();
    assert!(matches!(refused, Granted::Refused(Refused::NoRoom { .. })));
    let stale = MigrationRow { seq: Seq::FIRST, ..(*row).clone() };
    assert_eq!(store.grant(&stale, &grant("b", room(9)), NOW_US).await.unwrap(), Granted::Raced);
    let Granted::Done(after) = store.grant(&row, &grant("b", room(9)), NOW_US).await.unwrap()
    else {
        panic!("not granted");
    };
    assert_eq!(after.migration.label(), PhaseLabel::Admitted);
    assert_eq!(store.reservations().await.unwrap().len(), 2);
}

fn power(of: u128, vm: &VmRow, kind: PowerKind) -> NewPower {
    NewPower {
        id: id(of),
        request: None,
        vm: vm.id,
        host: host("a"),
        kind,
        how: "quit".to_owned(),
        deadline_ms: 5,
        memory: MEMORY,
        cpu: MilliCpu(1000),
        room: room(9),
    }
}

async fn power_admitted(store: &dyn Store, new: &NewPower) -> PowerAction {
    match store.admit_power(new, NOW_US).await.unwrap() {
        AdmitPower::Admitted(action) => action,
        other @ (AdmitPower::Known(_) | AdmitPower::Refused(_)) => panic!("{other:?}"),
    }
}

fn ends(phase: PowerPhase, power: PowerState) -> Ends {
    Ends { phase, power, error: String::new(), gone: None, resolved_machine: String::new() }
}

pub async fn a_start_elsewhere_takes_the_next_generation(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let stop = power_admitted(store, &power(20, &row, PowerKind::Stop)).await;
    assert_eq!(stop.generation, Generation::FIRST);
    assert_eq!(store.vm(row.id).await.unwrap().unwrap().power, PowerState::Stopping);
    store.end_power(&stop, &ends(PowerPhase::Done, PowerState::Stopped), NOW_US).await.unwrap();
    let elsewhere = NewPower { host: host("b"), ..power(21, &row, PowerKind::Start) };
    let start = power_admitted(store, &elsewhere).await;
    assert_eq!(start.generation, Generation::FIRST.next());
    assert!(start.claim > stop.claim);
    let after = store.vm(row.id).await.unwrap().unwrap();
    assert_eq!((after.host, after.power), (Some(host("b")), PowerState::Starting));
    assert_eq!(store.reservations().await.unwrap().len(), 1);
}

pub async fn a_start_or_stop_ends_once_and_under_its_own_claim(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let stop = power_admitted(store, &power(20, &row, PowerKind::Stop)).await;
    let TakePower::Taken(claimed) = store.take_over_power(stop.id, "one", NOW, NOW).await.unwrap()
    else {
        panic!("not taken");
    };
    assert!(claimed.claim > stop.claim);
    let end = ends(PowerPhase::Done, PowerState::Stopped);
    assert_eq!(store.end_power(&stop, &end, NOW_US).await.unwrap(), Commit::Raced);
    assert_eq!(store.open_power().await.unwrap().len(), 1);
    assert_eq!(store.end_power(&claimed, &end, NOW_US).await.unwrap(), Commit::Done(()));
    assert_eq!(store.end_power(&claimed, &end, NOW_US).await.unwrap(), Commit::Raced);
    let ended = store.take_over_power(stop.id, "one", NOW, NOW).await.unwrap();
    assert_eq!(ended, TakePower::Ended);
    assert!(store.open_power().await.unwrap().is_empty());
    assert!(store.reservations().await.unwrap().is_empty());
    assert_eq!(store.power(stop.id).await.unwrap().unwrap().phase, PowerPhase::Done);
    let refused = store.admit_power(&power(21, &row, PowerKind::Stop), NOW_US).await.unwrap();
    let stopped = Refused::Power { power: PowerState::Stopped };
    assert_eq!(refused, AdmitPower::Refused(stopped));
}

pub async fn a_vm_is_lost_only_under_its_owner_and_with_nothing_under_way(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let lost = Lost {
        vm: row.id,
        host: host("a"),
        generation: row.generation,
        claim: row.claim,
        cause: "signal 9".to_owned(),
    };
    let other = Lost { host: host("b"), ..lost.clone() };
    let old = Lost { claim: Claim::from_stored(0), ..lost.clone() };
    for not in [other, old] {
        assert!(!store.mark_lost(&not, NOW).await.unwrap(), "{not:?}");
    }
    let moving = known_vm(store, 2).await;
    admitted(store, 10, &moving).await;
    assert!(!store.mark_lost(&Lost { vm: moving.id, ..lost.clone() }, NOW).await.unwrap());
    assert!(store.mark_lost(&lost, NOW).await.unwrap());
    let after = store.vm(row.id).await.unwrap().unwrap();
    assert_eq!((after.power, after.error.as_str()), (PowerState::Lost, "signal 9"));
}

pub async fn a_vm_follows_only_what_is_newer(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let followed = Followed {
        vm: row.id,
        host: host("b"),
        power: PowerState::Running,
        generation: row.generation.next(),
        claim: row.claim.next(),
    };
    assert!(store.follow_vm(&followed, NOW).await.unwrap());
    assert_eq!(store.vm(row.id).await.unwrap().unwrap().host, Some(host("b")));
    let old = Followed { host: host("c"), generation: Generation::FIRST, ..followed };
    assert!(!store.follow_vm(&old, NOW).await.unwrap());
}

pub async fn names_are_unique_where_a_person_gives_them(store: &dyn Store) {
    let known = known_vm(store, 1).await;
    let same_name = vm(2, "vm1");
    assert_eq!(store.define_vm(&same_name, NOW).await.unwrap(), Defined::Taken(known.clone()));
    // What hosts already run is taken as it is, and shown.
    assert_eq!(store.adopt_vm(&same_name, NOW).await.unwrap(), Adopted::New);
    assert_eq!(store.vms_named("vm1").await.unwrap().len(), 2);
    assert_eq!(store.adopt_vm(&known, NOW).await.unwrap(), Adopted::Known(known));
    let one = HostRow {
        id: host("a"),
        name: "rack1".to_owned(),
        boot_id: "boot".to_owned(),
        agent_address: "10.0.0.1:9097".to_owned(),
        last_report: NOW,
        declared_dead: None,
    };
    assert_eq!(store.save_host(&one).await.unwrap(), SavedHost::Saved);
    let two = HostRow { id: host("b"), ..one.clone() };
    assert_eq!(store.save_host(&two).await.unwrap(), SavedHost::NameTaken { by: host("a") });
    let renamed = HostRow { name: "rack2".to_owned(), ..one };
    assert_eq!(store.save_host(&renamed).await.unwrap(), SavedHost::Saved);
    assert_eq!(store.hosts().await.unwrap(), [renamed]);
}
