use std::sync::Arc;

use tempfile::TempDir;

use crate::config::StoreUrl;
use crate::store::sql::SqlStore;
use crate::store::{Store as _, StoreError, contract};

fn url(dir: &TempDir) -> StoreUrl {
    StoreUrl::Sqlite(dir.path().join("planner #1.db"))
}

pub(super) async fn fresh() -> (Arc<SqlStore>, TempDir) {
    let dir = TempDir::new().unwrap();
    let store = SqlStore::open(&url(&dir)).await.unwrap();
    (Arc::new(store), dir)
}

crate::store_contract! { fresh }

#[tokio::test]
async fn two_planners_do_not_share_a_file() {
    let (_store, dir) = fresh().await;
    let second = SqlStore::open(&url(&dir)).await;
    assert!(matches!(second, Err(StoreError::InUse { .. })), "{second:?}");
}

#[tokio::test]
async fn a_file_opens_again_as_it_was_left() {
    let (store, dir) = fresh().await;
    contract::the_log_replays_to_the_row(store.as_ref()).await;
    drop(store);
    let again = SqlStore::open(&url(&dir)).await.unwrap();
    assert_eq!(again.vms().await.unwrap().len(), 1);
    assert!(dir.path().join("planner #1.db").exists());
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
    let older = SqlStore::open(&url(&dir)).await;
    assert!(matches!(older, Err(StoreError::Newer { version: 9999, .. })), "{older:?}");
}
