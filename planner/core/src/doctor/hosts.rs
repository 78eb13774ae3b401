//! What is wrong with hosts.

use vmferry_types::{HostId, PowerState, Timestamp};

use super::picture::{Answer, Declared, HostSaid, Picture, Standing};
use super::{Finding, Severity};

pub(super) fn findings(picture: &Picture) -> Vec<Finding> {
    picture.hosts.iter().flat_map(|host| of_host(picture, host)).collect()
}

fn of_host(picture: &Picture, host: &HostSaid) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(answered(picture, host));
    found.extend(host.declared.as_ref().and_then(|declared| death(picture, host, declared)));
    for stranger in &host.strangers {
        found.push(strange(picture, host, stranger));
    }
    for orphan in &host.orphans {
        found.push(Finding {
            vm: orphan.vm,
            ..finding(Severity::Warning, "orphan", &host.id, format!(
                "host {} still has a {} of VM {}, which is not its own ({}): it is never removed by itself",
                host.id, orphan.kind, orphan.name, orphan.detail
            ))
        });
    }
    found
}

fn finding(severity: Severity, code: &'static str, host: &HostId, message: String) -> Finding {
    Finding { severity, code, host: Some(host.clone()), vm: None, migration: None, message }
}

fn answered(picture: &Picture, host: &HostSaid) -> Option<Finding> {
    let id = &host.id;
    match &host.answer {
        Answer::Whole => None,
        Answer::Learning => Some(finding(
            Severity::Warning,
            "learning",
            id,
            format!("host {id} is still learning what runs there: ask again in a few seconds"),
        )),
        Answer::Unreadable => Some(finding(
            Severity::Warning,
            "journal_unreadable",
            id,
            format!(
                "the journal of host {id} is new, lost or broken: that it does not name a VM proves nothing until the planner has seeded it again"
            ),
        )),
        Answer::Silent { .. } if holds(host) => None,
        Answer::Silent { reason, heard } => {
            let owned = owned(picture, id);
            let since = match heard {
                Some(heard) => format!("last heard {} ago", age(picture.now, *heard)),
                None => "not heard since this planner started".to_owned(),
            };
            let (severity, what) = if owned == 0 {
                (Severity::Warning, String::new())
            } else {
                (
                    Severity::Error,
                    format!(
                        ". By the store {owned} VM(s) run there; what became of them is unknown. If the host is down for good, power it off, then `vmferry host declare-dead {id} --i-have-powered-it-off --reason …`"
                    ),
                )
            };
            Some(finding(
                severity,
                "host_silent",
                id,
                format!("host {id} does not answer ({reason}), {since}{what}"),
            ))
        }
    }
}

/// Says whether a declaration of its death is proof now.
fn holds(host: &HostSaid) -> bool {
    host.declared.as_ref().is_some_and(|declared| match declared.standing {
        Standing::Holds => true,
        Standing::History | Standing::Void { .. } => false,
    })
}

fn owned(picture: &Picture, host: &HostId) -> usize {
    let runs = |power| match power {
        PowerState::Running | PowerState::Starting | PowerState::Stopping => true,
        PowerState::Stopped | PowerState::Lost => false,
    };
    picture.vms.iter().filter(|vm| vm.host.as_ref() == Some(host) && runs(vm.power)).count()
}

fn death(picture: &Picture, host: &HostSaid, declared: &Declared) -> Option<Finding> {
    let id = &host.id;
    let said =
        format!("{} ago by {} ({})", age(picture.now, declared.at), declared.by, declared.reason);
    match declared.standing {
        Standing::History => None,
        Standing::Holds => match host.answer {
            Answer::Silent { .. } => Some(finding(
                Severity::Note,
                "host_dead",
                id,
                format!("host {id} was declared dead {said}: its VMs may be started elsewhere"),
            )),
            Answer::Whole | Answer::Learning | Answer::Unreadable => {
                Some(contradicted(id, &said, Severity::Error))
            }
        },
        Standing::Void { .. } => {
            // As long as it has guests of VMs that may have been started elsewhere meanwhile.
            let guests = host.vms.iter().any(|there| {
                there.has_guest()
                    && picture
                        .vms
                        .iter()
                        .any(|vm| vm.id == there.vm && vm.host.as_ref() != Some(id))
            });
            let severity = if guests { Severity::Error } else { Severity::Warning };
            Some(contradicted(id, &said, severity))
        }
    }
}

fn contradicted(id: &HostId, said: &str, severity: Severity) -> Finding {
    finding(
        severity,
        "death_contradicted",
        id,
        format!(
            "host {id} was declared dead {said}, and answered from the same boot afterwards: it was not. The declaration proves nothing any more; look at each of its VMs that was started elsewhere since"
        ),
    )
}

/// A QEMU process that is not the agent's own. If it has the UUID of a VM of ours, that is one that
/// runs behind everybody's back.
fn strange(picture: &Picture, host: &HostSaid, stranger: &str) -> Finding {
    let id = &host.id;
    let ours = picture.vms.iter().find(|vm| stranger.contains(&vm.id.to_string()));
    match ours {
        Some(vm) => Finding {
            vm: Some(vm.id),
            ..finding(
                Severity::Error,
                "stranger_is_vm",
                id,
                format!(
                    "host {id} has a QEMU process of VM {} that its agent does not own: {stranger}. See what it is before the VM is started anywhere",
                    vm.name
                ),
            )
        },
        None => finding(
            Severity::Note,
            "stranger",
            id,
            format!("host {id} has a QEMU process that is not vmferry's: {stranger}"),
        ),
    }
}

/// Writes an age in the unit that a reader wants.
pub(super) fn age(now: Timestamp, then: Timestamp) -> String {
    let seconds = now.since(then).value() / 1000;
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
