//! The crash matrix: who dies × when × over which store, with what the design says of each.
//!
//! What is to be tried is data: [`table`] has a row for each commit of the planner, [`agent_table`]
//! one for each entry of an agent's journal, and beside each victim how that has to end, or why it
//! cannot be. A [`Cell`] is one of these over one store. [`strike`] carries a cell out,
//! [`evidence`] says what was seen, and [`page`] writes all of it down for people.

pub mod agent_table;
pub mod edges;
pub mod evidence;
pub mod page;
pub mod scenario;
pub mod strike;
pub mod table;
pub mod workers;

use std::sync::Arc;

use crate::cases::{Case, Note, Tier};
use crate::planners::Store;
use evidence::Evidence;
use scenario::Scenario;

/// Who dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// The planner; with two of them, the one that drives.
    Planner,
    /// The source's agent. Its QEMU processes live on.
    SourceAgent,
    /// The destination's agent.
    DestinationAgent,
    /// The agents of both.
    BothAgents,
    /// The VM's QEMU process on the source.
    SourceQemu,
    /// The VM's QEMU process on the destination.
    ReceiverQemu,
    /// The source as a machine: it boots again with an empty memory and another boot id.
    SourceHost,
    /// The destination as a machine.
    DestinationHost,
}

impl Victim {
    /// Each of them, in the order of the table's columns.
    pub const EACH: [Self; 8] = [
        Self::Planner,
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::BothAgents,
        Self::SourceQemu,
        Self::ReceiverQemu,
        Self::SourceHost,
        Self::DestinationHost,
    ];

    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Planner => "planner",
            Self::SourceAgent => "source-agent",
            Self::DestinationAgent => "destination-agent",
            Self::BothAgents => "both-agents",
            Self::SourceQemu => "source-qemu",
            Self::ReceiverQemu => "receiver-qemu",
            Self::SourceHost => "source-host",
            Self::DestinationHost => "destination-host",
        }
    }
}

/// Where the guest is in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It runs on the source, and nowhere else.
    Source,
    /// It runs on the destination, and nowhere else.
    Destination,
    /// It runs nowhere, and the planner says that it is lost.
    Lost,
    /// It runs nowhere, as it was asked for.
    Stopped,
}

impl Place {
    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Source => "runs on the source",
            Self::Destination => "runs on the destination",
            Self::Lost => "lost",
            Self::Stopped => "stopped",
        }
    }
}

/// How a cell has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The last phase of the migration; `None` where there is none.
    pub phase: Option<&'static str>,
    /// Where the guest is.
    pub place: Place,
    /// How many generations were taken since before.
    pub generations: u64,
}

/// How it may end.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// In this way.
    One(End),
    /// In one of two ways, and what decides which.
    Either(End, End, &'static str),
}

impl Outcome {
    /// Returns the ends that are right.
    #[must_use]
    pub fn ends(self) -> Vec<End> {
        match self {
            Self::One(end) => vec![end],
            Self::Either(one, other, _) => vec![one, other],
        }
    }

    /// Says what decides which of two it is.
    #[must_use]
    pub const fn reason(self) -> Option<&'static str> {
        match self {
            Self::One(_) => None,
            Self::Either(.., reason) => Some(reason),
        }
    }
}

/// What the design says of a victim at a point.
#[derive(Clone, Copy, Debug)]
pub enum Planned {
    /// It ends so.
    Ends(Outcome),
    /// It ends in one way if the planner that waits at the point goes on to commit what it saw
    /// before, and in another if that planner dies too and the next one looks anew.
    Differs {
        /// The planner at the point goes on.
        goes_on: Outcome,
        /// It dies with the victim.
        looks_anew: Outcome,
    },
    /// It cannot be tried, and why.
    Never(&'static str),
}

impl Planned {
    /// Returns how it ends over a store; `None` if it cannot be tried.
    ///
    /// Where two planners share a store, the one at the point dies with whoever else does.
    #[must_use]
    pub const fn over(self, store: Store) -> Option<Outcome> {
        match (self, store) {
            (Self::Ends(outcome), _)
            | (Self::Differs { goes_on: outcome, .. }, Store::Sqlite)
            | (Self::Differs { looks_anew: outcome, .. }, Store::Postgres) => Some(outcome),
            (Self::Never(_), _) => None,
        }
    }
}

/// At which instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Around a commit of the planner.
    Planner {
        /// `before_commit` or `after_commit`.
        side: &'static str,
        /// The name of the planner's fault point.
        fault: &'static str,
        /// What is committed.
        commit: &'static str,
    },
    /// Around an entry of an agent's journal.
    Agent {
        /// `before_journal`, `after_journal` or `before_answer`.
        moment: &'static str,
        /// What the agent is told.
        action: &'static str,
        /// Its host.
        host: &'static str,
    },
}

impl Point {
    /// Returns its name.
    #[must_use]
    pub fn label(self) -> String {
        match self {
            Self::Planner { side, commit, .. } => {
                format!("{}-{commit}", side.trim_end_matches("_commit"))
            }
            Self::Agent { moment, action, .. } => format!("{moment}-{action}").replace('_', "-"),
        }
    }

    /// Returns the name of the fault point.
    #[must_use]
    pub fn fault(self) -> String {
        match self {
            Self::Planner { side, fault, .. } => format!("{side}.{fault}"),
            Self::Agent { moment, action, .. } => format!("{moment}.{action}"),
        }
    }
}

/// One thing that is tried.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// What is under way.
    pub scenario: Scenario,
    /// When the victim dies.
    pub point: Point,
    /// Who dies.
    pub victim: Victim,
    /// Over which store.
    pub store: Store,
    /// How it has to end.
    pub outcome: Outcome,
}

impl Cell {
    /// Returns its name: store, scenario, point, victim.
    #[must_use]
    pub fn name(&self) -> String {
        format!(
            "{}/{}/{}/{}",
            self.store.label(),
            self.scenario.label(),
            self.point.label(),
            self.victim.label()
        )
    }

    /// Makes a case of it; what it saw is handed to `keep`.
    pub fn case(self, tier: Tier, keep: impl Fn(Evidence) + Send + Sync + 'static) -> Case {
        let keep = Arc::new(keep);
        let case = Case::new(self.name(), tier, move |cluster| {
            let keep = Arc::clone(&keep);
            Box::pin(async move {
                let evidence = strike::carry_out(cluster, &self).await?;
                let note = evidence.summary();
                keep(evidence);
                Ok::<Note, anyhow::Error>(note)
            })
        });
        match self.store {
            Store::Sqlite => case,
            Store::Postgres => case.on_postgres(),
        }
    }
}

/// Returns every cell over these stores.
#[must_use]
pub fn cells(stores: &[Store]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for store in stores {
        for row in table::rows() {
            for (point, planned) in row.points() {
                for (victim, planned) in Victim::EACH.into_iter().zip(planned) {
                    cells.extend(planned.over(*store).map(|outcome| Cell {
                        scenario: row.scenario,
                        point,
                        victim,
                        store: *store,
                        outcome,
                    }));
                }
            }
        }
        for row in agent_table::rows() {
            for (point, victim, planned) in row.points() {
                cells.extend(planned.over(*store).map(|outcome| Cell {
                    scenario: row.scenario,
                    point,
                    victim,
                    store: *store,
                    outcome,
                }));
            }
        }
    }
    cells
}

/// The cells that are run at every change: each scenario, each victim, both stores.
const REPRESENTATIVES: [&str; 28] = [
    "sqlite/move/before-ordered/source-qemu",
    "sqlite/move/after-ordered/planner",
    "sqlite/move/after-ordered/receiver-qemu",
    "sqlite/move/before-committed/source-host",
    "sqlite/move/before-committed/receiver-qemu",
    "sqlite/move/after-committed/planner",
    "sqlite/move/after-committed/destination-host",
    "sqlite/move/after-attached/receiver-qemu",
    "sqlite/undo/before-undoing/both-agents",
    "sqlite/downgrade-cancel/after-clearing/destination-agent",
    "sqlite/lost-receiver/after-resuming/source-agent",
    "sqlite/lost-source/after-failed/destination-host",
    "sqlite/queue/after-queued/planner",
    "sqlite/start/after-starting/planner",
    "sqlite/stop/after-stopping/source-agent",
    "sqlite/move/after-journal-order-switchover/source-agent",
    "sqlite/move/after-journal-continue-destination/destination-agent",
    "sqlite/held/after-held/source-agent",
    "sqlite/held-cancel/before-cancelling/planner",
    "sqlite/downgrade/before-recalling/planner",
    "sqlite/forward/after-decided-forward/planner",
    "sqlite/power-off/before-powered-off/source-agent",
    "sqlite/held/after-journal-hold-guest/source-agent",
    "postgres/lost-receiver/after-resuming/planner",
    "postgres/held/after-held/planner",
    "postgres/move/before-committed/source-qemu",
    "postgres/move/after-committed/both-agents",
    "postgres/cancel/before-clearing/planner",
];

/// Returns the cells that are run at every change, as cases.
#[must_use]
pub fn representatives() -> Vec<Case> {
    let all = cells(&Store::EACH);
    let chosen = all.into_iter().filter(|cell| REPRESENTATIVES.contains(&cell.name().as_str()));
    chosen.map(|cell| cell.case(Tier::Subset, |_| {})).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_cell_has_a_name_of_its_own() {
        let cells = cells(&Store::EACH);
        let names: BTreeSet<_> = cells.iter().map(Cell::name).collect();
        assert_eq!(names.len(), cells.len());
    }

    #[test]
    fn every_representative_is_a_cell() {
        let names: BTreeSet<_> = cells(&Store::EACH).iter().map(Cell::name).collect();
        let unknown: Vec<_> =
            REPRESENTATIVES.iter().filter(|name| !names.contains(**name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn the_representatives_are_of_each_victim_store_and_almost_each_scenario() {
        let all = cells(&Store::EACH);
        let chosen: Vec<_> =
            all.iter().filter(|cell| REPRESENTATIVES.contains(&cell.name().as_str())).collect();
        for victim in Victim::EACH {
            assert!(chosen.iter().any(|cell| cell.victim == victim), "{victim:?}");
        }
        for store in Store::EACH {
            assert!(chosen.iter().any(|cell| cell.store == store), "{store:?}");
        }
        for scenario in Scenario::EACH.into_iter().filter(|of| *of != Scenario::QueueCancel) {
            assert!(chosen.iter().any(|cell| cell.scenario == scenario), "{scenario:?}");
        }
    }

    #[test]
    fn what_cannot_be_tried_says_why() {
        let rows = table::rows();
        let planned = rows.iter().flat_map(|row| row.points()).flat_map(|(_, planned)| planned);
        for planned in planned {
            if let Planned::Never(reason) = planned {
                assert!(reason.len() > 10);
            }
        }
    }
}
