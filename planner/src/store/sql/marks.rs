//! The marks of hosts, read for many of them at once.
//!
//! Every report asks for one, and thousands come each second. Whoever asks is answered from the next
//! reading, which is for all who have asked by then, and there are no more than some hundred readings
//! a second. None is told what was read before it asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::AnyPool;
use tokio::sync::oneshot;
use tokio::time::Instant;
use vmferry_types::HostId;

use super::rows::{self, sql, uint};
use super::{Engine, among};
use crate::store::{Mark, StoreError};

/// As many hosts as one reading is for.
const BATCH_MAX: usize = 1_000;
/// From one reading to the next: a report can wait for so long, and others come meanwhile.
const PACE: Duration = Duration::from_millis(10);

type Answer = Result<Mark, Arc<StoreError>>;

/// Those who wait for a mark, and whose turn it is to read.
#[derive(Debug, Default)]
pub(super) struct Marks {
    waiting: Mutex<Vec<(HostId, oneshot::Sender<Answer>)>>,
    /// Held by whoever reads; when the last reading began.
    turn: tokio::sync::Mutex<Option<Instant>>,
}

impl Marks {
    /// Reads the mark of a host, as it is now or later.
    pub(super) async fn of(
        &self,
        (engine, pool): (Engine, &AnyPool),
        host: &HostId,
    ) -> Result<Mark, StoreError> {
        loop {
            let (answer, mut answered) = oneshot::channel();
            self.waiting().push((host.clone(), answer));
            let mut last = tokio::select! {
                biased;
                answer = &mut answered => match answer {
                    Ok(answer) => return told(answer),
                    // Whoever read for this one was cancelled meanwhile.
                    Err(_) => continue,
                },
                last = self.turn.lock() => last,
            };
            if let Ok(answer) = answered.try_recv() {
                return told(answer);
            }
            if let Some(last) = *last {
                tokio::time::sleep_until(last + PACE).await;
            }
            *last = Some(Instant::now());
            self.read((engine, pool)).await;
            // It was among those who were read for, unless there were very many.
            if let Ok(answer) = answered.try_recv() {
                return told(answer);
            }
        }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<(HostId, oneshot::Sender<Answer>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads for those who wait, the first to come first.
    async fn read(&self, (engine, pool): (Engine, &AnyPool)) {
        let batch: Vec<_> = {
            let mut waiting = self.waiting();
            let count = waiting.len().min(BATCH_MAX);
            waiting.drain(..count).collect()
        };
        let read = read(engine, pool, batch.iter().map(|(host, _)| host)).await.map_err(Arc::new);
        for (host, waits) in batch {
            let found = |marks: &BTreeMap<HostId, Mark>| marks.get(&host).copied();
            let answer = match &read {
                Ok(marks) => Ok(found(marks).unwrap_or(Mark::NONE)),
                Err(error) => Err(Arc::clone(error)),
            };
            // One that waits no more has been cancelled.
            waits.send(answer).ok();
        }
    }
}

fn told(answer: Answer) -> Result<Mark, StoreError> {
    answer.map_err(|source| StoreError::Together { source })
}

/// Reads marks; a host without VMs has none.
async fn read(
    engine: Engine,
    pool: &AnyPool,
    hosts: impl Iterator<Item = &HostId>,
) -> Result<BTreeMap<HostId, Mark>, StoreError> {
    // Sums of integers are decimals in PostgreSQL, which no driver of several databases reads.
    macro_rules! text {
        ($of:literal) => {
            concat!(
                "SELECT host, COUNT(*) AS vms, CAST(COALESCE(SUM(claim), 0) AS BIGINT) AS claims,
                        CAST(COALESCE(SUM(updated_ms), 0) AS BIGINT) AS written
                 FROM vms WHERE host IN (SELECT value FROM ",
                $of,
                ") AND deleted_ms IS NULL GROUP BY host"
            )
        };
    }
    let text = match engine {
        Engine::Sqlite => text!("json_each($1)"),
        Engine::Postgres => text!("json_array_elements_text($1::json)"),
    };
    let rows = sqlx::query(text)
        .bind(among(hosts))
        .fetch_all(pool)
        .await
        .map_err(sql("read marks of hosts"))?;
    rows.iter()
        .map(|row| {
            let mark = Mark {
                vms: uint(row, "vms")?,
                claims: uint(row, "claims")?,
                written: uint(row, "written")?,
            };
            Ok((rows::host_id(&rows::get::<String>(row, "host")?)?, mark))
        })
        .collect()
}
