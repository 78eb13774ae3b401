//! What a migration was asked for, and its limits.

use vmferry_types::{BytesPerSec, HostId, Millis};

use super::gates::Gates;

/// What a migration was asked for. Defaults are filled in when it is opened; the limits of its transfer
/// may change after.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Terms {
    /// The destination that the caller named. `None` leaves the choice to placement.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text_option", default))]
    pub asked_destination: Option<HostId>,
    /// How long the guest may stand still, not ordered, while the source's agent hears no driver.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub hold_limit: Millis,
    /// How long QEMU may plan to let the guest stand still.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub downtime_limit: Millis,
    /// Past it, a transfer that has not reached the switchover is taken back.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub transfer_timeout: Millis,
    /// A transfer that moves no byte for this long is taken back by the source's agent.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub stall_limit: Millis,
    /// Past it, an ordered switchover that has not ended is in doubt, and decided (rule R10).
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub switchover_limit: Millis,
    /// Cap on the transfer; zero is none.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub max_bandwidth: BytesPerSec,
    /// Whether QEMU may slow the guest down so that the transfer converges.
    pub auto_converge: AutoConverge,
    /// Where the migration waits for an operator's word.
    pub gates: Gates,
    /// How long it waits at each of them before it is taken back.
    #[cfg_attr(
        feature = "serde",
        serde(with = "crate::record::number", default = "gate_deadline_of_old_rows")
    )]
    pub gate_deadline: Millis,
    /// What may be done if the live transfer is refused. Rows of before it was asked for say no.
    #[cfg_attr(feature = "serde", serde(default))]
    pub downgrade: Downgrade,
    /// How long a guest that is to be shut down has to turn itself off.
    #[cfg_attr(
        feature = "serde",
        serde(with = "crate::record::number", default = "Terms::shutdown_limit_of_before")
    )]
    pub shutdown_limit: Millis,
    /// What is done if a precopy does not converge. Rows of before it was asked for let it run out.
    #[cfg_attr(feature = "serde", serde(default))]
    pub not_converging: NotConverging,
}

/// Rows of before there was one wait at no gate.
#[cfg(feature = "serde")]
const fn gate_deadline_of_old_rows() -> Millis {
    Millis(600_000)
}

impl Terms {
    /// What rows of before it was asked for allow: none of them shuts a guest down.
    #[cfg(feature = "serde")]
    const fn shutdown_limit_of_before() -> Millis {
        Millis(120_000)
    }
}

/// What is done if a precopy does not converge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum NotConverging {
    /// It is taken back, or held instead if it may be downgraded.
    #[default]
    Abort,
    /// It goes on until its time limit: the guest may calm down, or its limits be changed.
    Wait,
    /// The guest is slowed down until it does.
    AutoConverge,
    /// The guest is held while its memory crosses.
    Pause,
    /// It is turned to postcopy, if both ends can do that.
    Postcopy,
}

impl NotConverging {
    /// Every answer.
    pub const ALL: [Self; 5] =
        [Self::Abort, Self::AutoConverge, Self::Postcopy, Self::Pause, Self::Wait];

    /// Names every answer, for whoever asked for another one.
    pub const LABELS: &'static str = "abort, auto_converge, postcopy, pause, wait";

    /// Returns the one spelling of this value.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Wait => "wait",
            Self::AutoConverge => "auto_converge",
            Self::Pause => "pause",
            Self::Postcopy => "postcopy",
        }
    }

    /// Reads a label; `None` if there is no such value.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|value| value.label() == label)
    }
}

/// What may be done if a live transfer is refused before the guest was touched (rule R5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Downgrade {
    /// Nothing: the migration ends, and the guest stays where it is.
    #[default]
    Never,
    /// The guest may be held still while its memory crosses.
    Snapshot,
    /// The guest may be shut down, where QEMU names something that lets it move in no other way: this
    /// is the grant to do so (rule R8).
    Cold,
}

impl Downgrade {
    /// Says whether the guest may be held while its memory crosses. Whoever may shut it down may.
    #[must_use]
    pub const fn may_hold(self) -> bool {
        match self {
            Self::Never => false,
            Self::Snapshot | Self::Cold => true,
        }
    }

    /// Says whether it may be so where nobody asks for it: what shuts a guest down has to be granted
    /// for each VM (rule R8).
    #[must_use]
    pub const fn may_be_default(self) -> bool {
        match self {
            Self::Never | Self::Snapshot => true,
            Self::Cold => false,
        }
    }

    /// Returns the one spelling of this value.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Snapshot => "snapshot",
            Self::Cold => "cold",
        }
    }

    /// Reads a label; `None` if there is no such value.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        [Self::Never, Self::Snapshot, Self::Cold].into_iter().find(|value| value.label() == label)
    }
}

/// Whether QEMU may slow a guest down that dirties memory faster than it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum AutoConverge {
    /// It may not.
    Off,
    /// It may.
    On,
}
