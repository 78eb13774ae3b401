//! Who waits for what, and who is served first.
//!
//! Two things are waited for. A request without room is a row in the queue: [`order`] says in which
//! order rows are tried. Rows are tried one after another, and one that fits is not held up by an
//! older one that does not; so the order decides only between those that want the same room. A
//! migration that has room may still wait for a [`slot`]: links and hosts carry only so many at a
//! time.
//!
//! Nothing here is stored: position and reason are made anew from the rows, for whoever asks.

pub mod slot;

use std::collections::BTreeMap;
use std::fmt;

use vmferry_types::{MigrationId, Millis, Timestamp};

/// For whose sake a request waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Priority {
    /// A maintenance job's: somebody stands beside the machine.
    Maintenance,
    /// A drain's or a retirement's.
    Drain,
    /// An operator's own.
    #[default]
    Operator,
}

impl Priority {
    /// Every priority.
    pub const ALL: &'static [Self] = &[Self::Maintenance, Self::Drain, Self::Operator];

    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Maintenance => "maintenance",
            Self::Drain => "drain",
            Self::Operator => "operator",
        }
    }

    /// Reads a label; `None` if there is no such priority.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.label() == label)
    }
}

/// Which priorities come first: a policy, and each is in it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranking([Priority; 3]);

/// A ranking that names one priority twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{twice} is ranked twice: name maintenance, drain and operator once each", twice = .0.label())]
pub struct RankedTwice(pub Priority);

impl Ranking {
    /// Ranks the priorities, first first.
    ///
    /// # Errors
    ///
    /// Names a priority that is there twice; another one is then missing.
    pub fn new(first_first: [Priority; 3]) -> Result<Self, RankedTwice> {
        let [first, second, third] = first_first;
        if first == second || first == third {
            return Err(RankedTwice(first));
        }
        if second == third {
            return Err(RankedTwice(second));
        }
        Ok(Self(first_first))
    }

    fn rank(&self, of: Priority) -> usize {
        self.0.iter().position(|one| *one == of).unwrap_or(self.0.len())
    }
}

impl Default for Ranking {
    /// Maintenance before drains before operators.
    fn default() -> Self {
        Self([Priority::Maintenance, Priority::Drain, Priority::Operator])
    }
}

/// A request that waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Names the request.
    pub id: MigrationId,
    /// For whose sake.
    pub priority: Priority,
    /// When it was asked. Kept over every refusal and restart.
    pub asked: Timestamp,
    /// When room was first refused; `None` if it was not yet.
    pub blocked_since: Option<Timestamp>,
    /// Until when it may wait.
    pub deadline: Timestamp,
    /// Why it was last refused, in words and figures.
    pub note: String,
}

/// How the note of a migration begins that has room, and waits only for its own job's limit.
const OWN_LIMIT: &str = "max_parallel";

/// Says that a migration has room, and waits until fewer of its job are at it.
#[must_use]
pub fn note_of_own_limit(emptying: &str, running: u32, max: u32) -> String {
    format!("{OWN_LIMIT}: {running} of {max} migrations of {emptying} are at it")
}

/// Says whether a note tells that a migration waits only for its own job's limit: its turn is next,
/// and nobody of that job is begun before it.
#[must_use]
pub fn waits_for_own_limit(note: &str) -> bool {
    note.strip_prefix(OWN_LIMIT).is_some_and(|rest| rest.starts_with(':'))
}

/// Where a request stands in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which request.
    pub id: MigrationId,
    /// Its position, the first being 1.
    pub position: u32,
    /// How many wait.
    pub of: u32,
    /// How many of those before it are there for a higher priority, not for their age.
    pub outranked_by: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} in the queue", self.position, self.of)?;
        match self.outranked_by {
            0 => Ok(()),
            some => write!(f, ", {some} of a higher priority before it"),
        }
    }
}

/// Returns the queue in the order in which its rows are tried: by priority, oldest first within one,
/// then by id, so that the same rows are always in the same order.
#[must_use]
pub fn order(waiting: &[Waiting], ranking: &Ranking) -> Vec<Place> {
    let mut sorted: Vec<&Waiting> = waiting.iter().collect();
    sorted.sort_by_key(|one| (ranking.rank(one.priority), one.asked, one.id));
    let mut before: BTreeMap<usize, u32> = BTreeMap::new();
    for one in waiting {
        *before.entry(ranking.rank(one.priority)).or_default() += 1;
    }
    let of = u32::try_from(waiting.len()).unwrap_or(u32::MAX);
    (1u32..)
        .zip(sorted)
        .map(|(position, one)| {
            let rank = ranking.rank(one.priority);
            let outranked_by = before.range(..rank).map(|(_, count)| count).sum();
            Place { id: one.id, position, of, outranked_by }
        })
        .collect()
}

/// Says in one line since when, for what and how long still a request waits.
#[must_use]
pub fn told(waiting: &Waiting, place: &Place, now: Timestamp) -> String {
    let left = minutes(waiting.deadline.since(now));
    let since = match waiting.blocked_since {
        Some(since) => format!("for {}", minutes(now.since(since))),
        None => "not tried yet".to_owned(),
    };
    let note = if waiting.note.is_empty() { "its turn" } else { &waiting.note };
    format!("{place}, {since}, given up in {left}: {note}")
}

fn minutes(span: Millis) -> String {
    let seconds = span.value() / 1_000;
    if seconds < 60 { format!("{seconds} s") } else { format!("{} min", seconds / 60) }
}

#[cfg(test)]
mod tests;
