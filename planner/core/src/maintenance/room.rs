//! What is left on each host while a plan is made.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use vmferry_types::HostId;

use super::block::{Blocked, Code};
use super::{Left, Workload};
use crate::capacity::figures;
use crate::fleet::{Fleet, Host};
use crate::placement::{
    Needs, Reason, Rejected, Request, Score, Weight, closed_because, incapable,
};

/// The hosts of a plan: what each has left, or why it takes nothing.
#[derive(Debug)]
pub(super) struct Rooms<'a> {
    source: &'a HostId,
    hosts: Vec<Room<'a>>,
}

#[derive(Debug)]
struct Room<'a> {
    host: &'a Host,
    state: State,
}

#[derive(Debug)]
enum State {
    Open { left: Left, available: vmferry_types::Bytes },
    Closed { reasons: Vec<Reason> },
}

/// Where a workload was put.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) host: HostId,
    pub(super) rejected: Vec<Rejected>,
}

impl<'a> Rooms<'a> {
    pub(super) fn of(fleet: &'a Fleet, source: &'a HostId) -> Self {
        let hosts = fleet
            .hosts
            .values()
            .filter(|host| host.id != *source)
            .map(|host| Room { host, state: State::of(fleet, host) })
            .collect();
        Self { source, hosts }
    }

    /// Puts a workload on the best host that has room, and deducts it there.
    pub(super) fn take(&mut self, workload: &Workload, needs: Needs) -> Result<Taken, Blocked> {
        let request = Request {
            vm: workload.vm,
            demand: workload.demand,
            source: Some(self.source.clone()),
            destination: None,
            needs,
        };
        let mut rejected = Vec::new();
        let mut best: Option<(Score, &mut Left)> = None;
        for room in &mut self.hosts {
            let host = room.host;
            let mut reasons = incapable(host, &request);
            match &mut room.state {
                State::Closed { reasons: closed } => reasons.extend(closed.iter().cloned()),
                State::Open { left, available } => {
                    reasons.extend(left.short_of(&request));
                    if reasons.is_empty() {
                        let score = Score {
                            remaining_memory: Reverse(left.memory.less(request.demand.memory)),
                            remaining_cpu: Reverse(left.cpu.less(request.demand.cpu)),
                            available_memory: Reverse(*available),
                            host: host.id.clone(),
                        };
                        if best.as_ref().is_none_or(|(best, _)| score < *best) {
                            best = Some((score, left));
                        }
                        continue;
                    }
                }
            }
            rejected.push(Rejected { host: host.id.clone(), reasons });
        }
        let Some((score, left)) = best else {
            let code = code(&request, &rejected);
            return Err(Blocked { vm: request.vm, code, rejected });
        };
        left.memory = score.remaining_memory.0;
        left.cpu = score.remaining_cpu.0;
        Ok(Taken { host: score.host, rejected })
    }

    /// What is left where placements are taken, and why elsewhere none are.
    pub(super) fn into_parts(self) -> (BTreeMap<HostId, Left>, Vec<Rejected>) {
        let (mut open, mut closed) = (BTreeMap::new(), Vec::new());
        for room in self.hosts {
            let host = room.host.id.clone();
            match room.state {
                State::Open { left, .. } => {
                    open.insert(host, left);
                }
                State::Closed { reasons } => closed.push(Rejected { host, reasons }),
            }
        }
        (open, closed)
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
            Ok(_) | Err(_) => Self::Closed { reasons },
        }
    }
}

impl Left {
    fn short_of(self, request: &Request) -> Vec<Reason> {
        crate::placement::no_room((self.memory, self.cpu), request.demand)
    }
}

/// The code of a workload that found no place: room is short only where everything else is well.
fn code(request: &Request, rejected: &[Rejected]) -> Code {
    let only_room = |rejected: &&Rejected| {
        rejected.reasons.iter().all(|reason| reason.weight() == Weight::Room)
    };
    let short = rejected.iter().any(|rejected| only_room(&rejected));
    match (&request.needs.pin, short) {
        (_, true) => Code::InsufficientCapacity,
        (Some(pin), false) => Code::PinnedTargetUnavailable { pin: pin.clone() },
        (None, false) => Code::NoEligibleTarget,
    }
}
