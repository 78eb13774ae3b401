//! What is decided together, under the write lock, before a migration holds anything.

use sqlx::Row as _;
use vmferry_planner_core::migration::{Entry, Event, Guest, Migration};
use vmferry_types::{Claim, PowerState, Seq, Timestamp};

use super::emptying::write_changes;
use super::fleet::{reservations_locked, vm_locked, write_vm};
use super::hosts::cordoned_locked;
use super::migration::{
    Write, insert_row, keep_books, log_entries, migration_locked, of_request, opened, update_row,
};
use super::rows::sql;
use super::{SqlStore, Tx, commit};
use crate::definition::Outline;
use crate::store::rows::{Grant, Granted};
use crate::store::{
    Admission, MigrationRow, NewMigration, Notes, Refused, Sake, StoreError, VmRow,
};

/// Says whether the VM may be given to a new migration.
fn vm_refusal(migration: &Migration, vm: &VmRow) -> Option<Refused> {
    if let Some(admission) = vm.admission {
        return Some(Refused::InFlight { admission });
    }
    let found = match migration.found {
        Guest::Present => PowerState::Running,
        Guest::PoweredOff => PowerState::Stopped,
    };
    if vm.power != found {
        return Some(Refused::Power { power: vm.power });
    }
    if vm.host.as_ref() != Some(&migration.source) || vm.generation != migration.generation {
        return Some(Refused::Moved { host: vm.host.clone() });
    }
    None
}

/// Says whether the destination still takes the VM.
async fn grant_refusal(
    tx: &mut Tx,
    grant: &Grant,
    vm: &VmRow,
    sake: &Sake,
    now: Timestamp,
) -> Result<Option<Refused>, StoreError> {
    let host = &grant.destination;
    let pin = Outline::read(&vm.definition).ok().and_then(|outline| outline.pin);
    if let Some(pin) = grant.pinned_elsewhere(pin, vm.host.as_ref()) {
        return Ok(Some(Refused::Pinned { pin }));
    }
    if cordoned_locked(tx, host, now).await? {
        return Ok(Some(Refused::Cordoned { host: host.clone() }));
    }
    let inbound: i64 =
        sqlx::query("SELECT COUNT(*) FROM migrations WHERE destination = $1 AND ended_us IS NULL")
            .bind(host.as_str())
            .fetch_one(tx.connection())
            .await
            .and_then(|row| row.try_get(0))
            .map_err(sql("count inbound migrations"))?;
    if inbound >= i64::from(grant.inbound_max) {
        let inbound = u32::try_from(inbound).unwrap_or(u32::MAX);
        return Ok(Some(Refused::InboundCap { host: host.clone(), inbound }));
    }
    let reserved = reservations_locked(tx, host).await?;
    if let Err(note) = grant.room.check(&reserved) {
        return Ok(Some(Refused::NoRoom { note }));
    }
    // Asked last: who is refused here has room, and waits for its turn only.
    own_limit(tx, sake).await
}

/// Says whether as many migrations of the same emptying hold a destination as may.
async fn own_limit(tx: &mut Tx, sake: &Sake) -> Result<Option<Refused>, StoreError> {
    let Some(max) = sake.max_parallel else { return Ok(None) };
    tx.hold(&format!("emptying/{}", sake.emptying)).await?;
    let running: i64 = sqlx::query(
        "SELECT COUNT(*) FROM migrations
         WHERE emptying = $1 AND emptying <> '' AND ended_us IS NULL AND destination IS NOT NULL",
    )
    .bind(&sake.emptying)
    .fetch_one(tx.connection())
    .await
    .and_then(|row| row.try_get(0))
    .map_err(sql("count an emptying's migrations"))?;
    let running = u32::try_from(running).unwrap_or(u32::MAX);
    let emptying = sake.emptying.clone();
    Ok((running >= max).then_some(Refused::OwnLimit { emptying, running, max }))
}

impl SqlStore {
    pub(super) async fn insert_migration(
        &self,
        new: &NewMigration,
        now_us: u64,
    ) -> Result<Admission, StoreError> {
        let now = Timestamp(now_us / 1000);
        let mut tx = self.begin().await?;
        if let Ok(grant) = &new.grant {
            tx.hold_host(&grant.destination).await?;
        }
        // Held before anything is read: the same request may be on its way by another planner.
        let vm = vm_locked(&mut tx, new.migration.vm).await?;
        if let Some(request) = &new.request
            && let Some(row) = of_request(&mut tx, request).await?
        {
            return Ok(Admission::Known(Box::new(row)));
        }
        let Some(mut vm) = vm else {
            return Ok(Admission::Refused(Refused::UnknownVm));
        };
        if let Some(refused) = vm_refusal(&new.migration, &vm) {
            return Ok(Admission::Refused(refused));
        }
        let event = match &new.grant {
            Ok(grant) => {
                let sake = &new.notes.sake;
                if let Some(refused) = grant_refusal(&mut tx, grant, &vm, sake, now).await? {
                    return Ok(Admission::Refused(refused));
                }
                Event::Granted { destination: grant.destination.clone() }
            }
            Err(note) => Event::NoRoom { at: now, note: note.clone() },
        };
        let entries = applied(&new.migration, event)?;
        vm.claim = vm.claim.next();
        vm.admission = Some(new.migration.id);
        write_vm(&mut tx, &vm, now).await?;
        let row = admitted_row(new, &entries, vm.claim, now_us);
        insert_row(&mut tx, &row).await?;
        opened(&mut tx, &new.migration, now_us).await?;
        log_entries(&mut tx, new.migration.id, Seq::FIRST, &entries, now_us).await?;
        keep_books(&mut tx, &new.migration, &row, now).await?;
        if let Some(begun) = &new.begun_for {
            let change = std::slice::from_ref(&begun.change);
            if write_changes(&mut tx, &begun.row, change, now_us).await?.is_none() {
                return Ok(Admission::Raced);
            }
        }
        commit("admit a migration", tx).await?;
        Ok(Admission::Admitted(Box::new(row)))
    }

    /// Admits a queued migration to a destination that was found for it.
    pub(super) async fn grant_queued(
        &self,
        before: &MigrationRow,
        grant: &Grant,
        now_us: u64,
    ) -> Result<Granted, StoreError> {
        let now = Timestamp(now_us / 1000);
        let mut tx = self.begin().await?;
        tx.hold_host(&grant.destination).await?;
        let Some(known) = migration_locked(&mut tx, before.migration.id).await? else {
            return Ok(Granted::Raced);
        };
        if known.claim != before.claim || known.seq != before.seq {
            return Ok(Granted::Raced);
        }
        let Some(vm) = vm_locked(&mut tx, known.migration.vm).await? else {
            return Ok(Granted::Refused(Refused::UnknownVm));
        };
        let sake = &known.notes.sake;
        if let Some(refused) = grant_refusal(&mut tx, grant, &vm, sake, now).await? {
            return Ok(Granted::Refused(refused));
        }
        let event = Event::Granted { destination: grant.destination.clone() };
        let entries = applied(&known.migration, event)?;
        let write = Write { before: &known, entries: &entries, notes: &known.notes, now_us };
        let Some(row) = update_row(&mut tx, &write).await? else {
            return Ok(Granted::Raced);
        };
        log_entries(&mut tx, known.migration.id, known.seq, &entries, now_us).await?;
        keep_books(&mut tx, &known.migration, &row, now).await?;
        commit("admit a queued migration", tx).await?;
        Ok(Granted::Done(Box::new(row)))
    }
}

/// Applies what the transaction decided; the machine refusing it is this planner's own bug.
fn applied(migration: &Migration, event: Event) -> Result<Vec<Entry>, StoreError> {
    migration.advance(event).map_err(|source| StoreError::Machine { source })
}

fn admitted_row(new: &NewMigration, entries: &[Entry], claim: Claim, now_us: u64) -> MigrationRow {
    let mut seq = Seq::FIRST;
    let mut migration = &new.migration;
    for entry in entries {
        seq = seq.next();
        migration = &entry.after;
    }
    MigrationRow {
        migration: migration.clone(),
        vm_name: new.vm_name.clone(),
        request: new.request.clone(),
        claim,
        seq,
        lease_owner: None,
        lease_until: Timestamp(0),
        trouble: None,
        created_us: now_us,
        updated_us: now_us,
        ended_us: None,
        notes: Notes { entered_us: now_us, ..new.notes.clone() },
    }
}
