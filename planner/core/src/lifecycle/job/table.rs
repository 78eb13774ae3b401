//! The transition table of a job: each phase answers each event, no pair is left to a wildcard.
//!
//! As a reviewer reads it, it is printed by the test `the_table_is_as_reviewed`.

mod back;

use vmferry_types::{MigrationId, Timestamp, VmId};

use super::{Cancelled, Event, Job, Move, MoveState, Phase, Returning, Stop};
use crate::lifecycle::{Ended, Refusal};

/// Returns the job after `event`.
pub(super) fn next(job: &Job, event: &Event) -> Result<Job, Refusal> {
    let mut after = job.clone();
    after.phase = match &job.phase {
        Phase::Planned => planned(&mut after, event)?,
        Phase::Blocked => blocked(event)?,
        Phase::Running => running(&mut after, event)?,
        Phase::Verifying { since } => verifying(&after, *since, event)?,
        Phase::Stopping { why } => stopping(&mut after, why, event)?,
        Phase::Maintenance { .. } => in_maintenance(&after, event)?,
        Phase::Completed { at, back } => {
            Phase::Completed { at: *at, back: back::next(back, &job.host, event)? }
        }
        Phase::Failed { .. } => return Err(over(event, Refusal::Denied)),
        Phase::Cancelled { .. } => return Err(over(event, Refusal::Stale)),
    };
    Ok(after)
}

fn planned(job: &mut Job, event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::ExecuteRequested { .. } if job.policy.dry_run => Err(Refusal::Denied),
        Event::ExecuteRequested { at } => Ok(settled(job, *at)),
        Event::CancelRequested { .. }
        | Event::Superseded { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::Left { .. }
        | Event::CancelAsked { .. }
        | Event::MigrationEnded { .. }
        | Event::HostDied { .. }
        | Event::FoundEmpty { .. }
        | Event::VerifyExpired { .. }
        | Event::CompleteRequested { .. } => untouched(event),
    }
}

fn blocked(event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::ExecuteRequested { .. } => Err(Refusal::Denied),
        Event::CancelRequested { .. }
        | Event::Superseded { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::Left { .. }
        | Event::CancelAsked { .. }
        | Event::MigrationEnded { .. }
        | Event::HostDied { .. }
        | Event::FoundEmpty { .. }
        | Event::VerifyExpired { .. }
        | Event::CompleteRequested { .. } => untouched(event),
    }
}

/// A plan that nobody carries out.
fn untouched(event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::CancelRequested { by, at } => {
            Ok(Phase::Cancelled { at: *at, why: Cancelled::Asked { by: by.clone() } })
        }
        Event::Superseded { by, at } => {
            Ok(Phase::Cancelled { at: *at, why: Cancelled::Superseded { by: *by } })
        }
        Event::CompleteRequested { .. } => Err(Refusal::Denied),
        Event::HostDied { .. } | Event::Left { .. } => Err(Refusal::Stale),
        Event::ExecuteRequested { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::CancelAsked { .. }
        | Event::MigrationEnded { .. }
        | Event::FoundEmpty { .. }
        | Event::VerifyExpired { .. } => Err(Refusal::Illegal),
    }
}

fn running(job: &mut Job, event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::Begun { vm, migration } => {
            let waiting = waiting(job, *vm)?;
            waiting.state = MoveState::Begun { migration: *migration };
            Ok(Phase::Running)
        }
        Event::NotBegun { vm, error, at } => {
            let waiting = waiting(job, *vm)?;
            waiting.state = MoveState::Failed { migration: None, error: error.clone(), at: *at };
            Ok(stop(job, Stop::Failure { error: of_vm(*vm, error) }, *at))
        }
        Event::Left { vm, at } => {
            waiting(job, *vm)?.state = MoveState::Left { at: *at };
            Ok(settled(job, *at))
        }
        Event::MigrationEnded { migration, how, at } => match ended(job, *migration, how, *at)? {
            None => Ok(settled(job, *at)),
            Some(error) => Ok(stop(job, Stop::Failure { error }, *at)),
        },
        Event::CancelRequested { by, at } => Ok(stop(job, Stop::Asked { by: by.clone() }, *at)),
        Event::HostDied { how, at } => Ok(stop(job, Stop::Died { error: died(job, how) }, *at)),
        Event::ExecuteRequested { .. } | Event::CancelAsked { .. } => Err(Refusal::Stale),
        Event::CompleteRequested { .. } => Err(Refusal::Denied),
        Event::Superseded { .. } | Event::FoundEmpty { .. } | Event::VerifyExpired { .. } => {
            Err(Refusal::Illegal)
        }
    }
}

fn verifying(job: &Job, since: Timestamp, event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::FoundEmpty { proof, at } => {
            // The agent looked before the last VM had left: what it saw is not what is.
            if proof.composed_after <= since {
                return Err(Refusal::Stale);
            }
            Ok(Phase::Maintenance { since: *at, proof: *proof })
        }
        Event::VerifyExpired { note, at } => Ok(Phase::Failed {
            at: *at,
            error: format!("host {} was not seen empty in time: it waited for {note}", job.host),
        }),
        Event::CancelRequested { by, at } => {
            Ok(Phase::Cancelled { at: *at, why: Cancelled::Asked { by: by.clone() } })
        }
        Event::HostDied { how, at } => Ok(Phase::Failed { at: *at, error: died(job, how) }),
        Event::CompleteRequested { .. } => Err(Refusal::Denied),
        Event::ExecuteRequested { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::Left { .. }
        | Event::CancelAsked { .. }
        | Event::MigrationEnded { .. } => Err(Refusal::Stale),
        Event::Superseded { .. } => Err(Refusal::Illegal),
    }
}

fn stopping(job: &mut Job, why: &Stop, event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::MigrationEnded { migration, how, at } => {
            // Why the job stops is decided: how a VM of it fared stands with the VM.
            ended(job, *migration, how, *at)?;
            Ok(stop(job, why.clone(), *at))
        }
        Event::CancelAsked { vm } => {
            let begun = job.moves.iter_mut().find(|one| one.vm == *vm);
            let begun = begun.ok_or(Refusal::Illegal)?;
            let MoveState::Begun { migration } = begun.state else { return Err(Refusal::Stale) };
            begun.state = MoveState::Cancelling { migration };
            Ok(Phase::Stopping { why: why.clone() })
        }
        Event::HostDied { how, at } => {
            let death = died(job, how);
            let error = match why {
                Stop::Died { .. } => return Err(Refusal::Stale),
                Stop::Failure { error } => format!("{error}; then {death}"),
                Stop::Asked { .. } => death,
            };
            Ok(stop(job, Stop::Died { error }, *at))
        }
        Event::CompleteRequested { .. } => Err(Refusal::Denied),
        Event::ExecuteRequested { .. }
        | Event::CancelRequested { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::Left { .. } => Err(Refusal::Stale),
        Event::Superseded { .. } | Event::FoundEmpty { .. } | Event::VerifyExpired { .. } => {
            Err(Refusal::Illegal)
        }
    }
}

fn in_maintenance(job: &Job, event: &Event) -> Result<Phase, Refusal> {
    match event {
        Event::CompleteRequested { returning, at } => {
            let back = match returning {
                Returning::Stay => Vec::new(),
                Returning::Return => back::owed(job),
            };
            Ok(Phase::Completed { at: *at, back })
        }
        Event::CancelRequested { .. } => Err(Refusal::Denied),
        // Its host is switched off, as it should be.
        Event::HostDied { .. }
        | Event::ExecuteRequested { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::Left { .. }
        | Event::CancelAsked { .. }
        | Event::MigrationEnded { .. }
        | Event::FoundEmpty { .. }
        | Event::VerifyExpired { .. } => Err(Refusal::Stale),
        Event::Superseded { .. } => Err(Refusal::Illegal),
    }
}

/// A job that is over stays as it is; whoever asks something of it is told.
const fn over(event: &Event, cancel: Refusal) -> Refusal {
    match event {
        Event::CancelRequested { .. } => cancel,
        Event::ExecuteRequested { .. } | Event::CompleteRequested { .. } => Refusal::Denied,
        Event::Superseded { .. }
        | Event::Begun { .. }
        | Event::NotBegun { .. }
        | Event::Left { .. }
        | Event::CancelAsked { .. }
        | Event::MigrationEnded { .. }
        | Event::HostDied { .. }
        | Event::FoundEmpty { .. }
        | Event::VerifyExpired { .. } => Refusal::Stale,
    }
}

/// Returns the move of a VM whose turn has not come.
fn waiting(job: &mut Job, vm: VmId) -> Result<&mut Move, Refusal> {
    let found = job.moves.iter_mut().find(|one| one.vm == vm).ok_or(Refusal::Illegal)?;
    match found.state {
        MoveState::Waiting => Ok(found),
        MoveState::Begun { .. }
        | MoveState::Cancelling { .. }
        | MoveState::Moved { .. }
        | MoveState::Left { .. }
        | MoveState::Failed { .. }
        | MoveState::Cancelled { .. }
        | MoveState::NotBegun => Err(Refusal::Stale),
    }
}

/// Writes down how a migration ended; returns what failed, if it did.
fn ended(
    job: &mut Job,
    migration: MigrationId,
    how: &Ended,
    at: Timestamp,
) -> Result<Option<String>, Refusal> {
    let found = job.moves.iter_mut().find(|one| one.state.open() == Some(migration));
    let one = found.ok_or(Refusal::Stale)?;
    let asked_by_us = matches!(one.state, MoveState::Cancelling { .. });
    let (state, failed) = match how {
        Ended::Moved { destination, generation } => {
            let (destination, generation) = (destination.clone(), *generation);
            (MoveState::Moved { migration, destination, generation, at }, None)
        }
        Ended::Cancelled if asked_by_us => (MoveState::Cancelled { migration, at }, None),
        Ended::Cancelled => {
            let error = "its migration was cancelled by somebody else".to_owned();
            (failure(migration, &error, at), Some(of_vm(one.vm, &error)))
        }
        Ended::Failed { error } => (failure(migration, error, at), Some(of_vm(one.vm, error))),
    };
    one.state = state;
    Ok(failed)
}

fn failure(migration: MigrationId, error: &str, at: Timestamp) -> MoveState {
    MoveState::Failed { migration: Some(migration), error: error.to_owned(), at }
}

fn of_vm(vm: VmId, error: &str) -> String {
    format!("VM {vm}: {error}")
}

/// Says that the host died, and what was still on it.
fn died(job: &Job, how: &str) -> String {
    let host = &job.host;
    let there = job.moves.iter().filter(|one| match one.state {
        MoveState::Waiting | MoveState::Begun { .. } | MoveState::Cancelling { .. } => true,
        MoveState::Moved { .. }
        | MoveState::Left { .. }
        | MoveState::Failed { .. }
        | MoveState::Cancelled { .. }
        | MoveState::NotBegun => false,
    });
    format!("host {host} died while it was emptied, {} VMs had not left it: {how}", there.count())
}

/// Goes on: to the agent's word once every VM has left.
fn settled(job: &Job, at: Timestamp) -> Phase {
    let left = |one: &Move| matches!(one.state, MoveState::Moved { .. } | MoveState::Left { .. });
    if job.moves.iter().all(left) { Phase::Verifying { since: at } } else { Phase::Running }
}

/// Begins nothing more; over once nothing is under way.
fn stop(job: &mut Job, why: Stop, at: Timestamp) -> Phase {
    for one in &mut job.moves {
        if one.state == MoveState::Waiting {
            one.state = MoveState::NotBegun;
        }
    }
    if job.moves.iter().any(|one| one.state.open().is_some()) {
        return Phase::Stopping { why };
    }
    match why {
        Stop::Failure { error } | Stop::Died { error } => Phase::Failed { at, error },
        Stop::Asked { by } => Phase::Cancelled { at, why: Cancelled::Asked { by } },
    }
}
