//! What empties hosts, as users are shown it.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_planner_core::lifecycle::drain::{self, Drain, State};
use vmferry_planner_core::lifecycle::job::{
    self, Crossed, Job, MoveState, Progress, ReturnState, progress,
};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, Policy, Unplaced};
use vmferry_planner_core::maintenance::{Code, Crossing, PinsToSource};
use vmferry_proto::v1;
use vmferry_types::{Bytes, BytesPerSec, MigrationId, PhaseLabel, VmId};

use crate::api::ApiError;
use crate::clock;
use crate::driver::emptying::facts::{self, Asking, Facts};
use crate::plan::Described;
use crate::planner::Planner;
use crate::store::{EmptyingLogRow, EmptyingRow, StoreError};

/// Shows one with its log.
///
/// # Errors
///
/// Fails if the store does.
pub async fn emptying_with_log(
    planner: &Planner,
    row: &EmptyingRow,
) -> Result<v1::Emptying, ApiError> {
    let log = planner.store().emptying_log(row.id()).await?;
    let mut message = shown(planner, row, &begun(&log)).await?;
    message.log = log
        .into_iter()
        .map(|entry| v1::LogEntry {
            seq: entry.seq.value(),
            at: clock::rfc3339_us(entry.at_us),
            event: entry.event,
            phase: entry.phase,
            note: String::new(),
        })
        .collect();
    Ok(message)
}

/// Returns the migrations that it ever began: what a drain has moved is in its log only.
fn begun(log: &[EmptyingLogRow]) -> Vec<MigrationId> {
    let event = |entry: &EmptyingLogRow| serde_json::from_str::<EmptyingEvent>(&entry.body).ok();
    log.iter()
        .filter(|entry| entry.event == "begun")
        .filter_map(event)
        .filter_map(|event| match event {
            EmptyingEvent::Job(job::Event::Begun { migration, .. })
            | EmptyingEvent::Drain(drain::Event::Begun { migration, .. }) => Some(migration),
            EmptyingEvent::Job(_) | EmptyingEvent::Drain(_) => None,
        })
        .collect()
}

/// Shows one without its log. Of a drain, only what is on its way counts as sent.
///
/// # Errors
///
/// Fails if the store does.
pub async fn emptying(planner: &Planner, row: &EmptyingRow) -> Result<v1::Emptying, ApiError> {
    shown(planner, row, &[]).await
}

async fn shown(
    planner: &Planner,
    row: &EmptyingRow,
    begun: &[MigrationId],
) -> Result<v1::Emptying, ApiError> {
    let known = Known::read(planner, row, begun).await?;
    let mut message = v1::Emptying {
        id: row.id().to_string(),
        host: row.emptying.host().to_string(),
        kind: row.emptying.kind().label().to_owned(),
        state: row.emptying.label().to_owned(),
        by: row.emptying.by().to_owned(),
        opened: clock::rfc3339_us(row.created_us),
        ended: row.ended_us.map(clock::rfc3339_us).unwrap_or_default(),
        policy: Some(policy(row.emptying.policy())),
        waits_for: known.waits_for.clone(),
        seq: row.seq.value(),
        ..v1::Emptying::default()
    };
    match &row.emptying {
        Emptying::Job(job) => of_job(&mut message, job, &known),
        Emptying::Drain(drain) => of_drain(&mut message, drain, row, &known),
    }
    Ok(message)
}

/// What is known beside the row.
struct Known {
    names: BTreeMap<VmId, (String, Bytes)>,
    migrations: BTreeMap<MigrationId, v1::Migration>,
    waits_for: Vec<String>,
}

impl Known {
    async fn read(
        planner: &Planner,
        row: &EmptyingRow,
        begun: &[MigrationId],
    ) -> Result<Self, StoreError> {
        let mut migrations = BTreeMap::new();
        let ids: BTreeSet<MigrationId> =
            row.emptying.migrations().into_iter().chain(begun.iter().copied()).collect();
        for id in ids {
            if let Some(row) = planner.store().migration(id).await? {
                migrations.insert(id, super::summary(planner, &row));
            }
        }
        let mut names = BTreeMap::new();
        for vm in vms(&row.emptying) {
            if let Some(row) = planner.store().vm(vm).await? {
                names.insert(vm, (row.name, row.memory));
            }
        }
        let mut waits_for = Vec::new();
        if row.emptying.is_driven() {
            let mut described = Described::default();
            let facts = facts::gather(planner, row, &mut described, Asking::Shown).await?;
            waits_for = match (&row.emptying, facts) {
                (Emptying::Job(job), Facts::Job(facts)) => {
                    job::step(job, &facts, clock::now()).waits_for
                }
                (Emptying::Drain(drain), Facts::Drain(facts)) => {
                    drain::step(drain, &facts, clock::now()).waits_for
                }
                (Emptying::Job(_), Facts::Drain(_)) | (Emptying::Drain(_), Facts::Job(_)) => {
                    Vec::new()
                }
            };
            for (vm, (name, _)) in &names {
                let (id, named) = (format!("VM {vm}"), format!("VM {name}"));
                waits_for.iter_mut().for_each(|text| *text = text.replace(&id, &named));
            }
        }
        Ok(Self { names, migrations, waits_for })
    }

    fn name(&self, vm: VmId) -> String {
        self.names.get(&vm).map(|(name, _)| name.clone()).unwrap_or_default()
    }

    fn crossed(&self) -> Crossed {
        let sum = |of: fn(&v1::Migration) -> u64| self.migrations.values().map(of).sum::<u64>();
        let rate = self
            .migrations
            .values()
            .filter(|one| one.completed.is_empty())
            .map(|one| one.bytes_per_second)
            .sum();
        Crossed {
            bytes: Bytes(sum(|one| one.bytes_transferred)),
            rate: BytesPerSec(rate),
            queued: self.queued().collect(),
        }
    }

    /// Names those that wait in the queue: nothing of them is on its way.
    fn queued(&self) -> impl Iterator<Item = MigrationId> + '_ {
        let waits = |of: &v1::Migration| of.phase == PhaseLabel::Queued.label();
        self.migrations.iter().filter(move |(_, of)| waits(of)).map(|(id, _)| *id)
    }

    fn percent(&self, id: Option<MigrationId>) -> u32 {
        id.and_then(|id| self.migrations.get(&id)).map_or(0, |one| one.progress_percent)
    }
}

/// Names every VM that it speaks of.
fn vms(emptying: &Emptying) -> Vec<VmId> {
    match emptying {
        Emptying::Job(job) => {
            let moves = job.moves.iter().map(|one| one.vm);
            moves.chain(job.unplaced.iter().map(|one| one.vm)).collect()
        }
        Emptying::Drain(drain) => {
            let there = drain.residents.iter().map(|one| one.vm);
            there.chain(drain.moved.iter().map(|one| one.vm)).collect()
        }
    }
}

fn of_job(message: &mut v1::Emptying, job: &Job, known: &Known) {
    message.moves = job.moves.iter().map(|one| of_move(one, known)).collect();
    message.blocked = job.unplaced.iter().map(|one| blocked(one, known)).collect();
    message.progress =
        Some(shown_progress(&progress(job, &known.crossed(), clock::now()), message));
    match &job.phase {
        job::Phase::Failed { error, .. } => message.error.clone_from(error),
        job::Phase::Stopping { why } => {
            message.error = match why {
                job::Stop::Failure { error } | job::Stop::Died { error } => error.clone(),
                job::Stop::Asked { by } => format!("cancelled by {by}"),
            };
        }
        job::Phase::Cancelled { why, .. } => {
            message.error = match why {
                job::Cancelled::Asked { by } => format!("cancelled by {by}"),
                job::Cancelled::Superseded { by } => format!("superseded by plan {by}"),
            };
        }
        job::Phase::Maintenance { since, .. } => message.empty_since = clock::rfc3339(*since),
        job::Phase::Completed { back, .. } => {
            message.returns = back.iter().map(|one| of_return(one, known)).collect();
        }
        job::Phase::Planned
        | job::Phase::Blocked
        | job::Phase::Running
        | job::Phase::Verifying { .. } => {}
    }
}

fn of_move(one: &job::Move, known: &Known) -> v1::EmptyingMove {
    let mut message = v1::EmptyingMove {
        vm_id: one.vm.to_string(),
        vm_name: known.name(one.vm),
        memory_bytes: one.demand.memory.value(),
        cpu_milli: one.demand.cpu.value(),
        mode: one.mode.label().to_owned(),
        planned_host: one.planned.to_string(),
        state: one.state.label().to_owned(),
        ..v1::EmptyingMove::default()
    };
    let migration = match &one.state {
        MoveState::Begun { migration }
        | MoveState::Cancelling { migration }
        | MoveState::Cancelled { migration, .. } => Some(*migration),
        MoveState::Moved { migration, destination, .. } => {
            message.target_host = destination.to_string();
            Some(*migration)
        }
        MoveState::Failed { migration, error, .. } => {
            message.error.clone_from(error);
            *migration
        }
        MoveState::Waiting | MoveState::Left { .. } | MoveState::NotBegun => None,
    };
    message.progress_percent = known.percent(migration);
    if migration.is_some_and(|id| known.queued().any(|queued| queued == id)) {
        "queued".clone_into(&mut message.state);
    }
    if let Some(id) = migration {
        message.migration_id = id.to_string();
        if message.target_host.is_empty()
            && let Some(open) = known.migrations.get(&id)
        {
            message.target_host.clone_from(&open.target_host);
        }
    }
    message
}

fn of_return(one: &job::Return, known: &Known) -> v1::EmptyingReturn {
    let mut message = v1::EmptyingReturn {
        vm_id: one.vm.to_string(),
        vm_name: known.name(one.vm),
        from_host: one.from.to_string(),
        ..v1::EmptyingReturn::default()
    };
    let state = match &one.state {
        ReturnState::Waiting => "waiting",
        ReturnState::Begun { migration } => {
            message.migration_id = migration.to_string();
            "running"
        }
        ReturnState::Returned { .. } => "returned",
        ReturnState::Stays { reason, .. } => {
            message.reason.clone_from(reason);
            "stays"
        }
    };
    state.clone_into(&mut message.state);
    message
}

fn of_drain(message: &mut v1::Emptying, drain: &Drain, row: &EmptyingRow, known: &Known) {
    let moved = drain.moved.iter().map(|one| v1::EmptyingMove {
        vm_id: one.vm.to_string(),
        vm_name: known.name(one.vm),
        memory_bytes: known.names.get(&one.vm).map_or(0, |(_, memory)| memory.value()),
        target_host: one.destination.to_string(),
        mode: "live".to_owned(),
        state: "done".to_owned(),
        progress_percent: 100,
        ..v1::EmptyingMove::default()
    });
    message.moves = moved.collect();
    let moved = u32::try_from(drain.moved.len()).unwrap_or(u32::MAX);
    let mut counts = Progress { moved, ..Progress::default() };
    for resident in &drain.residents {
        let memory = known.names.get(&resident.vm).map_or(0, |(_, memory)| memory.value());
        let mut one = v1::EmptyingMove {
            vm_id: resident.vm.to_string(),
            vm_name: known.name(resident.vm),
            memory_bytes: memory,
            mode: "live".to_owned(),
            state: resident.state.label().to_owned(),
            ..v1::EmptyingMove::default()
        };
        match &resident.state {
            State::Waiting => counts.waiting += 1,
            State::Blocked { since, why, .. } => {
                counts.waiting += 1;
                let mut why = blocked(why, known);
                why.since = clock::rfc3339(*since);
                message.blocked.push(why);
            }
            State::Begun { migration } | State::Cancelling { migration } => {
                counts.running += 1;
                one.migration_id = migration.to_string();
                one.progress_percent = known.percent(Some(*migration));
                let open = known.migrations.get(migration);
                one.target_host = open.map(|of| of.target_host.clone()).unwrap_or_default();
            }
            State::Resting { error, .. } => {
                counts.waiting += 1;
                one.error.clone_from(error);
            }
        }
        message.moves.push(one);
    }
    finish_progress(message, counts, row, known);
    match &drain.phase {
        drain::Phase::Emptying => {}
        drain::Phase::Empty { since, .. } => message.empty_since = clock::rfc3339(*since),
        drain::Phase::Granted { at, .. } => message.empty_since = clock::rfc3339(*at),
        drain::Phase::Cancelled { by, .. } => message.error = format!("cancelled by {by}"),
        drain::Phase::Died { error, .. } => message.error.clone_from(error),
    }
}

/// Completes the figures of a drain from those of its VMs.
fn finish_progress(
    message: &mut v1::Emptying,
    mut counts: Progress,
    row: &EmptyingRow,
    known: &Known,
) {
    counts.total = counts.moved + counts.running + counts.waiting;
    let crossed = known.crossed();
    (counts.bytes, counts.rate) = (crossed.bytes, crossed.rate);
    counts.bytes_total = Bytes(message.moves.iter().map(|one| one.memory_bytes).sum());
    let left: u64 =
        message.moves.iter().filter(|one| one.state != "done").map(|one| one.memory_bytes).sum();
    counts.remaining =
        left.saturating_mul(1000).checked_div(crossed.rate.value()).map(vmferry_types::Millis);
    let until = row.ended_us.unwrap_or_else(clock::now_us);
    counts.elapsed = vmferry_types::Millis(until.saturating_sub(row.created_us) / 1000);
    message.progress = Some(shown_progress(&counts, message));
}

fn shown_progress(progress: &Progress, message: &v1::Emptying) -> v1::EmptyingProgress {
    let over = !message.ended.is_empty();
    v1::EmptyingProgress {
        total: progress.total,
        moved: progress.moved,
        running: progress.running,
        waiting: progress.waiting,
        failed: progress.failed,
        bytes_transferred: progress.bytes.value(),
        bytes_total: progress.bytes_total.value(),
        bytes_per_second: if over { 0 } else { progress.rate.value() },
        remaining_ms: progress.remaining.filter(|_| !over).map_or(0, |left| left.value()),
        elapsed_ms: progress.elapsed.value(),
    }
}

fn blocked(one: &Unplaced, known: &Known) -> v1::EmptyingBlocked {
    v1::EmptyingBlocked {
        vm_id: one.vm.to_string(),
        vm_name: known.name(one.vm),
        code: one.code.label().to_owned(),
        message: one.code.to_string(),
        fix: fix(&one.code),
        blockers: one.blockers.iter().map(super::blocker).collect(),
        more: one.more,
        since: String::new(),
        memory_bytes: known.names.get(&one.vm).map_or(0, |(_, memory)| memory.value()),
    }
}

/// Says what to do about a blocker.
fn fix(code: &Code) -> String {
    match code {
        Code::SourceHostUnavailable => "bring its agent back, or declare the host dead".to_owned(),
        Code::WorkloadNotOnSource => "wait for the host's next report, and plan again".to_owned(),
        Code::LiveMigrationRequired { .. } => {
            "mend what keeps it from moving while it runs, or stop it".to_owned()
        }
        Code::PinnedToSource => "allow pinned VMs to leave (--allow-pinned), or stop it".to_owned(),
        Code::PinnedTargetUnavailable { pin } => format!("bring host {pin} back into service"),
        Code::NoEligibleTarget => {
            "see the reasons of each host; --allow-cross-cluster widens the choice".to_owned()
        }
        Code::InsufficientCapacity => "free memory or CPU elsewhere, or add a host".to_owned(),
    }
}

fn policy(policy: &Policy) -> v1::MaintenancePolicy {
    v1::MaintenancePolicy {
        strategy: policy.strategy.label().to_owned(),
        max_parallel: policy.max_parallel.get(),
        reserve_cpu_percent: Some(u32::from(policy.reserve_cpu_percent.value())),
        reserve_memory_percent: Some(u32::from(policy.reserve_memory_percent.value())),
        allow_cross_cluster: policy.crossing == Crossing::Allowed,
        allow_pinned: policy.pins == PinsToSource::MayLeave,
        dry_run: policy.dry_run,
    }
}

/// Tells in a few sentences how a host stands for its sake.
#[must_use]
pub fn story(of: &v1::Emptying) -> Vec<String> {
    let progress = of.progress.unwrap_or_default();
    let what = match of.kind.as_str() {
        "maintenance" => "maintenance job",
        "retire" => "retirement",
        _ => "drain",
    };
    let counted = format!("{} of {} VMs have left", progress.moved, progress.total);
    let mut story = vec![match of.state.as_str() {
        "PLANNED" => format!("{what} {} is planned and not begun; nothing was touched", of.id),
        "BLOCKED" => format!(
            "{what} {} cannot be carried out: {} of its VMs have no place; nothing was touched",
            of.id,
            of.blocked.len()
        ),
        "RUNNING" | "EMPTYING" => {
            format!(
                "{what} {} by {} since {}: {counted}, {} are on their way",
                of.id, of.by, of.opened, progress.running
            )
        }
        "MAINTENANCE" => format!(
            "in maintenance since {} ({what} {} by {}): its own agent says that it is empty",
            of.empty_since, of.id, of.by
        ),
        "EMPTY" => format!(
            "drained: empty since {} by its own agent's word, and kept so ({what} {} by {})",
            of.empty_since, of.id, of.by
        ),
        "GRANTED" => format!(
            "retired since {}: it is empty and may be deleted ({what} {} by {})",
            of.empty_since, of.id, of.by
        ),
        "COMPLETED" => format!("back in service after {what} {}", of.id),
        "FAILED" => {
            format!("{what} {} failed, {counted}, and the host stays cordoned: {}", of.id, of.error)
        }
        "DIED" => format!("it died while it was emptied ({what} {}): {}", of.id, of.error),
        _ => format!("{what} {} was given up ({}); {counted}", of.id, of.error),
    }];
    for one in &of.blocked {
        let name = if one.vm_name.is_empty() { &one.vm_id } else { &one.vm_name };
        story.push(format!("VM {name} cannot leave: {}; {}", one.message, one.fix));
    }
    for one in of.moves.iter().filter(|one| !one.error.is_empty()) {
        story.push(format!("VM {} did not move: {}", one.vm_name, one.error));
    }
    for one in of.returns.iter().filter(|one| one.state != "returned") {
        let why = if one.reason.is_empty() { "on its way back" } else { &one.reason };
        story.push(format!("VM {}, moved to {}: {why}", one.vm_name, one.from_host));
    }
    story.extend(of.waits_for.iter().map(|what| format!("waits for {what}")));
    story
}
