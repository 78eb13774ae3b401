//! What is seen of a host that is emptied: the store's part first, then its agent's.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_planner_core::lifecycle::emptiness::{HostFacts, Inside, Presence};
use vmferry_planner_core::lifecycle::job::{self, MoveState, ReturnState};
use vmferry_planner_core::lifecycle::{Emptying, Ended, drain};
use vmferry_planner_core::migration::{Cause, Phase};
use vmferry_planner_core::queue::waits_for_own_limit;
use vmferry_proto::v1::HostReport;
use vmferry_types::{Generation, HostId, MigrationId, PowerState, Role, Timestamp, VmId};

use crate::clock;
use crate::inventory::words_of_death;
use crate::plan::{self, Described, LocalDisks};
use crate::planner::Planner;
use crate::store::{EmptyingRow, MigrationRow, StoreError, VmRow};

/// What is seen, in the words of the machine that reads it.
#[derive(Debug)]
pub enum Facts {
    /// For a maintenance job.
    Job(job::Facts),
    /// For a drain or a retirement.
    Drain(drain::Facts),
}

/// Whether the agent is asked what is on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// It is.
    Agent,
    /// What it last said by itself is taken.
    Nobody,
    /// The same, and nothing is planned: somebody only looks.
    Shown,
}

/// Says how a host stands to a planner: heard, silent or proven dead.
#[must_use]
pub fn presence(planner: &Planner, host: &HostId) -> Presence {
    let inventory = &planner.parts.inventory;
    if let Some(declaration) = inventory.dead(host) {
        return Presence::Dead { how: format!("it was {}", words_of_death(&declaration)) };
    }
    let limit = u64::try_from(planner.parts.config.policy.report_max_age.as_millis());
    let limit = limit.unwrap_or(u64::MAX);
    match inventory.heard(host) {
        Some(heard) if clock::now().since(heard.at).value() <= limit => Presence::Heard,
        Some(_) | None => Presence::Silent,
    }
}

/// The same for what empties it: under another boot than it was opened under, what was there then
/// is gone, and was not moved.
fn presence_for(planner: &Planner, row: &EmptyingRow) -> Presence {
    let host = row.emptying.host();
    let now = presence(planner, host);
    let still_there = match &row.emptying {
        Emptying::Job(job) => {
            let left =
                |state: &MoveState| matches!(state, MoveState::Waiting | MoveState::Begun { .. });
            job.phase == job::Phase::Running && job.moves.iter().any(|one| left(&one.state))
        }
        Emptying::Drain(drain) => {
            drain.phase == drain::Phase::Emptying && !drain.residents.is_empty()
        }
    };
    let before = &row.notes.boot_id;
    let boot = planner.parts.inventory.row(host).map(|row| row.boot_id).unwrap_or_default();
    let rebooted = !before.is_empty() && !boot.is_empty() && boot != *before;
    match now {
        Presence::Heard if still_there && rebooted => Presence::Dead {
            how: format!("it was booted anew while VMs were on it (boot {before} is over)"),
        },
        Presence::Heard | Presence::Silent | Presence::Dead { .. } => now,
    }
}

/// Gathers what is seen.
///
/// # Errors
///
/// Fails if the store does.
pub async fn gather(
    planner: &Planner,
    row: &EmptyingRow,
    described: &mut Described,
    asking: Asking,
) -> Result<Facts, StoreError> {
    let host = row.emptying.host();
    let store = planner.store();
    let (ended, waiting) = ended(planner, row).await?;
    let here = store.vms_on(host).await?;
    let reserved = store.reservations().await?;
    let reserved = reserved.iter().filter(|one| one.host == *host).map(|one| one.vm).collect();
    let own: BTreeSet<MigrationId> =
        row.emptying.open_migrations().into_iter().map(|(_, id)| id).collect();
    let mut in_flight: BTreeSet<VmId> =
        here.iter().filter(|vm| is_busy(vm, &own)).map(|vm| vm.id).collect();
    let residents: Vec<&VmRow> = here.iter().filter(|vm| has_to_leave(vm)).collect();
    let presence = presence_for(planner, row);
    let inside = inside(planner, host, asking).await;
    let seen = HostFacts {
        presence,
        reserved,
        residents: residents.iter().map(|vm| vm.id).collect(),
        inside,
    };
    match &row.emptying {
        Emptying::Job(job) => {
            let mut owners: BTreeMap<VmId, (Option<HostId>, Generation)> =
                residents.iter().map(|vm| (vm.id, (vm.host.clone(), vm.generation))).collect();
            for vm in coming_back(job) {
                let Some(vm) = store.vm(vm).await? else { continue };
                if is_busy(&vm, &own) {
                    in_flight.insert(vm.id);
                }
                if vm.power == PowerState::Running {
                    owners.insert(vm.id, (vm.host, vm.generation));
                }
            }
            Ok(Facts::Job(job::Facts { host: seen, ended, owners, in_flight, waiting }))
        }
        Emptying::Drain(drain) => {
            let plan = match asking {
                Asking::Shown => None,
                Asking::Agent | Asking::Nobody => {
                    to_plan(planner, drain, &seen, &here, described).await?
                }
            };
            Ok(Facts::Drain(drain::Facts { host: seen, ended, in_flight, plan }))
        }
    }
}

/// Plans for those whose turn has come, while one of them may be begun.
async fn to_plan(
    planner: &Planner,
    drain: &drain::Drain,
    seen: &HostFacts,
    here: &[VmRow],
    described: &mut Described,
) -> Result<Option<vmferry_planner_core::maintenance::Plan>, StoreError> {
    let limit = usize::try_from(drain.policy.max_parallel.get()).unwrap_or(usize::MAX);
    let full = drain.open_migrations().count() >= limit;
    if seen.presence != Presence::Heard || drain.phase != drain::Phase::Emptying || full {
        return Ok(None);
    }
    let known: Vec<VmId> = drain.residents.iter().map(|one| one.vm).collect();
    let free = drain.to_plan(clock::now());
    // One that is there and not known yet is taken up in the same step.
    let wanted: Vec<&VmRow> = here
        .iter()
        .filter(|vm| has_to_leave(vm) && vm.admission.is_none())
        .filter(|vm| free.contains(&vm.id) || !known.contains(&vm.id))
        .collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    plan::plan(planner, &drain.host, &drain.policy, &wanted, described).await.map(Some)
}

/// Says whether a VM is under way by somebody else's doing.
fn is_busy(vm: &VmRow, own: &BTreeSet<MigrationId>) -> bool {
    vm.admission.is_some_and(|id| !own.contains(&id))
}

/// Says whether a VM has to leave a host that is emptied: it runs there, or has disks there that no
/// other host has.
#[must_use]
pub fn has_to_leave(vm: &VmRow) -> bool {
    match vm.power {
        PowerState::Running | PowerState::Starting | PowerState::Stopping => true,
        PowerState::Stopped => LocalDisks::of(&vm.definition).any(),
        // What is left of it is nothing that could be moved.
        PowerState::Lost => false,
    }
}

fn coming_back(job: &job::Job) -> Vec<VmId> {
    match &job.phase {
        job::Phase::Completed { back, .. } => {
            back.iter().filter(|one| one.state == ReturnState::Waiting).map(|one| one.vm).collect()
        }
        job::Phase::Planned
        | job::Phase::Blocked
        | job::Phase::Running
        | job::Phase::Verifying { .. }
        | job::Phase::Stopping { .. }
        | job::Phase::Maintenance { .. }
        | job::Phase::Failed { .. }
        | job::Phase::Cancelled { .. } => Vec::new(),
    }
}

/// Returns those of its migrations that are over, with nothing owed any more, and how they ended;
/// and those that wait for room.
async fn ended(
    planner: &Planner,
    row: &EmptyingRow,
) -> Result<(BTreeMap<MigrationId, Ended>, BTreeSet<MigrationId>), StoreError> {
    let (mut ended, mut waiting) = (BTreeMap::new(), BTreeSet::new());
    for (_, id) in row.emptying.open_migrations() {
        let Some(row) = planner.store().migration(id).await? else { continue };
        if let Some(how) = how_it_ended(&row) {
            ended.insert(id, how);
        } else if waits_for_room(&row) {
            waiting.insert(id);
        }
    }
    Ok((ended, waiting))
}

fn waits_for_room(row: &MigrationRow) -> bool {
    let Phase::Queued { blocked: Some(blocked), .. } = &row.migration.phase else { return false };
    !waits_for_own_limit(&blocked.note)
}

fn how_it_ended(row: &MigrationRow) -> Option<Ended> {
    row.ended_us?;
    let cause = row.migration.phase.cause();
    Some(match (&row.migration.phase, cause) {
        (Phase::Done { destination, .. }, _) => Ended::Moved {
            destination: destination.clone(),
            generation: row.migration.books().generation,
        },
        (Phase::Aborted { .. }, Some(Cause::Cancelled)) => Ended::Cancelled,
        (_, Some(cause)) => Ended::Failed { error: cause.to_string() },
        (_, None) => Ended::Failed { error: "it ended without saying why".to_owned() },
    })
}

/// Reads what the agent says of its host: asked now, or as it last reported by itself.
async fn inside(planner: &Planner, host: &HostId, asking: Asking) -> Option<Inside> {
    match asking {
        Asking::Agent => {
            let asked = clock::now();
            match planner.parts.agents.report(host).await {
                Ok(report) => return Some(read(&report, asked)),
                Err(error) => {
                    tracing::debug!(host_id = %host, error = %crate::telemetry::Chain(&error),
                        "a host that is emptied did not say what is on it");
                }
            }
        }
        Asking::Nobody | Asking::Shown => {}
    }
    // When a report that came by itself was composed is not known.
    planner.parts.inventory.heard(host).map(|heard| read(&heard.report, Timestamp(0)))
}

fn read(report: &HostReport, composed_after: Timestamp) -> Inside {
    let mut inside = Inside {
        composed_after,
        unreadable: None,
        guests: Vec::new(),
        receivers: Vec::new(),
        strangers: report.strangers.clone(),
    };
    if report.journal_unreadable {
        inside.unreadable = Some("its journal is new, lost or broken".to_owned());
    } else if report.learning {
        inside.unreadable = Some("it is still learning what runs there".to_owned());
    }
    for vm in &report.vms {
        let (Ok(id), Some(role)) = (vm.vm_id.parse(), Role::from_label(&vm.role)) else {
            inside.unreadable = Some(format!("it says of VM {} what nobody knows", vm.vm_id));
            continue;
        };
        if vm.gone.is_some() {
            continue;
        }
        match role {
            Role::Running | Role::Held => inside.guests.push(id),
            Role::Receiver => inside.receivers.push(id),
            Role::Stopped | Role::Absent => {}
        }
    }
    inside
}
