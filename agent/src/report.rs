//! What a host says of itself.

use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use vmferry_agent_core::definition::Definition;
use vmferry_proto::v1;
use vmferry_qmp::RunState;
use vmferry_types::{Bytes, Role, VmId};

use crate::accounting::{Footprint, Machine, Share, Target};
use crate::agent::{Agent, Stranger};
use crate::live::{Knowledge, Shared, Sight};
use crate::orphans::Own;
use crate::{accounting, clock, network, observe, orphans, process, wire};

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
    let targets = || -> Vec<Target> { vms.iter().map(|vm| Target::of(&vm.shared)).collect() };
    let looking = targets();
    let mut own = Own::of(agent);
    let looked = tokio::task::spawn_blocking(move || Looked {
        processes: looking.into_iter().map(Target::look).collect(),
        machine: Some(Machine::look()),
        scan: process::scan().ok(),
    })
    .await;
    // Where nothing could be looked at, the figures of the machine are missing, by name.
    let looked = looked.unwrap_or_else(|_| Looked {
        processes: targets().into_iter().map(Target::unlooked).collect(),
        ..Looked::default()
    });
    let mut troubles = Vec::new();
    let links = network::links().await.unwrap_or_else(|error| {
        troubles.push(crate::error::chain(&error));
        network::Links::default()
    });
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
    let mut reports = Vec::with_capacity(vms.len());
    for (vm, looked) in vms.iter().zip(looked.processes) {
        vm.shared.note_footprint(looked.footprint.clone());
        let (report, trouble) = vm_report(agent, &vm.shared, &looked.footprint);
        let name = vm.shared.record.borrow().name.clone();
        let named = |text: &str| format!("VM {name}: {text}");
        troubles.extend(looked.trouble.as_deref().into_iter().chain(trouble).map(named));
        reports.extend(report);
    }
    let used = reports.iter().map(|vm| Bytes(vm.observed_memory_bytes));
    let used = used.fold(Bytes::ZERO, Bytes::plus);
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
        capacity: Some(accounting::capacity(&agent.config, looked.machine, used, troubles)),
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

#[derive(Default)]
struct Looked {
    processes: Vec<accounting::Looked>,
    machine: Option<Machine>,
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

/// Returns what is said of one VM; nothing of one that left, but of its generation and claim. Beside
/// it, why what it may take is not known, if so.
fn vm_report(
    agent: &Agent,
    shared: &Shared,
    footprint: &Footprint,
) -> (Option<v1::VmReport>, Option<&'static str>) {
    let record = shared.record.borrow().clone();
    let sight = shared.sight.borrow().clone();
    let (knowledge, _) = observe::known(agent, &record, &sight);
    if record.fence.claim.value() == 0 && knowledge == v1::Knowledge::Known {
        // Asked for, never commanded: there is nothing to say.
        return (None, None);
    }
    let defined = record.defined();
    let vm = defined.and_then(|defined| Definition::parse(&defined.text).ok());
    let role = observe::role(&record, &sight);
    let process = accounting::has_process(role);
    // A process that is gone keeps no room from others.
    let uses = process && sight.gone.is_none();
    let share = vm.filter(|_| uses).map(|vm| Share::of(&vm, footprint.overhead()));
    let trouble = (uses && share.is_none())
        .then_some("its definition cannot be read, so nobody knows what it may take");
    let share = share.unwrap_or_default();
    let (handed, gave_up, _) = observe::order(&record);
    let report = v1::VmReport {
        vm_id: record.vm.to_string(),
        vm_name: record.name.clone(),
        role: role.label().to_owned(),
        generation: record.fence.generation.value(),
        claim: record.fence.claim.value(),
        knowledge: knowledge.into(),
        configured_memory_bytes: share.configured.value(),
        observed_memory_bytes: footprint.used.value(),
        cpu_milli: share.cpu_milli,
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
        overhead_memory_bytes: share.overhead.value(),
        overhead_measured_bytes: share.measured.value(),
    };
    (Some(report), trouble)
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

fn capabilities(agent: &Agent, bridges: Vec<String>) -> v1::HostCapabilities {
    v1::HostCapabilities {
        architecture: std::env::consts::ARCH.to_owned(),
        qemu_version: agent.probe.qemu_version.clone(),
        accelerators: agent.probe.accelerators.clone(),
        machine_types: agent.probe.machines.iter().cloned().collect(),
        bridges,
        cpu_models: agent.probe.cpu_models.iter().cloned().collect(),
        migration_address: agent.config.migration_address.to_string(),
        shared_paths: agent.config.shared_paths.clone().map(|paths| v1::SharedPaths { paths }),
        outbound_max: agent.config.outbound_max,
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
