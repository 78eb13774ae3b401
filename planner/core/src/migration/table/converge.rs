//! A precopy that will not converge, and limits that are changed.

use vmferry_types::Method;

use super::At;
use super::forward::back;
use crate::migration::{Back, Cause, Event, NotConverging, Phase, Refusal, Stage};

/// Returns what an event of this kind leads to; `None` for every other.
pub(super) fn next(at: At<'_>) -> Option<Result<Phase, Refusal>> {
    if let Event::Diverges { verdict } = at.event {
        return Some(diverges(at, verdict));
    }
    matches!(at.event, Event::LimitsSet { .. }).then(|| limits(at))
}

/// The limits stand in the row; its source is told by what it says that it was told.
fn limits(at: At<'_>) -> Result<Phase, Refusal> {
    if at.migration.takes_limits() { Ok(at.migration.phase.clone()) } else { Err(Refusal::TooLate) }
}

fn diverges(at: At<'_>, verdict: &str) -> Result<Phase, Refusal> {
    let migration = at.migration;
    let Phase::Admitted { destination, stage: Stage::Transferring { .. } } = &migration.phase
    else {
        return Err(Refusal::Stale);
    };
    match migration.method {
        Method::Precopy => {}
        Method::Postcopy | Method::Snapshot | Method::Cold | Method::DiskCopy => {
            return Err(Refusal::Stale);
        }
    }
    let cause = Cause::NotConverging { verdict: verdict.to_owned() };
    match migration.answer() {
        NotConverging::Wait => Err(Refusal::Stale),
        NotConverging::AutoConverge => Ok(migration.phase.clone()),
        // It has an event of its own, with what the receiver has to be able to.
        NotConverging::Postcopy => Err(Refusal::Illegal),
        NotConverging::Abort | NotConverging::Pause if migration.holds_instead() => {
            let stage = Stage::Recalling { cause };
            Ok(Phase::Admitted { destination: destination.clone(), stage })
        }
        NotConverging::Abort | NotConverging::Pause => {
            Ok(back(at, destination, cause, Back::Cancelling))
        }
    }
}
