//! Starts and stops.

use sqlx::any::AnyRow;

use vmferry_types::{Claim, Generation, MigrationId, PowerState, Seq, Timestamp};

use super::fleet::{close_reservations, reservations_locked, reserve, vm_locked, write_vm};
use super::hosts::cordoned_locked;
use super::queue::leave_queue;
use super::rows::{self, admission_id, host_id, int, optional_uint, sql, uint, vm_id};
use super::{SqlStore, Tx, commit, held};
use crate::store::{
    AdmitPower, Commit, Ends, FromQueue, NewPower, PowerAction, PowerKind, PowerPhase, Refused,
    Reservation, StoreError, TakePower, VmRow,
};

macro_rules! select_power {
    ($($tail:literal),+) => {
        concat!(
            "SELECT id, request_id, vm_id, host, kind, state, generation, claim, seq, lease_owner, \
             lease_until_ms, created_us, ended_us, record FROM power_actions ",
            $($tail),+
        )
    };
}

fn power_row(row: &AnyRow) -> Result<PowerAction, StoreError> {
    let kind: String = rows::get(row, "kind")?;
    let state: String = rows::get(row, "state")?;
    let record: String = rows::get(row, "record")?;
    Ok(PowerAction {
        id: admission_id(&rows::get::<String>(row, "id")?)?,
        request: rows::get(row, "request_id")?,
        vm: vm_id(&rows::get::<String>(row, "vm_id")?)?,
        host: host_id(&rows::get::<String>(row, "host")?)?,
        kind: PowerKind::from_label(&kind).ok_or_else(|| rows::corrupt("kind", &kind))?,
        phase: PowerPhase::from_label(&state).ok_or_else(|| rows::corrupt("state", &state))?,
        generation: Generation::from_stored(uint(row, "generation")?),
        claim: Claim::from_stored(uint(row, "claim")?),
        seq: Seq::from_stored(uint(row, "seq")?),
        lease_owner: rows::get(row, "lease_owner")?,
        lease_until: Timestamp(uint(row, "lease_until_ms")?),
        created_us: uint(row, "created_us")?,
        ended_us: optional_uint(row, "ended_us")?,
        record: serde_json::from_str(&record)
            .map_err(|source| StoreError::Record { what: "power action", source })?,
    })
}

/// Reads a start or stop, and holds its row until the transaction ends.
async fn power_locked(tx: &mut Tx, id: MigrationId) -> Result<Option<PowerAction>, StoreError> {
    sqlx::query(held!(tx, select_power!("WHERE id = $1")))
        .bind(id.to_string())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a power action"))?
        .as_ref()
        .map(power_row)
        .transpose()
}

/// Reads the start that a request led to.
async fn of_request(tx: &mut Tx, request: Option<&str>) -> Result<Option<PowerAction>, StoreError> {
    let Some(request) = request else { return Ok(None) };
    sqlx::query(select_power!("WHERE request_id = $1"))
        .bind(request)
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a power action"))?
        .as_ref()
        .map(power_row)
        .transpose()
}

/// Whether anyone holds a host back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Cordoned,
}

/// Decides under the lock whether a VM may be started or stopped; `None` if it may.
fn refusal(new: &NewPower, vm: &VmRow, gate: Gate, reserved: &[Reservation]) -> Option<Refused> {
    let waited = match new.from_queue {
        FromQueue::No => None,
        FromQueue::Yes => Some(new.id),
    };
    if vm.admission != waited {
        return Some(vm.admission.map_or(Refused::Power { power: vm.power }, |admission| {
            Refused::InFlight { admission }
        }));
    }
    match (new.kind, vm.power) {
        (PowerKind::Start, PowerState::Stopped | PowerState::Lost)
        | (PowerKind::Stop, PowerState::Running) => {}
        (PowerKind::Start, power) | (PowerKind::Stop, power) => {
            return Some(Refused::Power { power });
        }
    }
    match new.kind {
        PowerKind::Start if gate == Gate::Cordoned => {
            Some(Refused::Cordoned { host: new.host.clone() })
        }
        PowerKind::Start => new.room.check(reserved).err().map(|note| Refused::NoRoom { note }),
        PowerKind::Stop if vm.host.as_ref() != Some(&new.host) => {
            Some(Refused::Moved { host: vm.host.clone() })
        }
        PowerKind::Stop => None,
    }
}

impl SqlStore {
    pub(super) async fn insert_power(
        &self,
        new: &NewPower,
        now_us: u64,
    ) -> Result<AdmitPower, StoreError> {
        let now = Timestamp(now_us / 1000);
        let mut tx = self.begin().await?;
        if new.kind == PowerKind::Start {
            tx.hold_host(&new.host).await?;
        }
        let vm = vm_locked(&mut tx, new.vm).await?;
        if let Some(known) = of_request(&mut tx, new.request.as_deref()).await? {
            return Ok(AdmitPower::Known(known));
        }
        let Some(mut vm) = vm else {
            return Ok(AdmitPower::Refused(Refused::UnknownVm));
        };
        let cordoned = cordoned_locked(&mut tx, &new.host, now).await?;
        let gate = if cordoned { Gate::Cordoned } else { Gate::Open };
        let reserved = reservations_locked(&mut tx, &new.host).await?;
        if let Some(refused) = refusal(new, &vm, gate, &reserved) {
            return Ok(AdmitPower::Refused(refused));
        }
        if new.from_queue == FromQueue::Yes && !leave_queue(&mut tx, new.id, now_us).await? {
            return Ok(AdmitPower::Refused(Refused::InFlight { admission: new.id }));
        }
        let record = new.begin(&mut vm);
        write_vm(&mut tx, &vm, now).await?;
        let reservation = Reservation {
            admission: new.id,
            host: new.host.clone(),
            vm: new.vm,
            memory: new.memory,
            cpu: new.cpu,
        };
        reserve(&mut tx, &reservation, now).await?;
        let action = PowerAction {
            id: new.id,
            request: new.request.clone(),
            vm: new.vm,
            host: new.host.clone(),
            kind: new.kind,
            phase: PowerPhase::Open,
            generation: vm.generation,
            claim: vm.claim,
            seq: Seq::FIRST,
            lease_owner: None,
            lease_until: Timestamp(0),
            created_us: now_us,
            ended_us: None,
            record,
        };
        insert(&mut tx, &action).await?;
        commit("admit a power action", tx).await?;
        Ok(AdmitPower::Admitted(action))
    }

    pub(super) async fn read_power(
        &self,
        id: MigrationId,
    ) -> Result<Option<PowerAction>, StoreError> {
        sqlx::query(select_power!("WHERE id = $1"))
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a power action"))?
            .as_ref()
            .map(power_row)
            .transpose()
    }

    pub(super) async fn read_open_power(&self) -> Result<Vec<PowerAction>, StoreError> {
        sqlx::query(select_power!("WHERE ended_us IS NULL ORDER BY created_us"))
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read open power actions"))?
            .iter()
            .map(power_row)
            .collect()
    }

    /// Takes the next claim for whoever drives an open action from now on.
    pub(super) async fn claim_power_action(
        &self,
        id: MigrationId,
        owner: &str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Result<TakePower, StoreError> {
        let mut tx = self.begin().await?;
        let Some(mut action) = power_locked(&mut tx, id).await? else {
            return Ok(TakePower::Ended);
        };
        if action.phase != PowerPhase::Open {
            return Ok(TakePower::Ended);
        }
        let another = action.lease_owner.as_deref().is_some_and(|holder| holder != owner);
        let term = lease_until.since(now);
        if another && self.lease_keeps_away(&mut tx, action.lease_until, now, term).await? {
            return Ok(TakePower::Busy);
        }
        let Some(mut vm) = vm_locked(&mut tx, action.vm).await? else {
            return Err(StoreError::Orphan { migration: id });
        };
        vm.claim = vm.claim.max(action.claim).next();
        action.claim = vm.claim;
        action.seq = action.seq.next();
        action.lease_owner = Some(owner.to_owned());
        action.lease_until = lease_until;
        write_vm(&mut tx, &vm, now).await?;
        sqlx::query(
            "UPDATE power_actions SET claim = $2, seq = $3, lease_owner = $4, lease_until_ms = $5
             WHERE id = $1",
        )
        .bind(id.to_string())
        .bind(int(action.claim.value()))
        .bind(int(action.seq.value()))
        .bind(owner)
        .bind(int(lease_until.value()))
        .execute(tx.connection())
        .await
        .map_err(sql("claim a power action"))?;
        commit("claim a power action", tx).await?;
        Ok(TakePower::Taken(Box::new(action)))
    }

    pub(super) async fn keep_power_lease(
        &self,
        action: &PowerAction,
        owner: &str,
        lease_until: Timestamp,
    ) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE power_actions SET lease_until_ms = $4
             WHERE id = $1 AND claim = $2 AND lease_owner = $3",
        )
        .bind(action.id.to_string())
        .bind(int(action.claim.value()))
        .bind(owner)
        .bind(int(lease_until.value()))
        .execute(&self.writer)
        .await
        .map_err(sql("keep the lease of a power action"))?;
        Ok(result.rows_affected() == 1)
    }

    /// Ends an action and says what became of its VM, in one transaction.
    pub(super) async fn end_power_action(
        &self,
        action: &PowerAction,
        end: &Ends,
        now_us: u64,
    ) -> Result<Commit<()>, StoreError> {
        let now = Timestamp(now_us / 1000);
        let mut tx = self.begin().await?;
        let mut record = action.record.clone();
        record.error.clone_from(&end.error);
        record.gone.clone_from(&end.gone);
        let text = serde_json::to_string(&record)
            .map_err(|source| StoreError::Record { what: "power action", source })?;
        let result = sqlx::query(
            "UPDATE power_actions SET state = $4, seq = seq + 1, ended_us = $5, record = $6
             WHERE id = $1 AND claim = $2 AND seq = $3 AND ended_us IS NULL",
        )
        .bind(action.id.to_string())
        .bind(int(action.claim.value()))
        .bind(int(action.seq.value()))
        .bind(end.phase.label())
        .bind(int(now_us))
        .bind(text)
        .execute(tx.connection())
        .await
        .map_err(sql("end a power action"))?;
        if result.rows_affected() != 1 {
            return Ok(Commit::Raced);
        }
        let Some(mut vm) = vm_locked(&mut tx, action.vm).await? else {
            return Ok(Commit::Raced);
        };
        vm.admission = None;
        vm.power = end.power;
        vm.error.clone_from(&end.error);
        if !end.resolved_machine.is_empty() {
            vm.resolved_machine.clone_from(&end.resolved_machine);
        }
        write_vm(&mut tx, &vm, now).await?;
        close_reservations(&mut tx, &action.id.to_string(), now).await?;
        commit("end a power action", tx).await?;
        Ok(Commit::Done(()))
    }
}

async fn insert(tx: &mut Tx, action: &PowerAction) -> Result<(), StoreError> {
    let record = serde_json::to_string(&action.record)
        .map_err(|source| StoreError::Record { what: "power action", source })?;
    sqlx::query(
        "INSERT INTO power_actions (id, request_id, vm_id, host, kind, state, generation, claim,
                                    seq, lease_until_ms, created_us, record)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, $11)",
    )
    .bind(action.id.to_string())
    .bind(&action.request)
    .bind(action.vm.to_string())
    .bind(action.host.as_str())
    .bind(action.kind.label())
    .bind(action.phase.label())
    .bind(int(action.generation.value()))
    .bind(int(action.claim.value()))
    .bind(int(action.seq.value()))
    .bind(int(action.created_us))
    .bind(record)
    .execute(tx.connection())
    .await
    .map_err(sql("admit a power action"))?;
    Ok(())
}
