//! Writes of a migration, and what follows from them.

use futures::future::join_all;
use vmferry_planner_core::migration::{Event, Migration, Ran, Refusal, Stood};
use vmferry_types::{Claim, Generation, PhaseLabel, PowerState, Seq};

use super::{NOW, NOW_US, admitted, armed, both_complete, commit, gone, host, id, known_vm, proof};
use crate::store::{
    Commit, Filter, LogRow, MigrationRow, Notes, OnlyOpen, Store, StoreError, TakeOver, VmRow,
};

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

/// Drives a migration to where the guest runs on the destination and the source is not released.
async fn attached(store: &dyn Store, row: &MigrationRow) -> MigrationRow {
    let mut row = commit(store, row, armed()).await;
    for event in [Event::SourceStopped, both_complete(), Event::DestinationRuns] {
        row = commit(store, &row, event).await;
    }
    assert_eq!(row.migration.label(), PhaseLabel::Attached);
    row
}

pub async fn a_change_that_does_not_follow_is_not_written(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let other = known_vm(store, 2).await;
    let later = commit(store, &admitted(store, 11, &other).await, armed()).await;
    let skips = later.migration.advance(Event::SourceStopped).unwrap();
    let written = store.commit(&row, &skips, &row.notes, NOW_US).await;
    assert!(matches!(written, Err(StoreError::Machine { .. })), "{written:?}");
    let mut elsewhere = row.migration.advance(armed()).unwrap();
    elsewhere[0].after.source = host("c");
    let written = store.commit(&row, &elsewhere, &row.notes, NOW_US).await;
    assert!(matches!(written, Err(StoreError::Machine { .. })), "{written:?}");
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), row);
    assert_eq!(store.log(id(10)).await.unwrap().len(), 2);
}

pub async fn ownership_moves_with_the_phase_or_not_at_all(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let row = commit(store, &row, armed()).await;
    let row = commit(store, &row, Event::SourceStopped).await;
    let owner = |vm: VmRow| (vm.host, vm.generation, vm.power);
    let before = owner(store.vm(vm.id).await.unwrap().unwrap());
    assert_eq!(before, (Some(host("a")), Generation::FIRST, PowerState::Running));
    let entries = row.migration.advance(both_complete()).unwrap();
    let stale = MigrationRow { seq: Seq::FIRST, ..row.clone() };
    let raced = store.commit(&stale, &entries, &row.notes, NOW_US).await.unwrap();
    assert_eq!(raced, Commit::Raced);
    assert_eq!(owner(store.vm(vm.id).await.unwrap().unwrap()), before);
    let row = commit(store, &row, both_complete()).await;
    assert_eq!(row.migration.label(), PhaseLabel::Committed);
    let after = owner(store.vm(vm.id).await.unwrap().unwrap());
    assert_eq!(after, (Some(host("b")), Generation::FIRST.next(), PowerState::Running));
    // The proof that it rested on is beside it.
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), row);
    let log: Vec<String> =
        store.log(id(10)).await.unwrap().into_iter().map(|entry| entry.event).collect();
    assert_eq!(log[log.len() - 2..], ["both_complete", "commit_allowed"]);
}

pub async fn a_release_closes_what_is_held_once(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = attached(store, &admitted(store, 10, &vm).await).await;
    assert_eq!(store.reservations().await.unwrap().len(), 2);
    let released = Event::SourceReleased { proof: proof("a") };
    let entries = row.migration.advance(released.clone()).unwrap();
    let twice = [&row, &row].map(|row| store.commit(row, &entries, &row.notes, NOW_US));
    let all = join_all(twice).await;
    let done = all.iter().filter(|of| matches!(of, Ok(Commit::Done(_)))).count();
    assert_eq!(done, 1, "{all:?}");
    let after = store.migration(id(10)).await.unwrap().unwrap();
    assert_eq!(after.migration.label(), PhaseLabel::Done);
    assert!(after.ended_us.is_some());
    assert!(store.reservations().await.unwrap().is_empty());
    assert_eq!(store.vm(vm.id).await.unwrap().unwrap().admission, None);
    assert_eq!(after.migration.advance(released).unwrap_err(), Refusal::Stale);
}

pub async fn a_rollback_holds_the_destination_until_it_is_acknowledged(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let mut row = commit(store, &row, armed()).await;
    row = commit(store, &row, Event::CancelRequested).await;
    while row.ended_us.is_none() {
        assert_eq!(row.migration.label(), PhaseLabel::RollingBack);
        assert_eq!(held_on(store, "b").await, 1);
        let acknowledged = [
            Event::SourceContinued,
            Event::SourceGaveUp { error: "cancelled".to_owned(), stood: Stood::No },
            Event::ReceiverGone { proof: proof("b"), ran: Ran::Never },
        ];
        let next = acknowledged.into_iter().find(|event| row.migration.apply(event).is_ok());
        row = commit(store, &row, next.unwrap()).await;
    }
    assert_eq!(row.migration.label(), PhaseLabel::Aborted);
    assert_eq!(held_on(store, "b").await, 0);
}

async fn held_on(store: &dyn Store, name: &str) -> usize {
    let held = store.reservations().await.unwrap();
    held.iter().filter(|of| of.host == host(name)).count()
}

pub async fn a_cancel_and_a_step_at_once_are_not_both_written(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = commit(store, &admitted(store, 10, &vm).await, armed()).await;
    let forward = row.migration.advance(Event::SourceStopped).unwrap();
    let back = row.migration.advance(Event::CancelRequested).unwrap();
    let both = [&forward, &back].map(|entries| store.commit(&row, entries, &row.notes, NOW_US));
    let all = join_all(both).await;
    let done = all.iter().filter(|of| matches!(of, Ok(Commit::Done(_)))).count();
    let raced = all.iter().filter(|of| matches!(of, Ok(Commit::Raced))).count();
    assert_eq!((done, raced), (1, 1), "{all:?}");
    let log = store.log(id(10)).await.unwrap();
    assert_eq!(replayed(&log), store.migration(id(10)).await.unwrap().unwrap().migration);
}
