//! Phases in which the guest is, or is about to be, held while its memory crosses.

use vmferry_types::HostId;

use super::At;
use super::forward::{back, left, lost, receiver_lost, stopped};
use crate::migration::{Back, Cause, Cleanup, Event, Listener, Phase, Refusal, Switchover};

/// The receiver listens; the guest may be held already.
pub(super) fn holding(
    at: At<'_>,
    destination: &HostId,
    listener: &Listener,
) -> Result<Phase, Refusal> {
    let cancel = |cause| back(at, destination, cause, Back::Cancelling);
    Ok(match at.event {
        Event::SourceHeld => Phase::Captured {
            destination: destination.clone(),
            switchover: Switchover::Held { listener: listener.clone() },
        },
        Event::Refused { blockers } => cancel(Cause::Refused { blockers: blockers.clone() }),
        Event::CancelRequested => cancel(Cause::Cancelled),
        Event::TransferTimedOut => cancel(Cause::TransferTimedOut),
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |_| Back::Cancelling)
        }
        Event::SourceGone { proof, .. } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        // Of the live attempt before it.
        Event::SourceGaveUp { .. } | Event::TransferFailed { .. } => return Err(Refusal::Stale),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::ReceiverArmed { .. } => return Err(Refusal::Stale),
        Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
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
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// The guest is held, and its memory crosses or is about to.
pub(super) fn held(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let cancel = |cause| back(at, destination, cause, Back::Cancelling);
    Ok(match at.event {
        Event::SourceStopped => stopped(at, destination),
        Event::Refused { blockers } => cancel(Cause::Refused { blockers: blockers.clone() }),
        Event::CancelRequested => cancel(Cause::Cancelled),
        Event::SourceGaveUp { error, .. } => cancel(Cause::GaveUp { error: error.clone() }),
        Event::TransferFailed { error, .. } => {
            cancel(Cause::TransferFailed { error: error.clone() })
        }
        Event::TransferTimedOut => cancel(Cause::TransferTimedOut),
        // It was to stand still: whoever let it run, only back is left (rule R4).
        Event::SourceRunsAgain { error } => cancel(Cause::SourceRanAgain { error: error.clone() }),
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |_| Back::Cancelling)
        }
        // Unordered, the receiver cannot have everything, whatever it says.
        Event::SourceGone { proof, .. } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld => return Err(Refusal::Stale),
        Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
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
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}
