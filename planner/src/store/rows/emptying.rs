//! What empties a host, as values.

use serde::{Deserialize, Serialize};
use vmferry_planner_core::lifecycle::emptiness::Presence;
use vmferry_planner_core::lifecycle::request::{Asked, Denied};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, EmptyingId};
use vmferry_types::{Claim, HostId, Seq, Timestamp};

use super::Cordon;
use crate::store::StoreError;

/// A maintenance job, drain or retirement as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmptyingRow {
    /// The machine.
    pub emptying: Emptying,
    /// What is kept beside it.
    pub notes: EmptyingNotes,
    /// Counts its drivers: a write names the one that it was decided under.
    pub claim: Claim,
    /// Its optimistic lock.
    pub seq: Seq,
    /// Who drives it.
    pub lease_owner: Option<String>,
    /// Until when nobody else may.
    pub lease_until: Timestamp,
    /// When it was opened, in microseconds since 1970.
    pub created_us: u64,
    /// When it last changed.
    pub updated_us: u64,
    /// When nothing more could become of it.
    pub ended_us: Option<u64>,
}

impl EmptyingRow {
    /// Returns its id.
    #[must_use]
    pub const fn id(&self) -> EmptyingId {
        self.emptying.id()
    }

    /// Returns the row as it is once `changes` are written.
    ///
    /// # Errors
    ///
    /// Fails if the machine does not take one of them: a bug of whoever decided it.
    pub fn after(&self, changes: &[EmptyingChange], now_us: u64) -> Result<Self, StoreError> {
        let mut row = Self { updated_us: now_us, ..self.clone() };
        for change in changes {
            let after = row.emptying.apply(&change.event);
            let after = after.map_err(|source| StoreError::Emptying { source })?;
            if after != change.after {
                return Err(StoreError::Emptying {
                    source: vmferry_planner_core::lifecycle::Refusal::Illegal,
                });
            }
            row.emptying = after;
            row.seq = row.seq.next();
        }
        row.ended_us = row.emptying.is_over().then(|| row.ended_us.unwrap_or(now_us));
        Ok(row)
    }

    /// Returns the row of one that was just opened.
    #[must_use]
    pub fn opened(new: &NewEmptying, now_us: u64) -> Self {
        Self {
            emptying: new.emptying.clone(),
            notes: EmptyingNotes { boot_id: new.boot_id.clone() },
            claim: Claim::FIRST,
            seq: Seq::FIRST,
            lease_owner: None,
            lease_until: Timestamp(0),
            created_us: now_us,
            updated_us: now_us,
            ended_us: None,
        }
    }
}

/// What is kept beside the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EmptyingNotes {
    /// The boot of the host when it was opened: under another one, what ran there then is gone.
    pub boot_id: String,
}

/// One change: an event, and the machine after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmptyingChange {
    /// What happened.
    pub event: EmptyingEvent,
    /// The machine after it.
    pub after: Emptying,
}

/// That a migration is begun for the sake of an emptying: written with the migration, or neither is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BegunFor {
    /// The row that it was decided on.
    pub row: EmptyingRow,
    /// The change that names the migration.
    pub change: EmptyingChange,
}

/// One that asks to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEmptying {
    /// The opened machine.
    pub emptying: Emptying,
    /// What happens to it at once.
    pub changes: Vec<EmptyingChange>,
    /// The boot that its host last reported from.
    pub boot_id: String,
}

/// What somebody asks of a host, decided under its lock.
#[derive(Clone, Debug)]
pub struct AskHost {
    /// The host.
    pub host: HostId,
    /// What is asked.
    pub asked: Asked,
    /// Whether its agent answers.
    pub presence: Presence,
    /// Who asks.
    pub by: String,
    /// The cordon to be held.
    pub cordon: Option<Cordon>,
    /// What is to be opened.
    pub opens: Option<NewEmptying>,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostAnswer {
    /// It is done.
    Done(Box<HostDone>),
    /// It may not be done now: what is there first is named.
    Denied(Denied),
    /// There is no such host.
    UnknownHost,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostDone {
    /// What was opened.
    pub opened: Option<EmptyingRow>,
    /// The plan that was superseded, or the drain that was cancelled.
    pub ended: Option<EmptyingRow>,
    /// Whose cordons were lifted.
    pub lifted: Vec<String>,
}

/// What became of an attempt to drive an emptying.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeEmptying {
    /// It is the caller's, under a claim of its own.
    Taken(Box<EmptyingRow>),
    /// Another driver's lease holds.
    Busy,
    /// Nothing is owed now.
    Ended,
}

/// One entry of its log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmptyingLogRow {
    /// Its place.
    pub seq: Seq,
    /// When, in microseconds since 1970.
    pub at_us: u64,
    /// The event's label; `opened` for the first.
    pub event: String,
    /// The phase that it led to.
    pub phase: String,
    /// The event as JSON, enough to replay it; of `opened`, the machine itself.
    pub body: String,
}

/// Which emptyings to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmptyingFilter {
    /// Only those of this host.
    pub host: Option<HostId>,
    /// Which of them.
    pub which: Which,
}

/// Which emptyings are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All that ever were.
    #[default]
    All,
    /// Those that are not over.
    Open,
    /// Those that something is owed of.
    Driven,
}
