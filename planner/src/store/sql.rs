//! The store in a database: one SQLite file for one planner, or PostgreSQL for several.
//!
//! Both run the same SQL. What differs is in `Engine`: how a transaction begins, and how a row is
//! held for what is decided on it.
//!
//! - SQLite: write-ahead log with `synchronous=FULL`, one connection that writes, and each
//!   transaction begins `IMMEDIATE`: a read that a write depends on happens under the write lock.
//! - PostgreSQL: `READ COMMITTED`, and each row that a decision depends on is read `FOR UPDATE`.
//!   There is no lock that everyone takes: two migrations wait for each other only where they must
//!   not be decided apart, on one destination or for one VM.
//!
//! Locks are taken in one order, so that no two transactions wait for each other in a circle:
//! named locks (a destination, a VM's name), then the row of the migration, start, stop or host,
//! then the row of the VM, then what hangs on them. What the database ends all the same, because of
//! a deadlock or of a row that another one inserted first, has changed nothing and is tried again.

mod admission;
mod emptying;
mod fleet;
mod hosts;
mod marks;
mod migration;
mod open;
mod power;
mod queue;
mod rows;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::time::Duration;

use sqlx::{Any, AnyConnection, AnyPool, Transaction};
use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::EmptyingId;
use vmferry_planner_core::queue::Ranking;
use vmferry_planner_core::queue::slot::Limits;
use vmferry_planner_core::stuck::Trouble;
use vmferry_types::{Claim, HostId, MigrationId, Seq, Timestamp, VmId};

use self::migration::Write;
use self::rows::sql;
use super::{
    Admission, AdmitPower, Adopted, AskHost, Change, Commit, Cordon, Declaration, Declared,
    Defined, Deleted, EmptyingChange, EmptyingFilter, EmptyingLogRow, EmptyingRow, Ends, Filter,
    Followed, Grant, Granted, HostAnswer, HostRow, HostsMark, LogRow, Lost, Mark, MigrationRow,
    NewMigration, NewPower, Notes, PowerAction, QueueStart, QueuedStart, Reservation, SavedHost,
    Sharing, Slot, Store, StoreError, Stored, TakeEmptying, TakeOver, TakePower, Tombstone, VmRow,
};

/// How often a transaction is tried that the database ended for the sake of another one.
const ATTEMPTS: u32 = 5;
/// The wait before the second attempt; each next one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// How long a database on the network may take for one call. A connection that was cut without a
/// word would hold whoever asks for as long as the network's own time-outs take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which database it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Sqlite,
    Postgres,
}

impl Engine {
    /// Begins a transaction that may read what it is going to write.
    const fn begin(self) -> &'static str {
        match self {
            Self::Sqlite => "BEGIN IMMEDIATE",
            Self::Postgres => "BEGIN ISOLATION LEVEL READ COMMITTED",
        }
    }
}

/// The store in a database.
#[derive(Debug)]
pub struct SqlStore {
    engine: Engine,
    writer: AnyPool,
    readers: AnyPool,
    marks: marks::Marks,
    /// Of a file, held as long as the store is open: keeps a second planner off it.
    _lock: Option<File>,
}

/// Writes hosts as the one value that a statement about many of them takes, however many they are.
fn among<'a>(hosts: impl Iterator<Item = &'a HostId>) -> String {
    let ids: Vec<&str> = hosts.map(HostId::as_str).collect();
    serde_json::json!(ids).to_string()
}

/// A transaction that knows how rows are locked.
struct Tx {
    engine: Engine,
    transaction: Transaction<'static, Any>,
}

impl Tx {
    fn connection(&mut self) -> &mut AnyConnection {
        &mut self.transaction
    }

    /// Keeps every other transaction that holds the same name waiting until this one ends.
    async fn hold(&mut self, name: &str) -> Result<(), StoreError> {
        match self.engine {
            // The whole file is held already.
            Engine::Sqlite => Ok(()),
            Engine::Postgres => sqlx::query(
                "INSERT INTO locks (name) VALUES ($1)
                 ON CONFLICT (name) DO UPDATE SET name = excluded.name",
            )
            .bind(name)
            .execute(self.connection())
            .await
            .map(|_| ())
            .map_err(sql("hold a lock")),
        }
    }

    /// Holds what is decided about placements on a host.
    async fn hold_host(&mut self, host: &HostId) -> Result<(), StoreError> {
        self.hold(&format!("host/{host}")).await
    }
}

/// Picks the text that reads rows and holds them until the transaction ends.
macro_rules! held {
    ($tx:expr, $select:ident!($tail:literal)) => {
        match $tx.engine {
            $crate::store::sql::Engine::Sqlite => $select!($tail),
            $crate::store::sql::Engine::Postgres => $select!($tail, " FOR UPDATE"),
        }
    };
}
use held;

impl SqlStore {
    /// Begins a transaction that may read what it is going to write.
    async fn begin(&self) -> Result<Tx, StoreError> {
        let transaction =
            self.writer.begin_with(self.engine.begin()).await.map_err(sql("begin"))?;
        Ok(Tx { engine: self.engine, transaction })
    }

    /// Does a piece of work that lands whole or not at all, again if it gave way to another one.
    async fn attempt<T, F>(
        &self,
        operation: &'static str,
        work: impl Fn() -> F + Send,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>> + Send,
        T: Send,
    {
        match self.engine {
            Engine::Sqlite => work().await,
            Engine::Postgres => tokio::time::timeout(PATIENCE, again_after_conflicts(work))
                .await
                .unwrap_or(Err(StoreError::Silent { operation, waited: PATIENCE })),
        }
    }
}

async fn again_after_conflicts<T, F>(work: impl Fn() -> F + Send) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>> + Send,
    T: Send,
{
    let mut pause = FIRST_PAUSE;
    for _ in 1..ATTEMPTS {
        match work().await {
            Err(error) if gave_way(&error) => {
                tracing::debug!(error = %crate::telemetry::Chain(&error), "transaction gave way; it is tried again");
            }
            outcome @ (Ok(_) | Err(_)) => return outcome,
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    work().await
}

/// Says whether the database rolled a transaction back only because of another one.
fn gave_way(error: &StoreError) -> bool {
    /// Serialization failure, deadlock, lock not available, and a row that was inserted first.
    const CODES: [&str; 4] = ["40001", "40P01", "55P03", "23505"];
    let StoreError::Sql { source: sqlx::Error::Database(source), .. } = error else { return false };
    source.code().is_some_and(|code| CODES.contains(&code.as_ref()))
}

/// Commits, under the name of the operation that it ends.
async fn commit(operation: &'static str, tx: Tx) -> Result<(), StoreError> {
    tx.transaction.commit().await.map_err(sql(operation))
}

impl Store for SqlStore {
    fn sharing(&self) -> Sharing {
        match self.engine {
            Engine::Sqlite => Sharing::Alone,
            Engine::Postgres => Sharing::Shared,
        }
    }

    fn lease_clock(&self) -> Stored<'_, Timestamp> {
        Box::pin(self.attempt("read the clock", move || self.read_clock()))
    }

    fn hosts(&self) -> Stored<'_, Vec<HostRow>> {
        Box::pin(self.attempt("read hosts", move || self.read_hosts()))
    }

    fn save_host<'a>(&'a self, host: &'a HostRow) -> Stored<'a, SavedHost> {
        Box::pin(self.attempt("write a host", move || self.write_host(host)))
    }

    fn hosts_mark(&self) -> Stored<'_, Option<HostsMark>> {
        Box::pin(self.attempt("read the mark of all hosts", move || self.read_hosts_mark()))
    }

    fn hear_hosts<'a>(&'a self, hosts: &'a [HostId], by: &'a str, at: Timestamp) -> Stored<'a, ()> {
        Box::pin(self.attempt("write who heard hosts", move || self.write_heard(hosts, by, at)))
    }

    fn heard_by_another<'a>(
        &'a self,
        host: &'a HostId,
        by: &'a str,
    ) -> Stored<'a, Option<Timestamp>> {
        Box::pin(self.attempt("read who heard a host", move || self.read_heard(host, by)))
    }

    fn declare_dead<'a>(
        &'a self,
        host: &'a HostId,
        declaration: &'a Declaration,
    ) -> Stored<'a, Declared> {
        Box::pin(
            self.attempt("declare a host dead", move || self.write_declaration(host, declaration)),
        )
    }

    fn void_declaration<'a>(
        &'a self,
        host: &'a HostId,
        boot_id: &'a str,
        now: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.attempt("make a declaration void", move || self.void(host, boot_id, now)))
    }

    fn vms(&self) -> Stored<'_, Vec<VmRow>> {
        Box::pin(self.attempt("read VMs", move || self.read_vms()))
    }

    fn vms_on<'a>(&'a self, host: &'a HostId) -> Stored<'a, Vec<VmRow>> {
        Box::pin(self.attempt("read a host's VMs", move || self.read_vms_on(host)))
    }

    fn mark_of<'a>(&'a self, host: &'a HostId) -> Stored<'a, Mark> {
        Box::pin(self.attempt("read a host's mark", move || self.read_mark(host)))
    }

    fn vm(&self, vm: VmId) -> Stored<'_, Option<VmRow>> {
        Box::pin(self.attempt("read a VM", move || self.read_vm(vm)))
    }

    fn vms_named<'a>(&'a self, name: &'a str) -> Stored<'a, Vec<VmRow>> {
        Box::pin(self.attempt("read VMs by name", move || self.read_vms_named(name)))
    }

    fn tombstone(&self, vm: VmId) -> Stored<'_, Option<Tombstone>> {
        Box::pin(self.attempt("read a deleted VM", move || self.read_tombstone(vm)))
    }

    fn define_vm<'a>(&'a self, vm: &'a VmRow, now: Timestamp) -> Stored<'a, Defined> {
        Box::pin(self.attempt("define a VM", move || self.insert_vm(vm, now)))
    }

    fn adopt_vm<'a>(&'a self, vm: &'a VmRow, now: Timestamp) -> Stored<'a, Adopted> {
        Box::pin(self.attempt("adopt a VM", move || self.insert_adopted(vm, now)))
    }

    fn delete_vm(&self, vm: VmId, now: Timestamp) -> Stored<'_, Deleted> {
        Box::pin(self.attempt("delete a VM", move || self.delete(vm, now)))
    }

    fn raise_claim(&self, vm: VmId, claim: Claim, now: Timestamp) -> Stored<'_, bool> {
        Box::pin(self.attempt("raise a claim", move || self.raise(vm, claim, now)))
    }

    fn follow_vm<'a>(&'a self, followed: &'a Followed, now: Timestamp) -> Stored<'a, bool> {
        Box::pin(self.attempt("follow a VM", move || self.follow(followed, now)))
    }

    fn mark_lost<'a>(&'a self, lost: &'a Lost, now: Timestamp) -> Stored<'a, bool> {
        Box::pin(self.attempt("mark a VM as lost", move || self.lose(lost, now)))
    }

    fn reservations(&self) -> Stored<'_, Vec<Reservation>> {
        Box::pin(self.attempt("read reservations", move || self.read_reservations()))
    }

    fn cordons(&self, now: Timestamp) -> Stored<'_, Vec<Cordon>> {
        Box::pin(self.attempt("read cordons", move || self.read_cordons(now)))
    }

    fn cordon<'a>(&'a self, cordon: &'a Cordon) -> Stored<'a, ()> {
        Box::pin(self.attempt("cordon a host", move || self.write_cordon(cordon)))
    }

    fn uncordon<'a>(&'a self, host: &'a HostId, owner: &'a str) -> Stored<'a, ()> {
        Box::pin(self.attempt("uncordon a host", move || self.delete_cordon(host, owner)))
    }

    fn lifecycles(&self) -> Stored<'_, BTreeMap<HostId, Lifecycle>> {
        Box::pin(self.attempt("read stages of hosts", move || self.read_lifecycles()))
    }

    fn ask_host<'a>(&'a self, ask: &'a AskHost, now_us: u64) -> Stored<'a, HostAnswer> {
        Box::pin(
            self.attempt("do what is asked of a host", move || self.decide_for_host(ask, now_us)),
        )
    }

    fn emptying(&self, id: EmptyingId) -> Stored<'_, Option<EmptyingRow>> {
        Box::pin(self.attempt("read a host's emptying", move || self.read_emptying(id)))
    }

    fn emptyings<'a>(&'a self, filter: &'a EmptyingFilter) -> Stored<'a, Vec<EmptyingRow>> {
        Box::pin(self.attempt("read hosts' emptyings", move || self.read_emptyings(filter)))
    }

    fn emptying_log(&self, id: EmptyingId) -> Stored<'_, Vec<EmptyingLogRow>> {
        Box::pin(self.attempt("read a log", move || self.read_emptying_log(id)))
    }

    fn take_over_emptying<'a>(
        &'a self,
        id: EmptyingId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeEmptying> {
        Box::pin(self.attempt("claim a host's emptying", move || {
            self.claim_emptying(id, owner, lease_until, now)
        }))
    }

    fn renew_emptying_lease<'a>(
        &'a self,
        row: &'a EmptyingRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.attempt("keep the lease of a host's emptying", move || {
            self.keep_emptying_lease(row, owner, lease_until)
        }))
    }

    fn commit_emptying<'a>(
        &'a self,
        before: &'a EmptyingRow,
        changes: &'a [EmptyingChange],
        now_us: u64,
    ) -> Stored<'a, Commit<Box<EmptyingRow>>> {
        Box::pin(self.attempt("write a host's emptying", move || {
            self.write_emptying(before, changes, now_us)
        }))
    }

    fn take_slot<'a>(
        &'a self,
        row: &'a MigrationRow,
        limits: &'a Limits,
        ranking: &'a Ranking,
        now: Timestamp,
    ) -> Stored<'a, Slot> {
        Box::pin(self.attempt("take a transfer slot", move || self.slot(row, limits, ranking, now)))
    }

    fn queue_start<'a>(&'a self, new: &'a QueuedStart, now: Timestamp) -> Stored<'a, QueueStart> {
        Box::pin(self.attempt("queue a start", move || self.insert_queued_start(new, now)))
    }

    fn queued_starts(&self) -> Stored<'_, Vec<QueuedStart>> {
        Box::pin(self.attempt("read queued starts", move || self.read_queued_starts()))
    }

    fn queued_start(&self, id: MigrationId) -> Stored<'_, Option<QueuedStart>> {
        Box::pin(self.attempt("read a queued start", move || self.read_queued_start(id)))
    }

    fn note_queued_start<'a>(
        &'a self,
        id: MigrationId,
        seq: Seq,
        note: &'a str,
    ) -> Stored<'a, bool> {
        Box::pin(
            self.attempt("note why a start waits", move || self.write_start_note(id, seq, note)),
        )
    }

    fn end_queued_start<'a>(
        &'a self,
        id: MigrationId,
        seq: Seq,
        outcome: &'a str,
        now_us: u64,
    ) -> Stored<'a, bool> {
        Box::pin(
            self.attempt("end a queued start", move || {
                self.give_start_up(id, seq, outcome, now_us)
            }),
        )
    }

    fn admit<'a>(&'a self, new: &'a NewMigration, now_us: u64) -> Stored<'a, Admission> {
        Box::pin(self.attempt("admit a migration", move || self.insert_migration(new, now_us)))
    }

    fn migration(&self, id: MigrationId) -> Stored<'_, Option<MigrationRow>> {
        Box::pin(self.attempt("read a migration", move || self.read_migration(id)))
    }

    fn migration_of_request<'a>(&'a self, request: &'a str) -> Stored<'a, Option<MigrationRow>> {
        Box::pin(self.attempt("read a migration by its request", move || {
            self.read_migration_of_request(request)
        }))
    }

    fn migrations<'a>(&'a self, filter: &'a Filter) -> Stored<'a, Vec<MigrationRow>> {
        Box::pin(self.attempt("read migrations", move || self.read_migrations(filter)))
    }

    fn log(&self, id: MigrationId) -> Stored<'_, Vec<LogRow>> {
        Box::pin(self.attempt("read a log", move || self.read_log(id)))
    }

    fn take_over<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeOver> {
        Box::pin(self.attempt("claim a migration", move || {
            self.claim_migration(id, owner, lease_until, now)
        }))
    }

    fn renew_lease<'a>(
        &'a self,
        row: &'a MigrationRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.attempt("keep a lease", move || self.keep_lease(row, owner, lease_until)))
    }

    fn note_trouble<'a>(
        &'a self,
        row: &'a MigrationRow,
        trouble: Option<&'a Trouble>,
    ) -> Stored<'a, ()> {
        Box::pin(
            self.attempt("write what keeps a migration", move || self.write_trouble(row, trouble)),
        )
    }

    fn release_leases<'a>(&'a self, owner: &'a str) -> Stored<'a, ()> {
        Box::pin(self.attempt("end a planner's leases", move || self.end_leases(Some(owner))))
    }

    fn clear_leases(&self) -> Stored<'_, ()> {
        Box::pin(self.attempt("end leases", move || self.end_leases(None)))
    }

    fn grant<'a>(
        &'a self,
        before: &'a MigrationRow,
        grant: &'a Grant,
        now_us: u64,
    ) -> Stored<'a, Granted> {
        Box::pin(
            self.attempt("admit a queued migration", move || {
                self.grant_queued(before, grant, now_us)
            }),
        )
    }

    fn commit<'a>(
        &'a self,
        before: &'a MigrationRow,
        changes: &'a [Change],
        notes: &'a Notes,
        now_us: u64,
    ) -> Stored<'a, Commit<Box<MigrationRow>>> {
        let write = Write { before, entries: changes, notes, now_us };
        Box::pin(self.attempt("write a migration", move || self.write_changes(write)))
    }

    fn admit_power<'a>(&'a self, new: &'a NewPower, now_us: u64) -> Stored<'a, AdmitPower> {
        Box::pin(self.attempt("admit a power action", move || self.insert_power(new, now_us)))
    }

    fn power(&self, id: MigrationId) -> Stored<'_, Option<PowerAction>> {
        Box::pin(self.attempt("read a power action", move || self.read_power(id)))
    }

    fn open_power(&self) -> Stored<'_, Vec<PowerAction>> {
        Box::pin(self.attempt("read open power actions", move || self.read_open_power()))
    }

    fn take_over_power<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakePower> {
        Box::pin(self.attempt("claim a power action", move || {
            self.claim_power_action(id, owner, lease_until, now)
        }))
    }

    fn renew_power_lease<'a>(
        &'a self,
        action: &'a PowerAction,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.attempt("keep the lease of a power action", move || {
            self.keep_power_lease(action, owner, lease_until)
        }))
    }

    fn end_power<'a>(
        &'a self,
        action: &'a PowerAction,
        end: &'a Ends,
        now_us: u64,
    ) -> Stored<'a, Commit<()>> {
        Box::pin(
            self.attempt("end a power action", move || self.end_power_action(action, end, now_us)),
        )
    }
}
