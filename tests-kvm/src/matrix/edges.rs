//! Each transition of the migration machine, and where it is shown on real QEMU processes.
//!
//! The machine's own table is the list: a transition that it gains has to be placed here. What no
//! cell can bring about says why; the simulation and the core's tests walk all of it.

use super::scenario::Scenario;

/// Where a transition is shown.
#[derive(Clone, Copy, Debug)]
pub enum Shown {
    /// Everyone dies in turn before and after it is committed.
    Around(Scenario, &'static str),
    /// The death of this cell leads through it.
    Through(&'static str),
    /// A case of the end-to-end lane leads through it.
    Case(&'static str),
    /// Not here, and why: the simulation does.
    Simulated(&'static str),
}

/// One transition: the row before, the row after, by the names of the machine's table.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    /// The row before.
    pub from: &'static str,
    /// The row after.
    pub to: &'static str,
    /// Where it is shown.
    pub shown: Shown,
}

const GATES: Shown = Shown::Case("planner-killed-at-each-gate-waits-there-again");
const LATE: Shown = Shown::Case("gate-that-nobody-opens-gives-the-guest-back");
const AT_GATE: Shown = Shown::Simulated(
    "a QEMU that dies while an operator is waited for: what is owed after is as without a gate",
);
const ONE: Shown =
    Shown::Simulated("restored and committed are one statement while no gate is closed");
const OFF: Shown = Shown::Simulated(
    "the guest would have to turn itself off within milliseconds; what is owed after is the same \
     as in `power-off`, or as after any death",
);
const RAN: Shown = Shown::Simulated(
    "a receiver that ran before ownership moved: no agent lets one run, so somebody would have to \
     continue it by hand",
);
const SAME: Shown = Shown::Simulated(
    "what is owed is a function of the phase alone, and around this phase everyone dies in \
     another scenario",
);
const HANGS: Shown = Shown::Simulated(
    "the source's QEMU would have to hang, be decided against, and fail before it is ended",
);

const BUSY: &str = "postcopy-of-a-busy-guest-loses-nothing-there-and-back";
const DIVIDED: Shown = Shown::Simulated(
    "the part would have to die or answer within the milliseconds of a guest that goes before its \
     memory; the agents' own tests show the ends of it on real QEMU",
);

const LIMITS: Shown = Shown::Simulated(
    "nothing but the row's limits change: what is owed is the same, and a source that was not told is \
     told by whoever drives next, as the planner's own tests show over its restarts",
);

/// Returns each transition of the machine.
#[must_use]
pub fn all() -> Vec<Edge> {
    EDGES.to_vec()
}

const fn edge(from: &'static str, to: &'static str, shown: Shown) -> Edge {
    Edge { from, to, shown }
}

#[rustfmt::skip] // A list is read by lines.
const EDGES: &[Edge] = {
    use Scenario as S;
    use Shown::{Around, Case, Through};
    &[
        edge("queued", "arming", Around(S::Queue, "admitted")),
        edge("queued", "queued", Around(S::Queue, "queued")),
        edge("queued", "aborted", Around(S::QueueCancel, "aborted")),
        edge("arming", "clearing", SAME),
        edge("arming", "transferring", Around(S::Move, "armed")),
        edge("arming", "failed +receiver", Through("sqlite/move/after-admitted/source-qemu")),
        edge("arming", "powered off", OFF),
        edge("arming", "failed +human", RAN),
        edge("transferring", "cancelling", Around(S::Cancel, "cancelling")),
        edge("transferring", "ordered", Around(S::Move, "ordered")),
        edge("transferring", "failed +receiver", Through("sqlite/move/after-armed/source-qemu")),
        edge("transferring", "powered off", Around(S::PowerOff, "powered-off")),
        edge("transferring", "failed +human", RAN),
        edge("transferring +", "recalling", Around(S::Downgrade, "recalling")),
        edge("transferring +", "cancelling", Through("postgres/downgrade/before-recalling/receiver-qemu")),
        edge("transferring +", "ordered", SAME),
        edge("transferring +", "failed +receiver", Through("postgres/downgrade/before-recalling/source-qemu")),
        edge("transferring +", "powered off", OFF),
        edge("transferring +", "failed +human", RAN),
        edge("recalling", "clearing live", Around(S::Downgrade, "clearing-live")),
        edge("recalling", "cancelling", Through("sqlite/downgrade/after-recalling/receiver-qemu")),
        edge("recalling", "failed +receiver", Through("sqlite/downgrade/after-recalling/source-qemu")),
        edge("recalling", "powered off", OFF),
        edge("recalling", "failed +human", RAN),
        edge("clearing live", "arming again", Around(S::Downgrade, "again")),
        edge("clearing live", "clearing", Around(S::DowngradeCancel, "clearing")),
        edge("clearing live", "failed +receiver", Through("sqlite/downgrade/after-clearing-live/source-qemu")),
        edge("clearing live", "powered off", OFF),
        edge("clearing live", "failed +human", RAN),
        edge("arming again", "holding", Around(S::Downgrade, "armed")),
        edge("arming again", "clearing", SAME),
        edge("arming again", "failed +receiver", Through("sqlite/downgrade/after-again/source-qemu")),
        edge("arming again", "powered off", OFF),
        edge("arming again", "failed +human", RAN),
        edge("holding", "held", Around(S::Held, "held")),
        edge("holding", "cancelling", Through("sqlite/downgrade/after-armed/receiver-qemu")),
        edge("holding", "failed +receiver", Through("sqlite/downgrade/after-armed/source-qemu")),
        edge("holding", "powered off", OFF),
        edge("holding", "failed +human", RAN),
        edge("held", "ordered", Around(S::Held, "ordered")),
        edge("held", "cancelling", Around(S::HeldCancel, "cancelling")),
        edge("held", "failed +receiver", Through("sqlite/held/after-held/source-qemu")),
        edge("held", "powered off", OFF),
        edge("held", "failed +human", RAN),
        edge("at the gate", "transferring", GATES),
        edge("at the gate", "clearing", LATE),
        edge("at the gate", "failed +receiver", AT_GATE),
        edge("at the gate", "powered off", AT_GATE),
        edge("at the gate", "failed +human", RAN),
        edge("withheld", "ordered", GATES),
        edge("withheld", "cancelling", LATE),
        edge("withheld", "failed +receiver", AT_GATE),
        edge("withheld", "powered off", AT_GATE),
        edge("withheld", "failed +human", RAN),
        edge("restored gate", "committed", GATES),
        edge("restored gate", "undoing", LATE),
        edge("restored gate", "restored", AT_GATE),
        edge("restored gate", "restored gate", AT_GATE),
        edge("restored gate", "resuming", AT_GATE),
        edge("restored gate", "failed +receiver", AT_GATE),
        edge("restored gate", "powered off", AT_GATE),
        edge("restored gate", "failed +human", RAN),
        edge("alone gate", "committed alone", AT_GATE),
        edge("alone gate", "restored alone", AT_GATE),
        edge("alone gate", "failed +receiver", AT_GATE),
        edge("ordered", "restored", Around(S::Move, "committed")),
        edge("ordered", "forward", Around(S::Forward, "decided-forward")),
        edge("ordered", "undoing", Around(S::Undo, "undoing")),
        edge("ordered", "cancelling", Case("planner-away-after-an-unsent-order-is-aborted")),
        edge("ordered", "resuming", Through("sqlite/move/after-ordered/receiver-qemu")),
        edge("ordered", "restored alone", Through("postgres/move/before-committed/source-qemu")),
        edge("ordered", "failed +receiver", Around(S::LostSource, "failed")),
        edge("ordered", "powered off", OFF),
        edge("ordered", "failed +human", RAN),
        edge("forward", "restored alone", Around(S::Forward, "committed")),
        edge("forward", "restored", HANGS),
        edge("forward", "undoing", HANGS),
        edge("forward", "cancelling", HANGS),
        edge("forward", "resuming", Through("sqlite/forward/after-decided-forward/receiver-qemu")),
        edge("forward", "failed +receiver", Through("postgres/forward/before-committed/receiver-qemu")),
        edge("forward", "powered off", OFF),
        edge("forward", "failed +human", RAN),
        edge("restored", "committed", Around(S::Move, "committed")),
        edge("restored", "undoing", ONE),
        edge("restored", "resuming", ONE),
        edge("restored", "restored alone", ONE),
        edge("restored", "failed +receiver", ONE),
        edge("restored", "powered off", ONE),
        edge("restored", "failed +human", ONE),
        edge("restored alone", "committed alone", Around(S::Forward, "committed")),
        edge("restored alone", "failed +receiver", ONE),
        edge("committed", "attached", Around(S::Move, "attached")),
        edge("committed", "resuming", Around(S::LostReceiver, "resuming")),
        edge("committed", "failed +source", Through("postgres/move/before-attached/receiver-qemu")),
        edge("committed", "attached off", OFF),
        edge("committed alone", "attached", Through("sqlite/forward/after-committed/planner")),
        edge("committed alone", "failed +source", Through("sqlite/forward/after-committed/receiver-qemu")),
        edge("committed alone", "attached off", OFF),
        edge("attached", "done", Around(S::Move, "done")),
        edge("attached", "failed +source", Through("sqlite/move/after-attached/receiver-qemu")),
        edge("attached", "attached off", OFF),
        edge("attached off", "done", OFF),
        edge("cancelling", "clearing", Around(S::Cancel, "clearing")),
        edge("cancelling", "failed +receiver", Through("sqlite/cancel/after-cancelling/source-qemu")),
        edge("cancelling", "powered off", OFF),
        edge("clearing", "aborted", Around(S::Cancel, "aborted")),
        edge("clearing", "failed +receiver", Through("sqlite/cancel/after-clearing/source-qemu")),
        edge("clearing", "powered off", OFF),
        edge("undoing", "resuming", Around(S::Undo, "resuming")),
        edge("undoing", "restored alone", HANGS),
        edge("undoing", "failed +receiver", Through("sqlite/undo/after-undoing/source-qemu")),
        edge("undoing", "powered off", OFF),
        edge("undoing", "failed +human", RAN),
        edge("resuming", "clearing", Around(S::Undo, "clearing")),
        edge("resuming", "failed +receiver", Through("sqlite/undo/after-resuming/source-qemu")),
        edge("resuming", "powered off", OFF),
        edge("powered off", "aborted", Around(S::PowerOff, "aborted")),
        edge("failed +receiver", "failed", Through("sqlite/lost-source/after-failed/planner")),
        edge("failed +source", "failed", Through("sqlite/move/after-attached/receiver-qemu")),
        edge("failed +human", "failed +source", RAN),
        edge("committed div.", "severed later", DIVIDED),
        edge("severed later", "failed", DIVIDED),
        edge("ordered post", "failed +receiver", DIVIDED),
        edge("parting", "failed +receiver", DIVIDED),
        edge("restored div.", "failed +receiver", DIVIDED),
        edge("restored post", "failed +receiver", DIVIDED),
        edge("transferring p", "failed +receiver", DIVIDED),
        edge("attached div.", "attached div.", DIVIDED),
        edge("attached div.", "done", Case(BUSY)),
        edge("attached div.", "failed +half", Case("source-qemu-lost-before-the-last-page-fails-by-name")),
        edge("attached div.", "failed +source", Case("destination-qemu-lost-in-a-postcopy-fails-by-name")),
        edge("committed div.", "attached div.", Case(BUSY)),
        edge("committed div.", "committed div.", DIVIDED),
        edge("committed div.", "failed +half", DIVIDED),
        edge("committed div.", "failed +source", DIVIDED),
        edge("committed div.", "resuming", DIVIDED),
        edge("failed +half", "failed +source", Case("source-qemu-lost-before-the-last-page-fails-by-name")),
        edge("ordered post", "cancelling", DIVIDED),
        edge("ordered post", "failed +human", DIVIDED),
        edge("ordered post", "ordered post", DIVIDED),
        edge("ordered post", "powered off", DIVIDED),
        edge("ordered post", "restored alone", DIVIDED),
        edge("ordered post", "restored post", DIVIDED),
        edge("ordered post", "resuming", DIVIDED),
        edge("ordered post", "severed +rcv", DIVIDED),
        edge("ordered post", "undoing", DIVIDED),
        edge("parting", "cancelling", DIVIDED),
        edge("parting", "failed +human", DIVIDED),
        edge("parting", "ordered post", Case(BUSY)),
        edge("parting", "powered off", DIVIDED),
        edge("restored div.", "committed div.", Case(BUSY)),
        edge("restored div.", "failed +human", DIVIDED),
        edge("restored div.", "restored alone", DIVIDED),
        edge("restored div.", "restored div.", DIVIDED),
        edge("restored div.", "resuming", DIVIDED),
        edge("restored div.", "severed +rcv", DIVIDED),
        edge("restored div.", "undoing", DIVIDED),
        edge("restored post", "committed", DIVIDED),
        edge("restored post", "failed +human", DIVIDED),
        edge("restored post", "powered off", DIVIDED),
        edge("restored post", "restored alone", DIVIDED),
        edge("restored post", "restored post", DIVIDED),
        edge("restored post", "resuming", DIVIDED),
        edge("restored post", "severed +rcv", DIVIDED),
        edge("restored post", "undoing", DIVIDED),
        edge("severed +rcv", "severed +src", DIVIDED),
        edge("severed +src", "failed", DIVIDED),
        edge("transferring p", "cancelling", DIVIDED),
        edge("transferring p", "failed +human", DIVIDED),
        edge("transferring p", "ordered post", DIVIDED),
        edge("transferring p", "parting", Case(BUSY)),
        edge("transferring p", "powered off", DIVIDED),
        edge("arming", "arming", LIMITS),
        edge("at the gate", "at the gate", LIMITS),
        edge("transferring", "transferring", LIMITS),
        edge("transferring +", "transferring +", LIMITS),
        edge("transferring p", "transferring p", LIMITS),
        edge("parting", "parting", LIMITS),
        edge("recalling", "recalling", LIMITS),
        edge("clearing live", "clearing live", LIMITS),
        edge("arming again", "arming again", LIMITS),
        edge("holding", "holding", LIMITS),
        edge("held", "held", LIMITS),
        edge("withheld", "withheld", LIMITS),
    ]
};

/// Where guests that go before their memory are shown.
const PARTED: &str = "a guest goes before its memory: the cases whose names begin with `postcopy`, and the \
     simulation, kill each part there";

/// Where guests that are shut down for their move are shown.
const COLD: &str = "a guest is shut down and started anew: the cases whose names begin with `cold` kill each \
     part there, and the core's own world tries every accident";

/// Fault points that no cell comes to, and why.
pub const POINTS_ELSEWHERE: [(&str, &str); 11] = [
    (
        "set_limits",
        "whoever dies there has changed nothing that the next driver does not tell again; the \
         agents' and the planner's own tests restart there",
    ),
    ("shutting_down", COLD),
    ("down", COLD),
    ("shut_down_guest", COLD),
    ("start_receiver", COLD),
    ("parting", PARTED),
    ("recover_receiver", PARTED),
    ("resume_transfer", PARTED),
    ("start_postcopy", PARTED),
    (
        "captured",
        "a switchover that is withheld: no surface closes a gate yet; the simulation does",
    ),
    (
        "forget_vm",
        "the VM is stopped and deleted, no guest is there to lose: the case \
         `agent-killed-while-it-forgets-a-vm-leaves-nothing-that-runs`",
    ),
];

/// Fault points at the instant of another one: they are of one statement that enters two phases.
pub const SAME_INSTANT: [(&str, &str); 2] = [
    ("before_commit.committed", "before_commit.restored"),
    ("after_commit.restored", "after_commit.committed"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::matrix::agent_table::MOMENTS;
    use crate::matrix::{Cell, cells, table};
    use crate::planners::Store;

    /// As the core prints it, and its own test keeps it.
    const TABLE: &str = include_str!("../../../planner/core/src/migration/table/table.txt");
    const PLANNER_POINTS: &str = include_str!("../../../planner/src/faults.txt");
    const AGENT_POINTS: &str = include_str!("../../../agent/src/faults.txt");

    /// Reads the transitions out of the table: columns of 17 characters, blocks with a head line.
    fn transitions() -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        let mut lines = TABLE.lines().skip(2);
        while lines.next().is_some_and(|head| head.starts_with(' ')) {
            for line in lines.by_ref().take_while(|line| !line.is_empty()) {
                let cell = |at: usize| line.get(at..(at + 17).min(line.len())).map(str::trim);
                let from = cell(0).unwrap_or_default().to_owned();
                for to in (17..line.len()).step_by(17).filter_map(cell) {
                    if !["", ".", "!", "too late"].contains(&to) {
                        found.insert((from.clone(), to.to_owned()));
                    }
                }
            }
        }
        found
    }

    fn cell_names() -> BTreeSet<String> {
        cells(&Store::EACH).iter().map(Cell::name).collect()
    }

    #[test]
    fn every_transition_of_the_machine_is_placed() {
        let listed: BTreeSet<_> =
            all().iter().map(|edge| (edge.from.to_owned(), edge.to.to_owned())).collect();
        let found = transitions();
        assert!(found.len() > 90, "{}", found.len());
        let missing: Vec<_> = found.difference(&listed).collect();
        let unknown: Vec<_> = listed.difference(&found).collect();
        assert!(missing.is_empty() && unknown.is_empty(), "{missing:?}, {unknown:?}");
        assert_eq!(all().len(), listed.len(), "one is there twice");
    }

    #[test]
    fn what_shows_a_transition_exists() {
        let names = cell_names();
        let cases: BTreeSet<_> = crate::cases::all().into_iter().map(|case| case.name).collect();
        for edge in all() {
            let there = match edge.shown {
                Shown::Around(scenario, commit) => {
                    table::rows().iter().any(|row| row.scenario == scenario && row.commit == commit)
                }
                Shown::Through(cell) => names.contains(cell),
                Shown::Case(case) => cases.contains(case),
                Shown::Simulated(reason) => !reason.is_empty(),
            };
            assert!(there, "{edge:?}");
        }
    }

    #[test]
    fn every_fault_point_is_in_the_matrix_over_each_store() {
        let elsewhere = |name: &str| POINTS_ELSEWHERE.iter().any(|(known, _)| *known == name);
        for store in Store::EACH {
            let faults: BTreeSet<_> =
                cells(&[store]).iter().map(|cell| cell.point.fault()).collect();
            let sides = ["before_commit", "after_commit"];
            let planner = PLANNER_POINTS.lines().flat_map(|name| sides.map(|side| (side, name)));
            let agent = AGENT_POINTS.lines().flat_map(|name| MOMENTS.map(|side| (side, name)));
            for (side, name) in planner.chain(agent).filter(|(_, name)| !elsewhere(name)) {
                let fault = format!("{side}.{name}");
                let same = SAME_INSTANT.iter().find(|(one, _)| *one == fault);
                assert!(
                    faults.contains(same.map_or(fault.as_str(), |(_, other)| other)),
                    "{fault}"
                );
            }
        }
    }
}
