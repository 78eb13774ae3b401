//! What contradicts of VMs and their migrations.

use vmferry_types::{HostId, PowerState, VmId};

use super::picture::{Answer, HostSaid, Known, Picture, Process, Remains, Standing, Under, Waits};
use super::{Finding, Runner, Severity};
use crate::evidence::{Handed, Knowledge};

/// Says who runs a VM.
pub(super) fn runner(picture: &Picture, vm: &Known) -> Runner {
    let mut running = running(picture, vm.id);
    if running.is_empty() {
        // A guest that stands still where it belongs is that host's all the same.
        running = picture
            .hosts
            .iter()
            .filter(|host| {
                host.vms.iter().any(|there| {
                    there.vm == vm.id && there.has_guest() && there.handed == Handed::No
                })
            })
            .map(|host| host.id.clone())
            .collect();
    }
    match running.len() {
        0 if vm.host.as_ref().is_some_and(|host| !could_say(picture, host)) => Runner::Unknown,
        0 => Runner::None,
        1 => Runner::One(running.remove(0)),
        _ => Runner::Several(running),
    }
}

fn running(picture: &Picture, vm: VmId) -> Vec<HostId> {
    let runs = |host: &&HostSaid| host.vms.iter().any(|there| there.vm == vm && there.runs());
    picture.hosts.iter().filter(runs).map(|host| host.id.clone()).collect()
}

/// Says whether a host said, or would have said, that a VM runs there.
fn could_say(picture: &Picture, host: &HostId) -> bool {
    let Some(said) = picture.hosts.iter().find(|said| said.id == *host) else { return false };
    match said.answer {
        Answer::Whole => true,
        Answer::Learning | Answer::Unreadable => false,
        Answer::Silent { .. } => {
            said.declared.as_ref().is_some_and(|declared| declared.standing == Standing::Holds)
        }
    }
}

pub(super) fn findings(picture: &Picture) -> Vec<Finding> {
    let known = picture.vms.iter().flat_map(|vm| of_vm(picture, vm));
    known.chain(unknown(picture)).collect()
}

fn finding(severity: Severity, code: &'static str, vm: &Known, message: String) -> Finding {
    Finding { severity, code, host: None, vm: Some(vm.id), migration: None, message }
}

fn of_vm(picture: &Picture, vm: &Known) -> Vec<Finding> {
    let mut found = Vec::new();
    let running = running(picture, vm.id);
    if running.len() > 1 {
        let hosts = names(&running);
        found.push(finding(Severity::Error, "runs_twice", vm, format!(
            "VM {} runs on {hosts}: power one of them off at once, then see which guest is the right one; its disks may be damaged",
            vm.name
        )));
    }
    // While something is under way the driver decides, and tells what holds it.
    match vm.under {
        Under::Power(_) | Under::Migration(_) => return found,
        // What waits for room does nothing yet.
        Under::Nothing | Under::Queued(_) => {}
    }
    if let ([host], Some(owner)) = (&running[..], &vm.host)
        && host != owner
    {
        found.push(Finding { host: Some(host.clone()), ..finding(Severity::Error, "runs_elsewhere", vm, format!(
            "VM {} runs on host {host}, and the store has it on host {owner} under generation {}",
            vm.name, vm.generation
        )) });
    }
    if let ([host], PowerState::Stopped | PowerState::Lost) = (&running[..], vm.power) {
        found.push(Finding {
            host: Some(host.clone()),
            ..finding(
                Severity::Error,
                "runs_though_not",
                vm,
                format!(
                    "VM {} runs on host {host}, and the store says that it is {}",
                    vm.name, vm.power
                ),
            )
        });
    }
    found.extend(newer(picture, vm));
    match vm.power {
        PowerState::Running => found.extend(missing(picture, vm, &running)),
        // It is to be started again already.
        PowerState::Lost if vm.under != Under::Nothing => {}
        PowerState::Lost => found.push(finding(Severity::Error, "lost", vm, format!(
            "VM {} is lost: {}. Start it again with `vmferry vm start {}`, or forget it with `vmferry vm delete {}`",
            vm.name, vm.error, vm.name, vm.name
        ))),
        PowerState::Stopped | PowerState::Starting | PowerState::Stopping => {}
    }
    found
}

/// An agent that knows a newer owner than the store: the store is behind.
fn newer(picture: &Picture, vm: &Known) -> Option<Finding> {
    let (host, there) = all(picture)
        .filter(|(_, there)| there.vm == vm.id && there.generation > vm.generation)
        .max_by_key(|(_, there)| there.generation)?;
    Some(Finding {
        host: Some(host.id.clone()),
        ..finding(
            Severity::Error,
            "newer_generation",
            vm,
            format!(
                "host {} knows generation {} of VM {}, the store only {}: the store is older than what happened (was it restored from a backup?). It learns as hosts report; until then the VM is not started elsewhere",
                host.id, there.generation, vm.name, vm.generation
            ),
        )
    })
}

/// The store says that it runs; its host was asked.
fn missing(picture: &Picture, vm: &Known, running: &[HostId]) -> Option<Finding> {
    let Some(owner) = vm.host.as_ref() else {
        let message = format!(
            "VM {} runs by the store, and on no host: see which one has it; if none does, forget it with `vmferry vm delete {} --it-runs-nowhere`",
            vm.name, vm.name
        );
        return Some(finding(Severity::Error, "no_host", vm, message));
    };
    let said = picture.hosts.iter().find(|host| host.id == *owner);
    let Some(said) = said else {
        return Some(Finding {
            host: Some(owner.clone()),
            ..finding(
                Severity::Error,
                "host_unknown",
                vm,
                format!(
                    "VM {} runs on host {owner} by the store, and no such host is known",
                    vm.name
                ),
            )
        });
    };
    if said.answer != Answer::Whole || !running.is_empty() {
        return None;
    }
    let here = |code, message| {
        Some(Finding { host: Some(owner.clone()), ..finding(Severity::Error, code, vm, message) })
    };
    let Some(there) = said.vms.iter().find(|there| there.vm == vm.id) else {
        return here(
            "missing",
            format!(
                "VM {} runs on host {owner} by the store, and that host knows nothing of it",
                vm.name
            ),
        );
    };
    match (&there.process, there.knowledge) {
        (_, Knowledge::Learning | Knowledge::Unreadable) => None,
        (Process::Gone(how), _) => here(
            "gone",
            format!(
                "VM {} runs on host {owner} by the store, and that host proves its QEMU gone ({how})",
                vm.name
            ),
        ),
        (Process::None, _) => here(
            "missing",
            format!(
                "VM {} runs on host {owner} by the store, and that host has no process of it (role {})",
                vm.name, there.role
            ),
        ),
        (Process::Alive, Knowledge::Unresponsive) => None,
        (Process::Alive, Knowledge::Known | Knowledge::UnknownVm) => Some(Finding {
            host: Some(owner.clone()),
            ..finding(
                Severity::Warning,
                "stands_still",
                vm,
                format!(
                    "the guest of VM {} stands still on host {owner} (role {}, run state {})",
                    vm.name,
                    there.role,
                    there.run_state.word()
                ),
            )
        }),
    }
}

/// VMs that run and that the store does not know.
fn unknown(picture: &Picture) -> impl Iterator<Item = Finding> + '_ {
    all(picture)
        .filter(|(_, there)| there.has_guest() && !picture.vms.iter().any(|vm| vm.id == there.vm))
        .map(|(host, there)| Finding {
            severity: Severity::Error,
            code: "unknown_vm",
            host: Some(host.id.clone()),
            vm: Some(there.vm),
            migration: None,
            message: format!(
                "host {} has a process of VM {} ({}), which the store does not know or has deleted",
                host.id, there.name, there.vm
            ),
        })
}

fn all(picture: &Picture) -> impl Iterator<Item = (&HostSaid, &Remains)> {
    picture.hosts.iter().flat_map(|host| host.vms.iter().map(move |there| (host, there)))
}

fn names(hosts: &[HostId]) -> String {
    let names: Vec<String> = hosts.iter().map(|host| format!("host {host}")).collect();
    names.join(" and ")
}

/// Something that waits for room.
pub(super) fn waits(picture: &Picture, of: &Waits) -> Finding {
    let name = picture.vms.iter().find(|vm| vm.id == of.vm).map_or("?", |vm| vm.name.as_str());
    Finding {
        severity: Severity::Note,
        code: "waits_for_room",
        host: None,
        vm: Some(of.vm),
        migration: Some(of.id),
        message: format!("the {} of VM {name} waits: {}", of.what, of.words),
    }
}

/// Migrations that wait for a human, or for what does not come.
pub(super) fn moves(picture: &Picture) -> Vec<Finding> {
    let open = picture.moves.iter().filter(|of| of.ended.is_none());
    open.filter_map(|of| {
        let name = picture.vms.iter().find(|vm| vm.id == of.vm).map_or("?", |vm| vm.name.as_str());
        let id = of.id;
        let stuck = of.stuck.as_ref();
        let (code, message) = if of.undecided {
            let cause = stuck.map_or("", |(cause, _)| cause);
            ("undecided", format!(
                "migration {id} of VM {name} failed and neither side is known to be the right one ({cause}). Look at both hosts, then `vmferry migration resolve {id} --keep source|destination --i-have-checked`"
            ))
        } else {
            let (cause, waits_for) = stuck?;
            ("stuck", format!("migration {id} of VM {name} is stuck: {cause}; it waits for {waits_for}"))
        };
        Some(Finding {
            severity: Severity::Error,
            code,
            host: None,
            vm: Some(of.vm),
            migration: Some(id),
            message,
        })
    })
    .collect()
}
