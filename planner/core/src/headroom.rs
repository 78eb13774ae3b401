//! What a fleet has left: of each host and in all, how many more VMs of a size it takes, and whether
//! it can lose a host.
//!
//! Nothing here decides anything; it shows beforehand what [`place`](crate::placement::place) and
//! [`plan`] would find, by the same figures.

use std::collections::BTreeMap;

use vmferry_types::{Bytes, HostId, MilliCpu};

use crate::capacity::{Figures, Unreadable, figures};
use crate::fleet::{Availability, Demand, Fleet, Host};
use crate::maintenance::{Crossing, Left, Order, PinsToSource, Plan, Strategy, Workload, plan};
use crate::placement::{Reason, closed_because};

/// What is used up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binds {
    /// Memory, by what the host says is in use.
    ObservedMemory,
    /// Memory, by what is promised to VMs.
    CommittedMemory,
    /// CPU.
    Cpu,
}

impl Binds {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ObservedMemory => "observed_memory",
            Self::CommittedMemory => "committed_memory",
            Self::Cpu => "cpu",
        }
    }
}

/// One host's room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoom<'a> {
    /// Which.
    pub host: &'a Host,
    /// Its figures, or why they cannot be read.
    pub figures: Result<Figures, Unreadable>,
    /// Why it takes no placements; empty if it does.
    pub closed: Vec<Reason>,
}

impl HostRoom<'_> {
    /// Says whether it takes placements now.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.closed.is_empty() && self.figures.is_ok()
    }
}

/// What the hosts that take placements have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// How many take placements.
    pub open: u32,
    /// How many do not.
    pub closed: u32,
    /// The sum of their figures. `None` if none takes any.
    pub figures: Option<Figures>,
}

/// Returns the room of each host, by id, and of all that take placements.
#[must_use]
pub fn rooms(fleet: &Fleet) -> (Vec<HostRoom<'_>>, Totals) {
    let rooms: Vec<HostRoom<'_>> = fleet
        .hosts
        .values()
        .map(|host| HostRoom {
            host,
            figures: figures(host, &fleet.policy),
            closed: closed_because(fleet, host),
        })
        .collect();
    let mut totals = Totals::default();
    for room in &rooms {
        match &room.figures {
            Ok(figures) if room.closed.is_empty() => {
                totals.open = totals.open.saturating_add(1);
                totals.figures = Some(totals.figures.map_or(*figures, |sum| plus(sum, *figures)));
            }
            Ok(_) | Err(_) => totals.closed = totals.closed.saturating_add(1),
        }
    }
    (rooms, totals)
}

/// Adds up two hosts' figures.
const fn plus(a: Figures, b: Figures) -> Figures {
    Figures {
        total_memory: a.total_memory.plus(b.total_memory),
        reserve_memory: a.reserve_memory.plus(b.reserve_memory),
        observed_memory: a.observed_memory.plus(b.observed_memory),
        committed_memory: a.committed_memory.plus(b.committed_memory),
        reserved_memory: a.reserved_memory.plus(b.reserved_memory),
        free_memory: a.free_memory.plus(b.free_memory),
        available_memory: a.available_memory.plus(b.available_memory),
        total_cpu: a.total_cpu.plus(b.total_cpu),
        usable_cpu: a.usable_cpu.plus(b.usable_cpu),
        committed_cpu: a.committed_cpu.plus(b.committed_cpu),
        free_cpu: a.free_cpu.plus(b.free_cpu),
    }
}

/// Says what of these figures is used up first: what the greater share of is gone. Where both are
/// even it is memory.
#[must_use]
pub fn binds(figures: &Figures) -> Binds {
    let usable_memory = figures.total_memory.less(figures.reserve_memory).value();
    let memory = (figures.free_memory.value(), usable_memory);
    let cpu = (figures.free_cpu.value(), figures.usable_cpu.value());
    // free/usable of the one against free/usable of the other; what has nothing usable has none free.
    let less = |(free, of): (u64, u64), (other, of_other): (u64, u64)| {
        u128::from(free) * u128::from(of_other.max(1)) < u128::from(other) * u128::from(of.max(1))
    };
    if less(cpu, memory) {
        Binds::Cpu
    } else if figures.observed_memory > figures.committed_memory {
        Binds::ObservedMemory
    } else {
        Binds::CommittedMemory
    }
}

/// What each host that takes placements has left.
#[must_use]
pub fn left(rooms: &[HostRoom<'_>]) -> BTreeMap<HostId, Left> {
    let open = rooms.iter().filter(|room| room.closed.is_empty());
    open.filter_map(|room| {
        let figures = room.figures.as_ref().ok()?;
        let left = Left { memory: figures.free_memory, cpu: figures.free_cpu };
        Some((room.host.id.clone(), left))
    })
    .collect()
}

/// How many more VMs of one size fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fits {
    /// In all.
    pub count: u64,
    /// On each host that takes placements.
    pub hosts: BTreeMap<HostId, u64>,
}

/// Returns how many VMs of one size fit into what is left, if nothing else comes.
///
/// What only time forbids, as a cap on migrations, does not count. A demand of nothing fits without end.
#[must_use]
pub fn fit(left: &BTreeMap<HostId, Left>, demand: Demand) -> Fits {
    let times = |has: u64, takes: u64| has.checked_div(takes).unwrap_or(u64::MAX);
    let hosts: BTreeMap<HostId, u64> = left
        .iter()
        .map(|(host, left)| {
            let Demand { memory: Bytes(memory), cpu: MilliCpu(cpu) } = demand;
            let by_memory = times(left.memory.value(), memory);
            (host.clone(), by_memory.min(times(left.cpu.value(), cpu)))
        })
        .collect();
    Fits { count: hosts.values().fold(0, |sum, count| sum.saturating_add(*count)), hosts }
}

/// Returns where the VMs of a host would go if it were lost now.
///
/// They are started anew, so none of them has to be able to move, and it does not matter whether the
/// host answers. Those that may only be there have no place.
#[must_use]
pub fn without(fleet: &Fleet, host: &HostId, crossing: Crossing, workloads: &[Workload]) -> Plan {
    let mut fleet = fleet.clone();
    if let Some(lost) = fleet.hosts.get_mut(host) {
        lost.availability = Availability::Connected;
        // What it runs is what the caller says.
        lost.report = None;
    }
    let order = Order {
        source: host.clone(),
        strategy: Strategy::ColdOnly,
        crossing,
        pins: PinsToSource::Hold,
    };
    plan(&fleet, &order, workloads)
}

#[cfg(test)]
mod tests;
