//! A guest that is shut down for its move, under any accident.
//!
//! Two agents that keep what agents keep, a guest that heeds its power button when it likes, and a
//! driver that may die at any step. `PROPTEST_CASES` asks for more of them.

use proptest::prelude::*;
use vmferry_planner_core::evidence::{
    Continued, Ended, Handed, Heard, Held, Knowledge, Ready, RunState, Seen, Shutdown, Sides,
    Times, TransferState, permit, read,
};
use vmferry_planner_core::migration::check::{check_step, replay};
use vmferry_planner_core::migration::{
    AutoConverge, Back, Cause, Downgrade, Effect, Entry, Event, Gates, GoneProof, Guest, Migration,
    NotConverging, Opening, Phase, Process, ProofKind, Side, Terms,
};
use vmferry_types::{
    BytesPerSec, Claim, Generation, Method, Millis, PhaseLabel, Role, Timestamp, VmId,
};

use crate::model::{FIRST, ID, host};

/// How long the guest has to turn itself off.
const SHUTDOWN: u64 = 5_000;
/// How long what an agent said is its word of now.
const HEARD: u64 = 3_000;

/// A QEMU process of the VM on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Qemu {
    Never,
    /// There; whether its vCPUs run.
    Alive {
        pid: u32,
        runs: bool,
    },
    /// Gone; whether the guest turned itself off.
    Gone {
        pid: u32,
        by_guest: bool,
    },
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what a journal says, fact by fact")]
struct End {
    side: Side,
    up: bool,
    claim: Claim,
    step: u64,
    generation: Generation,
    role: Role,
    qemu: Qemu,
    pids: u32,
    asked: bool,
    gave_up: Option<String>,
    ready: bool,
    continued: bool,
}

impl End {
    fn runs(&self) -> bool {
        matches!(self.qemu, Qemu::Alive { runs: true, .. })
    }

    fn alive(&self) -> bool {
        matches!(self.qemu, Qemu::Alive { .. })
    }

    #[expect(clippy::fn_params_excessive_bools, reason = "a fact")]
    fn launch(&mut self, runs: bool) {
        self.pids += 1;
        self.qemu = Qemu::Alive { pid: self.pids, runs };
    }

    fn proof(&self, now: u64) -> Option<GoneProof> {
        let (kind, pid) = match self.qemu {
            Qemu::Alive { .. } => return None,
            Qemu::Never => (ProofKind::NeverStarted, 0),
            Qemu::Gone { pid, .. } => (ProofKind::ExitRecord, pid),
        };
        // What was never there is not proven before somebody asks for it.
        let shown = kind == ProofKind::ExitRecord || self.pids == u32::MAX;
        shown.then(|| GoneProof {
            kind,
            host: self.name(),
            boot_id: "x".into(),
            pid,
            start_time: 1,
            ended: String::new(),
            at: Timestamp(now),
            stderr_tail: String::new(),
        })
    }

    fn name(&self) -> vmferry_types::HostId {
        host(match self.side {
            Side::Source => "a",
            Side::Destination => "b",
        })
    }

    #[expect(clippy::fn_params_excessive_bools, reason = "a fact")]
    fn observe(&self, now: u64, proven: bool) -> Seen {
        let (process, run_state) = match self.qemu {
            Qemu::Alive { pid, runs } => {
                let process = Process { pid, start_time: 1, boot_id: "x".into() };
                (Some(process), if runs { RunState::Running } else { RunState::Prelaunch })
            }
            Qemu::Gone { by_guest: true, .. } => (None, RunState::Shutdown),
            Qemu::Never | Qemu::Gone { .. } => (None, RunState::Unknown),
        };
        let never = proven && self.qemu == Qemu::Never;
        let never = never.then(|| Self { pids: u32::MAX, ..self.clone() }.proof(now)).flatten();
        Seen {
            process,
            gone: self.proof(now).or(never),
            ended: match self.qemu {
                Qemu::Gone { by_guest: true, .. } => Ended::ByGuest,
                Qemu::Never | Qemu::Alive { .. } | Qemu::Gone { .. } => Ended::Unsaid,
            },
            run_state,
            role: self.role,
            claim: self.claim,
            generation: self.generation,
            knowledge: Knowledge::Known,
            heard: Heard::Now,
            host: self.name(),
            migration: Some(ID),
            transfer: TransferState::None,
            transfer_error: String::new(),
            passes: 0,
            diverges: String::new(),
            tuning: None,
            waits_at: None,
            handed: Handed::No,
            gave_up: self.gave_up.clone(),
            held: Held::No,
            shutdown: if self.asked { Shutdown::Asked } else { Shutdown::Unasked },
            ready: if self.ready { Ready::Yes } else { Ready::No },
            continued: if self.continued { Continued::Yes } else { Continued::No },
            stopped_at_us: 0,
            resumed_at_us: 0,
            still: Millis::ZERO,
            trouble: String::new(),
            at: Timestamp(now),
        }
    }
}

#[derive(Clone, Debug)]
struct Command {
    side: Side,
    claim: Claim,
    step: u64,
    generation: Generation,
    effect: Effect,
}

#[derive(Clone, Debug)]
struct Driver {
    claim: Claim,
    step: u64,
    source: Option<Seen>,
    destination: Option<Seen>,
}

struct World {
    first: Migration,
    row: Migration,
    log: Vec<Entry>,
    source: End,
    destination: End,
    /// Who was told that nothing was ever there.
    proven: [bool; 2],
    under_way: Vec<Command>,
    now: u64,
    entered: u64,
    claim: Claim,
    driver: Option<Driver>,
    /// The guest left by itself, or was killed.
    left: bool,
    killed: Vec<Side>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Luck {
    Answered,
    AnswerLost,
    Delayed,
}

impl World {
    fn new(found: Guest) -> Self {
        let terms = Terms { shutdown_limit: Millis(SHUTDOWN), ..terms() };
        let row = Migration::open(Opening {
            id: ID,
            vm: VmId::from_u128(2),
            source: host("a"),
            method: Method::Cold,
            terms,
            found,
            generation: FIRST,
            deadline: Timestamp(u64::MAX),
        })
        .expect("it is carried out");
        let end = |side, role, generation| End {
            side,
            up: true,
            claim: Claim::from_stored(0),
            step: 0,
            generation,
            role,
            qemu: Qemu::Never,
            pids: 0,
            asked: false,
            gave_up: None,
            ready: false,
            continued: false,
        };
        let mut source = end(Side::Source, Role::Stopped, FIRST);
        if found == Guest::Present {
            source.role = Role::Running;
            source.launch(true);
        }
        Self {
            first: row.clone(),
            row,
            log: Vec::new(),
            source,
            destination: end(Side::Destination, Role::Absent, Generation::from_stored(0)),
            proven: [false; 2],
            under_way: Vec::new(),
            now: 1_000,
            entered: 1_000,
            claim: Claim::from_stored(0),
            driver: None,
            left: false,
            killed: Vec::new(),
        }
    }

    fn end_mut(&mut self, side: Side) -> &mut End {
        match side {
            Side::Source => &mut self.source,
            Side::Destination => &mut self.destination,
        }
    }

    fn apply(&mut self, event: Event) {
        let before = self.row.clone();
        if let Ok(entries) = self.row.advance(event) {
            for entry in entries {
                self.row = entry.after.clone();
                self.log.push(entry);
            }
            if self.row.entered_anew(&before) {
                self.entered = self.now;
            }
        }
    }

    fn observe(&mut self, side: Side) {
        let Some(claim) = self.driver.as_ref().map(|driver| driver.claim) else { return };
        let (now, proven) = (self.now, self.proven);
        let end = self.end_mut(side);
        if !end.up || claim < end.claim {
            return;
        }
        if claim > end.claim {
            (end.claim, end.step) = (claim, 0);
        }
        let seen = Some(end.observe(now, proven[usize::from(side == Side::Destination)]));
        let Some(driver) = &mut self.driver else { return };
        match side {
            Side::Source => driver.source = seen,
            Side::Destination => driver.destination = seen,
        }
    }

    fn take(&mut self) {
        self.claim = self.claim.next();
        let old = self.driver.take();
        let (source, destination) = old.map_or((None, None), |old| (old.source, old.destination));
        self.driver = Some(Driver { claim: self.claim, step: 0, source, destination });
    }

    fn drive(&mut self, luck: Luck) {
        let Some(driver) = self.driver.clone() else {
            self.take();
            return;
        };
        let heard = |seen: Option<Seen>| {
            seen.map(|seen| {
                let late = self.now - seen.at.value() > HEARD;
                Seen { heard: if late { Heard::Before } else { Heard::Now }, ..seen }
            })
        };
        let sides = Sides {
            claim: driver.claim,
            source: heard(driver.source),
            destination: heard(driver.destination),
        };
        let times = Times { now: Timestamp(self.now), entered: Timestamp(self.entered) };
        if let Some(event) = read(&self.row, &sides, times) {
            self.apply(event);
            return;
        }
        let Some(effect) = self.row.outstanding() else { return };
        if permit(&self.row, &effect, &sides).is_err() {
            return;
        }
        let side = match (&effect, effect.side()) {
            (Effect::TryAdmit, _) => return self.apply(Event::Granted { destination: host("b") }),
            (Effect::Commit, _) => return self.apply(Event::CommitAllowed),
            (_, None) => return,
            (_, Some(side)) => side,
        };
        let generation = self.row.books().generation;
        let Some(driver) = &mut self.driver else { return };
        driver.step += 1;
        let (claim, step) = (driver.claim, driver.step);
        let command = Command { side, claim, step, generation, effect };
        match luck {
            Luck::Answered => match self.execute(&command) {
                Ok(()) => self.observe(side),
                Err("unreachable") => self.take(),
                Err(_) if self.row.begins_with(&command.effect) => {
                    self.apply(Event::Refused { blockers: vec![] });
                }
                Err(_) => self.observe(side),
            },
            Luck::AnswerLost => {
                let _lost = self.execute(&command);
                self.take();
            }
            Luck::Delayed => {
                self.under_way.push(command);
                self.take();
            }
        }
    }

    fn execute(&mut self, command: &Command) -> Result<(), &'static str> {
        let end = self.end_mut(command.side);
        if !end.up {
            return Err("unreachable");
        }
        if command.claim != end.claim || command.step <= end.step {
            return Err("stale_claim");
        }
        if command.generation < end.generation {
            return Err("stale_generation");
        }
        (end.step, end.generation) = (command.step, command.generation);
        self.act(&command.effect)
    }

    fn act(&mut self, effect: &Effect) -> Result<(), &'static str> {
        match effect {
            Effect::ShutDownGuest => match (self.source.role, self.source.alive()) {
                (Role::Running, true) => {
                    (self.source.asked, self.source.gave_up) = (true, None);
                    Ok(())
                }
                (Role::Running, false) => Ok(()),
                _ => {
                    self.proven[0] = true;
                    Ok(())
                }
            },
            Effect::CancelTransfer { cause } if self.source.alive() => {
                self.source.gave_up = Some(cause.clone());
                Ok(())
            }
            Effect::CancelTransfer { .. } => Err("wrong_state"),
            Effect::StartReceiver => self.start_receiver(),
            Effect::ContinueDestination => self.go_on(),
            Effect::ReleaseSource { .. } => {
                assert!(!self.source.alive(), "a source that runs is released");
                (self.source.role, self.source.asked) = (Role::Absent, false);
                Ok(())
            }
            Effect::DestroyReceiver { .. } => {
                let end = &mut self.destination;
                assert!(!end.continued, "a destination that may run is destroyed");
                if let Qemu::Alive { pid, .. } = end.qemu {
                    end.qemu = Qemu::Gone { pid, by_guest: false };
                }
                (end.role, end.ready) = (Role::Absent, false);
                self.proven[1] = true;
                Ok(())
            }
            Effect::RestartSource { .. } => {
                assert!(!self.destination.alive(), "a source is started beside a receiver");
                assert!(!self.destination.continued, "a source is started beside what went on");
                if self.source.alive() {
                    return Ok(());
                }
                (self.source.asked, self.source.gave_up) = (false, None);
                self.source.role = Role::Running;
                self.source.launch(true);
                Ok(())
            }
            Effect::TryAdmit
            | Effect::ArmReceiver
            | Effect::HoldGuest
            | Effect::StartTransfer { .. }
            | Effect::StartPostcopy
            | Effect::RecoverReceiver
            | Effect::ResumeTransfer { .. }
            | Effect::OrderSwitchover
            | Effect::KillSource { .. }
            | Effect::Commit
            | Effect::SetLimits { .. }
            | Effect::ResumeSource { .. } => Err("not in this world"),
        }
    }

    fn start_receiver(&mut self) -> Result<(), &'static str> {
        // Its disks are locked by whoever has them.
        if self.source.alive() {
            return Err("disk_in_use");
        }
        let stays_off = self.row.found == Guest::PoweredOff;
        let end = &mut self.destination;
        match (end.role, end.qemu) {
            (Role::Receiver, Qemu::Alive { .. }) => return Ok(()),
            (Role::Receiver, Qemu::Never | Qemu::Gone { .. }) => return Err("receiver_gone"),
            (Role::Running, _) => return Err("wrong_state"),
            (Role::Absent | Role::Stopped | Role::Held, _) => {}
        }
        end.ready = true;
        if stays_off {
            end.role = Role::Stopped;
            self.proven[1] = true;
        } else {
            end.role = Role::Receiver;
            end.launch(false);
        }
        Ok(())
    }

    fn go_on(&mut self) -> Result<(), &'static str> {
        let end = &mut self.destination;
        if end.role == Role::Stopped {
            end.ready = false;
            return Ok(());
        }
        let Qemu::Alive { pid, .. } = end.qemu else { return Err("receiver_gone") };
        assert!(!self.source.alive(), "a guest is started beside itself");
        let end = &mut self.destination;
        end.qemu = Qemu::Alive { pid, runs: true };
        (end.role, end.continued, end.ready) = (Role::Running, true, false);
        Ok(())
    }

    /// The guest heeds its power button, if it was pressed.
    fn heeds(&mut self) {
        if let Qemu::Alive { pid, runs: true } = self.source.qemu
            && self.source.asked
        {
            self.source.qemu = Qemu::Gone { pid, by_guest: true };
            // Past its time, nobody may be there any more who would start it again.
            self.left |= self.too_late();
        }
    }

    /// Its time to heed is over, or it was seen to go on.
    fn too_late(&self) -> bool {
        let Phase::RollingBack { cause, back, .. } = &self.row.phase else { return self.over() };
        let waited =
            matches!(cause, Cause::ShutdownRefused { .. }) || self.now - self.entered > SHUTDOWN;
        waited || *back == Back::Clearing
    }

    /// The guest turns itself off where it runs, unasked.
    fn leaves(&mut self) {
        for end in [&mut self.source, &mut self.destination] {
            if let Qemu::Alive { pid, runs: true } = end.qemu
                && !end.asked
            {
                end.qemu = Qemu::Gone { pid, by_guest: true };
                self.left = true;
            }
        }
    }

    fn kill(&mut self, side: Side) {
        let end = self.end_mut(side);
        if let Qemu::Alive { pid, .. } = end.qemu {
            end.qemu = Qemu::Gone { pid, by_guest: false };
            self.killed.push(side);
        }
    }

    fn over(&self) -> bool {
        self.row.label().is_terminal() && self.row.outstanding().is_none()
    }

    fn turn(&mut self) {
        self.now += 500;
        self.observe(Side::Source);
        self.observe(Side::Destination);
        self.drive(Luck::Answered);
    }

    fn check(&self) {
        assert!(!(self.source.runs() && self.destination.runs()), "a guest runs twice");
        assert!(!(self.destination.continued && self.source.runs()), "it runs in its own past");
        if self.row.found == Guest::PoweredOff {
            let runs = self.source.runs() || self.destination.runs();
            assert!(!runs, "a VM that was off was started");
        }
        let rows = std::iter::once(&self.first).chain(self.log.iter().map(|entry| &entry.after));
        for (before, entry) in rows.zip(&self.log) {
            let breaches = check_step(before, &entry.after);
            assert!(breaches.is_empty(), "{}: {breaches:?}", entry.event.label());
        }
        let events = self.log.iter().map(|entry| &entry.event);
        assert_eq!(replay(&self.first, events).as_ref(), Ok(&self.row), "the log is not the row");
    }

    fn check_end(&self) {
        assert!(self.over(), "{:?} goes on for ever", self.row.phase);
        let runs = self.row.found == Guest::Present;
        match self.row.label() {
            PhaseLabel::Done => {
                assert_eq!(self.source.role, Role::Absent, "the source was not released");
                let lost = self.left || self.killed.contains(&Side::Destination);
                assert!(!runs || self.destination.runs() || lost);
                assert!(runs || self.destination.role == Role::Stopped);
            }
            PhaseLabel::Aborted => {
                assert_eq!(self.destination.role, Role::Absent, "a receiver leaks");
                assert!(!self.destination.alive(), "a receiver runs on");
                let lost = self.left || self.killed.contains(&Side::Source);
                assert!(!runs || self.source.runs() || lost, "{:?}", self.row.phase);
            }
            PhaseLabel::Failed => assert!(!self.killed.is_empty(), "{:?}", self.row.phase),
            PhaseLabel::Queued
            | PhaseLabel::Admitted
            | PhaseLabel::Captured
            | PhaseLabel::Restored
            | PhaseLabel::Committed
            | PhaseLabel::Attached
            | PhaseLabel::RollingBack => unreachable!("it is over"),
        }
        assert!(self.row.books().reserved.is_empty(), "a reservation leaks");
    }
}

fn terms() -> Terms {
    Terms {
        asked_destination: None,
        hold_limit: Millis(10_000),
        downtime_limit: Millis(100),
        transfer_timeout: Millis(3_600_000),
        stall_limit: Millis(30_000),
        switchover_limit: Millis(30_000),
        shutdown_limit: Millis(SHUTDOWN),
        max_bandwidth: BytesPerSec(0),
        auto_converge: AutoConverge::Off,
        gates: Gates::OPEN,
        gate_deadline: Millis(600_000),
        downgrade: Downgrade::Never,
        not_converging: NotConverging::Abort,
    }
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    Turn,
    Drive(Luck),
    Observe(Side),
    Heeds,
    Leaves,
    Kill(Side),
    AgentTurns(Side),
    PlannerDies,
    Arrives(usize),
    TimePasses(u64),
    Cancel,
}

fn happening() -> impl Strategy<Value = Happening> {
    let side = || prop_oneof![Just(Side::Source), Just(Side::Destination)];
    let luck = prop_oneof![6 => Just(Luck::Answered), 1 => Just(Luck::AnswerLost), 1 => Just(Luck::Delayed)];
    prop_oneof![
        4 => Just(Happening::Turn),
        30 => luck.prop_map(Happening::Drive),
        30 => side().prop_map(Happening::Observe),
        6 => Just(Happening::Heeds),
        1 => Just(Happening::Leaves),
        1 => side().prop_map(Happening::Kill),
        2 => side().prop_map(Happening::AgentTurns),
        2 => Just(Happening::PlannerDies),
        3 => (0usize..3).prop_map(Happening::Arrives),
        3 => (1u64..6_000).prop_map(Happening::TimePasses),
        2 => Just(Happening::Cancel),
    ]
}

fn happen(world: &mut World, happening: Happening) {
    world.now += 1;
    match happening {
        Happening::Turn => world.turn(),
        Happening::Drive(luck) => world.drive(luck),
        Happening::Observe(side) => world.observe(side),
        Happening::Heeds => world.heeds(),
        Happening::Leaves => world.leaves(),
        Happening::Kill(side) => world.kill(side),
        Happening::AgentTurns(side) => {
            let end = world.end_mut(side);
            end.up = !end.up;
        }
        Happening::PlannerDies => world.driver = None,
        Happening::Arrives(at) if at < world.under_way.len() => {
            let command = world.under_way.remove(at);
            let _answer = world.execute(&command);
        }
        Happening::Arrives(_) => {}
        Happening::TimePasses(ms) => world.now += ms,
        Happening::Cancel => world.apply(Event::CancelRequested),
    }
}

proptest! {
    #[test]
    fn a_guest_that_is_shut_down_runs_once_whatever_happens(
        off in any::<bool>(),
        undisturbed in 0usize..12,
        happenings in prop::collection::vec(happening(), 0..60),
        heeds_in_the_end in any::<bool>(),
    ) {
        let mut world = World::new(if off { Guest::PoweredOff } else { Guest::Present });
        for _ in 0..undisturbed {
            world.turn();
        }
        for happening in happenings {
            happen(&mut world, happening);
            world.check();
        }
        // All accidents end; what is left has to come to an end by itself.
        (world.source.up, world.destination.up) = (true, true);
        for _ in 0..200 {
            if world.over() {
                break;
            }
            if heeds_in_the_end {
                world.heeds();
            }
            world.turn();
            world.check();
        }
        world.check_end();
    }
}

#[test]
fn a_guest_that_nothing_disturbs_moves() {
    let mut world = World::new(Guest::Present);
    for _ in 0..40 {
        world.heeds();
        world.turn();
        world.check();
    }
    world.check_end();
    assert_eq!(world.row.label(), PhaseLabel::Done);
    assert!(world.destination.runs());
}
