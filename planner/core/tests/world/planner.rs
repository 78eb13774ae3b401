//! The planner of the model: a store and a driver that is as careful as the contract asks, no more.

use vmferry_planner_core::evidence::{Seen, Sides, Times, permit, read};
use vmferry_planner_core::migration::{
    AutoConverge, Downgrade, Effect, Entry, Event, Gates, Guest, Listener, Migration,
    NotConverging, Opening, Side, Terms,
};
use vmferry_planner_core::stuck;
use vmferry_types::{BytesPerSec, Claim, Method, Millis, Timestamp, VmId};

use crate::model::{Answer, Command, FIRST, Hosts, ID, host};

/// What becomes of a command that a driver sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Luck {
    /// It arrives and is answered.
    Answered,
    /// It arrives; its answer is lost.
    AnswerLost,
    /// It is under way for long, and may arrive whenever.
    Delayed,
}

#[derive(Clone, Debug)]
struct Driver {
    claim: Claim,
    step: u64,
    source: Option<Seen>,
    destination: Option<Seen>,
}

/// The whole of it.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) hosts: Hosts,
    pub(crate) first: Migration,
    pub(crate) row: Migration,
    pub(crate) log: Vec<Entry>,
    pub(crate) under_way: Vec<Command>,
    entered: u64,
    claim: Claim,
    driver: Option<Driver>,
}

impl World {
    pub(crate) fn new(gates: Gates) -> Self {
        Self::open(gates, Method::Precopy, Downgrade::Never)
    }

    pub(crate) fn open(gates: Gates, method: Method, downgrade: Downgrade) -> Self {
        let terms = Terms {
            asked_destination: None,
            hold_limit: Millis(10_000),
            downtime_limit: Millis(100),
            transfer_timeout: Millis(3_600_000),
            stall_limit: Millis(30_000),
            switchover_limit: Millis(30_000),
            shutdown_limit: Millis(120_000),
            max_bandwidth: BytesPerSec(0),
            auto_converge: AutoConverge::Off,
            gates,
            gate_deadline: Millis(600_000),
            downgrade,
            not_converging: NotConverging::Abort,
        };
        let row = Migration::open(Opening {
            id: ID,
            vm: VmId::from_u128(2),
            source: host("a"),
            method,
            terms,
            found: Guest::Present,
            generation: FIRST,
            deadline: Timestamp(u64::MAX),
        })
        .expect("it is carried out");
        Self {
            hosts: Hosts::new(),
            first: row.clone(),
            row,
            log: Vec::new(),
            under_way: Vec::new(),
            entered: 1_000,
            claim: Claim::from_stored(0),
            driver: None,
        }
    }

    /// The planner dies; another, or the same again, starts from the row.
    pub(crate) fn planner_dies(&mut self) {
        self.driver = None;
    }

    /// A request or an answer becomes an event.
    pub(crate) fn apply(&mut self, event: Event) {
        let before = self.row.clone();
        if let Ok(entries) = self.row.advance(event) {
            for entry in entries {
                self.row = entry.after.clone();
                self.log.push(entry);
            }
            if self.row.entered_anew(&before) {
                self.entered = self.hosts.now;
            }
        }
    }

    /// The driver hears one agent, if it can.
    pub(crate) fn observe(&mut self, side: Side) {
        let Some(driver) = &mut self.driver else { return };
        if !self.hosts.claim(side, driver.claim) {
            return;
        }
        let seen = Some(self.hosts.end(side).observe(self.hosts.now));
        match side {
            Side::Source => driver.source = seen,
            Side::Destination => driver.destination = seen,
        }
    }

    fn sides(driver: &Driver) -> Sides {
        Sides {
            claim: driver.claim,
            source: driver.source.clone(),
            destination: driver.destination.clone(),
        }
    }

    /// One turn of the driver: read, or else do what is owed.
    pub(crate) fn drive(&mut self, luck: Luck) {
        let Some(driver) = self.driver.clone() else {
            self.take();
            return;
        };
        let sides = Self::sides(&driver);
        let times = Times { now: Timestamp(self.hosts.now), entered: Timestamp(self.entered) };
        if let Some(event) = read(&self.row, &sides, times) {
            self.apply(event);
            return;
        }
        let Some(effect) = self.row.outstanding() else { return };
        if permit(&self.row, &effect, &sides).is_err() {
            return;
        }
        match (&effect, effect.side()) {
            (Effect::TryAdmit, _) => self.apply(Event::Granted { destination: host("b") }),
            (Effect::Commit, _) => self.apply(Event::CommitAllowed),
            (_, None) => {}
            (_, Some(side)) => self.command(side, effect, luck),
        }
    }

    /// A driver takes the next claim; what it hears from now on is under that.
    fn take(&mut self) {
        self.claim = self.claim.next();
        // What was heard under an older claim stays at hand, and must count for nothing.
        let (source, destination) =
            self.driver.take().map_or((None, None), |old| (old.source, old.destination));
        self.driver = Some(Driver { claim: self.claim, step: 0, source, destination });
    }

    fn command(&mut self, side: Side, effect: Effect, luck: Luck) {
        let generation = self.row.books().generation;
        let Some(driver) = &mut self.driver else { return };
        driver.step += 1;
        let (claim, step) = (driver.claim, driver.step);
        let command = Command { side, claim, step, generation, effect };
        match luck {
            Luck::Answered => {
                let answer = self.hosts.execute(&command);
                self.answered(&command, &answer);
            }
            Luck::AnswerLost => {
                self.hosts.execute(&command);
                self.take();
            }
            Luck::Delayed => {
                self.under_way.push(command);
                self.take();
            }
        }
    }

    fn answered(&mut self, command: &Command, answer: &Answer) {
        match (answer, &command.effect) {
            (Answer::Unreachable, _) => self.take(),
            (Answer::Done, Effect::ArmReceiver) => {
                let listener = Listener::new("10.0.0.2".into(), 49_152);
                self.apply(Event::ReceiverArmed { listener });
            }
            (Answer::Refused("receiver_gone"), Effect::ArmReceiver) => {
                self.apply(Event::Refused { blockers: vec![] });
            }
            (Answer::Done | Answer::Refused(_), _) => {}
        }
        self.observe(command.side);
    }

    /// A command that was long under way arrives after all.
    pub(crate) fn arrives(&mut self, at: usize) {
        if at < self.under_way.len() {
            let command = self.under_way.remove(at);
            self.hosts.execute(&command);
        }
    }

    /// What it waits for, as a user would be told.
    pub(crate) fn waits_for(&self) -> Option<String> {
        let driver = self.driver.as_ref()?;
        stuck::waits_for(&self.row, &Self::sides(driver))
    }

    /// Nothing more will happen and nothing is owed.
    pub(crate) fn over(&self) -> bool {
        self.row.label().is_terminal() && self.row.outstanding().is_none()
    }

    /// Lets everything go on without further accidents.
    pub(crate) fn settle(&mut self) {
        for _ in 0..200 {
            if self.over() {
                return;
            }
            self.turn();
        }
    }

    /// One turn of a world without accidents.
    pub(crate) fn turn(&mut self) {
        self.hosts.now += 500;
        self.hosts.source_notices();
        self.hosts.destination_notices();
        self.hosts.progress();
        self.observe(Side::Source);
        self.observe(Side::Destination);
        self.drive(Luck::Answered);
    }

    /// Goes on, without accidents, until `there`.
    pub(crate) fn until(&mut self, there: impl Fn(&Self) -> bool) {
        for _ in 0..100 {
            if there(self) {
                return;
            }
            self.turn();
        }
        assert!(there(self), "never came there: {:?}", self.row.phase);
    }
}
