//! VMs and reservations.

use sqlx::any::AnyRow;

use vmferry_types::{Bytes, Claim, Generation, HostId, MilliCpu, PowerState, Timestamp, VmId};

use super::rows::{self, admission_id, host_id, int, sql, uint, vm_id, words};
use super::{SqlStore, Tx, commit, held};
use crate::store::{
    Adopted, Defined, Deleted, Followed, Lost, Mark, Refused, Reservation, StoreError, Tombstone,
    VmRow,
};

macro_rules! select_vm {
    ($($tail:literal),+) => {
        concat!(
            "SELECT id, name, host, power, generation, claim, admission, error, definition, \
             resolved_machine, memory_bytes, cpu_milli FROM vms ",
            $($tail),+
        )
    };
}

macro_rules! select_tombstone {
    ($($tail:literal),+) => {
        concat!("SELECT id, name, host, generation, claim, deleted_ms FROM vms ", $($tail),+)
    };
}

fn vm_row(row: &AnyRow) -> Result<VmRow, StoreError> {
    let power: String = rows::get(row, "power")?;
    let admission: Option<String> = rows::get(row, "admission")?;
    Ok(VmRow {
        id: vm_id(&rows::get::<String>(row, "id")?)?,
        name: rows::get(row, "name")?,
        host: rows::get::<Option<String>>(row, "host")?.as_deref().map(host_id).transpose()?,
        power: PowerState::from_label(&power).ok_or_else(|| rows::corrupt("power", &power))?,
        generation: Generation::from_stored(uint(row, "generation")?),
        claim: Claim::from_stored(uint(row, "claim")?),
        admission: admission.as_deref().map(admission_id).transpose()?,
        error: rows::get(row, "error")?,
        definition: rows::get(row, "definition")?,
        resolved_machine: rows::get(row, "resolved_machine")?,
        memory: Bytes(uint(row, "memory_bytes")?),
        cpu: MilliCpu(uint(row, "cpu_milli")?),
    })
}

fn reservation_row(row: &AnyRow) -> Result<Reservation, StoreError> {
    Ok(Reservation {
        admission: admission_id(&rows::get::<String>(row, "admission")?)?,
        host: host_id(&rows::get::<String>(row, "host")?)?,
        vm: vm_id(&rows::get::<String>(row, "vm_id")?)?,
        memory: Bytes(uint(row, "memory_bytes")?),
        cpu: MilliCpu(uint(row, "cpu_milli")?),
    })
}

/// Reads one VM, and holds it until the transaction ends.
pub(super) async fn vm_locked(tx: &mut Tx, vm: VmId) -> Result<Option<VmRow>, StoreError> {
    sqlx::query(held!(tx, select_vm!("WHERE id = $1 AND deleted_ms IS NULL")))
        .bind(vm.to_string())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a VM"))?
        .as_ref()
        .map(vm_row)
        .transpose()
}

fn tombstone_row(row: &AnyRow) -> Result<Tombstone, StoreError> {
    Ok(Tombstone {
        vm: vm_id(&rows::get::<String>(row, "id")?)?,
        name: rows::get(row, "name")?,
        host: rows::get::<Option<String>>(row, "host")?.as_deref().map(host_id).transpose()?,
        generation: Generation::from_stored(uint(row, "generation")?),
        claim: Claim::from_stored(uint(row, "claim")?),
        deleted: Timestamp(uint(row, "deleted_ms")?),
    })
}

async fn tombstone_locked(tx: &mut Tx, vm: VmId) -> Result<Option<Tombstone>, StoreError> {
    sqlx::query(held!(tx, select_tombstone!("WHERE id = $1 AND deleted_ms IS NOT NULL")))
        .bind(vm.to_string())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a deleted VM"))?
        .as_ref()
        .map(tombstone_row)
        .transpose()
}

/// Reads what is promised on one host under the write lock: open reservations, and the VMs that it
/// owns.
///
/// A VM that has just arrived has no reservation any more, and is in no report of its host yet. It
/// stands under its own id; whoever adds up counts each VM once.
pub(super) async fn reservations_locked(
    tx: &mut Tx,
    host: &HostId,
) -> Result<Vec<Reservation>, StoreError> {
    sqlx::query(
        "SELECT admission, host, vm_id, memory_bytes, cpu_milli FROM reservations
         WHERE host = $1 AND closed_ms IS NULL
         UNION ALL
         SELECT id AS admission, host, id AS vm_id, memory_bytes, cpu_milli FROM vms
         WHERE host = $1 AND power IN ('running', 'starting', 'stopping')
         ORDER BY admission, vm_id",
    )
    .bind(host.as_str())
    .fetch_all(tx.connection())
    .await
    .map_err(sql("read reservations"))?
    .iter()
    .map(reservation_row)
    .collect()
}

/// Opens a reservation; opening it again changes nothing.
pub(super) async fn reserve(
    tx: &mut Tx,
    reservation: &Reservation,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO reservations (admission, host, vm_id, memory_bytes, cpu_milli, opened_ms)
         VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (admission, host) DO NOTHING",
    )
    .bind(reservation.admission.to_string())
    .bind(reservation.host.as_str())
    .bind(reservation.vm.to_string())
    .bind(int(reservation.memory.value()))
    .bind(int(reservation.cpu.value()))
    .bind(int(now.value()))
    .execute(tx.connection())
    .await
    .map_err(sql("reserve"))?;
    Ok(())
}

/// Closes whatever an admission holds. What is closed stays closed as it was.
pub(super) async fn close_reservations(
    tx: &mut Tx,
    admission: &str,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE reservations SET closed_ms = $2 WHERE admission = $1 AND closed_ms IS NULL",
    )
    .bind(admission)
    .bind(int(now.value()))
    .execute(tx.connection())
    .await
    .map_err(sql("close reservations"))?;
    Ok(())
}

/// Binds what a VM's row is made of, in the order of its columns.
macro_rules! bind_vm {
    ($text:expr, $vm:expr, $now:expr) => {
        sqlx::query($text)
            .bind($vm.id.to_string())
            .bind(&$vm.name)
            .bind($vm.host.as_ref().map(HostId::as_str))
            .bind($vm.power.label())
            .bind(int($vm.generation.value()))
            .bind(int($vm.claim.value()))
            .bind($vm.admission.map(|id| id.to_string()))
            .bind(words(&$vm.error))
            .bind(&$vm.definition)
            .bind(&$vm.resolved_machine)
            .bind(int($vm.memory.value()))
            .bind(int($vm.cpu.value()))
            .bind(int($now.value()))
    };
}

/// Writes a VM that there was none of; `false` if there is one by now.
async fn insert(tx: &mut Tx, vm: &VmRow, now: Timestamp) -> Result<bool, StoreError> {
    let text = "INSERT INTO vms (id, name, host, power, generation, claim, admission, error,
                                 definition, resolved_machine, memory_bytes, cpu_milli, updated_ms)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
                ON CONFLICT (id) DO NOTHING";
    let result = bind_vm!(text, vm, now).execute(tx.connection()).await.map_err(sql("add a VM"))?;
    Ok(result.rows_affected() == 1)
}

/// Writes a VM as it is now; the caller holds its row and has read it.
pub(super) async fn write_vm(tx: &mut Tx, vm: &VmRow, now: Timestamp) -> Result<(), StoreError> {
    let text = "UPDATE vms SET name = $2, host = $3, power = $4, generation = $5, claim = $6,
                               admission = $7, error = $8, definition = $9, resolved_machine = $10,
                               memory_bytes = $11, cpu_milli = $12, updated_ms = $13,
                               deleted_ms = NULL
                WHERE id = $1 AND generation <= $5 AND claim <= $6";
    bind_vm!(text, vm, now).execute(tx.connection()).await.map_err(sql("write a VM"))?;
    Ok(())
}

impl SqlStore {
    pub(super) async fn read_tombstone(&self, vm: VmId) -> Result<Option<Tombstone>, StoreError> {
        sqlx::query(select_tombstone!("WHERE id = $1 AND deleted_ms IS NOT NULL"))
            .bind(vm.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a deleted VM"))?
            .as_ref()
            .map(tombstone_row)
            .transpose()
    }

    pub(super) async fn delete(&self, vm: VmId, now: Timestamp) -> Result<Deleted, StoreError> {
        let mut tx = self.begin().await?;
        let Some(row) = vm_locked(&mut tx, vm).await? else { return Ok(Deleted::Unknown) };
        if let Some(admission) = row.admission {
            return Ok(Deleted::Refused(Refused::InFlight { admission }));
        }
        match (row.power, &row.host) {
            // One that runs by a damaged row, and that no host owns, is nobody's to stop first.
            (PowerState::Stopped | PowerState::Lost, _) | (PowerState::Running, None) => {}
            (PowerState::Starting | PowerState::Stopping, _) | (PowerState::Running, Some(_)) => {
                return Ok(Deleted::Refused(Refused::Power { power: row.power }));
            }
        }
        sqlx::query("UPDATE vms SET deleted_ms = $2, updated_ms = $2 WHERE id = $1")
            .bind(vm.to_string())
            .bind(int(now.value()))
            .execute(tx.connection())
            .await
            .map_err(sql("delete a VM"))?;
        commit("delete a VM", tx).await?;
        Ok(Deleted::Done)
    }

    pub(super) async fn read_vms(&self) -> Result<Vec<VmRow>, StoreError> {
        sqlx::query(select_vm!("WHERE deleted_ms IS NULL ORDER BY name, id"))
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read VMs"))?
            .iter()
            .map(vm_row)
            .collect()
    }

    pub(super) async fn read_vms_on(&self, host: &HostId) -> Result<Vec<VmRow>, StoreError> {
        sqlx::query(select_vm!("WHERE host = $1 AND deleted_ms IS NULL ORDER BY name, id"))
            .bind(host.as_str())
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read a host's VMs"))?
            .iter()
            .map(vm_row)
            .collect()
    }

    pub(super) async fn read_mark(&self, host: &HostId) -> Result<Mark, StoreError> {
        self.marks.of((self.engine, &self.readers), host).await
    }

    pub(super) async fn read_vm(&self, vm: VmId) -> Result<Option<VmRow>, StoreError> {
        sqlx::query(select_vm!("WHERE id = $1 AND deleted_ms IS NULL"))
            .bind(vm.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a VM"))?
            .as_ref()
            .map(vm_row)
            .transpose()
    }

    pub(super) async fn read_vms_named(&self, name: &str) -> Result<Vec<VmRow>, StoreError> {
        sqlx::query(select_vm!("WHERE name = $1 AND deleted_ms IS NULL ORDER BY id"))
            .bind(name)
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read VMs by name"))?
            .iter()
            .map(vm_row)
            .collect()
    }

    pub(super) async fn insert_vm(
        &self,
        vm: &VmRow,
        now: Timestamp,
    ) -> Result<Defined, StoreError> {
        let mut tx = self.begin().await?;
        tx.hold(&format!("vm/{}", vm.name)).await?;
        let other = sqlx::query(select_vm!(
            "WHERE (id = $1 OR name = $2) AND deleted_ms IS NULL ORDER BY id LIMIT 1"
        ))
        .bind(vm.id.to_string())
        .bind(&vm.name)
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read VMs"))?;
        if let Some(row) = other {
            return Ok(Defined::Taken(vm_row(&row)?));
        }
        let mut row = vm.clone();
        if let Some(before) = tombstone_locked(&mut tx, vm.id).await? {
            row.host = before.host;
            row.generation = before.generation;
            row.claim = before.claim;
            write_vm(&mut tx, &row, now).await?;
        } else if !insert(&mut tx, &row, now).await? {
            // Added under another name since this transaction looked.
            return match vm_locked(&mut tx, vm.id).await? {
                Some(known) => Ok(Defined::Taken(known)),
                None => Err(StoreError::Vanished { vm: vm.id }),
            };
        }
        commit("define a VM", tx).await?;
        Ok(Defined::New(row))
    }

    pub(super) async fn insert_adopted(
        &self,
        vm: &VmRow,
        now: Timestamp,
    ) -> Result<Adopted, StoreError> {
        let mut tx = self.begin().await?;
        if insert(&mut tx, vm, now).await? {
            commit("adopt a VM", tx).await?;
            return Ok(Adopted::New);
        }
        if let Some(known) = vm_locked(&mut tx, vm.id).await? {
            return Ok(Adopted::Known(known));
        }
        match tombstone_locked(&mut tx, vm.id).await? {
            Some(before) => Ok(Adopted::Deleted(before)),
            None => Err(StoreError::Vanished { vm: vm.id }),
        }
    }

    pub(super) async fn raise(
        &self,
        vm: VmId,
        claim: Claim,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let text = "UPDATE vms SET claim = $2, updated_ms = $3 WHERE id = $1 AND claim < $2";
        let result = sqlx::query(text)
            .bind(vm.to_string())
            .bind(int(claim.value()))
            .bind(int(now.value()))
            .execute(&self.writer)
            .await
            .map_err(sql("raise a claim"))?;
        Ok(result.rows_affected() == 1)
    }

    pub(super) async fn follow(
        &self,
        followed: &Followed,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE vms SET host = $2, power = $3, generation = $4, claim = $5, error = '',
                            updated_ms = $6
             WHERE id = $1 AND admission IS NULL AND generation <= $4 AND claim <= $5
               AND deleted_ms IS NULL",
        )
        .bind(followed.vm.to_string())
        .bind(followed.host.as_str())
        .bind(followed.power.label())
        .bind(int(followed.generation.value()))
        .bind(int(followed.claim.value()))
        .bind(int(now.value()))
        .execute(&self.writer)
        .await
        .map_err(sql("follow a VM"))?;
        Ok(result.rows_affected() == 1)
    }

    pub(super) async fn lose(&self, lost: &Lost, now: Timestamp) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE vms SET power = 'lost', error = $5, updated_ms = $6
             WHERE id = $1 AND host = $2 AND generation = $3 AND claim <= $4
               AND admission IS NULL AND power = 'running' AND deleted_ms IS NULL",
        )
        .bind(lost.vm.to_string())
        .bind(lost.host.as_str())
        .bind(int(lost.generation.value()))
        .bind(int(lost.claim.value()))
        .bind(words(&lost.cause))
        .bind(int(now.value()))
        .execute(&self.writer)
        .await
        .map_err(sql("mark a VM as lost"))?;
        Ok(result.rows_affected() == 1)
    }

    pub(super) async fn read_reservations(&self) -> Result<Vec<Reservation>, StoreError> {
        sqlx::query(
            "SELECT admission, host, vm_id, memory_bytes, cpu_milli FROM reservations
             WHERE closed_ms IS NULL ORDER BY host, admission",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(sql("read reservations"))?
        .iter()
        .map(reservation_row)
        .collect()
    }
}
