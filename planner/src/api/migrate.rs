//! Opening and cancelling migrations.

use std::sync::Arc;

use vmferry_planner_core::migration::{
    AutoConverge, Barred, Cause, Downgrade, Event, Gate, GatePoint, Gates, Guest, Migration,
    NotConverging, Opening, Refusal, Terms,
};
use vmferry_proto::v1;
use vmferry_types::{
    BytesPerSec, HostId, Method, MigrationId, MigrationType, Millis, PowerState, RequestId,
    Timestamp,
};

use super::{ApiError, migration_id, too_late};
use crate::admission::{self, Found};
use crate::planner::{Drives, Planner, fresh_admission};
use crate::store::{Admission, Commit, Grant, MigrationRow, NewMigration, Notes, Refused, VmRow};
use crate::{clock, faults, view};

/// One megabit per second, in bytes per second.
const MEGABIT: u64 = 125_000;
/// The longest that QEMU may be told to let a guest stand still: 2000 s.
const DOWNTIME_LIMIT_MS_MAX: u64 = 2_000_000;
/// Another admission may take the room between preflight and the transaction; then it is looked
/// for again, but not for ever.
const ATTEMPTS: u32 = 3;

impl Planner {
    /// Accepts a migration: checks it, and answers as soon as it is a row.
    ///
    /// # Errors
    ///
    /// Says everything that is in the way.
    pub async fn migrate_vm(
        self: &Arc<Self>,
        asked: v1::MigrateVmRequest,
    ) -> Result<v1::Migration, ApiError> {
        let request = request_id(&asked.request_id)?;
        if let Some(request) = &request
            && let Some(row) = self.store().migration_of_request(request).await?
        {
            return view::migration(self, &row).await;
        }
        let terms = self.terms(&asked)?;
        let wanted = wanted(&asked)?;
        let vm = self.resolve_vm("vm_name", &asked.vm_name).await?;
        let method = method(&asked, wanted, &vm)?;
        check_gates(method, terms.gates)?;
        let (source, generation, found) = movable(&vm)?;
        let (method, barred) = self.unless_barred(&vm, &source, method, &terms).await;
        let id = fresh_admission();
        let migration = Migration::open(Opening {
            id,
            vm: vm.id,
            source: source.clone(),
            method,
            terms,
            found,
            generation,
            deadline: self.queue_deadline(asked.queue_deadline_ms),
        })
        .map_err(|error| ApiError::Invalid { field: "method", problem: error.to_string() })?;
        let migration = Migration { barred, ..migration };
        let demand = admission::demand_on(self, &vm);
        let notes = Notes {
            memory_bytes: demand.memory.value(),
            cpu_milli: demand.cpu.value(),
            asked,
            ..Notes::default()
        };
        let row = self.admit(&vm, migration, request, notes).await?;
        view::migration(self, &row).await
    }

    /// Turns a live move to a cold one where QEMU names what moves by no stream at all, and the caller
    /// granted that (rule R5).
    async fn unless_barred(
        &self,
        vm: &VmRow,
        source: &HostId,
        method: Method,
        terms: &Terms,
    ) -> (Method, Option<Barred>) {
        if terms.downgrade != Downgrade::Cold || method == Method::Cold {
            return (method, None);
        }
        // Whoever does not answer is asked again by who looks for a destination.
        let Ok((_, blockers)) = admission::describe(self, vm.id, source).await else {
            return (method, None);
        };
        let barred: Vec<_> =
            blockers.into_iter().filter(|blocker| blocker.code == "qemu_blocked").collect();
        if barred.is_empty() {
            return (method, None);
        }
        let cause = Cause::Refused { blockers: barred };
        (Method::Cold, Some(Barred { from: method, cause }))
    }

    /// Finds a destination and writes the row; queues it if there is no room now.
    async fn admit(
        self: &Arc<Self>,
        vm: &VmRow,
        migration: Migration,
        request: Option<String>,
        notes: Notes,
    ) -> Result<MigrationRow, ApiError> {
        let asked = migration.terms.asked_destination.clone();
        let how = (migration.method, &notes.sake);
        let mut attempt = 0;
        loop {
            attempt += 1;
            let found =
                admission::destination(self, vm, &migration.source, asked.as_ref(), how).await?;
            let grant: Result<Grant, String> = match found {
                Found::Destination(grant) => Ok(grant),
                Found::Wait { note, .. } => Err(note),
                Found::Never { blockers } => return Err(ApiError::Blocked { blockers }),
            };
            let new = NewMigration {
                migration: migration.clone(),
                vm_name: vm.name.clone(),
                request: request.clone(),
                notes: notes.clone(),
                grant,
                begun_for: None,
            };
            let points = &self.parts.faults;
            let point = if new.grant.is_ok() { "admitted" } else { "queued" };
            points.pass("before_commit", point).await;
            match self.store().admit(&new, clock::now_us()).await? {
                Admission::Admitted(row) => {
                    points.pass("after_commit", point).await;
                    tracing::info!(migration_id = %row.migration.id, vm_id = %vm.id,
                        phase = row.migration.label().label(), "migration opened");
                    self.take_up(&row);
                    return Ok(*row);
                }
                Admission::Known(row) => return Ok(*row),
                // Nothing else is written with it.
                Admission::Raced => {}
                Admission::Refused(refused) => {
                    let again = refused.is_transient() && asked.is_none() && attempt < ATTEMPTS;
                    if !again {
                        return Err(refused.into());
                    }
                }
            }
        }
    }

    /// Gives a row to whoever takes it further.
    pub(crate) fn take_up(self: &Arc<Self>, row: &MigrationRow) {
        if row.migration.destination().is_some() && row.ended_us.is_none() {
            self.drive(Drives::Migration(row.migration.id));
        } else {
            self.wake.notify_one();
        }
    }

    /// Asks to take a migration back.
    ///
    /// # Errors
    ///
    /// Says so if the guest is past the point where that could be granted.
    pub async fn cancel_migration(self: &Arc<Self>, id: &str) -> Result<v1::Migration, ApiError> {
        self.tell(migration_id(id)?, |_| Ok(Some(Event::CancelRequested))).await
    }

    /// Commits what an operator says of a migration, and answers with the migration as it is then.
    /// Nothing is said if `says` finds nothing to say.
    pub(super) async fn tell(
        self: &Arc<Self>,
        id: MigrationId,
        says: impl Fn(&Migration) -> Result<Option<Event>, ApiError>,
    ) -> Result<v1::Migration, ApiError> {
        loop {
            let row = self.migration_row(id).await?;
            let Some(event) = says(&row.migration)? else {
                return view::migration(self, &row).await;
            };
            let label = event.label();
            let entries = match row.migration.advance(event) {
                Ok(entries) => entries,
                Err(Refusal::Stale) => return view::migration(self, &row).await,
                Err(refusal @ (Refusal::TooLate | Refusal::Illegal)) => {
                    return Err(too_late(&row, refusal));
                }
            };
            let points = faults::points(&row.migration, &entries);
            self.parts.faults.pass_all("before_commit", &points).await;
            match self.store().commit(&row, &entries, &row.notes, clock::now_us()).await? {
                Commit::Raced => {}
                Commit::Done(after) => {
                    self.parts.faults.pass_all("after_commit", &points).await;
                    tracing::info!(migration_id = %id, phase = after.migration.label().label(),
                        event = label, "phase changed");
                    self.nudge(id);
                    self.take_up(&after);
                    return view::migration(self, &after).await;
                }
            }
        }
    }

    pub(super) async fn migration_row(&self, id: MigrationId) -> Result<MigrationRow, ApiError> {
        self.store()
            .migration(id)
            .await?
            .ok_or_else(|| ApiError::NotFound { kind: "migration", name: id.to_string() })
    }

    pub(crate) fn terms(&self, asked: &v1::MigrateVmRequest) -> Result<Terms, ApiError> {
        let defaults = &self.parts.config.migration;
        let or = |asked: u64, default: std::time::Duration| {
            if asked == 0 {
                Millis(u64::try_from(default.as_millis()).unwrap_or(u64::MAX))
            } else {
                Millis(asked)
            }
        };
        if asked.compress {
            return Err(ApiError::Invalid {
                field: "compress",
                problem: "is not available yet; leave it out".to_owned(),
            });
        }
        let max_bandwidth = bandwidth(asked.bandwidth_mbps)?;
        check_downtime(asked.downtime_limit_ms)?;
        let asked_destination = if asked.target_host.is_empty() {
            None
        } else {
            Some(self.resolve_host("target_host", &asked.target_host)?)
        };
        let downgrade = match asked.downgrade.as_str() {
            "" => defaults.downgrade,
            label => Downgrade::from_label(label).ok_or_else(|| ApiError::Invalid {
                field: "downgrade",
                problem: format!("`{label}` is none of never, snapshot, cold"),
            })?,
        };
        let not_converging = match asked.not_converging.as_str() {
            "" => defaults.not_converging,
            label => NotConverging::from_label(label).ok_or_else(|| ApiError::Invalid {
                field: "not_converging",
                problem: format!("`{label}` is none of {}", NotConverging::LABELS),
            })?,
        };
        Ok(Terms {
            asked_destination,
            hold_limit: or(asked.hold_limit_ms, defaults.hold_limit),
            downtime_limit: or(asked.downtime_limit_ms, defaults.downtime_limit),
            transfer_timeout: or(asked.timeout_ms, defaults.transfer_timeout),
            stall_limit: or(0, defaults.stall_limit),
            switchover_limit: or(0, defaults.switchover_limit),
            shutdown_limit: or(asked.shutdown_limit_ms, defaults.shutdown_limit),
            max_bandwidth,
            auto_converge: if asked.auto_converge || defaults.auto_converge {
                AutoConverge::On
            } else {
                AutoConverge::Off
            },
            gates: gates(&asked.gates)?,
            gate_deadline: or(asked.gate_deadline_ms, defaults.gate_deadline),
            downgrade,
            not_converging,
        })
    }

    /// Returns until when a request may wait for room; so many milliseconds, or the planner's own limit.
    pub(crate) fn queue_deadline(&self, asked_ms: u64) -> Timestamp {
        let wait = if asked_ms == 0 {
            u64::try_from(self.parts.config.policy.queue_deadline.as_millis()).unwrap_or(u64::MAX)
        } else {
            asked_ms
        };
        Timestamp(clock::now().value().saturating_add(wait))
    }
}

/// Reads where a migration is to wait for an operator.
fn gates(asked: &[String]) -> Result<Gates, ApiError> {
    asked.iter().try_fold(Gates::OPEN, |gates, label| {
        let point = GatePoint::from_label(label).ok_or_else(|| ApiError::Invalid {
            field: "gates",
            problem: format!("`{label}` is none of start, switchover, commit"),
        })?;
        Ok(gates.closed_at(point))
    })
}

/// Reads a cap in megabits per second; 0 is none.
pub(super) fn bandwidth(mbps: u64) -> Result<BytesPerSec, ApiError> {
    let rate = mbps.checked_mul(MEGABIT).filter(|rate| i64::try_from(*rate).is_ok());
    rate.map(BytesPerSec).ok_or_else(|| ApiError::Invalid {
        field: "bandwidth_mbps",
        problem: format!("{mbps} is more than any link carries"),
    })
}

pub(super) fn check_downtime(limit_ms: u64) -> Result<(), ApiError> {
    if limit_ms > DOWNTIME_LIMIT_MS_MAX {
        return Err(ApiError::Invalid {
            field: "downtime_limit_ms",
            problem: format!("must be at most {DOWNTIME_LIMIT_MS_MAX}"),
        });
    }
    Ok(())
}

/// Reads a caller's request id: a UUID, or nothing.
pub(super) fn request_id(text: &str) -> Result<Option<String>, ApiError> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse::<RequestId>()
        .map(|id| Some(id.to_string()))
        .map_err(|error| ApiError::Invalid { field: "request_id", problem: error.to_string() })
}

/// Refuses gates that a guest does not come by which is shut down: nothing of it is sent.
fn check_gates(method: Method, gates: Gates) -> Result<(), ApiError> {
    if method == Method::Cold && (Gates { commit: Gate::Open, ..gates }) != Gates::OPEN {
        return Err(ApiError::Invalid {
            field: "gates",
            problem: "a guest that is shut down comes by the gate commit only".to_owned(),
        });
    }
    Ok(())
}

/// What a caller says of how a VM is to be carried.
#[derive(Clone, Copy)]
enum Wanted {
    Method(Method),
    Kind(MigrationType),
    /// Nothing.
    Any,
}

fn wanted(asked: &v1::MigrateVmRequest) -> Result<Wanted, ApiError> {
    let kind = if asked.migration_type.is_empty() {
        None
    } else {
        let kind = MigrationType::from_label(&asked.migration_type);
        Some(kind.ok_or_else(|| ApiError::Invalid {
            field: "migration_type",
            problem: format!("`{}` is none of live, offline, storage", asked.migration_type),
        })?)
    };
    if asked.method.is_empty() {
        return Ok(kind.map_or(Wanted::Any, Wanted::Kind));
    }
    Method::from_label(&asked.method).map(Wanted::Method).ok_or_else(|| ApiError::Invalid {
        field: "method",
        problem: format!(
            "`{}` is none of precopy, postcopy, snapshot, cold, disk_copy",
            asked.method
        ),
    })
}

/// Returns how a VM is to be carried. To shut a guest down has to be granted by name (rule R8).
fn method(asked: &v1::MigrateVmRequest, wanted: Wanted, vm: &VmRow) -> Result<Method, ApiError> {
    let stopped = vm.power == PowerState::Stopped;
    let method = match wanted {
        Wanted::Method(method) => method,
        // Of one that is stopped only the definition moves.
        Wanted::Any if stopped => Method::Cold,
        Wanted::Any | Wanted::Kind(MigrationType::Live) => Method::Precopy,
        Wanted::Kind(MigrationType::Offline) => Method::Cold,
        Wanted::Kind(MigrationType::Storage) => {
            return Err(ApiError::Invalid {
                field: "migration_type",
                problem: "storage is not available yet: use live".to_owned(),
            });
        }
    };
    let granted = asked.allow_shutdown
        || MigrationType::from_label(&asked.migration_type) == Some(MigrationType::Offline);
    match method {
        Method::Cold if !stopped && !granted => Err(ApiError::Invalid {
            field: "allow_shutdown",
            problem: "method cold shuts the guest down: grant that with allow_shutdown, or with migration_type offline".to_owned(),
        }),
        Method::Precopy | Method::Postcopy | Method::Snapshot if stopped => {
            Err(Refused::Power { power: vm.power }.into())
        }
        method @ (Method::Precopy
        | Method::Postcopy
        | Method::Snapshot
        | Method::Cold
        | Method::DiskCopy) => Ok(method),
    }
}

/// Returns where a VM runs and under which generation, if it can move at all.
fn movable(vm: &VmRow) -> Result<(HostId, vmferry_types::Generation, Guest), ApiError> {
    if let Some(admission) = vm.admission {
        return Err(Refused::InFlight { admission }.into());
    }
    match (&vm.power, &vm.host) {
        (PowerState::Running, Some(host)) => Ok((host.clone(), vm.generation, Guest::Present)),
        (PowerState::Stopped, Some(host)) => Ok((host.clone(), vm.generation, Guest::PoweredOff)),
        (power, _) => Err(Refused::Power { power: *power }.into()),
    }
}
