//! The planner's commits, and how a death around each has to end.
//!
//! A row is a commit. Its two lines are the instants before and after it; the columns are those who
//! die. What stands there follows from the design's table of deaths, by the phase that the store
//! holds at that instant: nothing was decided before the commit, all of it after.

use super::Outcome::{Either, One};
use super::Planned::{Differs, Ends, Never};
use super::scenario::Scenario;
use super::{End, Place, Planned, Point};

/// One commit of the planner.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// What is under way.
    pub scenario: Scenario,
    /// What is committed.
    pub commit: &'static str,
    /// The fault points before and after it: they differ where one statement enters two phases.
    faults: [&'static str; 2],
    before: [Planned; 8],
    after: [Planned; 8],
}

impl Row {
    /// Returns both instants, each with what is planned for every victim.
    #[must_use]
    pub fn points(&self) -> [(Point, [Planned; 8]); 2] {
        let [before, after] = self.faults;
        let point = |side, fault| Point::Planner { side, fault, commit: self.commit };
        [(point("before_commit", before), self.before), (point("after_commit", after), self.after)]
    }
}

const fn ended(phase: &'static str, place: Place, generations: u64) -> End {
    End { phase: Some(phase), place, generations }
}

pub(super) const ARRIVED: End = ended("done", Place::Destination, 1);
pub(super) const STAYED: End = ended("aborted", Place::Source, 0);
/// Back after the commit: the destination's generation was never used, the source takes the next.
pub(super) const RETURNED: End = ended("aborted", Place::Source, 2);
pub(super) const GUEST_LOST: End = ended("failed", Place::Lost, 0);
pub(super) const GUEST_CRASHED: End = ended("failed", Place::Lost, 1);
const ARRIVED_AND_LOST: End = ended("done", Place::Lost, 1);
const LOST_AFTER: End = ended("failed", Place::Lost, 2);
const RETURNED_AND_LOST: End = ended("aborted", Place::Lost, 2);
pub(super) const TURNED_OFF: End = ended("aborted", Place::Stopped, 0);
const LOST_BEFORE: End = End { phase: None, place: Place::Lost, generations: 0 };
const REFUSED: End = ended("refused", Place::Lost, 0);
const STAYED_AND_LOST: End = ended("aborted", Place::Lost, 0);
/// A first start takes the first generation.
pub(super) const STARTED: End = End { phase: None, place: Place::Source, generations: 1 };
const STARTED_AND_LOST: End = End { phase: None, place: Place::Lost, generations: 1 };
const NOT_STARTED: End = End { phase: None, place: Place::Stopped, generations: 1 };
pub(super) const STOPPED: End = End { phase: None, place: Place::Stopped, generations: 0 };

/// The migration goes on, or its guest went on: the guest runs on the destination.
const DONE: Planned = Ends(One(ARRIVED));
/// It is taken back: the guest runs on the source as before.
const BACK: Planned = Ends(One(STAYED));
/// It is taken back after its commit.
pub(super) const NEXT: Planned = Ends(One(RETURNED));
/// The guest died on the source, before the destination had all of it.
const LOST: Planned = Ends(One(GUEST_LOST));
/// The guest died on the source, on the way back after the commit.
pub(super) const LOS2: Planned = Ends(One(LOST_AFTER));
/// The guest died on the destination, after it went on there.
const CRSH: Planned = Ends(One(GUEST_CRASHED));
/// The source died when the destination had everything: done all the same.
const LATE: Planned = Ends(One(ARRIVED_AND_LOST));
/// The guest died on the source after the migration was over.
const GONE: Planned = Ends(One(STAYED_AND_LOST));
/// The same, after it was taken back after its commit.
const GON5: Planned = Ends(One(RETURNED_AND_LOST));
/// The guest turned itself off.
const OFF0: Planned = Ends(One(TURNED_OFF));
const RUNS: Planned = Ends(One(STARTED));
const STOP: Planned = Ends(One(STOPPED));
const FELL: Planned = Ends(One(STARTED_AND_LOST));

const NONE: Planned = Never("there is no receiver yet");
const GON1: Planned = Never("the receiver is gone: that is what is committed");
const GON2: Planned = Never("the source's QEMU is gone: that is what is committed");
const GON4: Planned = Never("the source's QEMU has ended already: its guest has turned itself off");
const GON3: Planned = Never("the source's QEMU has died already: that is what the scenario is");
const NOQ1: Planned = Never("the VM has no QEMU process yet");
const NOQ2: Planned = Never("the VM has no QEMU process any more");
const ALON: Planned = Never("a start or stop has one host");

/// Returns the table.
#[must_use]
pub fn rows() -> Vec<Row> {
    ROWS.to_vec()
}

const fn row(
    scenario: Scenario,
    commit: &'static str,
    faults: [&'static str; 2],
    before: [Planned; 8],
    after: [Planned; 8],
) -> Row {
    Row { scenario, commit, faults, before, after }
}

const fn same(name: &'static str) -> [&'static str; 2] {
    [name, name]
}

#[rustfmt::skip] // Its columns are the documentation.
const ROWS: &[Row] = {
    use Scenario as S;
    &[
        //                                                      planner
        //                                                      |     source's agent
        //                                                      |     |     destination's agent
        //                                                      |     |     |     both agents
        //                                                      |     |     |     |     source's QEMU
        //                                                      |     |     |     |     |     receiver's QEMU
        //                                                      |     |     |     |     |     |     source as a machine
        //                                                      |     |     |     |     |     |     |     destination as a machine
        row(S::Move, "admitted", same("admitted"),             [DONE, DONE, DONE, DONE, ASKD, NONE, ASKD, DONE],
                                                               [DONE, DONE, DONE, DONE, LOST, NONE, LOST, DONE]),
        row(S::Move, "armed", same("armed"),                   [DONE, DONE, DONE, DONE, LOST, AGAN, LOST, AGAN],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::Move, "ordered", same("ordered"),               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::Move, "committed", ["restored", "committed"],   [DONE, DONE, DONE, DONE, DONE, BCK2, DONE, BCK2],
                                                               [DONE, DONE, DONE, DONE, DONE, NEXT, DONE, NEXT]),
        row(S::Move, "attached", same("attached"),             [DONE, DONE, DONE, DONE, DONE, CRSH, DONE, MUTE],
                                                               [DONE, DONE, DONE, DONE, DONE, CRSH, DONE, MUTE]),
        row(S::Move, "done", same("done"),                     [DONE, DONE, DONE, DONE, GON2, MUTE, DONE, MUTE],
                                                               [DONE, DONE, DONE, DONE, GON2, LATE, DONE, LATE]),
        row(S::Cancel, "cancelling", same("cancelling"),       [BACK, BACK, BACK, BACK, LOST, BACK, LOST, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, BACK, LOST, BACK]),
        row(S::Cancel, "clearing", same("clearing"),           [BACK, BACK, BACK, BACK, LOST, BACK, SAID, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, BACK, SAID, BACK]),
        row(S::Cancel, "aborted", same("aborted"),             [BACK, BACK, BACK, BACK, ENDS, GON1, ENDS, BACK],
                                                               [BACK, BACK, BACK, BACK, GONE, GON1, GONE, BACK]),
        row(S::Undo, "undoing", same("undoing"),               [BACK, BACK, BACK, BACK, LOST, BACK, LOST, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, BACK, LOST, BACK]),
        row(S::Undo, "resuming", same("resuming"),             [BACK, BACK, BACK, BACK, LOST, GON1, LOST, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, GON1, LOST, BACK]),
        row(S::Undo, "clearing", same("clearing"),             [BACK, BACK, BACK, BACK, CLR1, GON1, CLR2, BACK],
                                                               [BACK, BACK, BACK, BACK, CLR1, GON1, CLR2, BACK]),
        row(S::LostReceiver, "resuming", same("resuming"),     [NEXT, NEXT, NEXT, NEXT, LOS2, GON1, LOS2, NEXT],
                                                               [NEXT, NEXT, NEXT, NEXT, LOS2, GON1, LOS2, NEXT]),
        row(S::LostReceiver, "aborted", same("aborted"),       [NEXT, NEXT, NEXT, NEXT, END2, GON1, END2, NEXT],
                                                               [NEXT, NEXT, NEXT, NEXT, GON5, GON1, GON5, NEXT]),
        row(S::LostSource, "failed", same("failed"),           [LOST, LOST, LOST, LOST, GON3, LOST, LOST, LOST],
                                                               [LOST, LOST, LOST, LOST, GON3, LOST, LOST, LOST]),
        row(S::Held, "armed", same("armed"),                   [DONE, DONE, DONE, DONE, LOST, AGAN, LOST, AGAN],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::Held, "held", same("held"),                     [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::Held, "ordered", same("ordered"),               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::Held, "committed", ["restored", "committed"],   [DONE, DONE, DONE, DONE, DONE, BCK2, DONE, BCK2],
                                                               [DONE, DONE, DONE, DONE, DONE, NEXT, DONE, NEXT]),
        row(S::HeldCancel, "cancelling", same("cancelling"),   [BACK, BACK, BACK, BACK, LOST, BACK, LOST, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, BACK, LOST, BACK]),
        row(S::HeldCancel, "clearing", same("clearing"),       [BACK, BACK, BACK, BACK, LOST, BACK, SAID, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, BACK, SAID, BACK]),
        row(S::Downgrade, "recalling", same("recalling"),      [DONE, DONE, DONE, DONE, LOST, REC1, LOST, REC2],
                                                               [DONE, DONE, DONE, DONE, LOST, REC1, LOST, REC2]),
        row(S::Downgrade, "clearing-live", same("clearing_live"), [DONE, DONE, DONE, DONE, LOST, REC3, LOST, REC3],
                                                               [DONE, DONE, DONE, DONE, LOST, DONE, LOST, DONE]),
        row(S::Downgrade, "again", same("admitted"),           [DONE, DONE, DONE, DONE, LOST, GON1, LOST, DONE],
                                                               [DONE, DONE, DONE, DONE, LOST, NONE, LOST, DONE]),
        row(S::Downgrade, "armed", same("armed"),              [DONE, DONE, DONE, DONE, LOST, AGAN, LOST, AGAN],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::Downgrade, "held", same("held"),                [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK],
                                                               [DONE, DONE, DONE, DONE, LOST, BACK, LOST, BACK]),
        row(S::DowngradeCancel, "clearing", same("clearing"),  [BACK, BACK, BACK, BACK, LOST, BACK, SAID, BACK],
                                                               [BACK, BACK, BACK, BACK, LOST, BACK, SAID, BACK]),
        row(S::Forward, "decided-forward", same("decided_forward"), [DONE, DONE, DONE, DONE, DONE, BACK, DONE, FWD1],
                                                               [DONE, DONE, DONE, DONE, DONE, BACK, DONE, FWD1]),
        row(S::Forward, "committed", ["restored", "committed"], [DONE, DONE, DONE, DONE, GON2, ONLY, DONE, ONLY],
                                                               [DONE, DONE, DONE, DONE, GON2, CRSH, DONE, CRSH]),
        row(S::PowerOff, "powered-off", same("powered_off"),   [OFF0, OFF0, OFF0, OFF0, GON4, OFF0, OFF1, OFF0],
                                                               [OFF0, OFF0, OFF0, OFF0, GON4, OFF0, OFF0, OFF0]),
        row(S::PowerOff, "aborted", same("aborted"),           [OFF0, OFF0, OFF0, OFF0, GON4, GON1, OFF0, OFF0],
                                                               [OFF0, OFF0, OFF0, OFF0, GON4, GON1, OFF0, OFF0]),
        row(S::Queue, "queued", same("queued"),                [DONE, DONE, DONE, DONE, ASKQ, NONE, ASKQ, DONE],
                                                               [DONE, DONE, DONE, DONE, GONE, NONE, GONE, DONE]),
        row(S::Queue, "admitted", same("admitted"),            [DONE, DONE, DONE, DONE, FIND, NONE, FIND, DONE],
                                                               [DONE, DONE, DONE, DONE, LOST, NONE, LOST, DONE]),
        row(S::QueueCancel, "aborted", same("aborted"),        [BACK, BACK, BACK, BACK, GONE, NONE, GONE, BACK],
                                                               [BACK, BACK, BACK, BACK, GONE, NONE, GONE, BACK]),
        row(S::Start, "starting", same("starting"),            [RUNS, RUNS, ALON, ALON, NOQ1, ALON, RUNS, ALON],
                                                               [RUNS, RUNS, ALON, ALON, NOQ1, ALON, RUNS, ALON]),
        row(S::Start, "started", same("started"),              [RUNS, RUNS, ALON, ALON, FALL, ALON, FALL, ALON],
                                                               [RUNS, RUNS, ALON, ALON, FELL, ALON, FELL, ALON]),
        row(S::Stop, "stopping", same("stopping"),             [STOP, STOP, ALON, ALON, FRST, ALON, FRST, ALON],
                                                               [STOP, STOP, ALON, ALON, STOP, ALON, STOP, ALON]),
        row(S::Stop, "stopped", same("stopped"),               [STOP, STOP, ALON, ALON, NOQ2, ALON, STOP, ALON],
                                                               [STOP, STOP, ALON, ALON, NOQ2, ALON, STOP, ALON]),
    ]
};

/// Nothing is written yet, and the planner that knows the guest to run dies: another one that is
/// asked refuses to move a guest that is gone, unless it has not heard of that either.
const ASKD: Planned =
    Differs { goes_on: One(GUEST_LOST), looks_anew: Either(REFUSED, GUEST_LOST, HEARD) };
const ASKQ: Planned =
    Differs { goes_on: One(STAYED_AND_LOST), looks_anew: Either(REFUSED, STAYED_AND_LOST, HEARD) };
const HEARD: &str =
    "the planner that is asked again has heard of the guest's death by then, or not";
/// Room was found, and the planner that found it dies: the next one finds the guest gone.
const FIND: Planned = Differs {
    goes_on: One(GUEST_LOST),
    looks_anew: Either(
        GUEST_LOST,
        STAYED_AND_LOST,
        "the next planner finds room, or that there is no guest to move, first",
    ),
};
/// A receiver that died before it was written down where it listens is started again.
const AGAN: Planned = Differs { goes_on: One(STAYED), looks_anew: One(ARRIVED) };
/// The guest was seen on the destination, which then falls silent.
const MUTE: Planned = Ends(Either(
    GUEST_CRASHED,
    ARRIVED_AND_LOST,
    "the source is released after or before the destination is back to say that the guest crashed",
));
/// The source has said that its guest goes on, and then falls silent.
const SAID: Planned = Differs {
    goes_on: Either(
        GUEST_LOST,
        STAYED_AND_LOST,
        "the planner that heard the source ends the receiver, and is done, after or before the source \
         is back to say that all is lost",
    ),
    looks_anew: One(GUEST_LOST),
};
/// What was seen is committed, then the guest's death is seen; or both answer the next planner.
const ENDS: Planned = Differs {
    goes_on: One(STAYED_AND_LOST),
    looks_anew: Either(GUEST_LOST, STAYED_AND_LOST, ANSWERS),
};
const END2: Planned = Differs {
    goes_on: One(RETURNED_AND_LOST),
    looks_anew: Either(LOST_AFTER, RETURNED_AND_LOST, ANSWERS),
};
/// The source goes on and dies, and nothing was left to be cleared away but a note.
const CLR1: Planned =
    Differs { goes_on: One(GUEST_LOST), looks_anew: Either(GUEST_LOST, STAYED_AND_LOST, ANSWERS) };
const CLR2: Planned = Differs {
    goes_on: Either(
        GUEST_LOST,
        STAYED_AND_LOST,
        "the destination's note is cleared away after or before the source is back to say that all is \
         lost",
    ),
    looks_anew: Either(GUEST_LOST, STAYED_AND_LOST, ANSWERS),
};
/// The host dies with the only record of how its guest ended, unless a planner has heard of it.
const OFF1: Planned = Differs { goes_on: One(TURNED_OFF), looks_anew: One(GUEST_LOST) };
const ANSWERS: &str = "to the next planner the source or the destination answers first";
/// The receiver of a transfer that is complete dies before that is committed: the planner that saw
/// it commits, and goes back under the next generation; one that looks anew sees the death first.
const BCK2: Planned = Differs { goes_on: One(RETURNED), looks_anew: One(STAYED) };
/// The receiver dies once it has said that it has everything, and its host is back with that.
const FWD1: Planned = Ends(Either(
    STAYED,
    RETURNED,
    "the destination is back before or after the planner has committed on its last word",
));
/// The receiver of a live attempt that its source has taken back dies: it was to go anyway.
const REC1: Planned =
    Differs { goes_on: One(STAYED), looks_anew: Either(STAYED, ARRIVED, ANSWERS) };
const REC2: Planned = Differs {
    goes_on: Either(
        ARRIVED,
        STAYED,
        "the source says that its guest runs before or after the destination is back to say that the \
         receiver was lost: its receiver is to go, or was lost",
    ),
    looks_anew: Either(STAYED, ARRIVED, ANSWERS),
};
/// The same after the source's word is written down, or is to be.
const REC3: Planned =
    Differs { goes_on: One(ARRIVED), looks_anew: Either(STAYED, ARRIVED, ANSWERS) };
/// The last one that has the guest dies: under the generation that is committed meanwhile, or before.
const ONLY: Planned = Differs { goes_on: One(GUEST_CRASHED), looks_anew: One(GUEST_LOST) };
/// Asked again, a stop may find the guest lost already.
const FRST: Planned =
    Differs { goes_on: One(STOPPED), looks_anew: Either(STOPPED, LOST_BEFORE, HEARD) };
/// A start that is committed is lost after; one that nobody has committed goes on, or is seen to
/// have failed.
const FALL: Planned = Differs {
    goes_on: One(STARTED_AND_LOST),
    looks_anew: Either(
        STARTED,
        NOT_STARTED,
        "the next planner gives the command again before or after the agent has seen the death",
    ),
};
