//! What happens only to a guest that goes before its memory.

use vmferry_types::{HostId, Method};

use super::At;
use super::forward::{back, commit, lost, receiver_lost, restore};
use crate::migration::{
    Back, Cause, Channel, Cleanup, Event, Handover, NotConverging, Phase, Receiver, Refusal,
    SourceWord, Stage, Switchover, Takes,
};

/// Returns what an event leads to that is of such a guest alone; `None` for every other.
pub(super) fn next(at: At<'_>) -> Option<Result<Phase, Refusal>> {
    if let Event::Severed { error } = at.event {
        return Some(severed(at, error));
    }
    if matches!(at.event, Event::PostcopyDue { .. }) {
        return Some(due(at));
    }
    if matches!(at.event, Event::ChannelBroke) {
        return Some(channel(at, Channel::Broken));
    }
    matches!(at.event, Event::ChannelMended).then(|| channel(at, Channel::Whole))
}

/// The guest is to go before its memory.
pub(super) fn due(at: At<'_>) -> Result<Phase, Refusal> {
    let migration = at.migration;
    let Phase::Admitted { destination, stage: Stage::Transferring { listener } } = &migration.phase
    else {
        return Err(Refusal::Stale);
    };
    let Event::PostcopyDue { verdict } = at.event else { return Err(Refusal::Illegal) };
    let may = match migration.method {
        Method::Postcopy => true,
        Method::Precopy => {
            migration.terms.not_converging == NotConverging::Postcopy
                && listener.takes != Takes::Precopy
                && verdict.is_some()
        }
        Method::Snapshot | Method::Cold | Method::DiskCopy => false,
    };
    if !may {
        return Err(Refusal::Illegal);
    }
    let stage = Stage::Parting { listener: listener.clone() };
    Ok(Phase::Admitted { destination: destination.clone(), stage })
}

/// The channel between the halves broke, or was mended: the phase stays as it is.
pub(super) fn channel(at: At<'_>, becomes: Channel) -> Result<Phase, Refusal> {
    if at.migration.may_be_divided() && at.migration.channel != becomes {
        Ok(at.migration.phase.clone())
    } else {
        Err(Refusal::Stale)
    }
}

/// What one half had can reach the other no more. What is left is cleared away.
pub(super) fn severed(at: At<'_>, error: &str) -> Result<Phase, Refusal> {
    if !at.migration.may_be_divided() {
        return Err(Refusal::Stale);
    }
    let cause = Cause::Severed { error: error.to_owned() };
    match &at.migration.phase {
        Phase::Captured { destination, switchover: Switchover::Ordered }
        | Phase::Restored { destination, .. } => {
            Ok(lost(at, destination, cause, Cleanup::Receiver))
        }
        Phase::Committed { destination, generation, .. } => Ok(Phase::Failed {
            destination: destination.clone(),
            owner: destination.clone(),
            generation: *generation,
            cause,
            first: None,
            cleanup: Cleanup::Source,
        }),
        Phase::Captured { .. }
        | Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => Err(Refusal::Stale),
    }
}

/// The guest stands still at the destination, and the source serves its memory.
pub(super) fn restored(
    at: At<'_>,
    destination: &HostId,
    proof: &Handover,
) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::CommitAllowed => commit(at.migration, destination, proof),
        // The source serves nobody any more, and its guest ran nowhere since it stopped.
        Event::TransferFailed { error, .. } => {
            let cause = Cause::TransferFailed { error: error.clone() };
            back(at, destination, cause, Back::Undoing)
        }
        // All had arrived by then, or it would be severed.
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |gone| Back::Resuming { gone })
        }
        Event::SourceGone { receiver: Receiver::Complete(proof), .. } => {
            restore(destination, proof)
        }
        Event::SourceGone { proof, receiver: Receiver::Incomplete } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::CancelRequested => return Err(Refusal::TooLate),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::BothComplete { .. }
        | Event::TransferTimedOut => return Err(Refusal::Stale),
        Event::SourceGaveUp { .. }
        | Event::SourceRunsAgain { .. }
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::GuestPoweredOff { .. }
        | Event::DestinationRuns
        | Event::SourceReleased { .. }
        | Event::SourceContinued
        | Event::Overtaken { .. }
        | Event::PostcopyDue { .. }
        | Event::Severed { .. }
        | Event::ChannelBroke
        | Event::ChannelMended
        | Event::StartAllowed
        | Event::GatesOpened
        | Event::GateExpired
        | Event::Diverges { .. }
        | Event::LimitsSet { .. }
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// Says whether the destination lacks something once the source is gone.
pub(super) fn depends(proof: &Handover) -> bool {
    matches!(proof.source, SourceWord::Serves(_))
}
