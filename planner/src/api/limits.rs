//! Changing the limits of a migration under way.

use std::sync::Arc;

use vmferry_planner_core::migration::{Event, Limits, Refusal};
use vmferry_proto::v1;
use vmferry_types::Millis;

use super::migrate::{bandwidth, check_downtime};
use super::{ApiError, migration_id, too_late};
use crate::planner::Planner;
use crate::store::Commit;
use crate::{clock, faults, view};

impl Planner {
    /// Changes what limits a migration: it stands in the row, and whoever drives it tells the source.
    /// The same limits once more change nothing.
    ///
    /// # Errors
    ///
    /// Says so if nothing is asked for, or if the switchover was ordered already.
    pub async fn set_limits(
        self: &Arc<Self>,
        asked: &v1::SetMigrationLimitsRequest,
    ) -> Result<v1::Migration, ApiError> {
        let id = migration_id(&asked.id)?;
        let max_bandwidth = asked.bandwidth_mbps.map(bandwidth).transpose()?;
        let downtime_limit = asked.downtime_limit_ms.map(downtime).transpose()?;
        if max_bandwidth.is_none() && downtime_limit.is_none() {
            let problem = "give at least one of bandwidth_mbps and downtime_limit_ms".to_owned();
            return Err(ApiError::Invalid { field: "bandwidth_mbps", problem });
        }
        loop {
            let row = self.migration_row(id).await?;
            if !row.migration.takes_limits() {
                return Err(too_late(&row, Refusal::TooLate));
            }
            let terms = &row.migration.terms;
            let limits = Limits {
                max_bandwidth: max_bandwidth.unwrap_or(terms.max_bandwidth),
                downtime_limit: downtime_limit.unwrap_or(terms.downtime_limit),
            };
            let known =
                Limits { max_bandwidth: terms.max_bandwidth, downtime_limit: terms.downtime_limit };
            if limits == known {
                return view::migration(self, &row).await;
            }
            let entries = row
                .migration
                .advance(Event::LimitsSet { limits })
                .map_err(|refusal| too_late(&row, refusal))?;
            let points = faults::points(&row.migration, &entries);
            self.parts.faults.pass_all("before_commit", &points).await;
            match self.store().commit(&row, &entries, &row.notes, clock::now_us()).await? {
                Commit::Raced => {}
                Commit::Done(after) => {
                    self.parts.faults.pass_all("after_commit", &points).await;
                    tracing::info!(migration_id = %id, event = "limits_set",
                        max_bandwidth = limits.max_bandwidth.value(),
                        downtime_limit_ms = limits.downtime_limit.value(), "limits changed");
                    self.nudge(id);
                    self.take_up(&after);
                    return view::migration(self, &after).await;
                }
            }
        }
    }
}

fn downtime(asked: u64) -> Result<Millis, ApiError> {
    if asked == 0 {
        let problem = "must be at least 1".to_owned();
        return Err(ApiError::Invalid { field: "downtime_limit_ms", problem });
    }
    check_downtime(asked)?;
    Ok(Millis(asked))
}
