//! Two hosts, a channel and a planner, small enough to try every accident.
//!
//! The agents keep what the design says that agents keep (claim, step, generation, what was ordered,
//! what was continued) and their QEMUs do what QEMU does: above all, a source whose channel breaks
//! after the order resumes by itself.

use vmferry_planner_core::evidence::{
    Continued, Ended, Handed, Heard, Held, Knowledge, Ready, RunState, Seen, Shutdown,
    TransferState,
};
use vmferry_planner_core::migration::{Effect, GoneProof, Process, ProofKind, Side};
use vmferry_types::{Claim, Generation, HostId, MigrationId, Millis, Role, Timestamp};

pub(crate) const ID: MigrationId = MigrationId::from_u128(1);
pub(crate) const FIRST: Generation = Generation::from_stored(3);

pub(crate) fn host(id: &str) -> HostId {
    id.parse().expect("a host id")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Never,
    Alive,
    Dead,
    /// Dead, and its agent's journal was told that nothing is left here.
    Cleared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agent {
    Up,
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Monitor {
    Answers,
    Silent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    Whole,
    Cut,
}

/// One host: its agent's journal and its QEMU.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) side: Side,
    pub(crate) agent: Agent,
    pub(crate) monitor: Monitor,
    pub(crate) life: Life,
    /// Tells its processes apart: each launch has the next.
    pid: u32,
    pub(crate) run: RunState,
    pub(crate) transfer: TransferState,
    pub(crate) claim: Claim,
    pub(crate) step: u64,
    pub(crate) generation: Generation,
    pub(crate) handed: Handed,
    pub(crate) gave_up: Option<String>,
    pub(crate) continued: Continued,
    pub(crate) hold: Held,
    /// How often it was held, and let go on by its agent.
    pub(crate) holds: (u32, u32),
    pub(crate) stopped_at: u64,
    pub(crate) resumed_at: u64,
}

/// A command on its way to an agent.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    pub(crate) side: Side,
    pub(crate) claim: Claim,
    pub(crate) step: u64,
    pub(crate) generation: Generation,
    pub(crate) effect: Effect,
}

/// What became of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    Refused(&'static str),
    Unreachable,
}

impl End {
    fn new(side: Side) -> Self {
        let source = side == Side::Source;
        Self {
            side,
            agent: Agent::Up,
            monitor: Monitor::Answers,
            life: if source { Life::Alive } else { Life::Never },
            pid: 1,
            run: if source { RunState::Running } else { RunState::Unknown },
            transfer: TransferState::None,
            claim: Claim::from_stored(0),
            step: 0,
            generation: if source { FIRST } else { Generation::from_stored(0) },
            handed: Handed::No,
            gave_up: None,
            continued: if source { Continued::Yes } else { Continued::No },
            hold: Held::No,
            holds: (0, 0),
            stopped_at: 0,
            resumed_at: 0,
        }
    }

    fn name(&self) -> HostId {
        host(match self.side {
            Side::Source => "a",
            Side::Destination => "b",
        })
    }

    /// Its guest's vCPUs run.
    pub(crate) fn runs(&self) -> bool {
        self.life == Life::Alive && self.run == RunState::Running
    }

    pub(crate) fn ran_again(&self) -> bool {
        self.resumed_at > 0 && self.resumed_at >= self.stopped_at
    }

    /// What its agent says.
    pub(crate) fn observe(&self, now: u64) -> Seen {
        let alive = self.life == Life::Alive;
        let silent = alive && self.monitor == Monitor::Silent;
        Seen {
            passes: 1,
            diverges: String::new(),
            tuning: None,
            waits_at: None,
            host: self.name(),
            claim: self.claim,
            heard: Heard::Now,
            knowledge: if silent { Knowledge::Unresponsive } else { Knowledge::Known },
            role: match (self.side, self.life) {
                (Side::Source, Life::Never | Life::Alive | Life::Dead)
                    if self.hold == Held::Yes =>
                {
                    Role::Held
                }
                (Side::Source, Life::Never | Life::Alive | Life::Dead) => Role::Running,
                (Side::Source, Life::Cleared)
                | (Side::Destination, Life::Never | Life::Cleared) => Role::Absent,
                (Side::Destination, Life::Alive) if self.run == RunState::Running => Role::Running,
                (Side::Destination, Life::Alive | Life::Dead) => Role::Receiver,
            },
            generation: self.generation,
            migration: Some(ID),
            process: alive.then(|| Process { pid: self.pid, start_time: 1, boot_id: "x".into() }),
            gone: (!alive).then(|| self.proof(now)),
            ended: Ended::Unsaid,
            run_state: if alive && !silent { self.run } else { RunState::Unknown },
            transfer: if alive && !silent { self.transfer } else { TransferState::None },
            transfer_error: String::new(),
            handed: self.handed,
            gave_up: self.gave_up.clone(),
            held: self.hold,
            shutdown: Shutdown::Unasked,
            ready: Ready::No,
            continued: self.continued,
            stopped_at_us: self.stopped_at,
            resumed_at_us: self.resumed_at,
            still: Millis::ZERO,
            trouble: String::new(),
            at: Timestamp(now),
        }
    }

    fn proof(&self, now: u64) -> GoneProof {
        GoneProof {
            kind: match self.life {
                Life::Never => ProofKind::NeverStarted,
                Life::Alive | Life::Dead | Life::Cleared => ProofKind::ExitRecord,
            },
            host: self.name(),
            boot_id: "x".into(),
            pid: self.pid,
            start_time: 1,
            ended: "signal 9".into(),
            at: Timestamp(now),
            stderr_tail: String::new(),
        }
    }

    /// QEMU is done with a transfer: the guest is as it was before.
    fn back(&mut self, now: u64) {
        match self.hold {
            Held::No => self.resume(now),
            Held::Yes => self.run = RunState::Paused,
        }
    }

    /// The agent lets go on what it held.
    fn let_go(&mut self, now: u64) {
        if self.hold == Held::Yes {
            self.holds.1 += 1;
            self.hold = Held::No;
            self.resume(now);
        }
    }

    pub(crate) fn resume(&mut self, now: u64) {
        if self.run != RunState::Running {
            self.resumed_at = now;
        }
        self.run = RunState::Running;
    }
}

/// Both hosts and what lies between them.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    pub(crate) source: End,
    pub(crate) destination: End,
    pub(crate) channel: Channel,
    pub(crate) now: u64,
}

impl Hosts {
    pub(crate) fn new() -> Self {
        Self {
            source: End::new(Side::Source),
            destination: End::new(Side::Destination),
            channel: Channel::Whole,
            now: 1_000,
        }
    }

    pub(crate) fn end(&self, side: Side) -> &End {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }

    pub(crate) fn end_mut(&mut self, side: Side) -> &mut End {
        match side {
            Side::Source => &mut self.source,
            Side::Destination => &mut self.destination,
        }
    }

    /// A driver takes the VM at one agent.
    pub(crate) fn claim(&mut self, side: Side, claim: Claim) -> bool {
        let end = self.end_mut(side);
        if end.agent == Agent::Down || claim < end.claim {
            return false;
        }
        if claim > end.claim {
            end.claim = claim;
            end.step = 0;
        }
        true
    }

    /// A command arrives.
    pub(crate) fn execute(&mut self, command: &Command) -> Answer {
        let end = self.end_mut(command.side);
        if end.agent == Agent::Down {
            return Answer::Unreachable;
        }
        if command.claim != end.claim || command.step <= end.step {
            return Answer::Refused("stale_claim");
        }
        if command.generation < end.generation {
            return Answer::Refused("stale_generation");
        }
        end.step = command.step;
        if end.life == Life::Alive && end.monitor == Monitor::Silent {
            // Only what needs no monitor can be done to it.
            match command.effect {
                Effect::KillSource { .. }
                | Effect::DestroyReceiver { .. }
                | Effect::RecoverReceiver
                | Effect::ReleaseSource { .. } => {}
                Effect::TryAdmit
                | Effect::ArmReceiver
                | Effect::HoldGuest
                | Effect::ShutDownGuest
                | Effect::StartReceiver
                | Effect::RestartSource { .. }
                | Effect::StartTransfer { .. }
                | Effect::OrderSwitchover
                | Effect::StartPostcopy
                | Effect::ResumeTransfer { .. }
                | Effect::SetLimits { .. }
                | Effect::Commit
                | Effect::ContinueDestination
                | Effect::CancelTransfer { .. }
                | Effect::ResumeSource { .. } => return Answer::Refused("unresponsive"),
            }
        }
        end.generation = command.generation;
        self.act(&command.effect)
    }

    fn act(&mut self, effect: &Effect) -> Answer {
        match effect {
            Effect::TryAdmit | Effect::Commit => Answer::Refused("not an agent's"),
            Effect::ArmReceiver => self.arm(),
            Effect::HoldGuest => self.hold(),
            Effect::StartTransfer { .. } => self.start(),
            Effect::OrderSwitchover => self.order(),
            Effect::KillSource { .. } => self.end_source(),
            Effect::ShutDownGuest
            | Effect::StartReceiver
            | Effect::RestartSource { .. }
            | Effect::StartPostcopy
            | Effect::RecoverReceiver
            | Effect::ResumeTransfer { .. }
            | Effect::SetLimits { .. } => Answer::Refused("not in this world"),
            Effect::ReleaseSource { .. } => {
                assert!(!self.source.runs(), "a running source is released");
                self.end_source()
            }
            Effect::ContinueDestination => self.go_on(),
            Effect::CancelTransfer { .. } => self.cancel(),
            Effect::DestroyReceiver { .. } => {
                assert_ne!(
                    self.destination.continued,
                    Continued::Yes,
                    "a destination that may run is destroyed"
                );
                if self.destination.life != Life::Never {
                    self.destination.life = Life::Cleared;
                }
                Answer::Done
            }
            Effect::ResumeSource { .. } => self.resume_source(),
        }
    }

    fn arm(&mut self) -> Answer {
        match self.destination.life {
            // One that was cleared away was of an attempt before.
            Life::Never | Life::Cleared => {
                self.destination.life = Life::Alive;
                self.destination.pid += 1;
                self.destination.run = RunState::InMigrate;
                self.destination.transfer = TransferState::Setup;
                Answer::Done
            }
            Life::Alive => Answer::Done,
            Life::Dead => Answer::Refused("receiver_gone"),
        }
    }

    fn hold(&mut self) -> Answer {
        let now = self.now;
        let end = &mut self.source;
        if end.life != Life::Alive {
            return Answer::Refused("gone");
        }
        assert_eq!(end.handed, Handed::No, "a guest that was handed over is held");
        assert_ne!(
            end.transfer,
            TransferState::Active,
            "a guest is held in the middle of a transfer"
        );
        if end.hold == Held::No {
            end.hold = Held::Yes;
            end.holds.0 += 1;
            end.gave_up = None;
            end.transfer = TransferState::None;
            end.resumed_at = 0;
        }
        end.run = RunState::Paused;
        end.stopped_at = now;
        Answer::Done
    }

    fn start(&mut self) -> Answer {
        if self.source.life != Life::Alive || self.source.gave_up.is_some() {
            return Answer::Refused("gave_up");
        }
        assert_eq!(
            self.source.hold == Held::Yes,
            self.source.holds.0 > 0,
            "a guest that was to stand still runs while its memory is sent"
        );
        if self.source.transfer == TransferState::None {
            let reached = self.channel == Channel::Whole && self.destination.life == Life::Alive;
            if reached {
                self.source.transfer = TransferState::Active;
                self.destination.transfer = TransferState::Active;
            } else {
                self.source.transfer = TransferState::Failed;
            }
        }
        Answer::Done
    }

    fn order(&mut self) -> Answer {
        if self.source.life != Life::Alive || self.source.gave_up.is_some() {
            return Answer::Refused("gave_up");
        }
        if self.source.transfer == TransferState::PreSwitchover {
            self.source.handed = Handed::Yes;
            self.source.transfer = TransferState::Device;
        }
        match self.source.handed {
            Handed::Yes => Answer::Done,
            Handed::No => Answer::Refused("wrong_state"),
        }
    }

    fn end_source(&mut self) -> Answer {
        self.source.life = Life::Cleared;
        Answer::Done
    }

    fn go_on(&mut self) -> Answer {
        let end = &mut self.destination;
        if end.life != Life::Alive {
            return Answer::Refused("receiver_gone");
        }
        if end.continued == Continued::Yes {
            return Answer::Done;
        }
        assert_eq!(end.transfer, TransferState::Completed, "an incomplete guest is continued");
        assert!(!self.source.ran_again(), "a guest is continued from before its own past");
        self.destination.continued = Continued::Yes;
        self.destination.run = RunState::Running;
        Answer::Done
    }

    fn cancel(&mut self) -> Answer {
        if self.source.handed == Handed::Yes {
            return Answer::Refused("wrong_state");
        }
        self.give_up("as told");
        Answer::Done
    }

    fn resume_source(&mut self) -> Answer {
        assert_ne!(self.destination.life, Life::Alive, "a source is resumed beside a receiver");
        assert_ne!(self.destination.continued, Continued::Yes, "a source is resumed into the past");
        if self.source.life != Life::Alive {
            return Answer::Refused("gone");
        }
        if self.source.transfer != TransferState::Completed {
            self.source.transfer = TransferState::Failed;
        }
        self.source.handed = Handed::No;
        let now = self.now;
        self.source.let_go(now);
        self.source.resume(now);
        Answer::Done
    }

    fn give_up(&mut self, why: &str) {
        let now = self.now;
        if self.source.life != Life::Alive {
            return;
        }
        self.source.gave_up.get_or_insert_with(|| why.to_owned());
        if matches!(self.source.transfer, TransferState::Active | TransferState::PreSwitchover) {
            self.source.transfer = TransferState::Cancelled;
            self.source.back(now);
            self.destination_fails();
        }
        self.source.let_go(now);
    }

    /// The source's agent sees no byte cross while the guest runs, and takes the transfer back.
    pub(crate) fn stall(&mut self) {
        let moves = self.source.transfer == TransferState::Active
            && self.source.agent == Agent::Up
            && self.source.monitor == Monitor::Answers;
        if moves {
            self.give_up("no byte crossed");
        }
    }

    fn destination_fails(&mut self) {
        if matches!(self.destination.transfer, TransferState::Active | TransferState::Setup) {
            self.destination.transfer = TransferState::Failed;
        }
    }

    /// The source's agent has heard nobody for the hold limit.
    pub(crate) fn hold_limit(&mut self) {
        let stands =
            self.source.transfer == TransferState::PreSwitchover || self.source.hold == Held::Yes;
        let standing = stands
            && self.source.handed == Handed::No
            && self.source.agent == Agent::Up
            && self.source.monitor == Monitor::Answers;
        if standing {
            self.give_up("nobody was heard");
        }
    }

    /// Someone who may not lets a held guest run, before or while its memory crosses.
    pub(crate) fn someone_resumes(&mut self) {
        let now = self.now;
        let end = &mut self.source;
        if end.life == Life::Alive && end.hold == Held::Yes && end.run == RunState::Paused {
            end.resume(now);
        }
    }

    /// Data crosses, if it can.
    pub(crate) fn progress(&mut self) {
        let able = self.channel == Channel::Whole
            && self.source.life == Life::Alive
            && self.destination.life == Life::Alive
            && self.source.monitor == Monitor::Answers;
        if !able {
            return;
        }
        match (self.source.transfer, self.destination.transfer) {
            (TransferState::Active, TransferState::Active) => {
                self.source.transfer = TransferState::PreSwitchover;
                if self.source.run == RunState::Running {
                    self.source.stopped_at = self.now;
                }
                self.source.run = RunState::FinishMigrate;
            }
            (TransferState::Device, TransferState::Active) => {
                self.destination.transfer = TransferState::Completed;
                self.destination.run = RunState::Paused;
            }
            (TransferState::Device, TransferState::Completed) => {
                self.source.transfer = TransferState::Completed;
                self.source.run = RunState::PostMigrate;
            }
            _ => {}
        }
    }

    /// The source's QEMU notices that the channel, or its peer, is gone.
    pub(crate) fn source_notices(&mut self) {
        // A receiver that failed has closed its end, whatever became of the network since.
        let broken = self.channel == Channel::Cut
            || self.destination.life != Life::Alive
            || self.destination.transfer == TransferState::Failed;
        if !broken || self.source.life != Life::Alive || self.source.monitor == Monitor::Silent {
            return;
        }
        // One that runs already runs on; one that waits for the order goes on waiting.
        if matches!(self.source.transfer, TransferState::Active | TransferState::Device) {
            self.source.transfer = TransferState::Failed;
            let now = self.now;
            self.source.back(now);
        }
    }

    /// The receiver's QEMU notices that the channel, or its peer, is gone.
    pub(crate) fn destination_notices(&mut self) {
        if self.channel == Channel::Cut || self.source.life != Life::Alive {
            self.destination_fails();
        }
    }

    /// A QEMU dies.
    pub(crate) fn kill(&mut self, side: Side) {
        let end = self.end_mut(side);
        if end.life == Life::Alive {
            end.life = Life::Dead;
        }
    }
}
