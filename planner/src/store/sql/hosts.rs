//! Hosts: who they are, who holds them back, and that they are dead.

use sqlx::any::AnyRow;
use vmferry_planner_core::lifecycle::cordon;
use vmferry_types::{HostId, Millis, Timestamp, VmId};

use super::rows::{self, host_id, int, optional_uint, sql, uint, vm_id};
use super::{Engine, SqlStore, Tx, among, commit, held};
use crate::store::{
    Cordon, Declaration, DeclarationKind, Declared, HostRow, HostsMark, SavedHost, StoreError,
};

/// Nobody asks what a planner heard longer ago: it was started anew since, under another name.
const HEARD_KEPT: Millis = Millis(86_400_000);

/// As many hosts as one statement is about.
const HEARD_AT_ONCE: usize = 1_000;

macro_rules! insert_heard {
    ($of:literal) => {
        concat!(
            "INSERT INTO host_heard (host, planner, heard_ms) SELECT value, $2, $3 FROM ",
            $of,
            " WHERE true ON CONFLICT (host, planner) DO UPDATE SET heard_ms = excluded.heard_ms"
        )
    };
}

macro_rules! delete_heard {
    ($of:literal) => {
        concat!(
            "DELETE FROM host_heard WHERE heard_ms < $2 AND host IN (SELECT value FROM ",
            $of,
            ")"
        )
    };
}

macro_rules! select_boot {
    ($($tail:literal),+) => {
        concat!("SELECT boot_id FROM hosts ", $($tail),+)
    };
}

/// Says whether anyone holds the host back at `now`, under the write lock.
pub(super) async fn cordoned_locked(
    tx: &mut Tx,
    host: &HostId,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let row = sqlx::query(
        "SELECT 1 FROM cordons WHERE host = $1 AND (expires_ms IS NULL OR expires_ms > $2) LIMIT 1",
    )
    .bind(host.as_str())
    .bind(int(now.value()))
    .fetch_optional(tx.connection())
    .await
    .map_err(sql("read cordons"))?;
    Ok(row.is_some())
}

/// Reads that a host was declared dead.
fn declaration(row: &AnyRow) -> Result<Option<Declaration>, StoreError> {
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
    tx: &mut Tx,
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
    .fetch_all(tx.connection())
    .await
    .map_err(sql("mark the VMs of a dead host as lost"))?
    .iter()
    .map(|row| vm_id(&rows::get::<String>(row, "id")?))
    .collect()
}

/// Says when a host was deleted that reports still from the boot that it had then. From another one
/// it is a new host.
async fn deleted(tx: &mut Tx, host: &HostRow) -> Result<Option<Timestamp>, StoreError> {
    let row = sqlx::query("SELECT boot_id, deleted_ms FROM deleted_hosts WHERE id = $1")
        .bind(host.id.as_str())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read deleted hosts"))?;
    let Some(row) = row else { return Ok(None) };
    let boot_id: String = rows::get(&row, "boot_id")?;
    if boot_id == host.boot_id {
        return Ok(Some(Timestamp(uint(&row, "deleted_ms")?)));
    }
    sqlx::query("DELETE FROM deleted_hosts WHERE id = $1")
        .bind(host.id.as_str())
        .execute(tx.connection())
        .await
        .map_err(sql("take a host back"))?;
    Ok(None)
}

impl SqlStore {
    pub(super) async fn write_host(&self, host: &HostRow) -> Result<SavedHost, StoreError> {
        let mut tx = self.begin().await?;
        if let Some(at) = deleted(&mut tx, host).await? {
            return Ok(SavedHost::Deleted { at });
        }
        let other = sqlx::query("SELECT id FROM hosts WHERE name = $1 AND id <> $2")
            .bind(&host.name)
            .bind(host.id.as_str())
            .fetch_optional(tx.connection())
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
        .execute(tx.connection())
        .await
        .map_err(sql("write a host"))?;
        commit("write a host", tx).await?;
        Ok(SavedHost::Saved)
    }

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

    pub(super) async fn read_hosts_mark(&self) -> Result<Option<HostsMark>, StoreError> {
        let row = sqlx::query(
            "SELECT COUNT(*) AS hosts,
                    CAST(COALESCE(SUM(last_report_ms), 0) AS BIGINT) AS introduced,
                    CAST(COALESCE(SUM(declared_dead_ms), 0) AS BIGINT) AS declared,
                    CAST(COALESCE(SUM(dead_void_ms), 0) AS BIGINT) AS voided
             FROM hosts",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(sql("read the mark of all hosts"))?;
        Ok(Some(HostsMark {
            hosts: uint(&row, "hosts")?,
            introduced: uint(&row, "introduced")?,
            declared: uint(&row, "declared")?,
            voided: uint(&row, "voided")?,
        }))
    }

    pub(super) async fn write_heard(
        &self,
        hosts: &[HostId],
        by: &str,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let failed = || sql("write who heard hosts");
        let (insert, delete) = match self.engine {
            Engine::Sqlite => (insert_heard!("json_each($1)"), delete_heard!("json_each($1)")),
            Engine::Postgres => (
                insert_heard!("json_array_elements_text($1::json)"),
                delete_heard!("json_array_elements_text($1::json)"),
            ),
        };
        let mut hosts: Vec<&HostId> = hosts.iter().collect();
        // One order for all planners: none waits for another in a circle.
        hosts.sort_unstable();
        hosts.dedup();
        for some in hosts.chunks(HEARD_AT_ONCE) {
            let some = among(some.iter().copied());
            sqlx::query(insert)
                .bind(&some)
                .bind(by)
                .bind(int(at.value()))
                .execute(&self.writer)
                .await
                .map_err(failed())?;
            // Each start of a planner is another one here.
            sqlx::query(delete)
                .bind(&some)
                .bind(int(at.value().saturating_sub(HEARD_KEPT.value())))
                .execute(&self.writer)
                .await
                .map_err(failed())?;
        }
        Ok(())
    }

    pub(super) async fn read_heard(
        &self,
        host: &HostId,
        by: &str,
    ) -> Result<Option<Timestamp>, StoreError> {
        let text =
            "SELECT MAX(heard_ms) AS heard_ms FROM host_heard WHERE host = $1 AND planner <> $2";
        let row = sqlx::query(text)
            .bind(host.as_str())
            .bind(by)
            .fetch_one(&self.readers)
            .await
            .map_err(sql("read who heard a host"))?;
        Ok(optional_uint(&row, "heard_ms")?.map(Timestamp))
    }

    pub(super) async fn write_declaration(
        &self,
        host: &HostId,
        declaration: &Declaration,
    ) -> Result<Declared, StoreError> {
        let mut tx = self.begin().await?;
        let known = sqlx::query(held!(tx, select_boot!("WHERE id = $1")))
            .bind(host.as_str())
            .fetch_optional(tx.connection())
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
        .bind(rows::words(&declaration.evidence))
        .bind(declaration.void.map(|at| int(at.value())))
        .execute(tx.connection())
        .await
        .map_err(sql("declare a host dead"))?;
        let lost = sweep(&mut tx, host, declaration).await?;
        commit("declare a host dead", tx).await?;
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
        .map(cordon_row)
        .collect()
    }

    /// Holds a host back; what is admitted there at the same moment comes before or is refused.
    pub(super) async fn write_cordon(&self, cordon: &Cordon) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        tx.hold_host(&cordon.host).await?;
        put_cordon(&mut tx, cordon).await?;
        commit("cordon a host", tx).await
    }

    pub(super) async fn delete_cordon(&self, host: &HostId, owner: &str) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        remove_cordon(&mut tx, host, owner).await?;
        commit("uncordon a host", tx).await
    }
}

/// Writes a cordon; one of the same owner is held anew, since when it was.
pub(super) async fn put_cordon(tx: &mut Tx, cordon: &Cordon) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO cordons (host, owner, reason, since_ms, expires_ms)
         VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (host, owner) DO UPDATE SET
            reason = excluded.reason, expires_ms = excluded.expires_ms,
            since_ms = CASE WHEN cordons.expires_ms IS NOT NULL
                             AND cordons.expires_ms <= excluded.since_ms
                            THEN excluded.since_ms ELSE cordons.since_ms END",
    )
    .bind(cordon.host.as_str())
    .bind(&cordon.owner)
    .bind(&cordon.reason)
    .bind(int(cordon.since.value()))
    .bind(cordon.expires.map(|at| int(at.value())))
    .execute(tx.connection())
    .await
    .map_err(sql("cordon a host"))?;
    Ok(())
}

/// Lets go of what an owner held.
pub(super) async fn remove_cordon(
    tx: &mut Tx,
    host: &HostId,
    owner: &str,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM cordons WHERE host = $1 AND owner = $2")
        .bind(host.as_str())
        .bind(owner)
        .execute(tx.connection())
        .await
        .map_err(sql("uncordon a host"))?;
    Ok(())
}

fn cordon_row(row: &AnyRow) -> Result<Cordon, StoreError> {
    Ok(Cordon {
        host: host_id(&rows::get::<String>(row, "host")?)?,
        owner: rows::get(row, "owner")?,
        reason: rows::get(row, "reason")?,
        since: Timestamp(uint(row, "since_ms")?),
        expires: optional_uint(row, "expires_ms")?.map(Timestamp),
    })
}

/// Reads all cordons of a host, whether they hold or not. The host's lock is held.
pub(super) async fn cordons_locked(
    tx: &mut Tx,
    host: &HostId,
) -> Result<Vec<cordon::Cordon>, StoreError> {
    sqlx::query(
        "SELECT host, owner, reason, since_ms, expires_ms FROM cordons WHERE host = $1
         ORDER BY owner",
    )
    .bind(host.as_str())
    .fetch_all(tx.connection())
    .await
    .map_err(sql("read cordons"))?
    .iter()
    .map(|row| cordon_row(row).map(|cordon| cordon.in_core()))
    .collect()
}
