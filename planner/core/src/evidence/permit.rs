//! Whether an effect may leave now.

use std::fmt;

use vmferry_types::{Method, PhaseLabel};

use crate::evidence::{Continued, Heard, Held, Knowledge, RunState, Seen, Sides, TransferState};
use crate::migration::{Back, Effect, Guest, Migration, Phase, Side};

/// Says why an effect has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withheld {
    /// The agent that would carry it out has not answered this driver's claim.
    NotAnswered {
        /// Which.
        side: Side,
    },
    /// The agent that would carry it out is still learning of the VM.
    Learning {
        /// Which.
        side: Side,
    },
    /// The journal of the agent that would carry it out proves nothing.
    Unreadable {
        /// Which.
        side: Side,
    },
    /// The receiver may hold the only whole guest: it needs the source's word that its QEMU lives.
    SourceMayBeLost,
    /// The source's guest runs: it must not be killed.
    SourceRuns,
    /// The destination has not said that it has everything.
    DestinationIncomplete,
    /// The last page has not arrived: the source serves it.
    PagesMissing,
    /// The source's guest is to stand still while its memory crosses, and is not held.
    NotHeld,
}

impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAnswered { side } => write!(f, "the {} agent to answer", side.label()),
            Self::Learning { side } => {
                write!(f, "the {} agent to learn what became of the VM", side.label())
            }
            Self::Unreadable { side } => {
                write!(f, "the {} agent's journal to be seeded again", side.label())
            }
            Self::SourceMayBeLost => f.write_str("the source agent's word that its QEMU can go on"),
            Self::SourceRuns => f.write_str("the source's guest, which runs, to be decided anew"),
            Self::DestinationIncomplete => {
                f.write_str("the destination's word that it has everything")
            }
            Self::PagesMissing => f.write_str("the last page to reach the destination"),
            Self::NotHeld => f.write_str("the source's word that its guest is held"),
        }
    }
}

/// Says whether `effect` may leave now, by what both sides answered.
///
/// An agent is commanded only after it answered this driver's claim (rule R2), a receiver is ended
/// after the order only with the source's word (rule R10), and a source is killed only if its
/// guest does not run and the destination can go on.
///
/// # Errors
///
/// Says what it has to wait for.
pub fn permit(migration: &Migration, effect: &Effect, sides: &Sides) -> Result<(), Withheld> {
    let Some(side) = effect.side() else { return Ok(()) };
    let seen = answered(sides, side)?;
    match seen.knowledge {
        Knowledge::Learning => return Err(Withheld::Learning { side }),
        Knowledge::Unreadable => return Err(Withheld::Unreadable { side }),
        Knowledge::Known | Knowledge::Unresponsive | Knowledge::UnknownVm => {}
    }
    match effect {
        Effect::KillSource { .. } => {
            if seen.run_state.has_run() || seen.ran_again() {
                return Err(Withheld::SourceRuns);
            }
            // What is left of a divided guest whose other half is proven gone.
            if migration.label() == PhaseLabel::Failed {
                return Ok(());
            }
            let destination = answered(sides, Side::Destination)?;
            if complete(&destination) { Ok(()) } else { Err(Withheld::DestinationIncomplete) }
        }
        Effect::ReleaseSource { .. } => may_release(migration, sides),
        // What is sent of a guest that was to stand still is sent only while it does.
        Effect::StartTransfer { .. } if migration.label() == PhaseLabel::Captured => {
            if seen.held == Held::Yes { Ok(()) } else { Err(Withheld::NotHeld) }
        }
        Effect::DestroyReceiver { .. } => may_destroy(migration, &seen, sides),
        Effect::TryAdmit
        | Effect::Commit
        | Effect::ArmReceiver
        | Effect::HoldGuest
        | Effect::ShutDownGuest
        | Effect::StartReceiver
        | Effect::RestartSource { .. }
        | Effect::StartTransfer { .. }
        | Effect::StartPostcopy
        | Effect::RecoverReceiver
        | Effect::ResumeTransfer { .. }
        | Effect::SetLimits { .. }
        | Effect::OrderSwitchover
        | Effect::ContinueDestination
        | Effect::CancelTransfer { .. }
        | Effect::ResumeSource { .. } => Ok(()),
    }
}

/// Returns what one side said to this driver.
fn answered(sides: &Sides, side: Side) -> Result<Seen, Withheld> {
    let seen = match side {
        Side::Source => &sides.source,
        Side::Destination => &sides.destination,
    };
    seen.clone().filter(|seen| seen.claim == sides.claim).ok_or(Withheld::NotAnswered { side })
}

/// The source serves pages until the destination has said that it has the last.
fn may_release(migration: &Migration, sides: &Sides) -> Result<(), Withheld> {
    match &migration.phase {
        Phase::Attached { guest: Guest::Present, .. } if migration.is_served() => {
            let destination = answered(sides, Side::Destination)?;
            let whole = destination.gone.is_none()
                && destination.migration == Some(migration.id)
                && destination.transfer == TransferState::Completed;
            if whole { Ok(()) } else { Err(Withheld::PagesMissing) }
        }
        Phase::Attached { .. }
        | Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Captured { .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => Ok(()),
    }
}

/// After the order a receiver is ended only with the word of a source that can go on.
fn may_destroy(migration: &Migration, seen: &Seen, sides: &Sides) -> Result<(), Withheld> {
    match &migration.phase {
        // The disks are all that there is of it, and nobody has written to them: it only has to be
        // there who starts it again.
        Phase::RollingBack { back: Back::Undoing, .. } if migration.method == Method::Cold => {
            let answers =
                |source: &Seen| source.heard == Heard::Now && source.knowledge == Knowledge::Known;
            let there = answered(sides, Side::Source).is_ok_and(|source| answers(&source));
            if seen.gone.is_some() || there { Ok(()) } else { Err(Withheld::SourceMayBeLost) }
        }
        Phase::RollingBack { back: Back::Undoing, .. } => {
            let source = answered(sides, Side::Source);
            // One that is gone or failed to load can carry nothing on: it needs nobody's word.
            let hopeless = seen.gone.is_some() || seen.transfer == TransferState::Failed;
            if hopeless || source.is_ok_and(|source| can_go_on(&source)) {
                Ok(())
            } else {
                Err(Withheld::SourceMayBeLost)
            }
        }
        Phase::RollingBack {
            back: Back::Cancelling | Back::Clearing | Back::Resuming { .. } | Back::PoweredOff,
            ..
        }
        | Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Captured { .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => Ok(()),
    }
}

/// The source's QEMU lives and answers. That it did so once is not enough: its host may have died.
fn can_go_on(source: &Seen) -> bool {
    source.heard == Heard::Now
        && source.knowledge == Knowledge::Known
        && source.gone.is_none()
        && source.process.is_some()
        && source.run_state != RunState::Unknown
}

/// The receiver is there and has everything.
fn complete(destination: &Seen) -> bool {
    destination.heard == Heard::Now
        && destination.knowledge == Knowledge::Known
        && destination.gone.is_none()
        && destination.transfer == TransferState::Completed
        && destination.run_state == RunState::Paused
        && destination.continued == Continued::No
}
