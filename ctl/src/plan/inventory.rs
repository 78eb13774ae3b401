//! An inventory in the words of the core.
//!
//! Ids of a file may be any text. The core's are not, so each name stands for an id of the same
//! rank: ties are decided by the bytes of the names, as they are by ids.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vmferry_planner_core::fleet::{
    self, Availability, Capabilities, Cordon, Demand, Fleet, HostPolicy, Lifecycle, Report, VmUse,
};
use vmferry_planner_core::maintenance::{self, Live, Order};
use vmferry_planner_core::placement::Needs;
use vmferry_types::{HostId, MilliCpu, Millis, Role, Timestamp, VmId};

use super::input::{Host, Input, Status, Workload};

/// The moment of the plan. Reports have an age only, so any late one will do.
const NOW: Timestamp = Timestamp(u64::MAX);

/// What the core is asked.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) fleet: Fleet,
    pub(super) order: Order,
    pub(super) workloads: Vec<maintenance::Workload>,
    pub(super) names: Names,
}

/// The names of a file, and the ids that stand for them.
#[derive(Debug)]
pub(super) struct Names {
    hosts: BTreeMap<String, HostId>,
    host_names: BTreeMap<HostId, String>,
    vms: BTreeMap<String, VmId>,
    vm_names: BTreeMap<VmId, String>,
}

impl Names {
    fn of(input: &Input) -> Self {
        let mut hosts: BTreeSet<&str> = BTreeSet::from([input.source_host.as_str()]);
        let mut vms: BTreeSet<&str> = BTreeSet::new();
        for host in &input.hosts {
            hosts.insert(&host.id);
            vms.extend(host.vms.iter().map(|vm| vm.id.as_str()));
            vms.extend(host.inbound_reservations.iter().map(|held| held.vm_id.as_str()));
        }
        for workload in &input.workloads {
            vms.insert(&workload.id);
            hosts.extend(workload.host.as_deref());
            hosts.extend(workload.pinned_host.as_deref());
        }
        let hosts: BTreeMap<String, HostId> = hosts
            .into_iter()
            .enumerate()
            .map(|(rank, name)| (name.to_owned(), of_rank(rank)))
            .collect();
        let vms: BTreeMap<String, VmId> = (0u128..)
            .zip(vms)
            .map(|(rank, name)| (name.to_owned(), VmId::from_u128(rank)))
            .collect();
        let host_names = hosts.iter().map(|(name, id)| (id.clone(), name.clone())).collect();
        let vm_names = vms.iter().map(|(name, id)| (*id, name.clone())).collect();
        Self { hosts, host_names, vms, vm_names }
    }

    fn host_id(&self, name: &str) -> HostId {
        self.hosts.get(name).cloned().expect("every name of the file is known")
    }

    fn vm_id(&self, name: &str) -> VmId {
        self.vms.get(name).copied().expect("every name of the file is known")
    }

    /// Returns a host's name in the file.
    pub(super) fn host<'a>(&'a self, id: &'a HostId) -> &'a str {
        self.host_names.get(id).map_or(id.as_str(), String::as_str)
    }

    /// Returns a VM's id in the file.
    pub(super) fn vm(&self, id: VmId) -> &str {
        self.vm_names.get(&id).map_or("", String::as_str)
    }
}

/// Returns the id that stands for the name of a rank.
fn of_rank(rank: usize) -> HostId {
    format!("h{rank:020}").parse().expect("a letter and digits are a host id")
}

/// Puts an inventory into the words of the core.
pub(super) fn asked(input: &Input) -> Asked {
    let names = Names::of(input);
    let hosts =
        input.hosts.iter().map(|host| (names.host_id(&host.id), host_seen(host, &names))).collect();
    let policy = fleet::Policy {
        reserve_memory: input.policy.reserve_memory_percent,
        reserve_cpu: input.policy.reserve_cpu_percent,
        cpu_overcommit_percent: 100,
        report_max_age: millis(input.max_report_age_s),
        // A plan takes as long as it takes: caps order its migrations, they forbid none.
        inbound_max: u32::MAX,
        outbound_max: u32::MAX,
    };
    let order = input.policy.order(&names.host_id(&input.source_host));
    let workloads = input.workloads.iter().map(|one| workload(one, &names)).collect();
    Asked { fleet: Fleet { now: NOW, policy, hosts }, order, workloads, names }
}

fn millis(seconds: u64) -> Millis {
    Millis(seconds.saturating_mul(1_000))
}

fn host_seen(host: &Host, names: &Names) -> fleet::Host {
    let (availability, lifecycle) = match host.status {
        Status::Connected => (Availability::Connected, Lifecycle::Active),
        Status::Disconnected => (Availability::Disconnected, Lifecycle::Active),
        Status::Maintenance => (Availability::Connected, Lifecycle::Maintenance),
        Status::Draining => (Availability::Connected, Lifecycle::Draining),
        Status::Retired => (Availability::Connected, Lifecycle::Retired),
    };
    let cordon = host
        .cordoned
        .then(|| Cordon { owner: "an operator".to_owned(), reason: "as the file says".to_owned() });
    let mut reservations: BTreeMap<VmId, Demand> = BTreeMap::new();
    for held in &host.inbound_reservations {
        let demand = Demand { memory: held.memory_mib, cpu: MilliCpu(held.cpu_milli) };
        let entry = reservations.entry(names.vm_id(&held.vm_id)).or_default();
        *entry = entry.worst(demand);
    }
    fleet::Host {
        id: names.host_id(&host.id),
        policy: HostPolicy {
            cluster: host.cluster.clone(),
            labels: host.labels.clone(),
            cordons: cordon.into_iter().collect(),
            lifecycle,
        },
        availability,
        report: Some(Arc::new(report(host, names))),
        reservations,
        inbound: 0,
        outbound: 0,
    }
}

fn report(host: &Host, names: &Names) -> Report {
    let uses = host.vms.iter().map(|vm| {
        let figures = VmUse {
            role: Role::Running,
            configured: vm.configured_memory_mib,
            observed: vm.observed_memory_mib,
            cpu: MilliCpu(vm.cpu_milli),
        };
        (names.vm_id(&vm.id), figures)
    });
    Report {
        at: Timestamp(NOW.value().saturating_sub(millis(host.report_age_s).value())),
        unreadable: (!host.readable).then(|| "readable is false in the file".to_owned()),
        total_memory: host.total_memory_mib,
        available_memory: host.available_memory_mib,
        total_cpu: MilliCpu(host.total_cpu_milli),
        vms: Some(uses.collect()),
        capabilities: Arc::new(Capabilities::default()),
    }
}

fn workload(one: &Workload, names: &Names) -> maintenance::Workload {
    let live = if one.live_migratable {
        Live::Able
    } else {
        let reason = one.not_live_migratable_reason.as_deref();
        Live::Unable { reason: reason.unwrap_or("the file does not say why").to_owned() }
    };
    maintenance::Workload {
        vm: names.vm_id(&one.id),
        host: one.host.as_deref().map(|host| names.host_id(host)),
        demand: Demand::of(
            one.configured_memory_mib,
            one.observed_memory_mib,
            MilliCpu(one.cpu_milli),
        ),
        live,
        needs: Needs {
            pin: one.pinned_host.as_deref().map(|host| names.host_id(host)),
            required_labels: one.required_labels.clone(),
            ..Needs::default()
        },
    }
}
