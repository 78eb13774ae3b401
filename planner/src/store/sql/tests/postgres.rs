use std::sync::Arc;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use uuid::Uuid;

use crate::config::StoreUrl;
use crate::store::sql::SqlStore;
use crate::store::{Store as _, StoreError, contract};

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
