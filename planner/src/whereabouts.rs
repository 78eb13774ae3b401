//! What has to be known of a VM before it is started or forgotten: that nothing of it runs.
//!
//! The store may be older than what happened, because it was restored from a backup. So before
//! anything rests on `stopped` or `lost`, the host that had the VM last is heard, and whatever an
//! agent says of a newer owner counts more than the row.

use futures::stream::{self, StreamExt as _};
use vmferry_planner_core::migration::Blocker;
use vmferry_proto::v1::{Knowledge, ObserveRequest, VmObservation, VmReport};
use vmferry_types::{Claim, Generation, HostId, Role};

use crate::planner::Planner;
use crate::store::VmRow;

/// As many agents are asked at once.
const ASKED_AT_ONCE: usize = 16;

/// What is known of a VM's whereabouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// Why it may not be started or forgotten now.
    pub blockers: Vec<Blocker>,
    /// The newest generation that any agent knows, if it is newer than the row's.
    pub newer: Option<Generation>,
    /// The newest claim that any agent knows.
    pub claim: Claim,
}

/// Asks what has to be known before a VM is started on `target`, or forgotten.
pub async fn look(planner: &Planner, vm: &VmRow, target: Option<&HostId>) -> Whereabouts {
    let seen = observed(planner, vm, target).await;
    let mut found = Whereabouts { blockers: Vec::new(), newer: None, claim: vm.claim };
    let mut newest = vm.generation;
    for (host, seen) in &seen {
        found.claim = found.claim.max(Claim::from_stored(seen.claim));
        newest = newest.max(Generation::from_stored(seen.generation));
        if alive(seen) {
            found.blockers.push(runs(host, vm, &seen.role));
        }
    }
    for (host, report) in planner.parts.inventory.reported(vm.id) {
        newest = newest.max(Generation::from_stored(report.generation));
        let asked = seen.iter().any(|(of, _)| *of == host);
        if !asked && reported_alive(&report, vm) && planner.parts.inventory.dead(&host).is_none() {
            found.blockers.push(runs(&host, vm, &report.role));
        }
    }
    if let Some(last) = &vm.host
        && !has_said_all(planner, last)
    {
        found.blockers.push(not_heard(last, vm));
    }
    if newest > vm.generation {
        found.newer = Some(newest);
        found.blockers.extend(whoever_may_have_it(planner, vm, newest));
    }
    found
}

/// Asks the hosts that matter, live: where it is to run, where it was last, and who speaks of it.
async fn observed(
    planner: &Planner,
    vm: &VmRow,
    target: Option<&HostId>,
) -> Vec<(HostId, VmObservation)> {
    let inventory = &planner.parts.inventory;
    let speak = inventory.reported(vm.id).into_iter().map(|(host, _)| host);
    let mut hosts: Vec<HostId> = target.into_iter().chain(&vm.host).cloned().chain(speak).collect();
    hosts.sort();
    hosts.dedup();
    hosts.retain(|host| inventory.dead(host).is_none());
    let look = ObserveRequest { vm_id: vm.id.to_string(), claim: 0 };
    stream::iter(hosts)
        .map(|host| {
            let look = look.clone();
            async move {
                let seen = planner.parts.agents.observe(&host, look).await;
                // Whoever does not answer is judged by its last report.
                seen.ok().map(|seen| (host, seen))
            }
        })
        .buffer_unordered(ASKED_AT_ONCE)
        .filter_map(|seen| async move { seen })
        .collect()
        .await
}

/// Says whether an agent sees, or may have, a process of the VM.
fn alive(seen: &VmObservation) -> bool {
    let process = seen.qemu.as_ref().is_some_and(|qemu| qemu.alive);
    let role =
        matches!(Role::from_label(&seen.role), Some(Role::Running | Role::Held | Role::Receiver));
    match seen.knowledge() {
        Knowledge::Known | Knowledge::UnknownVm => process && seen.gone.is_none(),
        Knowledge::Unresponsive => true,
        Knowledge::Learning => process || (role && seen.gone.is_none()),
        Knowledge::Unspecified | Knowledge::Unreadable => process,
    }
}

/// Says whether a report tells of a process that the row does not know to be over.
fn reported_alive(report: &VmReport, vm: &VmRow) -> bool {
    let role =
        matches!(Role::from_label(&report.role), Some(Role::Running | Role::Held | Role::Receiver));
    let news = Generation::from_stored(report.generation) >= vm.generation
        && Claim::from_stored(report.claim) >= vm.claim;
    role && report.gone.is_none() && news
}

/// Says whether a host has told all that it has, since this planner process began, or is dead.
fn has_said_all(planner: &Planner, host: &HostId) -> bool {
    let inventory = &planner.parts.inventory;
    let whole = |heard: crate::inventory::KnownHost| {
        !heard.report.learning && !heard.report.journal_unreadable
    };
    inventory.dead(host).is_some() || inventory.heard(host).is_some_and(whole)
}

fn runs(host: &HostId, vm: &VmRow, role: &str) -> Blocker {
    Blocker {
        code: "runs_elsewhere".to_owned(),
        message: format!(
            "host {host} has a QEMU process of VM {} (role {role}): see `vmferry doctor {}`",
            vm.name, vm.name
        ),
        host: Some(host.clone()),
    }
}

fn not_heard(host: &HostId, vm: &VmRow) -> Blocker {
    Blocker {
        code: "not_heard".to_owned(),
        message: format!(
            "host {host}, where VM {} was last, has not reported all that it has since this planner started: it may still run there. Wait for its report; if the host is down for good, power it off, then `vmferry host declare-dead {host} --i-have-powered-it-off --reason …`",
            vm.name
        ),
        host: Some(host.clone()),
    }
}

/// Names the hosts that may have a VM that somebody was given after what the row knows.
fn whoever_may_have_it(planner: &Planner, vm: &VmRow, newest: Generation) -> Vec<Blocker> {
    let hosts = planner.parts.inventory.hosts();
    let silent = hosts.into_iter().map(|(row, _)| row.id).filter(|id| !has_said_all(planner, id));
    silent
        .map(|host| Blocker {
            code: "newer_generation".to_owned(),
            message: format!(
                "VM {} was given away under generation {newest}, and this planner's store only knows {} (was it restored from a backup?): host {host} may have it. Wait for its report; if it is down for good, power it off, then `vmferry host declare-dead {host} --i-have-powered-it-off --reason …`",
                vm.name, vm.generation
            ),
            host: Some(host),
        })
        .collect()
}
