//! Simulated hosts with their agents and QEMU processes, in real time, behind one lock.
//!
//! Every change goes through `Fleet::with`, and every change that lets vCPUs run, ends a process
//! or obeys a command is held against the invariants of the machine there. What breaks one is said
//! at once, with the history of the VM.

mod guest;
mod host;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;
use vmferry_types::{HostId, VmId};

use crate::console::complain;
use crate::dice::Dice;

pub use guest::Stillness;
pub(crate) use guest::{Guest, short};
pub(crate) use host::{Host, wall_ms};

/// How many hosts and VMs there are.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Hosts.
    pub hosts: usize,
    /// VMs on each host at the start.
    pub vms_per_host: usize,
    /// How many VMs a host has room for.
    pub room: u64,
}

/// What goes wrong by chance.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Of a thousand requests to an agent, so many are lost on the way there.
    pub lost_requests: u64,
    /// Of a thousand answers, so many are lost on the way back.
    pub lost_answers: u64,
    /// Of a thousand requests, so many arrive late, by up to four seconds.
    pub late: u64,
    /// Of a thousand requests, so many arrive once more, later.
    pub doubled: u64,
    /// Of a thousand transfers, so many break: while memory crosses, at the switchover, or after
    /// the destination has everything and before the source hears so.
    pub breaks: u64,
    /// Whom agents obey.
    pub fence: Fencing,
}

/// Whom agents obey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// Whoever the real fence lets through.
    Kept,
    /// Anybody, which no agent may: shows that the trial would notice.
    Ignored,
}

impl Default for Weather {
    fn default() -> Self {
        let fence = Fencing::Kept;
        Self { lost_requests: 10, lost_answers: 10, late: 20, doubled: 20, breaks: 60, fence }
    }
}

/// Memory of a VM, in bytes.
pub(crate) const VM_MEMORY: u64 = 1 << 30;
/// What QEMU takes beside it.
pub(crate) const OVERHEAD: u64 = 128 << 20;

/// All simulated hosts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Fleet(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    bells: BTreeMap<VmId, watch::Sender<u64>>,
    stations: BTreeMap<HostId, Station>,
    broken: watch::Sender<u64>,
    tasks: TaskTracker,
    end: CancellationToken,
}

/// What does not change of a host, or only by itself.
#[derive(Debug)]
struct Station {
    address: SocketAddr,
    bell: watch::Sender<u64>,
    lanes: Mutex<BTreeMap<VmId, Arc<tokio::sync::Mutex<()>>>>,
}

/// What is true of all hosts now.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) hosts: BTreeMap<HostId, Host>,
    pub(crate) guests: BTreeMap<VmId, Guest>,
    pub(crate) dice: Dice,
    pub(crate) weather: Weather,
    pub(crate) counts: Counts,
    started: Instant,
    images: u64,
    rung: Vec<(HostId, VmId)>,
    violations: Vec<String>,
    stillness: Vec<u64>,
}

/// What agents were asked, and how they answered.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Commands carried out, by name.
    pub commands: BTreeMap<&'static str, u64>,
    /// Refusals, by what was asked and the code.
    pub refusals: BTreeMap<String, u64>,
    /// Exact repeats that were answered with the first answer.
    pub replays: u64,
    /// Claims taken.
    pub claims: u64,
    /// Requests and answers that were lost, late or doubled on purpose.
    pub mishaps: u64,
    /// Transfers that broke on purpose.
    pub breaks: u64,
    /// Reports taken by planners.
    pub reports: u64,
}

impl Fleet {
    /// Makes the fleet: all VMs run, under generation 1. `address` is where each host's agent is
    /// to listen, by the host's number.
    #[must_use]
    pub fn new(
        shape: Shape,
        weather: Weather,
        seed: u64,
        address: impl Fn(usize) -> SocketAddr,
    ) -> Self {
        let mut dice = Dice::new(seed, "fleet");
        let mut state = State {
            hosts: BTreeMap::new(),
            guests: BTreeMap::new(),
            dice: Dice::new(seed, "world"),
            weather,
            counts: Counts::default(),
            started: Instant::now(),
            images: 0,
            rung: Vec::new(),
            violations: Vec::new(),
            stillness: Vec::new(),
        };
        let mut stations = BTreeMap::new();
        for number in 0..shape.hosts {
            let Ok(id) = format!("host-{number:03}").parse::<HostId>() else { continue };
            state.hosts.insert(id.clone(), Host::new(&id, shape.room, &mut dice));
            for at in 0..shape.vms_per_host {
                state.place(&id, VmId::from_u128(dice.id()), &format!("vm-{number:03}-{at:03}"));
            }
            let station = Station {
                address: address(number),
                bell: watch::channel(0).0,
                lanes: Mutex::default(),
            };
            stations.insert(id, station);
        }
        let bells = state.guests.keys().map(|vm| (*vm, watch::channel(0).0)).collect();
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            bells,
            stations,
            broken: watch::channel(0).0,
            tasks: TaskTracker::new(),
            end: CancellationToken::new(),
        }))
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state, or changes it; rings for what has changed.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.locked();
        let known = state.violations.len();
        let out = act(&mut state);
        let rung = std::mem::take(&mut state.rung);
        let new = state.violations.get(known..).unwrap_or_default().to_vec();
        drop(state);
        for (host, vm) in rung {
            self.ring(&host, vm);
        }
        for violation in &new {
            complain(violation);
            self.0.broken.send_modify(|count| *count += 1);
        }
        out
    }

    fn ring(&self, host: &HostId, vm: VmId) {
        if let Some(bell) = self.0.bells.get(&vm) {
            bell.send_modify(|count| *count = count.wrapping_add(1));
        }
        if let Some(station) = self.0.stations.get(host) {
            station.bell.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    /// Returns all hosts with the addresses of their agents.
    #[must_use]
    pub fn addresses(&self) -> Vec<(HostId, SocketAddr)> {
        self.0.stations.iter().map(|(id, station)| (id.clone(), station.address)).collect()
    }

    /// Returns all VMs: id and name.
    #[must_use]
    pub fn vms(&self) -> Vec<(VmId, String)> {
        self.with(|state| state.guests.iter().map(|(id, of)| (*id, of.name.clone())).collect())
    }

    /// Returns where each VM's vCPUs run now.
    #[must_use]
    pub fn running(&self) -> BTreeMap<VmId, HostId> {
        self.with(|state| {
            let runs = state.guests.iter();
            runs.filter_map(|(vm, guest)| Some((*vm, guest.runs.as_ref()?.0.clone()))).collect()
        })
    }

    /// Returns what is left on hosts beside the processes that run guests.
    #[must_use]
    pub fn leftovers(&self) -> Vec<String> {
        self.with(|state| state.leftovers())
    }

    /// Returns the generation that the owner's journal holds of each VM.
    #[must_use]
    pub fn generations(&self) -> BTreeMap<VmId, u64> {
        self.with(|state| {
            state.guests.iter().map(|(vm, guest)| (*vm, guest.generation.value())).collect()
        })
    }

    /// Returns what has been counted so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.with(|state| state.counts.clone())
    }

    /// Returns how long guests stood still at their switchovers, sorted.
    #[must_use]
    pub fn stillness(&self) -> Stillness {
        self.with(|state| Stillness::of(state.stillness.clone()))
    }

    /// Returns what was found to break an invariant, each with its history.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.with(|state| state.violations.clone())
    }

    /// Returns the history of a VM, for people.
    #[must_use]
    pub fn history(&self, vm: VmId) -> String {
        self.with(|state| state.guests.get(&vm).map(Guest::told).unwrap_or_default())
    }

    /// Subscribes to violations: it changes with each.
    #[must_use]
    pub fn broken(&self) -> watch::Receiver<u64> {
        self.0.broken.subscribe()
    }

    pub(crate) fn bell(&self, vm: VmId) -> Option<watch::Receiver<u64>> {
        self.0.bells.get(&vm).map(watch::Sender::subscribe)
    }

    pub(crate) fn host_bell(&self, host: &HostId) -> Option<watch::Receiver<u64>> {
        self.0.stations.get(host).map(|station| station.bell.subscribe())
    }

    /// Waits until no other command of the VM is carried out on a host.
    pub(crate) async fn lane(&self, host: &HostId, vm: VmId) -> Option<OwnedMutexGuard<()>> {
        let lane = {
            let lanes = &self.0.stations.get(host)?.lanes;
            let mut lanes = lanes.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(lanes.entry(vm).or_default())
        };
        Some(lane.lock_owned().await)
    }

    /// Does something beside, until it is done or the fleet ends.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let end = self.0.end.clone();
        self.0.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = end.cancelled() => {}
                () = work => {}
            }
        });
    }

    pub(crate) fn ended(&self) -> CancellationToken {
        self.0.end.clone()
    }

    /// Ends all agents and waits for them.
    pub async fn finish(&self) {
        self.0.end.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }
}

impl State {
    /// Returns the hosts' one clock, in microseconds; never zero.
    pub(crate) fn now_us(&self) -> u64 {
        let since = Instant::now().saturating_duration_since(self.started);
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX).saturating_add(1)
    }

    pub(crate) const fn fresh_image(&mut self) -> u64 {
        self.images += 1;
        self.images
    }

    /// Tells those who watch a VM that something about it has changed on a host.
    pub(crate) fn ring(&mut self, host: &HostId, vm: VmId) {
        self.rung.push((host.clone(), vm));
    }

    /// Puts a running VM on a host, as it was before all began.
    fn place(&mut self, host: &HostId, vm: VmId, name: &str) {
        let image = self.fresh_image();
        let now = self.now_us();
        let Some(there) = self.hosts.get_mut(host) else { return };
        let pid = there.run_from_the_start(vm, now, image);
        let runs = Some((host.clone(), pid));
        self.guests.insert(vm, Guest::new(vm, name, image, runs));
    }

    /// Writes a line into a VM's history.
    pub(crate) fn note(&mut self, vm: VmId, line: impl FnOnce() -> String) {
        let at = self.now_us();
        if let Some(guest) = self.guests.get_mut(&vm) {
            guest.note(at, &line());
        }
    }

    /// Notes that an invariant is broken.
    pub(crate) fn violated(&mut self, vm: VmId, what: &str) {
        let told = self.guests.get(&vm).map(Guest::told).unwrap_or_default();
        self.note(vm, || format!("VIOLATION: {what}"));
        self.violations.push(format!("VIOLATION: {}: {what}\n{told}", short(vm)));
    }

    fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (id, host) in &self.hosts {
            for qemu in host.qemus.values() {
                let runs = self.guests.get(&qemu.vm).and_then(|guest| guest.runs.as_ref());
                if runs != Some(&(id.clone(), qemu.pid)) {
                    found.push(format!(
                        "{} has a QEMU of {} that does not run it ({}, {})",
                        id,
                        short(qemu.vm),
                        qemu.run.label(),
                        qemu.transfer.label()
                    ));
                }
            }
        }
        found
    }
}

/// Makes a fresh id for a request.
#[must_use]
pub fn fresh_request() -> String {
    Uuid::new_v4().to_string()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::qemu::{Qemu, Run};

    fn fleet() -> Fleet {
        let shape = Shape { hosts: 2, vms_per_host: 1, room: 2 };
        let nowhere = |_| SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Fleet::new(shape, Weather::default(), 1, nowhere)
    }

    /// A second process of a VM, on the other host, with the given past.
    fn second(state: &mut State, vm: VmId, image: u64) -> (HostId, u32) {
        let runs = state.guests[&vm].runs.clone().map(|(host, _)| host);
        let other = state.hosts.keys().find(|id| Some(*id) != runs.as_ref()).cloned().unwrap();
        let mut qemu = Qemu::receiver(vm, 7, 1, 9);
        (qemu.run, qemu.image) = (Run::Paused, image);
        state.hosts.get_mut(&other).unwrap().qemus.insert(7, qemu);
        (other, 7)
    }

    #[test]
    fn a_guest_that_runs_twice_is_found_at_once() {
        let fleet = fleet();
        let (vm, _) = fleet.vms()[0];
        fleet.with(|state| {
            let image = state.qemu(&state.guests[&vm].runs.clone().unwrap()).unwrap().image;
            let place = second(state, vm, image);
            state.run_vcpus(&place, "by mistake");
        });
        let found = fleet.violations();
        assert!(found.len() == 1 && found[0].contains("I1: its vCPUs run on"), "{found:?}");
        assert!(found[0].contains("RUNS the guest (by mistake)"), "has its history: {found:?}");
    }

    #[test]
    fn a_guest_that_goes_on_from_an_older_past_is_found() {
        let fleet = fleet();
        let (vm, _) = fleet.vms()[0];
        fleet.with(|state| {
            let source = state.guests[&vm].runs.clone().unwrap();
            let place = second(state, vm, 0);
            state.stop_vcpus(&source, Run::PostMigrate);
            state.run_vcpus(&place, "with half of it");
        });
        let found = fleet.violations();
        assert!(found.len() == 1 && found[0].contains("older past"), "{found:?}");
    }

    #[test]
    fn a_last_copy_that_is_ended_is_found() {
        let fleet = fleet();
        let (vm, _) = fleet.vms()[0];
        let source = fleet.with(|state| state.guests[&vm].runs.clone().unwrap());
        fleet.with(|state| state.end_process(&source));
        let found = fleet.violations();
        assert!(found.len() == 1 && found[0].contains("last copy"), "{found:?}");
    }

    #[test]
    fn an_older_word_that_is_obeyed_is_found() {
        use vmferry_types::{Claim, Generation, Step};
        let fleet = fleet();
        let (vm, _) = fleet.vms()[0];
        let (host, _) = fleet.addresses()[0].clone();
        let word =
            |claim, step| (Generation::FIRST, Claim::from_stored(claim), Step::from_stored(step));
        fleet.with(|state| state.check_word(&host, vm, "claim", word(3, 1)));
        assert!(fleet.violations().is_empty());
        fleet.with(|state| state.check_word(&host, vm, "order_switchover", word(2, 9)));
        assert!(fleet.violations()[0].contains("I2: order_switchover"));
    }
}
