//! Where a VM may go: asked of the fleet, the source and the destinations, before anything is held.
//!
//! Preflight reads and holds nothing; all reasons are collected. What it found is decided again in
//! the transaction that admits, under the store's lock.

use std::collections::BTreeMap;

use vmferry_planner_core::fleet::{Demand, Fleet, Host, Policy};
use vmferry_planner_core::maintenance::{Crossing, PinsToSource};
use vmferry_planner_core::migration::Blocker;
use vmferry_planner_core::placement::{
    Needs, NoPlacement, Placement, Refused as NotPlaced, Rejected, Request, place, reasons_against,
};
use vmferry_proto::v1::{self, SourceDescription};
use vmferry_types::{Bytes, HostId, Method, MilliCpu, Percent, VmId};

use crate::agents::AgentError;
use crate::clock;
use crate::definition::Outline;
use crate::inventory::{core_policy, held, shortlist, snapshot};
use crate::planner::Planner;
use crate::store::{Grant, Room, Sake, StoreError, VmRow};

/// What preflight found.
#[derive(Debug)]
pub enum Found {
    /// A destination that has room and can take the VM.
    Destination(Grant),
    /// None now; waiting can help.
    Wait {
        /// Why there is none.
        note: String,
        /// All reasons.
        blockers: Vec<Blocker>,
    },
    /// None, and waiting does not help.
    Never {
        /// All reasons.
        blockers: Vec<Blocker>,
    },
}

/// Looks for a destination for a VM.
///
/// # Errors
///
/// Fails if the store does.
pub async fn destination(
    planner: &Planner,
    vm: &VmRow,
    source: &HostId,
    asked: Option<&HostId>,
    (method, sake): (Method, &Sake),
) -> Result<Found, StoreError> {
    let described = match method {
        Method::Precopy | Method::Postcopy | Method::Snapshot | Method::DiskCopy => {
            describe(planner, vm.id, source).await
        }
        Method::Cold => described_by_definition(vm),
    };
    let (description, own) = match described {
        Ok(described) => described,
        Err(blockers) => return Ok(Found::Never { blockers }),
    };
    let request = Request {
        vm: vm.id,
        demand: demand_on(planner, vm),
        source: Some(source.clone()),
        destination: asked.cloned(),
        needs: relaxed(needs_of_running(planner, vm, source, &description), source, sake),
    };
    if own.is_empty()
        && let Some((fleet, placement)) = among_the_best(planner, &request, sake).await?
        && check(planner, &placement.host, &description).await.is_empty()
    {
        let grant = grant(planner, &fleet, &request, &placement.host);
        return Ok(Found::Destination(Grant { pins: sake.pins, ..grant }));
    }
    // All that is in the way is to be told.
    let fleet = fleet_for(planner, sake).await?;
    if own.is_empty() {
        return Ok(choose(planner, fleet, &request, &description, sake.pins).await);
    }
    // It moves nowhere; a caller who named a host is told what is in the way there as well.
    let mut blockers = own;
    if asked.is_some() {
        match choose(planner, fleet, &request, &description, sake.pins).await {
            Found::Destination(_) => {}
            Found::Wait { blockers: there, .. } | Found::Never { blockers: there } => {
                blockers.extend(there);
            }
        }
    }
    Ok(Found::Never { blockers: deduplicated(blockers) })
}

/// Asks placement, and then the chosen host itself, until one of them agrees to take it.
async fn choose(
    planner: &Planner,
    mut fleet: Fleet,
    request: &Request,
    description: &SourceDescription,
    pins: PinsToSource,
) -> Found {
    let mut refused_by_agents: Vec<Blocker> = Vec::new();
    let mut said: Vec<String> = Vec::new();
    loop {
        match place(&fleet, request) {
            Ok(placement) => {
                let blockers = check(planner, &placement.host, description).await;
                if blockers.is_empty() {
                    let grant = Grant { pins, ..grant(planner, &fleet, request, &placement.host) };
                    return Found::Destination(grant);
                }
                let words: Vec<&str> = blockers.iter().map(|told| told.message.as_str()).collect();
                said.push(format!("{}: {}", placement.host, words.join(", ")));
                refused_by_agents.extend(blockers);
                refused_by_agents.extend(placement.rejected.iter().flat_map(Rejected::blockers));
                if request.destination.is_some() {
                    return Found::Never { blockers: deduplicated(refused_by_agents) };
                }
                fleet.hosts.remove(&placement.host);
            }
            Err(none) => {
                // The caller chose: tell all that is in the way, not only what the figures say.
                let asked = asked_in_vain(&fleet, request, &none);
                let mut blockers = refused_by_agents;
                blockers.extend(none.blockers());
                if let Some(asked) = asked {
                    blockers.extend(check(planner, asked, description).await);
                }
                return nowhere(&fleet, (&none, &said), deduplicated(blockers));
            }
        }
    }
}

/// Returns the host that the caller named, if there is such a host beside the source.
fn asked_in_vain<'a>(
    fleet: &Fleet,
    request: &'a Request,
    none: &NoPlacement,
) -> Option<&'a HostId> {
    let asked = request.destination.as_ref()?;
    let there = fleet.hosts.contains_key(asked) && request.source.as_ref() != Some(asked);
    (none.refused == NotPlaced::DestinationRefused && there).then_some(asked)
}

/// Says whether waiting can help when there is no host. What waits is told what the figures say, and
/// what the agents of hosts said that have room.
fn nowhere(
    fleet: &Fleet,
    (none, said): (&NoPlacement, &[String]),
    blockers: Vec<Blocker>,
) -> Found {
    // If every host that could have taken it was asked, each said no for good.
    let asked_all = fleet.hosts.is_empty() && !blockers.is_empty();
    if none.refused.queues() && !asked_all {
        let note = std::iter::once(none.note()).chain(said.iter().cloned());
        Found::Wait { note: note.collect::<Vec<_>>().join("; "), blockers }
    } else {
        Found::Never { blockers }
    }
}

/// Looks for a host to start a VM on.
///
/// # Errors
///
/// Fails if the store does.
pub async fn start_host(
    planner: &Planner,
    vm: &VmRow,
    outline: &Outline,
    asked: Option<&HostId>,
) -> Result<Found, StoreError> {
    let mut request = Request {
        vm: vm.id,
        demand: Demand { memory: outline.memory, cpu: outline.cpu },
        source: None,
        destination: asked.or(vm.host.as_ref()).cloned(),
        needs: needs_of_definition(outline),
    };
    // Its last host has its local disks and what is cached of the others; any other is second best.
    let sake = Sake::default();
    let mut found = among_the_best(planner, &request, &sake).await?;
    if found.is_none() && asked.is_none() && vm.host.is_some() {
        request.destination = None;
        found = among_the_best(planner, &request, &sake).await?;
    }
    if let Some((fleet, placement)) = found {
        return Ok(Found::Destination(grant(planner, &fleet, &request, &placement.host)));
    }
    // All that is in the way is to be told.
    let fleet = fleet(planner).await?;
    Ok(match place(&fleet, &request) {
        Ok(placement) => Found::Destination(grant(planner, &fleet, &request, &placement.host)),
        Err(none) if none.refused.queues() => {
            Found::Wait { note: none.note(), blockers: none.blockers() }
        }
        Err(none) => Found::Never { blockers: none.blockers() },
    })
}

/// Looks for a place among the few hosts that are best by what they report; `None` if only a look at
/// the whole fleet can tell. What is found is what that would find.
async fn among_the_best(
    planner: &Planner,
    request: &Request,
    sake: &Sake,
) -> Result<Option<(Fleet, Placement)>, StoreError> {
    let parts = &planner.parts;
    let policy = with_reserves(core_policy(&parts.config.policy), sake);
    let (fleet, list) =
        shortlist(&parts.inventory, planner.store(), (policy, request), clock::now()).await?;
    let found = place(&fleet, request).ok();
    Ok(found.filter(|found| list.decides(&fleet, found)).map(|found| (fleet, found)))
}

/// Takes a snapshot with the reserves that the one who asks wants kept.
async fn fleet_for(planner: &Planner, sake: &Sake) -> Result<Fleet, StoreError> {
    let fleet = fleet(planner).await?;
    Ok(Fleet { policy: with_reserves(fleet.policy, sake), ..fleet })
}

fn with_reserves(policy: Policy, sake: &Sake) -> Policy {
    let said = |percent: Option<u8>| percent.and_then(Percent::new);
    Policy {
        reserve_memory: said(sake.reserve_memory_percent).unwrap_or(policy.reserve_memory),
        reserve_cpu: said(sake.reserve_cpu_percent).unwrap_or(policy.reserve_cpu),
        ..policy
    }
}

/// Leaves out what the one who asks allows a VM to do without.
fn relaxed(needs: Needs, source: &HostId, sake: &Sake) -> Needs {
    let cluster = match sake.crossing {
        Crossing::Refused => needs.cluster,
        Crossing::Allowed => None,
    };
    let pin = match sake.pins {
        PinsToSource::Hold => needs.pin,
        PinsToSource::MayLeave => needs.pin.filter(|pin| pin != source),
    };
    Needs { cluster, pin, ..needs }
}

/// Takes a snapshot of the fleet as it is now.
pub(crate) async fn fleet(planner: &Planner) -> Result<Fleet, StoreError> {
    let parts = &planner.parts;
    snapshot(&parts.inventory, planner.store(), &parts.config.policy, clock::now()).await
}

/// Returns what a VM takes: the worst of what it was defined with and what its host reports. What
/// other hosts have of it, or claim to have, is not it.
#[must_use]
pub fn demand_on(planner: &Planner, vm: &VmRow) -> Demand {
    let demand = Demand { memory: vm.memory, cpu: vm.cpu };
    let host = vm.host.as_ref();
    let reported = host.and_then(|host| planner.parts.inventory.reported_by(host, vm.id));
    reported.map_or(demand, |reported| {
        demand.worst(Demand::of(
            Bytes(reported.configured_memory_bytes),
            Bytes(reported.observed_memory_bytes),
            MilliCpu(reported.cpu_milli),
        ))
    })
}

fn grant(planner: &Planner, fleet: &Fleet, request: &Request, destination: &HostId) -> Grant {
    Grant {
        destination: destination.clone(),
        room: room(fleet, request, destination),
        inbound_max: planner.parts.config.policy.inbound_max,
        pins: PinsToSource::Hold,
    }
}

/// Returns the check that the transaction makes again: the host as it was seen, beside what is
/// reserved there by then.
fn room(fleet: &Fleet, request: &Request, destination: &HostId) -> Room {
    let known = fleet.hosts.get_key_value(destination);
    let hosts: BTreeMap<HostId, Host> =
        known.map(|(id, host)| (id.clone(), host.clone())).into_iter().collect();
    let alone = Fleet { now: fleet.now, policy: fleet.policy, hosts };
    let (destination, request) = (destination.clone(), request.clone());
    Room::new(move |reserved| {
        let Some(host) = alone.hosts.get(&destination) else {
            return Err(format!("host {destination} is not known"));
        };
        let mut host = host.clone();
        host.reservations = held(&destination, reserved);
        let reasons = reasons_against(&alone, &host, &request);
        if reasons.is_empty() {
            return Ok(());
        }
        let texts: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        Err(format!("host {destination}: {}", texts.join(", ")))
    })
}

/// Returns how the VM really is, and why it cannot move live from there.
pub(crate) async fn describe(
    planner: &Planner,
    vm: VmId,
    source: &HostId,
) -> Result<(SourceDescription, Vec<Blocker>), Vec<Blocker>> {
    let description = planner
        .parts
        .agents
        .describe_source(source, vm)
        .await
        .map_err(|error| told(source, &error))?;
    let mut blockers: Vec<Blocker> =
        description.blockers.iter().map(|message| blocker(message, None)).collect();
    let named = blockers.iter().any(|blocker| blocker.code == "guest_paused");
    if description.run_state == "paused" && !named {
        blockers.push(Blocker {
            code: "guest_paused".to_owned(),
            message: "the guest is paused: continue it first".to_owned(),
            host: None,
        });
    }
    Ok((description, deduplicated(blockers)))
}

/// Describes a VM of which nothing is sent: it is started at its destination from its definition.
fn described_by_definition(vm: &VmRow) -> Result<(SourceDescription, Vec<Blocker>), Vec<Blocker>> {
    let outline = Outline::read(&vm.definition).map_err(|error| {
        vec![Blocker {
            code: "no_definition".to_owned(),
            message: format!("the definition of VM {} cannot be read: {error}", vm.name),
            host: None,
        }]
    })?;
    let resolved = &vm.resolved_machine;
    let description = SourceDescription {
        vm_id: vm.id.to_string(),
        vm_name: vm.name.clone(),
        definition: vm.definition.clone(),
        resolved_machine: if resolved.is_empty() { outline.machine } else { resolved.clone() },
        accelerator: outline.accelerator,
        cpu_model: outline.cpu_model,
        disks: outline
            .shared_paths
            .into_iter()
            .map(|path| v1::Disk { path, shared: true, ..v1::Disk::default() })
            .collect(),
        nics: outline
            .bridges
            .into_iter()
            .map(|bridge| v1::Nic { bridge, ..v1::Nic::default() })
            .collect(),
        from_disks: true,
        ..SourceDescription::default()
    };
    Ok((description, Vec::new()))
}

/// Asks a host what keeps it from receiving a VM.
pub(crate) async fn check(
    planner: &Planner,
    host: &HostId,
    description: &SourceDescription,
) -> Vec<Blocker> {
    match planner.parts.agents.check_destination(host, description.clone()).await {
        Ok(reply) => reply.blockers.iter().map(|message| blocker(message, Some(host))).collect(),
        Err(error) => told(host, &error),
    }
}

/// Reads a reason that an agent named.
fn blocker(message: &v1::Blocker, of: Option<&HostId>) -> Blocker {
    Blocker {
        code: message.code.clone(),
        message: message.message.clone(),
        host: message.host_id.parse().ok().or_else(|| of.cloned()),
    }
}

/// Returns an agent's no, or its silence, as reasons.
fn told(host: &HostId, error: &AgentError) -> Vec<Blocker> {
    match error {
        AgentError::Unreachable { .. } => vec![Blocker {
            code: "not_connected".to_owned(),
            message: error.to_string(),
            host: Some(host.clone()),
        }],
        AgentError::Refused { message, detail, .. } if detail.blockers.is_empty() => {
            let code = if detail.code.is_empty() { "refused" } else { &detail.code };
            vec![Blocker {
                code: code.to_owned(),
                message: message.clone(),
                host: Some(host.clone()),
            }]
        }
        AgentError::Refused { detail, .. } => {
            detail.blockers.iter().map(|message| blocker(message, Some(host))).collect()
        }
    }
}

/// Keeps the first of equal reasons: figures and agents may name the same one.
fn deduplicated(blockers: Vec<Blocker>) -> Vec<Blocker> {
    let mut kept: Vec<Blocker> = Vec::with_capacity(blockers.len());
    for blocker in blockers {
        if !kept.iter().any(|known| {
            known.code == blocker.code
                && known.host == blocker.host
                && known.message == blocker.message
        }) {
            kept.push(blocker);
        }
    }
    kept
}

/// Returns what a VM needs by its definition alone.
pub(crate) fn needs_of_definition(outline: &Outline) -> Needs {
    Needs {
        pin: outline.pin.clone(),
        required_labels: outline.required_labels.clone(),
        accelerator: Some(outline.accelerator.clone()),
        // An alias stands for another version on each host: its agent says which.
        machine_type: is_versioned(&outline.machine).then(|| outline.machine.clone()),
        cpu_model: model_of(&outline.cpu_model),
        bridges: outline.bridges.iter().cloned().collect(),
        shared_paths: outline.shared_paths.iter().cloned().collect(),
        ..Needs::default()
    }
}

/// Says whether a machine type names its version, as `pc-q35-10.0` does.
fn is_versioned(machine: &str) -> bool {
    let last = machine.rsplit('-').next().unwrap_or_default();
    last.contains('.') && last.chars().all(|c| c.is_ascii_digit() || c == '.')
}

/// Returns the CPU model without its flags. Whether the flags are there is the host's own word.
fn model_of(cpu: &str) -> Option<String> {
    let model = cpu.split(',').next().unwrap_or_default();
    (!model.is_empty()).then(|| model.to_owned())
}

/// Returns what a running VM cannot do without.
pub(crate) fn needs_of_running(
    planner: &Planner,
    vm: &VmRow,
    source: &HostId,
    description: &SourceDescription,
) -> Needs {
    let said = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let outline = Outline::read(&vm.definition).ok();
    Needs {
        cluster: Some(planner.parts.inventory.settings(source).cluster),
        pin: outline.as_ref().and_then(|outline| outline.pin.clone()),
        required_labels: outline.map(|outline| outline.required_labels).unwrap_or_default(),
        architecture: planner
            .parts
            .inventory
            .heard(source)
            .and_then(|heard| said(&heard.read.capabilities.architecture)),
        accelerator: said(&description.accelerator),
        machine_type: said(&description.resolved_machine)
            .filter(|machine| !description.from_disks || is_versioned(machine)),
        cpu_model: model_of(&description.cpu_model),
        bridges: description
            .nics
            .iter()
            .map(|nic| nic.bridge.clone())
            .filter(|b| !b.is_empty())
            .collect(),
        qemu_version: said(&description.qemu_version),
        // Whether the disks are there is the destination's own word besides.
        shared_paths: description
            .disks
            .iter()
            .filter(|disk| disk.shared)
            .map(|disk| disk.path.clone())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_definition_says_is_what_its_host_needs() {
        let text = "name = 'vm'\nuuid = '01234567-89ab-cdef-0123-456789abcdef'\nmemory = '64MiB'\n\
                    machine = 'pc-q35-10.0'\ncpu = 'EPYC,-svm'\n[[disk]]\npath = '/shared/a.raw'\n\
                    shared = true\n[[disk]]\npath = '/local/b.raw'\n[[nic]]\nbridge = 'br0'\n";
        let needs = needs_of_definition(&Outline::read(text).unwrap());
        assert_eq!(needs.machine_type.as_deref(), Some("pc-q35-10.0"));
        assert_eq!(needs.cpu_model.as_deref(), Some("EPYC"));
        assert_eq!(needs.accelerator.as_deref(), Some("kvm"));
        assert_eq!(needs.shared_paths.into_iter().collect::<Vec<_>>(), ["/shared/a.raw"]);
        assert_eq!(needs.bridges.into_iter().collect::<Vec<_>>(), ["br0"]);
        let alias = Outline::read(&text.replace("pc-q35-10.0", "q35")).unwrap();
        assert_eq!(needs_of_definition(&alias).machine_type, None);
    }
}
