//! What is left on each host while a plan is made.
//!
//! A fleet of ten thousand hosts is asked two hundred times, so nothing is found out twice: why a
//! host is closed once for all workloads, whether it suits a VM once for each set of needs, and
//! reasons are shared rather than copied.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmferry_types::{Bytes, HostId};

use super::block::{Blocked, Code};
use super::{Left, Workload};
use crate::capacity::figures;
use crate::fleet::{Demand, Fleet, Host};
use crate::placement::{
    Needs, Reason, Rejected, Request, Score, Weight, closed_because, incapable, no_room,
};

/// The hosts of a plan: what each has left, or why it takes nothing.
#[derive(Debug)]
pub(super) struct Rooms<'a> {
    source: &'a HostId,
    hosts: Vec<Room<'a>>,
    kinds: Vec<Kind>,
}

#[derive(Debug)]
struct Room<'a> {
    host: &'a Host,
    state: State,
    /// The last time that it was too small, and for what: workloads of one size come in a row.
    short: Option<Short>,
}

#[derive(Debug)]
enum State {
    Open { left: Left, available: Bytes },
    Closed { because: Arc<Rejected> },
}

#[derive(Debug)]
struct Short {
    kind: usize,
    demand: Demand,
    left: Left,
    because: Arc<Rejected>,
}

/// One set of needs, with what rules each host out for it, room aside.
#[derive(Debug)]
struct Kind {
    needs: Needs,
    unsuited: Vec<Option<Arc<Rejected>>>,
}

/// Where a workload was put.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) host: HostId,
    pub(super) left: Left,
    pub(super) rejected: Vec<Arc<Rejected>>,
}

impl<'a> Rooms<'a> {
    pub(super) fn of(fleet: &'a Fleet, source: &'a HostId) -> Self {
        let hosts = fleet
            .hosts
            .values()
            .filter(|host| host.id != *source)
            .map(|host| Room { host, state: State::of(fleet, host), short: None })
            .collect();
        Self { source, hosts, kinds: Vec::new() }
    }

    /// Puts a workload on the best host that has room, and deducts it there.
    pub(super) fn take(&mut self, workload: &Workload, needs: Needs) -> Result<Taken, Blocked> {
        let demand = workload.demand;
        let at = self.kind(workload, needs);
        let kind = &self.kinds[at];
        let mut rejected = Vec::new();
        let mut best: Option<(Score<'_>, &mut Left)> = None;
        for (room, unsuited) in self.hosts.iter_mut().zip(&kind.unsuited) {
            match &mut room.state {
                State::Closed { because } => {
                    rejected.push(Arc::clone(unsuited.as_ref().unwrap_or(because)));
                }
                State::Open { left, available } => {
                    if unsuited.is_some() || !left.holds(demand) {
                        let asked = (at, demand, *left);
                        rejected.push(short(room.host, &mut room.short, unsuited.as_ref(), asked));
                        continue;
                    }
                    let score = Score::of(&room.host.id, (left.memory, left.cpu), *available);
                    if best.as_ref().is_none_or(|(best, _)| score < *best) {
                        best = Some((score, left));
                    }
                }
            }
        }
        let Some((score, left)) = best else {
            let code = code(&kind.needs, &rejected);
            return Err(Blocked { vm: workload.vm, code, rejected });
        };
        *left = left.less(demand);
        Ok(Taken { host: score.host().clone(), left: *left, rejected })
    }

    /// Returns where the needs are kept, with what each host lacks of them.
    fn kind(&mut self, workload: &Workload, needs: Needs) -> usize {
        if let Some(known) = self.kinds.iter().position(|kind| kind.needs == needs) {
            return known;
        }
        let request = Request {
            vm: workload.vm,
            demand: workload.demand,
            source: Some(self.source.clone()),
            destination: None,
            needs,
        };
        let unsuited = self.hosts.iter().map(|room| room.unsuited(&request)).collect();
        self.kinds.push(Kind { needs: request.needs, unsuited });
        self.kinds.len() - 1
    }

    /// What is left where placements are taken, and why elsewhere none are.
    pub(super) fn into_parts(self) -> (BTreeMap<HostId, Left>, Vec<Arc<Rejected>>) {
        let (mut open, mut closed) = (BTreeMap::new(), Vec::new());
        for room in self.hosts {
            match room.state {
                State::Open { left, .. } => {
                    open.insert(room.host.id.clone(), left);
                }
                State::Closed { because } => closed.push(because),
            }
        }
        (open, closed)
    }
}

impl Room<'_> {
    /// Returns why the host never takes a VM with these needs; beside why it is closed, if it is.
    fn unsuited(&self, request: &Request) -> Option<Arc<Rejected>> {
        let mut reasons = incapable(self.host, request);
        if reasons.is_empty() {
            return None;
        }
        match &self.state {
            State::Open { .. } => {}
            State::Closed { because } => reasons.extend(because.reasons.iter().cloned()),
        }
        Some(Arc::new(Rejected { host: self.host.id.clone(), reasons }))
    }
}

impl State {
    fn of(fleet: &Fleet, host: &Host) -> Self {
        let reasons = closed_because(fleet, host);
        match figures(host, &fleet.policy) {
            Ok(figures) if reasons.is_empty() => Self::Open {
                left: Left { memory: figures.free_memory, cpu: figures.free_cpu },
                available: figures.available_memory,
            },
            Ok(_) | Err(_) => {
                Self::Closed { because: Arc::new(Rejected { host: host.id.clone(), reasons }) }
            }
        }
    }
}

impl Left {
    /// Says whether a demand fits. An exact fit does.
    fn holds(self, demand: Demand) -> bool {
        demand.memory <= self.memory && demand.cpu <= self.cpu
    }

    const fn less(self, demand: Demand) -> Self {
        Self { memory: self.memory.less(demand.memory), cpu: self.cpu.less(demand.cpu) }
    }
}

/// Returns why an open host does not take a workload: what it lacks, and what it is short of.
fn short(
    host: &Host,
    last: &mut Option<Short>,
    unsuited: Option<&Arc<Rejected>>,
    (kind, demand, left): (usize, Demand, Left),
) -> Arc<Rejected> {
    if let Some(known) =
        last.as_ref().filter(|last| (last.kind, last.demand, last.left) == (kind, demand, left))
    {
        return Arc::clone(&known.because);
    }
    let missing = no_room((left.memory, left.cpu), demand);
    let because = match unsuited {
        Some(unsuited) if missing.is_empty() => Arc::clone(unsuited),
        unsuited => {
            let mut reasons: Vec<Reason> =
                unsuited.map(|unsuited| unsuited.reasons.clone()).unwrap_or_default();
            reasons.extend(missing);
            Arc::new(Rejected { host: host.id.clone(), reasons })
        }
    };
    *last = Some(Short { kind, demand, left, because: Arc::clone(&because) });
    because
}

/// The code of a workload that found no place: room is short only where everything else is well.
fn code(needs: &Needs, rejected: &[Arc<Rejected>]) -> Code {
    let only_room = |rejected: &Arc<Rejected>| {
        rejected.reasons.iter().all(|reason| reason.weight() == Weight::Room)
    };
    let short = rejected.iter().any(only_room);
    match (&needs.pin, short) {
        (_, true) => Code::InsufficientCapacity,
        (Some(pin), false) => Code::PinnedTargetUnavailable { pin: pin.clone() },
        (None, false) => Code::NoEligibleTarget,
    }
}
