//! The fleet at one moment, in the words of the core.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vmferry_planner_core::fleet::{
    Availability, Capabilities, Cordon, Demand, Fleet, Host, HostPolicy, Lifecycle, Policy, Report,
    VmUse,
};
use vmferry_proto::v1::{Capacity, HostReport, VmReport};
use vmferry_types::{Bytes, HostId, MilliCpu, Millis, Role, Timestamp, VmId};

use super::{Inventory, KnownHost};
use crate::config::{self, HostSettings};
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
    let policy = core_policy(policy);
    let mut stored = Stored::read(store, now).await?;
    let mut hosts = BTreeMap::new();
    inventory.each(|id, settings, heard| {
        let settings = settings.cloned().unwrap_or_default();
        hosts.insert(id.clone(), stored.host(id, settings, heard, (&policy, now)));
    });
    Ok(Fleet { now, policy, hosts })
}

impl Inventory {
    /// Returns how many VMs may leave hosts at once, of those hosts that say it themselves. Nothing
    /// is no word: it would keep every VM there.
    #[must_use]
    pub fn own_outbound(&self) -> BTreeMap<HostId, u32> {
        let mut own = BTreeMap::new();
        self.each(|id, _, heard| {
            let has = heard.and_then(|heard| heard.report.capabilities.as_ref());
            if let Some(max) = has.and_then(|has| has.outbound_max).filter(|max| *max > 0) {
                own.insert(id.clone(), max);
            }
        });
        own
    }
}

/// What the store says of hosts, found by host: there may be many of both.
#[derive(Default)]
pub(super) struct Stored(BTreeMap<HostId, OfHost>);

#[derive(Default)]
struct OfHost {
    held: BTreeMap<VmId, Demand>,
    cordons: BTreeSet<Cordon>,
    lifecycle: Option<Lifecycle>,
    inbound: u32,
    outbound: u32,
}

impl Stored {
    /// Reads what the store says of all hosts.
    pub(super) async fn read(store: &dyn Store, now: Timestamp) -> Result<Self, StoreError> {
        let filter = Filter { open: OnlyOpen::Open, ..Filter::default() };
        let (cordons, lifecycles, reservations, open) = tokio::try_join!(
            store.cordons(now),
            store.lifecycles(),
            store.reservations(),
            store.migrations(&filter),
        )?;
        let mut stored = Self::default();
        for Reservation { host, vm, memory, cpu, .. } in reservations {
            let held = stored.of(&host).held.entry(vm).or_default();
            *held = held.worst(Demand { memory, cpu });
        }
        for cordon in cordons {
            let held = &mut stored.of(&cordon.host).cordons;
            held.insert(Cordon { owner: cordon.owner, reason: cordon.reason });
        }
        for (host, lifecycle) in lifecycles {
            stored.of(&host).lifecycle = Some(lifecycle);
        }
        // Those that wait for room hold nothing and do not count.
        for row in &open {
            if let Some(destination) = row.migration.destination() {
                stored.of(destination).inbound += 1;
                stored.of(&row.migration.source).outbound += 1;
            }
        }
        Ok(stored)
    }

    fn of(&mut self, host: &HostId) -> &mut OfHost {
        self.0.entry(host.clone()).or_default()
    }

    /// Says whether the store alone keeps a host from taking any VM.
    pub(super) fn closes(&self, host: &HostId, policy: &Policy) -> bool {
        self.0.get(host).is_some_and(|of| {
            let active = of.lifecycle.is_none_or(|lifecycle| lifecycle == Lifecycle::Active);
            !of.cordons.is_empty() || !active || of.inbound >= policy.inbound_max
        })
    }

    /// Puts together what is known of a host; what the store says of it is handed over.
    pub(super) fn host(
        &mut self,
        id: &HostId,
        settings: HostSettings,
        heard: Option<&KnownHost>,
        (policy, now): (&Policy, Timestamp),
    ) -> Host {
        let of = self.0.remove(id).unwrap_or_default();
        let OfHost { held, cordons, lifecycle, inbound, outbound } = of;
        Host {
            id: id.clone(),
            policy: HostPolicy {
                cluster: settings.cluster,
                labels: settings.labels,
                cordons,
                lifecycle: lifecycle.unwrap_or(Lifecycle::Active),
            },
            availability: availability(heard, policy, now),
            report: heard.map(|heard| Arc::clone(&heard.read)),
            reservations: held,
            inbound,
            outbound,
        }
    }
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

/// Returns a configured policy in the words of the core.
#[must_use]
pub fn core_policy(policy: &config::Policy) -> Policy {
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

pub(super) fn availability(
    heard: Option<&KnownHost>,
    policy: &Policy,
    now: Timestamp,
) -> Availability {
    match heard {
        None => Availability::Disconnected,
        Some(heard) if now.since(heard.at) > policy.report_max_age => Availability::Disconnected,
        Some(heard) if heard.report.learning => Availability::Learning,
        Some(_) => Availability::Connected,
    }
}

/// Reads a report that arrived at `at`, of a host that can carry so much.
pub(super) fn read(message: &HostReport, capabilities: Arc<Capabilities>, at: Timestamp) -> Report {
    let unsaid = Capacity::default();
    let capacity = message.capacity.as_ref().unwrap_or(&unsaid);
    Report {
        at,
        unreadable: unreadable(message, &capacity.unreadable),
        total_memory: Bytes(capacity.total_memory_bytes),
        available_memory: Bytes(capacity.available_memory_bytes),
        total_cpu: MilliCpu(capacity.cpu_total_milli),
        vms: uses(&message.vms),
        capabilities,
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

/// Reads what a host can carry.
pub(super) fn capabilities(message: &HostReport) -> Capabilities {
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
