//! What the page says beside the outcomes: which of two ends was seen how often, and where each
//! transition and each fault point is shown.

use std::collections::BTreeMap;

use super::{line, short};
use crate::matrix::edges::{self, Shown};
use crate::matrix::workers::Verdict;
use crate::matrix::{Cell, End, Outcome, cells};
use crate::planners::Store;

/// Says of each cell that may end in one of two ways which one it was, and counts that by reason.
pub(super) fn either(stores: &[Store], verdicts: &BTreeMap<&str, &Verdict>) -> String {
    let mut counts: BTreeMap<(&str, String, String), [usize; 3]> = BTreeMap::new();
    let mut each = String::new();
    for cell in cells(stores) {
        let Outcome::Either(one, other, reason) = cell.outcome else { continue };
        let names = [spell(one), spell(other)];
        let seen = seen_of(&cell, verdicts);
        let at = names.iter().position(|name| Some(name) == seen.as_ref()).unwrap_or(2);
        let [first, second] = names;
        counts.entry((reason, first, second)).or_default()[at] += 1;
        line(&mut each, &[&cell.name(), seen.as_deref().unwrap_or("not run, or failed")]);
    }
    let mut text = String::from(
        "## Cells with two right ends\n\nMostly one end is right. These have two, by what comes first:\n\n\
         | what decides | one end | seen | the other | seen | neither, or not run |\n\
         |---|---|---|---|---|---|\n",
    );
    for ((reason, one, other), [first, second, none]) in counts {
        let [first, second, none] = [first, second, none].map(|count| count.to_string());
        line(&mut text, &[reason, &one, &first, &other, &second, &none]);
    }
    text + "\n| cell | seen |\n|---|---|\n" + &each + "\n"
}

/// Spells an end as the verdicts do, and what is behind it that they say in figures.
fn spell(end: End) -> String {
    let after = after_commit(end.generations);
    format!("{}, {}{after}", end.phase.unwrap_or("-"), short(end.place.label()))
}

/// Two generations are taken only by a move that is taken back after its commit.
const fn after_commit(generations: u64) -> &'static str {
    if generations > 1 { ", after the commit" } else { "" }
}

fn seen_of(cell: &Cell, verdicts: &BTreeMap<&str, &Verdict>) -> Option<String> {
    let verdict = verdicts.get(cell.name().as_str())?;
    let seen = verdict.evidence.as_ref().filter(|_| verdict.failure.is_none())?;
    // A guest that is moved was started once.
    let after = after_commit(seen.generation.saturating_sub(1));
    Some(format!("{}, {}{after}", seen.phase, short(&seen.place)))
}

/// Says where each transition of the machine is shown, and each fault point that has no cell.
pub(super) fn transitions() -> String {
    let mut text = String::from(
        "## Transitions of the machine\n\n*Around*: everyone dies in turn before and after it is \
         committed. *Through*: a death leads through\nit. The rest is walked by the simulation and \
         the core's tests only, for the reason given.\n\n| from | to | shown |\n|---|---|---|\n",
    );
    for edge in edges::all() {
        let shown = match edge.shown {
            Shown::Around(scenario, commit) => format!("around `{}/{commit}`", scenario.label()),
            Shown::Through(cell) => format!("through `{cell}`"),
            Shown::Case(case) => format!("case `{case}`"),
            Shown::Simulated(reason) => format!("simulation: {reason}"),
        };
        line(&mut text, &[edge.from, edge.to, &shown]);
    }
    text.push_str("\n| fault point without a cell | why |\n|---|---|\n");
    for (point, reason) in edges::POINTS_ELSEWHERE {
        line(&mut text, &[point, reason]);
    }
    for (point, other) in edges::SAME_INSTANT {
        line(&mut text, &[point, &format!("one statement with {other}")]);
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ends_of_a_cell_can_be_told_apart() {
        for cell in cells(&Store::EACH) {
            if let Outcome::Either(one, other, reason) = cell.outcome {
                assert_ne!(spell(one), spell(other), "{}", cell.name());
                assert!(reason.len() > 10);
            }
        }
    }
}
