use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use uuid::Uuid;
use vmferry_planner_core::migration::Event;
use vmferry_types::Timestamp;

use crate::config::StoreUrl;
use crate::store::sql::SqlStore;
use crate::store::{Store as _, StoreError, TakeOver, contract};

/// Makes a database and returns its URL.
pub(super) async fn database() -> StoreUrl {
    let server = std::env::var("VMFERRY_TEST_POSTGRES").expect(
        "VMFERRY_TEST_POSTGRES names no server; run the tests as `scripts/with-postgres cargo nextest run …`",
    );
    let name = format!("test_{}", Uuid::new_v4().simple());
    let mut connection = PgConnection::connect(&server).await.unwrap();
    sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}")))
        .execute(&mut connection)
        .await
        .unwrap();
    let url = server.replacen("/postgres?", &format!("/{name}?"), 1);
    StoreUrl::postgres(&url).unwrap()
}

async fn fresh() -> (Arc<SqlStore>, StoreUrl) {
    let url = database().await;
    (Arc::new(SqlStore::open(&url).await.unwrap()), url)
}

crate::store_contract! { fresh }

#[tokio::test]
async fn a_database_opens_again_as_it_was_left() {
    let (store, url) = fresh().await;
    contract::the_log_replays_to_the_row(store.as_ref()).await;
    let again = SqlStore::open(&url).await.unwrap();
    assert_eq!(again.vms().await.unwrap().len(), 1);
}

#[tokio::test]
async fn planners_that_start_at_once_bring_the_schema_up_to_date_once() {
    let url = database().await;
    let opened = futures::future::join_all((0..4).map(|_| SqlStore::open(&url))).await;
    for store in opened {
        assert!(store.unwrap().vms().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_newer_planners_database_is_refused() {
    let (store, url) = fresh().await;
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9999, 'from the future', TRUE, '\\x00', 0)",
    )
    .execute(&store.writer)
    .await
    .unwrap();
    let older = SqlStore::open(&url).await;
    assert!(matches!(older, Err(StoreError::Newer { version: 9999, .. })), "{older:?}");
    assert!(older.unwrap_err().to_string().contains("newer planner"));
}

/// Long enough for a few transactions, and far below the time that a lock is waited for.
const AT_ONCE: Duration = Duration::from_secs(2);

#[tokio::test]
async fn drivers_of_different_migrations_do_not_wait_for_each_other() {
    let (store, _url) = fresh().await;
    let (one, other) = (contract::known_vm(&*store, 1).await, contract::known_vm(&*store, 2).await);
    let slow = contract::admitted(&*store, 10, &one).await;
    let row = contract::admitted(&*store, 11, &other).await;
    // A driver of the first stands still in the middle of a write, with all that it locks.
    let mut standing = store.begin().await.unwrap();
    for (text, key) in [
        ("UPDATE migrations SET seq = seq WHERE id = $1", slow.migration.id.to_string()),
        ("UPDATE vms SET claim = claim WHERE id = $1", one.id.to_string()),
        ("UPDATE reservations SET host = host WHERE admission = $1", slow.migration.id.to_string()),
    ] {
        let done = sqlx::query(text).bind(key).execute(standing.connection()).await.unwrap();
        assert!(done.rows_affected() > 0, "{text}");
    }
    let driven = async {
        let until = Timestamp(u64::MAX >> 1);
        let taken = store.take_over(row.migration.id, "one", until, Timestamp(0)).await.unwrap();
        let TakeOver::Taken(row) = taken else { panic!("{taken:?}") };
        assert!(store.renew_lease(&row, "one", until).await.unwrap());
        let row = contract::commit(&*store, &row, contract::armed()).await;
        contract::commit(&*store, &row, Event::CancelRequested).await
    };
    tokio::time::timeout(AT_ONCE, driven).await.expect("it waits for another one's driver");
    // Of the same migration the next one does wait.
    let entries = slow.migration.advance(contract::armed()).unwrap();
    let same = store.commit(&slow, &entries, &slow.notes, 1);
    assert!(tokio::time::timeout(Duration::from_millis(300), same).await.is_err());
}
