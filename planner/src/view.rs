//! Rows and reports as messages: what users are shown.

mod emptying;
mod host;
mod migration;
mod queue;
mod story;

use std::collections::BTreeMap;

use vmferry_planner_core::doctor::{GaveUp, OpenHalf};
use vmferry_planner_core::evidence::{Continued, Handed};
use vmferry_planner_core::migration::{
    Blocker, Entry, Event, Keep, Migration, NotConverging, Phase, Stage,
};
use vmferry_proto::v1;
use vmferry_types::{HostId, MigrationId, PowerState, Role};

pub use emptying::{emptying, emptying_with_log};
pub use host::{hosts, with_past};
pub use migration::{migration, still_ms, stuck, summaries, summary};
pub use queue::queue;

use crate::api::ApiError;
use crate::planner::Planner;
use crate::store::VmRow;

/// Says what a person should know of a change.
#[must_use]
pub fn note(entry: &Entry) -> String {
    match &entry.event {
        Event::Granted { destination } => format!("host {destination} is reserved"),
        Event::NoRoom { note, .. } => note.clone(),
        Event::ReceiverArmed { listener } => {
            format!("the receiver listens on {}:{}", listener.address, listener.port)
        }
        Event::SourceShutDown { .. } => "the guest is off, its disks are closed".to_owned(),
        Event::SourceHeld => "the guest is held still while its memory crosses".to_owned(),
        Event::PostcopyDue { verdict } => match verdict {
            Some(verdict) => format!("goes on as postcopy instead of precopy: {verdict}"),
            None => "memory was gone over once; the guest goes before what is left".to_owned(),
        },
        Event::ChannelBroke => {
            format!("the channel between both halves broke, for the {}. time", entry.after.breaks)
        }
        Event::ChannelMended => "the channel between both halves is mended".to_owned(),
        Event::Diverges { verdict } => {
            let answer = entry.after.answered.map_or("", NotConverging::label);
            format!("answered by {answer}: {verdict}")
        }
        Event::LimitsSet { limits } => format!(
            "bandwidth {}, downtime limit {} ms",
            match limits.max_bandwidth.value() {
                0 => "not capped".to_owned(),
                cap => format!("capped at {cap} bytes per second"),
            },
            limits.downtime_limit.value()
        ),
        Event::Resolved { keep: Keep::Source } => "an operator keeps the source's guest".to_owned(),
        Event::Resolved { keep: Keep::Neither } => "an operator keeps neither side".to_owned(),
        Event::StartAllowed => "an operator lets it be sent".to_owned(),
        Event::SwitchoverAllowed => "an operator lets it switch over".to_owned(),
        Event::GatesOpened => "an operator opened all gates that are left".to_owned(),
        Event::GateExpired if entry.after.phase.cause().is_none() => {
            "nobody opened the gate in time, and there is no way back: it goes on".to_owned()
        }
        Event::Refused { .. }
        | Event::GateExpired
        | Event::QueueExpired
        | Event::CancelRequested
        | Event::SourceStopped
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::ShutdownRefused
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::SourceGone { .. }
        | Event::SourceReleased { .. }
        | Event::Severed { .. }
        | Event::Overtaken { .. }
        | Event::GuestPoweredOff { .. }
        | Event::ReceiverGone { .. }
        | Event::DestinationRuns
        | Event::SourceContinued => {
            let cause = entry.after.phase.cause().map(ToString::to_string);
            cause.or_else(|| downgrade(&entry.after)).unwrap_or_default()
        }
    }
}

/// Says that, and why, a move goes on with its guest held.
fn downgrade(after: &Migration) -> Option<String> {
    let Phase::Admitted { stage, .. } = &after.phase else { return None };
    let (from, cause) = after.refused_live()?;
    match stage {
        Stage::Recalling { .. } => {
            Some(format!("{from} was refused, the guest will be held: {cause}"))
        }
        Stage::Clearing { .. } => {
            Some("the guest runs on; the receiver is cleared away for another one".to_owned())
        }
        Stage::Arming => Some(format!("goes on as {} instead of {from}", after.method)),
        Stage::Waiting { .. }
        | Stage::Transferring { .. }
        | Stage::Parting { .. }
        | Stage::ShuttingDown
        | Stage::Holding { .. } => None,
    }
}

/// Writes a reason for the wire.
#[must_use]
pub fn blocker(blocker: &Blocker) -> v1::Blocker {
    v1::Blocker {
        code: blocker.code.clone(),
        message: blocker.message.clone(),
        host_id: blocker.host.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

/// Shows a VM.
///
/// # Errors
///
/// Fails if the store does.
pub async fn vm(planner: &Planner, row: &VmRow) -> Result<v1::Vm, ApiError> {
    let reported = planner.parts.inventory.reported(row.id);
    let queue = waiting(planner, std::iter::once(row)).await?;
    let shown = vm_reported(planner, row, &reported, &queue).await?;
    let stands = matches!(row.power, PowerState::Stopped | PowerState::Lost);
    if stands && row.admission.is_some() && shown.queued.is_none() {
        // It waited no more by the time the queue was read: what became of it is in its row.
        if let Some(row) = planner.store().vm(row.id).await? {
            let queue = waiting(planner, std::iter::once(&row)).await?;
            return vm_reported(planner, &row, &reported, &queue).await;
        }
    }
    Ok(shown)
}

/// Reads the queue if any of the VMs may wait in it.
async fn waiting<'a>(
    planner: &Planner,
    mut rows: impl Iterator<Item = &'a VmRow>,
) -> Result<BTreeMap<MigrationId, v1::QueueEntry>, ApiError> {
    if rows.any(|row| row.admission.is_some()) {
        Ok(queue::queue_by_id(planner).await?)
    } else {
        Ok(BTreeMap::new())
    }
}

/// Shows many VMs.
///
/// # Errors
///
/// Fails if the store does.
pub async fn vms<'a>(
    planner: &Planner,
    rows: impl Iterator<Item = &'a VmRow> + Clone,
) -> Result<Vec<v1::Vm>, ApiError> {
    let waiting = waiting(planner, rows.clone()).await?;
    let reported = planner.parts.inventory.all_reported();
    let mut shown = Vec::new();
    for row in rows {
        let of = reported.get(&row.id).map_or(&[][..], Vec::as_slice);
        shown.push(vm_reported(planner, row, of, &waiting).await?);
    }
    Ok(shown)
}

async fn vm_reported(
    planner: &Planner,
    row: &VmRow,
    reported: &[(HostId, v1::VmReport)],
    waiting: &BTreeMap<MigrationId, v1::QueueEntry>,
) -> Result<v1::Vm, ApiError> {
    let owner = reported.iter().find(|(host, _)| Some(host) == row.host.as_ref());
    let (mut observed, mut run_state) = (0, String::new());
    if let Some((_, report)) = owner {
        observed = report.observed_memory_bytes;
        run_state.clone_from(&report.run_state);
    }
    let (mut migration_id, mut migration_phase) = (String::new(), String::new());
    if let Some(admission) = row.admission
        && let Some(open) = planner.store().migration(admission).await?
    {
        migration_id = admission.to_string();
        migration_phase = open.migration.label().label().to_owned();
    }
    let mut error = row.error.clone();
    if error.is_empty()
        && let Some(admission) = row.admission
        && let Some((text, _)) = planner.live.seen(admission).trouble
    {
        error = text;
    }
    if let Some(contradiction) = contradiction(row, reported) {
        if !error.is_empty() {
            error.push_str("; ");
        }
        error.push_str(&contradiction);
    }
    Ok(v1::Vm {
        id: row.id.to_string(),
        name: row.name.clone(),
        host: row.host.as_ref().map(ToString::to_string).unwrap_or_default(),
        power: row.power.label().to_owned(),
        error,
        generation: row.generation.value(),
        claim: row.claim.value(),
        memory_bytes: row.memory.value(),
        observed_memory_bytes: observed,
        cpu_milli: row.cpu.value(),
        run_state,
        migration_id,
        migration_phase,
        definition: row.definition.clone(),
        resolved_machine: row.resolved_machine.clone(),
        queued: row
            .admission
            .and_then(|id| waiting.get(&id))
            .filter(|entry| entry.kind == "start")
            .cloned(),
    })
}

/// Says what hosts report of a VM that cannot be, while nothing is under way for it.
fn contradiction(row: &VmRow, reported: &[(HostId, v1::VmReport)]) -> Option<String> {
    if row.admission.is_some() {
        return None;
    }
    // Not from before the last start: a report under its claim, or a later one.
    let missing = |(host, report): &&(HostId, v1::VmReport)| {
        let role = Role::from_label(&report.role);
        Some(host) == row.host.as_ref()
            && row.power == PowerState::Running
            && report.knowledge() == v1::Knowledge::Known
            && matches!(role, Some(Role::Absent | Role::Stopped))
            && report.claim >= row.claim.value()
    };
    let missing = reported.iter().find(missing).map(|(host, _)| {
        format!(
            "host {host} knows of no process of it: see what runs there before it is started elsewhere"
        )
    });
    let running: Vec<String> = reported
        .iter()
        .filter(|(host, report)| {
            let role = Role::from_label(&report.role);
            let runs = matches!(role, Some(Role::Running | Role::Held | Role::Receiver));
            runs && report.gone.is_none() && Some(host) != row.host.as_ref()
        })
        .map(|(host, report)| {
            format!(
                "host {host} reports it as {} under generation {}",
                report.role, report.generation
            )
        })
        .chain(missing)
        .collect();
    if running.is_empty() { None } else { Some(running.join("; ")) }
}

/// Shows a half of a migration that nobody drives.
#[must_use]
pub fn half(half: &OpenHalf) -> v1::OpenHalf {
    let there = &half.there;
    v1::OpenHalf {
        migration_id: half.migration.to_string(),
        vm_id: there.vm.to_string(),
        vm_name: there.name.clone(),
        host: half.host.to_string(),
        side: half.side.label().to_owned(),
        role: there.role.label().to_owned(),
        run_state: there.run_state.word().to_owned(),
        generation: there.generation.value(),
        claim: there.claim.value(),
        handed: there.handed == Handed::Yes,
        gave_up: there.gave_up == GaveUp::Yes,
        ever_continued: there.continued == Continued::Yes,
        words: half.words(),
    }
}
