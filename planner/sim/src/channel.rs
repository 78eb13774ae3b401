//! One transfer from a source's QEMU to a receiver's, as a task of its own.

use std::time::Duration;

use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_types::{HostId, VmId};

use crate::host::{Killer, Why, short};
use crate::qemu::Resumes;
use crate::world::{ChannelId, Invariant, Mishap, Place, PointKind, State, World};

/// A transfer between two QEMU processes.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    pub(crate) source: (HostId, u32),
    pub(crate) destination: (HostId, u32),
    /// Passes over memory still to come.
    passes: u64,
    /// Why it is broken. `None` while it is whole.
    pub(crate) broken: Option<String>,
    /// How often it was looked at since nothing crosses any more. `None` while it flows.
    frozen: Option<u32>,
}

/// When a channel is looked at next.
enum Next {
    In(Duration),
    Never,
}

impl State {
    /// Marks a channel as broken; both ends find out in their own time.
    pub(crate) fn break_channel(&mut self, id: ChannelId, why: &str) {
        if let Some(channel) = self.channels.get_mut(&id)
            && channel.broken.is_none()
        {
            channel.broken = Some(why.to_owned());
            self.note(|| format!("channel {id} breaks: {why}"));
        }
    }

    /// Connects a source to whatever listens; the error is what QEMU would say.
    fn connect(
        &mut self,
        source: &(HostId, u32),
        destination: &HostId,
        port: u16,
    ) -> Result<ChannelId, &'static str> {
        let target = self.host(destination).and_then(|host| {
            host.qemus.values().find(|qemu| qemu.port == Some(port)).map(|qemu| qemu.pid)
        });
        let Some(pid) = target else { return Err("Failed to connect: Connection refused") };
        let id = self.fresh();
        let passes = self.dice.qemu.between(1, 5);
        if let Some(qemu) = self.qemu_mut(destination, pid) {
            // One connection ends the listening.
            qemu.port = None;
            qemu.transfer = connected(qemu.transfer);
            qemu.channel = Some(id);
        }
        if let Some(qemu) = self.qemu_mut(&source.0, source.1) {
            qemu.channel = Some(id);
            qemu.transfer = connected(qemu.transfer);
        }
        let destination = (destination.clone(), pid);
        self.channels.insert(
            id,
            Channel { source: source.clone(), destination, passes, broken: None, frozen: None },
        );
        Ok(id)
    }

    fn fail_source(&mut self, source: &(HostId, u32), error: &str) {
        let Some(qemu) = self.qemu_mut(&source.0, source.1) else { return };
        if !qemu.busy() {
            return;
        }
        if qemu.transfer.is_divided() {
            return self.pause_half(source, error);
        }
        qemu.transfer = TransferState::Failed;
        error.clone_into(&mut qemu.error);
        qemu.silent = false;
        let resumes = qemu.back();
        let vm = qemu.vm;
        self.note(|| format!("host {}: source of {} failed: {error}", source.0, short(vm)));
        if resumes == Resumes::Yes {
            self.run_vcpus(&source.0, source.1, Why::ByItself);
        }
        self.ring(&source.0, vm);
    }

    /// A receiver whose channel breaks fails, and may end by that.
    fn fail_destination(&mut self, destination: &(HostId, u32), error: &str) {
        let exits = self.dice.qemu.chance(500);
        let Some(qemu) = self.qemu_mut(&destination.0, destination.1) else { return };
        if qemu.transfer == TransferState::Completed {
            return;
        }
        if qemu.transfer.is_divided() {
            return self.pause_half(destination, error);
        }
        qemu.transfer = TransferState::Failed;
        error.clone_into(&mut qemu.error);
        let vm = qemu.vm;
        self.never_arrives(vm, error);
        if exits {
            self.end_process(&destination.0, destination.1, "exit 1", Killer::Itself);
        }
        self.ring(&destination.0, vm);
    }

    /// One half of a divided guest sees that its channel is broken.
    fn pause_half(&mut self, half: &(HostId, u32), error: &str) {
        let Some(qemu) = self.qemu_mut(&half.0, half.1) else { return };
        qemu.transfer = TransferState::PostcopyPaused;
        qemu.channel = None;
        error.clone_into(&mut qemu.error);
        let vm = qemu.vm;
        self.note(|| format!("host {}: half of {} is paused: {error}", half.0, short(vm)));
        self.ring(&half.0, vm);
    }

    /// `migrate-pause`: a half is made to see that its channel is broken.
    pub(crate) fn force_pause(&mut self, host: &HostId, pid: u32) {
        let Some(qemu) = self.qemu(host, pid) else { return };
        let (divided, channel) = (qemu.transfer.is_divided(), qemu.channel);
        if !divided || qemu.transfer == TransferState::PostcopyPaused {
            return;
        }
        if let Some(channel) = channel {
            self.break_channel(channel, "paused by the user");
        }
        self.pause_half(&(host.clone(), pid), "paused by the user");
    }

    /// A source that has parted from its guest cannot take it back from a receiver that did not load
    /// it.
    fn never_arrives(&mut self, vm: VmId, error: &str) {
        let mut all = self.hosts.values().flat_map(|host| host.qemus.values());
        let parted = all.any(|qemu| qemu.vm == vm && qemu.parts && qemu.transfer.is_divided());
        if let Some(guest) = self.guests.get_mut(&vm).filter(|_| parted) {
            guest.lost.get_or_insert_with(|| format!("it never arrived: {error}"));
        }
    }

    /// Draws what goes wrong at a change of state, if anything.
    fn qemu_mishap(&mut self, id: ChannelId, channel: &Channel) {
        if let Some(mishap) = self.point(PointKind::QemuStep, "step") {
            self.strike(mishap);
        }
        if self.at_ms() >= self.weather.calm_at_ms {
            return;
        }
        let (dies, breaks) = (self.weather.qemu_dies, self.weather.channel_breaks);
        if self.dice.qemu.chance(dies) {
            let victim =
                if self.dice.qemu.chance(500) { &channel.source } else { &channel.destination };
            self.end_process(&victim.0, victim.1, "signal 9", Killer::Fate);
        }
        if self.dice.qemu.chance(breaks) {
            self.break_channel(id, "connection reset");
        }
    }

    /// Strikes the VM of a directed test at its source `a` or destination `b`.
    pub(crate) fn strike(&mut self, mishap: Mishap) {
        let (a, b) = (host("a"), host("b"));
        let kill = |state: &mut Self, at: &HostId| {
            let pids: Vec<u32> =
                state.host(at).map(|host| host.qemus.keys().copied().collect()).unwrap_or_default();
            for pid in pids {
                state.end_process(at, pid, "signal 9", Killer::Fate);
            }
        };
        match mishap {
            Mishap::SourceQemuDies => kill(self, &a),
            Mishap::DestinationQemuDies => kill(self, &b),
            Mishap::SourceHostDies => self.crash_host(&a),
            Mishap::DestinationHostDies => self.crash_host(&b),
            Mishap::ChannelBreaks => {
                let ids: Vec<ChannelId> = self.channels.keys().copied().collect();
                for id in ids {
                    self.break_channel(id, "connection reset");
                }
            }
            Mishap::SourceFreezes => self.freeze(&a),
            Mishap::Cancel => self.script.cancel.notify_one(),
            Mishap::SourceJournalLost => self.lose_journal(&a),
            Mishap::DestinationJournalLost => self.lose_journal(&b),
            Mishap::PlannerDiesBefore
            | Mishap::PlannerDiesAfter
            | Mishap::RequestLost
            | Mishap::AnswerLost
            | Mishap::Refused
            | Mishap::Doubled
            | Mishap::DoubledLate(_)
            | Mishap::Late(_)
            | Mishap::AgentDies
            | Mishap::AgentDiesBefore
            | Mishap::AgentDiesAfter => {}
        }
    }

    /// The thread that sends hangs, and holds the lock that the monitor needs.
    fn freeze(&mut self, host: &HostId) {
        for channel in self.channels.values_mut() {
            channel.frozen = Some(0);
        }
        if let Some(there) = self.hosts.get_mut(host) {
            for qemu in
                there.qemus.values_mut().filter(|qemu| qemu.transfer == TransferState::Device)
            {
                qemu.silent = true;
            }
        }
    }

    /// Moves a channel on by one change of state.
    fn advance(&mut self, id: ChannelId) -> Next {
        let Some(channel) = self.channels.get(&id).cloned() else { return Next::Never };
        let still = self
            .qemu(&channel.source.0, channel.source.1)
            .is_none_or(|qemu| qemu.transfer == TransferState::PreSwitchover);
        if channel.frozen.is_none() && !still {
            self.qemu_mishap(id, &channel);
        }
        let Some(channel) = self.channels.get(&id).cloned() else { return Next::Never };
        if let Some(why) = &channel.broken {
            return self.broken(id, &channel, why);
        }
        if let Some(looks) = channel.frozen {
            return self.frozen(id, &channel, looks);
        }
        let ends =
            (Place::Host(channel.source.0.clone()), Place::Host(channel.destination.0.clone()));
        if !self.connected(&ends.0, &ends.1) {
            return self.apart(id, &channel);
        }
        let Some(source) = self.qemu(&channel.source.0, channel.source.1) else {
            self.break_channel(id, "the source is gone");
            return Next::In(self.dice.qemu.millis(0, 100));
        };
        match source.transfer {
            TransferState::Active => self.pass(id, &channel),
            TransferState::PreSwitchover => Next::In(Duration::from_millis(3)),
            TransferState::Device if source.parts => self.part(id, &channel),
            TransferState::Device => self.last(id, &channel),
            TransferState::PostcopyActive => self.serve(id, &channel),
            TransferState::PostcopyRecover => self.mended(&channel),
            TransferState::None
            | TransferState::Setup
            | TransferState::Cancelling
            | TransferState::Cancelled
            | TransferState::Completed
            | TransferState::Failed
            | TransferState::WaitUnplug
            | TransferState::PostcopyPaused
            | TransferState::PostcopyRecoverSetup
            | TransferState::Unknown => {
                self.break_channel(id, "the source called it back");
                Next::In(self.dice.qemu.millis(0, 100))
            }
        }
    }

    /// Nothing crosses until the kernel gives the connection up.
    fn frozen(&mut self, id: ChannelId, channel: &Channel, looks: u32) -> Next {
        let there = self.qemu(&channel.source.0, channel.source.1).is_some();
        if !there || looks >= 300 {
            self.break_channel(id, "Connection timed out");
        } else if let Some(channel) = self.channels.get_mut(&id) {
            channel.frozen = Some(looks + 1);
        }
        Next::In(Duration::from_millis(200))
    }

    /// No byte crosses between the two hosts.
    fn apart(&mut self, id: ChannelId, channel: &Channel) -> Next {
        let silent = self.weather.silent;
        let silenced = self.dice.qemu.chance(silent);
        let (host, pid) = &channel.source;
        if silenced
            && let Some(qemu) = self.qemu_mut(host, *pid)
            && qemu.transfer == TransferState::Device
        {
            // The thread that sends holds the lock that the monitor needs.
            qemu.silent = true;
        }
        if self.dice.qemu.chance(30) {
            self.break_channel(id, "Connection timed out");
        }
        Next::In(self.dice.qemu.millis(100, 600))
    }

    /// Both ends find out that the channel is broken, one after the other.
    fn broken(&mut self, id: ChannelId, channel: &Channel, why: &str) -> Next {
        let source = self.qemu(&channel.source.0, channel.source.1);
        // At pre-switchover QEMU does not notice until it is told anything.
        let waits = source.is_some_and(|qemu| qemu.transfer == TransferState::PreSwitchover);
        let first = self.dice.qemu.chance(500);
        if first && !waits {
            self.fail_source(&channel.source, &format!("Channel error: {why}"));
        }
        let ends =
            (Place::Host(channel.source.0.clone()), Place::Host(channel.destination.0.clone()));
        let divided = self
            .qemu(&channel.destination.0, channel.destination.1)
            .is_some_and(|qemu| qemu.transfer.is_divided());
        // Nothing tells a half that waits for pages that its peer has closed, if no way leads there.
        if !divided || self.connected(&ends.0, &ends.1) {
            self.fail_destination(
                &channel.destination,
                &format!("load of migration failed: {why}"),
            );
        } else if let Some(qemu) = self.qemu_mut(&channel.destination.0, channel.destination.1) {
            qemu.channel = None;
        }
        if waits {
            return Next::In(Duration::from_millis(3));
        }
        if !first {
            if self.dice.qemu.chance(500) {
                return Next::In(self.dice.qemu.millis(1, 100));
            }
            self.fail_source(&channel.source, &format!("Channel error: {why}"));
        }
        self.channels.remove(&id);
        Next::Never
    }

    /// Sends once over the memory; at the last time the guest is stopped.
    fn pass(&mut self, id: ChannelId, channel: &Channel) -> Next {
        let (host, pid) = &channel.source;
        let parts = self.qemu(host, *pid).is_some_and(|qemu| qemu.parts);
        let last = channel.passes == 0 || parts;
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.passes = channel.passes.saturating_sub(1);
        }
        let Some(qemu) = self.qemu_mut(host, *pid) else { return Next::In(Duration::ZERO) };
        qemu.bytes += 1 << 20;
        let vm = qemu.vm;
        if last {
            self.stop_vcpus(host, *pid, RunState::FinishMigrate);
            if let Some(qemu) = self.qemu_mut(host, *pid) {
                qemu.transfer = TransferState::PreSwitchover;
            }
            self.note(|| format!("host {host}: {} stands at pre-switchover", short(vm)));
        }
        self.ring(host, vm);
        Next::In(self.dice.qemu.millis(5, 150))
    }

    /// Sends the last: first the destination has it, then the source hears so.
    fn last(&mut self, id: ChannelId, channel: &Channel) -> Next {
        let image = self.qemu(&channel.source.0, channel.source.1).map_or(0, |qemu| qemu.image);
        let (host, pid) = channel.destination.clone();
        let Some(qemu) = self.qemu_mut(&host, pid) else {
            self.break_channel(id, "the destination is gone");
            return Next::In(self.dice.qemu.millis(0, 100));
        };
        let vm = qemu.vm;
        if qemu.transfer != TransferState::Completed {
            qemu.transfer = TransferState::Completed;
            qemu.run = RunState::Paused;
            qemu.image = image;
            let starts = qemu.autostart;
            self.note(|| format!("host {host}: {} has arrived", short(vm)));
            if starts {
                self.violated(
                    Invariant::OneRuns,
                    format!("the receiver of {} on {host} was told to start by itself", short(vm)),
                );
                self.run_vcpus(&host, pid, Why::Autostart);
            }
            self.ring(&host, vm);
            return Next::In(self.dice.qemu.millis(0, 60));
        }
        let (host, pid) = channel.source.clone();
        if let Some(qemu) = self.qemu_mut(&host, pid) {
            qemu.transfer = TransferState::Completed;
            qemu.sent = true;
            qemu.run = RunState::PostMigrate;
            qemu.silent = false;
        }
        self.note(|| format!("host {host}: {} is sent", short(vm)));
        self.ring(&host, vm);
        self.channels.remove(&id);
        Next::Never
    }

    /// The guest goes: the source says so once all is on its way, the destination once it is loaded.
    fn part(&mut self, id: ChannelId, channel: &Channel) -> Next {
        let image = self.qemu(&channel.source.0, channel.source.1).map_or(0, |qemu| qemu.image);
        let (host, pid) = channel.destination.clone();
        let Some(qemu) = self.qemu_mut(&host, pid) else {
            self.break_channel(id, "the destination is gone");
            return Next::In(self.dice.qemu.millis(0, 100));
        };
        let vm = qemu.vm;
        let loaded = qemu.transfer.is_divided();
        let first = self.dice.qemu.chance(500);
        if !loaded && first {
            self.load(&channel.destination, image);
            return Next::In(self.dice.qemu.millis(0, 30));
        }
        if let Some(qemu) = self.qemu_mut(&channel.source.0, channel.source.1) {
            qemu.transfer = TransferState::PostcopyActive;
            qemu.silent = false;
        }
        self.note(|| format!("host {}: {} has parted", channel.source.0, short(vm)));
        self.ring(&channel.source.0, vm);
        Next::In(self.dice.qemu.millis(0, 30))
    }

    /// All but memory is there: the guest stands still until it is let go on.
    fn load(&mut self, half: &(HostId, u32), image: u64) {
        let Some(qemu) = self.qemu_mut(&half.0, half.1) else { return };
        qemu.transfer = TransferState::PostcopyActive;
        qemu.run = RunState::Paused;
        qemu.image = image;
        let vm = qemu.vm;
        self.note(|| format!("host {}: {} has arrived before its memory", half.0, short(vm)));
        self.ring(&half.0, vm);
    }

    /// Serves a page; after the last, first the destination says so, then the source.
    fn serve(&mut self, id: ChannelId, channel: &Channel) -> Next {
        let (source, destination) = (channel.source.clone(), channel.destination.clone());
        let image = self.qemu(&source.0, source.1).map_or(0, |qemu| qemu.image);
        let Some(there) = self.qemu(&destination.0, destination.1).cloned() else {
            self.break_channel(id, "the destination is gone");
            return Next::In(self.dice.qemu.millis(0, 100));
        };
        if !there.transfer.is_divided() && there.transfer != TransferState::Completed {
            self.load(&destination, image);
            return Next::In(self.dice.qemu.millis(1, 30));
        }
        let Some(qemu) = self.qemu_mut(&source.0, source.1) else { return Next::Never };
        let vm = qemu.vm;
        if qemu.pages > 0 {
            qemu.pages -= 1;
            qemu.bytes += 1 << 20;
            self.ring(&source.0, vm);
            return Next::In(self.dice.qemu.millis(5, 400));
        }
        if there.transfer != TransferState::Completed {
            if let Some(qemu) = self.qemu_mut(&destination.0, destination.1) {
                qemu.transfer = TransferState::Completed;
            }
            self.note(|| format!("host {}: {} has its last page", destination.0, short(vm)));
            self.ring(&destination.0, vm);
            return Next::In(self.dice.qemu.millis(0, 60));
        }
        if let Some(qemu) = self.qemu_mut(&source.0, source.1) {
            qemu.transfer = TransferState::Completed;
            qemu.sent = true;
            qemu.run = RunState::PostMigrate;
        }
        self.note(|| format!("host {}: {} is served", source.0, short(vm)));
        self.ring(&source.0, vm);
        self.channels.remove(&id);
        Next::Never
    }

    /// Both halves go on.
    fn mended(&mut self, channel: &Channel) -> Next {
        for half in [&channel.destination, &channel.source] {
            if let Some(qemu) = self.qemu_mut(&half.0, half.1)
                && qemu.transfer == TransferState::PostcopyRecover
            {
                qemu.transfer = TransferState::PostcopyActive;
                let vm = qemu.vm;
                self.note(|| format!("host {}: half of {} goes on", half.0, short(vm)));
                self.ring(&half.0, vm);
            }
        }
        Next::In(self.dice.qemu.millis(1, 50))
    }

    /// `migrate_cancel`; the guest goes on if it stood.
    pub(crate) fn cancel_transfer(&mut self, host: &HostId, pid: u32) {
        let Some(qemu) = self.qemu_mut(host, pid) else { return };
        let resumes = qemu.cancel();
        let (vm, channel) = (qemu.vm, qemu.channel);
        if resumes == Resumes::Yes {
            self.run_vcpus(host, pid, Why::CalledBack);
        }
        if let Some(channel) = channel {
            self.break_channel(channel, "the source called it back");
        }
        self.ring(host, vm);
    }
}

impl World {
    /// Lets a source send to whatever listens at an address, from now on.
    pub(crate) fn send(&self, source: (HostId, u32), destination: HostId, port: u16) {
        let world = self.clone();
        self.spawn(async move {
            let Some(id) = connect(&world, &source, &destination, port).await else { return };
            loop {
                let next = world.with(|state| state.advance(id));
                match next {
                    Next::In(span) => tokio::time::sleep(span.max(Duration::from_millis(1))).await,
                    Next::Never => return,
                }
            }
        });
    }
}

/// Connects, for as long as it takes and the source still wants to.
async fn connect(
    world: &World,
    source: &(HostId, u32),
    destination: &HostId,
    port: u16,
) -> Option<ChannelId> {
    let attempt = world.with(|state| state.qemu(&source.0, source.1).map(|qemu| qemu.attempt))?;
    loop {
        let wait = world.with(|state| state.dice.qemu.millis(1, 20));
        tokio::time::sleep(wait).await;
        let outcome = world.with(|state| {
            let wanted = state.qemu(&source.0, source.1).is_some_and(|qemu| {
                let connects = matches!(
                    qemu.transfer,
                    TransferState::Setup | TransferState::PostcopyRecoverSetup
                );
                qemu.attempt == attempt && connects
            });
            if !wanted {
                return Some(None);
            }
            if !state.connected(&Place::Host(source.0.clone()), &Place::Host(destination.clone())) {
                return None;
            }
            match state.connect(source, destination, port) {
                Ok(id) => Some(Some(id)),
                Err(error) => {
                    state.fail_source(source, error);
                    Some(None)
                }
            }
        });
        if let Some(connected) = outcome {
            return connected;
        }
    }
}

/// What a transfer becomes once its connection stands.
const fn connected(transfer: TransferState) -> TransferState {
    if transfer.is_divided() { TransferState::PostcopyRecover } else { TransferState::Active }
}

/// A host's id of one letter.
pub(crate) fn host(name: &str) -> HostId {
    name.parse().unwrap_or_else(|_| unreachable!("a letter is a host id"))
}
