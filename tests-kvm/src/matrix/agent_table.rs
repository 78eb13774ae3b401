//! The entries of the agents' journals, and how a death around each has to end.
//!
//! An agent writes down what it is about to do before QEMU hears of it, and what came of it before
//! it answers. The one who dies there is the agent itself, or its host as a machine.

use super::Outcome::{Either, One};
use super::Planned::Ends;
use super::scenario::Scenario;
use super::table::{
    ARRIVED, GUEST_CRASHED, GUEST_LOST, LOS2, NEXT, STARTED, STAYED, STOPPED, TURNED_OFF,
};
use super::{Planned, Point, Victim};

/// The instants around an entry: it is not written, it is written and not acted on, it is acted on
/// and not answered.
pub(super) const MOMENTS: [&str; 3] = ["before_journal", "after_journal", "before_answer"];

/// One command to an agent.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// What is under way.
    pub scenario: Scenario,
    /// What the agent is told.
    pub action: &'static str,
    host: &'static str,
    /// How the agent's own death ends, whatever the moment.
    agent: Planned,
    /// How its host's death ends at each moment.
    machine: [Planned; 3],
}

impl Row {
    /// Returns what is tried with it.
    #[must_use]
    pub fn points(&self) -> Vec<(Point, Victim, Planned)> {
        let (agent, machine) = if self.host == "a" {
            (Victim::SourceAgent, Victim::SourceHost)
        } else {
            (Victim::DestinationAgent, Victim::DestinationHost)
        };
        let point = |moment| Point::Agent { moment, action: self.action, host: self.host };
        let of_machine = MOMENTS.into_iter().zip(self.machine);
        MOMENTS
            .into_iter()
            .map(|moment| (point(moment), agent, self.agent))
            .chain(of_machine.map(|(moment, planned)| (point(moment), machine, planned)))
            .collect()
    }
}

const DONE: Planned = Ends(One(ARRIVED));
const BACK: Planned = Ends(One(STAYED));
const LOST: Planned = Ends(One(GUEST_LOST));
const CRSH: Planned = Ends(One(GUEST_CRASHED));
const RUNS: Planned = Ends(One(STARTED));
const STOP: Planned = Ends(One(STOPPED));
const OFF0: Planned = Ends(One(TURNED_OFF));
const SENT: Planned =
    Ends(Either(ARRIVED, GUEST_LOST, "the source has sent its last by then, or not"));

/// Returns the table.
#[must_use]
#[rustfmt::skip] // Its columns are the documentation.
pub fn rows() -> Vec<Row> {
    use Scenario as S;
    let row = |scenario, action, host, agent, machine| Row { scenario, action, host, agent, machine };
    vec![
        //                                             the agent
        //                                             |     its host: not written, written, acted on
        row(S::Move, "arm_receiver", "b",              DONE, [DONE, DONE, DONE]),
        row(S::Move, "start_transfer", "a",            DONE, [LOST, LOST, LOST]),
        row(S::Move, "order_switchover", "a",          DONE, [LOST, LOST, SENT]),
        row(S::Move, "continue_destination", "b",      DONE, [NEXT, CRSH, CRSH]),
        row(S::Move, "release_source", "a",            DONE, [DONE, DONE, DONE]),
        row(S::Cancel, "cancel_transfer", "a",         BACK, [LOST, LOST, LOST]),
        row(S::Cancel, "destroy_receiver", "b",        BACK, [BACK, BACK, BACK]),
        row(S::Undo, "destroy_receiver", "b",          BACK, [BACK, BACK, BACK]),
        row(S::LostReceiver, "resume_source", "a",     NEXT, [LOS2, LOS2, LOS2]),
        row(S::Held, "hold_guest", "a",                DONE, [LOST, LOST, LOST]),
        row(S::Held, "start_transfer", "a",            DONE, [LOST, LOST, LOST]),
        row(S::HeldCancel, "cancel_transfer", "a",     BACK, [LOST, LOST, LOST]),
        row(S::Downgrade, "cancel_transfer", "a",      DONE, [LOST, LOST, LOST]),
        row(S::Downgrade, "destroy_receiver", "b",     DONE, [DONE, DONE, DONE]),
        row(S::Downgrade, "hold_guest", "a",           DONE, [LOST, LOST, LOST]),
        row(S::Forward, "kill_source", "a",            DONE, [DONE, DONE, DONE]),
        row(S::PowerOff, "destroy_receiver", "b",      OFF0, [OFF0, OFF0, OFF0]),
        row(S::Start, "start_vm", "a",                 RUNS, [RUNS, RUNS, RUNS]),
        row(S::Stop, "stop_vm", "a",                   STOP, [STOP, STOP, STOP]),
    ]
}
