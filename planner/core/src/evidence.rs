//! What the two agents say, and what it proves.
//!
//! Pure reading of levels: the order in which observations came does not matter, only what each
//! side says last. Nothing is concluded from silence (rule R1), and nothing that depends on a side
//! without that side's answer under the driver's own claim (rule R2).

mod cold;
mod divided;
mod mend;
mod permit;
mod precopy;
mod seen;
mod tune;

pub use mend::mend;
pub use permit::{Withheld, permit};
pub use seen::{
    Continued, Ended, Handed, Heard, Held, Knowledge, Ready, RunState, Seen, Shutdown, Sides,
    Times, TransferState,
};
pub use tune::tune;

use vmferry_types::Method;

use crate::migration::{Event, Migration};

/// Returns what both sides together prove about the migration in its present phase, if anything.
///
/// The driver applies the event, commits, and reads again: one fact may lead to several events.
///
/// A side's observation must have been made after every command to that side was answered, or
/// under a claim newer than that of an unanswered command: else the command might still land on
/// top of what was concluded. So a driver whose command went unanswered claims anew first.
#[must_use]
pub fn read(migration: &Migration, sides: &Sides, times: Times) -> Option<Event> {
    match migration.method {
        Method::Precopy | Method::Postcopy | Method::Snapshot => {
            precopy::read(migration, sides, times)
        }
        Method::Cold => cold::read(migration, sides, times),
        // Such a migration is refused when it is opened.
        Method::DiskCopy => None,
    }
}

#[cfg(test)]
mod tests;
