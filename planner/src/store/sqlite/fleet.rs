//! Hosts, VMs, cordons and reservations.

use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use vmferry_types::{Bytes, Claim, Generation, HostId, MilliCpu, PowerState, Timestamp, VmId};

use super::rows::{self, admission_id, host_id, int, optional_uint, sql, uint, vm_id};
use super::{SqliteStore, commit};
use crate::store::{
    Adopted, Cordon, Declaration, DeclarationKind, Declared, Defined, Deleted, Followed, HostRow,
    Lost, Refused, Reservation, SavedHost, StoreError, Tombstone, VmRow,
};

macro_rules! select_vm {
    ($tail:literal) => {
        concat!(
            "SELECT id, name, host, power, generation, claim, admission, error, definition, \
             resolved_machine, memory_bytes, cpu_milli FROM vms ",
            $tail
        )
    };
}

const SELECT_TOMBSTONE: &str = "SELECT id, name, host, generation, claim, deleted_ms FROM vms
     WHERE id = $1 AND deleted_ms IS NOT NULL";

fn vm_row(row: &SqliteRow) -> Result<VmRow, StoreError> {
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

fn reservation_row(row: &SqliteRow) -> Result<Reservation, StoreError> {
    Ok(Reservation {
        admission: admission_id(&rows::get::<String>(row, "admission")?)?,
        host: host_id(&rows::get::<String>(row, "host")?)?,
        vm: vm_id(&rows::get::<String>(row, "vm_id")?)?,
        memory: Bytes(uint(row, "memory_bytes")?),
        cpu: MilliCpu(uint(row, "cpu_milli")?),
    })
}

/// Reads one VM under the write lock.
pub(super) async fn vm_locked(
    transaction: &mut Transaction<'static, Sqlite>,
    vm: VmId,
) -> Result<Option<VmRow>, StoreError> {
    sqlx::query(select_vm!("WHERE id = $1 AND deleted_ms IS NULL"))
        .bind(vm.to_string())
        .fetch_optional(&mut **transaction)
        .await
        .map_err(sql("read a VM"))?
        .as_ref()
        .map(vm_row)
        .transpose()
}

fn tombstone_row(row: &SqliteRow) -> Result<Tombstone, StoreError> {
    Ok(Tombstone {
        vm: vm_id(&rows::get::<String>(row, "id")?)?,
        name: rows::get(row, "name")?,
        host: rows::get::<Option<String>>(row, "host")?.as_deref().map(host_id).transpose()?,
        generation: Generation::from_stored(uint(row, "generation")?),
        claim: Claim::from_stored(uint(row, "claim")?),
        deleted: Timestamp(uint(row, "deleted_ms")?),
    })
}

async fn tombstone_locked(
    transaction: &mut Transaction<'static, Sqlite>,
    vm: VmId,
) -> Result<Option<Tombstone>, StoreError> {
    sqlx::query(SELECT_TOMBSTONE)
        .bind(vm.to_string())
        .fetch_optional(&mut **transaction)
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
    transaction: &mut Transaction<'static, Sqlite>,
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
    .fetch_all(&mut **transaction)
    .await
    .map_err(sql("read reservations"))?
    .iter()
    .map(reservation_row)
    .collect()
}

/// Says whether anyone holds the host back at `now`, under the write lock.
pub(super) async fn cordoned_locked(
    transaction: &mut Transaction<'static, Sqlite>,
    host: &HostId,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let row = sqlx::query(
        "SELECT 1 FROM cordons WHERE host = $1 AND (expires_ms IS NULL OR expires_ms > $2) LIMIT 1",
    )
    .bind(host.as_str())
    .bind(int(now.value()))
    .fetch_optional(&mut **transaction)
    .await
    .map_err(sql("read cordons"))?;
    Ok(row.is_some())
}

/// Opens a reservation; opening it again changes nothing.
pub(super) async fn reserve(
    transaction: &mut Transaction<'static, Sqlite>,
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
    .execute(&mut **transaction)
    .await
    .map_err(sql("reserve"))?;
    Ok(())
}

/// Closes whatever an admission holds. What is closed stays closed as it was.
pub(super) async fn close_reservations(
    transaction: &mut Transaction<'static, Sqlite>,
    admission: &str,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE reservations SET closed_ms = $2 WHERE admission = $1 AND closed_ms IS NULL",
    )
    .bind(admission)
    .bind(int(now.value()))
    .execute(&mut **transaction)
    .await
    .map_err(sql("close reservations"))?;
    Ok(())
}

/// Writes a VM as it is now; the caller holds the write lock and has read it under it.
pub(super) async fn write_vm(
    transaction: &mut Transaction<'static, Sqlite>,
    vm: &VmRow,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO vms (id, name, host, power, generation, claim, admission, error, definition,
                          resolved_machine, memory_bytes, cpu_milli, updated_ms)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
         ON CONFLICT (id) DO UPDATE SET
            name = excluded.name, host = excluded.host, power = excluded.power,
            generation = excluded.generation, claim = excluded.claim,
            admission = excluded.admission, error = excluded.error,
            definition = excluded.definition, resolved_machine = excluded.resolved_machine,
            memory_bytes = excluded.memory_bytes, cpu_milli = excluded.cpu_milli,
            updated_ms = excluded.updated_ms, deleted_ms = NULL
         WHERE vms.generation <= excluded.generation AND vms.claim <= excluded.claim",
    )
    .bind(vm.id.to_string())
    .bind(&vm.name)
    .bind(vm.host.as_ref().map(HostId::as_str))
    .bind(vm.power.label())
    .bind(int(vm.generation.value()))
    .bind(int(vm.claim.value()))
    .bind(vm.admission.map(|id| id.to_string()))
    .bind(&vm.error)
    .bind(&vm.definition)
    .bind(&vm.resolved_machine)
    .bind(int(vm.memory.value()))
    .bind(int(vm.cpu.value()))
    .bind(int(now.value()))
    .execute(&mut **transaction)
    .await
    .map_err(sql("write a VM"))?;
    Ok(())
}

/// Reads that a host was declared dead.
fn declaration(row: &SqliteRow) -> Result<Option<Declaration>, StoreError> {
    let Some(at) = optional_uint(row, "declared_dead_ms")? else { return Ok(None) };
    let text = |column| rows::get::<Option<String>>(row, column).map(Option::unwrap_or_default);
    let kind = text("dead_kind")?;
    Ok(Some(Declaration {
        boot_id: text("dead_boot_id")?,
        at: Timestamp(at),
        by: text("dead_by")?,
        kind: DeclarationKind::from_label(&kind)
            .ok_or_else(|| rows::corrupt("dead_kind", &kind))?,
        reason: text("dead_reason")?,
        evidence: text("dead_evidence")?,
        void: optional_uint(row, "dead_void_ms")?.map(Timestamp),
    }))
}

/// Marks as lost what ran on a dead host. What an admission owns is left to its driver.
async fn sweep(
    transaction: &mut Transaction<'static, Sqlite>,
    host: &HostId,
    declaration: &Declaration,
) -> Result<Vec<VmId>, StoreError> {
    sqlx::query(
        "UPDATE vms SET power = 'lost', error = $2, updated_ms = $3
         WHERE host = $1 AND admission IS NULL AND power = 'running' AND deleted_ms IS NULL
         RETURNING id",
    )
    .bind(host.as_str())
    .bind(format!("host {host} was declared dead by {}", declaration.by))
    .bind(int(declaration.at.value()))
    .fetch_all(&mut **transaction)
    .await
    .map_err(sql("mark the VMs of a dead host as lost"))?
    .iter()
    .map(|row| vm_id(&rows::get::<String>(row, "id")?))
    .collect()
}

impl SqliteStore {
    pub(super) async fn read_hosts(&self) -> Result<Vec<HostRow>, StoreError> {
        sqlx::query(
            "SELECT id, name, boot_id, agent_address, last_report_ms, declared_dead_ms,
                    dead_boot_id, dead_by, dead_kind, dead_reason, dead_evidence, dead_void_ms
             FROM hosts ORDER BY id",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(sql("read hosts"))?
        .iter()
        .map(|row| {
            Ok(HostRow {
                id: host_id(&rows::get::<String>(row, "id")?)?,
                name: rows::get(row, "name")?,
                boot_id: rows::get(row, "boot_id")?,
                agent_address: rows::get(row, "agent_address")?,
                last_report: Timestamp(uint(row, "last_report_ms")?),
                declared_dead: declaration(row)?,
            })
        })
        .collect()
    }

    pub(super) async fn write_declaration(
        &self,
        host: &HostId,
        declaration: &Declaration,
    ) -> Result<Declared, StoreError> {
        let mut transaction = self.begin().await?;
        let known = sqlx::query("SELECT boot_id FROM hosts WHERE id = $1")
            .bind(host.as_str())
            .fetch_optional(&mut *transaction)
            .await
            .map_err(sql("read a host"))?;
        let Some(known) = known else { return Ok(Declared::UnknownHost) };
        let boot_id: String = rows::get(&known, "boot_id")?;
        if boot_id != declaration.boot_id {
            return Ok(Declared::Rebooted { boot_id });
        }
        sqlx::query(
            "UPDATE hosts SET declared_dead_ms = $2, dead_boot_id = $3, dead_by = $4,
                              dead_kind = $5, dead_reason = $6, dead_evidence = $7,
                              dead_void_ms = $8
             WHERE id = $1",
        )
        .bind(host.as_str())
        .bind(int(declaration.at.value()))
        .bind(&declaration.boot_id)
        .bind(&declaration.by)
        .bind(declaration.kind.label())
        .bind(&declaration.reason)
        .bind(&declaration.evidence)
        .bind(declaration.void.map(|at| int(at.value())))
        .execute(&mut *transaction)
        .await
        .map_err(sql("declare a host dead"))?;
        let lost = sweep(&mut transaction, host, declaration).await?;
        commit("declare a host dead", transaction).await?;
        Ok(Declared::Written { lost })
    }

    pub(super) async fn void(
        &self,
        host: &HostId,
        boot_id: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE hosts SET dead_void_ms = $3
             WHERE id = $1 AND dead_boot_id = $2 AND dead_void_ms IS NULL",
        )
        .bind(host.as_str())
        .bind(boot_id)
        .bind(int(now.value()))
        .execute(&self.writer)
        .await
        .map_err(sql("make a declaration void"))?;
        Ok(result.rows_affected() == 1)
    }

    pub(super) async fn read_tombstone(&self, vm: VmId) -> Result<Option<Tombstone>, StoreError> {
        sqlx::query(SELECT_TOMBSTONE)
            .bind(vm.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a deleted VM"))?
            .as_ref()
            .map(tombstone_row)
            .transpose()
    }

    pub(super) async fn delete(&self, vm: VmId, now: Timestamp) -> Result<Deleted, StoreError> {
        let mut transaction = self.begin().await?;
        let Some(row) = vm_locked(&mut transaction, vm).await? else { return Ok(Deleted::Unknown) };
        if let Some(admission) = row.admission {
            return Ok(Deleted::Refused(Refused::InFlight { admission }));
        }
        match row.power {
            PowerState::Stopped | PowerState::Lost => {}
            PowerState::Starting | PowerState::Running | PowerState::Stopping => {
                return Ok(Deleted::Refused(Refused::Power { power: row.power }));
            }
        }
        sqlx::query("UPDATE vms SET deleted_ms = $2, updated_ms = $2 WHERE id = $1")
            .bind(vm.to_string())
            .bind(int(now.value()))
            .execute(&mut *transaction)
            .await
            .map_err(sql("delete a VM"))?;
        commit("delete a VM", transaction).await?;
        Ok(Deleted::Done)
    }

    pub(super) async fn write_host(&self, host: &HostRow) -> Result<SavedHost, StoreError> {
        let mut transaction = self.begin().await?;
        let other = sqlx::query("SELECT id FROM hosts WHERE name = $1 AND id <> $2")
            .bind(&host.name)
            .bind(host.id.as_str())
            .fetch_optional(&mut *transaction)
            .await
            .map_err(sql("read hosts"))?;
        if let Some(row) = other {
            return Ok(SavedHost::NameTaken { by: host_id(&rows::get::<String>(&row, "id")?)? });
        }
        sqlx::query(
            "INSERT INTO hosts (id, name, boot_id, agent_address, last_report_ms)
             VALUES ($1, $2, $3, $4, $5)
             ON CONFLICT (id) DO UPDATE SET
                name = excluded.name, boot_id = excluded.boot_id,
                agent_address = excluded.agent_address, last_report_ms = excluded.last_report_ms",
        )
        .bind(host.id.as_str())
        .bind(&host.name)
        .bind(&host.boot_id)
        .bind(&host.agent_address)
        .bind(int(host.last_report.value()))
        .execute(&mut *transaction)
        .await
        .map_err(sql("write a host"))?;
        commit("write a host", transaction).await?;
        Ok(SavedHost::Saved)
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
        let mut transaction = self.begin().await?;
        let other = sqlx::query(select_vm!(
            "WHERE (id = $1 OR name = $2) AND deleted_ms IS NULL ORDER BY id LIMIT 1"
        ))
        .bind(vm.id.to_string())
        .bind(&vm.name)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(sql("read VMs"))?;
        if let Some(row) = other {
            return Ok(Defined::Taken(vm_row(&row)?));
        }
        let mut row = vm.clone();
        if let Some(before) = tombstone_locked(&mut transaction, vm.id).await? {
            row.host = before.host;
            row.generation = before.generation;
            row.claim = before.claim;
        }
        write_vm(&mut transaction, &row, now).await?;
        commit("define a VM", transaction).await?;
        Ok(Defined::New(row))
    }

    pub(super) async fn insert_adopted(
        &self,
        vm: &VmRow,
        now: Timestamp,
    ) -> Result<Adopted, StoreError> {
        let mut transaction = self.begin().await?;
        if let Some(known) = vm_locked(&mut transaction, vm.id).await? {
            return Ok(Adopted::Known(known));
        }
        if let Some(before) = tombstone_locked(&mut transaction, vm.id).await? {
            return Ok(Adopted::Deleted(before));
        }
        write_vm(&mut transaction, vm, now).await?;
        commit("adopt a VM", transaction).await?;
        Ok(Adopted::New)
    }

    pub(super) async fn raise(
        &self,
        vm: VmId,
        claim: Claim,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        sqlx::query("UPDATE vms SET claim = $2, updated_ms = $3 WHERE id = $1 AND claim < $2")
            .bind(vm.to_string())
            .bind(int(claim.value()))
            .bind(int(now.value()))
            .execute(&self.writer)
            .await
            .map_err(sql("raise a claim"))?;
        Ok(())
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
        .bind(&lost.cause)
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

    pub(super) async fn read_cordons(&self, now: Timestamp) -> Result<Vec<Cordon>, StoreError> {
        sqlx::query(
            "SELECT host, owner, reason, since_ms, expires_ms FROM cordons
             WHERE expires_ms IS NULL OR expires_ms > $1 ORDER BY host, owner",
        )
        .bind(int(now.value()))
        .fetch_all(&self.readers)
        .await
        .map_err(sql("read cordons"))?
        .iter()
        .map(|row| {
            Ok(Cordon {
                host: host_id(&rows::get::<String>(row, "host")?)?,
                owner: rows::get(row, "owner")?,
                reason: rows::get(row, "reason")?,
                since: Timestamp(uint(row, "since_ms")?),
                expires: optional_uint(row, "expires_ms")?.map(Timestamp),
            })
        })
        .collect()
    }

    pub(super) async fn write_cordon(&self, cordon: &Cordon) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO cordons (host, owner, reason, since_ms, expires_ms)
             VALUES ($1, $2, $3, $4, $5)
             ON CONFLICT (host, owner) DO UPDATE SET
                reason = excluded.reason, expires_ms = excluded.expires_ms",
        )
        .bind(cordon.host.as_str())
        .bind(&cordon.owner)
        .bind(&cordon.reason)
        .bind(int(cordon.since.value()))
        .bind(cordon.expires.map(|at| int(at.value())))
        .execute(&self.writer)
        .await
        .map_err(sql("cordon a host"))?;
        Ok(())
    }

    pub(super) async fn delete_cordon(&self, host: &HostId, owner: &str) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM cordons WHERE host = $1 AND owner = $2")
            .bind(host.as_str())
            .bind(owner)
            .execute(&self.writer)
            .await
            .map_err(sql("uncordon a host"))?;
        Ok(())
    }
}
