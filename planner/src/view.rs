//! Rows and reports to messages.

use vmferry_planner_core::migration::Entry;

/// Says what a person should know of a change.
#[must_use]
pub fn note(entry: &Entry) -> String {
    entry.after.phase.cause().map(ToString::to_string).unwrap_or_default()
}
