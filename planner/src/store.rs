//! The port to the durable store.
//!
//! What the planner decides is a row before anything leaves the process, and every write of a row
//! names the claim and the seq that it was decided on: a planner that lost its lease cannot land
//! one. What must be decided together (room, single flight, cordons, caps) is decided in one
//! transaction under the write lock.

#[cfg(any(test, feature = "store-contract"))]
pub mod contract;
pub mod rows;
pub mod sql;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use futures::future::BoxFuture;
use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::EmptyingId;
use vmferry_planner_core::migration::Refusal;
use vmferry_planner_core::queue::Ranking;
use vmferry_planner_core::queue::slot::Limits;
use vmferry_planner_core::stuck::Trouble;
use vmferry_types::{Claim, HostId, MigrationId, Seq, Timestamp, VmId};

pub use rows::{
    Admission, AdmitPower, Adopted, AskHost, BegunFor, Change, Commit, Cordon, Declaration,
    DeclarationKind, Declared, Defined, Deleted, EmptyingChange, EmptyingFilter, EmptyingLogRow,
    EmptyingNotes, EmptyingRow, Ends, Filter, Followed, FromQueue, Grant, Granted, HostAnswer,
    HostDone, HostRow, HostsMark, LogRow, Lost, Mark, MigrationRow, NewEmptying, NewMigration,
    NewPower, Notes, OnlyOpen, PowerAction, PowerKind, PowerPhase, PowerRecord, QueueStart,
    QueuedStart, Refused, Request, Reservation, Room, Sake, SavedHost, Slot, SlotRow, SlotState,
    TakeEmptying, TakeOver, TakePower, Tombstone, VmRow, Which, check_changes, lease_holds,
    slot_of,
};

/// Says why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store could not be opened.
    #[error("open the store {store}")]
    Open {
        /// The file or database.
        store: String,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another planner has it.
    #[error(
        "the store {path} is in use by another planner; stop that one first, or give this one its own file"
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A newer planner wrote it.
    #[error(
        "the store {store} was written by a newer planner (schema {version}, this one knows {known}); run that version or a later one"
    )]
    Newer {
        /// The file or database.
        store: String,
        /// The schema found.
        version: i64,
        /// The newest schema known here.
        known: i64,
    },
    /// Its schema could not be brought up to date.
    #[error("bring the schema of {store} up to date")]
    Schema {
        /// The file or database.
        store: String,
        /// Why not.
        source: sqlx::migrate::MigrateError,
    },
    /// A statement failed.
    #[error("store: {operation}")]
    Sql {
        /// What was being done.
        operation: &'static str,
        /// Why it failed.
        source: sqlx::Error,
    },
    /// The database did not answer. What was asked may be done or not.
    #[error("store: {operation}: the database said nothing for {waited:?}")]
    Silent {
        /// What was being done.
        operation: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A VM's row was there and then was not: no planner deletes one.
    #[error("store: the row of VM {vm} has vanished")]
    Vanished {
        /// The VM.
        vm: VmId,
    },
    /// A column holds what this planner never writes.
    #[error("store: column `{column}` holds `{value}`")]
    Corrupt {
        /// The column.
        column: &'static str,
        /// What it holds.
        value: String,
    },
    /// A record is not the JSON that it should be.
    #[error("store: the record of a {what} cannot be read or written")]
    Record {
        /// Whose record.
        what: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// The state machine refused what the transaction decided.
    #[error("store: the migration does not take what was decided for it")]
    Machine {
        /// Why.
        source: Refusal,
    },
    /// The same of what empties a host.
    #[error("store: the emptying of a host does not take what was decided for it")]
    Emptying {
        /// Why.
        source: vmferry_planner_core::lifecycle::Refusal,
    },
    /// What was read for several at once could not be read.
    #[error("store: what was asked for with others could not be read")]
    Together {
        /// Why.
        source: std::sync::Arc<Self>,
    },
    /// An open migration's VM belongs to no or another admission.
    #[error("store: migration {migration} is open, but its VM is not given to it")]
    Orphan {
        /// The migration.
        migration: MigrationId,
    },
}

/// What a store answers, when it does.
pub type Stored<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Whether other planners may use a store at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// No other one can have it open.
    Alone,
    /// Others may write to it at any moment.
    Shared,
}

/// The durable store.
pub trait Store: std::fmt::Debug + Send + Sync + 'static {
    /// Says whether other planners may use it too.
    fn sharing(&self) -> Sharing;
    /// Reads the clock by which leases are counted: one for all who use the store, so that a
    /// planner whose own clock is wrong neither keeps a row for long nor lets go of it at once.
    fn lease_clock(&self) -> Stored<'_, Timestamp>;

    /// Reads every host that ever introduced itself.
    fn hosts(&self) -> Stored<'_, Vec<HostRow>>;
    /// Writes what a host said of itself, unless another host has its name.
    fn save_host<'a>(&'a self, host: &'a HostRow) -> Stored<'a, SavedHost>;
    /// Reads what is different once any host was written; `None` if nobody keeps it.
    fn hosts_mark(&self) -> Stored<'_, Option<HostsMark>> {
        Box::pin(std::future::ready(Ok(None)))
    }
    /// Writes that a planner has heard some hosts, by the [lease clock](Self::lease_clock).
    fn hear_hosts<'a>(&'a self, hosts: &'a [HostId], by: &'a str, at: Timestamp) -> Stored<'a, ()>;
    /// Reads when planners other than `by` heard a host last.
    fn heard_by_another<'a>(
        &'a self,
        host: &'a HostId,
        by: &'a str,
    ) -> Stored<'a, Option<Timestamp>>;
    /// Writes that a host is dead, and marks as lost what ran there and no admission owns.
    fn declare_dead<'a>(
        &'a self,
        host: &'a HostId,
        declaration: &'a Declaration,
    ) -> Stored<'a, Declared>;
    /// Makes a declaration void: the host was heard from the very boot again. `false` if none of
    /// that boot holds.
    fn void_declaration<'a>(
        &'a self,
        host: &'a HostId,
        boot_id: &'a str,
        now: Timestamp,
    ) -> Stored<'a, bool>;

    /// Reads every VM that is not deleted.
    fn vms(&self) -> Stored<'_, Vec<VmRow>>;
    /// Reads the VMs that a host owns, or owned last.
    fn vms_on<'a>(&'a self, host: &'a HostId) -> Stored<'a, Vec<VmRow>>;
    /// Reads what changes whenever a VM of a host does, comes or goes.
    ///
    /// It is asked at every report, where all the VMs would be too much.
    fn mark_of<'a>(&'a self, host: &'a HostId) -> Stored<'a, Mark> {
        Box::pin(async move { Ok(Mark::of(&self.vms_on(host).await?)) })
    }
    /// Reads one VM.
    fn vm(&self, vm: VmId) -> Stored<'_, Option<VmRow>>;
    /// Reads the VMs of a name; more than one only if several were adopted so.
    fn vms_named<'a>(&'a self, name: &'a str) -> Stored<'a, Vec<VmRow>>;
    /// Reads what stays of a deleted VM.
    fn tombstone(&self, vm: VmId) -> Stored<'_, Option<Tombstone>>;
    /// Writes a new VM, unless its id or name is taken.
    fn define_vm<'a>(&'a self, vm: &'a VmRow, now: Timestamp) -> Stored<'a, Defined>;
    /// Writes a VM that a host reported and the store does not know (rule R13).
    fn adopt_vm<'a>(&'a self, vm: &'a VmRow, now: Timestamp) -> Stored<'a, Adopted>;
    /// Deletes a VM that is stopped or lost. Its generation and claim are kept.
    fn delete_vm(&self, vm: VmId, now: Timestamp) -> Stored<'_, Deleted>;
    /// Raises a VM's claim to one that an agent has seen, so that the next is above it; `false` if
    /// it was as high before.
    fn raise_claim(&self, vm: VmId, claim: Claim, now: Timestamp) -> Stored<'_, bool>;
    /// Lets a VM follow what was done to it without the planner, if nothing is under way for it.
    fn follow_vm<'a>(&'a self, followed: &'a Followed, now: Timestamp) -> Stored<'a, bool>;
    /// Marks a running VM as lost: its process is proven gone and no admission is open.
    fn mark_lost<'a>(&'a self, lost: &'a Lost, now: Timestamp) -> Stored<'a, bool>;

    /// Reads the open reservations of all hosts.
    fn reservations(&self) -> Stored<'_, Vec<Reservation>>;
    /// Reads the cordons that hold at `now`.
    fn cordons(&self, now: Timestamp) -> Stored<'_, Vec<Cordon>>;
    /// Holds a host back in the name of an owner.
    fn cordon<'a>(&'a self, cordon: &'a Cordon) -> Stored<'a, ()>;
    /// Lets go of what an owner held.
    fn uncordon<'a>(&'a self, host: &'a HostId, owner: &'a str) -> Stored<'a, ()>;
    /// Reads what hosts are to everyone else for the sake of what empties them; one that is not
    /// named is active.
    fn lifecycles(&self) -> Stored<'_, BTreeMap<HostId, Lifecycle>>;

    /// Does what is asked of a host, or says what is there first; all under the host's lock.
    fn ask_host<'a>(&'a self, ask: &'a AskHost, now_us: u64) -> Stored<'a, HostAnswer>;
    /// Reads one maintenance job, drain or retirement.
    fn emptying(&self, id: EmptyingId) -> Stored<'_, Option<EmptyingRow>>;
    /// Reads those, the newest first.
    fn emptyings<'a>(&'a self, filter: &'a EmptyingFilter) -> Stored<'a, Vec<EmptyingRow>>;
    /// Reads what happened to one, in order.
    fn emptying_log(&self, id: EmptyingId) -> Stored<'_, Vec<EmptyingLogRow>>;
    /// Makes `owner` its driver, under the next claim.
    fn take_over_emptying<'a>(
        &'a self,
        id: EmptyingId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeEmptying>;
    /// Keeps its lease; `false` if it is another's by now.
    fn renew_emptying_lease<'a>(
        &'a self,
        row: &'a EmptyingRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool>;
    /// Writes changes with the cordon that follows from them, or nothing.
    fn commit_emptying<'a>(
        &'a self,
        before: &'a EmptyingRow,
        changes: &'a [EmptyingChange],
        now_us: u64,
    ) -> Stored<'a, Commit<Box<EmptyingRow>>>;

    /// Takes, or keeps, the slot that a migration needs before its memory crosses.
    fn take_slot<'a>(
        &'a self,
        row: &'a MigrationRow,
        limits: &'a Limits,
        ranking: &'a Ranking,
        now: Timestamp,
    ) -> Stored<'a, Slot>;

    /// Lets a start wait for room, or says why not.
    fn queue_start<'a>(&'a self, new: &'a QueuedStart, now: Timestamp) -> Stored<'a, QueueStart>;
    /// Reads the starts that wait.
    fn queued_starts(&self) -> Stored<'_, Vec<QueuedStart>>;
    /// Reads a start that waits, or waited.
    fn queued_start(&self, id: MigrationId) -> Stored<'_, Option<QueuedStart>>;
    /// Writes why a start waits still; `false` if it does not any more.
    fn note_queued_start<'a>(
        &'a self,
        id: MigrationId,
        seq: Seq,
        note: &'a str,
    ) -> Stored<'a, bool>;
    /// Ends the wait of a start without one; `false` if it had ended.
    fn end_queued_start<'a>(
        &'a self,
        id: MigrationId,
        seq: Seq,
        outcome: &'a str,
        now_us: u64,
    ) -> Stored<'a, bool>;

    /// Admits a migration, queues it, or says why not; all under the write lock.
    fn admit<'a>(&'a self, new: &'a NewMigration, now_us: u64) -> Stored<'a, Admission>;
    /// Reads one migration.
    fn migration(&self, id: MigrationId) -> Stored<'_, Option<MigrationRow>>;
    /// Reads the migration that a request led to.
    fn migration_of_request<'a>(&'a self, request: &'a str) -> Stored<'a, Option<MigrationRow>>;
    /// Reads migrations, the newest first.
    fn migrations<'a>(&'a self, filter: &'a Filter) -> Stored<'a, Vec<MigrationRow>>;
    /// Reads what happened to a migration, in order.
    fn log(&self, id: MigrationId) -> Stored<'_, Vec<LogRow>>;
    /// Makes `owner` the driver of an open migration, under the next claim. Both times are of the
    /// [lease clock](Self::lease_clock); another's lease that reaches further than one can is none.
    fn take_over<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeOver>;
    /// Keeps a lease; `false` if it is another's by now.
    fn renew_lease<'a>(
        &'a self,
        row: &'a MigrationRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool>;
    /// Writes what keeps a migration from going on, for those who do not drive it; nothing, if it is
    /// another's by now.
    fn note_trouble<'a>(
        &'a self,
        row: &'a MigrationRow,
        trouble: Option<&'a Trouble>,
    ) -> Stored<'a, ()>;
    /// Ends the leases of one planner, which drives nothing any more: another may begin at once.
    fn release_leases<'a>(&'a self, owner: &'a str) -> Stored<'a, ()>;
    /// Ends every lease: called by a planner that has just opened a store that it has alone.
    fn clear_leases(&self) -> Stored<'_, ()>;
    /// Admits a queued migration to a destination that was found for it.
    fn grant<'a>(
        &'a self,
        before: &'a MigrationRow,
        grant: &'a Grant,
        now_us: u64,
    ) -> Stored<'a, Granted>;
    /// Writes one or more changes of a migration with all that follows from them, or nothing.
    fn commit<'a>(
        &'a self,
        before: &'a MigrationRow,
        changes: &'a [Change],
        notes: &'a Notes,
        now_us: u64,
    ) -> Stored<'a, Commit<Box<MigrationRow>>>;

    /// Admits a start or a stop, or says why not.
    fn admit_power<'a>(&'a self, new: &'a NewPower, now_us: u64) -> Stored<'a, AdmitPower>;
    /// Reads one start or stop.
    fn power(&self, id: MigrationId) -> Stored<'_, Option<PowerAction>>;
    /// Reads the starts and stops that have not ended.
    fn open_power(&self) -> Stored<'_, Vec<PowerAction>>;
    /// Makes `owner` the driver of an open start or stop, under the next claim.
    fn take_over_power<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakePower>;
    /// Keeps the lease of a start or stop; `false` if it is another's by now.
    fn renew_power_lease<'a>(
        &'a self,
        action: &'a PowerAction,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool>;
    /// Ends a start or a stop and says what became of its VM.
    fn end_power<'a>(
        &'a self,
        action: &'a PowerAction,
        end: &'a Ends,
        now_us: u64,
    ) -> Stored<'a, Commit<()>>;
}
