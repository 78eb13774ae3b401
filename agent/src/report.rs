//! What a host says of itself.

use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::journal::Identity;
use vmferry_proto::v1;
use vmferry_qmp::RunState;
use vmferry_types::{Bytes, Role, VmId};

use crate::agent::{Agent, Stranger};
use crate::live::{Knowledge, Shared, Sight};
use crate::orphans::Own;
use crate::{clock, host, network, observe, orphans, process, wire};

/// What QEMU takes beside the guest's memory: code, buffers, page tables; TCG's code cache most.
const OVERHEAD: Bytes = Bytes(128 << 20);
/// How many VMs that left are still named, the last ones: those that a planner may be unsure of.
const LEFT_MAX: usize = 1000;
/// For so long a report counts as that of now, unless something has changed: each looks at every
/// process of the machine.
const FRESH: Duration = Duration::from_millis(500);

/// The last report, for all who want one at the same moment.
#[derive(Debug, Default)]
pub(crate) struct Latest(tokio::sync::Mutex<Option<Made>>);

#[derive(Debug)]
struct Made {
    report: v1::HostReport,
    begun: Instant,
    changes: watch::Receiver<()>,
}

/// Returns the report of now; several planners that ask at the same moment are told the same.
pub(crate) async fn current(agent: &Arc<Agent>) -> v1::HostReport {
    let mut latest = agent.latest_report.0.lock().await;
    if let Some(made) = latest.as_ref()
        && made.begun.elapsed() < FRESH
        && made.changes.has_changed().is_ok_and(|changed| !changed)
    {
        return made.report.clone();
    }
    let mut changes = agent.changes();
    changes.mark_unchanged();
    let begun = Instant::now();
    let report = host_report(agent).await;
    *latest = Some(Made { report: report.clone(), begun, changes });
    report
}

/// Makes the report of now.
pub(crate) async fn host_report(agent: &Arc<Agent>) -> v1::HostReport {
    let vms = agent.vms();
    let targets: Vec<Target> = vms.iter().map(|vm| Target::of(&vm.shared)).collect();
    let mut own = Own::of(agent);
    let looked = tokio::task::spawn_blocking(move || Looked {
        used: targets.iter().map(Target::used_bytes).collect(),
        memory: host::memory(),
        huge_pages: host::huge_pages(),
        scan: process::scan().ok(),
    })
    .await
    .unwrap_or_default();
    let links = network::links().await.unwrap_or_default();
    // Neither before nor after the look: one may have been launched or ended meanwhile.
    own.extend(Own::of(agent));
    let mut orphans = orphans::of_records(agent, &vms);
    if let Some(scan) = looked.scan {
        orphans.extend(note_strangers(agent, &own, &scan));
        let run_dir = agent.config.run_dir.clone();
        let dirs = std::mem::take(&mut own.dirs);
        let left = move || orphans::of_launches(&run_dir, &dirs, &scan);
        orphans.extend(tokio::task::spawn_blocking(left).await.unwrap_or_default());
    }
    orphans.extend(orphans::of_taps(&own.taps, &links));
    let reports: Vec<v1::VmReport> = vms
        .iter()
        .zip(looked.used.iter().copied().chain(std::iter::repeat(0)))
        .filter_map(|(vm, used)| {
            vm.shared.note_used(used);
            vm_report(agent, &vm.shared, used)
        })
        .collect();
    let learning = vms.iter().any(|vm| vm.shared.sight.borrow().knowledge == Knowledge::Learning);
    let strangers = agent.strangers.lock().unwrap_or_else(PoisonError::into_inner);
    v1::HostReport {
        host_id: agent.config.host_id.to_string(),
        name: agent.config.name.clone(),
        boot_id: agent.boot_id.clone(),
        agent_instance: agent.instance.clone(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        agent_address: agent.config.advertise.clone(),
        sequence: agent.next_sequence(),
        sent_at_ms: clock::wall_ms(),
        learning,
        journal_unreadable: !agent.journal_is_whole(&vms),
        capacity: Some(capacity(agent, &reports, looked.memory, looked.huge_pages)),
        capabilities: Some(capabilities(agent, links.bridges)),
        vms: without_long_gone(reports),
        strangers: strangers.iter().map(|stranger| stranger.text.clone()).collect(),
        orphans: orphans::bounded(orphans),
    }
}

/// Leaves out VMs that left long ago, and whoever was only ever claimed: their fences stay in the
/// journal, but a planner that is told of all of them at each report has more to read every day.
fn without_long_gone(mut reports: Vec<v1::VmReport>) -> Vec<v1::VmReport> {
    let left = |report: &v1::VmReport| {
        report.role == Role::Absent.label() && report.knowledge() == v1::Knowledge::Known
    };
    // Ids of admissions are ordered by time.
    let mut admissions: Vec<_> =
        reports.iter().filter(|report| left(report)).map(|vm| vm.migration_id.clone()).collect();
    if admissions.len() > LEFT_MAX {
        admissions.sort_unstable_by(|one, other| other.cmp(one));
        let oldest = admissions.swap_remove(LEFT_MAX - 1);
        reports.retain(|report| !left(report) || report.migration_id >= oldest);
    }
    reports
}

/// A process whose memory is to be looked at.
enum Target {
    /// There is none.
    Nobody,
    /// It is being moved: looking at its memory would hold up its page faults, so what was seen
    /// last is said again.
    Busy(u64),
    /// It is there.
    Process(Identity),
}

impl Target {
    fn of(shared: &Shared) -> Self {
        let sight = shared.sight.borrow();
        match &sight.identity {
            None => Self::Nobody,
            Some(_) if sight.gone.is_some() => Self::Nobody,
            Some(_) if sight.busy() => Self::Busy(shared.used()),
            Some(identity) => Self::Process(identity.clone()),
        }
    }

    fn used_bytes(&self) -> u64 {
        match self {
            Self::Nobody => 0,
            Self::Busy(last) => *last,
            Self::Process(identity) => host::used_bytes(identity).unwrap_or(0),
        }
    }
}

#[derive(Default)]
struct Looked {
    used: Vec<u64>,
    memory: host::Memory,
    huge_pages: Vec<v1::HugePages>,
    scan: Option<process::Scan>,
}

/// Looks for QEMU processes that are not ours.
pub(crate) async fn look_for_strangers(agent: &Agent) {
    let mut own = Own::of(agent);
    let scan = tokio::task::spawn_blocking(process::scan).await;
    own.extend(Own::of(agent));
    // Where nothing could be looked at, what was seen last still counts.
    if let Ok(Ok(scan)) = scan {
        note_strangers(agent, &own, &scan);
    }
}

/// Notes which QEMU processes here are not ours; returns those of them that are left of a VM of
/// ours under a directory that is not this agent's any more.
fn note_strangers(agent: &Agent, own: &Own, scan: &process::Scan) -> Vec<v1::Orphan> {
    let (mut strangers, mut left) = (Vec::new(), Vec::new());
    for qemu in &scan.qemus {
        if qemu.dir.as_ref().is_some_and(|dir| own.dirs.contains(dir)) {
            continue;
        }
        let uuid = qemu.uuid.filter(|_| !agent.is_anothers(qemu)).map(|uuid| uuid.as_u128());
        let here = qemu.dir.as_deref().and_then(Path::parent) == Some(&agent.config.run_dir);
        let known = uuid.is_some_and(|uuid| agent.vm(VmId::from_u128(uuid)).is_some());
        if known && !here {
            left.push(orphans::of_process(qemu));
        }
        let text = format!(
            "{} {} {}",
            qemu.identity,
            qemu.name.as_deref().unwrap_or("without a name"),
            qemu.uuid.map(|uuid| uuid.to_string()).unwrap_or_default()
        );
        strangers.push(Stranger { uuid, text: text.trim_end().to_owned() });
    }
    *agent.strangers.lock().unwrap_or_else(PoisonError::into_inner) = strangers;
    left
}

/// Returns what is said of one VM; nothing of one that left, but of its generation and claim.
fn vm_report(agent: &Agent, shared: &Shared, used: u64) -> Option<v1::VmReport> {
    let record = shared.record.borrow().clone();
    let sight = shared.sight.borrow().clone();
    let (knowledge, _) = observe::known(agent, &record, &sight);
    if record.fence.claim.value() == 0 && knowledge == v1::Knowledge::Known {
        // Asked for, never commanded: there is nothing to say.
        return None;
    }
    let defined = record.defined();
    let vm = defined.and_then(|defined| Definition::parse(&defined.text).ok());
    let role = observe::role(&record, &sight);
    let process = match role {
        Role::Running | Role::Held | Role::Receiver => true,
        Role::Absent | Role::Stopped => false,
    };
    // A process that is gone keeps no room from others.
    let uses = process && sight.gone.is_none();
    let (handed, gave_up, _) = observe::order(&record);
    let configured = vm.as_ref().map_or(0, |vm| vm.memory_max.plus(OVERHEAD).value());
    Some(v1::VmReport {
        vm_id: record.vm.to_string(),
        vm_name: record.name.clone(),
        role: role.label().to_owned(),
        generation: record.fence.generation.value(),
        claim: record.fence.claim.value(),
        knowledge: knowledge.into(),
        configured_memory_bytes: if uses { configured } else { 0 },
        observed_memory_bytes: used,
        cpu_milli: vm.filter(|_| uses).map_or(0, |vm| u64::from(vm.vcpus).saturating_mul(1000)),
        run_state: run_state(&sight),
        migration_id: record.fence.migration.map(|id| id.to_string()).unwrap_or_default(),
        definition: defined.map(|defined| defined.text.clone()).unwrap_or_default(),
        resolved_machine: defined
            .map(|defined| defined.resolved_machine.clone())
            .unwrap_or_default(),
        gone: sight
            .gone
            .as_ref()
            .filter(|_| process)
            .map(|gone| wire::gone_to_wire(gone, &agent.config.host_id)),
        guest_end: guest_end(&sight).to_owned(),
        handed,
        gave_up,
        ever_continued: record.ever_continued(),
    })
}

/// Returns QEMU's run state; of one that is gone, only in which its guest had ended by itself.
fn run_state(sight: &Sight) -> String {
    match (&sight.gone, &sight.run_state) {
        (None, Some(state))
        | (Some(_), Some(state @ (RunState::Shutdown | RunState::GuestPanicked))) => {
            state.label().to_owned()
        }
        (Some(_), Some(_)) | (None | Some(_), None) => String::new(),
    }
}

/// Says how a guest ended whose end was its own word, and no loss.
fn guest_end(sight: &Sight) -> &'static str {
    let off = sight.gone.is_some() && sight.run_state == Some(RunState::Shutdown);
    if off { "shutdown" } else { "" }
}

fn capacity(
    agent: &Agent,
    vms: &[v1::VmReport],
    memory: host::Memory,
    hugepages: Vec<v1::HugePages>,
) -> v1::Capacity {
    let used = vms.iter().fold(0_u64, |sum, vm| sum.saturating_add(vm.observed_memory_bytes));
    let (total, available) = match agent.config.memory {
        // A share of the machine: what its own VMs leave of it.
        Some(share) => (share.value(), share.value().saturating_sub(used)),
        None => (memory.total, memory.available),
    };
    v1::Capacity {
        total_memory_bytes: total,
        available_memory_bytes: available,
        cpu_total_milli: u64::from(agent.config.cpus.unwrap_or_else(host::cpus)) * 1000,
        hugepages,
        memory_pressure: host::pressure("memory"),
        cpu_pressure: host::pressure("cpu"),
    }
}

fn capabilities(agent: &Agent, bridges: Vec<String>) -> v1::HostCapabilities {
    v1::HostCapabilities {
        architecture: std::env::consts::ARCH.to_owned(),
        qemu_version: agent.probe.qemu_version.clone(),
        accelerators: agent.probe.accelerators.clone(),
        machine_types: agent.probe.machines.iter().cloned().collect(),
        bridges,
        cpu_models: agent.probe.cpu_models.iter().cloned().collect(),
        migration_address: agent.config.migration_address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_of_those_that_left_are_named() {
        let report = |role: Role, admission: usize| v1::VmReport {
            role: role.label().to_owned(),
            migration_id: format!("{admission:08}"),
            knowledge: v1::Knowledge::Known.into(),
            ..v1::VmReport::default()
        };
        let mut reports: Vec<_> = (0..LEFT_MAX + 7).map(|at| report(Role::Absent, at)).collect();
        reports.push(report(Role::Running, 0));
        let named = without_long_gone(reports);
        assert_eq!(named.len(), LEFT_MAX + 1);
        assert_eq!(named[0].migration_id, "00000007");
        assert_eq!(named[LEFT_MAX].role, "running");
    }
}
