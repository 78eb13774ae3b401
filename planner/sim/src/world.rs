//! The world: one seed, one clock, all that exists.
//!
//! Plain data under one lock, changed by tasks of one thread under tokio's paused clock, so that
//! the same seed gives the same history. What must never happen is checked where it would happen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use vmferry_planner::clock::simulated::{self, Machine};
use vmferry_types::{Bytes, Claim, Generation, HostId, MigrationId, PhaseLabel, Step, VmId};

use crate::bugs::Bug;
use crate::channel::Channel;
use crate::dice::Dice;
use crate::host::{Host, Why};
use crate::store::Tables;
use crate::trace::{Detail, Trace};
use crate::weather::Weather;

/// When every simulated world begins, in microseconds since 1970.
pub(crate) const EPOCH_US: u64 = 1_800_000_000_000_000;

/// Names a transfer between two QEMU processes.
pub(crate) type ChannelId = u64;

/// Where a message comes from or goes to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Planner(u32),
    Host(HostId),
}

/// Of which end something was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    Source,
    Destination,
}

/// Which invariant does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// I1: at most one QEMU process of a VM runs its vCPUs.
    OneRuns,
    /// I1: what runs is never an older past of the guest than one that ran already.
    NoOlderPast,
    /// I2: generations never go back, and no effect lands under an old one.
    Generations,
    /// R2: a row is taken from a planner only once its lease has ended.
    LeaseHolds,
    /// I3: no host is above its capacity, and nothing stays reserved.
    Capacity,
    /// I4: each migration ends, or is stuck with a named cause.
    Ends,
    /// I5: a guest is lost only by what happened to it, never by a decision.
    NotLost,
    /// R7: nothing is done that no row has owed.
    CommitThenAct,
    /// I6: a host enters maintenance, or is granted its retirement, only while it is empty.
    SeenEmpty,
    /// I7: no receiver, tap or row is forgotten.
    NothingLeaks,
    /// I8: the log replays to the row.
    Replays,
}

impl Invariant {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::OneRuns,
        Self::NoOlderPast,
        Self::Generations,
        Self::LeaseHolds,
        Self::Capacity,
        Self::Ends,
        Self::NotLost,
        Self::CommitThenAct,
        Self::SeenEmpty,
        Self::NothingLeaks,
        Self::Replays,
    ];

    /// Returns its number in the design, and what it says.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::OneRuns => "I1 one runs",
            Self::NoOlderPast => "I1 no older past runs",
            Self::Generations => "I2 generations",
            Self::LeaseHolds => "R2 a lease holds",
            Self::Capacity => "I3 capacity",
            Self::Ends => "I4 every migration ends",
            Self::NotLost => "I5 no guest is lost by a decision",
            Self::CommitThenAct => "R7 commit, then act",
            Self::SeenEmpty => "I6 empty when it is said to be",
            Self::NothingLeaks => "I7 nothing leaks",
            Self::Replays => "I8 the log replays",
        }
    }
}

/// An invariant that did not hold, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub invariant: Invariant,
    /// How.
    pub what: String,
    /// When, in milliseconds since the world began.
    pub at_ms: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} ms: {}", self.invariant.label(), self.at_ms, self.what)
    }
}

/// What is true of a guest, whoever knows it.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that are true or not, each by itself, as a world has them"
)]
pub(crate) struct Guest {
    /// Its newest past. Whoever holds another may not run it.
    pub(crate) head: u64,
    /// Where its vCPUs run.
    pub(crate) runs: Option<(HostId, u32)>,
    /// What destroyed its last copy, if that was nobody's decision.
    pub(crate) lost: Option<String>,
    /// When a copy of its newest past was last lost by itself, while there was another.
    pub(crate) copy_lost_ms: Option<u64>,
    /// A planner went forward without the source, and nobody alive could know that it had run on.
    pub(crate) blindly: bool,
    /// Why it last went on.
    pub(crate) went_on: Why,
    /// Where it was ended by a release that came before it was let go on elsewhere.
    pub(crate) released_early: Option<HostId>,
    /// It turned itself off.
    pub(crate) off: bool,
    pub(crate) memory: Bytes,
}

/// Sources of chance.
#[derive(Debug)]
pub(crate) struct AllDice {
    pub(crate) network: Dice,
    pub(crate) agent: Dice,
    pub(crate) qemu: Dice,
    pub(crate) store: Dice,
    pub(crate) planner: Dice,
    pub(crate) operator: Dice,
}

/// All that exists.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) bug: Option<Bug>,
    pub(crate) weather: Weather,
    pub(crate) dice: AllDice,
    pub(crate) trace: Trace,
    pub(crate) hosts: BTreeMap<HostId, Host>,
    /// From where to where nothing arrives.
    pub(crate) cuts: BTreeSet<(Place, Place)>,
    /// Planners whose store does not answer.
    pub(crate) storeless: BTreeSet<u32>,
    /// The machines of the planners.
    pub(crate) machines: BTreeMap<u32, Arc<Machine>>,
    pub(crate) channels: BTreeMap<ChannelId, Channel>,
    pub(crate) guests: BTreeMap<VmId, Guest>,
    /// The newest claim and step that an agent has heard of a VM, whatever it remembers of them.
    pub(crate) words: BTreeMap<(HostId, VmId), (Claim, Step)>,
    /// The newest generation that any commit gave out.
    pub(crate) ledger: BTreeMap<VmId, Generation>,
    /// When a command left a planner, by VM, claim and step.
    pub(crate) sent: BTreeMap<(VmId, u64, u64), u64>,
    /// When a planner was first told that an end's process is gone, by VM and claim.
    pub(crate) ends_told: BTreeMap<(VmId, u64, Told), u64>,
    /// VMs that were moved without a planner, which may not have heard of it yet.
    pub(crate) by_hand: BTreeSet<VmId>,
    /// The generations of the rows of VMs, as they were last looked at.
    pub(crate) rows_seen: BTreeMap<VmId, Generation>,
    /// What each admission has ever owed, by the name of the command.
    pub(crate) owed: BTreeSet<(MigrationId, &'static str)>,
    pub(crate) tables: Tables,
    pub(crate) violations: Vec<Violation>,
    pub(crate) script: Script,
    pub(crate) counts: Counts,
    bells: BTreeMap<(HostId, VmId), watch::Sender<u64>>,
    next: u64,
    start: Instant,
}

/// What a directed test wants to happen at one exact point.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    /// At the how many-th point of its kind, what happens.
    pub(crate) at: Vec<(PointKind, u64, Mishap)>,
    /// Rings when someone is to ask for a cancel.
    pub(crate) cancel: Arc<Notify>,
    /// What was done at each point of a kind, in order.
    pub(crate) done: BTreeMap<PointKind, Vec<&'static str>>,
}

/// Points that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PointKind {
    /// A call of the store that writes.
    StoreWrite,
    /// A call of the store that reads.
    StoreRead,
    /// A command to an agent.
    Command,
    /// A claim, or a look.
    Look,
    /// A step within an agent, between two of its own writes or words to QEMU.
    AgentStep,
    /// A change of state of a QEMU process.
    QemuStep,
}

/// What happens at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// The planner ends before the call leaves it.
    PlannerDiesBefore,
    /// The planner ends after the call was carried out, before it hears so.
    PlannerDiesAfter,
    /// The call does not arrive.
    RequestLost,
    /// The answer does not arrive.
    AnswerLost,
    /// The agent answers that something failed, having done nothing.
    Refused,
    /// The call arrives a second time at once.
    Doubled,
    /// The call arrives a second time, so many milliseconds later.
    DoubledLate(u64),
    /// The call arrives only so many milliseconds later; the caller has given up by then.
    Late(u64),
    /// The agent ends right here.
    AgentDies,
    /// The agent ends as the call arrives, having done nothing.
    AgentDiesBefore,
    /// The agent ends once the call was carried out, before it answers.
    AgentDiesAfter,
    /// The source's journal is lost right here, and its agent starts without.
    SourceJournalLost,
    /// The destination's journal is lost right here, and its agent starts without.
    DestinationJournalLost,
    /// The source's QEMU is killed right here.
    SourceQemuDies,
    /// The destination's QEMU is killed right here.
    DestinationQemuDies,
    /// The host of the source crashes right here.
    SourceHostDies,
    /// The host of the destination crashes right here.
    DestinationHostDies,
    /// The channel between source and destination breaks right here.
    ChannelBreaks,
    /// The source's QEMU falls silent right here, and sends no more.
    SourceFreezes,
    /// Someone asks to cancel right here.
    Cancel,
}

/// What a schedule came through: a run in which nothing happens proves nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Migrations opened.
    pub opened: u64,
    /// How each ended.
    pub ended: BTreeMap<PhaseLabel, u64>,
    /// Deaths of planners.
    pub planner_deaths: u64,
    /// Deaths of agents.
    pub agent_deaths: u64,
    /// Deaths of QEMU processes that nobody commanded.
    pub qemu_deaths: u64,
    /// Crashes of hosts.
    pub host_crashes: u64,
    /// Journals lost.
    pub journals_lost: u64,
    /// Journals that a planner seeded again.
    pub journals_seeded: u64,
    /// Guests that went on from an older past because whoever saw the source run on was dead.
    pub unknowable: u64,
    /// Times that a planner's machine stood still.
    pub freezes: u64,
    /// Calls of the store that failed.
    pub store_failures: u64,
    /// Gates that were opened by an operator.
    pub gates_opened: u64,
    /// Points that the world came through: writes, calls, steps within agents and QEMUs.
    pub steps: u64,
    /// Messages lost, doubled or late.
    pub mishaps: u64,
    /// Starts and stops admitted, by name.
    pub asked: BTreeMap<&'static str, u64>,
    /// How each start and stop ended.
    pub powers: BTreeMap<(&'static str, &'static str), u64>,
    /// Commands carried out by agents, by name.
    pub commands: BTreeMap<&'static str, u64>,
    /// Hosts that entered maintenance or were granted their retirement, by which.
    pub emptied: BTreeMap<&'static str, u64>,
}

impl State {
    pub(crate) fn new(seed: u64, weather: Weather, detail: Detail, bug: Option<Bug>) -> Self {
        Self {
            bug,
            weather,
            dice: AllDice {
                network: Dice::new(seed, "network"),
                agent: Dice::new(seed, "agent"),
                qemu: Dice::new(seed, "qemu"),
                store: Dice::new(seed, "store"),
                planner: Dice::new(seed, "planner"),
                operator: Dice::new(seed, "operator"),
            },
            trace: Trace::new(detail),
            hosts: BTreeMap::new(),
            cuts: BTreeSet::new(),
            storeless: BTreeSet::new(),
            machines: BTreeMap::new(),
            channels: BTreeMap::new(),
            guests: BTreeMap::new(),
            words: BTreeMap::new(),
            ledger: BTreeMap::new(),
            sent: BTreeMap::new(),
            ends_told: BTreeMap::new(),
            by_hand: BTreeSet::new(),
            rows_seen: BTreeMap::new(),
            owed: BTreeSet::new(),
            tables: Tables::default(),
            violations: Vec::new(),
            script: Script::default(),
            counts: Counts::default(),
            bells: BTreeMap::new(),
            next: 0,
            start: Instant::now(),
        }
    }

    /// Milliseconds since the world began.
    pub(crate) fn at_ms(&self) -> u64 {
        millis(Instant::now().saturating_duration_since(self.start))
    }

    /// A host's monotonic clock, in microseconds; never zero.
    pub(crate) fn monotonic_us(&self) -> u64 {
        let since = Instant::now().saturating_duration_since(self.start);
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX).saturating_add(1_000_000)
    }

    /// Returns a number that was never given out.
    pub(crate) const fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        let at = self.at_ms();
        self.trace.add(at, line);
    }

    pub(crate) fn violated(&mut self, invariant: Invariant, what: String) {
        let at_ms = self.at_ms();
        self.note(|| format!("VIOLATION {}: {what}", invariant.label()));
        self.violations.push(Violation { invariant, what, at_ms });
    }

    /// Says whether a mistake is made on purpose.
    pub(crate) fn bugged(&self, bug: Bug) -> bool {
        cfg!(feature = "deliberate-bugs") && self.bug == Some(bug)
    }

    /// Says whether what is sent from one place arrives at another.
    pub(crate) fn reaches(&self, from: &Place, to: &Place) -> bool {
        let up = |place: &Place| match place {
            Place::Planner(_) => true,
            Place::Host(host) => self.hosts.get(host).is_some_and(|host| host.up),
        };
        up(from) && up(to) && !self.cuts.iter().any(|cut| (&cut.0, &cut.1) == (from, to))
    }

    /// Says whether a connection between two places can be kept.
    pub(crate) fn connected(&self, one: &Place, other: &Place) -> bool {
        self.reaches(one, other) && self.reaches(other, one)
    }

    /// Returns the machine of a planner.
    pub(crate) fn machine(&mut self, number: u32) -> Arc<Machine> {
        Arc::clone(self.machines.entry(number).or_default())
    }

    /// The wall clock of a host, in milliseconds.
    pub(crate) fn wall_ms(&self, host: &HostId) -> u64 {
        let skew = self.hosts.get(host).map_or(0, |host| host.skew_us);
        simulated::true_us().unwrap_or(EPOCH_US).saturating_add_signed(skew) / 1000
    }

    /// Counts a point of a kind, at which something is done, and says what a directed test wants to
    /// happen there.
    pub(crate) fn point(&mut self, kind: PointKind, what: &'static str) -> Option<Mishap> {
        self.counts.steps += 1;
        self.check_step();
        let done = self.script.done.entry(kind).or_default();
        done.push(what);
        let count = u64::try_from(done.len()).unwrap_or(u64::MAX);
        let mut at = self.script.at.iter();
        let mishap = at.find(|at| (at.0, at.1) == (kind, count)).map(|at| at.2);
        if let Some(mishap) = mishap {
            self.note(|| format!("mishap at {kind:?} {count} ({what}): {mishap:?}"));
        }
        mishap
    }

    /// Rings for all who watch a VM at a host.
    pub(crate) fn ring(&mut self, host: &HostId, vm: VmId) {
        if let Some(bell) = self.bells.get(&(host.clone(), vm)) {
            bell.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    pub(crate) fn bell(&mut self, host: &HostId, vm: VmId) -> watch::Receiver<u64> {
        let key = (host.clone(), vm);
        self.bells.entry(key).or_insert_with(|| watch::channel(0).0).subscribe()
    }
}

/// The world, shared.
#[derive(Clone, Debug)]
pub(crate) struct World {
    state: Arc<Mutex<State>>,
    tasks: TaskTracker,
    /// What is being asked for, as long as nobody has answered.
    asks: TaskTracker,
}

impl World {
    pub(crate) fn new(state: State) -> Self {
        Self {
            state: Arc::new(Mutex::new(state)),
            tasks: TaskTracker::new(),
            asks: TaskTracker::new(),
        }
    }

    /// Changes or reads the world; nothing else happens meanwhile.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets something happen beside everything else.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Lets someone ask for something.
    pub(crate) fn spawn_ask(&self, ask: impl Future<Output = ()> + Send + 'static) {
        self.asks.spawn(ask);
    }

    /// Says whether anyone waits for an answer to what was asked for.
    pub(crate) fn is_asked(&self) -> bool {
        !self.asks.is_empty()
    }

    pub(crate) fn note(&self, line: impl FnOnce() -> String) {
        self.with(|state| state.note(line));
    }
}

pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// The vocabulary that messages use for an id that may be missing.
pub(crate) fn id_text(id: Option<MigrationId>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}

impl Counts {
    /// Adds what another schedule came through.
    pub fn add(&mut self, other: &Self) {
        let Self {
            opened,
            ended,
            planner_deaths,
            agent_deaths,
            qemu_deaths,
            host_crashes,
            journals_lost,
            journals_seeded,
            unknowable,
            freezes,
            store_failures,
            gates_opened,
            steps,
            mishaps,
            asked,
            powers,
            commands,
            emptied,
        } = other;
        for (sum, count) in [
            (&mut self.opened, opened),
            (&mut self.planner_deaths, planner_deaths),
            (&mut self.agent_deaths, agent_deaths),
            (&mut self.qemu_deaths, qemu_deaths),
            (&mut self.host_crashes, host_crashes),
            (&mut self.journals_lost, journals_lost),
            (&mut self.journals_seeded, journals_seeded),
            (&mut self.unknowable, unknowable),
            (&mut self.freezes, freezes),
            (&mut self.store_failures, store_failures),
            (&mut self.gates_opened, gates_opened),
            (&mut self.steps, steps),
            (&mut self.mishaps, mishaps),
        ] {
            *sum += count;
        }
        add_each(&mut self.ended, ended);
        add_each(&mut self.asked, asked);
        add_each(&mut self.powers, powers);
        add_each(&mut self.commands, commands);
        add_each(&mut self.emptied, emptied);
    }
}

fn add_each<K: Ord + Clone>(sums: &mut BTreeMap<K, u64>, counts: &BTreeMap<K, u64>) {
    for (key, count) in counts {
        *sums.entry(key.clone()).or_default() += count;
    }
}
