//! What rules a host out, apart from room.

use std::collections::BTreeSet;

use crate::capacity::{Unreadable, readable};
use crate::fleet::{Availability, Capabilities, Fleet, Host, Lifecycle};
use crate::placement::{Needs, Reason, Request};

/// Returns why operators do not want the host to take placements.
pub(super) fn operators_word(host: &Host) -> Vec<Reason> {
    let mut reasons: Vec<Reason> =
        host.policy.cordons.iter().cloned().map(Reason::Cordoned).collect();
    match host.policy.lifecycle {
        Lifecycle::Active => {}
        Lifecycle::Draining => reasons.push(Reason::Draining),
        Lifecycle::Maintenance => reasons.push(Reason::InMaintenance),
        Lifecycle::Retired => reasons.push(Reason::Retired),
    }
    reasons
}

/// Returns why what the host says cannot be counted on.
pub(super) fn unheard(fleet: &Fleet, host: &Host) -> Vec<Reason> {
    let mut reasons = Vec::new();
    match host.availability {
        Availability::Connected => {}
        Availability::Learning => reasons.push(Reason::Learning),
        Availability::Disconnected => reasons.push(Reason::NotConnected),
    }
    if let Some(report) = host.report.as_deref() {
        let age = fleet.now.since(report.at);
        if age > fleet.policy.report_max_age {
            reasons.push(Reason::StaleReport { age, max: fleet.policy.report_max_age });
        }
    }
    let figures = host.report.as_deref().ok_or(Unreadable::NeverReported).and_then(readable);
    if let Err(why) = figures {
        reasons.push(Reason::Unreadable(why));
    }
    reasons
}

/// Returns what the VM needs and the host will not have by waiting.
///
/// What only a report can say is held against a host only once it reported: unknown is not unable.
pub(crate) fn incapable(host: &Host, request: &Request) -> Vec<Reason> {
    let needs = &request.needs;
    let mut reasons = Vec::new();
    if request.source.as_ref() == Some(&host.id) {
        reasons.push(Reason::SameHost);
    }
    if let Some(cluster) = needs.cluster.as_ref().filter(|wanted| **wanted != host.policy.cluster) {
        reasons.push(Reason::OtherCluster {
            wanted: cluster.clone(),
            is: host.policy.cluster.clone(),
        });
    }
    if let Some(pin) = needs.pin.as_ref().filter(|pin| **pin != host.id) {
        reasons.push(Reason::Pinned { to: pin.clone() });
    }
    for (key, value) in &needs.required_labels {
        if host.policy.labels.get(key) != Some(value) {
            reasons.push(Reason::LabelMissing { key: key.clone(), value: value.clone() });
        }
    }
    let Some(report) = host.report.as_ref().filter(|report| report.unreadable.is_none()) else {
        return reasons;
    };
    reasons.extend(lacking(&report.capabilities, needs));
    reasons
}

/// Returns what a VM needs of a host's QEMU, bridges and folders and the host does not have.
pub(super) fn lacking(has: &Capabilities, needs: &Needs) -> Vec<Reason> {
    let mut reasons = Vec::new();
    let other = |wanted: &&String| !has.architecture.is_empty() && **wanted != has.architecture;
    if let Some(wanted) = needs.architecture.as_ref().filter(other) {
        reasons.push(Reason::Architecture { wanted: wanted.clone() });
    }
    if let Some(wanted) = missing(needs.accelerator.as_ref(), &has.accelerators) {
        reasons.push(Reason::Accelerator { wanted });
    }
    if let Some(wanted) = missing(needs.machine_type.as_ref(), &has.machine_types) {
        reasons.push(Reason::MachineType { wanted });
    }
    // A QEMU that does not list its models is asked by its agent, when it comes to it.
    let listed = needs.cpu_model.as_ref().filter(|_| !has.cpu_models.is_empty());
    if let Some(wanted) = missing(listed, &has.cpu_models) {
        reasons.push(Reason::CpuModel { wanted });
    }
    if let Some(source) = needs.qemu_version.as_ref().filter(|v| older(&has.qemu_version, v)) {
        let is = has.qemu_version.clone();
        reasons.push(Reason::QemuOlder { source: source.clone(), is });
    }
    for wanted in needs.bridges.difference(&has.bridges) {
        reasons.push(Reason::Bridge { wanted: wanted.clone() });
    }
    if let Some(shared) = &has.shared_paths {
        let missing = needs.shared_paths.iter().filter(|path| !is_shared(path, shared));
        reasons.extend(missing.map(|path| Reason::Path { wanted: path.clone() }));
    }
    reasons
}

/// Returns what is wanted and not there.
fn missing(wanted: Option<&String>, there: &BTreeSet<String>) -> Option<String> {
    wanted.filter(|wanted| !there.contains(*wanted)).cloned()
}

/// Says whether a host's QEMU is older than the one that would send to it. One that says no version
/// is not called older.
fn older(is: &str, source: &str) -> bool {
    let parts = |text: &str| -> Vec<u64> {
        text.split('.').map(|part| part.parse().unwrap_or(0)).collect()
    };
    !is.is_empty() && parts(is) < parts(source)
}

/// Says whether a path is one of the folders that are shared, or lies in one.
fn is_shared(path: &str, shared: &BTreeSet<String>) -> bool {
    shared.iter().any(|folder| {
        let below = path.strip_prefix(folder.trim_end_matches('/'));
        below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}
