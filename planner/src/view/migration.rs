//! Migrations as users are shown them.

use vmferry_planner_core::evidence::{Sides, Times};
use vmferry_planner_core::migration::{
    Channel, Gate, GatePoint, Migration, Phase, Stage, Switchover,
};
use vmferry_planner_core::progress::{Crossed, percent, user_state};
use vmferry_planner_core::stuck::{Stuck, Trouble, stuck as core_stuck};
use vmferry_proto::v1;
use vmferry_types::{Bytes, Method, MigrationType, PhaseLabel, Timestamp};

use crate::api::ApiError;
use crate::clock;
use crate::driver::seen::seen;
use crate::live::Seen;
use crate::planner::Planner;
use crate::store::{LogRow, MigrationRow};

/// Shows a migration with its log and the times of its phases.
///
/// # Errors
///
/// Fails if the store does.
pub async fn migration(planner: &Planner, row: &MigrationRow) -> Result<v1::Migration, ApiError> {
    let log = planner.store().log(row.migration.id).await?;
    let shown = summaries(planner, std::slice::from_ref(row)).await?.pop();
    let mut message = shown.unwrap_or_default();
    message.phases = phases(&log, row.ended_us.unwrap_or_else(clock::now_us));
    message.log = log
        .iter()
        .map(|entry| v1::LogEntry {
            seq: entry.seq.value(),
            at: clock::rfc3339_us(entry.at_us),
            event: entry.event.clone(),
            phase: entry.phase.label().to_owned(),
            note: entry.note.clone(),
        })
        .collect();
    Ok(message)
}

/// Shows migrations without their logs, those that wait with their place in the queue.
///
/// # Errors
///
/// Fails if the store does.
pub async fn summaries(
    planner: &Planner,
    rows: &[MigrationRow],
) -> Result<Vec<v1::Migration>, ApiError> {
    let mut shown: Vec<v1::Migration> = rows.iter().map(|row| summary(planner, row)).collect();
    let waits = |row: &MigrationRow| row.migration.label() == PhaseLabel::Queued;
    if rows.iter().any(waits) {
        let queue = super::queue::queue_by_id(planner).await?;
        for (row, message) in rows.iter().zip(&mut shown) {
            message.queued = queue.get(&row.migration.id).cloned();
        }
    }
    Ok(shown)
}

/// Shows a migration without its log.
#[must_use]
pub fn summary(planner: &Planner, row: &MigrationRow) -> v1::Migration {
    let live = planner.live.seen(row.migration.id);
    let migration = &row.migration;
    let transfer = transfer(row, &live);
    let crossed =
        Crossed { remaining: Bytes(transfer.bytes_remaining), total: Bytes(transfer.bytes_total) };
    let stuck = stuck(row, &live);
    let parted = migration.method == Method::Postcopy;
    let diverged = migration.diverged.as_ref().filter(|_| parted);
    let mut message = v1::Migration {
        id: migration.id.to_string(),
        vm_id: migration.vm.to_string(),
        vm_name: row.vm_name.clone(),
        source_host: migration.source.to_string(),
        target_host: migration.destination().map(ToString::to_string).unwrap_or_default(),
        migration_type: kind(row),
        method: migration.method.label().to_owned(),
        downgraded_from: migration
            .refused_live()
            .map(|(from, _)| from.label().to_owned())
            .or_else(|| diverged.map(|_| Method::Precopy.label().to_owned()))
            .unwrap_or_default(),
        downgrade_cause: migration
            .refused_live()
            .map(|(_, cause)| cause.to_string())
            .or_else(|| diverged.cloned())
            .unwrap_or_default(),
        channel_breaks: migration.breaks,
        channel_broken: migration.channel == Channel::Broken,
        state: user_state(&migration.phase).label().to_owned(),
        phase: migration.label().label().to_owned(),
        progress_percent: u32::from(percent(migration, crossed)),
        pause_us: row.notes.pause_us,
        started: clock::rfc3339_us(row.created_us),
        completed: row.ended_us.map(clock::rfc3339_us).unwrap_or_default(),
        error: error(row, stuck.as_ref()),
        guest_still_ms: still_ms(row, &live),
        source_status: row.notes.source_status.clone(),
        destination_status: row.notes.destination_status.clone(),
        cancel_requested: migration.phase.cause().is_some_and(|cause| cause.label() == "cancelled"),
        request_id: row.request.clone().unwrap_or_default(),
        generation: migration.books().generation.value(),
        claim: row.claim.value(),
        seq: row.seq.value(),
        proof: migration
            .phase
            .handover()
            .and_then(|proof| serde_json::to_string(proof).ok())
            .unwrap_or_default(),
        ordered: ordered(&migration.phase),
        stuck: stuck.map(|stuck| v1::Stuck {
            cause: stuck.cause,
            waits_for: stuck.waits_for,
            age_ms: stuck.age.value(),
        }),
        ..v1::Migration::default()
    };
    figures(&mut message, &transfer);
    gates(&mut message, row);
    verdict(&mut message, migration);
    message.waits_for_link = live.waits_for_link.clone().unwrap_or_default();
    message.emptying_id.clone_from(&row.notes.sake.emptying);
    if let Phase::Queued { blocked: Some(blocked), .. } = &migration.phase {
        message.capacity_blocked_since = clock::rfc3339(blocked.since);
        message.capacity_note.clone_from(&blocked.note);
    }
    message
}

/// Says where it waits for an operator, and until when.
fn gates(message: &mut v1::Migration, row: &MigrationRow) {
    let terms = &row.migration.terms;
    let closed = GatePoint::ALL.into_iter().filter(|at| terms.gates.at(*at) == Gate::Closed);
    message.gates = closed.map(|at| at.label().to_owned()).collect();
    if let Some(at) = row.migration.waits_at() {
        let since = Timestamp(row.notes.entered_us / 1000);
        let until = Timestamp(since.value().saturating_add(terms.gate_deadline.value()));
        message.waits_at_gate = at.label().to_owned();
        message.gate_expires = clock::rfc3339(until);
    }
}

/// What was made of its convergence, and what limits it. Once it crosses no more nothing is expected.
fn verdict(message: &mut v1::Migration, migration: &Migration) {
    message.verdict = migration.diverged.clone().unwrap_or_default();
    message.verdict_answer =
        migration.answered.map(|answer| answer.label().to_owned()).unwrap_or_default();
    message.bandwidth_limit = migration.terms.max_bandwidth.value();
    message.downtime_limit_ms = migration.terms.downtime_limit.value();
    let live = matches!(
        migration.phase,
        Phase::Admitted { stage: Stage::Arming | Stage::Transferring { .. }, .. }
    );
    if !live {
        message.eta_ms = 0;
    }
}

fn figures(message: &mut v1::Migration, transfer: &v1::TransferStatus) {
    message.forecast.clone_from(&transfer.forecast);
    message.eta_ms = transfer.eta_ms;
    message.bytes_transferred = transfer.bytes_transferred;
    message.bytes_remaining = transfer.bytes_remaining;
    message.bytes_total = transfer.bytes_total;
    message.bytes_per_second = transfer.bytes_per_second;
    message.dirty_bytes_per_second = transfer.dirty_bytes_per_second;
    message.expected_downtime_ms = transfer.expected_downtime_ms;
    message.downtime_ms = transfer.downtime_ms;
    message.passes = transfer.passes;
    message.throttle_percent = transfer.throttle_percent;
}

/// Returns the newest figures: what is seen of this attempt now, or else what was written.
fn transfer(row: &MigrationRow, live: &Seen) -> v1::TransferStatus {
    let id = row.migration.id.to_string();
    live.source
        .as_ref()
        .and_then(|seen| seen.transfer.as_ref())
        .filter(|transfer| transfer.migration_id == id)
        .unwrap_or(&row.notes.transfer)
        .clone()
}

fn kind(row: &MigrationRow) -> String {
    let asked = &row.notes.asked.migration_type;
    let kind = match row.migration.method {
        Method::Precopy | Method::Postcopy | Method::Snapshot => MigrationType::Live,
        Method::Cold => MigrationType::Offline,
        Method::DiskCopy => MigrationType::from_label(asked).unwrap_or(MigrationType::Live),
    };
    kind.label().to_owned()
}

/// Says whether the switchover was ordered on the way to where the migration is.
const fn ordered(phase: &Phase) -> bool {
    match phase {
        Phase::Captured { switchover, .. } => match switchover {
            Switchover::Held { .. } | Switchover::Withheld | Switchover::Down { .. } => false,
            Switchover::Ordered | Switchover::Forward => true,
        },
        Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. } => true,
        Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => false,
    }
}

/// Returns the text of what ended it, or of what holds it.
fn error(row: &MigrationRow, stuck: Option<&Stuck>) -> String {
    let cause = row.migration.phase.cause().map(|cause| match &row.migration.phase {
        Phase::Failed { first: Some(first), .. } => format!("{cause}; it had turned back: {first}"),
        Phase::Failed { first: None, .. }
        | Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Captured { .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. } => cause.to_string(),
    });
    cause.or_else(|| stuck.map(|stuck| stuck.cause.clone())).unwrap_or_default()
}

/// Returns what was last seen of both ends, in the words of the core.
fn sides(row: &MigrationRow, live: &Seen) -> Sides {
    let migration = &row.migration;
    let destination = migration.destination().zip(live.destination.as_ref());
    Sides {
        claim: row.claim,
        source: live.source.as_ref().map(|of| seen(&migration.source, migration.id, of)),
        destination: destination.map(|(host, of)| seen(host, migration.id, of)),
    }
}

/// Says whether a migration is stuck, and on what.
#[must_use]
pub fn stuck(row: &MigrationRow, live: &Seen) -> Option<Stuck> {
    let times = Times { now: clock::now(), entered: Timestamp(row.notes.entered_us / 1000) };
    let trouble = live
        .trouble
        .as_ref()
        .map(|(text, since)| Trouble { text: text.clone(), since: Timestamp(*since) });
    // Another planner drives it: what keeps it from going on is known there.
    let driven_here = live.source.is_some() || live.destination.is_some();
    let trouble = trouble.or_else(|| row.trouble.clone().filter(|_| !driven_here));
    core_stuck(&row.migration, &sides(row, live), times, trouble.as_ref())
}

/// Returns how long the guest has stood still, as far as either agent says.
#[must_use]
pub fn still_ms(row: &MigrationRow, live: &Seen) -> u64 {
    let phase = row.migration.label();
    let may_stand = match phase {
        PhaseLabel::Captured
        | PhaseLabel::Restored
        | PhaseLabel::Committed
        | PhaseLabel::RollingBack => true,
        PhaseLabel::Queued
        | PhaseLabel::Admitted
        | PhaseLabel::Attached
        | PhaseLabel::Done
        | PhaseLabel::Aborted
        | PhaseLabel::Failed => false,
    };
    let still = |seen: Option<&v1::VmObservation>| seen.map_or(0, |seen| seen.still_ms);
    if may_stand { still(live.source.as_ref()).max(still(live.destination.as_ref())) } else { 0 }
}

/// Returns how long each phase lasted, in the order in which they were entered.
fn phases(log: &[LogRow], until_us: u64) -> Vec<v1::PhaseTime> {
    let mut entered: Vec<(PhaseLabel, u64)> = Vec::new();
    for entry in log {
        if entered.last().is_none_or(|(phase, _)| *phase != entry.phase) {
            entered.push((entry.phase, entry.at_us));
        }
    }
    let ends = entered.iter().skip(1).map(|(_, at)| *at).chain([until_us]);
    entered
        .iter()
        .zip(ends)
        .map(|((phase, at), end)| v1::PhaseTime {
            phase: phase.label().to_owned(),
            entered: clock::rfc3339_us(*at),
            us: end.saturating_sub(*at),
        })
        .collect()
}
