//! What the world is still owed, as a function of the phase alone (rule R7).

use super::Migration;
use super::phase::{Back, Cleanup, Listener, Phase, Stage, Switchover};
use super::proof::GoneProof;
use super::terms::Gate;

/// Which agent an effect is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The source's.
    Source,
    /// The destination's.
    Destination,
}

impl Side {
    /// Returns the one spelling of this side.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// Something that must happen outside. Idempotent: it is asked for again until it is seen to be so.
///
/// Commands go out under the generation of [`Books`](super::Books), and only if
/// [`evidence::permit`](crate::evidence::permit) allows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Look for room; commit what is found as an event.
    TryAdmit,
    /// Start the receiver on the destination, or learn where it listens.
    ArmReceiver,
    /// Hold the guest still at the source, durably; the attempt before it is forgotten there.
    HoldGuest,
    /// Begin to send, or learn that it is under way.
    StartTransfer {
        /// Where the receiver listens.
        listener: Listener,
    },
    /// Tell the source to send its last.
    OrderSwitchover,
    /// End the source's silent QEMU: it was decided forward.
    KillSource {
        /// Why, for its journal.
        cause: String,
    },
    /// Move ownership: commit [`Event::CommitAllowed`](super::Event::CommitAllowed).
    Commit,
    /// Let the guest go on at the destination.
    ContinueDestination,
    /// End the source's QEMU, whose guest goes on elsewhere.
    ReleaseSource,
    /// Take the transfer back at the source, which was never ordered, and let go on what was held.
    CancelTransfer {
        /// Why, for its journal.
        cause: String,
    },
    /// End the receiver, proven.
    DestroyReceiver {
        /// Why, for its journal.
        cause: String,
    },
    /// Let the guest go on at the source.
    ResumeSource {
        /// That the receiver is gone.
        proof: GoneProof,
    },
}

impl Effect {
    /// Returns the one spelling of this effect.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::TryAdmit => "try_admit",
            Self::ArmReceiver => "arm_receiver",
            Self::HoldGuest => "hold_guest",
            Self::StartTransfer { .. } => "start_transfer",
            Self::OrderSwitchover => "order_switchover",
            Self::KillSource { .. } => "kill_source",
            Self::Commit => "commit",
            Self::ContinueDestination => "continue_destination",
            Self::ReleaseSource => "release_source",
            Self::CancelTransfer { .. } => "cancel_transfer",
            Self::DestroyReceiver { .. } => "destroy_receiver",
            Self::ResumeSource { .. } => "resume_source",
        }
    }

    /// Returns the agent that carries it out. `None` if the planner does so itself.
    #[must_use]
    pub const fn side(&self) -> Option<Side> {
        match self {
            Self::TryAdmit | Self::Commit => None,
            Self::ArmReceiver | Self::ContinueDestination | Self::DestroyReceiver { .. } => {
                Some(Side::Destination)
            }
            Self::HoldGuest
            | Self::StartTransfer { .. }
            | Self::OrderSwitchover
            | Self::KillSource { .. }
            | Self::ReleaseSource
            | Self::CancelTransfer { .. }
            | Self::ResumeSource { .. } => Some(Side::Source),
        }
    }
}

impl Migration {
    /// Says whether `effect` begins something of this migration where nothing was ordered yet: one
    /// that is refused for good is given back, not asked for again.
    #[must_use]
    pub const fn begins_with(&self, effect: &Effect) -> bool {
        let unordered = match &self.phase {
            Phase::Admitted { .. }
            | Phase::Captured { switchover: Switchover::Held { .. }, .. } => true,
            Phase::Queued { .. }
            | Phase::Captured { .. }
            | Phase::Restored { .. }
            | Phase::Committed { .. }
            | Phase::Attached { .. }
            | Phase::Done { .. }
            | Phase::RollingBack { .. }
            | Phase::Aborted { .. }
            | Phase::Failed { .. } => false,
        };
        let begins = match effect {
            Effect::ArmReceiver | Effect::HoldGuest | Effect::StartTransfer { .. } => true,
            Effect::TryAdmit
            | Effect::OrderSwitchover
            | Effect::KillSource { .. }
            | Effect::Commit
            | Effect::ContinueDestination
            | Effect::ReleaseSource
            | Effect::CancelTransfer { .. }
            | Effect::DestroyReceiver { .. }
            | Effect::ResumeSource { .. } => false,
        };
        unordered && begins
    }

    /// Returns what the world is still owed.
    ///
    /// Called alike after a commit, at start-up and by the timer. `None` while only an observation,
    /// an operator or nothing at all is waited for.
    #[must_use]
    pub fn outstanding(&self) -> Option<Effect> {
        match &self.phase {
            Phase::Queued { .. } => Some(Effect::TryAdmit),
            Phase::Admitted { stage: Stage::Arming, .. } => Some(Effect::ArmReceiver),
            Phase::Admitted { stage: Stage::Transferring { listener }, .. } => {
                Some(Effect::StartTransfer { listener: listener.clone() })
            }
            Phase::Admitted { stage: Stage::Recalling { cause }, .. } => {
                Some(Effect::CancelTransfer { cause: cause.to_string() })
            }
            Phase::Admitted { stage: Stage::Clearing { cause }, .. } => {
                Some(Effect::DestroyReceiver { cause: cause.to_string() })
            }
            Phase::Admitted { stage: Stage::Holding { .. }, .. } => Some(Effect::HoldGuest),
            Phase::Captured { switchover, .. } => match switchover {
                Switchover::Held { listener } => {
                    Some(Effect::StartTransfer { listener: listener.clone() })
                }
                Switchover::Withheld => None,
                Switchover::Ordered => Some(Effect::OrderSwitchover),
                Switchover::Forward => Some(Effect::KillSource {
                    cause: "the switchover is overdue and the destination has everything".into(),
                }),
            },
            Phase::Restored { .. } => match self.terms.gates.commit {
                Gate::Open => Some(Effect::Commit),
                Gate::Closed => None,
            },
            Phase::Committed { .. } => Some(Effect::ContinueDestination),
            Phase::Attached { .. } => Some(Effect::ReleaseSource),
            Phase::RollingBack { back, cause, .. } => Some(match back {
                Back::Cancelling => Effect::CancelTransfer { cause: cause.to_string() },
                Back::Clearing | Back::Undoing | Back::PoweredOff => {
                    Effect::DestroyReceiver { cause: cause.to_string() }
                }
                Back::Resuming { gone } => Effect::ResumeSource { proof: gone.clone() },
            }),
            Phase::Failed { cleanup, cause, .. } => match cleanup {
                Cleanup::Nothing | Cleanup::Undecided => None,
                Cleanup::Receiver => Some(Effect::DestroyReceiver { cause: cause.to_string() }),
                Cleanup::Source => Some(Effect::ReleaseSource),
            },
            Phase::Done { .. } | Phase::Aborted { .. } => None,
        }
    }
}
