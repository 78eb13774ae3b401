//! What waits, as values: starts for room, and transfers for a link.

use vmferry_planner_core::queue::slot::{Full, Holder, Kind, Limits, Wanted, grant};
use vmferry_planner_core::queue::{Priority, Ranking, Waiting, order};
use vmferry_types::{HostId, MigrationId, Millis, Seq, Timestamp, VmId};

use super::{Refused, Request};

/// A VM that is to be started, and waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedStart {
    /// Names the admission; the start that comes of it has the same.
    pub id: MigrationId,
    /// The caller's id of the request.
    pub request: Request,
    /// The VM.
    pub vm: VmId,
    /// The host that was asked for.
    pub asked_host: Option<HostId>,
    /// For whose sake.
    pub priority: Priority,
    /// Its optimistic lock.
    pub seq: Seq,
    /// When it was asked for, in microseconds since 1970.
    pub asked_us: u64,
    /// When room was first refused.
    pub blocked_since: Timestamp,
    /// Until when it may wait.
    pub deadline: Timestamp,
    /// Why it was last refused.
    pub note: String,
    /// When it ended.
    pub ended_us: Option<u64>,
    /// How it ended: the real text.
    pub outcome: String,
}

/// What became of a start that asked to wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueStart {
    /// It is a row.
    Queued(QueuedStart),
    /// The same request came before.
    Known(QueuedStart),
    /// It is no row.
    Refused(Refused),
}

/// A migration that has, or waits for, a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotRow {
    /// Which.
    pub id: MigrationId,
    /// From where.
    pub source: HostId,
    /// To where.
    pub destination: HostId,
    /// For whose sake.
    pub priority: Priority,
    /// When it was asked for, in microseconds since 1970.
    pub created_us: u64,
    /// Whether it has it.
    pub state: SlotState,
    /// Since when.
    pub since: Timestamp,
    /// When its driver last asked.
    pub seen: Timestamp,
}

/// Whether a migration has a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// It waits.
    Wanted,
    /// It has one.
    Held,
}

impl SlotState {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Wanted => "wanted",
            Self::Held => "held",
        }
    }

    /// Reads a label.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        [Self::Wanted, Self::Held].into_iter().find(|state| state.label() == label)
    }
}

/// Whether a migration may go on to transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// It may.
    Held,
    /// It waits, for all of these.
    Full(Vec<Full>),
}

/// Who waits and was not heard of for so long is passed over: its driver may be gone.
const SEEN_MAX: Millis = Millis(5_000);

/// Decides whether one of those that wait may go on, of all rows that have or want a link.
#[must_use]
pub fn slot_of(
    own: MigrationId,
    rows: &[SlotRow],
    limits: &Limits,
    ranking: &Ranking,
    now: Timestamp,
) -> Slot {
    let held = |row: &&SlotRow| row.state == SlotState::Held;
    let holders: Vec<Holder> = rows
        .iter()
        .filter(held)
        .map(|row| Holder {
            id: row.id,
            source: row.source.clone(),
            destination: row.destination.clone(),
            kind: Kind::Transferring,
            since: row.since,
        })
        .collect();
    let waits = |row: &&SlotRow| {
        row.state == SlotState::Wanted && (row.id == own || now.since(row.seen) <= SEEN_MAX)
    };
    let waiting: Vec<Waiting> = rows
        .iter()
        .filter(waits)
        .map(|row| Waiting {
            id: row.id,
            priority: row.priority,
            asked: Timestamp(row.created_us),
            blocked_since: None,
            deadline: Timestamp(u64::MAX),
            note: String::new(),
        })
        .collect();
    let wanted: Vec<Wanted> = order(&waiting, ranking)
        .iter()
        .filter_map(|place| rows.iter().find(|row| row.id == place.id))
        .map(|row| Wanted {
            id: row.id,
            source: row.source.clone(),
            destination: row.destination.clone(),
            kind: Kind::Transferring,
        })
        .collect();
    let granted = grant(limits, &holders, &wanted, now);
    if granted.go.contains(&own) {
        return Slot::Held;
    }
    let full = granted.wait.into_iter().find(|(id, _)| *id == own).map(|(_, full)| full);
    Slot::Full(full.unwrap_or_default())
}
