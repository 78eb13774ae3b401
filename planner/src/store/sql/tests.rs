use tempfile::TempDir;
use vmferry_types::PhaseLabel;

use super::SqlStore;
use crate::config::StoreUrl;
use crate::store::StoreError;
use crate::store::contract::contract;

async fn fresh() -> (SqlStore, TempDir) {
    let dir = TempDir::new().unwrap();
    let store = SqlStore::open(&StoreUrl::Sqlite(dir.path().join("planner.db"))).await.unwrap();
    (store, dir)
}

contract! { fresh:
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

#[tokio::test]
async fn two_planners_do_not_share_a_file() {
    let (_store, dir) = fresh().await;
    let second = SqlStore::open(&StoreUrl::Sqlite(dir.path().join("planner.db"))).await;
    assert!(matches!(second, Err(StoreError::InUse { .. })), "{second:?}");
}

#[tokio::test]
async fn a_file_opens_again_as_it_was_left() {
    let (store, dir) = fresh().await;
    crate::store::contract::the_log_replays_to_the_row(&store).await;
    drop(store);
    let again = SqlStore::open(&StoreUrl::Sqlite(dir.path().join("planner.db"))).await.unwrap();
    assert_eq!(again.read_vms().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_newer_planners_file_is_refused() {
    let (store, dir) = fresh().await;
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9999, 'from the future', TRUE, x'00', 0)",
    )
    .execute(&store.writer)
    .await
    .unwrap();
    drop(store);
    let older = SqlStore::open(&StoreUrl::Sqlite(dir.path().join("planner.db"))).await;
    assert!(matches!(older, Err(StoreError::Newer { version: 9999, .. })), "{older:?}");
}

#[tokio::test]
async fn the_schema_names_the_phases_of_the_machine() {
    let schema = super::open::SCHEMA.iter().map(|(_, _, sql)| *sql).collect::<String>();
    let phases: Vec<String> =
        PhaseLabel::ALL.iter().map(|phase| format!("'{}'", phase.label())).collect();
    let flat = schema.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains(&format!("CHECK (phase IN ({}))", phases.join(", "))));
}
