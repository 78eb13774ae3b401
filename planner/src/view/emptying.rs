//! What empties hosts, as users are shown it.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_planner_core::lifecycle::drain::{self, Drain, Resident, State};
use vmferry_planner_core::lifecycle::job::{
    self, Crossed, Job, MoveState, Progress, ReturnState, progress,
};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, Ended, Policy, Unplaced};
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
    let named = |vm: VmId| {
        let shown = message.moves.iter().find(|one| one.vm_id == vm.to_string());
        let name = shown.map(|one| one.vm_name.clone()).filter(|name| !name.is_empty());
        format!("VM {}", name.unwrap_or_else(|| vm.to_string()))
    };
    let entries = log.into_iter().map(|entry| v1::LogEntry {
        seq: entry.seq.value(),
        at: clock::rfc3339_us(entry.at_us),
        note: event_of(&entry).map(|event| note(&event, named)).unwrap_or_default(),
        event: entry.event,
        phase: entry.phase,
    });
    message.log = entries.collect();
    Ok(message)
}

fn event_of(entry: &EmptyingLogRow) -> Option<EmptyingEvent> {
    serde_json::from_str(&entry.body).ok()
}

/// Says of an event what its name does not: whom it is about, and why it came.
fn note(event: &EmptyingEvent, named: impl Fn(VmId) -> String) -> String {
    use drain::Event as D;
    use job::Event as J;
    match event {
        EmptyingEvent::Job(J::Begun { vm, migration })
        | EmptyingEvent::Drain(D::Begun { vm, migration }) => {
            format!("{}: migration {migration}", named(*vm))
        }
        EmptyingEvent::Job(J::NotBegun { vm, error, .. })
        | EmptyingEvent::Drain(D::NotBegun { vm, error, .. }) => {
            format!("{}: {error}", named(*vm))
        }
        EmptyingEvent::Job(J::MigrationEnded { migration, how, .. })
        | EmptyingEvent::Drain(D::MigrationEnded { migration, how, .. }) => match how {
            Ended::Moved { destination, .. } => {
                format!("migration {migration} ended on host {destination}")
            }
            Ended::Cancelled => format!("migration {migration} was cancelled"),
            Ended::Failed { error } => format!("migration {migration} failed: {error}"),
        },
        EmptyingEvent::Job(J::Left { vm, .. } | J::CancelAsked { vm })
        | EmptyingEvent::Drain(
            D::Left { vm, .. }
            | D::CancelAsked { vm }
            | D::Appeared { vm, .. }
            | D::Unblocked { vm },
        ) => named(*vm),
        EmptyingEvent::Drain(D::Blocked { why, .. }) => format!("{}: {}", named(why.vm), why.code),
        EmptyingEvent::Job(J::CancelRequested { by, .. })
        | EmptyingEvent::Drain(D::CancelRequested { by, .. }) => format!("by {by}"),
        EmptyingEvent::Job(J::HostDied { how, .. })
        | EmptyingEvent::Drain(D::HostDied { how, .. }) => how.clone(),
        EmptyingEvent::Job(J::VerifyExpired { note, .. }) => note.clone(),
        EmptyingEvent::Job(
            J::ExecuteRequested { .. }
            | J::FoundEmpty { .. }
            | J::CompleteRequested { .. }
            | J::Superseded { .. },
        )
        | EmptyingEvent::Drain(D::FoundEmpty { .. } | D::FoundNotEmpty { .. }) => String::new(),
    }
}

/// Returns the migrations that it ever began: what a drain has moved is in its log only.
fn begun(log: &[EmptyingLogRow]) -> Vec<MigrationId> {
    log.iter()
        .filter(|entry| entry.event == "begun")
        .filter_map(event_of)
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
    /// The residents of a drain as they are now: its driver may not have looked yet.
    residents: Vec<Resident>,
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
        let (mut waits_for, residents) = now(planner, row).await?;
        let mut names = BTreeMap::new();
        let there = residents.iter().map(|one| one.vm);
        for vm in vms(&row.emptying).into_iter().chain(there) {
            if let Some(row) = planner.store().vm(vm).await? {
                names.insert(vm, (row.name, row.memory));
            }
        }
        for (vm, (name, _)) in &names {
            let (id, named) = (format!("VM {vm}"), format!("VM {name}"));
            waits_for.iter_mut().for_each(|text| *text = text.replace(&id, &named));
        }
        Ok(Self { names, migrations, waits_for, residents })
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

/// Says what it waits for now, and who is there.
async fn now(
    planner: &Planner,
    row: &EmptyingRow,
) -> Result<(Vec<String>, Vec<Resident>), StoreError> {
    let written = match &row.emptying {
        Emptying::Drain(drain) => drain.residents.clone(),
        Emptying::Job(_) => Vec::new(),
    };
    if !row.emptying.is_driven() {
        return Ok((Vec::new(), written));
    }
    let facts = facts::gather(planner, row, &mut Described::default(), Asking::Shown).await?;
    Ok(match (&row.emptying, facts) {
        (Emptying::Job(job), Facts::Job(facts)) => {
            (job::step(job, &facts, clock::now()).waits_for, written)
        }
        (Emptying::Drain(drain), Facts::Drain(facts)) => {
            let step = drain::step(drain, &facts, clock::now());
            // What changes its phase is told once it is written down.
            let same = step.after.phase == drain.phase && step.after.moved == drain.moved;
            (step.waits_for, if same { step.after.residents } else { written })
        }
        (Emptying::Job(_), Facts::Drain(_)) | (Emptying::Drain(_), Facts::Job(_)) => {
            (Vec::new(), written)
        }
    })
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
    // One that came back after it was moved is there, and has to leave once more.
    let back = |vm| known.residents.iter().any(|one| one.vm == vm);
    let moved = drain.moved.iter().filter(|one| !back(one.vm)).map(|one| v1::EmptyingMove {
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
    let moved = u32::try_from(message.moves.len()).unwrap_or(u32::MAX);
    let mut counts = Progress { moved, ..Progress::default() };
    for resident in &known.residents {
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
        max_parallel: Some(policy.max_parallel.get()),
        reserve_cpu_percent: Some(u32::from(policy.reserve_cpu_percent.value())),
        reserve_memory_percent: Some(u32::from(policy.reserve_memory_percent.value())),
        allow_cross_cluster: policy.crossing == Crossing::Allowed,
        allow_pinned: policy.pins == PinsToSource::MayLeave,
        dry_run: policy.dry_run,
    }
}
