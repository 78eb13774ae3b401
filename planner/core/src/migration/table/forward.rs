//! Phases in which the source owns the VM and the way is forward.

use vmferry_types::{Generation, HostId, Method, Timestamp};

use super::At;
use crate::migration::{
    Back, Blocked, Cause, Cleanup, Event, Gate, GoneProof, Guest, Handover, Listener, Migration,
    Phase, Ran, Receiver, Refusal, Stage, Stood, Switchover,
};

/// Turns back; the source keeps its generation, since ownership never moved.
pub(super) fn back(at: At<'_>, destination: &HostId, cause: Cause, back: Back) -> Phase {
    Phase::RollingBack {
        destination: destination.clone(),
        generation: at.migration.generation,
        cause,
        back,
    }
}

/// The source's QEMU is gone and nothing can carry the guest on.
pub(super) fn lost(at: At<'_>, destination: &HostId, cause: Cause, cleanup: Cleanup) -> Phase {
    Phase::Failed {
        destination: destination.clone(),
        owner: at.migration.source.clone(),
        generation: at.migration.generation,
        cause,
        first: None,
        cleanup,
    }
}

/// The guest left by itself before it moved: only the receiver is left to clear away.
pub(super) fn left(at: At<'_>, destination: &HostId, proof: &GoneProof) -> Phase {
    let cause = Cause::GuestPoweredOff { proof: proof.clone() };
    back(at, destination, cause, Back::PoweredOff)
}

/// The receiver is gone before ownership moved. One that was continued all the same must not be
/// answered by letting the source go on.
pub(super) fn receiver_lost(
    at: At<'_>,
    destination: &HostId,
    gone: (&GoneProof, Ran),
    how: impl FnOnce(GoneProof) -> Back,
) -> Phase {
    let (proof, ran) = gone;
    match ran {
        Ran::Never => {
            let cause = Cause::ReceiverLost { proof: proof.clone() };
            back(at, destination, cause, how(proof.clone()))
        }
        Ran::Maybe => {
            let cause = Cause::RanUncommitted { proof: proof.clone() };
            lost(at, destination, cause, Cleanup::Undecided)
        }
    }
}

pub(super) fn queued(
    at: At<'_>,
    blocked: Option<&Blocked>,
    deadline: Timestamp,
) -> Result<Phase, Refusal> {
    let end = |cause| Phase::Aborted {
        destination: None,
        generation: at.migration.generation,
        cause,
        guest: Guest::Present,
    };
    Ok(match at.event {
        Event::Granted { destination } => {
            Phase::Admitted { destination: destination.clone(), stage: Stage::Arming }
        }
        Event::NoRoom { at, note } => {
            let since = blocked.map_or(*at, |blocked| blocked.since);
            Phase::Queued { blocked: Some(Blocked { since, note: note.clone() }), deadline }
        }
        Event::QueueExpired => {
            let note = blocked.map(|blocked| blocked.note.clone()).unwrap_or_default();
            end(Cause::CapacityWaitExpired { note })
        }
        Event::Refused { blockers } => end(Cause::Refused { blockers: blockers.clone() }),
        Event::CancelRequested => end(Cause::Cancelled),
        Event::GuestPoweredOff { proof } => end(Cause::GuestPoweredOff { proof: proof.clone() }),
        Event::ReceiverArmed { .. }
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
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// Says what comes first once the receiver listens.
pub(super) fn begin(method: Method, listener: &Listener) -> Stage {
    let listener = listener.clone();
    match method {
        Method::Precopy | Method::Postcopy => Stage::Transferring { listener },
        Method::Snapshot | Method::DiskCopy => Stage::Holding { listener },
        // Nothing is sent, so nobody listens.
        Method::Cold => Stage::ShuttingDown,
    }
}

/// The guest stands at the switchover: it is ordered in the same commit, unless a gate is closed.
pub(super) fn stopped(at: At<'_>, destination: &HostId) -> Phase {
    Phase::Captured {
        destination: destination.clone(),
        switchover: match at.migration.terms.gates.switchover {
            Gate::Open => Switchover::Ordered,
            Gate::Closed => Switchover::Withheld,
        },
    }
}

pub(super) fn arming(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    // The source has heard of nothing yet, so it has nothing to take back.
    let clear = |cause| back(at, destination, cause, Back::Clearing);
    Ok(match at.event {
        Event::ReceiverArmed { listener } => Phase::Admitted {
            destination: destination.clone(),
            stage: match at.migration.terms.gates.start {
                Gate::Open => begin(at.migration.method, listener),
                Gate::Closed => Stage::Waiting { listener: listener.clone() },
            },
        },
        Event::Refused { blockers } => {
            let cause = Cause::Refused { blockers: blockers.clone() };
            if at.migration.refuses_postcopy(blockers) {
                let stage = Stage::Clearing { cause };
                Phase::Admitted { destination: destination.clone(), stage }
            } else {
                clear(cause)
            }
        }
        Event::CancelRequested => clear(Cause::Cancelled),
        Event::TransferTimedOut => clear(Cause::TransferTimedOut),
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |_| Back::Clearing)
        }
        Event::SourceGone { proof, .. } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. } | Event::NoRoom { .. } | Event::QueueExpired => {
            return Err(Refusal::Stale);
        }
        Event::SourceHeld
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
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::Resolved { .. } => return Err(Refusal::Illegal),
    })
}

/// The receiver listens, and an operator's word is waited for: the source has heard of nothing yet.
pub(super) fn waiting(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    match at.event {
        Event::ReceiverArmed { .. } | Event::Refused { .. } | Event::TransferTimedOut => {
            Err(Refusal::Stale)
        }
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::CancelRequested
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
        | Event::SourceGone { .. }
        | Event::GuestPoweredOff { .. }
        | Event::ReceiverGone { .. }
        | Event::DestinationRuns
        | Event::SourceReleased { .. }
        | Event::SourceContinued
        | Event::Overtaken { .. }
        | Event::PostcopyDue { .. }
        | Event::SourceShutDown { .. }
        | Event::ShutdownRefused
        | Event::Severed { .. }
        | Event::ChannelBroke
        | Event::ChannelMended
        | Event::StartAllowed
        | Event::GatesOpened
        | Event::GateExpired
        | Event::Diverges { .. }
        | Event::LimitsSet { .. }
        | Event::Resolved { .. } => arming(at, destination),
    }
}

pub(super) fn transferring(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let cancel = |cause| back(at, destination, cause, Back::Cancelling);
    let recall = |cause| Phase::Admitted {
        destination: destination.clone(),
        stage: Stage::Recalling { cause },
    };
    let parting =
        matches!(at.migration.phase, Phase::Admitted { stage: Stage::Parting { .. }, .. });
    let refused = |cause, stood| {
        if at.migration.may_hold_instead(stood) { recall(cause) } else { cancel(cause) }
    };
    Ok(match at.event {
        Event::SourceStopped => stopped(at, destination),
        Event::Refused { blockers } => {
            let cause = Cause::Refused { blockers: blockers.clone() };
            if at.migration.refuses_postcopy(blockers) { recall(cause) } else { cancel(cause) }
        }
        Event::CancelRequested => cancel(Cause::Cancelled),
        Event::SourceGaveUp { error, stood } => {
            refused(Cause::GaveUp { error: error.clone() }, *stood)
        }
        Event::TransferFailed { error, stood } => {
            refused(Cause::TransferFailed { error: error.clone() }, *stood)
        }
        Event::TransferTimedOut if parting => cancel(Cause::TransferTimedOut),
        Event::TransferTimedOut => refused(Cause::TransferTimedOut, Stood::No),
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
        | Event::ReceiverArmed { .. } => return Err(Refusal::Stale),
        Event::SourceHeld
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

pub(super) fn withheld(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let cancel = |cause| back(at, destination, cause, Back::Cancelling);
    Ok(match at.event {
        Event::SwitchoverAllowed => {
            Phase::Captured { destination: destination.clone(), switchover: Switchover::Ordered }
        }
        Event::CancelRequested => cancel(Cause::Cancelled),
        Event::SourceGaveUp { error, .. } => cancel(Cause::GaveUp { error: error.clone() }),
        Event::TransferFailed { error, .. } => {
            cancel(Cause::TransferFailed { error: error.clone() })
        }
        // Held, it was to stand still: whoever let it run, only back is left (rule R4).
        Event::SourceRunsAgain { error } => cancel(Cause::SourceRanAgain { error: error.clone() }),
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
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::TransferTimedOut => return Err(Refusal::Stale),
        Event::CommitAllowed
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

pub(super) fn ordered(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let postcopy = at.migration.method == Method::Postcopy;
    let undo = |cause| back(at, destination, cause, Back::Undoing);
    Ok(match at.event {
        Event::BothComplete { proof } => restore(destination, proof),
        Event::SourceGone { receiver: Receiver::Complete(proof), .. } => {
            restore(destination, proof)
        }
        Event::SourceGone { proof, receiver: Receiver::Incomplete } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        // Journalled before the order reached it, so the order is refused: as if never ordered.
        Event::SourceGaveUp { error, .. } => {
            back(at, destination, Cause::GaveUp { error: error.clone() }, Back::Cancelling)
        }
        Event::TransferFailed { error, .. } => undo(Cause::TransferFailed { error: error.clone() }),
        Event::SourceRunsAgain { error } => undo(Cause::SourceRanAgain { error: error.clone() }),
        // The order is the point of no return (rule R6): nothing is decided back or forward.
        Event::CancelRequested if postcopy => return Err(Refusal::TooLate),
        Event::DecidedBack | Event::DecidedForward if postcopy => return Err(Refusal::Illegal),
        Event::CancelRequested => undo(Cause::Cancelled),
        Event::DecidedBack => undo(Cause::SwitchoverOverdue),
        Event::DecidedForward => {
            Phase::Captured { destination: destination.clone(), switchover: Switchover::Forward }
        }
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |gone| Back::Resuming { gone })
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::TransferTimedOut => return Err(Refusal::Stale),
        Event::CommitAllowed
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

pub(super) fn decided_forward(at: At<'_>, destination: &HostId) -> Result<Phase, Refusal> {
    let undo = |cause| back(at, destination, cause, Back::Undoing);
    Ok(match at.event {
        Event::BothComplete { proof } => restore(destination, proof),
        Event::SourceGone { receiver: Receiver::Complete(proof), .. } => {
            restore(destination, proof)
        }
        Event::SourceGone { proof, receiver: Receiver::Incomplete } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        // Seen before it was killed: its guest has gone on from what the receiver has.
        Event::SourceRunsAgain { error } => undo(Cause::SourceRanAgain { error: error.clone() }),
        Event::SourceGaveUp { error, .. } => {
            back(at, destination, Cause::GaveUp { error: error.clone() }, Back::Cancelling)
        }
        Event::TransferFailed { error, .. } => undo(Cause::TransferFailed { error: error.clone() }),
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |gone| Back::Resuming { gone })
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::CancelRequested => return Err(Refusal::TooLate),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward => return Err(Refusal::Stale),
        Event::CommitAllowed
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

/// The destination has everything; the source stands still and could go on.
pub(super) fn restored(
    at: At<'_>,
    destination: &HostId,
    proof: &Handover,
) -> Result<Phase, Refusal> {
    let undo = |cause| back(at, destination, cause, Back::Undoing);
    Ok(match at.event {
        Event::CommitAllowed => commit(at.migration, destination, proof),
        Event::CancelRequested if at.migration.method == Method::Postcopy => {
            return Err(Refusal::TooLate);
        }
        Event::CancelRequested => undo(Cause::Cancelled),
        Event::SourceRunsAgain { error } => undo(Cause::SourceRanAgain { error: error.clone() }),
        Event::ReceiverGone { proof, ran } => {
            receiver_lost(at, destination, (proof, *ran), |gone| Back::Resuming { gone })
        }
        Event::SourceGone { receiver: Receiver::Complete(proof), .. } => {
            restore(destination, proof)
        }
        Event::SourceGone { proof, receiver: Receiver::Incomplete } => {
            lost(at, destination, Cause::GuestLost { proof: proof.clone() }, Cleanup::Receiver)
        }
        Event::GuestPoweredOff { proof } => left(at, destination, proof),
        Event::Granted { .. }
        | Event::NoRoom { .. }
        | Event::QueueExpired
        | Event::Refused { .. }
        | Event::ReceiverArmed { .. }
        | Event::SourceHeld
        | Event::SourceStopped
        | Event::SwitchoverAllowed
        | Event::BothComplete { .. }
        | Event::TransferFailed { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward => return Err(Refusal::Stale),
        Event::SourceGaveUp { .. }
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

/// The destination has everything and the source is gone: there is no way back.
pub(super) fn restored_alone(
    at: At<'_>,
    destination: &HostId,
    proof: &Handover,
) -> Result<Phase, Refusal> {
    Ok(match at.event {
        Event::CommitAllowed => commit(at.migration, destination, proof),
        Event::ReceiverGone { proof, .. } => {
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
        | Event::TransferFailed { .. }
        | Event::TransferTimedOut
        | Event::DecidedBack
        | Event::DecidedForward
        | Event::SourceGone { .. } => return Err(Refusal::Stale),
        Event::SourceGaveUp { .. }
        | Event::SourceRunsAgain { .. }
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

pub(super) fn restore(destination: &HostId, proof: &Handover) -> Phase {
    Phase::Restored { destination: destination.clone(), proof: proof.clone() }
}

/// Moves ownership. The only place where a generation is taken on the way forward.
pub(super) fn commit(migration: &Migration, destination: &HostId, proof: &Handover) -> Phase {
    let generation: Generation = migration.generation.next();
    Phase::Committed { destination: destination.clone(), proof: proof.clone(), generation }
}
