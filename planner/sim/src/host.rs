//! A simulated host: what its kernel runs, what its disk keeps, and how either ends.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_types::{Bytes, HostId, VmId};

use crate::agent::{AgentProcess, Sight};
use crate::journal::{Cont, Journal, Part, Record};
use crate::qemu::Qemu;
use crate::world::{Invariant, State, Told};

/// One host.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that are true or not, each by itself, as a world has them"
)]
pub(crate) struct Host {
    pub(crate) up: bool,
    pub(crate) boot: u32,
    /// It never comes back.
    pub(crate) for_good: bool,
    /// An operator said so to a planner.
    pub(crate) declared: bool,
    pub(crate) journal: Journal,
    pub(crate) qemus: BTreeMap<u32, Qemu>,
    /// What shims wrote of exits, by launch. Gone with the boot.
    pub(crate) exits: BTreeMap<u64, Exit>,
    /// Taps, by launch. Gone with the boot.
    pub(crate) taps: BTreeSet<u64>,
    pub(crate) agent: Option<AgentProcess>,
    /// How many agents there were.
    pub(crate) agents: u64,
    pub(crate) memory: Bytes,
    /// How far its wall clock is ahead, in microseconds.
    pub(crate) skew_us: i64,
    next_pid: u32,
    next_port: u16,
}

/// How a QEMU process ended, as its shim wrote it.
#[derive(Clone, Debug)]
pub(crate) struct Exit {
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    pub(crate) ended: String,
    pub(crate) by_guest: bool,
}

/// Who ends a QEMU process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Killer {
    /// A command of a planner.
    Command,
    /// A command to stop it, which somebody asked for.
    Stop,
    /// Nobody.
    Fate,
    /// Itself, because its incoming migration failed.
    Itself,
    /// The guest turned itself off.
    Guest,
}

/// Why vCPUs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It ran when the world began.
    Began,
    /// It was started.
    Booted,
    /// QEMU let its source go on when the channel broke.
    ByItself,
    /// Its transfer was called back.
    CalledBack,
    /// It was held, and is let go on.
    LetGo,
    /// A source that was ordered goes on after all.
    Resumed,
    /// A receiver goes on.
    Continued,
    /// A receiver was told to go on before it had everything.
    Autostart,
    /// The deliberate mistake: an agent let it go on that nobody asked.
    Unasked,
}

impl Why {
    const fn label(self) -> &'static str {
        match self {
            Self::Began => "started",
            Self::Booted => "booted",
            Self::ByItself => "resumed by itself",
            Self::CalledBack => "called back",
            Self::LetGo => "let go on",
            Self::Resumed => "resumed",
            Self::Continued => "continued",
            Self::Autostart => "autostart",
            Self::Unasked => "by itself",
        }
    }
}

impl Host {
    pub(crate) fn new(memory: Bytes) -> Self {
        Self {
            up: true,
            boot: 1,
            for_good: false,
            declared: false,
            journal: Journal::default(),
            qemus: BTreeMap::new(),
            exits: BTreeMap::new(),
            taps: BTreeSet::new(),
            agent: None,
            agents: 0,
            memory,
            skew_us: 0,
            next_pid: 100,
            next_port: 0,
        }
    }

    pub(crate) fn boot_id(&self, host: &HostId) -> String {
        format!("{host}-boot-{}", self.boot)
    }

    pub(crate) fn by_launch(&self, launch: u64) -> Option<&Qemu> {
        self.qemus.values().find(|qemu| qemu.launch == launch)
    }

    /// Says whether a process of the VM runs that the journal does not name.
    pub(crate) fn has_stranger(&self, vm: VmId) -> bool {
        let named = self.journal.records.get(&vm).and_then(Record::process).map(|it| it.launch);
        let mut there = self.qemus.values();
        there.any(|qemu| {
            let forgotten = self.journal.forgot_launches.contains(&qemu.launch);
            qemu.vm == vm && forgotten && Some(qemu.launch) != named
        })
    }

    pub(crate) fn fresh_port(&mut self) -> u16 {
        self.next_port = self.next_port.wrapping_add(1) % 1000;
        49_152 + self.next_port
    }
}

impl State {
    pub(crate) fn host(&self, id: &HostId) -> Option<&Host> {
        self.hosts.get(id)
    }

    pub(crate) fn qemu_mut(&mut self, host: &HostId, pid: u32) -> Option<&mut Qemu> {
        self.hosts.get_mut(host)?.qemus.get_mut(&pid)
    }

    pub(crate) fn qemu(&self, host: &HostId, pid: u32) -> Option<&Qemu> {
        self.hosts.get(host)?.qemus.get(&pid)
    }

    /// Starts a QEMU process that stands still; returns its pid.
    pub(crate) fn start_process(
        &mut self,
        host: &HostId,
        vm: VmId,
        launch: u64,
        run: RunState,
    ) -> Option<u32> {
        let start_time = self.monotonic_us() / 10_000;
        let there = self.hosts.get_mut(host)?;
        there.next_pid += 1;
        let pid = there.next_pid;
        there.taps.insert(launch);
        there.qemus.insert(
            pid,
            Qemu {
                vm,
                pid,
                start_time,
                launch,
                run,
                before: run,
                transfer: TransferState::None,
                attempt: 0,
                error: String::new(),
                bytes: 0,
                sent: false,
                image: 0,
                silent: false,
                autostart: false,
                port: None,
                parts: false,
                pages: 0,
                channel: None,
            },
        );
        self.saw(host, vm, |sight| *sight = Sight::default());
        self.note(|| format!("host {host}: QEMU {pid} of {} starts", short(vm)));
        self.check_memory(host);
        self.ring(host, vm);
        Some(pid)
    }

    /// Lets a guest boot: from now on its newest past is this one.
    pub(crate) fn boot_guest(&mut self, host: &HostId, pid: u32) {
        let Some(vm) = self.qemu(host, pid).map(|qemu| qemu.vm) else { return };
        let head = self.guests.get(&vm).map_or(0, |guest| guest.head);
        let other = self.hosts.iter().find_map(|(id, there)| {
            let mut all = there.qemus.values();
            all.find(|qemu| qemu.vm == vm && qemu.pid != pid && qemu.image == head && head != 0)
                .map(|qemu| format!("QEMU {} on {id}", qemu.pid))
        });
        if let Some(other) = other {
            let what = format!("{} boots on {host} though {other} holds it", short(vm));
            self.violated(Invariant::NotLost, what);
        }
        let image = self.fresh();
        if let Some(qemu) = self.qemu_mut(host, pid) {
            qemu.image = image;
        }
        if let Some(guest) = self.guests.get_mut(&vm) {
            guest.head = image;
            guest.lost = None;
            guest.off = false;
            guest.copy_lost_ms = None;
            guest.blindly = false;
            guest.released_early = None;
        }
        self.run_vcpus(host, pid, Why::Booted);
    }

    /// Lets vCPUs run, and checks that they may.
    pub(crate) fn run_vcpus(&mut self, host: &HostId, pid: u32, why: Why) {
        let now = self.monotonic_us();
        let Some(qemu) = self.qemu_mut(host, pid) else { return };
        if qemu.run == RunState::Running {
            return;
        }
        qemu.run = RunState::Running;
        let (vm, image) = (qemu.vm, qemu.image);
        self.saw(host, vm, |sight| sight.resumed_at_us = now);
        self.note(|| format!("host {host}: QEMU {pid} of {} RUNS ({})", short(vm), why.label()));
        let Some(guest) = self.guests.get(&vm).cloned() else { return };
        if let Some((other, other_pid)) = &guest.runs
            && (other, *other_pid) != (host, pid)
        {
            self.violated(
                Invariant::OneRuns,
                format!(
                    "{} runs on {other} (QEMU {other_pid}) and on {host} (QEMU {pid})",
                    short(vm)
                ),
            );
        }
        if image != guest.head && guest.blindly {
            // Whoever saw the source run on is dead, and so is the source: see the counts.
            self.counts.unknowable += 1;
        } else if image != guest.head {
            self.violated(
                Invariant::NoOlderPast,
                format!("{} goes on at {host} from an older past than it had", short(vm)),
            );
        }
        let head = self.fresh();
        if let Some(qemu) = self.qemu_mut(host, pid) {
            qemu.image = head;
        }
        if let Some(guest) = self.guests.get_mut(&vm) {
            guest.head = head;
            guest.runs = Some((host.clone(), pid));
            guest.went_on = why;
            guest.released_early = None;
        }
        self.ring(host, vm);
    }

    /// An agent that has the VM's monitor sees its events.
    pub(crate) fn saw(&mut self, host: &HostId, vm: VmId, change: impl FnOnce(&mut Sight)) {
        if let Some(agent) = self.agent_mut(host).filter(|agent| agent.learned.contains(&vm)) {
            change(agent.sights.entry(vm).or_default());
        }
    }

    /// Stops vCPUs, if they run.
    pub(crate) fn stop_vcpus(&mut self, host: &HostId, pid: u32, run: RunState) {
        let now = self.monotonic_us();
        let Some(qemu) = self.qemu_mut(host, pid) else { return };
        let ran = qemu.run == RunState::Running;
        qemu.run = run;
        let vm = qemu.vm;
        if ran {
            self.saw(host, vm, |sight| sight.stopped_at_us = now);
        }
        if let Some(guest) = self.guests.get_mut(&vm)
            && guest.runs.as_ref() == Some(&(host.clone(), pid))
        {
            guest.runs = None;
        }
        self.ring(host, vm);
    }

    /// Ends a QEMU process; its shim writes how.
    pub(crate) fn end_process(&mut self, host: &HostId, pid: u32, ended: &str, killer: Killer) {
        let Some(qemu) = self.hosts.get_mut(host).and_then(|host| host.qemus.remove(&pid)) else {
            return;
        };
        self.note(|| {
            format!("host {host}: QEMU {pid} of {} ends ({ended}, {killer:?})", short(qemu.vm))
        });
        if let Some(there) = self.hosts.get_mut(host) {
            let exit = Exit {
                pid,
                start_time: qemu.start_time,
                ended: ended.to_owned(),
                by_guest: killer == Killer::Guest,
            };
            there.exits.insert(qemu.launch, exit);
        }
        self.settle_end(host, &qemu, ended, killer);
        self.ring(host, qemu.vm);
    }

    /// Keeps the books of the guest whose process is gone.
    fn settle_end(&mut self, host: &HostId, qemu: &Qemu, ended: &str, killer: Killer) {
        if killer == Killer::Fate {
            self.counts.qemu_deaths += 1;
        }
        if let Some(channel) = qemu.channel {
            self.break_channel(channel, "the other end is gone");
        }
        self.settle_halves(host, qemu, ended, killer);
        let copies = self
            .hosts
            .values()
            .flat_map(|host| host.qemus.values())
            .any(|other| other.vm == qemu.vm && other.image == qemu.image);
        // A receiver that was told to go on counts as one that did: nobody can tell.
        let maybe_ran = self.hosts.get(host).is_some_and(|there| {
            there.journal.records.get(&qemu.vm).is_some_and(|record| match &record.part {
                Part::Receiver { process, cont, .. } => {
                    process.launch == qemu.launch && *cont == Cont::Ordered
                }
                Part::Absent | Part::Stopped | Part::Running { .. } => false,
            })
        });
        let (now, window) = (self.at_ms(), self.decision_ms());
        let knew = self.knew_of_the_other(host, qemu);
        let Some(guest) = self.guests.get_mut(&qemu.vm) else { return };
        if guest.runs.as_ref() == Some(&(host.clone(), qemu.pid)) {
            guest.runs = None;
        }
        if qemu.image != guest.head {
            return;
        }
        if copies && !maybe_ran {
            guest.copy_lost_ms = Some(now);
            return;
        }
        match killer {
            Killer::Guest | Killer::Stop => guest.off = true,
            Killer::Fate | Killer::Itself => {
                let early = guest.released_early.take();
                guest.lost.get_or_insert_with(|| format!("{ended} on {host}"));
                if let Some(early) = early {
                    let what =
                        format!("{} would still be on {early}, released early", short(qemu.vm));
                    self.violated(Invariant::NotLost, what);
                }
            }
            // What a command rests on may have died while it was on its way: nobody can know.
            Killer::Command if !knew && guest.copy_lost_ms.is_some_and(|at| now <= at + window) => {
                guest.lost.get_or_insert_with(|| "its copies were lost at once".to_owned());
            }
            Killer::Command => {
                if guest.lost.is_none() && !guest.off {
                    self.violated(
                        Invariant::NotLost,
                        format!(
                            "the last copy of {} is ended on {host} by command",
                            short(qemu.vm)
                        ),
                    );
                }
            }
        }
    }

    /// A guest that is divided over two processes is lost with either of them.
    fn settle_halves(&mut self, host: &HostId, qemu: &Qemu, ended: &str, killer: Killer) {
        let others = || self.hosts.values().flat_map(|host| host.qemus.values());
        let mut peers = others().filter(|other| other.vm == qemu.vm);
        let lost = if qemu.parts {
            // The source: what it has not sent is gone, unless nobody needs it.
            let others: Vec<&Qemu> = peers.filter(|other| !other.parts).collect();
            let whole = others.iter().any(|other| other.image != 0 && !other.transfer.is_divided());
            // The other may be loaded before this one says that it has parted.
            let loaded = others.iter().any(|other| other.transfer.is_divided());
            (qemu.transfer.is_divided() || (qemu.busy() && loaded)) && !whole
        } else {
            // The other half: its source can neither go on nor be taken back.
            peers.any(|other| other.parts && other.transfer.is_divided())
        };
        let Some(guest) = self.guests.get_mut(&qemu.vm).filter(|_| lost) else { return };
        let known = guest.lost.is_some() || guest.off;
        let what = format!("{ended} on {host}, which had half of it");
        match killer {
            Killer::Guest | Killer::Stop => {}
            Killer::Fate | Killer::Itself => {
                guest.lost.get_or_insert(what);
            }
            Killer::Command if known => {}
            Killer::Command => {
                guest.lost = Some(what.clone());
                let what = format!("half of {} is ended by command: {what}", short(qemu.vm));
                self.violated(Invariant::NotLost, what);
            }
        }
    }

    /// Whether whoever commands this process's end was told before that the other end is gone.
    fn knew_of_the_other(&self, host: &HostId, qemu: &Qemu) -> bool {
        let record = self.host(host).and_then(|there| there.journal.records.get(&qemu.vm));
        let other = match record.map(|record| &record.part) {
            Some(Part::Receiver { .. }) => Told::Source,
            Some(Part::Running { .. }) => Told::Destination,
            Some(Part::Absent | Part::Stopped) | None => return false,
        };
        let newest = self.words.get(&(host.clone(), qemu.vm));
        newest.is_some_and(|(claim, step)| self.knew(qemu.vm, (claim.value(), step.value()), other))
    }

    /// How old what a decision rests on may be by the time its command is carried out.
    const fn decision_ms(&self) -> u64 {
        if self.weather.calm_at_ms == 0 { 6_000 } else { 45_000 }
    }

    /// Kills the agent's process; what it runs goes on.
    pub(crate) fn kill_agent(&mut self, host: &HostId) {
        let Some(agent) = self.hosts.get_mut(host).and_then(|host| host.agent.take()) else {
            return;
        };
        agent.token.cancel();
        self.counts.agent_deaths += 1;
        self.note(|| format!("host {host}: agent dies"));
    }

    /// The host loses power: all that is not on its disk is gone.
    pub(crate) fn crash_host(&mut self, host: &HostId) {
        if !self.host(host).is_some_and(|host| host.up) {
            return;
        }
        self.counts.host_crashes += 1;
        self.note(|| format!("host {host} crashes"));
        self.kill_agent(host);
        let pids: Vec<u32> =
            self.host(host).map(|host| host.qemus.keys().copied().collect()).unwrap_or_default();
        for pid in pids {
            self.end_process(host, pid, "the host crashed", Killer::Fate);
        }
        if let Some(there) = self.hosts.get_mut(host) {
            there.up = false;
            there.exits.clear();
            there.taps.clear();
        }
    }

    /// The disk that the journal is on fails.
    pub(crate) fn lose_journal(&mut self, host: &HostId) {
        if let Some(Host { journal, qemus, taps, .. }) = self.hosts.get_mut(host) {
            journal.lose(qemus, taps);
        }
        self.kill_agent(host);
        self.counts.journals_lost += 1;
        self.note(|| format!("host {host}: the journal is lost"));
    }

    pub(crate) fn boot_host(&mut self, host: &HostId) {
        let Some(there) = self.hosts.get_mut(host) else { return };
        if there.up || there.for_good {
            return;
        }
        there.up = true;
        there.boot += 1;
        self.note(|| format!("host {host} boots"));
    }

    /// I3: what runs on a host fits into it.
    fn check_memory(&mut self, host: &HostId) {
        let Some(there) = self.hosts.get(host) else { return };
        let used = there.qemus.values().fold(Bytes::ZERO, |sum, qemu| {
            sum.plus(self.guests.get(&qemu.vm).map_or(Bytes::ZERO, |guest| guest.memory))
        });
        if used > there.memory {
            let total = there.memory;
            self.violated(
                Invariant::Capacity,
                format!("QEMU processes on {host} may use {used} of {total}"),
            );
        }
    }

    /// Makes a new agent's process.
    pub(crate) fn start_agent(&mut self, host: &HostId) -> Option<u64> {
        let there = self.hosts.get_mut(host)?;
        if !there.up || there.agent.is_some() {
            return None;
        }
        there.agents += 1;
        let incarnation = there.agents;
        there.agent =
            Some(AgentProcess::new(incarnation, CancellationToken::new(), Instant::now()));
        self.note(|| format!("host {host}: agent {incarnation} starts"));
        Some(incarnation)
    }
}

/// The end of an id, which tells simulated ones apart.
pub(crate) fn short(vm: VmId) -> String {
    format!("vm{}", vm.as_u128())
}
