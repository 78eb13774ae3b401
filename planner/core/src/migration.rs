//! One VM moving from one host to another, as a durable state machine.
//!
//! ```text
//! queued ─► admitted ─► captured ─► restored ─► committed ─► attached ─► done
//!    │          │           │           │            │            │
//!    │          └───────────┴───────────┴────────────┴─► rolling_back ─► aborted
//!    └─► aborted                            (only with proof)   (any, proven loss) ─► failed
//! ```
//!
//! A [`Migration`] is a value. [`apply`](Migration::apply) returns the next one and touches nothing
//! else; [`outstanding`](Migration::outstanding) says what the world is still owed, and
//! [`books`](Migration::books) what the store must hold true beside the row. All three read only
//! the row, so a planner that restarts goes on by loading it: there is no second path for recovery
//! to rot in.
//!
//! Commit first, then act: a row and its log entry are written with compare-and-set, and only then
//! does an effect leave the process.

mod answer;
mod books;
mod cause;
pub mod check;
mod divided;
mod downgrade;
mod effect;
mod event;
mod gates;
mod phase;
mod proof;
#[cfg(test)]
pub(crate) mod rows;
mod table;
mod terms;

pub use answer::{Limits, Tuning};
pub use books::{Books, Flight};
pub use cause::{Blocker, Cause};
pub use divided::Channel;
pub use downgrade::{Barred, Downgraded};
pub use effect::{Effect, Serves, Side};
pub use event::{Event, Keep, Ran, Receiver, Stood};
pub use gates::{Gate, GatePoint, Gates};
pub use phase::{Back, Blocked, Cleanup, Guest, Listener, Phase, Stage, Switchover, Takes};
pub use proof::{GoneProof, Handover, Process, ProofKind, SourceWord, Word};
pub use terms::{AutoConverge, Downgrade, NotConverging, Terms};

use vmferry_types::{Generation, HostId, Method, MigrationId, PhaseLabel, Timestamp, VmId};

/// One attempt to move one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Migration {
    /// Names this attempt.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub id: MigrationId,
    /// The VM that moves.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub vm: VmId,
    /// Where it runs when the migration is opened.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub source: HostId,
    /// How the guest is carried now.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::method"))]
    pub method: Method,
    /// The live attempt that this one came from. `None` while there was none.
    #[cfg_attr(feature = "serde", serde(default))]
    pub downgraded: Option<Downgraded>,
    /// The live method that QEMU does not let the guest move by, so that it is shut down instead.
    /// `None` if it goes as it was asked for.
    #[cfg_attr(feature = "serde", serde(default))]
    pub barred: Option<Barred>,
    /// Why a precopy will not converge, as it was last answered. `None` if nobody said so.
    #[cfg_attr(feature = "serde", serde(default))]
    pub diverged: Option<String>,
    /// What was done about that. Rows of before it was kept turned to postcopy, or waited.
    #[cfg_attr(feature = "serde", serde(default))]
    pub answered: Option<NotConverging>,
    /// The channel between the halves of a guest that goes before its memory.
    #[cfg_attr(feature = "serde", serde(default))]
    pub channel: Channel,
    /// How often it broke.
    #[cfg_attr(feature = "serde", serde(default))]
    pub breaks: u32,
    /// How the guest was when the migration was opened: one that was off stays off.
    #[cfg_attr(feature = "serde", serde(default))]
    pub found: Guest,
    /// What was asked for, and its limits.
    pub terms: Terms,
    /// The VM's generation when the migration was opened; nothing else may move it while this is open.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub generation: Generation,
    /// How far it has come.
    pub phase: Phase,
}

/// What a new migration is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Names the attempt.
    pub id: MigrationId,
    /// The VM that is to move.
    pub vm: VmId,
    /// Where it runs.
    pub source: HostId,
    /// How the guest is to be carried.
    pub method: Method,
    /// What is asked for, and its limits.
    pub terms: Terms,
    /// How the guest is.
    pub found: Guest,
    /// The VM's generation now.
    pub generation: Generation,
    /// Until when it may wait for room.
    pub deadline: Timestamp,
}

/// Says why a migration is not even opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOpened {
    /// This release does not carry guests that way.
    #[error("method {method} is not available: use precopy, postcopy, snapshot or cold")]
    MethodNotAvailable {
        /// The method that was asked for.
        method: Method,
    },
    /// The VM is stopped.
    #[error("a VM that is stopped has nothing to send by method {method}: use cold")]
    NothingToSend {
        /// The method that was asked for.
        method: Method,
    },
}

impl NotOpened {
    /// Returns the stable code of this refusal.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::MethodNotAvailable { .. } => "method_not_available",
            Self::NothingToSend { .. } => "nothing_to_send",
        }
    }
}

/// Says why an event does not change a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is late or known already: dropped.
    #[error("the event is late or known already")]
    Stale,
    /// It cannot happen here: a bug, counted.
    #[error("the event cannot happen in this phase")]
    Illegal,
    /// It was a request, and the guest is past the point where it could be granted.
    #[error("the migration is past the point of no return")]
    TooLate,
}

/// One entry of the log: an event, and what the row is after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What happened.
    pub event: Event,
    /// The row after it.
    pub after: Migration,
}

impl Migration {
    /// Opens a migration: a row that holds nothing yet.
    ///
    /// # Errors
    ///
    /// Refuses a method that this release does not carry out, by name.
    pub fn open(opening: Opening) -> Result<Self, NotOpened> {
        match opening.method {
            Method::Precopy | Method::Postcopy | Method::Snapshot | Method::Cold => {}
            method @ Method::DiskCopy => {
                return Err(NotOpened::MethodNotAvailable { method });
            }
        }
        if opening.found == Guest::PoweredOff && opening.method != Method::Cold {
            return Err(NotOpened::NothingToSend { method: opening.method });
        }
        let Opening { id, vm, source, method, terms, found, generation, deadline } = opening;
        let phase = Phase::Queued { blocked: None, deadline };
        Ok(Self {
            id,
            vm,
            source,
            method,
            downgraded: None,
            barred: None,
            diverged: None,
            answered: None,
            channel: Channel::Whole,
            breaks: 0,
            found,
            terms,
            generation,
            phase,
        })
    }

    /// Returns the migration after `event`.
    ///
    /// # Errors
    ///
    /// Says whether the event is stale (drop it), illegal (a bug: count it) or a request that came
    /// too late (tell the caller). The migration is as it was.
    pub fn apply(&self, event: &Event) -> Result<Self, Refusal> {
        let after = Self { phase: table::next(self, event)?, ..self.clone() };
        let after = after.divides(event).gates_after(event).answers(self, event);
        Ok(match self.turns_to_snapshot(&after.phase, event) {
            Some(downgraded) => {
                Self { method: Method::Snapshot, downgraded: Some(downgraded), ..after }
            }
            None => after,
        })
    }

    /// Applies `event` and all that follows from it at once, for one transaction.
    ///
    /// Where no gate is in the way, `restored` and `committed` are two log entries of one commit.
    ///
    /// # Errors
    ///
    /// As [`apply`](Self::apply), of the first event.
    pub fn advance(&self, event: Event) -> Result<Vec<Entry>, Refusal> {
        let mut after = self.apply(&event)?;
        let mut entries = vec![Entry { event, after: after.clone() }];
        while let Some(event) = after.follows() {
            let Ok(next) = after.apply(&event) else { break };
            entries.push(Entry { event, after: next.clone() });
            after = next;
        }
        Ok(entries)
    }

    /// Returns the event that is due by the row alone.
    #[must_use]
    pub fn follows(&self) -> Option<Event> {
        match self.outstanding() {
            Some(Effect::Commit) => Some(Event::CommitAllowed),
            Some(
                Effect::TryAdmit
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
                | Effect::KillSource { .. }
                | Effect::ContinueDestination
                | Effect::ReleaseSource { .. }
                | Effect::CancelTransfer { .. }
                | Effect::DestroyReceiver { .. }
                | Effect::ResumeSource { .. },
            )
            | None => None,
        }
    }

    /// Returns the phase's label.
    #[must_use]
    pub const fn label(&self) -> PhaseLabel {
        self.phase.label()
    }

    /// Returns the destination, once there is one.
    #[must_use]
    pub const fn destination(&self) -> Option<&HostId> {
        self.phase.destination()
    }
}

#[cfg(test)]
mod tests;
