//! One host with its agent, a store, and a planner that may forget all but the store.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use vmferry_planner_core::fleet::{Demand, Lifecycle};
use vmferry_planner_core::lifecycle::drain::{self, Drain, Goal};
use vmferry_planner_core::lifecycle::emptiness::{HostFacts, Inside, Presence};
use vmferry_planner_core::lifecycle::job::{self, Cordoned, Job, Returning};
use vmferry_planner_core::lifecycle::{Ended, Policy};
use vmferry_planner_core::maintenance::{
    Assignment, Crossing, Left, Live, Mode, PinsToSource, Plan, Strategy, Workload,
};
use vmferry_planner_core::placement::Needs;
use vmferry_types::{
    Bytes, DrainId, Generation, HostId, JobId, MigrationId, MilliCpu, Percent, Timestamp, VmId,
};

/// What the operator asks of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Maintenance,
    Drain(Goal),
}

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    TimePasses(u64),
    PlannerReadsStore,
    PlannerSteps,
    PlannerTicks,
    AgentLooks,
    ReportArrives(usize),
    ReportIsLost(usize),
    StartIsAdmitted(u128),
    StartArrives(usize),
    GuestEnds(u128),
    MigrationEnds(usize, u8),
    PlannerRestarts,
    OperatorCancels,
    OperatorAsks,
    OperatorCompletes(Returning),
}

#[derive(Clone, Debug)]
struct Report {
    sequence: u64,
    composed_after: Timestamp,
    guests: Vec<VmId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Flight {
    Leaves,
    Returns,
}

#[derive(Clone, Debug, Default)]
struct Store {
    job: Option<Job>,
    drain: Option<Drain>,
    cordoned: bool,
    lifecycle: Option<Lifecycle>,
    reserved: BTreeSet<VmId>,
    /// VMs that a report showed, and none since did not.
    running: BTreeSet<VmId>,
    owners: BTreeMap<VmId, (Option<HostId>, Generation)>,
    open: BTreeMap<MigrationId, (VmId, Flight)>,
    ended: BTreeMap<MigrationId, Ended>,
    seq: u64,
}

/// What the planner keeps in memory.
#[derive(Clone, Debug, Default)]
struct Memory {
    heard: Option<Report>,
    read: Option<(u64, HostFacts)>,
}

#[derive(Clone, Debug)]
pub(crate) struct World {
    asked: Asked,
    now: u64,
    guests: BTreeSet<VmId>,
    starts: Vec<VmId>,
    question: Option<Timestamp>,
    reports: Vec<Report>,
    looked: u64,
    store: Store,
    planner: Memory,
    ids: u128,
    moves_of: BTreeMap<(u128, VmId), u32>,
    breach: Option<String>,
    called_empty: bool,
}

fn host(id: &str) -> HostId {
    id.parse().expect("a name")
}

fn policy() -> Policy {
    Policy {
        strategy: Strategy::PreferLive,
        max_parallel: NonZeroU32::new(2).expect("two"),
        reserve_cpu_percent: Percent::new(0).expect("a share"),
        reserve_memory_percent: Percent::new(0).expect("a share"),
        crossing: Crossing::Refused,
        pins: PinsToSource::Hold,
        dry_run: false,
    }
}

impl World {
    pub(crate) fn new(asked: Asked) -> Self {
        let vms: BTreeSet<VmId> = (0..2).map(VmId::from_u128).collect();
        let mut store = Store { running: vms.clone(), ..Store::default() };
        // Two more were admitted, and their starts are on their way.
        let starts: Vec<VmId> = (3..5).map(VmId::from_u128).collect();
        store.reserved.extend(&starts);
        for vm in vms.iter().chain(&starts) {
            store.owners.insert(*vm, (Some(host("a")), Generation::FIRST));
        }
        Self {
            asked,
            now: 1_000,
            guests: vms,
            starts,
            question: None,
            reports: Vec::new(),
            looked: 0,
            store,
            planner: Memory::default(),
            ids: 100,
            moves_of: BTreeMap::new(),
            breach: None,
            called_empty: false,
        }
    }

    pub(crate) fn breach(&self) -> Option<&str> {
        self.breach.as_deref()
    }

    pub(crate) fn called_empty(&self) -> bool {
        self.called_empty
    }

    pub(crate) fn was_moved_twice(&self) -> bool {
        self.moves_of.values().any(|times| *times > 1)
    }

    pub(crate) fn act(&mut self, act: &Act) {
        match act {
            Act::TimePasses(ms) => self.now += ms,
            Act::PlannerReadsStore => self.read_store(),
            Act::PlannerSteps => self.step(),
            Act::PlannerTicks => {
                self.read_store();
                self.step();
            }
            Act::AgentLooks => self.look(),
            Act::ReportArrives(which) => self.arrive(*which),
            Act::ReportIsLost(which) => {
                if !self.reports.is_empty() {
                    self.reports.remove(*which % self.reports.len());
                }
            }
            Act::StartIsAdmitted(vm) => self.admit_start(VmId::from_u128(*vm)),
            Act::StartArrives(which) => {
                if !self.starts.is_empty() {
                    let vm = self.starts.remove(*which % self.starts.len());
                    self.guests.insert(vm);
                }
            }
            Act::GuestEnds(vm) => {
                let vm = VmId::from_u128(*vm);
                let moving = self.store.open.values().any(|(moving, _)| *moving == vm);
                if !moving {
                    self.guests.remove(&vm);
                }
            }
            Act::MigrationEnds(which, how) => self.end_migration(*which, *how),
            Act::PlannerRestarts => {
                self.planner = Memory::default();
                // Answers die with the connection that they were asked on; reports that an agent
                // sends by itself find the next planner.
                self.question = None;
                self.reports.retain(|report| report.composed_after == Timestamp(0));
            }
            Act::OperatorCancels => self.cancel(),
            Act::OperatorAsks => self.ask(),
            Act::OperatorCompletes(returning) => self.complete(*returning),
        }
    }

    /// Lets everything that is owed be done, and nothing new turn up.
    pub(crate) fn settle(&mut self) {
        for round in 0..40 {
            self.now += 7;
            self.act(&Act::StartArrives(0));
            // An agent's answer that a guest was started and has ended since.
            let (starts, guests) = (&self.starts, &self.guests);
            self.store.reserved.retain(|vm| starts.contains(vm) || guests.contains(vm));
            self.act(&Act::MigrationEnds(0, 0));
            self.act(&Act::AgentLooks);
            self.reports.drain(..self.reports.len().saturating_sub(1));
            self.act(&Act::ReportArrives(0));
            self.act(&Act::PlannerReadsStore);
            self.act(&Act::PlannerSteps);
            if round == 20 {
                self.now += 4_000_000;
            }
        }
        let job_open = self.store.job.as_ref().is_some_and(|job| job.hold() == job::Hold::Emptying);
        let drain = self.store.drain.as_ref();
        let drain_open = drain.is_some_and(|drain| drain.phase == drain::Phase::Emptying);
        if job_open || drain_open {
            self.breach = Some(format!("never ended: {:?}", self.store));
        }
    }

    // The agent.

    fn look(&mut self) {
        self.looked += 1;
        // A report that was not asked for says nothing of when it was composed.
        let composed_after = self.question.take().unwrap_or(Timestamp(0));
        let guests = self.guests.iter().copied().collect();
        self.reports.push(Report { sequence: self.looked, composed_after, guests });
    }

    fn arrive(&mut self, which: usize) {
        if self.reports.is_empty() {
            return;
        }
        let report = self.reports.remove(which % self.reports.len());
        let known = self.planner.heard.as_ref().map_or(0, |heard| heard.sequence);
        if report.sequence <= known {
            return;
        }
        // What a report shows is no longer only reserved; what it does not show has ended.
        for vm in &report.guests {
            self.store.reserved.remove(vm);
            self.store.running.insert(*vm);
        }
        self.store.running.retain(|vm| report.guests.contains(vm));
        self.planner.heard = Some(report);
    }

    // The store.

    fn is_free(&self, vm: VmId) -> bool {
        let moving = self.store.open.values().any(|(moving, _)| *moving == vm);
        !moving && !self.store.reserved.contains(&vm) && !self.starts.contains(&vm)
    }

    fn admit_start(&mut self, vm: VmId) {
        let elsewhere = self
            .store
            .owners
            .get(&vm)
            .is_some_and(|(owner, _)| owner.as_ref().is_some_and(|owner| *owner != host("a")));
        let closed =
            self.store.cordoned || self.store.lifecycle.is_some_and(|l| l != Lifecycle::Active);
        if closed || elsewhere || !self.is_free(vm) || self.guests.contains(&vm) {
            return;
        }
        self.store.reserved.insert(vm);
        let generation = self.store.owners.get(&vm).map_or(Generation::FIRST, |(_, g)| *g);
        self.store.owners.insert(vm, (Some(host("a")), generation));
        self.starts.push(vm);
    }

    fn end_migration(&mut self, which: usize, how: u8) {
        let Some((id, (vm, flight))) = self
            .store
            .open
            .iter()
            .nth(which % self.store.open.len().max(1))
            .map(|(id, (vm, flight))| (*id, (*vm, flight.clone())))
        else {
            return;
        };
        self.store.open.remove(&id);
        let ended = match how {
            0..8 => {
                let next = self.store.owners[&vm].1.next();
                let to = match flight {
                    Flight::Leaves => host("b"),
                    Flight::Returns => host("a"),
                };
                match flight {
                    Flight::Leaves => self.guests.remove(&vm),
                    Flight::Returns => self.guests.insert(vm),
                };
                self.store.owners.insert(vm, (Some(to.clone()), next));
                Ended::Moved { destination: to, generation: next }
            }
            8 => Ended::Failed { error: "channel".into() },
            _ => Ended::Cancelled,
        };
        if flight == Flight::Returns {
            self.store.reserved.remove(&vm);
        }
        self.store.ended.insert(id, ended);
    }

    /// Reads the store's part first, as the facts want it.
    fn read_store(&mut self) {
        // A VM that is stopped has nothing here that would have to leave.
        let here = |vm: &VmId, owner: &Option<HostId>| {
            owner.as_ref() == Some(&host("a")) && self.store.running.contains(vm)
        };
        let residents =
            self.store.owners.iter().filter(|(vm, (owner, _))| here(vm, owner)).map(|(vm, _)| *vm);
        let facts = HostFacts {
            presence: Presence::Heard,
            reserved: self.store.reserved.iter().copied().collect(),
            residents: residents.collect(),
            inside: None,
        };
        self.planner.read = Some((self.store.seq, facts));
    }

    // The planner.

    fn step(&mut self) {
        let Some((seq, mut facts)) = self.planner.read.take() else { return };
        if seq != self.store.seq {
            return;
        }
        facts.inside = self.planner.heard.as_ref().map(|heard| Inside {
            composed_after: heard.composed_after,
            unreadable: None,
            guests: heard.guests.clone(),
            receivers: vec![],
            strangers: vec![],
        });
        match self.asked {
            Asked::Maintenance => self.step_job(facts),
            Asked::Drain(_) => self.step_drain(facts),
        }
    }

    fn in_flight(&self, own: &BTreeSet<MigrationId>) -> BTreeSet<VmId> {
        let other = self.store.open.iter().filter(|(id, _)| !own.contains(id));
        other.map(|(_, (vm, _))| *vm).chain(self.store.reserved.iter().copied()).collect()
    }

    fn step_job(&mut self, host_facts: HostFacts) {
        let Some(row) = self.store.job.clone() else { return };
        let own = row.open_migrations().map(|(_, id)| id).collect();
        let facts = job::Facts {
            host: host_facts,
            ended: self.store.ended.clone(),
            owners: self.store.owners.clone(),
            in_flight: self.in_flight(&own),
            waiting: BTreeSet::new(),
        };
        let step = job::step(&row, &facts, Timestamp(self.now));
        self.commit_job(step.after);
        for effect in step.effects {
            let Some(row) = self.store.job.clone() else { return };
            let event = match effect {
                job::Effect::Begin { vm, .. } => self.begin(row.id.as_u128(), vm, Flight::Leaves),
                job::Effect::BringBack { vm, .. } => {
                    self.store.reserved.insert(vm);
                    self.begin(row.id.as_u128(), vm, Flight::Returns)
                }
                job::Effect::Cancel { vm, .. } => job::Event::CancelAsked { vm },
                job::Effect::AskWhetherEmpty => {
                    self.question = Some(Timestamp(self.now));
                    continue;
                }
            };
            if let Ok(after) = row.apply(&event) {
                self.commit_job(after);
            }
        }
    }

    fn step_drain(&mut self, host_facts: HostFacts) {
        let Some(row) = self.store.drain.clone() else { return };
        let now = Timestamp(self.now);
        let own = row.open_migrations().map(|(_, id)| id).collect();
        let facts = drain::Facts {
            host: host_facts,
            ended: self.store.ended.clone(),
            in_flight: self.in_flight(&own),
            plan: Some(plan(&row.to_plan(now))),
        };
        let step = drain::step(&row, &facts, now);
        self.commit_drain(step.after);
        for effect in step.effects {
            let Some(row) = self.store.drain.clone() else { return };
            let event = match effect {
                drain::Effect::Begin { vm, .. } => {
                    let id = self.open(row.id.as_u128(), vm, Flight::Leaves);
                    drain::Event::Begun { vm, migration: id }
                }
                drain::Effect::Cancel { vm, .. } => drain::Event::CancelAsked { vm },
                drain::Effect::AskWhetherEmpty => {
                    self.question = Some(now);
                    continue;
                }
                drain::Effect::Replan => continue,
            };
            if let Ok(after) = row.apply(&event) {
                self.commit_drain(after);
            }
        }
    }

    fn begin(&mut self, by: u128, vm: VmId, flight: Flight) -> job::Event {
        let migration = self.open(by, vm, flight);
        job::Event::Begun { vm, migration }
    }

    fn open(&mut self, by: u128, vm: VmId, flight: Flight) -> MigrationId {
        self.ids += 1;
        if flight == Flight::Leaves {
            *self.moves_of.entry((by, vm)).or_default() += 1;
        }
        let id = MigrationId::from_u128(self.ids);
        self.store.open.insert(id, (vm, flight));
        id
    }

    fn commit_job(&mut self, after: Job) {
        let before = self.store.job.as_ref().map(Job::label);
        if after.label() == job::Label::Maintenance && before != Some(job::Label::Maintenance) {
            self.must_be_empty("maintenance");
        }
        let books = after.books();
        self.keep(books.cordon, books.lifecycle);
        self.store.job = Some(after);
    }

    fn commit_drain(&mut self, after: Drain) {
        let before = self.store.drain.as_ref().map(|drain| drain.phase.label());
        let empty =
            matches!(after.phase, drain::Phase::Empty { .. } | drain::Phase::Granted { .. });
        if empty && before != Some(after.phase.label()) {
            self.must_be_empty(after.phase.label());
        }
        let books = after.books();
        self.keep(books.cordon, books.lifecycle);
        self.store.drain = Some(after);
    }

    fn keep(&mut self, cordon: Cordoned, lifecycle: Lifecycle) {
        match cordon {
            Cordoned::Held => self.store.cordoned = true,
            Cordoned::Lifted => self.store.cordoned = false,
            Cordoned::AsItIs => {}
        }
        self.store.lifecycle = Some(lifecycle);
        self.store.seq += 1;
    }

    fn must_be_empty(&mut self, what: &str) {
        self.called_empty = true;
        if !self.guests.is_empty() || !self.starts.is_empty() {
            let (guests, starts) = (&self.guests, &self.starts);
            self.breach = Some(format!("{what} with guests {guests:?} and starts {starts:?}"));
        }
    }

    // The operator.

    fn ask(&mut self) {
        self.ids += 1;
        let at = Timestamp(self.now);
        match self.asked {
            Asked::Maintenance => {
                let free = [job::Hold::Over, job::Hold::Plan];
                if self.store.job.as_ref().is_some_and(|job| !free.contains(&job.hold())) {
                    return;
                }
                let vms: Vec<VmId> = self.guests.iter().copied().collect();
                let opening = job::Opening {
                    id: JobId::from_u128(self.ids),
                    host: host("a"),
                    policy: policy(),
                    by: "operator".into(),
                    at,
                };
                let row = Job::open(opening, &plan(&vms), &[]);
                let Ok(row) = row.apply(&job::Event::ExecuteRequested { at }) else { return };
                self.commit_job(row);
            }
            Asked::Drain(goal) => {
                let held = |drain: &Drain| drain.hold() != drain::Hold::Over || !drain.is_settled();
                if self.store.drain.as_ref().is_some_and(held) {
                    return;
                }
                let opening = drain::Opening {
                    id: DrainId::from_u128(self.ids),
                    host: host("a"),
                    goal,
                    policy: policy(),
                    by: "operator".into(),
                    at,
                };
                self.commit_drain(Drain::open(opening));
            }
        }
    }

    fn cancel(&mut self) {
        let (by, at) = ("operator".to_owned(), Timestamp(self.now));
        if let Some(row) = self.store.job.clone() {
            let event = job::Event::CancelRequested { by: by.clone(), at };
            if let Ok(after) = row.apply(&event) {
                self.commit_job(after);
            }
        }
        let event = drain::Event::CancelRequested { by, at };
        let after = self.store.drain.as_ref().and_then(|row| row.apply(&event).ok());
        if let Some(after) = after {
            self.commit_drain(after);
        }
    }

    fn complete(&mut self, returning: Returning) {
        let event = job::Event::CompleteRequested { returning, at: Timestamp(self.now) };
        let after = self.store.job.as_ref().and_then(|row| row.apply(&event).ok());
        if let Some(after) = after {
            self.commit_job(after);
        }
    }
}

/// A plan with room for each.
fn plan(vms: &[VmId]) -> Plan {
    let workloads = vms.iter().map(|vm| Workload {
        vm: *vm,
        host: Some(host("a")),
        demand: Demand::default(),
        live: Live::Able,
        needs: Needs::default(),
    });
    let assignments = workloads.map(|workload| Assignment {
        vm: workload.vm,
        destination: host("b"),
        mode: Mode::Live,
        left: Left { memory: Bytes::ZERO, cpu: MilliCpu::ZERO },
        rejected: vec![],
    });
    Plan {
        assignments: assignments.collect(),
        blocked: vec![],
        left: BTreeMap::new(),
        closed: vec![],
    }
}
