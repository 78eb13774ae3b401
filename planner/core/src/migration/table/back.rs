//! Going back, in the order that is safe (rule R10).

use vmferry_types::{Generation, HostId, Method};

use super::At;
use crate::migration::{
    Back, Cause, Cleanup, Event, GoneProof, Guest, Phase, Ran, Receiver, Refusal,
};

/// What every way back carries.
#[derive(Clone, Copy)]
pub(super) struct Going<'a> {
    pub(super) destination: &'a HostId,
    pub(super) generation: Generation,
    pub(super) cause: &'a Cause,
}

impl Going<'_> {
    /// Takes the next step back, for the same cause.
    fn step(self, back: Back) -> Phase {
        Phase::RollingBack {
            destination: self.destination.clone(),
            generation: self.generation,
            cause: self.cause.clone(),
            back,
        }
    }

    /// All is undone.
    fn end(self, guest: Guest) -> Phase {
        Phase::Aborted {
            destination: Some(self.destination.clone()),
            generation: self.generation,
            cause: self.cause.clone(),
            guest,
        }
    }

    /// Loss is proven on the way back.
    fn lost(self, at: At<'_>, cause: Cause, cleanup: Cleanup) -> Phase {
        Phase::Failed {
            destination: self.destination.clone(),
            owner: at.migration.source.clone(),
            generation: self.generation,
            cause,
            first: Some(self.cause.clone()),
            cleanup,
        }
    }

    /// Whether what turned it back is that the source's guest went on: a QEMU whose transfer fails
    /// resumes by itself, unless its guest was held before.
    const fn source_ran_on(self, method: Method) -> bool {
        match self.cause {
            Cause::SourceRanAgain { .. } => true,
            Cause::TransferFailed { .. } => match method {
                // One that converged before it parted was not held.
                Method::Precopy | Method::Postcopy => true,
                Method::Snapshot | Method::Cold | Method::DiskCopy => false,
            },
            Cause::Cancelled
            | Cause::CapacityWaitExpired { .. }
            | Cause::Refused { .. }
            | Cause::GaveUp { .. }
            | Cause::NotConverging { .. }
            | Cause::TransferTimedOut
            | Cause::GateExpired { .. }
            | Cause::SwitchoverOverdue
            | Cause::ShutdownRefused { .. }
            | Cause::ReceiverLost { .. }
            | Cause::GuestPoweredOff { .. }
            | Cause::GuestLost { .. }
            | Cause::GuestCrashed { .. }
            | Cause::Severed { .. }
            | Cause::Overtaken { .. }
            | Cause::RanUncommitted { .. } => false,
        }
    }

    fn guest_lost(self, at: At<'_>, proof: &GoneProof, cleanup: Cleanup) -> Phase {
        self.lost(at, Cause::GuestLost { proof: proof.clone() }, cleanup)
    }
}

pub(super) fn cancelling(at: At<'_>, going: Going<'_>) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::SourceContinued => going.step(Back::Clearing),
        Event::SourceGone { proof, .. } => going.guest_lost(at, proof, Cleanup::Receiver),
        Event::GuestPoweredOff { .. } => going.step(Back::PoweredOff),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::CancelRequested
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::ReceiverGone { .. } => return Err(Refusal::Stale),
        Event::CommitAllowed
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

pub(super) fn clearing(at: At<'_>, going: Going<'_>) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::ReceiverGone { .. } => going.end(Guest::Present),
        Event::SourceGone { proof, .. } => going.guest_lost(at, proof, Cleanup::Receiver),
        Event::GuestPoweredOff { .. } => going.step(Back::PoweredOff),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::CancelRequested
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::SourceContinued => return Err(Refusal::Stale),
        Event::CommitAllowed
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

pub(super) fn undoing(at: At<'_>, going: Going<'_>) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::ReceiverGone { proof, ran: Ran::Never } => {
            going.step(Back::Resuming { gone: proof.clone() })
        }
        Event::ReceiverGone { proof, ran: Ran::Maybe } => {
            going.lost(at, Cause::RanUncommitted { proof: proof.clone() }, Cleanup::Undecided)
        }
        // Its guest went on here from what the receiver has, whatever its agent remembers of that by
        // now: to continue the receiver would undo what the guest has written since.
        Event::SourceGone { proof, receiver: Receiver::Complete(_) }
            if going.source_ran_on(at.migration.method) =>
        {
            going.guest_lost(at, proof, Cleanup::Receiver)
        }
        // The side that was to go on is dead and the other has everything: forward after all.
        Event::SourceGone { receiver: Receiver::Complete(proof), .. } => {
            Phase::Restored { destination: going.destination.clone(), proof: proof.clone() }
        }
        Event::SourceGone { proof, receiver: Receiver::Incomplete } => {
            going.guest_lost(at, proof, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { .. } => going.step(Back::PoweredOff),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::CancelRequested
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::SourceContinued => return Err(Refusal::Stale),
        Event::DestinationRuns
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
        | Event::Resolved { .. } => {
            return Err(Refusal::Illegal);
        }
    })
}

pub(super) fn resuming(at: At<'_>, going: Going<'_>) -> Result<Phase, Refusal> {
    Ok(match at.event {
        // What is left of the receiver, if only in its agent's journal, is cleared away last: the
        // guest does not wait for that.
        Event::SourceContinued => going.step(Back::Clearing),
        Event::GuestPoweredOff { .. } => going.step(Back::PoweredOff),
        // The receiver is gone already: nothing is left of the guest.
        Event::SourceGone { proof, .. } => going.guest_lost(at, proof, Cleanup::Receiver),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::CancelRequested
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::ReceiverGone { .. } => return Err(Refusal::Stale),
        Event::DestinationRuns
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
        | Event::Resolved { .. } => {
            return Err(Refusal::Illegal);
        }
    })
}

pub(super) fn powered_off(at: At<'_>, going: Going<'_>) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::ReceiverGone { .. } => going.end(Guest::PoweredOff),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::CancelRequested
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::SourceGaveUp { .. }
        | Event::TransferFailed { .. }
        | Event::SourceRunsAgain { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::SourceGone { .. }
        | Event::GuestPoweredOff { .. }
        | Event::SourceContinued => return Err(Refusal::Stale),
        Event::DestinationRuns
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
        | Event::Resolved { .. } => {
            return Err(Refusal::Illegal);
        }
    })
}
