//! What an operator's word, or its absence, does to a migration.

use vmferry_types::Method;

use super::At;
use super::forward::{back, begin, commit};
use crate::migration::{
    Back, Cause, Event, GatePoint, Gates, Phase, Refusal, SourceWord, Stage, Switchover,
};

/// Returns what an event leads to that is of gates alone; `None` for every other.
pub(super) fn next(at: At<'_>) -> Option<Result<Phase, Refusal>> {
    if matches!(at.event, Event::StartAllowed) {
        return Some(start_allowed(at));
    }
    if matches!(at.event, Event::GatesOpened) {
        return Some(all_opened(at));
    }
    matches!(at.event, Event::GateExpired).then(|| expired(at))
}

fn start_allowed(at: At<'_>) -> Result<Phase, Refusal> {
    let Phase::Admitted { destination, stage: Stage::Waiting { listener } } = &at.migration.phase
    else {
        return Err(Refusal::Stale);
    };
    let stage = begin(at.migration.method, listener);
    Ok(Phase::Admitted { destination: destination.clone(), stage })
}

/// No gate is waited at any more. One that is waited at now is passed with it; what is waited at
/// before ownership moves is passed by what follows.
fn all_opened(at: At<'_>) -> Result<Phase, Refusal> {
    if at.migration.terms.gates == Gates::OPEN {
        return Err(Refusal::Stale);
    }
    match &at.migration.phase {
        Phase::Admitted { stage: Stage::Waiting { .. }, .. } => start_allowed(at),
        Phase::Captured { destination, switchover: Switchover::Withheld } => Ok(Phase::Captured {
            destination: destination.clone(),
            switchover: Switchover::Ordered,
        }),
        Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Captured { .. }
        | Phase::Restored { .. } => Ok(at.migration.phase.clone()),
        Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => Err(Refusal::Stale),
    }
}

/// Nobody opened the gate in time: the guest goes back to where it is owned, or on where there is
/// no way back.
fn expired(at: At<'_>) -> Result<Phase, Refusal> {
    let Some(gate) = at.migration.waits_at() else { return Err(Refusal::Stale) };
    let give_up = |destination, how| back(at, destination, Cause::GateExpired { gate }, how);
    match (&at.migration.phase, gate) {
        (Phase::Restored { destination, proof }, GatePoint::Commit) => match &proof.source {
            SourceWord::Completed(_) if at.migration.method != Method::Postcopy => {
                Ok(give_up(destination, Back::Undoing))
            }
            SourceWord::ShutDown(_) => Ok(give_up(destination, Back::Undoing)),
            SourceWord::Completed(_) | SourceWord::Gone(_) | SourceWord::Serves(_) => {
                Ok(commit(at.migration, destination, proof))
            }
        },
        (Phase::Captured { destination, .. }, GatePoint::Switchover) => {
            Ok(give_up(destination, Back::Cancelling))
        }
        // The source has heard of nothing yet.
        (Phase::Admitted { destination, .. }, GatePoint::Start) => {
            Ok(give_up(destination, Back::Clearing))
        }
        (
            Phase::Queued { .. }
            | Phase::Admitted { .. }
            | Phase::Captured { .. }
            | Phase::Restored { .. }
            | Phase::Committed { .. }
            | Phase::Attached { .. }
            | Phase::Done { .. }
            | Phase::RollingBack { .. }
            | Phase::Aborted { .. }
            | Phase::Failed { .. },
            GatePoint::Start | GatePoint::Switchover | GatePoint::Commit,
        ) => Err(Refusal::Illegal),
    }
}
