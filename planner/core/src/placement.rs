//! Where a VM should go.
//!
//! [`place`] takes a snapshot and returns a host, or why there is none; either way with all the
//! reasons that ruled each other host out. It fails closed: a host that cannot be read, or is not
//! meant to take placements, is ineligible, never merely low. The same fleet gives the same answer.

mod eligibility;
mod reason;
mod shortlist;

pub(crate) use eligibility::incapable;
pub use reason::{Reason, Weight};
pub use shortlist::{Candidate, Ranking, Shortlist, Standing};

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use vmferry_types::{Bytes, HostId, MilliCpu, VmId};

use crate::capacity::figures_without;
use crate::fleet::{Demand, Fleet, Host};
use crate::migration::Blocker;

/// What a VM cannot do without.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The cluster that it may not leave. `None` if it may cross.
    pub cluster: Option<String>,
    /// The only host that it may be on. `None` if any.
    pub pin: Option<HostId>,
    /// Labels that its host must have.
    pub required_labels: BTreeMap<String, String>,
    /// The processor's architecture. `None` if any.
    pub architecture: Option<String>,
    /// The accelerator. `None` if any.
    pub accelerator: Option<String>,
    /// The versioned machine type. `None` if any.
    pub machine_type: Option<String>,
    /// The CPU model. `None` if any.
    pub cpu_model: Option<String>,
    /// Bridges.
    pub bridges: BTreeSet<String>,
    /// The version of the QEMU that would send; an older one does not receive. `None` if any.
    pub qemu_version: Option<String>,
    /// Folders or files that its hosts have to share.
    pub shared_paths: BTreeSet<String>,
}

/// One VM that needs a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The VM.
    pub vm: VmId,
    /// What it takes.
    pub demand: Demand,
    /// Where it is. `None` if nowhere.
    pub source: Option<HostId>,
    /// The host that was asked for: that one or none. `None` leaves the choice open.
    pub destination: Option<HostId>,
    /// What it cannot do without.
    pub needs: Needs,
}

/// A host that a VM was not put on, with all the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Which.
    pub host: HostId,
    /// Why, all at once.
    pub reasons: Vec<Reason>,
}

impl Rejected {
    /// Returns the reasons in the form that callers are told.
    pub fn blockers(&self) -> impl Iterator<Item = Blocker> + '_ {
        self.reasons.iter().map(|reason| reason.blocker(&self.host))
    }
}

/// Where a VM goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The host.
    pub host: HostId,
    /// What is left of its memory after.
    pub remaining_memory: Bytes,
    /// What is left of its CPU after.
    pub remaining_cpu: MilliCpu,
    /// The hosts that were ruled out.
    pub rejected: Vec<Rejected>,
}

/// What kind of refusal it is: whether waiting can help, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A host that could take it, and can be read, has no room: wait.
    FleetAtCapacity,
    /// No host that could take it can be read: wait, and never say "at capacity".
    FleetUnreadable,
    /// There is room, and as many migrations as allowed leave the source already: wait.
    SourceBusy,
    /// Every host that could take it takes no placements now, by an operator's word: wait.
    NoneAvailable,
    /// No host could ever take it: do not wait.
    NotCapable,
    /// The host that was asked for cannot take it: do not wait, the caller chose.
    DestinationRefused,
}

impl Refused {
    /// Returns the one spelling of this refusal.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::FleetAtCapacity => "fleet_at_capacity",
            Self::FleetUnreadable => "fleet_unreadable",
            Self::SourceBusy => "source_busy",
            Self::NoneAvailable => "none_available",
            Self::NotCapable => "not_capable",
            Self::DestinationRefused => "destination_refused",
        }
    }

    /// Says whether a migration may wait in the queue for it to pass.
    #[must_use]
    pub const fn queues(self) -> bool {
        match self {
            Self::FleetAtCapacity
            | Self::FleetUnreadable
            | Self::SourceBusy
            | Self::NoneAvailable => true,
            Self::NotCapable | Self::DestinationRefused => false,
        }
    }
}

/// Why a VM goes nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlacement {
    /// What kind of refusal it is.
    pub refused: Refused,
    /// Every host with all its reasons.
    pub rejected: Vec<Rejected>,
}

impl NoPlacement {
    /// Returns all reasons in the form that callers are told.
    #[must_use]
    pub fn blockers(&self) -> Vec<Blocker> {
        self.rejected.iter().flat_map(Rejected::blockers).collect()
    }

    /// Returns one line for people: the kind, and each host with its reasons.
    #[must_use]
    pub fn note(&self) -> String {
        let hosts: Vec<String> = self
            .rejected
            .iter()
            .map(|rejected| {
                let reasons: Vec<String> =
                    rejected.reasons.iter().map(ToString::to_string).collect();
                format!("{}: {}", rejected.host, reasons.join(", "))
            })
            .collect();
        if hosts.is_empty() {
            format!("{}: there is no host", self.refused.code())
        } else {
            format!("{}: {}", self.refused.code(), hosts.join("; "))
        }
    }
}

/// How good a host is, best first: the order of the fields is their weight.
///
/// Spread, don't stack: most free memory, then most free CPU, then most memory available right now,
/// then the host's id, so that a tie has one answer. What a VM takes is the same everywhere, so the
/// order is that of what it leaves, whatever its size. Memory counts in whole MiB: a few pages more
/// are no reason to prefer a host whose CPU is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Score<'a> {
    rank: Rank,
    host: &'a HostId,
}

/// How good a host is, but for its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    free_memory_mib: Reverse<u64>,
    free_cpu: Reverse<MilliCpu>,
    available_memory: Reverse<Bytes>,
}

impl Rank {
    fn of(free: (Bytes, MilliCpu), available: Bytes) -> Self {
        Self {
            free_memory_mib: Reverse(free.0.value() >> 20),
            free_cpu: Reverse(free.1),
            available_memory: Reverse(available),
        }
    }
}

impl<'a> Score<'a> {
    /// Scores a host by what is free there.
    pub(crate) fn of(host: &'a HostId, free: (Bytes, MilliCpu), available: Bytes) -> Self {
        Self { rank: Rank::of(free, available), host }
    }

    /// Returns the host.
    pub(crate) const fn host(&self) -> &'a HostId {
        self.host
    }
}

/// A host that can take a VM.
struct Fit<'a> {
    score: Score<'a>,
    left: (Bytes, MilliCpu),
}

/// Returns the host that `request` should land on.
///
/// # Errors
///
/// Says what kind of refusal it is, and for every host all the reasons that ruled it out.
pub fn place(fleet: &Fleet, request: &Request) -> Result<Placement, NoPlacement> {
    let mut rejected = Vec::new();
    let mut best: Option<Fit<'_>> = None;
    for host in fleet.hosts.values() {
        if request.destination.as_ref().is_some_and(|asked| *asked != host.id) {
            continue;
        }
        match consider(fleet, host, request) {
            Ok(fit) => {
                if best.as_ref().is_none_or(|best| fit.score < best.score) {
                    best = Some(fit);
                }
            }
            Err(reasons) => rejected.push(Rejected { host: host.id.clone(), reasons }),
        }
    }
    if let Some(best) = best {
        if let Some(busy) = busy_source(fleet, request) {
            rejected.retain(|rejected| rejected.host != busy.host);
            rejected.push(busy);
            return Err(NoPlacement { refused: Refused::SourceBusy, rejected });
        }
        return Ok(Placement {
            host: best.score.host.clone(),
            remaining_memory: best.left.0,
            remaining_cpu: best.left.1,
            rejected,
        });
    }
    if let Some(asked) = &request.destination {
        if rejected.is_empty() {
            rejected.push(Rejected { host: asked.clone(), reasons: vec![Reason::UnknownHost] });
        }
        return Err(NoPlacement { refused: Refused::DestinationRefused, rejected });
    }
    Err(NoPlacement { refused: kind_of(&rejected), rejected })
}

/// Returns the source with its cap if no more may leave it now.
fn busy_source(fleet: &Fleet, request: &Request) -> Option<Rejected> {
    let source = fleet.hosts.get(request.source.as_ref()?)?;
    let (running, max) = (source.outbound, fleet.policy.outbound_max);
    (running >= max).then(|| Rejected {
        host: source.id.clone(),
        reasons: vec![Reason::OutboundCap { running, max }],
    })
}

/// Returns every reason why `host` cannot take `request`; empty if it can.
#[must_use]
pub fn reasons_against(fleet: &Fleet, host: &Host, request: &Request) -> Vec<Reason> {
    consider(fleet, host, request).err().unwrap_or_default()
}

/// Returns every reason why `host` takes no placements at all now; empty if it does.
#[must_use]
pub fn closed_because(fleet: &Fleet, host: &Host) -> Vec<Reason> {
    let mut reasons = eligibility::operators_word(host);
    reasons.extend(eligibility::unheard(fleet, host));
    reasons
}

fn consider<'a>(fleet: &Fleet, host: &'a Host, request: &Request) -> Result<Fit<'a>, Vec<Reason>> {
    let mut reasons = closed_because(fleet, host);
    reasons.extend(incapable(host, request));
    if host.inbound >= fleet.policy.inbound_max {
        reasons.push(Reason::InboundCap { running: host.inbound, max: fleet.policy.inbound_max });
    }
    let figures = figures_without(host, &fleet.policy, Some(request.vm)).ok();
    reasons.extend(
        figures
            .iter()
            .flat_map(|figures| no_room((figures.free_memory, figures.free_cpu), request.demand)),
    );
    let Some(figures) = figures.filter(|_| reasons.is_empty()) else { return Err(reasons) };
    let free = (figures.free_memory, figures.free_cpu);
    let left = (free.0.less(request.demand.memory), free.1.less(request.demand.cpu));
    Ok(Fit { score: Score::of(&host.id, free, figures.available_memory), left })
}

/// Returns what a demand is short of where so much is free. An exact fit fits.
pub(crate) fn no_room(free: (Bytes, MilliCpu), demand: Demand) -> Vec<Reason> {
    let (memory, cpu) = free;
    let mut reasons = Vec::new();
    if demand.memory > memory {
        reasons.push(Reason::Memory { needed: demand.memory, free: memory });
    }
    if demand.cpu > cpu {
        reasons.push(Reason::Cpu { needed: demand.cpu, free: cpu });
    }
    reasons
}

/// Returns the kind of refusal that a whole fleet's reasons add up to.
fn kind_of(rejected: &[Rejected]) -> Refused {
    let heaviest = |rejected: &Rejected| rejected.reasons.iter().map(Reason::weight).max();
    let lightest = rejected.iter().filter_map(heaviest).min();
    match lightest {
        Some(Weight::Room) => Refused::FleetAtCapacity,
        Some(Weight::Unreadable) => Refused::FleetUnreadable,
        Some(Weight::Closed) => Refused::NoneAvailable,
        Some(Weight::Never) => Refused::NotCapable,
        // A fleet without hosts cannot be read.
        None => Refused::FleetUnreadable,
    }
}

#[cfg(test)]
mod tests;
