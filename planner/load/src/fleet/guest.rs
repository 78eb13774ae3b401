//! The guests, and what may never happen to one.

use vmferry_types::{Claim, Generation, HostId, Step, VmId};

use super::State;
use crate::qemu::{Place, Run};

/// How many lines of a VM's history are kept.
const HISTORY_MAX: usize = 400;

/// One guest, wherever it runs.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) name: String,
    pub(crate) definition: String,
    /// The process whose vCPUs run it.
    pub(crate) runs: Option<Place>,
    /// The newest generation that any agent obeyed.
    pub(crate) generation: Generation,
    /// Its newest past: whoever lets it go on from an older one undoes what it did since.
    head: u64,
    still_since_us: Option<u64>,
    history: Vec<String>,
}

impl Guest {
    pub(super) fn new(vm: VmId, name: &str, head: u64, runs: Option<Place>) -> Self {
        Self {
            name: name.to_owned(),
            definition: format!(
                "name = \"{name}\"\nuuid = \"{vm}\"\nmachine = \"q35\"\naccel = \"tcg\"\nvcpus = 1\nmemory = \"1GiB\"\n"
            ),
            runs,
            generation: Generation::FIRST,
            head,
            still_since_us: None,
            history: Vec::new(),
        }
    }

    pub(super) fn note(&mut self, at_us: u64, line: &str) {
        if self.history.len() >= HISTORY_MAX {
            self.history.remove(0);
        }
        let (seconds, rest) = (at_us / 1_000_000, at_us % 1_000_000);
        self.history.push(format!("{seconds:>5}.{rest:06} {line}"));
    }

    /// Returns the history as text.
    pub(crate) fn told(&self) -> String {
        format!("{}:\n  {}", self.name, self.history.join("\n  "))
    }
}

impl State {
    /// Lets vCPUs run, and checks that they may.
    pub(crate) fn run_vcpus(&mut self, place: &Place, why: &str) {
        let now = self.now_us();
        let head = self.fresh_image();
        let Some(qemu) = self.qemu_mut(place) else { return };
        if qemu.run == Run::Running {
            return;
        }
        qemu.run = Run::Running;
        qemu.resumed_at_us = now;
        let (vm, image) = (qemu.vm, qemu.image);
        qemu.image = head;
        let (host, pid) = place;
        self.note(vm, || format!("{host}: QEMU {pid} RUNS the guest ({why})"));
        let Some(guest) = self.guests.get_mut(&vm) else { return };
        let (elsewhere, older) = (guest.runs.replace(place.clone()), image != guest.head);
        guest.head = head;
        if let Some(since) = guest.still_since_us.take() {
            self.stillness.push(now.saturating_sub(since));
        }
        if let Some((other, other_pid)) = elsewhere.filter(|other| other != place) {
            self.violated(
                vm,
                &format!(
                    "I1: its vCPUs run on {other} (QEMU {other_pid}) and on {host} (QEMU {pid})"
                ),
            );
        }
        if older {
            self.violated(vm, &format!("it goes on at {host} from an older past than it had"));
        }
        self.ring(host, vm);
    }

    /// Stops vCPUs, if they run.
    pub(crate) fn stop_vcpus(&mut self, place: &Place, run: Run) {
        let now = self.now_us();
        let Some(qemu) = self.qemu_mut(place) else { return };
        qemu.run = run;
        qemu.stopped_at_us = now;
        let vm = qemu.vm;
        if let Some(guest) = self.guests.get_mut(&vm)
            && guest.runs.as_ref() == Some(place)
        {
            guest.runs = None;
            guest.still_since_us = Some(now);
        }
        self.ring(&place.0, vm);
    }

    /// Ends a QEMU process by command, and checks that its guest does not end by that.
    pub(crate) fn end_process(&mut self, place: &Place) {
        let (host, pid) = place;
        let Some(qemu) = self.hosts.get_mut(host).and_then(|host| host.qemus.remove(pid)) else {
            return;
        };
        let vm = qemu.vm;
        self.note(vm, || format!("{host}: QEMU {pid} is ended"));
        let copy = |other: &crate::qemu::Qemu| other.vm == vm && other.image == qemu.image;
        let copies = self.hosts.values().flat_map(|host| host.qemus.values()).any(copy);
        let newest = self.guests.get(&vm).is_some_and(|guest| guest.head == qemu.image);
        if newest && !copies {
            self.violated(vm, &format!("its last copy, on {host}, is ended by command"));
        }
        if let Some(guest) = self.guests.get_mut(&vm)
            && guest.runs.as_ref() == Some(place)
        {
            guest.runs = None;
        }
        self.ring(host, vm);
    }

    /// I2: nothing is done by an older word than was heard here, nor under an older generation than
    /// the VM has anywhere. Looks at what is done, not at how the fence decided.
    pub(crate) fn check_word(
        &mut self,
        host: &HostId,
        vm: VmId,
        name: &str,
        word: (Generation, Claim, Step),
    ) {
        let (generation, claim, step) = word;
        let Some(there) = self.hosts.get_mut(host) else { return };
        let heard = there.heard.entry(vm).or_insert((claim, step));
        let newest = *heard;
        *heard = newest.max((claim, step));
        let known = self.guests.get(&vm).map_or(Generation::FIRST, |guest| guest.generation);
        if (claim, step) < newest {
            let (known_claim, known_step) = newest;
            self.violated(
                vm,
                &format!(
                    "I2: {name} lands on {host} by claim {claim}, step {step}, after claim {known_claim}, step {known_step}"
                ),
            );
        }
        if generation < known {
            self.violated(
                vm,
                &format!(
                    "I2: {name} lands on {host} under generation {generation}, it has {known}"
                ),
            );
        }
    }

    /// Notes under which generation a guest was let go on.
    pub(crate) fn own(&mut self, vm: VmId, generation: Generation) {
        if let Some(guest) = self.guests.get_mut(&vm) {
            guest.generation = guest.generation.max(generation);
        }
    }
}

/// The end of an id, which tells VMs apart well enough.
pub(crate) fn short(vm: VmId) -> String {
    let text = vm.to_string();
    text.get(..8).unwrap_or(&text).to_owned()
}

/// How long guests stood still, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stillness {
    /// The median.
    pub p50_us: u64,
    /// One in a hundred stood longer.
    pub p99_us: u64,
    /// The longest.
    pub max_us: u64,
}

impl Stillness {
    pub(super) fn of(mut spans: Vec<u64>) -> Self {
        spans.sort_unstable();
        let at = |percent: usize| {
            spans.get((spans.len() * percent / 100).min(spans.len().saturating_sub(1)))
        };
        let at = |percent| at(percent).copied().unwrap_or(0);
        Self { p50_us: at(50), p99_us: at(99), max_us: at(100) }
    }
}
