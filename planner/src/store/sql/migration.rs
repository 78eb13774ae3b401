//! Rows of migrations, their log, and what follows from them for VMs and reservations.

use sqlx::any::AnyRow;

use vmferry_planner_core::migration::{Entry, Flight, Migration, Phase};
use vmferry_planner_core::stuck::Trouble;
use vmferry_types::{
    Bytes, Claim, HostId, MigrationId, MilliCpu, Millis, PhaseLabel, Seq, Timestamp,
};

use super::fleet::{reserve, vm_locked, write_vm};
use super::rows::{self, int, optional_uint, sql, uint};
use super::{Engine, SqlStore, Tx, commit, held};
use crate::clock;
use crate::store::rows::{Notes, OnlyOpen};
use crate::store::{
    Commit, Filter, LogRow, MigrationRow, Reservation, StoreError, TakeOver, check_changes,
    lease_holds,
};

macro_rules! select_migration {
    ($($tail:literal),+) => {
        concat!(
            "SELECT request_id, vm_name, claim, seq, lease_owner, lease_until_ms, trouble, trouble_ms, created_us, \
             updated_us, ended_us, record FROM migrations ",
            $($tail),+
        )
    };
}

/// The whole record, as JSON.
#[derive(serde::Deserialize)]
struct Record {
    migration: Migration,
    notes: Notes,
}

/// The same, for writing.
#[derive(serde::Serialize)]
struct RecordRef<'a> {
    migration: &'a Migration,
    notes: &'a Notes,
}

fn record(source: serde_json::Error) -> StoreError {
    StoreError::Record { what: "migration", source }
}

fn record_text(migration: &Migration, notes: &Notes) -> Result<String, StoreError> {
    serde_json::to_string(&RecordRef { migration, notes }).map_err(record)
}

fn migration_row(row: &AnyRow) -> Result<MigrationRow, StoreError> {
    let text: String = rows::get(row, "record")?;
    let Record { migration, notes } = serde_json::from_str(&text).map_err(record)?;
    Ok(MigrationRow {
        migration,
        vm_name: rows::get(row, "vm_name")?,
        request: rows::get(row, "request_id")?,
        claim: Claim::from_stored(uint(row, "claim")?),
        seq: Seq::from_stored(uint(row, "seq")?),
        lease_owner: rows::get(row, "lease_owner")?,
        lease_until: Timestamp(uint(row, "lease_until_ms")?),
        trouble: trouble(row)?,
        created_us: uint(row, "created_us")?,
        updated_us: uint(row, "updated_us")?,
        ended_us: optional_uint(row, "ended_us")?,
        notes,
    })
}

fn trouble(row: &AnyRow) -> Result<Option<Trouble>, StoreError> {
    let text: Option<String> = rows::get(row, "trouble")?;
    let since = Timestamp(optional_uint(row, "trouble_ms")?.unwrap_or_default());
    Ok(text.map(|text| Trouble { text, since }))
}

/// Reads a migration, and holds its row until the transaction ends.
pub(super) async fn migration_locked(
    tx: &mut Tx,
    id: MigrationId,
) -> Result<Option<MigrationRow>, StoreError> {
    sqlx::query(held!(tx, select_migration!("WHERE id = $1")))
        .bind(id.to_string())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a migration"))?
        .as_ref()
        .map(migration_row)
        .transpose()
}

pub(super) async fn of_request(
    tx: &mut Tx,
    request: &str,
) -> Result<Option<MigrationRow>, StoreError> {
    sqlx::query(select_migration!("WHERE request_id = $1"))
        .bind(request)
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a migration by its request"))?
        .as_ref()
        .map(migration_row)
        .transpose()
}

pub(super) async fn insert_row(tx: &mut Tx, row: &MigrationRow) -> Result<(), StoreError> {
    let migration = &row.migration;
    sqlx::query(
        "INSERT INTO migrations (id, request_id, vm_id, vm_name, source, destination, phase,
                                 generation, claim, seq, lease_until_ms, created_us, updated_us,
                                 record, priority, emptying)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 0, $11, $12, $13, $14, $15)",
    )
    .bind(migration.id.to_string())
    .bind(&row.request)
    .bind(migration.vm.to_string())
    .bind(&row.vm_name)
    .bind(migration.source.as_str())
    .bind(migration.destination().map(HostId::as_str))
    .bind(migration.label().label())
    .bind(int(migration.books().generation.value()))
    .bind(int(row.claim.value()))
    .bind(int(row.seq.value()))
    .bind(int(row.created_us))
    .bind(int(row.updated_us))
    .bind(record_text(migration, &row.notes)?)
    .bind(row.notes.sake.priority.label())
    .bind(&row.notes.sake.emptying)
    .execute(tx.connection())
    .await
    .map_err(sql("write a migration"))?;
    Ok(())
}

/// One write of a row.
#[derive(Clone, Copy)]
pub(super) struct Write<'a> {
    pub(super) before: &'a MigrationRow,
    pub(super) entries: &'a [Entry],
    pub(super) notes: &'a Notes,
    pub(super) now_us: u64,
}

/// Writes the row after the last entry if it is still the one that they were decided on.
pub(super) async fn update_row(
    tx: &mut Tx,
    write: &Write<'_>,
) -> Result<Option<MigrationRow>, StoreError> {
    let before = write.before;
    check_changes(&before.migration, write.entries)?;
    let mut row =
        MigrationRow { notes: write.notes.clone(), updated_us: write.now_us, ..before.clone() };
    for entry in write.entries {
        row.migration = entry.after.clone();
        row.seq = row.seq.next();
    }
    if row.migration.entered_anew(&before.migration) {
        row.notes.entered_us = write.now_us;
    }
    let books = row.migration.books();
    row.ended_us = match books.flight {
        Flight::Held => None,
        Flight::Released => before.ended_us.or(Some(write.now_us)),
    };
    let result = sqlx::query(
        "UPDATE migrations SET phase = $4, destination = $5, generation = $6, seq = $7,
                               updated_us = $8, ended_us = $9, record = $10
         WHERE id = $1 AND claim = $2 AND seq = $3",
    )
    .bind(row.migration.id.to_string())
    .bind(int(before.claim.value()))
    .bind(int(before.seq.value()))
    .bind(row.migration.label().label())
    .bind(row.migration.destination().map(HostId::as_str))
    .bind(int(books.generation.value()))
    .bind(int(row.seq.value()))
    .bind(int(row.updated_us))
    .bind(row.ended_us.map(int))
    .bind(record_text(&row.migration, &row.notes)?)
    .execute(tx.connection())
    .await
    .map_err(sql("write a migration"))?;
    Ok((result.rows_affected() == 1).then_some(row))
}

async fn log_one(tx: &mut Tx, id: MigrationId, entry: &LogRow) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO migration_log (migration_id, seq, at_us, event, phase, note, body)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(id.to_string())
    .bind(int(entry.seq.value()))
    .bind(int(entry.at_us))
    .bind(&entry.event)
    .bind(entry.phase.label())
    .bind(&entry.note)
    .bind(&entry.body)
    .execute(tx.connection())
    .await
    .map_err(sql("write a log entry"))?;
    Ok(())
}

/// Writes the first entry: the machine as it was opened, which replay begins from.
pub(super) async fn opened(
    tx: &mut Tx,
    migration: &Migration,
    now_us: u64,
) -> Result<(), StoreError> {
    let entry = LogRow {
        seq: Seq::FIRST,
        at_us: now_us,
        event: "opened".to_owned(),
        phase: migration.label(),
        note: String::new(),
        body: serde_json::to_string(migration).map_err(record)?,
    };
    log_one(tx, migration.id, &entry).await
}

/// Writes an entry for each change after `seq`.
pub(super) async fn log_entries(
    tx: &mut Tx,
    id: MigrationId,
    mut seq: Seq,
    entries: &[Entry],
    now_us: u64,
) -> Result<(), StoreError> {
    for entry in entries {
        seq = seq.next();
        let row = LogRow {
            seq,
            at_us: now_us,
            event: entry.event.label().to_owned(),
            phase: entry.after.label(),
            note: crate::view::note(entry),
            body: serde_json::to_string(&entry.event).map_err(record)?,
        };
        log_one(tx, id, &row).await?;
    }
    Ok(())
}

/// Makes true beside the row what its phase says: who owns the VM, what is reserved.
pub(super) async fn keep_books(
    tx: &mut Tx,
    before: &Migration,
    row: &MigrationRow,
    now: Timestamp,
) -> Result<(), StoreError> {
    let books = row.migration.books();
    if before.books() == books {
        return Ok(());
    }
    let Some(mut vm) = vm_locked(tx, row.migration.vm).await? else {
        return Err(StoreError::Orphan { migration: row.migration.id });
    };
    if vm.admission != Some(row.migration.id) {
        return Err(StoreError::Orphan { migration: row.migration.id });
    }
    vm.host = Some(books.host);
    vm.generation = vm.generation.max(books.generation);
    if let Some(power) = books.power {
        vm.power = power;
    }
    if let Phase::Failed { cause, .. } = &row.migration.phase {
        vm.error = cause.to_string();
    }
    if books.flight == Flight::Released {
        vm.admission = None;
    }
    write_vm(tx, &vm, now).await?;
    let id = row.migration.id.to_string();
    let held = before.books().reserved;
    for host in held.difference(&books.reserved) {
        sqlx::query(
            "UPDATE reservations SET closed_ms = $3
             WHERE admission = $1 AND host = $2 AND closed_ms IS NULL",
        )
        .bind(&id)
        .bind(host.as_str())
        .bind(int(now.value()))
        .execute(tx.connection())
        .await
        .map_err(sql("close a reservation"))?;
    }
    for host in books.reserved.difference(&held) {
        let reservation = Reservation {
            admission: row.migration.id,
            host: host.clone(),
            vm: row.migration.vm,
            memory: Bytes(row.notes.memory_bytes),
            cpu: MilliCpu(row.notes.cpu_milli),
        };
        reserve(tx, &reservation, now).await?;
    }
    Ok(())
}

impl SqlStore {
    pub(super) async fn read_migration(
        &self,
        id: MigrationId,
    ) -> Result<Option<MigrationRow>, StoreError> {
        sqlx::query(select_migration!("WHERE id = $1"))
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a migration"))?
            .as_ref()
            .map(migration_row)
            .transpose()
    }

    pub(super) async fn read_migration_of_request(
        &self,
        request: &str,
    ) -> Result<Option<MigrationRow>, StoreError> {
        sqlx::query(select_migration!("WHERE request_id = $1"))
            .bind(request)
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a migration by its request"))?
            .as_ref()
            .map(migration_row)
            .transpose()
    }

    pub(super) async fn read_migrations(
        &self,
        filter: &Filter,
    ) -> Result<Vec<MigrationRow>, StoreError> {
        let limit = if filter.limit == 0 { i64::MAX } else { i64::from(filter.limit) };
        let open = match filter.open {
            OnlyOpen::All => 0_i64,
            OnlyOpen::Open => 1,
        };
        sqlx::query(select_migration!(
            "WHERE ($1 = '' OR vm_id = $1) AND ($2 = 0 OR ended_us IS NULL) \
             ORDER BY created_us DESC, id DESC LIMIT $3"
        ))
        .bind(filter.vm.map(|vm| vm.to_string()).unwrap_or_default())
        .bind(open)
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(sql("read migrations"))?
        .iter()
        .map(migration_row)
        .collect()
    }

    pub(super) async fn read_log(&self, id: MigrationId) -> Result<Vec<LogRow>, StoreError> {
        sqlx::query(
            "SELECT seq, at_us, event, phase, note, body FROM migration_log
             WHERE migration_id = $1 ORDER BY seq",
        )
        .bind(id.to_string())
        .fetch_all(&self.readers)
        .await
        .map_err(sql("read a log"))?
        .iter()
        .map(|row| {
            let phase: String = rows::get(row, "phase")?;
            Ok(LogRow {
                seq: Seq::from_stored(uint(row, "seq")?),
                at_us: uint(row, "at_us")?,
                event: rows::get(row, "event")?,
                phase: PhaseLabel::from_label(&phase)
                    .ok_or_else(|| rows::corrupt("phase", &phase))?,
                note: rows::get(row, "note")?,
                body: rows::get(row, "body")?,
            })
        })
        .collect()
    }

    pub(super) async fn claim_migration(
        &self,
        id: MigrationId,
        owner: &str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Result<TakeOver, StoreError> {
        let mut tx = self.begin().await?;
        let Some(mut row) = migration_locked(&mut tx, id).await? else {
            return Ok(TakeOver::Ended);
        };
        if row.ended_us.is_some() {
            return Ok(TakeOver::Ended);
        }
        let another = row.lease_owner.as_deref().is_some_and(|holder| holder != owner);
        let term = lease_until.since(now);
        if another && self.lease_keeps_away(&mut tx, row.lease_until, now, term).await? {
            return Ok(TakeOver::Busy);
        }
        let Some(mut vm) = vm_locked(&mut tx, row.migration.vm).await? else {
            return Err(StoreError::Orphan { migration: id });
        };
        vm.claim = vm.claim.max(row.claim).next();
        write_vm(&mut tx, &vm, now).await?;
        row.claim = vm.claim;
        row.lease_owner = Some(owner.to_owned());
        row.lease_until = lease_until;
        sqlx::query(
            "UPDATE migrations SET claim = $2, lease_owner = $3, lease_until_ms = $4
             WHERE id = $1",
        )
        .bind(id.to_string())
        .bind(int(row.claim.value()))
        .bind(owner)
        .bind(int(lease_until.value()))
        .execute(tx.connection())
        .await
        .map_err(sql("claim a migration"))?;
        commit("claim a migration", tx).await?;
        Ok(TakeOver::Taken(Box::new(row)))
    }

    pub(super) async fn keep_lease(
        &self,
        row: &MigrationRow,
        owner: &str,
        lease_until: Timestamp,
    ) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE migrations SET lease_until_ms = $4
             WHERE id = $1 AND claim = $2 AND lease_owner = $3",
        )
        .bind(row.migration.id.to_string())
        .bind(int(row.claim.value()))
        .bind(owner)
        .bind(int(lease_until.value()))
        .execute(&self.writer)
        .await
        .map_err(sql("keep a lease"))?;
        Ok(result.rows_affected() == 1)
    }

    /// Says whether another's lease still keeps away whoever read the clock at `now`.
    ///
    /// One that reaches too far is looked at again by the clock as it is: whoever hung since it read
    /// it would take every lease for one that a wrong clock wrote.
    pub(super) async fn lease_keeps_away(
        &self,
        tx: &mut Tx,
        until: Timestamp,
        now: Timestamp,
        term: Millis,
    ) -> Result<bool, StoreError> {
        if until <= now || lease_holds(until, now, term) {
            return Ok(until > now);
        }
        let read_anew = match self.engine {
            Engine::Sqlite => clock::now(),
            Engine::Postgres => clock_of(sqlx::query(CLOCK).fetch_one(tx.connection()).await)?,
        };
        Ok(lease_holds(until, read_anew, term))
    }

    /// Reads the clock that all who use the database have in common.
    pub(super) async fn read_clock(&self) -> Result<Timestamp, StoreError> {
        match self.engine {
            // One planner has it alone.
            Engine::Sqlite => Ok(clock::now()),
            Engine::Postgres => clock_of(sqlx::query(CLOCK).fetch_one(&self.readers).await),
        }
    }

    pub(super) async fn write_trouble(
        &self,
        row: &MigrationRow,
        trouble: Option<&Trouble>,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE migrations SET trouble = $3, trouble_ms = $4 WHERE id = $1 AND claim = $2",
        )
        .bind(row.migration.id.to_string())
        .bind(int(row.claim.value()))
        .bind(trouble.map(|trouble| rows::words(&trouble.text)))
        .bind(trouble.map(|trouble| int(trouble.since.value())))
        .execute(&self.writer)
        .await
        .map_err(sql("write what keeps a migration"))?;
        Ok(())
    }

    /// Ends the leases of one planner, or all.
    pub(super) async fn end_leases(&self, owner: Option<&str>) -> Result<(), StoreError> {
        for statement in [
            "UPDATE migrations SET lease_owner = NULL, lease_until_ms = 0
             WHERE ended_us IS NULL AND ($1 = '' OR lease_owner = $1)",
            "UPDATE power_actions SET lease_owner = NULL, lease_until_ms = 0
             WHERE ended_us IS NULL AND ($1 = '' OR lease_owner = $1)",
            "UPDATE emptyings SET lease_owner = NULL, lease_until_ms = 0
             WHERE driven = 1 AND ($1 = '' OR lease_owner = $1)",
        ] {
            sqlx::query(statement)
                .bind(owner.unwrap_or_default())
                .execute(&self.writer)
                .await
                .map_err(sql("end leases"))?;
        }
        Ok(())
    }

    pub(super) async fn write_changes(
        &self,
        write: Write<'_>,
    ) -> Result<Commit<Box<MigrationRow>>, StoreError> {
        let before = write.before;
        let mut tx = self.begin().await?;
        let Some(row) = update_row(&mut tx, &write).await? else {
            return Ok(Commit::Raced);
        };
        let id = row.migration.id;
        log_entries(&mut tx, id, before.seq, write.entries, write.now_us).await?;
        keep_books(&mut tx, &before.migration, &row, Timestamp(write.now_us / 1000)).await?;
        commit("write a migration", tx).await?;
        Ok(Commit::Done(Box::new(row)))
    }
}

/// Not the time at which a transaction began.
const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::BIGINT AS now_ms";

fn clock_of(read: Result<AnyRow, sqlx::Error>) -> Result<Timestamp, StoreError> {
    Ok(Timestamp(uint(&read.map_err(sql("read the clock"))?, "now_ms")?))
}
