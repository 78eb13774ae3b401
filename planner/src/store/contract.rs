//! What every store must do, written once, for every store there is.
//!
//! Each function is one promise. [`store_contract!`](crate::store_contract) makes a test of each.

#![expect(clippy::unwrap_used, clippy::panic, missing_docs, reason = "these are tests")]

mod admission;
mod claims;
mod emptying;
mod fleet;
mod migration;
mod power;

use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_planner_core::maintenance::PinsToSource;
use vmferry_planner_core::migration::{
    AutoConverge, Downgrade, Event, Gates, GoneProof, Guest, Handover, Listener, Migration,
    NotConverging, Opening, Process, ProofKind, Ran, SourceWord, Terms, Word,
};
use vmferry_types::{
    Bytes, BytesPerSec, Claim, Generation, HostId, Method, MigrationId, MilliCpu, Millis,
    PowerState, Timestamp, VmId,
};

pub use self::admission::*;
pub use self::claims::*;
pub use self::emptying::*;
pub use self::fleet::*;
pub use self::migration::*;
pub use self::power::*;
use super::{
    Admission, AdmitPower, Adopted, Commit, Ends, FromQueue, Grant, MigrationRow, NewMigration,
    NewPower, Notes, PowerAction, PowerKind, PowerPhase, Refused, Room, Store, VmRow,
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
            an_emptying_has_no_more_under_way_than_it_may_and_what_waits_does_not_count,
            admission_keeps_to_the_pin_of_the_definition,
            the_same_request_is_answered_with_the_same_migration,
            a_queued_migration_holds_nothing_until_it_is_granted,
            one_of_many_at_once_is_admitted_for_a_vm,
            fifty_admissions_at_once_never_exceed_the_room,
            admissions_at_once_never_exceed_the_cap_of_a_destination,
            the_same_request_at_once_leads_to_one_migration,
            a_queued_migration_is_granted_once,
            a_write_lands_only_on_the_row_that_it_was_decided_on,
            a_row_reads_back_as_it_was_written,
            the_log_replays_to_the_row,
            an_end_closes_reservations_once_and_frees_the_vm,
            a_cancel_and_a_step_forward_do_not_both_land,
            a_change_that_does_not_follow_is_not_written,
            ownership_moves_with_the_phase_or_not_at_all,
            a_release_closes_what_is_held_once,
            a_rollback_holds_the_destination_until_it_is_acknowledged,
            a_cancel_and_a_step_at_once_are_not_both_written,
            a_driver_that_takes_over_fences_the_one_before,
            a_claim_is_above_every_claim_that_an_agent_has_seen,
            of_many_that_take_over_at_once_one_does,
            a_planner_that_lost_its_lease_lands_no_write,
            a_lease_keeps_others_away_until_it_ends,
            a_lease_that_reaches_further_than_one_can_keeps_nobody_away,
            a_planner_that_ends_lets_go_of_its_leases_only,
            what_keeps_a_driver_is_read_by_others,
            the_clock_of_leases_goes_on,
            a_start_elsewhere_takes_the_next_generation,
            a_start_or_stop_ends_once_and_under_its_own_claim,
            starts_at_once_never_exceed_the_room,
            a_vm_is_lost_only_under_its_owner_and_with_nothing_under_way,
            a_vm_follows_only_what_is_newer,
            names_are_unique_where_a_person_gives_them,
            a_planner_reads_when_another_heard_a_host,
            the_sweep_of_a_dead_host_leaves_what_a_migration_owns,
            a_declaration_is_of_one_boot_and_void_once_that_boot_is_heard,
            a_deleted_vm_leaves_its_counters,
            a_vm_under_way_is_not_deleted,
            a_vm_that_runs_by_its_row_and_that_no_host_owns_can_be_deleted,
            a_vm_defined_again_goes_on_counting,
            of_many_definitions_at_once_one_is_written,
            of_many_adoptions_at_once_one_is_written,
            one_word_at_a_time_empties_a_host,
            an_operators_word_lifts_the_cordon_and_cancels_the_drain,
            a_migration_is_begun_with_the_row_that_names_it_or_not_at_all,
            a_planner_that_lost_an_emptying_lands_no_write,
            the_log_of_an_emptying_replays_to_the_row,
            a_deleted_host_comes_back_only_from_another_boot,
            links_are_given_in_order_and_kept_to_the_end,
            a_start_waits_once_and_starts_under_the_same_id,
            a_start_that_is_given_up_frees_its_vm,
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

pub(crate) fn id(of: u128) -> MigrationId {
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

pub(crate) async fn known_vm(store: &dyn Store, of: u128) -> VmRow {
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
            shutdown_limit: Millis(1),
            max_bandwidth: BytesPerSec(0),
            auto_converge: AutoConverge::Off,
            gates: Gates::OPEN,
            gate_deadline: Millis(600_000),
            downgrade: Downgrade::Never,
            not_converging: NotConverging::Abort,
        },
        found: Guest::Present,
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
    Grant { destination: host(destination), room, inbound_max: 2, pins: PinsToSource::Hold }
}

fn request(of: u128, vm: &VmRow, grant: Result<Grant, String>) -> NewMigration {
    NewMigration {
        migration: opened(of, vm),
        vm_name: vm.name.clone(),
        request: Some(format!("request-{of}")),
        notes: Notes { memory_bytes: MEMORY.value(), cpu_milli: 1000, ..Notes::default() },
        grant,
        begun_for: None,
    }
}

pub(crate) async fn admitted(store: &dyn Store, of: u128, vm: &VmRow) -> MigrationRow {
    let new = request(of, vm, Ok(grant("b", room(9))));
    match store.admit(&new, NOW_US).await.unwrap() {
        Admission::Admitted(row) => *row,
        other @ (Admission::Known(_) | Admission::Refused(_) | Admission::Raced) => {
            panic!("{other:?}")
        }
    }
}

async fn refusal(store: &dyn Store, new: &NewMigration) -> Refused {
    match store.admit(new, NOW_US).await.unwrap() {
        Admission::Refused(refused) => refused,
        other @ (Admission::Known(_) | Admission::Admitted(_) | Admission::Raced) => {
            panic!("{other:?}")
        }
    }
}

pub(crate) async fn commit(store: &dyn Store, row: &MigrationRow, event: Event) -> MigrationRow {
    let entries = row.migration.advance(event).unwrap();
    match store.commit(row, &entries, &row.notes, NOW_US + 1).await.unwrap() {
        Commit::Done(row) => *row,
        Commit::Raced => panic!("raced"),
    }
}

pub(crate) fn armed() -> Event {
    Event::ReceiverArmed { listener: Listener::new("10.0.0.2".to_owned(), 49_152) }
}

fn proof(at: &str) -> GoneProof {
    GoneProof {
        kind: ProofKind::ExitRecord,
        host: host(at),
        boot_id: "boot".to_owned(),
        pid: 100,
        start_time: 5,
        ended: "exit 0".to_owned(),
        at: NOW,
        stderr_tail: String::new(),
    }
}

fn both_complete() -> Event {
    let word = |pid, run_state| Word {
        process: Process { pid, start_time: 5, boot_id: "boot".to_owned() },
        transfer: TransferState::Completed,
        run_state,
        at: NOW,
    };
    let proof = Handover {
        source: SourceWord::Completed(word(100, RunState::PostMigrate)),
        destination: word(200, RunState::Paused),
    };
    Event::BothComplete { proof }
}

/// The proof that ends a rollback before the transfer began.
fn gone() -> Event {
    let proof = GoneProof { kind: ProofKind::NeverStarted, pid: 0, start_time: 0, ..proof("b") };
    Event::ReceiverGone { proof, ran: Ran::Never }
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
        from_queue: FromQueue::No,
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
