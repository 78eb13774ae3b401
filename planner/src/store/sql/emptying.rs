//! What empties a host: rows, their log, and the cordons and stages that follow from them.

use std::collections::BTreeMap;

use sqlx::Row as _;
use sqlx::any::AnyRow;
use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::job::{self, Cordoned};
use vmferry_planner_core::lifecycle::request::{Asked, Granted, Standing, lifted, may};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, EmptyingId, drain};
use vmferry_types::{Claim, HostId, Seq, Timestamp};

use super::hosts::{cordons_locked, put_cordon, remove_cordon};
use super::rows::{self, host_id, int, optional_uint, sql, uint};
use super::{SqlStore, Tx, commit, held};
use crate::store::{
    AskHost, Commit, EmptyingChange, EmptyingFilter, EmptyingLogRow, EmptyingNotes, EmptyingRow,
    HostAnswer, HostDone, NewEmptying, StoreError, TakeEmptying, Which,
};

macro_rules! select_emptying {
    ($($tail:literal),+) => {
        concat!(
            "SELECT claim, seq, lease_owner, lease_until_ms, created_us, updated_us, ended_us, \
             record FROM emptyings ",
            $($tail),+
        )
    };
}

macro_rules! select_host {
    ($($tail:literal),+) => {
        concat!("SELECT id FROM hosts ", $($tail),+)
    };
}

/// The whole record, as JSON.
#[derive(serde::Deserialize)]
struct Record {
    emptying: Emptying,
    notes: EmptyingNotes,
}

/// The same, for writing.
#[derive(serde::Serialize)]
struct RecordRef<'a> {
    emptying: &'a Emptying,
    notes: &'a EmptyingNotes,
}

fn record(source: serde_json::Error) -> StoreError {
    StoreError::Record { what: "host's emptying", source }
}

fn record_text(row: &EmptyingRow) -> Result<String, StoreError> {
    serde_json::to_string(&RecordRef { emptying: &row.emptying, notes: &row.notes }).map_err(record)
}

fn emptying_row(row: &AnyRow) -> Result<EmptyingRow, StoreError> {
    let text: String = rows::get(row, "record")?;
    let Record { emptying, notes } = serde_json::from_str(&text).map_err(record)?;
    Ok(EmptyingRow {
        emptying,
        notes,
        claim: Claim::from_stored(uint(row, "claim")?),
        seq: Seq::from_stored(uint(row, "seq")?),
        lease_owner: rows::get(row, "lease_owner")?,
        lease_until: Timestamp(uint(row, "lease_until_ms")?),
        created_us: uint(row, "created_us")?,
        updated_us: uint(row, "updated_us")?,
        ended_us: optional_uint(row, "ended_us")?,
    })
}

async fn emptying_locked(tx: &mut Tx, id: EmptyingId) -> Result<Option<EmptyingRow>, StoreError> {
    sqlx::query(held!(tx, select_emptying!("WHERE id = $1")))
        .bind(id.to_string())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a host's emptying"))?
        .as_ref()
        .map(emptying_row)
        .transpose()
}

/// Reads the job of a host, or the drain or retirement: the one that is not over, or else the newest.
/// Clocks of planners differ, so the newest by its time alone may be over while another is not. The
/// host's lock is held.
async fn newest(tx: &mut Tx, host: &HostId, jobs: Jobs) -> Result<Option<EmptyingRow>, StoreError> {
    let text = match jobs {
        Jobs::Only => select_emptying!(
            "WHERE host = $1 AND kind = 'maintenance'
             ORDER BY CASE WHEN ended_us IS NULL THEN 0 ELSE 1 END, created_us DESC, id DESC LIMIT 1"
        ),
        Jobs::Not => select_emptying!(
            "WHERE host = $1 AND kind <> 'maintenance'
             ORDER BY CASE WHEN ended_us IS NULL THEN 0 ELSE 1 END, created_us DESC, id DESC LIMIT 1"
        ),
    };
    sqlx::query(text)
        .bind(host.as_str())
        .fetch_optional(tx.connection())
        .await
        .map_err(sql("read a host's emptyings"))?
        .as_ref()
        .map(emptying_row)
        .transpose()
}

#[derive(Clone, Copy)]
enum Jobs {
    Only,
    Not,
}

async fn log_one(tx: &mut Tx, id: EmptyingId, entry: &EmptyingLogRow) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO emptying_log (emptying_id, seq, at_us, event, phase, body)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(id.to_string())
    .bind(int(entry.seq.value()))
    .bind(int(entry.at_us))
    .bind(&entry.event)
    .bind(&entry.phase)
    .bind(&entry.body)
    .execute(tx.connection())
    .await
    .map_err(sql("write a log entry"))?;
    Ok(())
}

async fn log_changes(
    tx: &mut Tx,
    id: EmptyingId,
    mut seq: Seq,
    changes: &[EmptyingChange],
    now_us: u64,
) -> Result<(), StoreError> {
    for change in changes {
        seq = seq.next();
        let entry = EmptyingLogRow {
            seq,
            at_us: now_us,
            event: change.event.label().to_owned(),
            phase: change.after.label().to_owned(),
            body: serde_json::to_string(&change.event).map_err(record)?,
        };
        log_one(tx, id, &entry).await?;
    }
    Ok(())
}

/// Makes the cordon what the row says, where that has changed.
async fn keep_cordon(
    tx: &mut Tx,
    before: Option<&Emptying>,
    after: &Emptying,
    now: Timestamp,
) -> Result<(), StoreError> {
    if before.map(Emptying::cordon) == Some(after.cordon()) {
        return Ok(());
    }
    match after.cordon() {
        Cordoned::Held => {
            let cordon = crate::store::Cordon {
                host: after.host().clone(),
                owner: after.id().owner().to_string(),
                reason: after.reason(),
                since: now,
                expires: None,
            };
            put_cordon(tx, &cordon).await
        }
        Cordoned::Lifted => remove_cordon(tx, after.host(), &after.id().owner().to_string()).await,
        Cordoned::AsItIs => Ok(()),
    }
}

async fn insert(tx: &mut Tx, new: &NewEmptying, now_us: u64) -> Result<EmptyingRow, StoreError> {
    let opened = EmptyingRow::opened(new, now_us);
    let row = opened.after(&new.changes, now_us)?;
    let emptying = &row.emptying;
    sqlx::query(
        "INSERT INTO emptyings (id, host, kind, phase, lifecycle, driven, claim, seq,
                                lease_until_ms, created_us, updated_us, ended_us, record)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 0, $9, $9, $10, $11)",
    )
    .bind(row.id().to_string())
    .bind(emptying.host().as_str())
    .bind(emptying.kind().label())
    .bind(emptying.label())
    .bind(emptying.lifecycle().label())
    .bind(i64::from(emptying.is_driven()))
    .bind(int(row.claim.value()))
    .bind(int(row.seq.value()))
    .bind(int(now_us))
    .bind(row.ended_us.map(int))
    .bind(record_text(&row)?)
    .execute(tx.connection())
    .await
    .map_err(sql("write a host's emptying"))?;
    let first = EmptyingLogRow {
        seq: Seq::FIRST,
        at_us: now_us,
        event: "opened".to_owned(),
        phase: opened.emptying.label().to_owned(),
        body: serde_json::to_string(&opened.emptying).map_err(record)?,
    };
    log_one(tx, row.id(), &first).await?;
    log_changes(tx, row.id(), Seq::FIRST, &new.changes, now_us).await?;
    keep_cordon(tx, None, emptying, Timestamp(now_us / 1000)).await?;
    Ok(row)
}

/// Writes changes of a row, if it is still the one that they were decided on.
pub(super) async fn write_changes(
    tx: &mut Tx,
    before: &EmptyingRow,
    changes: &[EmptyingChange],
    now_us: u64,
) -> Result<Option<EmptyingRow>, StoreError> {
    let row = before.after(changes, now_us)?;
    let emptying = &row.emptying;
    let result = sqlx::query(
        "UPDATE emptyings SET phase = $4, lifecycle = $5, driven = $6, seq = $7, updated_us = $8,
                              ended_us = $9, record = $10
         WHERE id = $1 AND claim = $2 AND seq = $3",
    )
    .bind(row.id().to_string())
    .bind(int(before.claim.value()))
    .bind(int(before.seq.value()))
    .bind(emptying.label())
    .bind(emptying.lifecycle().label())
    .bind(i64::from(emptying.is_driven()))
    .bind(int(row.seq.value()))
    .bind(int(now_us))
    .bind(row.ended_us.map(int))
    .bind(record_text(&row)?)
    .execute(tx.connection())
    .await
    .map_err(sql("write a host's emptying"))?;
    if result.rows_affected() != 1 {
        return Ok(None);
    }
    log_changes(tx, row.id(), before.seq, changes, now_us).await?;
    keep_cordon(tx, Some(&before.emptying), emptying, Timestamp(now_us / 1000)).await?;
    Ok(Some(row))
}

async fn count_vms(tx: &mut Tx, host: &HostId) -> Result<usize, StoreError> {
    let count: i64 = sqlx::query("SELECT COUNT(*) FROM vms WHERE host = $1 AND deleted_ms IS NULL")
        .bind(host.as_str())
        .fetch_one(tx.connection())
        .await
        .and_then(|row| row.try_get(0))
        .map_err(sql("count a host's VMs"))?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

/// Forgets a host. What was stopped there has no host any more, under the next generation: should
/// the host come back, what it has of them is old.
async fn forget(tx: &mut Tx, host: &HostId, now: Timestamp) -> Result<(), StoreError> {
    for statement in [
        "UPDATE vms SET host = NULL, generation = generation + 1, updated_ms = $2
         WHERE host = $1 AND admission IS NULL AND power IN ('stopped', 'lost')",
        "UPDATE emptyings SET lifecycle = 'active', driven = 0 WHERE host = $1 AND $2 >= 0",
        "DELETE FROM cordons WHERE host = $1 AND $2 >= 0",
        "DELETE FROM host_heard WHERE host = $1 AND $2 >= 0",
        "INSERT INTO deleted_hosts (id, boot_id, deleted_ms)
         SELECT id, boot_id, $2 FROM hosts WHERE id = $1
         ON CONFLICT (id) DO UPDATE SET boot_id = excluded.boot_id,
                                        deleted_ms = excluded.deleted_ms",
        "DELETE FROM hosts WHERE id = $1 AND $2 >= 0",
    ] {
        sqlx::query(statement)
            .bind(host.as_str())
            .bind(int(now.value()))
            .execute(tx.connection())
            .await
            .map_err(sql("forget a host"))?;
    }
    Ok(())
}

/// Does to another row of the host what goes with what was granted.
async fn end_other(
    tx: &mut Tx,
    granted: Granted,
    ask: &AskHost,
    known: (Option<&EmptyingRow>, Option<&EmptyingRow>),
    now_us: u64,
) -> Result<Option<EmptyingRow>, StoreError> {
    let at = Timestamp(now_us / 1000);
    let (row, event) = match (granted, known) {
        (Granted::Alone, _) => return Ok(None),
        (Granted::Superseding(_), (Some(job), _)) => {
            let Some(EmptyingId::Job(by)) = ask.opens.as_ref().map(|new| new.emptying.id()) else {
                return Ok(None);
            };
            (job, EmptyingEvent::Job(job::Event::Superseded { by, at }))
        }
        (Granted::Cancelling(_), (_, Some(drain))) => {
            let event = drain::Event::CancelRequested { by: ask.by.clone(), at };
            (drain, EmptyingEvent::Drain(event))
        }
        (Granted::Superseding(_) | Granted::Cancelling(_), _) => return Ok(None),
    };
    let after = row.emptying.apply(&event);
    let after = after.map_err(|source| StoreError::Emptying { source })?;
    write_changes(tx, row, &[EmptyingChange { event, after }], now_us).await
}

impl SqlStore {
    pub(super) async fn decide_for_host(
        &self,
        ask: &AskHost,
        now_us: u64,
    ) -> Result<HostAnswer, StoreError> {
        let now = Timestamp(now_us / 1000);
        let mut tx = self.begin().await?;
        tx.hold_host(&ask.host).await?;
        let there = sqlx::query(held!(tx, select_host!("WHERE id = $1")))
            .bind(ask.host.as_str())
            .fetch_optional(tx.connection())
            .await
            .map_err(sql("read a host"))?;
        if there.is_none() {
            return Ok(HostAnswer::UnknownHost);
        }
        let job_row = newest(&mut tx, &ask.host, Jobs::Only).await?;
        let drain_row = newest(&mut tx, &ask.host, Jobs::Not).await?;
        let vms = count_vms(&mut tx, &ask.host).await?;
        let granted = {
            let job = job_row.as_ref().and_then(|row| match &row.emptying {
                Emptying::Job(job) => Some(job),
                Emptying::Drain(_) => None,
            });
            let drain = drain_row.as_ref().and_then(|row| match &row.emptying {
                Emptying::Drain(drain) => Some(drain),
                Emptying::Job(_) => None,
            });
            let standing = Standing { host: &ask.host, presence: &ask.presence, vms, job, drain };
            match may(standing, ask.asked) {
                Ok(granted) => granted,
                Err(denied) => return Ok(HostAnswer::Denied(denied)),
            }
        };
        let known = (job_row.as_ref(), drain_row.as_ref());
        let mut done = HostDone {
            ended: end_other(&mut tx, granted, ask, known, now_us).await?,
            ..HostDone::default()
        };
        match ask.asked {
            Asked::Cordon => {
                if let Some(cordon) = &ask.cordon {
                    put_cordon(&mut tx, cordon).await?;
                }
            }
            Asked::Uncordon => {
                let cordons = cordons_locked(&mut tx, &ask.host).await?;
                for one in lifted(&cordons, &ask.host, &ask.by, now) {
                    let owner = one.owner.to_string();
                    remove_cordon(&mut tx, &ask.host, &owner).await?;
                    done.lifted.push(owner);
                }
            }
            Asked::Plan | Asked::Execute | Asked::Drain | Asked::Retire => {
                if let Some(new) = &ask.opens {
                    done.opened = Some(insert(&mut tx, new, now_us).await?);
                }
            }
            Asked::Delete => forget(&mut tx, &ask.host, now).await?,
        }
        commit("do what is asked of a host", tx).await?;
        Ok(HostAnswer::Done(Box::new(done)))
    }

    pub(super) async fn read_lifecycles(&self) -> Result<BTreeMap<HostId, Lifecycle>, StoreError> {
        sqlx::query("SELECT host, lifecycle FROM emptyings WHERE lifecycle <> 'active'")
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read stages of hosts"))?
            .iter()
            .map(|row| {
                let label: String = rows::get(row, "lifecycle")?;
                let stage = Lifecycle::from_label(&label)
                    .ok_or_else(|| rows::corrupt("lifecycle", &label))?;
                Ok((host_id(&rows::get::<String>(row, "host")?)?, stage))
            })
            .collect()
    }

    pub(super) async fn read_emptying(
        &self,
        id: EmptyingId,
    ) -> Result<Option<EmptyingRow>, StoreError> {
        sqlx::query(select_emptying!("WHERE id = $1"))
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(sql("read a host's emptying"))?
            .as_ref()
            .map(emptying_row)
            .transpose()
    }

    pub(super) async fn read_emptyings(
        &self,
        filter: &EmptyingFilter,
    ) -> Result<Vec<EmptyingRow>, StoreError> {
        let text = match filter.which {
            Which::All => {
                select_emptying!("WHERE ($1 = '' OR host = $1) ORDER BY created_us DESC, id DESC")
            }
            Which::Open => select_emptying!(
                "WHERE ($1 = '' OR host = $1) AND ended_us IS NULL \
                 ORDER BY created_us DESC, id DESC"
            ),
            Which::Driven => select_emptying!(
                "WHERE ($1 = '' OR host = $1) AND driven = 1 ORDER BY created_us DESC, id DESC"
            ),
        };
        sqlx::query(text)
            .bind(filter.host.as_ref().map(HostId::as_str).unwrap_or_default())
            .fetch_all(&self.readers)
            .await
            .map_err(sql("read hosts' emptyings"))?
            .iter()
            .map(emptying_row)
            .collect()
    }

    pub(super) async fn read_emptying_log(
        &self,
        id: EmptyingId,
    ) -> Result<Vec<EmptyingLogRow>, StoreError> {
        sqlx::query(
            "SELECT seq, at_us, event, phase, body FROM emptying_log
             WHERE emptying_id = $1 ORDER BY seq",
        )
        .bind(id.to_string())
        .fetch_all(&self.readers)
        .await
        .map_err(sql("read a log"))?
        .iter()
        .map(|row| {
            Ok(EmptyingLogRow {
                seq: Seq::from_stored(uint(row, "seq")?),
                at_us: uint(row, "at_us")?,
                event: rows::get(row, "event")?,
                phase: rows::get(row, "phase")?,
                body: rows::get(row, "body")?,
            })
        })
        .collect()
    }

    pub(super) async fn claim_emptying(
        &self,
        id: EmptyingId,
        owner: &str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Result<TakeEmptying, StoreError> {
        let mut tx = self.begin().await?;
        let Some(mut row) = emptying_locked(&mut tx, id).await? else {
            return Ok(TakeEmptying::Ended);
        };
        if !row.emptying.is_driven() {
            return Ok(TakeEmptying::Ended);
        }
        let another = row.lease_owner.as_deref().is_some_and(|holder| holder != owner);
        let term = lease_until.since(now);
        if another && self.lease_keeps_away(&mut tx, row.lease_until, now, term).await? {
            return Ok(TakeEmptying::Busy);
        }
        row.claim = row.claim.next();
        row.lease_owner = Some(owner.to_owned());
        row.lease_until = lease_until;
        sqlx::query(
            "UPDATE emptyings SET claim = $2, lease_owner = $3, lease_until_ms = $4 WHERE id = $1",
        )
        .bind(id.to_string())
        .bind(int(row.claim.value()))
        .bind(owner)
        .bind(int(lease_until.value()))
        .execute(tx.connection())
        .await
        .map_err(sql("claim a host's emptying"))?;
        commit("claim a host's emptying", tx).await?;
        Ok(TakeEmptying::Taken(Box::new(row)))
    }

    pub(super) async fn keep_emptying_lease(
        &self,
        row: &EmptyingRow,
        owner: &str,
        lease_until: Timestamp,
    ) -> Result<bool, StoreError> {
        let result = sqlx::query(
            "UPDATE emptyings SET lease_until_ms = $4
             WHERE id = $1 AND claim = $2 AND lease_owner = $3",
        )
        .bind(row.id().to_string())
        .bind(int(row.claim.value()))
        .bind(owner)
        .bind(int(lease_until.value()))
        .execute(&self.writer)
        .await
        .map_err(sql("keep the lease of a host's emptying"))?;
        Ok(result.rows_affected() == 1)
    }

    pub(super) async fn write_emptying(
        &self,
        before: &EmptyingRow,
        changes: &[EmptyingChange],
        now_us: u64,
    ) -> Result<Commit<Box<EmptyingRow>>, StoreError> {
        let mut tx = self.begin().await?;
        tx.hold_host(before.emptying.host()).await?;
        let Some(row) = write_changes(&mut tx, before, changes, now_us).await? else {
            return Ok(Commit::Raced);
        };
        commit("write a host's emptying", tx).await?;
        Ok(Commit::Done(Box::new(row)))
    }
}
