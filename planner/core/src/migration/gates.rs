//! Where a migration waits for an operator's word.

use std::fmt;

use super::event::Event;
use super::phase::Switchover;
use super::{Migration, Phase, Stage};

/// Whether a migration goes on by itself at one point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Gate {
    /// It goes on.
    #[default]
    Open,
    /// It waits for an operator's word.
    Closed,
}

/// The points where a migration may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Gates {
    /// Before anything is sent, the receiver being ready: the guest runs meanwhile.
    #[cfg_attr(feature = "serde", serde(default))]
    pub start: Gate,
    /// Before the switchover is ordered: the guest stands still meanwhile.
    pub switchover: Gate,
    /// Before ownership moves: the guest stands still meanwhile.
    pub commit: Gate,
}

impl Gates {
    /// No waiting anywhere.
    pub const OPEN: Self = Self { start: Gate::Open, switchover: Gate::Open, commit: Gate::Open };

    /// Waiting wherever that is possible.
    pub const CLOSED: Self =
        Self { start: Gate::Closed, switchover: Gate::Closed, commit: Gate::Closed };

    /// Returns whether one of them is closed.
    #[must_use]
    pub const fn at(self, point: GatePoint) -> Gate {
        match point {
            GatePoint::Start => self.start,
            GatePoint::Switchover => self.switchover,
            GatePoint::Commit => self.commit,
        }
    }

    /// Closes one of them.
    #[must_use]
    pub const fn closed_at(self, point: GatePoint) -> Self {
        match point {
            GatePoint::Start => Self { start: Gate::Closed, ..self },
            GatePoint::Switchover => Self { switchover: Gate::Closed, ..self },
            GatePoint::Commit => Self { commit: Gate::Closed, ..self },
        }
    }
}

/// One point where a migration may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum GatePoint {
    /// The receiver is ready, and nothing is sent.
    Start,
    /// The guest stands still at the source, and nothing is ordered.
    Switchover,
    /// The destination has everything, and the guest is the source's.
    Commit,
}

impl GatePoint {
    /// All of them, in the order in which a migration comes to them.
    pub const ALL: [Self; 3] = [Self::Start, Self::Switchover, Self::Commit];

    /// Returns the one spelling of this point.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Switchover => "switchover",
            Self::Commit => "commit",
        }
    }

    /// Reads a label; `None` if there is no such point.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|point| point.label() == label)
    }
}

impl fmt::Display for GatePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl Migration {
    /// Returns the gate that this migration waits at, if it does.
    #[must_use]
    pub const fn waits_at(&self) -> Option<GatePoint> {
        match &self.phase {
            Phase::Admitted { stage: Stage::Waiting { .. }, .. } => Some(GatePoint::Start),
            Phase::Captured { switchover: Switchover::Withheld, .. } => Some(GatePoint::Switchover),
            Phase::Restored { .. } => match self.terms.gates.commit {
                Gate::Open => None,
                Gate::Closed => Some(GatePoint::Commit),
            },
            Phase::Queued { .. }
            | Phase::Admitted {
                stage:
                    Stage::Arming
                    | Stage::Transferring { .. }
                    | Stage::Parting { .. }
                    | Stage::Recalling { .. }
                    | Stage::Clearing { .. }
                    | Stage::ShuttingDown
                    | Stage::Holding { .. },
                ..
            }
            | Phase::Captured {
                switchover:
                    Switchover::Held { .. }
                    | Switchover::Down { .. }
                    | Switchover::Ordered
                    | Switchover::Forward,
                ..
            }
            | Phase::Committed { .. }
            | Phase::Attached { .. }
            | Phase::Done { .. }
            | Phase::RollingBack { .. }
            | Phase::Aborted { .. }
            | Phase::Failed { .. } => None,
        }
    }

    /// Returns the event by which an operator opens `point`, if it is waited at.
    #[must_use]
    pub fn opens(&self, point: GatePoint) -> Option<Event> {
        let event = match point {
            GatePoint::Start => Event::StartAllowed,
            GatePoint::Switchover => Event::SwitchoverAllowed,
            GatePoint::Commit => Event::CommitAllowed,
        };
        (self.waits_at() == Some(point)).then_some(event)
    }

    /// Notes what `event` says of the gates, beside the phase.
    pub(super) fn gates_after(self, event: &Event) -> Self {
        if matches!(event, Event::GatesOpened) {
            let terms = super::Terms { gates: Gates::OPEN, ..self.terms };
            return Self { terms, ..self };
        }
        self
    }
}
