//! The fleet at one moment, in the words of the core.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vmferry_planner_core::fleet::{
    Availability, Capabilities, Cordon, Demand, Fleet, Host, HostPolicy, Lifecycle, Policy, Report,
    VmUse,
};
use vmferry_proto::v1::{HostReport, VmReport};
use vmferry_types::{Bytes, HostId, MilliCpu, Millis, Role, Timestamp, VmId};

use super::{Inventory, KnownHost};
use crate::config;
use crate::store::{Filter, OnlyOpen, Reservation, Store, StoreError};

/// Takes a snapshot of all hosts, with what the store says of them.
///
/// # Errors
///
/// Fails if the store does.
pub async fn snapshot(
    inventory: &Inventory,
    store: &dyn Store,
    policy: &config::Policy,
    now: Timestamp,
) -> Result<Fleet, StoreError> {
    let cordons = store.cordons(now).await?;
    let lifecycles = store.lifecycles().await?;
    let reservations = store.reservations().await?;
    let open = store.migrations(&Filter { open: OnlyOpen::Open, ..Filter::default() }).await?;
    let policy = core_policy(policy);
    let hosts = inventory
        .hosts()
        .into_iter()
        .map(|(row, heard)| {
            let settings = inventory.settings(&row.id);
            let host = Host {
                policy: HostPolicy {
                    cluster: settings.cluster,
                    labels: settings.labels,
                    cordons: cordons
                        .iter()
                        .filter(|cordon| cordon.host == row.id)
                        .map(|cordon| Cordon {
                            owner: cordon.owner.clone(),
                            reason: cordon.reason.clone(),
                        })
                        .collect(),
                    lifecycle: lifecycles.get(&row.id).copied().unwrap_or(Lifecycle::Active),
                },
                availability: availability(heard.as_ref(), &policy, now),
                report: heard.as_ref().map(|heard| Arc::clone(&heard.read)),
                reservations: held(&row.id, &reservations),
                inbound: inbound(&row.id, &open),
                outbound: outbound(&row.id, &open),
                id: row.id.clone(),
            };
            (row.id, host)
        })
        .collect();
    Ok(Fleet { now, policy, hosts })
}

fn inbound(host: &HostId, open: &[crate::store::MigrationRow]) -> u32 {
    let inbound = open.iter().filter(|row| row.migration.destination() == Some(host)).count();
    u32::try_from(inbound).unwrap_or(u32::MAX)
}

/// Counts the migrations that leave a host: those that wait for room hold nothing and do not count.
fn outbound(host: &HostId, open: &[crate::store::MigrationRow]) -> u32 {
    let leaves = |row: &&crate::store::MigrationRow| {
        row.migration.source == *host && row.migration.destination().is_some()
    };
    u32::try_from(open.iter().filter(leaves).count()).unwrap_or(u32::MAX)
}

/// Returns what is held on a host, by VM.
#[must_use]
pub fn held(host: &HostId, reservations: &[Reservation]) -> BTreeMap<VmId, Demand> {
    let mut held: BTreeMap<VmId, Demand> = BTreeMap::new();
    for reservation in reservations.iter().filter(|reservation| reservation.host == *host) {
        let demand = Demand { memory: reservation.memory, cpu: reservation.cpu };
        let entry = held.entry(reservation.vm).or_default();
        *entry = entry.worst(demand);
    }
    held
}

fn core_policy(policy: &config::Policy) -> Policy {
    Policy {
        reserve_memory: policy.reserve_memory,
        reserve_cpu: policy.reserve_cpu,
        cpu_overcommit_percent: policy.cpu_overcommit_percent,
        report_max_age: Millis(
            u64::try_from(policy.report_max_age.as_millis()).unwrap_or(u64::MAX),
        ),
        inbound_max: policy.inbound_max,
        // How many leave a host at once is decided where memory begins to cross: what is prepared
        // and waits holds no link.
        outbound_max: u32::MAX,
    }
}

fn availability(heard: Option<&KnownHost>, policy: &Policy, now: Timestamp) -> Availability {
    match heard {
        None => Availability::Disconnected,
        Some(heard) if now.since(heard.at) > policy.report_max_age => Availability::Disconnected,
        Some(heard) if heard.report.learning => Availability::Learning,
        Some(_) => Availability::Connected,
    }
}

/// Reads a report that arrived at `at`.
pub(super) fn read(message: &HostReport, at: Timestamp) -> Report {
    let capacity = message.capacity.clone().unwrap_or_default();
    Report {
        at,
        unreadable: unreadable(message, &capacity.unreadable),
        total_memory: Bytes(capacity.total_memory_bytes),
        available_memory: Bytes(capacity.available_memory_bytes),
        total_cpu: MilliCpu(capacity.cpu_total_milli),
        vms: uses(&message.vms),
        capabilities: Arc::new(capabilities(message)),
    }
}

/// Says why what a host reports cannot be counted on, in its agent's words.
fn unreadable(message: &HostReport, figures: &[String]) -> Option<String> {
    let journal = message.journal_unreadable.then_some("its journal is new, lost or broken");
    let why: Vec<&str> = journal.into_iter().chain(figures.iter().map(String::as_str)).collect();
    (!why.is_empty()).then(|| why.join("; "))
}

/// Reads a host's VMs; `None` if one of them cannot be read, for then the sum means nothing.
fn uses(vms: &[VmReport]) -> Option<BTreeMap<VmId, VmUse>> {
    vms.iter()
        .map(|vm| {
            let role = Role::from_label(&vm.role)?;
            let entry = VmUse {
                role,
                configured: Bytes(vm.configured_memory_bytes),
                observed: Bytes(vm.observed_memory_bytes),
                cpu: MilliCpu(vm.cpu_milli),
            };
            Some((vm.vm_id.parse().ok()?, entry))
        })
        .collect()
}

fn capabilities(message: &HostReport) -> Capabilities {
    let has = message.capabilities.clone().unwrap_or_default();
    let set = |list: Vec<String>| list.into_iter().collect::<BTreeSet<_>>();
    Capabilities {
        architecture: has.architecture,
        accelerators: set(has.accelerators),
        machine_types: set(has.machine_types),
        cpu_models: set(has.cpu_models),
        bridges: set(has.bridges),
        qemu_version: has.qemu_version,
        shared_paths: has.shared_paths.map(|shared| set(shared.paths)),
    }
}
