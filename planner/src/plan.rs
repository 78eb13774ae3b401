//! Where the VMs of a host would go now: the facts that the core's plan is made from.
//!
//! It reads and asks, and touches nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt as _};
use serde::Deserialize;
use tokio::time::Instant;
use vmferry_planner_core::fleet::{Demand, Fleet};
use vmferry_planner_core::lifecycle::Policy;
use vmferry_planner_core::maintenance::{
    Assignment, Blocked, Code, Left, Live, Plan, Strategy, Workload, plan as core_plan,
};
use vmferry_planner_core::migration::Blocker;
use vmferry_planner_core::placement::{Needs, Request, place};
use vmferry_proto::v1::SourceDescription;
use vmferry_types::{HostId, PowerState, VmId};

use crate::admission;
use crate::definition::Outline;
use crate::planner::Planner;
use crate::store::{StoreError, VmRow};

/// As many agents' answers are waited for at once.
const ASKED_AT_ONCE: usize = 16;
/// How a VM is described stays true for so long, as far as a plan is concerned.
const DESCRIBED_MAX_AGE: Duration = Duration::from_secs(30);

/// Disks that only the host of a VM has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalDisks(Vec<String>);

#[derive(Default, Deserialize)]
struct RawDisks {
    #[serde(default)]
    disk: Vec<RawDisk>,
}

#[derive(Deserialize)]
struct RawDisk {
    path: Option<String>,
    #[serde(default)]
    shared: bool,
}

impl LocalDisks {
    /// Reads the disks of a definition that are not shared.
    #[must_use]
    pub fn of(definition: &str) -> Self {
        let raw: RawDisks = toml::from_str(definition).unwrap_or_default();
        let local = raw.disk.into_iter().filter(|disk| !disk.shared);
        Self(local.filter_map(|disk| disk.path).collect())
    }

    /// Says whether there are any.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }
}

/// What agents said of VMs, kept for a while.
#[derive(Debug, Default)]
pub struct Described(BTreeMap<VmId, (Instant, Said)>);

/// How one VM is, by its agent.
#[derive(Clone, Debug)]
struct Said {
    description: Option<SourceDescription>,
    live: Live,
}

/// Plans for some VMs of a host.
///
/// # Errors
///
/// Fails if the store does.
pub async fn plan(
    planner: &Planner,
    source: &HostId,
    policy: &Policy,
    vms: &[&VmRow],
    described: &mut Described,
) -> Result<Plan, StoreError> {
    let workloads = workloads(planner, source, vms, described).await;
    let fleet = fleet(planner, policy).await?;
    Ok(core_plan(&fleet, &order(policy, source), &workloads))
}

/// What a plan of a whole host found, its destinations having been asked as well.
#[derive(Debug)]
pub struct Preflight {
    /// The plan.
    pub plan: Plan,
    /// Whom it is for.
    pub workloads: Vec<Workload>,
    /// What agents named beside the figures, by VM.
    pub refused: BTreeMap<VmId, Vec<Blocker>>,
}

/// Plans for all VMs that have to leave a host, and asks each destination whether it takes its VM.
///
/// # Errors
///
/// Fails if the store does.
pub async fn preflight(
    planner: &Planner,
    source: &HostId,
    policy: &Policy,
    vms: &[&VmRow],
) -> Result<Preflight, StoreError> {
    let mut described = Described::default();
    let workloads = workloads(planner, source, vms, &mut described).await;
    let fleet = fleet(planner, policy).await?;
    let order = order(policy, source);
    let plan = core_plan(&fleet, &order, &workloads);
    let mut preflight = Preflight { plan, workloads, refused: BTreeMap::new() };
    let asked: Vec<(VmId, HostId)> = preflight
        .plan
        .assignments
        .iter()
        .map(|assignment| (assignment.vm, assignment.destination.clone()))
        .collect();
    let mut questions: Vec<BoxFuture<'_, (VmId, HostId, Vec<Blocker>)>> = Vec::new();
    for (vm, host) in asked {
        let Some(description) = described.description(vm) else { continue };
        questions.push(Box::pin(async move {
            let blockers = admission::check(planner, &host, &description).await;
            (vm, host, blockers)
        }));
    }
    let answers: Vec<_> = stream::iter(questions).buffered(ASKED_AT_ONCE).collect().await;
    for (vm, host, blockers) in answers.into_iter().filter(|(.., blockers)| !blockers.is_empty()) {
        preflight.refused.entry(vm).or_default().extend(blockers);
        elsewhere(planner, &fleet, &mut preflight, (vm, host), &described).await;
    }
    Ok(preflight)
}

/// Looks for another host for a VM whose destination refused it; without one it is blocked.
async fn elsewhere(
    planner: &Planner,
    fleet: &Fleet,
    preflight: &mut Preflight,
    (vm, refused_by): (VmId, HostId),
    described: &Described,
) {
    let Some(at) = preflight.plan.assignments.iter().position(|one| one.vm == vm) else { return };
    let Some(workload) = preflight.workloads.iter().find(|one| one.vm == vm) else { return };
    let mut left = fleet.clone();
    for one in preflight.plan.assignments.iter().filter(|one| one.vm != vm) {
        let demand = preflight.workloads.iter().find(|of| of.vm == one.vm).map(|of| of.demand);
        if let Some(host) = left.hosts.get_mut(&one.destination) {
            host.reservations.insert(one.vm, demand.unwrap_or_default());
        }
    }
    left.hosts.remove(&refused_by);
    let request = Request {
        vm,
        demand: workload.demand,
        source: workload.host.clone(),
        destination: None,
        needs: workload.needs.clone(),
    };
    loop {
        let placement = match place(&left, &request) {
            Ok(placement) => placement,
            Err(none) => {
                preflight.plan.assignments.remove(at);
                let rejected = none.rejected.into_iter().map(std::sync::Arc::new).collect();
                let code = Code::NoEligibleTarget;
                preflight.plan.blocked.push(Blocked { vm, code, rejected });
                return;
            }
        };
        let blockers = match described.description(vm) {
            Some(description) => admission::check(planner, &placement.host, &description).await,
            None => Vec::new(),
        };
        if blockers.is_empty() {
            if let Some(assignment) = preflight.plan.assignments.get_mut(at) {
                let mode = assignment.mode;
                let left =
                    Left { memory: placement.remaining_memory, cpu: placement.remaining_cpu };
                let (destination, rejected) = (placement.host, assignment.rejected.clone());
                *assignment = Assignment { vm, destination, mode, left, rejected };
            }
            return;
        }
        preflight.refused.entry(vm).or_default().extend(blockers);
        left.hosts.remove(&placement.host);
    }
}

/// Moving stopped VMs is not available, so a plan never rests on it.
fn order(policy: &Policy, source: &HostId) -> vmferry_planner_core::maintenance::Order {
    let order = policy.order(source);
    vmferry_planner_core::maintenance::Order { strategy: Strategy::LiveOnly, ..order }
}

async fn fleet(planner: &Planner, policy: &Policy) -> Result<Fleet, StoreError> {
    let mut fleet = admission::fleet(planner).await?;
    fleet.policy.reserve_memory = policy.reserve_memory_percent;
    fleet.policy.reserve_cpu = policy.reserve_cpu_percent;
    Ok(fleet)
}

async fn workloads(
    planner: &Planner,
    source: &HostId,
    vms: &[&VmRow],
    described: &mut Described,
) -> Vec<Workload> {
    described.ask(planner, source, vms).await;
    vms.iter()
        .map(|vm| {
            let said = described.0.get(&vm.id).map(|(_, said)| said.clone());
            let (live, description) =
                said.map_or((Live::Able, None), |said| (said.live, said.description));
            Workload {
                vm: vm.id,
                host: Some(source.clone()),
                demand: demand(planner, vm),
                live,
                needs: needs(planner, vm, source, description.as_ref()),
            }
        })
        .collect()
}

fn demand(planner: &Planner, vm: &VmRow) -> Demand {
    admission::demand_on(planner, vm)
}

fn needs(
    planner: &Planner,
    vm: &VmRow,
    source: &HostId,
    description: Option<&SourceDescription>,
) -> Needs {
    match description {
        Some(description) => {
            // The cluster is set by the order.
            let needs = admission::needs_of_running(planner, vm, source, description);
            Needs { cluster: None, ..needs }
        }
        None => Outline::read(&vm.definition)
            .map(|outline| admission::needs_of_definition(&outline))
            .unwrap_or_default(),
    }
}

impl Described {
    fn description(&self, vm: VmId) -> Option<SourceDescription> {
        self.0.get(&vm)?.1.description.clone()
    }

    /// Asks for those that were not described lately.
    async fn ask(&mut self, planner: &Planner, source: &HostId, vms: &[&VmRow]) {
        let wanted: BTreeSet<VmId> = vms.iter().map(|vm| vm.id).collect();
        self.0.retain(|vm, (at, _)| wanted.contains(vm) && at.elapsed() < DESCRIBED_MAX_AGE);
        let missing: Vec<&VmRow> =
            vms.iter().filter(|vm| !self.0.contains_key(&vm.id)).copied().collect();
        let mut questions: Vec<BoxFuture<'_, (VmId, Said)>> = Vec::new();
        for vm in missing {
            questions.push(Box::pin(async move { (vm.id, said(planner, source, vm).await) }));
        }
        let said: Vec<_> = stream::iter(questions).buffered(ASKED_AT_ONCE).collect().await;
        let now = Instant::now();
        self.0.extend(said.into_iter().map(|(vm, said)| (vm, (now, said))));
    }
}

async fn said(planner: &Planner, source: &HostId, vm: &VmRow) -> Said {
    if vm.power == PowerState::Stopped {
        let LocalDisks(local) = LocalDisks::of(&vm.definition);
        let reason = format!(
            "it is stopped and only this host has {}; moving stopped VMs is not available in this release: start it where its disks are shared, or delete it",
            local.join(", ")
        );
        return Said { description: None, live: Live::Unable { reason } };
    }
    match admission::describe(planner, vm.id, source).await {
        Ok((description, blockers)) if blockers.is_empty() => {
            Said { description: Some(description), live: Live::Able }
        }
        Ok((description, blockers)) => {
            let reasons: Vec<&str> = blockers.iter().map(|of| of.message.as_str()).collect();
            let live = Live::Unable { reason: reasons.join("; ") };
            Said { description: Some(description), live }
        }
        // Whoever did not answer says nothing against it; when its turn comes it is asked again.
        Err(blockers) => match blockers.iter().find(|of| !crate::queue::passes(&of.code)) {
            Some(blocker) => {
                let live = Live::Unable { reason: blocker.message.clone() };
                Said { description: None, live }
            }
            None => Said { description: None, live: Live::Able },
        },
    }
}
