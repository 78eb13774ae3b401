//! What the world is still owed, as a function of the phase alone (rule R7).

use vmferry_types::Method;

use super::Migration;
use super::answer::Tuning;
use super::cause::Cause;
use super::gates::Gate;
use super::phase::{Back, Cleanup, Listener, Phase, Stage, Switchover};
use super::proof::GoneProof;

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
    /// Ask the guest at the source to turn itself off, or learn that it is off.
    ShutDownGuest,
    /// Start the guest's QEMU at the destination, which stands still with the disks locked; or, of a
    /// VM that is off, take its definition there.
    StartReceiver,
    /// Start the guest anew at the source, from its disks.
    RestartSource {
        /// That the receiver is gone.
        proof: GoneProof,
    },
    /// Begin to send, or learn that it is under way.
    StartTransfer {
        /// Where the receiver listens.
        listener: Listener,
    },
    /// Stop the guest at the source, durably, and let it go before its memory.
    StartPostcopy,
    /// Make the destination's half of a divided guest wait for the other to come back.
    RecoverReceiver,
    /// Let the source go on serving what has not arrived.
    ResumeTransfer {
        /// Where the destination's half waits.
        listener: Listener,
    },
    /// Tell the source what limits its transfer, and whether its guest is slowed down.
    SetLimits {
        /// How it is to be tuned.
        tuning: Tuning,
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
    ReleaseSource {
        /// Whether it has served memory.
        serves: Serves,
    },
    /// Take the transfer back at the source, which was never ordered, and let go on what was held.
    CancelTransfer {
        /// Why, for its journal.
        cause: String,
    },
    /// End the receiver, proven.
    DestroyReceiver {
        /// Why, for its journal.
        cause: String,
        /// That the source of a divided guest is gone, and what its receiver lacks with it.
        source_gone: Option<GoneProof>,
    },
    /// Let the guest go on at the source.
    ResumeSource {
        /// That the receiver is gone.
        proof: GoneProof,
    },
}

/// Whether a source has served memory to a guest that went before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// It did not.
    Never,
    /// It did, and nobody needs it any more.
    NoMore,
}

impl Effect {
    /// Returns the one spelling of this effect.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::TryAdmit => "try_admit",
            Self::ArmReceiver => "arm_receiver",
            Self::HoldGuest => "hold_guest",
            Self::ShutDownGuest => "shut_down_guest",
            Self::StartReceiver => "start_receiver",
            Self::RestartSource { .. } => "restart_source",
            Self::StartTransfer { .. } => "start_transfer",
            Self::StartPostcopy => "start_postcopy",
            Self::RecoverReceiver => "recover_receiver",
            Self::ResumeTransfer { .. } => "resume_transfer",
            Self::SetLimits { .. } => "set_limits",
            Self::OrderSwitchover => "order_switchover",
            Self::KillSource { .. } => "kill_source",
            Self::Commit => "commit",
            Self::ContinueDestination => "continue_destination",
            Self::ReleaseSource { .. } => "release_source",
            Self::CancelTransfer { .. } => "cancel_transfer",
            Self::DestroyReceiver { .. } => "destroy_receiver",
            Self::ResumeSource { .. } => "resume_source",
        }
    }

    /// Says whether a QEMU is started by it that boots the guest from its disks, so that whoever
    /// carries it out has to be told the VM's definition.
    #[must_use]
    pub const fn starts_from_disks(&self) -> bool {
        matches!(self, Self::StartReceiver | Self::RestartSource { .. })
    }

    /// Returns the agent that carries it out. `None` if the planner does so itself.
    #[must_use]
    pub const fn side(&self) -> Option<Side> {
        match self {
            Self::TryAdmit | Self::Commit => None,
            Self::ArmReceiver
            | Self::StartReceiver
            | Self::RecoverReceiver
            | Self::ContinueDestination
            | Self::DestroyReceiver { .. } => Some(Side::Destination),
            Self::HoldGuest
            | Self::ShutDownGuest
            | Self::RestartSource { .. }
            | Self::StartTransfer { .. }
            | Self::StartPostcopy
            | Self::ResumeTransfer { .. }
            | Self::SetLimits { .. }
            | Self::OrderSwitchover
            | Self::KillSource { .. }
            | Self::ReleaseSource { .. }
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
            | Phase::Captured {
                switchover: Switchover::Held { .. } | Switchover::Down { .. },
                ..
            } => true,
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
            Effect::ArmReceiver
            | Effect::HoldGuest
            | Effect::ShutDownGuest
            | Effect::StartReceiver
            | Effect::StartTransfer { .. }
            | Effect::StartPostcopy => true,
            Effect::RestartSource { .. }
            | Effect::TryAdmit
            | Effect::OrderSwitchover
            | Effect::RecoverReceiver
            | Effect::ResumeTransfer { .. }
            | Effect::SetLimits { .. }
            | Effect::KillSource { .. }
            | Effect::Commit
            | Effect::ContinueDestination
            | Effect::ReleaseSource { .. }
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
            Phase::Admitted { stage: Stage::Waiting { .. }, .. } => None,
            Phase::Admitted { stage: Stage::Transferring { listener }, .. } => {
                Some(Effect::StartTransfer { listener: listener.clone() })
            }
            Phase::Admitted { stage: Stage::Parting { .. }, .. } => Some(Effect::StartPostcopy),
            Phase::Admitted { stage: Stage::Recalling { cause }, .. } => {
                Some(Effect::CancelTransfer { cause: cause.to_string() })
            }
            Phase::Admitted { stage: Stage::Clearing { cause }, .. } => Some(destroy(cause)),
            Phase::Admitted { stage: Stage::Holding { .. }, .. } => Some(Effect::HoldGuest),
            Phase::Admitted { stage: Stage::ShuttingDown, .. } => Some(Effect::ShutDownGuest),
            Phase::Captured { switchover, .. } => match switchover {
                Switchover::Held { listener } => {
                    Some(Effect::StartTransfer { listener: listener.clone() })
                }
                Switchover::Withheld => None,
                Switchover::Down { .. } => Some(Effect::StartReceiver),
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
            Phase::Attached { .. } => Some(self.release()),
            Phase::RollingBack { back, cause, .. } => Some(match back {
                Back::Cancelling => Effect::CancelTransfer { cause: cause.to_string() },
                Back::Clearing | Back::Undoing | Back::PoweredOff => destroy(cause),
                Back::Resuming { gone } if self.method == Method::Cold => {
                    Effect::RestartSource { proof: gone.clone() }
                }
                Back::Resuming { gone } => Effect::ResumeSource { proof: gone.clone() },
            }),
            Phase::Failed { cleanup, cause, owner, .. } => match (cleanup, cause) {
                (Cleanup::Nothing | Cleanup::Undecided, _) => None,
                (Cleanup::Half, Cause::GuestLost { proof }) => Some(Effect::DestroyReceiver {
                    cause: cause.to_string(),
                    source_gone: Some(proof.clone()),
                }),
                (Cleanup::Receiver | Cleanup::Half, _) => Some(destroy(cause)),
                // No newer generation was given out that could release it.
                (Cleanup::Source, Cause::Severed { .. }) if *owner == self.source => {
                    Some(Effect::KillSource { cause: cause.to_string() })
                }
                (Cleanup::Source, _) => Some(self.release()),
            },
            Phase::Done { .. } | Phase::Aborted { .. } => None,
        }
    }

    fn release(&self) -> Effect {
        let serves = match self.method {
            Method::Postcopy => Serves::NoMore,
            Method::Precopy | Method::Snapshot | Method::Cold | Method::DiskCopy => Serves::Never,
        };
        Effect::ReleaseSource { serves }
    }
}

fn destroy(cause: &Cause) -> Effect {
    Effect::DestroyReceiver { cause: cause.to_string(), source_gone: None }
}
