//! What waits: starts for room, and transfers for a link.

use sqlx::any::AnyRow;
use vmferry_planner_core::queue::slot::Limits;
use vmferry_planner_core::queue::{Priority, Ranking};
use vmferry_types::{HostId, MigrationId, PowerState, Seq, Timestamp};

use super::fleet::{vm_locked, write_vm};
use super::rows::{self, admission_id, host_id, int, optional_uint, sql, uint, vm_id};
use super::{SqlStore, Tx, commit, held};
use crate::store::{
    MigrationRow, QueueStart, QueuedStart, Refused, Slot, SlotRow, SlotState, StoreError, slot_of,
};

macro_rules! select_start {
    ($($tail:literal),+) => {
        concat!(
            "SELECT id, request_id, vm_id, asked_host, priority, seq, asked_us, blocked_since_ms, \
             deadline_ms, note, ended_us, outcome FROM queued_starts ",
            $($tail),+
        )
    };
}

fn priority(row: &AnyRow) -> Result<Priority, StoreError> {
    let label: String = rows::get(row, "priority")?;
    Priority::from_label(&label).ok_or_else(|| rows::corrupt("priority", &label))
}

fn start_row(row: &AnyRow) -> Result<QueuedStart, StoreError> {
    let asked: Option<String> = rows::get(row, "asked_host")?;
    Ok(QueuedStart {
        id: admission_id(&rows::get::<String>(row, "id")?)?,
        request: rows::get(row, "request_id")?,
        vm: vm_id(&rows::get::<String>(row, "vm_id")?)?,
        asked_host: asked.as_deref().map(host_id).transpose()?,
        priority: priority(row)?,
        seq: Seq::from_stored(uint(row, "seq")?),
        asked_us: uint(row, "asked_us")?,
        blocked_since: Timestamp(uint(row, "blocked_since_ms")?),
        deadline: Timestamp(uint(row, "deadline_ms")?),
        note: rows::get(row, "note")?,
        ended_us: optional_uint(row, "ended_us")?,
        outcome: rows::get(row, "outcome")?,
    })
}

async fn start_locked(tx: &mut Tx, id: MigrationId) -> Result<Option<QueuedStart>, StoreError> {
    sqlx::query(held!(tx, select_start!("WHERE id = $1")))
        .bind(id.to_string())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a queued start"))?
        .as_ref()
        .map(start_row)
        .transpose()
}

/// Takes a start out of the queue for it is admitted; `false` if it does not wait any more.
pub(super) async fn leave_queue(
    tx: &mut Tx,
    id: MigrationId,
    now_us: u64,
) -> Result<bool, StoreError> {
    let result = sqlx::query(
        "UPDATE queued_starts SET ended_us = $2, outcome = 'admitted', seq = seq + 1
         WHERE id = $1 AND ended_us IS NULL",
    )
    .bind(id.to_string())
    .bind(int(now_us))
    .execute(tx.connection())
    .await
    .map_err(sql("end a queued start"))?;
    Ok(result.rows_affected() == 1)
}

fn slot_row(row: &AnyRow) -> Result<SlotRow, StoreError> {
    let state: String = rows::get(row, "slot")?;
    Ok(SlotRow {
        id: admission_id(&rows::get::<String>(row, "id")?)?,
        source: host_id(&rows::get::<String>(row, "source")?)?,
        destination: host_id(&rows::get::<String>(row, "destination")?)?,
        priority: priority(row)?,
        created_us: uint(row, "created_us")?,
        state: SlotState::from_label(&state).ok_or_else(|| rows::corrupt("slot", &state))?,
        since: Timestamp(optional_uint(row, "slot_ms")?.unwrap_or_default()),
        seen: Timestamp(optional_uint(row, "slot_seen_ms")?.unwrap_or_default()),
    })
}

impl SqlStore {
    pub(super) async fn slot(
        &self,
        row: &MigrationRow,
        limits: &Limits,
        ranking: &Ranking,
        now: Timestamp,
    ) -> Result<Slot, StoreError> {
        let id = row.migration.id;
        let mut tx = self.begin().await?;
        tx.hold("transfers").await?;
        let asked = sqlx::query(
            "UPDATE migrations SET slot = COALESCE(slot, 'wanted'),
                                   slot_ms = COALESCE(slot_ms, $3), slot_seen_ms = $3
             WHERE id = $1 AND claim = $2 AND ended_us IS NULL",
        )
        .bind(id.to_string())
        .bind(int(row.claim.value()))
        .bind(int(now.value()))
        .execute(tx.connection())
        .await
        .map_err(sql("ask for a transfer slot"))?;
        if asked.rows_affected() == 0 {
            // Another driver has it by now, or it is over: nothing is asked for, and nothing taken.
            return Ok(Slot::Full(Vec::new()));
        }
        let all: Vec<SlotRow> = sqlx::query(
            "SELECT id, source, destination, priority, created_us, slot, slot_ms, slot_seen_ms
             FROM migrations
             WHERE ended_us IS NULL AND slot IS NOT NULL AND destination IS NOT NULL
               AND phase IN ('admitted', 'captured')",
        )
        .fetch_all(tx.connection())
        .await
        .map_err(sql("read transfer slots"))?
        .iter()
        .map(slot_row)
        .collect::<Result<_, _>>()?;
        let held = all.iter().any(|one| one.id == id && one.state == SlotState::Held);
        let slot = if held { Slot::Held } else { slot_of(id, &all, limits, ranking, now) };
        if slot == Slot::Held && !held {
            sqlx::query("UPDATE migrations SET slot = 'held', slot_ms = $2 WHERE id = $1")
                .bind(id.to_string())
                .bind(int(now.value()))
                .execute(tx.connection())
                .await
                .map_err(sql("take a transfer slot"))?;
        }
        commit("take a transfer slot", tx).await?;
        Ok(slot)
    }

    pub(super) async fn insert_queued_start(
        &self,
        new: &QueuedStart,
        now: Timestamp,
    ) -> Result<QueueStart, StoreError> {
        let mut tx = self.begin().await?;
        let vm = vm_locked(&mut tx, new.vm).await?;
        if let Some(request) = &new.request {
            let known = sqlx::query(select_start!("WHERE request_id = $1"))
                .bind(request)
                .fetch_optional(tx.connection())
                .await
                .map_err(sql("read a queued start"))?;
            if let Some(known) = &known {
                return Ok(QueueStart::Known(start_row(known)?));
            }
        }
        let Some(mut vm) = vm else { return Ok(QueueStart::Refused(Refused::UnknownVm)) };
        if let Some(admission) = vm.admission {
            return Ok(QueueStart::Refused(Refused::InFlight { admission }));
        }
        match vm.power {
            PowerState::Stopped | PowerState::Lost => {}
            power @ (PowerState::Starting | PowerState::Running | PowerState::Stopping) => {
                return Ok(QueueStart::Refused(Refused::Power { power }));
            }
        }
        vm.admission = Some(new.id);
        vm.error = String::new();
        write_vm(&mut tx, &vm, now).await?;
        sqlx::query(
            "INSERT INTO queued_starts (id, request_id, vm_id, asked_host, priority, seq, asked_us,
                                        blocked_since_ms, deadline_ms, note, outcome)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, '')",
        )
        .bind(new.id.to_string())
        .bind(&new.request)
        .bind(new.vm.to_string())
        .bind(new.asked_host.as_ref().map(HostId::as_str))
        .bind(new.priority.label())
        .bind(int(new.seq.value()))
        .bind(int(new.asked_us))
        .bind(int(new.blocked_since.value()))
        .bind(int(new.deadline.value()))
        .bind(rows::words(&new.note))
        .execute(tx.connection())
        .await
        .map_err(sql("queue a start"))?;
        commit("queue a start", tx).await?;
        Ok(QueueStart::Queued(new.clone()))
    }

    pub(super) async fn read_queued_starts(&self) -> Result<Vec<QueuedStart>, StoreError> {
        sqlx::query(select_start!("WHERE ended_us IS NULL ORDER BY asked_us, id"))
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read queued starts"))?
            .iter()
            .map(start_row)
            .collect()
    }

    pub(super) async fn read_queued_start(
        &self,
        id: MigrationId,
    ) -> Result<Option<QueuedStart>, StoreError> {
        sqlx::query(select_start!("WHERE id = $1"))
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a queued start"))?
            .as_ref()
            .map(start_row)
            .transpose()
    }

    pub(super) async fn write_start_note(
        &self,
        id: MigrationId,
        seq: Seq,
        note: &str,
    ) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE queued_starts SET note = $3, seq = seq + 1
             WHERE id = $1 AND seq = $2 AND ended_us IS NULL",
        )
        .bind(id.to_string())
        .bind(int(seq.value()))
        .bind(rows::words(note))
        .execute(&self.writer)
        .await
        .map_err(sql("note why a start waits"))?;
        Ok(result.rows_affected() == 1)
    }

    pub(super) async fn give_start_up(
        &self,
        id: MigrationId,
        seq: Seq,
        outcome: &str,
        now_us: u64,
    ) -> Result<bool, StoreError> {
        let mut tx = self.begin().await?;
        let Some(start) = start_locked(&mut tx, id).await? else { return Ok(false) };
        if start.seq != seq || start.ended_us.is_some() {
            return Ok(false);
        }
        if let Some(mut vm) = vm_locked(&mut tx, start.vm).await?
            && vm.admission == Some(id)
        {
            vm.admission = None;
            outcome.clone_into(&mut vm.error);
            write_vm(&mut tx, &vm, Timestamp(now_us / 1000)).await?;
        }
        sqlx::query(
            "UPDATE queued_starts SET ended_us = $2, outcome = $3, seq = seq + 1 WHERE id = $1",
        )
        .bind(id.to_string())
        .bind(int(now_us))
        .bind(rows::words(outcome))
        .execute(tx.connection())
        .await
        .map_err(sql("end a queued start"))?;
        commit("end a queued start", tx).await?;
        Ok(true)
    }
}
