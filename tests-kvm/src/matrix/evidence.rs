//! What was seen of a cell's end, beside what the planner says.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{End, Place};
use crate::cluster::{Cluster, GuestVm};
use crate::proof;

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
    /// How many lines the daemons logged at level WARN. One at level ERROR fails the cell.
    pub warnings: usize,
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
pub(super) async fn gather(cluster: &Cluster<'_>, vm: &GuestVm, seen: Seen) -> Result<Evidence> {
    let source = observed(cluster, vm, "a").await?;
    let destination = observed(cluster, vm, "b").await?;
    let history = vm.serial.history();
    let printed_by: BTreeSet<_> = history.ticks.iter().map(|tick| tick.connection).collect();
    let runs = matches!(seen.end.place, Place::Source | Place::Destination);
    let warnings = proof::logged(cluster.dir(), "WARN")?.len();
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
        warnings,
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
