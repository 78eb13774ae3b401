//! Writing the matrix down for people.

mod transitions;

use std::collections::BTreeMap;

use super::scenario::Scenario;
use super::workers::Verdict;
use super::{Cell, Planned, Victim, agent_table, cells, table};
use crate::planners::Store;

/// Where and of what the matrix was run.
#[derive(Clone, Debug)]
pub struct Circumstances {
    /// The commit, and whether the tree had changes.
    pub commit: String,
    /// The date.
    pub date: String,
    /// The machine: processors, kernel, QEMU.
    pub machine: String,
    /// How many workers ran side by side.
    pub workers: usize,
    /// How long all of it took, in seconds.
    pub seconds: f64,
}

/// Writes the page.
#[must_use]
pub fn markdown(stores: &[Store], verdicts: &[Verdict], about: &Circumstances) -> String {
    let by_name: BTreeMap<_, _> =
        verdicts.iter().map(|verdict| (verdict.cell.as_str(), verdict)).collect();
    let mut text = head(verdicts, about);
    for store in stores {
        text.push_str(&grid(*store, &by_name));
    }
    text.push_str(&transitions::either(stores, &by_name));
    text.push_str(&never());
    text.push_str(&transitions::transitions());
    for store in stores {
        text.push_str(&evidence(*store, &by_name));
    }
    text
}

fn head(verdicts: &[Verdict], about: &Circumstances) -> String {
    let failed = verdicts.iter().filter(|verdict| verdict.failure.is_some()).count();
    let mut accelerators: Vec<_> =
        verdicts.iter().map(|v| v.accelerator.as_str()).filter(|name| !name.is_empty()).collect();
    accelerators.sort_unstable();
    accelerators.dedup();
    let mut text = format!(
        "# Crash points\n\n\
         Written by `scripts/e2e --matrix` on {}, commit {}: {}; guests under {}.\n\
         {} cells, {} as the design says, {failed} not; {:.0} s with {} workers side by side.\n\n\
         Real QEMU processes, agents and planners on hosts that are network namespaces. At each point the\n\
         planner (or the agent, for the points of its journal) is held by a fault point that only test\n\
         builds have, the victim is killed with SIGKILL, agents and hosts are started again, and everyone\n\
         goes on. A host that dies loses all of its processes at once and its runtime directory, and comes\n\
         back under another boot id. With PostgreSQL two planners share the store; the one at the point dies\n\
         together with the victim of the column, the other one goes on, and the dead one is started again\n\
         at the end.\n\n\
         A cell holds only if the migration ends as written here; the guest runs there and nowhere else\n\
         (its own lines on the serial port, from all its QEMU processes, are those of one guest that never\n\
         ran twice, and its disk agrees); `vmferry doctor` finds that one runner or none and nothing else that\n\
         needs a human; the generation is the expected one; nothing is reserved and no migration is open; a guest that stayed can then be moved; when all is stopped no process, tap, port or\n\
         launch directory is left; and no daemon logged anything at level ERROR.\n\n",
        about.date,
        about.commit,
        about.machine,
        accelerators.join(" and ").to_uppercase(),
        verdicts.len(),
        verdicts.len() - failed,
        about.seconds,
        about.workers,
    );
    text.push_str(&counts(verdicts));
    text
}

fn counts(verdicts: &[Verdict]) -> String {
    let mut by_end: BTreeMap<(String, String), usize> = BTreeMap::new();
    for verdict in verdicts {
        let end = match &verdict.evidence {
            Some(evidence) if verdict.failure.is_none() => {
                (evidence.phase.clone(), evidence.place.clone())
            }
            Some(_) | None => ("FAILED".to_owned(), String::new()),
        };
        *by_end.entry(end).or_default() += 1;
    }
    let mut text = String::from("| migration | guest | cells |\n|---|---|---|\n");
    for ((phase, place), count) in by_end {
        line(&mut text, &[&phase, &place, &count.to_string()]);
    }
    text.push('\n');
    text
}

/// The outcomes of a store: points down, victims across.
fn grid(store: Store, verdicts: &BTreeMap<&str, &Verdict>) -> String {
    let mut text = format!("## Outcomes with {}\n\n", title(store));
    for scenario in Scenario::EACH {
        let rows: Vec<_> =
            table::rows().into_iter().filter(|row| row.scenario == scenario).collect();
        text.push_str(&format!("**{}**: {}\n\n", scenario.label(), scenario.explanation()));
        text.push_str("| point |");
        for victim in Victim::EACH {
            text.push_str(&format!(" {} |", victim.label().replace('-', " ")));
        }
        text.push_str("\n|---|---|---|---|---|---|---|---|---|\n");
        for (point, planned) in rows.iter().flat_map(|row| row.points()) {
            let mut columns = vec![point.label().replace('-', " ")];
            for (victim, planned) in Victim::EACH.into_iter().zip(planned) {
                columns.push(match planned.over(store) {
                    None => "–".to_owned(),
                    Some(planned) => {
                        let cell = Cell { scenario, point, victim, store, outcome: planned };
                        outcome(verdicts.get(cell.name().as_str()).copied())
                    }
                });
            }
            let columns: Vec<_> = columns.iter().map(String::as_str).collect();
            line(&mut text, &columns);
        }
        text.push('\n');
        text.push_str(&agent_grid(scenario, store, verdicts));
    }
    text
}

/// The outcomes at the points of the agents' journals.
fn agent_grid(scenario: Scenario, store: Store, verdicts: &BTreeMap<&str, &Verdict>) -> String {
    let rows: Vec<_> =
        agent_table::rows().into_iter().filter(|row| row.scenario == scenario).collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut text =
        String::from("| point of an agent's journal | victim | outcome |\n|---|---|---|\n");
    for (point, victim, planned) in rows.iter().flat_map(agent_table::Row::points) {
        let found = match planned.over(store) {
            None => "–".to_owned(),
            Some(planned) => {
                let cell = Cell { scenario, point, victim, store, outcome: planned };
                outcome(verdicts.get(cell.name().as_str()).copied())
            }
        };
        let victim = victim.label().replace('-', " ");
        line(&mut text, &[&point.label().replace('-', " "), &victim, &found]);
    }
    text.push('\n');
    text
}

fn outcome(verdict: Option<&Verdict>) -> String {
    match verdict {
        None => "not run".to_owned(),
        Some(Verdict { failure: Some(_), .. }) => "**FAILED**".to_owned(),
        Some(Verdict { evidence: Some(seen), .. }) if seen.phase == "-" => seen.place.clone(),
        Some(Verdict { evidence: Some(seen), .. }) => {
            format!("{}, {}", seen.phase, short(&seen.place))
        }
        Some(Verdict { evidence: None, .. }) => "?".to_owned(),
    }
}

fn short(place: &str) -> &str {
    place.trim_start_matches("runs ")
}

/// What cannot be tried, and why.
fn never() -> String {
    let mut text = String::from(
        "## What cannot be tried\n\n| scenario | point | victim | reason |\n|---|---|---|---|\n",
    );
    let mut tell = |scenario: Scenario, point: String, victim: Victim, planned: Planned| {
        if let Planned::Never(reason) = planned {
            let victim = victim.label().replace('-', " ");
            line(&mut text, &[scenario.label(), &point.replace('-', " "), &victim, reason]);
        }
    };
    for row in table::rows() {
        for (point, planned) in row.points() {
            for (victim, planned) in Victim::EACH.into_iter().zip(planned) {
                tell(row.scenario, point.label(), victim, planned);
            }
        }
    }
    for row in agent_table::rows() {
        for (point, victim, planned) in row.points() {
            tell(row.scenario, point.label(), victim, planned);
        }
    }
    text.push('\n');
    text
}

/// What proves each cell of a store.
fn evidence(store: Store, verdicts: &BTreeMap<&str, &Verdict>) -> String {
    let mut text = format!("## Evidence with {}\n\n", title(store));
    text.push_str(
        "`printed by`: how many QEMU processes the guest's lines came from, one after the other. \
         `still`: the longest\npause between two of its lines, the test's own waiting included. \
         `warnings`: lines at level WARN in the daemons' logs.\n\n\
         | cell | migration | guest | generation | lines | printed by | still (ms) | source sees | \
         destination sees | warnings | seconds | why |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for cell in cells(&[store]) {
        let name = cell.name();
        let Some(verdict) = verdicts.get(name.as_str()) else { continue };
        let name = name.split_once('/').map_or(name.as_str(), |(_, rest)| rest);
        let seconds = format!("{:.1}", verdict.seconds);
        match (&verdict.evidence, &verdict.failure) {
            (Some(seen), None) => {
                let still = seen.still_ms.map_or_else(|| "–".to_owned(), |ms| ms.to_string());
                line(
                    &mut text,
                    &[
                        name,
                        &seen.phase,
                        &seen.place,
                        &seen.generation.to_string(),
                        &seen.lines.to_string(),
                        &seen.printed_by.to_string(),
                        &still,
                        &seen.source,
                        &seen.destination,
                        &seen.warnings.to_string(),
                        &seconds,
                        &seen.error,
                    ],
                );
            }
            (_, failure) => {
                let failure = failure.as_deref().unwrap_or("nothing was seen");
                let columns =
                    [name, "**FAILED**", "", "", "", "", "", "", "", "", &seconds, failure];
                line(&mut text, &columns);
            }
        }
    }
    text.push('\n');
    text
}

const fn title(store: Store) -> &'static str {
    match store {
        Store::Sqlite => "SQLite, one planner",
        Store::Postgres => "PostgreSQL, two planners of which one dies",
    }
}

fn line(text: &mut String, columns: &[&str]) {
    text.push('|');
    for column in columns {
        let column = column.replace('|', "\\|").replace('\n', " ");
        text.push_str(&format!(" {column} |"));
    }
    text.push('\n');
}
