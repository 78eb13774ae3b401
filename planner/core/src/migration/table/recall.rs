//! Undoing a live attempt that was refused, so that the guest can be moved held (rule R5).

use vmferry_types::HostId;

use super::At;
use super::forward::{back, left, lost, receiver_lost};
use crate::migration::{Back, Cause, Cleanup, Event, Phase, Ran, Refusal, Stage};

/// The source has to take its transfer back and say that its guest runs.
pub(super) fn recalling(at: At<'_>, destination: &HostId, cause: &Cause) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::SourceContinued => Phase::Admitted {
            destination: destination.clone(),
            stage: Stage::Clearing { cause: cause.clone() },
        },
        Event::CancelRequested => back(at, destination, Cause::Cancelled, Back::Cancelling),
        // Nobody ended it: that is a loss, not a refusal.
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |_| Back::Cancelling)
        }
        Event::SourceGone { proof, .. } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceStopped
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut => return Err(Refusal::Stale),
        Event::SourceHeld
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::DestinationRuns
        | Event::SourceReleased { .. }
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

/// The guest runs on the source; the live attempt's receiver has to be proven gone.
pub(super) fn clearing(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::ReceiverGone { ran: Ran::Never, .. } => {
            Phase::Admitted { destination: destination.clone(), stage: Stage::Arming }
        }
        Event::ReceiverGone { proof, ran: Ran::Maybe } => {
            let cause = Cause::RanUncommitted { proof: proof.clone() };
            lost(at, destination, cause, Cleanup::Undecided)
        }
        Event::CancelRequested => back(at, destination, Cause::Cancelled, Back::Clearing),
        Event::SourceGone { proof, .. } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceStopped
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::SourceContinued => return Err(Refusal::Stale),
        Event::SourceHeld
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::DestinationRuns
        | Event::SourceReleased { .. }
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
