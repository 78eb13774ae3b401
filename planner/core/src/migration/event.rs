//! What can happen to a migration, each with the evidence that it needs.

use vmferry_types::{Generation, HostId, Timestamp};

use super::answer::Limits;
use super::cause::Blocker;
use super::phase::Listener;
use super::proof::{GoneProof, Handover};

/// Whether the receiver can carry the guest on when the source's QEMU is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Receiver {
    /// It has everything, and the source did not run on after: with what both said.
    Complete(Handover),
    /// It lacks something, is gone too, or has what the source has since left behind.
    Incomplete,
}

/// Whether a receiver that is gone may have run the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Ran {
    /// It was never continued: its agent's journal is the proof.
    Never,
    /// It was continued, or nobody can tell.
    Maybe,
}

/// Whether the guest stood still for a transfer that was given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Stood {
    /// It ran all the time, as far as the source's agent saw.
    No,
    /// It did, or nobody can tell.
    #[default]
    Yes,
}

/// What happened to a migration.
///
/// Observations are levels: the same fact may be told twice, late, or by another planner. An event
/// of the two agents is made by [`evidence::read`](crate::evidence::read) only, from what they
/// answered under the driver's claim.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "event")
)]
pub enum Event {
    /// Room was found and reserved, in the transaction that commits this.
    Granted {
        /// Where.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
    },
    /// No host has room now.
    NoRoom {
        /// When it was found so.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        at: Timestamp,
        /// Why.
        note: String,
    },
    /// The request's deadline for finding room has passed.
    QueueExpired,
    /// Placement, preflight, arming or the start of the transfer was refused.
    Refused {
        /// All reasons.
        blockers: Vec<Blocker>,
    },
    /// Someone asked to take it back.
    CancelRequested,
    /// The receiver listens.
    ReceiverArmed {
        /// Where.
        listener: Listener,
    },
    /// The source's guest is held: it stands still on purpose, and stays so over restarts.
    SourceHeld,
    /// The source's guest stands still at the switchover, which is not ordered.
    SourceStopped,
    /// An operator opened the gate before the switchover.
    SwitchoverAllowed,
    /// Nothing, or no longer anything, keeps ownership from moving.
    CommitAllowed,
    /// Both QEMUs of this attempt said that all has arrived.
    BothComplete {
        /// What they said.
        proof: Handover,
    },
    /// The source took the transfer back, not ordered, and refuses an order from now on.
    SourceGaveUp {
        /// Why.
        error: String,
        /// Whether the guest stood still for it.
        #[cfg_attr(feature = "serde", serde(default))]
        stood: Stood,
    },
    /// QEMU gave this attempt's transfer up.
    TransferFailed {
        /// Why.
        error: String,
        /// Whether the guest stood still for it.
        #[cfg_attr(feature = "serde", serde(default))]
        stood: Stood,
    },
    /// The source's guest runs although it is held, or the switchover was ordered.
    SourceRunsAgain {
        /// What QEMU said.
        error: String,
    },
    /// The time limit to reach the switchover has passed.
    TransferTimedOut,
    /// The switchover is overdue, both sides were asked, and the source can go on.
    DecidedBack,
    /// The switchover is overdue, both sides were asked, the source is silent and the receiver complete.
    DecidedForward,
    /// The source's QEMU is proven gone.
    SourceGone {
        /// How it is known.
        proof: GoneProof,
        /// Whether the receiver can carry the guest on.
        receiver: Receiver,
    },
    /// The guest turned itself off where it may run.
    GuestPoweredOff {
        /// How it is known.
        proof: GoneProof,
    },
    /// The destination's QEMU is proven gone.
    ReceiverGone {
        /// How it is known.
        proof: GoneProof,
        /// Whether it may have run the guest.
        ran: Ran,
    },
    /// The guest was seen on the destination: its vCPUs run, which QEMU grants only with disks writable.
    DestinationRuns,
    /// The source's QEMU, whose guest went on elsewhere, is proven gone.
    SourceReleased {
        /// How it is known.
        proof: GoneProof,
    },
    /// The guest was seen to run on the source, which will not send any more.
    SourceContinued,
    /// An agent knows a newer owner of the VM than this row: the store is older than what happened.
    /// A human has looked, and says that the row is over.
    Overtaken {
        /// Who knows it.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        host: HostId,
        /// The generation that it knows.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        known: Generation,
    },
    /// The guest is to go first, and its memory to follow: its first pass is over, or a precopy that
    /// may be turned to that does not converge.
    PostcopyDue {
        /// Why a precopy is turned. `None` if postcopy was asked for.
        verdict: Option<String>,
    },
    /// The guest is divided over two QEMUs, and what one of them had can reach the other no more.
    Severed {
        /// Why not.
        error: String,
    },
    /// Both halves of a divided guest say that the channel between them is broken.
    ChannelBroke,
    /// Both go on: nothing had to be sent anew that had arrived.
    ChannelMended,
    /// An operator opened the gate before the transfer.
    StartAllowed,
    /// An operator opened all gates that are left.
    GatesOpened,
    /// No operator opened the gate in time.
    GateExpired,
    /// A precopy will not converge, as its source's agent sees it pass by pass. What is done about
    /// that follows from the terms; to turn it to postcopy is an event of its own.
    Diverges {
        /// Why not.
        verdict: String,
    },
    /// Someone changed the limits of the transfer.
    LimitsSet {
        /// What they are from now on.
        limits: Limits,
    },
    /// The guest turned itself off at the source, as it was asked to for its move, or was off before:
    /// nothing of it runs, and its disks are closed.
    SourceShutDown {
        /// How it is known.
        proof: GoneProof,
    },
    /// The guest was asked to turn itself off, and runs on though its time for that has passed.
    ShutdownRefused,
    /// A human has looked and says which side's guest is the right one.
    Resolved {
        /// Which.
        keep: Keep,
    },
}

/// Which side of an undecided migration is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Keep {
    /// The source's guest, which stands still, goes on.
    Source,
    /// None: what is left is ended, and the VM may be started from its disks.
    Neither,
}

impl Event {
    /// Returns the one spelling of this event.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Granted { .. } => "granted",
            Self::NoRoom { .. } => "no_room",
            Self::QueueExpired => "queue_expired",
            Self::Refused { .. } => "refused",
            Self::CancelRequested => "cancel_requested",
            Self::ReceiverArmed { .. } => "receiver_armed",
            Self::SourceHeld => "source_held",
            Self::SourceStopped => "source_stopped",
            Self::SwitchoverAllowed => "switchover_allowed",
            Self::CommitAllowed => "commit_allowed",
            Self::BothComplete { .. } => "both_complete",
            Self::SourceGaveUp { .. } => "source_gave_up",
            Self::TransferFailed { .. } => "transfer_failed",
            Self::SourceRunsAgain { .. } => "source_runs_again",
            Self::TransferTimedOut => "transfer_timed_out",
            Self::DecidedBack => "decided_back",
            Self::DecidedForward => "decided_forward",
            Self::SourceGone { .. } => "source_gone",
            Self::GuestPoweredOff { .. } => "guest_powered_off",
            Self::ReceiverGone { .. } => "receiver_gone",
            Self::DestinationRuns => "destination_runs",
            Self::SourceReleased { .. } => "source_released",
            Self::SourceContinued => "source_continued",
            Self::Overtaken { .. } => "overtaken",
            Self::PostcopyDue { .. } => "postcopy_due",
            Self::Severed { .. } => "severed",
            Self::ChannelBroke => "channel_broke",
            Self::ChannelMended => "channel_mended",
            Self::StartAllowed => "start_allowed",
            Self::GatesOpened => "gates_opened",
            Self::GateExpired => "gate_expired",
            Self::Diverges { .. } => "diverges",
            Self::LimitsSet { .. } => "limits_set",
            Self::SourceShutDown { .. } => "source_shut_down",
            Self::ShutdownRefused => "shutdown_refused",
            Self::Resolved { .. } => "resolved",
        }
    }
}
