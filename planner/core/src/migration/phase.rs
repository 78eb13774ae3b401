//! How far a migration has come. Data lives in the phase where it is true.

use vmferry_types::{Generation, HostId, PhaseLabel, Timestamp};

use super::cause::Cause;
use super::proof::{GoneProof, Handover};

/// Where a receiver listens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Listener {
    /// The destination's migration address.
    pub address: String,
    /// The port.
    pub port: u16,
    /// What it can take.
    #[cfg_attr(feature = "serde", serde(default))]
    pub takes: Takes,
    /// A port beside it where anybody may knock to see whether there is a way: nobody may at the
    /// other. Zero if there is none.
    #[cfg_attr(feature = "serde", serde(default))]
    pub doorbell: u16,
}

impl Listener {
    /// A receiver that takes a guest whose memory has all arrived.
    #[must_use]
    pub const fn new(address: String, port: u16) -> Self {
        Self { address, port, takes: Takes::Precopy, doorbell: 0 }
    }
}

/// What a receiver can take, since both ends were set up for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Takes {
    /// A guest whose memory has all arrived.
    #[default]
    Precopy,
    /// Also one whose memory follows.
    Postcopy,
    /// The same, and what its guest waits for comes on a channel of its own.
    Preempt,
}

/// Since when, and why, a migration waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Blocked {
    /// When room was first refused; kept over later refusals and restarts.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub since: Timestamp,
    /// Why it was last refused.
    pub note: String,
}

/// How far an admitted migration is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Stage {
    /// The destination is starting its receiver; the source has heard of nothing.
    Arming,
    /// The receiver listens, and an operator's word is waited for; the source has heard of nothing.
    Waiting {
        /// Where the receiver listens.
        listener: Listener,
    },
    /// Memory crosses while the guest runs on the source.
    Transferring {
        /// Where the receiver listens.
        listener: Listener,
    },
    /// The same, and it was decided that the guest goes before its memory: the source has to stop it
    /// and to turn its transfer to postcopy.
    Parting {
        /// Where the receiver listens.
        listener: Listener,
    },
    /// The live transfer was refused, and the guest may be held instead: the source has to take its
    /// transfer back and say that its guest runs.
    Recalling {
        /// Why it was refused.
        cause: Cause,
    },
    /// The same, and the guest runs on: the receiver of the live transfer has to be proven gone
    /// before another one is armed.
    Clearing {
        /// Why it was refused.
        cause: Cause,
    },
    /// The guest was granted to be shut down: the source has to ask it to turn itself off.
    ShuttingDown,
    /// The receiver listens: the guest is to be held still before anything is sent.
    Holding {
        /// Where the receiver listens.
        listener: Listener,
    },
}

/// What was decided while the guest stands still on the source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Switchover {
    /// Not ordered: the guest is held, and its memory crosses. The source may still take it back by
    /// itself.
    Held {
        /// Where the receiver listens.
        listener: Listener,
    },
    /// Not ordered: a gate is closed. The source may still take it back by itself.
    Withheld,
    /// Ordered: from here the source may be sending its last.
    Ordered,
    /// Ordered, in doubt, and decided forward: the silent source is to be killed first.
    Forward,
    /// The guest is shut down, with its disks closed: it is to be started at the destination.
    Down {
        /// That nothing of it runs at the source.
        source: GoneProof,
    },
}

/// How the guest is doing where it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Guest {
    /// Its QEMU process is there.
    #[default]
    Present,
    /// It turned itself off.
    PoweredOff,
}

/// What is still to be undone, in the order that is safe (rule R10).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Back {
    /// Not ordered: the source has to take its transfer back and say that its guest runs.
    Cancelling,
    /// The guest runs on the source: the receiver has to go, from its agent's journal too.
    Clearing,
    /// Ordered: the receiver has to be proven gone before the source may go on.
    Undoing,
    /// The receiver is proven gone: the source has to go on.
    Resuming {
        /// The proof, which the source's agent asks for.
        gone: GoneProof,
    },
    /// The guest turned itself off on the source: the receiver has to go.
    PoweredOff,
}

/// What a failed migration still has to clear away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Cleanup {
    /// Nothing.
    Nothing,
    /// The receiver, which cannot carry the guest on.
    Receiver,
    /// The source's QEMU, whose guest went on elsewhere.
    Source,
    /// The destination's QEMU, whose guest lacks what the source's had, and then what is left of that.
    Half,
    /// Neither side's guest is known to be the right one: a human has to say. Nothing is touched.
    Undecided,
}

/// How far a migration has come.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", tag = "phase")
)]
pub enum Phase {
    /// Nothing is held yet.
    Queued {
        /// Since when and why there is no room. `None` until room was refused once.
        #[cfg_attr(feature = "serde", serde(default))]
        blocked: Option<Blocked>,
        /// Until when it may wait.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        deadline: Timestamp,
    },
    /// The destination is reserved; the guest runs on the source.
    Admitted {
        /// Where it goes.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// How far it is.
        stage: Stage,
    },
    /// The guest stands still on the source; nothing is lost.
    Captured {
        /// Where it goes.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// What was decided.
        switchover: Switchover,
    },
    /// The destination has everything and stands still.
    Restored {
        /// Where it goes.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// What both QEMUs said.
        proof: Handover,
    },
    /// Ownership is the destination's.
    Committed {
        /// Where it is.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// What both QEMUs said.
        proof: Handover,
        /// The generation under which the destination may run it.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
    },
    /// The guest was seen on the destination; the source has yet to let go.
    Attached {
        /// Where it is.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// What both QEMUs said.
        proof: Handover,
        /// The generation under which the destination runs it.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
        /// How it is doing.
        guest: Guest,
    },
    /// The source is proven gone.
    Done {
        /// Where it is.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// What both QEMUs said.
        proof: Handover,
        /// The generation under which the destination runs it.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
        /// How it was doing.
        guest: Guest,
        /// That the source's QEMU is gone.
        released: GoneProof,
    },
    /// Decided to go back; not all is undone yet.
    RollingBack {
        /// Where it was to go.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// The generation under which the source goes on.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
        /// Why.
        cause: Cause,
        /// What is still to be undone.
        back: Back,
    },
    /// The source owns the VM, as before.
    Aborted {
        /// Where it was to go. `None` if it never left the queue.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text_option", default))]
        destination: Option<HostId>,
        /// The generation under which the source runs it.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
        /// Why.
        cause: Cause,
        /// How the guest was doing.
        guest: Guest,
    },
    /// Loss is proven, or neither way is safe.
    Failed {
        /// Where it was to go.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        destination: HostId,
        /// The host that owns what is left of the VM.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
        owner: HostId,
        /// The generation of that ownership.
        #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
        generation: Generation,
        /// Why.
        cause: Cause,
        /// What had turned it back before. `None` if it failed on its way forward.
        #[cfg_attr(feature = "serde", serde(default))]
        first: Option<Cause>,
        /// What is still to be cleared away.
        cleanup: Cleanup,
    },
}

impl Phase {
    /// Returns the phase's label.
    #[must_use]
    pub const fn label(&self) -> PhaseLabel {
        match self {
            Self::Queued { .. } => PhaseLabel::Queued,
            Self::Admitted { .. } => PhaseLabel::Admitted,
            Self::Captured { .. } => PhaseLabel::Captured,
            Self::Restored { .. } => PhaseLabel::Restored,
            Self::Committed { .. } => PhaseLabel::Committed,
            Self::Attached { .. } => PhaseLabel::Attached,
            Self::Done { .. } => PhaseLabel::Done,
            Self::RollingBack { .. } => PhaseLabel::RollingBack,
            Self::Aborted { .. } => PhaseLabel::Aborted,
            Self::Failed { .. } => PhaseLabel::Failed,
        }
    }

    /// Returns the destination, once there is one.
    #[must_use]
    pub const fn destination(&self) -> Option<&HostId> {
        match self {
            Self::Queued { .. } => None,
            Self::Admitted { destination, .. }
            | Self::Captured { destination, .. }
            | Self::Restored { destination, .. }
            | Self::Committed { destination, .. }
            | Self::Attached { destination, .. }
            | Self::Done { destination, .. }
            | Self::RollingBack { destination, .. }
            | Self::Failed { destination, .. } => Some(destination),
            Self::Aborted { destination, .. } => destination.as_ref(),
        }
    }

    /// Returns why the migration goes back or ended without moving its guest.
    #[must_use]
    pub const fn cause(&self) -> Option<&Cause> {
        match self {
            Self::RollingBack { cause, .. }
            | Self::Aborted { cause, .. }
            | Self::Failed { cause, .. } => Some(cause),
            Self::Queued { .. }
            | Self::Admitted { .. }
            | Self::Captured { .. }
            | Self::Restored { .. }
            | Self::Committed { .. }
            | Self::Attached { .. }
            | Self::Done { .. } => None,
        }
    }

    /// Returns what both QEMUs said, once they did.
    #[must_use]
    pub const fn handover(&self) -> Option<&Handover> {
        match self {
            Self::Restored { proof, .. }
            | Self::Committed { proof, .. }
            | Self::Attached { proof, .. }
            | Self::Done { proof, .. } => Some(proof),
            Self::Queued { .. }
            | Self::Admitted { .. }
            | Self::Captured { .. }
            | Self::RollingBack { .. }
            | Self::Aborted { .. }
            | Self::Failed { .. } => None,
        }
    }
}
