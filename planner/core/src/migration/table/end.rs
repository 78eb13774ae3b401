//! Phases in which the destination owns the VM, and those that end a migration.

use vmferry_types::{Generation, HostId};

use super::At;
use super::divided::depends;
use crate::migration::{
    Back, Cause, Cleanup, Event, GoneProof, Guest, Handover, Keep, Phase, Ran, Receiver, Refusal,
    SourceWord,
};

/// What the destination owns.
#[derive(Clone, Copy)]
pub(super) struct Owned<'a> {
    pub(super) destination: &'a HostId,
    pub(super) proof: &'a Handover,
    pub(super) generation: Generation,
    pub(super) guest: Guest,
}

impl Owned<'_> {
    /// The guest was seen on the destination.
    fn attach(self) -> Phase {
        Phase::Attached {
            destination: self.destination.clone(),
            proof: self.proof.clone(),
            generation: self.generation,
            guest: self.guest,
        }
    }

    /// The source is gone with memory that the guest here lacks.
    fn halved(self, gone: &GoneProof) -> Phase {
        let cause = Cause::GuestLost { proof: gone.clone() };
        let mut phase = self.lost(cause);
        if let Phase::Failed { cleanup, .. } = &mut phase {
            *cleanup = Cleanup::Half;
        }
        phase
    }

    /// The destination's QEMU is gone with the guest. The source's, if any, holds an older past of
    /// it: it is released, not resumed.
    fn lost(self, cause: Cause) -> Phase {
        Phase::Failed {
            destination: self.destination.clone(),
            owner: self.destination.clone(),
            generation: self.generation,
            cause,
            first: None,
            cleanup: Cleanup::Source,
        }
    }
}

pub(super) fn committed(
    at: At<'_>,
    destination: &HostId,
    proof: &Handover,
    generation: Generation,
) -> Result<Phase, Refusal> {
    let owned = Owned { destination, proof, generation, guest: Guest::Present };
    Ok(match at.event {
        Event::DestinationRuns => owned.attach(),
        Event::GuestPoweredOff { .. } => Owned { guest: Guest::PoweredOff, ..owned }.attach(),
        Event::ReceiverGone { proof: gone, ran: Ran::Never } => match &proof.source {
            // Never continued, and its journal says so: the source's guest is still the only one.
            // One that served has been read whole by then, or it would be severed.
            // One that was shut down is started again from its disks.
            SourceWord::Completed(_) | SourceWord::Serves(_) | SourceWord::ShutDown(_) => {
                Phase::RollingBack {
                    destination: destination.clone(),
                    generation: generation.next(),
                    cause: Cause::ReceiverLost { proof: gone.clone() },
                    back: Back::Resuming { gone: gone.clone() },
                }
            }
            SourceWord::Gone(_) => owned.lost(Cause::GuestLost { proof: gone.clone() }),
        },
        Event::ReceiverGone { proof: gone, ran: Ran::Maybe } => {
            owned.lost(Cause::GuestCrashed { proof: gone.clone() })
        }
        Event::SourceGone { proof: gone, receiver: Receiver::Incomplete } if depends(proof) => {
            owned.halved(gone)
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
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::TransferFailed { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::SourceGone { .. } => return Err(Refusal::Stale),
        Event::SourceGaveUp { .. }
        | Event::SourceRunsAgain { .. }
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

pub(super) fn attached(at: At<'_>, owned: Owned<'_>) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::SourceReleased { proof } => Phase::Done {
            destination: owned.destination.clone(),
            proof: owned.proof.clone(),
            generation: owned.generation,
            guest: owned.guest,
            released: proof.clone(),
        },
        Event::GuestPoweredOff { .. } => match owned.guest {
            Guest::Present => Owned { guest: Guest::PoweredOff, ..owned }.attach(),
            Guest::PoweredOff => return Err(Refusal::Stale),
        },
        Event::ReceiverGone { proof, .. } => match owned.guest {
            Guest::Present => owned.lost(Cause::GuestCrashed { proof: proof.clone() }),
            Guest::PoweredOff => return Err(Refusal::Stale),
        },
        Event::SourceGone { proof, receiver: Receiver::Incomplete }
            if depends(owned.proof) && owned.guest == Guest::Present =>
        {
            owned.halved(proof)
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
        | Event::CommitAllowed
        | Event::BothComplete { .. }
        | Event::TransferFailed { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::SourceGone { .. }
        | Event::DestinationRuns => return Err(Refusal::Stale),
        Event::SourceGaveUp { .. }
        | Event::SourceRunsAgain { .. }
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
        | Event::Resolved { .. } => {
            return Err(Refusal::Illegal);
        }
    })
}

pub(super) fn done(event: &Event) -> Result<Phase, Refusal> {
    Err(ended(event, Refusal::TooLate))
}

pub(super) fn aborted(event: &Event) -> Result<Phase, Refusal> {
    Err(ended(event, Refusal::Stale))
}

pub(super) fn failed(at: At<'_>, cleanup: Cleanup) -> Result<Phase, Refusal> {
    match (cleanup, at.event) {
        (Cleanup::Receiver | Cleanup::Half, Event::ReceiverGone { .. })
        | (Cleanup::Source, Event::SourceReleased { .. }) => Ok(cleaned(&at.migration.phase)),
        (Cleanup::Undecided, Event::Resolved { keep }) => resolved(&at.migration.phase, *keep),
        (
            Cleanup::Nothing
            | Cleanup::Receiver
            | Cleanup::Source
            | Cleanup::Half
            | Cleanup::Undecided,
            event,
        ) => Err(ended(event, Refusal::TooLate)),
    }
}

/// A human has said which side is the right one. The receiver is proven gone, or it would not have
/// come to this; so the generation stays as it is.
fn resolved(phase: &Phase, keep: Keep) -> Result<Phase, Refusal> {
    let Phase::Failed { destination, generation, cause, .. } = phase else {
        return Err(Refusal::Illegal);
    };
    match (keep, cause) {
        (Keep::Source, Cause::RanUncommitted { proof }) => Ok(Phase::RollingBack {
            destination: destination.clone(),
            generation: *generation,
            cause: cause.clone(),
            back: Back::Resuming { gone: proof.clone() },
        }),
        (Keep::Source, _other_cause) => Err(Refusal::Illegal),
        (Keep::Neither, _any_cause) => {
            let mut phase = phase.clone();
            if let Phase::Failed { cleanup, .. } = &mut phase {
                *cleanup = Cleanup::Source;
            }
            Ok(phase)
        }
    }
}

/// Agents know a newer owner than this row, and a human has looked: nothing that the row says of the
/// VM is true any more. Nothing is touched; what is left on hosts is shown as open halves.
pub(super) fn overtaken(at: At<'_>, host: &HostId, known: Generation) -> Result<Phase, Refusal> {
    let books = at.migration.books();
    if known <= books.generation {
        return Err(Refusal::Illegal);
    }
    let phase = &at.migration.phase;
    match phase {
        // It holds nothing: it is cancelled like any other.
        Phase::Queued { .. } => Err(Refusal::Illegal),
        Phase::Done { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { cleanup: Cleanup::Nothing, .. } => Err(Refusal::Stale),
        Phase::Admitted { destination, .. }
        | Phase::Captured { destination, .. }
        | Phase::Restored { destination, .. }
        | Phase::Committed { destination, .. }
        | Phase::Attached { destination, .. }
        | Phase::RollingBack { destination, .. }
        | Phase::Failed { destination, .. } => Ok(Phase::Failed {
            destination: destination.clone(),
            owner: books.host,
            generation: books.generation,
            cause: Cause::Overtaken { host: host.clone(), known },
            first: phase.cause().cloned(),
            cleanup: Cleanup::Nothing,
        }),
    }
}

/// What had to be cleared away is proven gone.
fn cleaned(phase: &Phase) -> Phase {
    let mut phase = phase.clone();
    if let Phase::Failed { cleanup, cause, .. } = &mut phase {
        // A divided guest leaves something on both hosts.
        let halves = matches!(cause, Cause::Severed { .. });
        *cleanup = match *cleanup {
            Cleanup::Half => Cleanup::Source,
            Cleanup::Receiver if halves => Cleanup::Source,
            Cleanup::Nothing | Cleanup::Receiver | Cleanup::Source | Cleanup::Undecided => {
                Cleanup::Nothing
            }
        };
    }
    phase
}

/// A migration that has ended stays as it is; whoever asks to cancel it is told.
const fn ended(event: &Event, cancel: Refusal) -> Refusal {
    match event {
        Event::CancelRequested => cancel,
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
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
        | Event::ReceiverGone { .. }
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
        | Event::Resolved { .. } => Refusal::Stale,
    }
}
