//! Hosts as users are shown them.

use std::collections::BTreeMap;

use vmferry_planner_core::capacity::figures;
use vmferry_planner_core::fleet::{Availability, Fleet, Host, Lifecycle};
use vmferry_planner_core::placement::closed_because;
use vmferry_proto::v1;
use vmferry_types::{HostId, Role, Timestamp, VmId};

use super::{blocker, story};
use crate::api::ApiError;
use crate::clock;
use crate::inventory::{KnownHost, Worth, snapshot};
use crate::planner::Planner;
use crate::store::{Cordon, EmptyingFilter, EmptyingRow, HostRow, VmRow, Which};

/// Shows all hosts, with their VMs.
///
/// # Errors
///
/// Fails if the store does.
pub async fn hosts(planner: &Planner) -> Result<Vec<v1::Host>, ApiError> {
    let parts = &planner.parts;
    let fleet =
        snapshot(&parts.inventory, planner.store(), &parts.config.policy, clock::now()).await?;
    let mut vms: BTreeMap<HostId, Vec<v1::Vm>> = BTreeMap::new();
    let rows = planner.store().vms().await?;
    let owned = rows.iter().filter(|row| row.host.is_some());
    for (row, shown) in owned.clone().zip(super::vms(planner, owned).await?) {
        if let Some(host) = &row.host {
            vms.entry(host.clone()).or_default().push(shown);
        }
    }
    let cordons = planner.store().cordons(fleet.now).await?;
    let emptyings = newest(planner).await?;
    let mut shown = Vec::new();
    for (row, heard) in parts.inventory.hosts() {
        let Some(host) = fleet.hosts.get(&row.id) else { continue };
        let mut message = one(&fleet, host, &row, heard.as_ref());
        if let Some(heard) = &heard {
            message.orphans.extend(deleted(planner, &heard.report, &rows).await?);
        }
        message.vms = vms.remove(&row.id).unwrap_or_default();
        message.lifecycle = host.policy.lifecycle.label().to_owned();
        message.cordons = cordons.iter().filter(|of| of.host == row.id).map(cordon).collect();
        if let Some(row) = emptyings.get(&row.id) {
            message.emptying = Some(super::emptying(planner, row).await?);
        }
        message.story = story::of_host(&message);
        shown.push(message);
    }
    Ok(shown)
}

/// Returns what empties each host now, or is planned to.
async fn newest(planner: &Planner) -> Result<BTreeMap<HostId, EmptyingRow>, ApiError> {
    let mut newest: BTreeMap<HostId, EmptyingRow> = BTreeMap::new();
    let open = EmptyingFilter { which: Which::Open, ..EmptyingFilter::default() };
    for row in planner.store().emptyings(&open).await? {
        // A plan that nobody carried out does not hide what is being carried out.
        let known = newest.get(row.emptying.host());
        let holds = row.emptying.lifecycle() != Lifecycle::Active;
        if known.is_none() || holds {
            newest.insert(row.emptying.host().clone(), row);
        }
    }
    Ok(newest)
}

/// Tells of a host that nothing empties now what emptied it last. A plan that nobody carried out does
/// not hide what came after it.
///
/// # Errors
///
/// Fails if the store does.
pub async fn with_past(planner: &Planner, mut host: v1::Host) -> Result<v1::Host, ApiError> {
    let shown = host.emptying.as_ref();
    if shown.is_some_and(|of| !matches!(of.state.as_str(), "PLANNED" | "BLOCKED")) {
        return Ok(host);
    }
    let of = EmptyingFilter { host: host.id.parse().ok(), ..EmptyingFilter::default() };
    if let Some(row) = planner.store().emptyings(&of).await?.first()
        && shown.is_none_or(|shown| shown.id != row.id().to_string())
    {
        host.emptying = Some(super::emptying(planner, row).await?);
        host.story = story::of_host(&host);
    }
    Ok(host)
}

fn cordon(of: &Cordon) -> v1::Cordon {
    v1::Cordon {
        owner: of.owner.clone(),
        reason: of.reason.clone(),
        since: clock::rfc3339(of.since),
        expires: of.expires.map(clock::rfc3339).unwrap_or_default(),
    }
}

/// Names what a host has of VMs that were deleted: it is never adopted, and never removed by itself.
async fn deleted(
    planner: &Planner,
    report: &v1::HostReport,
    rows: &[VmRow],
) -> Result<Vec<v1::Orphan>, ApiError> {
    let mut orphans = Vec::new();
    for vm in &report.vms {
        let Ok(id) = vm.vm_id.parse::<VmId>() else { continue };
        let kind = match Role::from_label(&vm.role) {
            Some(Role::Stopped) => "definition",
            Some(Role::Running | Role::Held | Role::Receiver) => "process",
            Some(Role::Absent) | None => continue,
        };
        let named = report.orphans.iter().any(|of| of.vm_id == vm.vm_id && of.kind == kind);
        if named || rows.iter().any(|row| row.id == id) {
            continue;
        }
        if let Some(tombstone) = planner.store().tombstone(id).await? {
            orphans.push(v1::Orphan {
                vm_id: vm.vm_id.clone(),
                vm_name: tombstone.name,
                kind: kind.to_owned(),
                detail: format!("the VM was deleted {}", clock::rfc3339(tombstone.deleted)),
                generation: vm.generation,
            });
        }
    }
    Ok(orphans)
}

fn one(fleet: &Fleet, host: &Host, row: &HostRow, heard: Option<&KnownHost>) -> v1::Host {
    let mut message = v1::Host {
        id: host.id.to_string(),
        name: row.name.clone(),
        cluster: host.policy.cluster.clone(),
        labels: host.policy.labels.clone(),
        status: status(host, row).to_owned(),
        declared_dead: declared(row),
        blockers: closed_because(fleet, host)
            .iter()
            .map(|reason| blocker(&reason.blocker(&host.id)))
            .collect(),
        agent_address: row.agent_address.clone(),
        boot_id: row.boot_id.clone(),
        last_report: clock::rfc3339(row.last_report),
        // Not heard by this planner since it started: another one was told.
        report_age_ms: match row.last_report {
            Timestamp(0) => 0,
            at => fleet.now.since(at).value(),
        },
        ..v1::Host::default()
    };
    if let Some(heard) = heard {
        message.agent_version.clone_from(&heard.report.agent_version);
        message.last_report = clock::rfc3339(heard.at);
        message.report_age_ms = fleet.now.since(heard.at).value();
        message.capabilities.clone_from(&heard.report.capabilities);
        message.strangers.clone_from(&heard.report.strangers);
        message.orphans.clone_from(&heard.report.orphans);
    }
    if let Ok(figures) = figures(host, &fleet.policy) {
        message.total_memory_bytes = figures.total_memory.value();
        message.reserve_memory_bytes = figures.reserve_memory.value();
        message.observed_memory_bytes = figures.observed_memory.value();
        message.committed_memory_bytes = figures.committed_memory.value();
        message.reserved_memory_bytes = figures.reserved_memory.value();
        message.free_memory_bytes = figures.free_memory.value();
        message.total_cpu_milli = figures.total_cpu.value();
        message.free_cpu_milli = figures.free_cpu.value();
    }
    message
}

/// Shows the last declaration of a host's death, with what it is worth.
fn declared(row: &HostRow) -> Option<v1::DeadDeclaration> {
    let declaration = row.declared_dead.as_ref()?;
    Some(v1::DeadDeclaration {
        at: clock::rfc3339(declaration.at),
        by: declaration.by.clone(),
        reason: declaration.reason.clone(),
        kind: declaration.kind.label().to_owned(),
        boot_id: declaration.boot_id.clone(),
        output: declaration.evidence.clone(),
        state: Worth::of(row)?.label().to_owned(),
        voided_at: declaration.void.map(clock::rfc3339).unwrap_or_default(),
    })
}

fn status(host: &Host, row: &HostRow) -> &'static str {
    if Worth::of(row) == Some(Worth::Holds) {
        return "dead";
    }
    let unreadable = host.report.as_ref().is_some_and(|report| report.unreadable.is_some());
    match host.availability {
        Availability::Disconnected => "disconnected",
        Availability::Learning => "learning",
        Availability::Connected if unreadable => "unreadable",
        Availability::Connected => "connected",
    }
}
