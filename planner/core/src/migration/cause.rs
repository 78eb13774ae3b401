//! Why a migration did not move its guest.

use std::fmt;

use vmferry_types::{Generation, HostId, Millis};

use super::gates::GatePoint;
use super::proof::GoneProof;

/// One reason why something cannot be done.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Blocker {
    /// Stable, for programs: `disk_not_shared`, `missing_bridge`, …
    pub code: String,
    /// For people: what is wrong, with which object, and what to do.
    pub message: String,
    /// The host that it is true of. `None` if it is true of the VM.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text_option", default))]
    pub host: Option<HostId>,
}

/// Why a migration goes back, or ended without moving its guest: the real text, never a fixed label.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Cause {
    /// It was asked for.
    Cancelled,
    /// No room was found until the request's deadline.
    CapacityWaitExpired {
        /// Why there was none.
        note: String,
    },
    /// A check refused it.
    Refused {
        /// All reasons.
        blockers: Vec<Blocker>,
    },
    /// The source's agent took it back by itself: no driver heard, no byte moved, out of time.
    GaveUp {
        /// What the agent said.
        error: String,
    },
    /// QEMU gave the transfer up.
    TransferFailed {
        /// What QEMU said.
        error: String,
    },
    /// The source resumed by itself after the order: only back is left (rules R4, R10).
    SourceRanAgain {
        /// What QEMU said.
        error: String,
    },
    /// The guest writes to its memory faster than that is sent.
    NotConverging {
        /// What the source's agent saw.
        verdict: String,
    },
    /// It did not reach the switchover in time.
    TransferTimedOut,
    /// No operator opened the gate that it waited at in time.
    GateExpired {
        /// Which.
        gate: GatePoint,
    },
    /// The ordered switchover did not end in time, and was decided back.
    SwitchoverOverdue,
    /// The guest was asked to turn itself off and did not, within its time for that.
    ShutdownRefused {
        /// How long it had.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        limit: Millis,
    },
    /// The receiver is gone, and never ran the guest.
    ReceiverLost {
        /// How it is known.
        proof: GoneProof,
    },
    /// The guest turned itself off on the source.
    GuestPoweredOff {
        /// How it is known.
        proof: GoneProof,
    },
    /// The source's QEMU is gone and no receiver has everything: the guest is lost.
    GuestLost {
        /// How it is known.
        proof: GoneProof,
    },
    /// The guest was divided over two QEMUs, and what one of them had can reach the other no more.
    Severed {
        /// Why not.
        error: String,
    },
    /// The guest went on at the destination, and its QEMU there is gone.
    GuestCrashed {
        /// How it is known.
        proof: GoneProof,
    },
    /// The receiver is gone and was continued before its row was committed: neither way is safe.
    RanUncommitted {
        /// How it is known.
        proof: GoneProof,
    },
    /// The store was older than what happened: nothing that the row says is true any more.
    Overtaken {
        /// The host whose agent knows better.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        host: HostId,
        /// The generation that it knows.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        known: Generation,
    },
}

impl Cause {
    /// Returns the one spelling of this cause, for programs.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::CapacityWaitExpired { .. } => "capacity_wait_expired",
            Self::Refused { .. } => "refused",
            Self::GaveUp { .. } => "gave_up",
            Self::TransferFailed { .. } => "transfer_failed",
            Self::SourceRanAgain { .. } => "source_ran_again",
            Self::NotConverging { .. } => "not_converging",
            Self::TransferTimedOut => "transfer_timed_out",
            Self::GateExpired { .. } => "gate_expired",
            Self::SwitchoverOverdue => "switchover_overdue",
            Self::ShutdownRefused { .. } => "shutdown_refused",
            Self::ReceiverLost { .. } => "receiver_lost",
            Self::GuestPoweredOff { .. } => "guest_powered_off",
            Self::GuestLost { .. } => "guest_lost",
            Self::Severed { .. } => "postcopy_lost",
            Self::GuestCrashed { .. } => "guest_crashed",
            Self::RanUncommitted { .. } => "ran_uncommitted",
            Self::Overtaken { .. } => "overtaken",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled => f.write_str("cancelled as asked"),
            Self::CapacityWaitExpired { note } => {
                write!(f, "capacity_wait_expired: no room until the deadline: {note}")
            }
            Self::Refused { blockers } => {
                for (at, blocker) in blockers.iter().enumerate() {
                    let separator = if at == 0 { "" } else { "; " };
                    write!(f, "{separator}{}: {}", blocker.code, blocker.message)?;
                }
                Ok(())
            }
            Self::GaveUp { error } => write!(f, "the source's agent gave up: {error}"),
            Self::TransferFailed { error } => write!(f, "the transfer failed: {error}"),
            Self::SourceRanAgain { error } => {
                write!(f, "the source resumed by itself during the switchover: {error}")
            }
            Self::NotConverging { verdict } => f.write_str(verdict),
            Self::TransferTimedOut => {
                f.write_str("the transfer did not reach the switchover within its time limit")
            }
            Self::GateExpired { gate } => {
                write!(f, "nobody opened the {gate} gate within its time limit")
            }
            Self::SwitchoverOverdue => {
                f.write_str("the switchover did not end within its time limit")
            }
            Self::ShutdownRefused { limit } => write!(
                f,
                "shutdown_refused: the guest was asked to power off and runs on after {} ms; it may still do so",
                limit.value()
            ),
            Self::ReceiverLost { proof } => write!(f, "the receiver was lost: {proof}"),
            Self::GuestPoweredOff { proof } => write!(f, "the guest powered off: {proof}"),
            Self::GuestLost { proof } => write!(f, "the guest was lost: {proof}"),
            Self::Severed { error } => {
                write!(f, "the guest was divided over two hosts, and one half is lost: {error}")
            }
            Self::GuestCrashed { proof } => {
                write!(f, "the guest went on at the destination and crashed there: {proof}")
            }
            Self::RanUncommitted { proof } => {
                write!(f, "the receiver was continued before ownership moved, and is gone: {proof}")
            }
            Self::Overtaken { host, known } => write!(
                f,
                "host {host} knows generation {known} of the VM: the store was older than what happened, and an operator closed the migration"
            ),
        }
    }
}
