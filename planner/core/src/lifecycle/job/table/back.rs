//! VMs that come back to a host that is in service again.

use vmferry_types::HostId;

use crate::lifecycle::job::{Event, Job, MoveState, Return, ReturnState};
use crate::lifecycle::{Ended, Refusal};

/// Returns what a job moved: nothing else is ever brought back.
pub(super) fn owed(job: &Job) -> Vec<Return> {
    job.moves
        .iter()
        .filter_map(|one| match &one.state {
            MoveState::Moved { destination, generation, .. } => Some(Return {
                vm: one.vm,
                from: destination.clone(),
                generation: *generation,
                mode: one.mode,
                state: ReturnState::Waiting,
            }),
            MoveState::Waiting
            | MoveState::Begun { .. }
            | MoveState::Cancelling { .. }
            | MoveState::Left { .. }
            | MoveState::Failed { .. }
            | MoveState::Cancelled { .. }
            | MoveState::NotBegun => None,
        })
        .collect()
}

/// Returns what comes back after `event`.
pub(super) fn next(back: &[Return], host: &HostId, event: &Event) -> Result<Vec<Return>, Refusal> {
    let mut after = back.to_vec();
    match event {
        Event::Begun { vm, migration } => {
            let begun = ReturnState::Begun { migration: *migration };
            waiting(&mut after, |one| one.vm == *vm)?.state = begun;
        }
        Event::NotBegun { vm, error, at } => {
            let stays = ReturnState::Stays { reason: error.clone(), at: *at };
            waiting(&mut after, |one| one.vm == *vm)?.state = stays;
        }
        Event::Left { vm, at } => {
            let reason = "somebody moved or stopped it since".to_owned();
            let stays = ReturnState::Stays { reason, at: *at };
            waiting(&mut after, |one| one.vm == *vm)?.state = stays;
        }
        Event::MigrationEnded { migration, how, at } => {
            let open = ReturnState::Begun { migration: *migration };
            let one = after.iter_mut().find(|one| one.state == open).ok_or(Refusal::Stale)?;
            one.state = match how {
                Ended::Moved { destination, .. } if destination == host => {
                    ReturnState::Returned { at: *at }
                }
                Ended::Moved { destination, .. } => {
                    ReturnState::Stays { reason: format!("it is on {destination}"), at: *at }
                }
                Ended::Cancelled => {
                    ReturnState::Stays { reason: "its migration was cancelled".into(), at: *at }
                }
                Ended::Failed { error } => ReturnState::Stays { reason: error.clone(), at: *at },
            };
        }
        Event::HostDied { how, at } => {
            let mut waited =
                after.iter_mut().filter(|one| one.state == ReturnState::Waiting).peekable();
            if waited.peek().is_none() {
                return Err(Refusal::Stale);
            }
            for one in waited {
                one.state =
                    ReturnState::Stays { reason: format!("host {host} died: {how}"), at: *at };
            }
        }
        // What has not begun stays where it is.
        Event::CancelRequested { by, at } => {
            if !after.iter().any(Return::is_open) {
                return Err(Refusal::Denied);
            }
            for one in after.iter_mut().filter(|one| one.state == ReturnState::Waiting) {
                one.state = ReturnState::Stays { reason: format!("cancelled by {by}"), at: *at };
            }
        }
        Event::CompleteRequested { .. } | Event::CancelAsked { .. } => return Err(Refusal::Stale),
        Event::ExecuteRequested { .. } => return Err(Refusal::Denied),
        Event::Superseded { .. } | Event::FoundEmpty { .. } | Event::VerifyExpired { .. } => {
            return Err(Refusal::Stale);
        }
    }
    Ok(after)
}

fn waiting(back: &mut [Return], which: impl Fn(&Return) -> bool) -> Result<&mut Return, Refusal> {
    let found = back.iter_mut().find(|one| which(one)).ok_or(Refusal::Illegal)?;
    match found.state {
        ReturnState::Waiting => Ok(found),
        ReturnState::Begun { .. } | ReturnState::Returned { .. } | ReturnState::Stays { .. } => {
            Err(Refusal::Stale)
        }
    }
}
