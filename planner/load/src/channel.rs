//! One transfer from a source's QEMU to a receiver's, as a task of its own.

use tokio::time::Instant;
use vmferry_types::HostId;

use crate::fleet::{Fleet, State};
use crate::qemu::{Place, Run, Transfer};

/// How often a channel moves on.
const STEP: (u64, u64) = (5, 20);
/// How long memory crosses.
const CROSSES: (u64, u64) = (100, 2_000);
/// What is said to have crossed at each step, in bytes.
const CHUNK: u64 = 8 << 20;

/// A transfer under way.
#[derive(Debug)]
struct Channel {
    source: Place,
    attempt: u32,
    /// Where it is to connect, then whom it is connected with.
    target: (HostId, u16),
    destination: Option<Place>,
    until: Instant,
    breaks: Option<Break>,
}

/// When a channel breaks, on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Break {
    /// While memory crosses.
    Moving,
    /// After the order, before the destination has everything.
    Switching,
    /// The destination has everything; the source does not hear so.
    Unacknowledged,
}

/// When a channel is looked at next.
enum Next {
    Soon,
    Never,
}

impl Fleet {
    /// Lets a source send to whatever listens at a host's port, from now on.
    pub(crate) fn send(&self, source: Place, target: (HostId, u16)) {
        let fleet = self.clone();
        self.spawn(async move {
            let opened = fleet.with(|state| state.open(source, target));
            let Some(mut channel) = opened else { return };
            loop {
                let pause = fleet.with(|state| state.dice.millis(STEP.0, STEP.1));
                tokio::time::sleep(pause).await;
                match fleet.with(|state| state.advance(&mut channel)) {
                    Next::Soon => {}
                    Next::Never => return,
                }
            }
        });
    }
}

impl State {
    fn open(&mut self, source: Place, target: (HostId, u16)) -> Option<Channel> {
        let attempt = self.qemu(&source)?.attempt;
        let odds = self.weather.breaks;
        let breaks = self.dice.chance(odds).then(|| match self.dice.below(3) {
            0 => Break::Moving,
            1 => Break::Switching,
            _ => Break::Unacknowledged,
        });
        let crosses = self.dice.millis(CROSSES.0, CROSSES.1);
        let until = Instant::now() + crosses;
        Some(Channel { source, attempt, target, destination: None, until, breaks })
    }

    /// Moves a channel on by one step.
    fn advance(&mut self, channel: &mut Channel) -> Next {
        let source = self.qemu(&channel.source).filter(|qemu| qemu.attempt == channel.attempt);
        let Some(status) = source.map(|qemu| qemu.transfer) else {
            return self.fail_destination(channel, "the source is gone");
        };
        match status {
            Transfer::Setup => self.connect(channel),
            Transfer::Active => self.cross(channel),
            // QEMU does not notice anything there until it is told something.
            Transfer::PreSwitchover => Next::Soon,
            Transfer::Device => self.switch(channel),
            Transfer::Cancelled | Transfer::Failed | Transfer::None => {
                self.fail_destination(channel, "the source called it back")
            }
            Transfer::Completed => Next::Never,
        }
    }

    fn connect(&mut self, channel: &mut Channel) -> Next {
        let (host, port) = &channel.target;
        let pid = self.hosts.get(host).and_then(|there| {
            let listens = |qemu: &&crate::qemu::Qemu| qemu.port == Some(*port);
            there.qemus.values().find(listens).map(|qemu| qemu.pid)
        });
        let Some(pid) = pid else {
            return self.fail_source(channel, "Failed to connect: Connection refused");
        };
        let destination = (host.clone(), pid);
        for place in [&destination, &channel.source] {
            if let Some(qemu) = self.qemu_mut(place) {
                // One connection ends the listening.
                qemu.port = None;
                qemu.transfer = Transfer::Active;
            }
        }
        channel.destination = Some(destination);
        self.ring_source(channel);
        Next::Soon
    }

    /// Whether the receiver is still there and takes what is sent.
    fn receives(&self, channel: &Channel) -> bool {
        channel.destination.as_ref().and_then(|place| self.qemu(place)).is_some_and(|qemu| {
            qemu.transfer == Transfer::Active || qemu.transfer == Transfer::Completed
        })
    }

    fn broken(&mut self, channel: &Channel) -> Next {
        self.counts.breaks += 1;
        self.fail_destination(channel, "load of migration failed: Connection reset by peer");
        self.fail_source(channel, "Channel error: Connection reset by peer")
    }

    fn cross(&mut self, channel: &Channel) -> Next {
        if !self.receives(channel) {
            return self.fail_source(channel, "Channel error: Broken pipe");
        }
        if channel.breaks == Some(Break::Moving) && Instant::now() >= channel.until {
            return self.broken(channel);
        }
        let done = Instant::now() >= channel.until;
        if let Some(qemu) = self.qemu_mut(&channel.source) {
            qemu.bytes += CHUNK;
            if done {
                qemu.transfer = Transfer::PreSwitchover;
            }
        }
        if done {
            self.stand_still(&channel.source);
            self.note_source(channel, "stands at pre-switchover");
        }
        Next::Soon
    }

    /// Sends the last: first the destination has it, then the source hears so.
    fn switch(&mut self, channel: &Channel) -> Next {
        if !self.receives(channel) {
            return self.fail_source(channel, "Channel error: Broken pipe");
        }
        let image = self.qemu(&channel.source).map_or(0, |qemu| qemu.image);
        let arrived = channel.destination.as_ref().and_then(|place| self.qemu(place));
        let arrived = arrived.is_some_and(|qemu| qemu.transfer == Transfer::Completed);
        match (arrived, channel.breaks) {
            (false, Some(Break::Switching)) => self.broken(channel),
            (false, Some(Break::Moving | Break::Unacknowledged) | None) => {
                if let Some(place) = &channel.destination {
                    if let Some(qemu) = self.qemu_mut(place) {
                        (qemu.transfer, qemu.run, qemu.image) =
                            (Transfer::Completed, Run::Paused, image);
                    }
                    let vm = self.qemu(place).map(|qemu| qemu.vm);
                    if let Some(vm) = vm {
                        self.note(vm, || format!("{}: has arrived", place.0));
                        self.ring(&place.0, vm);
                    }
                }
                Next::Soon
            }
            (true, Some(Break::Unacknowledged)) => {
                self.counts.breaks += 1;
                self.fail_source(channel, "Channel error: Connection reset by peer")
            }
            (true, Some(Break::Moving | Break::Switching) | None) => {
                if let Some(qemu) = self.qemu_mut(&channel.source) {
                    (qemu.transfer, qemu.run) = (Transfer::Completed, Run::PostMigrate);
                }
                self.note_source(channel, "is sent");
                self.ring_source(channel);
                Next::Never
            }
        }
    }

    /// QEMU fails the transfer; a guest that stood still for it goes on by itself.
    fn fail_source(&mut self, channel: &Channel, error: &str) -> Next {
        let Some(qemu) = self.qemu_mut(&channel.source) else { return Next::Never };
        if qemu.attempt != channel.attempt || !qemu.transfer.busy() {
            return Next::Never;
        }
        qemu.transfer = Transfer::Failed;
        error.clone_into(&mut qemu.error);
        self.note_source(channel, error);
        self.go_back(&channel.source, "went on by itself");
        self.ring_source(channel);
        Next::Never
    }

    fn fail_destination(&mut self, channel: &Channel, error: &str) -> Next {
        let Some(place) = &channel.destination else { return Next::Never };
        let Some(qemu) = self.qemu_mut(place) else { return Next::Never };
        if qemu.transfer == Transfer::Active {
            qemu.transfer = Transfer::Failed;
            error.clone_into(&mut qemu.error);
            let vm = qemu.vm;
            self.note(vm, || format!("{}: {error}", place.0));
            self.ring(&place.0, vm);
        }
        Next::Never
    }

    /// The guest is stopped for the switchover, unless it stands still already.
    fn stand_still(&mut self, place: &Place) {
        let runs = self.qemu(place).is_some_and(|qemu| qemu.run == Run::Running);
        if runs {
            self.stop_vcpus(place, Run::FinishMigrate);
        } else if let Some(qemu) = self.qemu_mut(place) {
            qemu.run = Run::FinishMigrate;
        }
    }

    /// A guest that was stopped for the switchover goes on; one that stood still before stays so.
    fn go_back(&mut self, place: &Place, why: &str) {
        let Some(qemu) = self.qemu_mut(place).filter(|qemu| qemu.run == Run::FinishMigrate) else {
            return;
        };
        if qemu.began_in == Run::Running {
            self.run_vcpus(place, why);
        } else {
            qemu.run = Run::Paused;
        }
    }

    /// `migrate_cancel`; the guest goes on if it stood.
    pub(crate) fn call_back(&mut self, place: &Place) {
        let Some(qemu) = self.qemu_mut(place) else { return };
        if !qemu.transfer.busy() {
            return;
        }
        qemu.transfer = Transfer::Cancelled;
        let vm = qemu.vm;
        self.go_back(place, "called back");
        self.ring(&place.0, vm);
    }

    fn note_source(&mut self, channel: &Channel, line: &str) {
        let vm = self.qemu(&channel.source).map(|qemu| qemu.vm);
        if let Some(vm) = vm {
            self.note(vm, || format!("{}: {line}", channel.source.0));
        }
    }

    fn ring_source(&mut self, channel: &Channel) {
        let vm = self.qemu(&channel.source).map(|qemu| qemu.vm);
        if let Some(vm) = vm {
            self.ring(&channel.source.0, vm);
        }
    }
}
