//! The store in one SQLite file, for one planner.
//!
//! Write-ahead log with `synchronous=FULL`, so a commit is on disk when it returns. One connection
//! writes, and each transaction begins `IMMEDIATE`: a read that a write depends on happens under
//! the write lock. The SQL text keeps to `$n` placeholders, BIGINT and TEXT, so that it can run on
//! PostgreSQL as it is.

mod admission;
mod fleet;
mod migration;
mod power;
mod rows;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::migrate::{MigrateError, Migration as SchemaMigration, MigrationType, Migrator};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{SqlSafeStr as _, Sqlite, Transaction};

use vmferry_types::{Claim, HostId, MigrationId, Timestamp, VmId};

use self::migration::Write;
use super::{
    Admission, AdmitPower, Adopted, Change, Commit, Cordon, Declaration, Declared, Defined,
    Deleted, Ends, Filter, Followed, Grant, Granted, HostRow, LogRow, Lost, MigrationRow,
    NewMigration, NewPower, Notes, PowerAction, Reservation, SavedHost, Sharing, Store, StoreError,
    Stored, TakeOver, TakePower, Tombstone, VmRow,
};

/// How long a reader waits for the file; with one writer it is only ever the checkpoint that it waits for.
const BUSY: Duration = Duration::from_secs(5);
/// Readers beside the one writer.
const READERS: u32 = 4;

/// Schema migrations, numbered and forward only.
const SCHEMA: &[(i64, &str, &str)] = &[
    (1, "fleet and migrations", include_str!("../../migrations/0001_fleet_and_migrations.sql")),
    (
        2,
        "declarations and tombstones",
        include_str!("../../migrations/0002_declarations_and_tombstones.sql"),
    ),
];

/// The store in one SQLite file.
#[derive(Debug)]
pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
    /// Held as long as the store is open: keeps a second planner off the file.
    _lock: File,
}

impl SqliteStore {
    /// Opens the file, creates it if it is not there, and brings its schema up to date.
    ///
    /// # Errors
    ///
    /// Fails if another planner holds the file, if a newer planner wrote it, or if it cannot be used.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|source| StoreError::Open {
                path: path.to_owned(),
                source: Box::new(source),
            })?;
        }
        let lock = lock(path)?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY)
            .foreign_keys(true);
        let open = |source: sqlx::Error| StoreError::Open {
            path: path.to_owned(),
            source: Box::new(source),
        };
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .connect_with(options.clone())
            .await
            .map_err(open)?;
        migrate(path, &writer).await?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .connect_with(options.read_only(true))
            .await
            .map_err(open)?;
        Ok(Self { writer, readers, _lock: lock })
    }

    /// Begins a transaction that holds the write lock from its first statement.
    async fn begin(&self) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.writer
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(|source| StoreError::Sql { operation: "begin", source })
    }
}

/// Commits, under the name of the operation that it ends.
async fn commit(
    operation: &'static str,
    transaction: Transaction<'static, Sqlite>,
) -> Result<(), StoreError> {
    transaction.commit().await.map_err(|source| StoreError::Sql { operation, source })
}

fn lock(path: &Path) -> Result<File, StoreError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock_path = PathBuf::from(name);
    let file =
        OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path).map_err(
            |source| StoreError::Open { path: lock_path.clone(), source: Box::new(source) },
        )?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => {
            Err(StoreError::Open { path: lock_path, source: Box::new(source) })
        }
    }
}

async fn migrate(path: &Path, writer: &SqlitePool) -> Result<(), StoreError> {
    let migrations = SCHEMA
        .iter()
        .map(|(version, name, sql)| {
            SchemaMigration::new(
                *version,
                (*name).into(),
                MigrationType::Simple,
                (*sql).into_sql_str(),
                false,
            )
        })
        .collect();
    match Migrator::with_migrations(migrations).run(writer).await {
        Ok(()) => Ok(()),
        Err(MigrateError::VersionMissing(version)) => Err(StoreError::Newer {
            path: path.to_owned(),
            version,
            known: SCHEMA.iter().map(|(version, ..)| *version).max().unwrap_or_default(),
        }),
        Err(source) => Err(StoreError::Schema { path: path.to_owned(), source }),
    }
}

impl Store for SqliteStore {
    fn sharing(&self) -> Sharing {
        Sharing::Alone
    }

    fn hosts(&self) -> Stored<'_, Vec<HostRow>> {
        Box::pin(self.read_hosts())
    }

    fn save_host<'a>(&'a self, host: &'a HostRow) -> Stored<'a, SavedHost> {
        Box::pin(self.write_host(host))
    }

    fn declare_dead<'a>(
        &'a self,
        host: &'a HostId,
        declaration: &'a Declaration,
    ) -> Stored<'a, Declared> {
        Box::pin(self.write_declaration(host, declaration))
    }

    fn void_declaration<'a>(
        &'a self,
        host: &'a HostId,
        boot_id: &'a str,
        now: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.void(host, boot_id, now))
    }

    fn vms(&self) -> Stored<'_, Vec<VmRow>> {
        Box::pin(self.read_vms())
    }

    fn vm(&self, vm: VmId) -> Stored<'_, Option<VmRow>> {
        Box::pin(self.read_vm(vm))
    }

    fn vms_named<'a>(&'a self, name: &'a str) -> Stored<'a, Vec<VmRow>> {
        Box::pin(self.read_vms_named(name))
    }

    fn tombstone(&self, vm: VmId) -> Stored<'_, Option<Tombstone>> {
        Box::pin(self.read_tombstone(vm))
    }

    fn define_vm<'a>(&'a self, vm: &'a VmRow, now: Timestamp) -> Stored<'a, Defined> {
        Box::pin(self.insert_vm(vm, now))
    }

    fn adopt_vm<'a>(&'a self, vm: &'a VmRow, now: Timestamp) -> Stored<'a, Adopted> {
        Box::pin(self.insert_adopted(vm, now))
    }

    fn delete_vm(&self, vm: VmId, now: Timestamp) -> Stored<'_, Deleted> {
        Box::pin(self.delete(vm, now))
    }

    fn raise_claim(&self, vm: VmId, claim: Claim, now: Timestamp) -> Stored<'_, ()> {
        Box::pin(self.raise(vm, claim, now))
    }

    fn follow_vm<'a>(&'a self, followed: &'a Followed, now: Timestamp) -> Stored<'a, bool> {
        Box::pin(self.follow(followed, now))
    }

    fn mark_lost<'a>(&'a self, lost: &'a Lost, now: Timestamp) -> Stored<'a, bool> {
        Box::pin(self.lose(lost, now))
    }

    fn reservations(&self) -> Stored<'_, Vec<Reservation>> {
        Box::pin(self.read_reservations())
    }

    fn cordons(&self, now: Timestamp) -> Stored<'_, Vec<Cordon>> {
        Box::pin(self.read_cordons(now))
    }

    fn cordon<'a>(&'a self, cordon: &'a Cordon) -> Stored<'a, ()> {
        Box::pin(self.write_cordon(cordon))
    }

    fn uncordon<'a>(&'a self, host: &'a HostId, owner: &'a str) -> Stored<'a, ()> {
        Box::pin(self.delete_cordon(host, owner))
    }

    fn admit<'a>(&'a self, new: &'a NewMigration, now_us: u64) -> Stored<'a, Admission> {
        Box::pin(self.insert_migration(new, now_us))
    }

    fn migration(&self, id: MigrationId) -> Stored<'_, Option<MigrationRow>> {
        Box::pin(self.read_migration(id))
    }

    fn migration_of_request<'a>(&'a self, request: &'a str) -> Stored<'a, Option<MigrationRow>> {
        Box::pin(self.read_migration_of_request(request))
    }

    fn migrations<'a>(&'a self, filter: &'a Filter) -> Stored<'a, Vec<MigrationRow>> {
        Box::pin(self.read_migrations(filter))
    }

    fn log(&self, id: MigrationId) -> Stored<'_, Vec<LogRow>> {
        Box::pin(self.read_log(id))
    }

    fn take_over<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeOver> {
        Box::pin(self.claim_migration(id, owner, lease_until, now))
    }

    fn renew_lease<'a>(
        &'a self,
        row: &'a MigrationRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.keep_lease(row, owner, lease_until))
    }

    fn clear_leases(&self) -> Stored<'_, ()> {
        Box::pin(self.end_leases())
    }

    fn grant<'a>(
        &'a self,
        before: &'a MigrationRow,
        grant: &'a Grant,
        now_us: u64,
    ) -> Stored<'a, Granted> {
        Box::pin(self.grant_queued(before, grant, now_us))
    }

    fn commit<'a>(
        &'a self,
        before: &'a MigrationRow,
        changes: &'a [Change],
        notes: &'a Notes,
        now_us: u64,
    ) -> Stored<'a, Commit<Box<MigrationRow>>> {
        Box::pin(async move {
            self.write_changes(&Write { before, entries: changes, notes, now_us }).await
        })
    }

    fn admit_power<'a>(&'a self, new: &'a NewPower, now_us: u64) -> Stored<'a, AdmitPower> {
        Box::pin(self.insert_power(new, now_us))
    }

    fn power(&self, id: MigrationId) -> Stored<'_, Option<PowerAction>> {
        Box::pin(self.read_power(id))
    }

    fn open_power(&self) -> Stored<'_, Vec<PowerAction>> {
        Box::pin(self.read_open_power())
    }

    fn take_over_power<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakePower> {
        Box::pin(self.claim_power_action(id, owner, lease_until, now))
    }

    fn renew_power_lease<'a>(
        &'a self,
        action: &'a PowerAction,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.keep_power_lease(action, owner, lease_until))
    }

    fn end_power<'a>(
        &'a self,
        action: &'a PowerAction,
        end: &'a Ends,
        now_us: u64,
    ) -> Stored<'a, Commit<()>> {
        Box::pin(self.end_power_action(action, end, now_us))
    }
}
