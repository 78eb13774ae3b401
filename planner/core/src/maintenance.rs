//! Where the VMs of one host would go, if it were emptied now.
//!
//! [`plan`] touches nothing. It takes the largest workload first, puts it where placement would,
//! and deducts it before the next: two VMs are never promised the same room. A VM that cannot go
//! takes nothing, is named with one code and every reason, and does not stop the rest from being
//! planned; but a plan with blockers is never carried out.

mod block;
mod room;

pub use block::{Blocked, Code};

use std::collections::BTreeMap;
use std::sync::Arc;

use vmferry_types::{Bytes, HostId, MilliCpu, VmId};

use crate::fleet::{Availability, Demand, Fleet, Host};
use crate::placement::{Needs, Rejected};
use room::{Rooms, Taken};

/// How VMs may be carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Strategy {
    /// Running only: one that cannot be is a blocker.
    LiveOnly,
    /// Running where they can be, else stopped.
    PreferLive,
    /// Stopped, all of them.
    ColdOnly,
}

/// Whether VMs may leave their cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Crossing {
    /// They may not.
    #[default]
    Refused,
    /// They may, and their own has no preference.
    Allowed,
}

/// Whether a VM that is pinned to the host being emptied may leave it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum PinsToSource {
    /// It may not. A pin to another host holds always.
    #[default]
    Hold,
    /// It may, and goes anywhere.
    MayLeave,
}

/// What is asked of a plan. The reserves are the fleet's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The host to be emptied.
    pub source: HostId,
    /// How VMs may be carried.
    pub strategy: Strategy,
    /// Whether they may leave the cluster.
    pub crossing: Crossing,
    /// Whether those pinned here may leave.
    pub pins: PinsToSource,
}

/// Whether a VM can move while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Live {
    /// It can.
    Able,
    /// It cannot.
    Unable {
        /// Why.
        reason: String,
    },
    /// It does not run: moving it stops nobody, so that needs no leave.
    Stopped,
}

/// One VM that is to leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The VM.
    pub vm: VmId,
    /// Where it was when the request was written. `None` if nowhere.
    pub host: Option<HostId>,
    /// What it takes.
    pub demand: Demand,
    /// Whether it can move while it runs.
    pub live: Live,
    /// What it cannot do without: its pin and labels included. The cluster is set by the order.
    pub needs: Needs,
}

/// How one VM will be carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Mode {
    /// While it runs.
    Live,
    /// Stopped.
    Cold,
}

impl Strategy {
    /// Returns the one spelling of this strategy.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::LiveOnly => "live_only",
            Self::PreferLive => "prefer_live",
            Self::ColdOnly => "cold_only",
        }
    }
}

impl Mode {
    /// Returns the one spelling of this mode.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Cold => "cold",
        }
    }
}

/// Where one VM will go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The VM.
    pub vm: VmId,
    /// The host.
    pub destination: HostId,
    /// How it is carried.
    pub mode: Mode,
    /// What is left there once it has arrived, with all that were placed before it.
    pub left: Left,
    /// The hosts that were ruled out for it.
    pub rejected: Vec<Arc<Rejected>>,
}

/// What a plan leaves free on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Memory.
    pub memory: Bytes,
    /// CPU.
    pub cpu: MilliCpu,
}

/// Whether a plan can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanState {
    /// Every VM has a place.
    Planned,
    /// At least one has none.
    Blocked,
}

impl PlanState {
    /// Returns the one spelling of this state.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Planned => "PLANNED",
            Self::Blocked => "BLOCKED",
        }
    }
}

/// Where every VM of a host would go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In the order in which they were placed, which is the order of the sorted workloads.
    pub assignments: Vec<Assignment>,
    /// In the same order, one for each VM that has no place.
    pub blocked: Vec<Blocked>,
    /// What is left on each host that takes placements.
    pub left: BTreeMap<HostId, Left>,
    /// The hosts that take none, with all reasons.
    pub closed: Vec<Arc<Rejected>>,
}

impl Plan {
    /// Says whether the plan can be carried out.
    #[must_use]
    pub const fn state(&self) -> PlanState {
        if self.blocked.is_empty() { PlanState::Planned } else { PlanState::Blocked }
    }
}

/// Returns where each workload would go if `order.source` were emptied now.
///
/// The same fleet and workloads give the same plan, in whatever order the workloads come.
#[must_use]
pub fn plan(fleet: &Fleet, order: &Order, workloads: &[Workload]) -> Plan {
    let mut sorted: Vec<&Workload> = workloads.iter().collect();
    sorted.sort_by_key(|workload| {
        use std::cmp::Reverse;
        (Reverse(workload.demand.memory), Reverse(workload.demand.cpu), workload.vm)
    });
    let mut rooms = Rooms::of(fleet, &order.source);
    let (mut assignments, mut blocked) = (Vec::new(), Vec::new());
    for workload in sorted {
        match assign(fleet, order, &mut rooms, workload) {
            Ok(assignment) => assignments.push(assignment),
            Err(why) => blocked.push(why),
        }
    }
    let (left, closed) = rooms.into_parts();
    Plan { assignments, blocked, left, closed }
}

/// Finds a place for one workload and deducts it, or says by the first code that applies why not.
fn assign(
    fleet: &Fleet,
    order: &Order,
    rooms: &mut Rooms<'_>,
    workload: &Workload,
) -> Result<Assignment, Blocked> {
    let block = |code| Blocked { vm: workload.vm, code, rejected: Vec::new() };
    let source = fleet
        .hosts
        .get(&order.source)
        .filter(|source| source.availability != Availability::Disconnected)
        .ok_or_else(|| block(Code::SourceHostUnavailable))?;
    if workload.host.as_ref() != Some(&source.id) || !has(source, workload.vm) {
        return Err(block(Code::WorkloadNotOnSource));
    }
    let mode = match (order.strategy, &workload.live) {
        (Strategy::LiveOnly | Strategy::PreferLive, Live::Able) => Mode::Live,
        (Strategy::PreferLive, Live::Unable { .. })
        | (Strategy::ColdOnly, Live::Able | Live::Unable { .. })
        | (Strategy::LiveOnly | Strategy::PreferLive | Strategy::ColdOnly, Live::Stopped) => {
            Mode::Cold
        }
        (Strategy::LiveOnly, Live::Unable { reason }) => {
            return Err(block(Code::LiveMigrationRequired { reason: reason.clone() }));
        }
    };
    let pin = match (&workload.needs.pin, order.pins) {
        (Some(pin), PinsToSource::Hold) if *pin == source.id => {
            return Err(block(Code::PinnedToSource));
        }
        (Some(pin), PinsToSource::MayLeave) if *pin == source.id => None,
        (pin, PinsToSource::Hold | PinsToSource::MayLeave) => pin.clone(),
    };
    let cluster = match order.crossing {
        Crossing::Refused => Some(source.policy.cluster.clone()),
        Crossing::Allowed => None,
    };
    let needs = Needs { cluster, pin, ..workload.needs.clone() };
    let Taken { host, left, rejected } = rooms.take(workload, needs)?;
    Ok(Assignment { vm: workload.vm, destination: host, mode, left, rejected })
}

/// Says whether the host reports the VM. A host whose list was not answered is believed to.
fn has(host: &Host, vm: VmId) -> bool {
    let reported = host.report.as_ref().and_then(|report| report.vms.as_ref());
    reported.is_none_or(|vms| vms.contains_key(&vm))
}

#[cfg(test)]
mod tests;
