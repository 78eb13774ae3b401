//! A guest that is shut down under a grant and started anew, or was off already.
//!
//! What moves is who may start it. Nothing is sent, so there is no switchover and no doubt about one:
//! from the moment that the guest is off until ownership moves, going back is to start it again where
//! it was, once the receiver is proven gone.

use vmferry_types::{HostId, Method};

use super::At;
use super::forward::{back, commit, left, lost, receiver_lost, restore};
use crate::migration::{
    Back, Cause, Cleanup, Event, GoneProof, Guest, Handover, Phase, Ran, Refusal, SourceWord,
    Stage, Switchover,
};

/// Returns what an event leads to where it is otherwise for such a guest; `None` where it is not.
pub(super) fn next(at: At<'_>) -> Option<Result<Phase, Refusal>> {
    if at.migration.method != Method::Cold {
        return None;
    }
    match (&at.migration.phase, at.event) {
        (Phase::Queued { .. }, Event::Granted { destination }) => Some(Ok(Phase::Admitted {
            destination: destination.clone(),
            stage: Stage::ShuttingDown,
        })),
        // It heard too late that it need not: it is started again.
        (
            Phase::RollingBack {
                destination,
                generation,
                cause,
                back: Back::Cancelling | Back::Clearing,
            },
            Event::SourceShutDown { .. },
        ) => Some(Ok(Phase::RollingBack {
            destination: destination.clone(),
            generation: *generation,
            cause: cause.clone(),
            back: Back::Undoing,
        })),
        // Nothing of it runs there that could be lost.
        (Phase::Committed { .. }, Event::ReceiverGone { .. })
            if at.migration.found == Guest::PoweredOff =>
        {
            Some(Err(Refusal::Stale))
        }
        // It was off before, and stays so.
        (
            Phase::RollingBack { destination, generation, cause, back: Back::Undoing },
            Event::ReceiverGone { ran: Ran::Never, .. },
        ) if at.migration.found == Guest::PoweredOff => Some(Ok(Phase::Aborted {
            destination: Some(destination.clone()),
            generation: *generation,
            cause: cause.clone(),
            guest: Guest::PoweredOff,
        })),
        _other => None,
    }
}

/// The guest was asked to turn itself off, or is about to be.
pub(super) fn shutting_down(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let cancel = |cause| {
        let way = match at.migration.found {
            Guest::Present => Back::Cancelling,
            // There is nothing to call back.
            Guest::PoweredOff => Back::Undoing,
        };
        back(at, destination, cause, way)
    };
    Ok(match at.event {
        Event::SourceShutDown { proof } => Phase::Captured {
            destination: destination.clone(),
            switchover: Switchover::Down { source: proof.clone() },
        },
        Event::ShutdownRefused => {
            cancel(Cause::ShutdownRefused { limit: at.migration.terms.shutdown_limit })
        }
        Event::Refused { blockers } => cancel(Cause::Refused { blockers: blockers.clone() }),
        Event::CancelRequested => cancel(Cause::Cancelled),
        Event::TransferTimedOut => cancel(Cause::TransferTimedOut),
        Event::SourceGone { proof, .. } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. } | Event::NoRoom { .. } | Event::QueueExpired => {
            return Err(Refusal::Stale);
        }
        Event::ReceiverArmed { .. }
        | Event::ReceiverGone { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::DecidedBack
        | Event::DecidedForward
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
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// The guest is off; its QEMU at the destination is to stand still with the disks locked.
pub(super) fn down(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let undo = |cause| back(at, destination, cause, Back::Undoing);
    Ok(match at.event {
        Event::BothComplete { proof: proof @ Handover { source: SourceWord::ShutDown(_), .. } } => {
            restore(destination, proof)
        }
        Event::Refused { blockers } => undo(Cause::Refused { blockers: blockers.clone() }),
        Event::CancelRequested => undo(Cause::Cancelled),
        Event::TransferTimedOut => undo(Cause::TransferTimedOut),
        Event::ReceiverGone { proof, ran } => receiver_gone(at, destination, (proof, *ran)),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::GuestPoweredOff { .. }
        | Event::SourceGone { .. } => return Err(Refusal::Stale),
        Event::BothComplete { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::DecidedBack
        | Event::DecidedForward
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
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// The destination is ready to start the guest, and has not.
pub(super) fn restored(
    at: At<'_>,
    destination: &HostId,
    proof: &Handover,
) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::CommitAllowed => commit(at.migration, destination, proof),
        Event::CancelRequested => back(at, destination, Cause::Cancelled, Back::Undoing),
        Event::ReceiverGone { proof, ran } => receiver_gone(at, destination, (proof, *ran)),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::BothComplete { .. }
        | Event::TransferTimedOut
        | Event::GuestPoweredOff { .. }
        | Event::SourceGone { .. } => return Err(Refusal::Stale),
        Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::DecidedBack
        | Event::DecidedForward
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
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// The receiver is gone before ownership moved. Of a VM that was off nothing can have run; what is
/// left of its definition there is cleared away.
fn receiver_gone(at: At<'_>, destination: &HostId, gone: (&GoneProof, Ran)) -> Phase {
    match at.migration.found {
        Guest::Present => receiver_lost(at, destination, gone, |gone| Back::Resuming { gone }),
        Guest::PoweredOff => receiver_lost(at, destination, gone, |_gone| Back::Undoing),
    }
}
