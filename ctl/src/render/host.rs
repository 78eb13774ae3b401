//! Hosts.

use vmferry_proto::v1::{Blocker, Host, Orphan};

use super::quantity::{bytes, cpus, millis, or_dash};
use super::table::{fields, section, table};
use super::{emptying, vm};

/// Lays out all hosts.
pub(crate) fn list(hosts: &[Host]) -> String {
    let header =
        ["ID", "STATUS", "CLUSTER", "FREE", "TOTAL", "CPU FREE", "VMS", "REPORT", "BLOCKED BY"];
    let row = |host: &Host| {
        vec![
            host.id.clone(),
            status(host),
            or_dash(&host.cluster),
            bytes(host.free_memory_bytes),
            bytes(host.total_memory_bytes),
            cpus(host.free_cpu_milli),
            host.vms.len().to_string(),
            report_age(host),
            or_dash(&codes(&host.blockers)),
        ]
    };
    table(&header, hosts.iter().map(row).collect(), "no hosts: none has reported to this planner")
}

/// Lays out one host.
pub(crate) fn show(host: &Host) -> String {
    let labels =
        host.labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>();
    let mut text = fields(&[
        ("id", host.id.clone()),
        ("name", host.name.clone()),
        ("status", status(host)),
        ("cluster", host.cluster.clone()),
        ("labels", labels.join(", ")),
        ("agent", format!("{} {}", or_dash(&host.agent_address), host.agent_version)),
        ("boot id", host.boot_id.clone()),
        ("report", report_age(host)),
        ("memory total", bytes(host.total_memory_bytes)),
        ("  reserve", bytes(host.reserve_memory_bytes)),
        ("  observed", bytes(host.observed_memory_bytes)),
        ("  committed", bytes(host.committed_memory_bytes)),
        ("  reserved", bytes(host.reserved_memory_bytes)),
        ("  free", bytes(host.free_memory_bytes)),
        ("CPU total", cpus(host.total_cpu_milli)),
        ("  free", cpus(host.free_cpu_milli)),
    ]);
    if let Some(capabilities) = &host.capabilities {
        text += &fields(&[
            ("QEMU", capabilities.qemu_version.clone()),
            ("accelerators", capabilities.accelerators.join(", ")),
            ("bridges", capabilities.bridges.join(", ")),
            ("migrates at", capabilities.migration_address.clone()),
        ]);
    }
    text += &section("how it stands:", &host.story.join("\n"));
    text += &emptied(host);
    text += &section("declared dead:", &death(host));
    text += &section("takes no placements now:", &reasons(&host.blockers));
    if !host.vms.is_empty() {
        text += &section("VMs:", &vm::list(&host.vms));
    }
    text += &section("QEMU processes that are not vmferry's:", &host.strangers.join("\n"));
    text += &section(
        "left here of VMs that are not its own (never removed by itself):",
        &orphans(host),
    );
    text
}

/// Shows how far what empties it is, and who cannot leave for what reasons.
fn emptied(host: &Host) -> String {
    let Some(of) = host.emptying.as_ref().filter(|of| of.ended.is_empty()) else {
        return String::new();
    };
    let mut text = section("emptied:", &emptying::progress(of));
    text += &section("cannot leave:", &emptying::reasons(&of.blocked));
    text + &format!("\nmore of it: vmferry host maintenance show {}\n", of.id)
}

/// Says how a host stands, and nothing else.
pub(crate) fn story(host: &Host) -> String {
    format!("host {}\n{}", host.id, section("how it stands:", &host.story.join("\n")))
}

/// Says what became of a declaration of death.
pub(crate) fn declared(host: &Host) -> String {
    let lost: Vec<&str> =
        host.vms.iter().filter(|vm| vm.power == "lost").map(|vm| vm.name.as_str()).collect();
    let mut text = format!("host {} is declared dead\n", host.id);
    if !lost.is_empty() {
        text += &format!("lost, and may be started elsewhere: {}\n", lost.join(", "));
    }
    text += &section("declaration:", &death(host));
    text
}

/// A host that was declared dead and lives is not to be overlooked.
fn status(host: &Host) -> String {
    match &host.declared_dead {
        Some(declared) if declared.state == "void" => {
            format!("{}, DECLARED DEAD AND LIVES", or_dash(&host.status))
        }
        Some(_) | None => match host.lifecycle.as_str() {
            "" | "active" => or_dash(&host.status),
            stage => format!("{}, {stage}", or_dash(&host.status)),
        },
    }
}

fn death(host: &Host) -> String {
    let Some(declared) = &host.declared_dead else { return String::new() };
    let worth = match declared.state.as_str() {
        "holds" => "it is proof that nothing runs there".to_owned(),
        "history" => "the host is back under another boot".to_owned(),
        "void" => format!(
            "VOID since {}: the host answered from the same boot, so it was not dead",
            declared.voided_at
        ),
        other => other.to_owned(),
    };
    fields(&[
        ("at", declared.at.clone()),
        ("by", declared.by.clone()),
        ("kind", declared.kind.clone()),
        ("reason", declared.reason.clone()),
        ("boot id", declared.boot_id.clone()),
        ("worth", worth),
        ("printed", declared.output.clone()),
    ])
}

fn orphans(host: &Host) -> String {
    if host.orphans.is_empty() {
        return String::new();
    }
    let row = |orphan: &Orphan| {
        let name = if orphan.vm_name.is_empty() { &orphan.vm_id } else { &orphan.vm_name };
        vec![name.clone(), orphan.kind.clone(), or_dash(&orphan.detail)]
    };
    table(&["VM", "KIND", "WHAT"], host.orphans.iter().map(row).collect(), "")
}

fn report_age(host: &Host) -> String {
    if host.last_report.is_empty() {
        "never".to_owned()
    } else {
        format!("{} ago", millis(host.report_age_ms))
    }
}

fn codes(blockers: &[Blocker]) -> String {
    blockers.iter().map(|blocker| blocker.code.as_str()).collect::<Vec<_>>().join(", ")
}

fn reasons(blockers: &[Blocker]) -> String {
    blockers
        .iter()
        .map(|blocker| format!("{}: {}", blocker.code, blocker.message))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;
    use vmferry_proto::v1::Vm;

    fn host() -> Host {
        Host {
            id: "a".into(),
            name: "rack1-a".into(),
            status: "connected".into(),
            cluster: "default".into(),
            labels: [("rack".to_owned(), "1".to_owned())].into(),
            agent_address: "10.0.0.1:9097".into(),
            agent_version: "0.1.0".into(),
            last_report: "2026-01-02T03:04:05Z".into(),
            report_age_ms: 1200,
            total_memory_bytes: 4 << 30,
            free_memory_bytes: 3 << 30,
            total_cpu_milli: 4000,
            free_cpu_milli: 3500,
            vms: vec![Vm { name: "web1".into(), power: "running".into(), ..Vm::default() }],
            ..Host::default()
        }
    }

    #[test]
    fn a_list_shows_capacity_and_what_blocks() {
        let silent = Host {
            id: "b".into(),
            status: "disconnected".into(),
            blockers: vec![
                Blocker { code: "not_connected".into(), ..Blocker::default() },
                Blocker { code: "stale_report".into(), ..Blocker::default() },
            ],
            ..Host::default()
        };
        expect![[r#"
            ID  STATUS        CLUSTER  FREE   TOTAL  CPU FREE  VMS  REPORT     BLOCKED BY
            a   connected     default  3 GiB  4 GiB  3.5 vCPU  1    1.2 s ago  -
            b   disconnected  -        0 B    0 B    0 vCPU    0    never      not_connected, stale_report
        "#]].assert_eq(&list(&[host(), silent]));
    }

    #[test]
    fn one_host_shows_every_reason() {
        let blocker = Blocker {
            code: "cordoned".into(),
            message: "host a is cordoned".into(),
            host_id: "a".into(),
        };
        let host = Host { blockers: vec![blocker], strangers: vec!["pid 77".into()], ..host() };
        expect![[r#"
            id            a
            name          rack1-a
            status        connected
            cluster       default
            labels        rack=1
            agent         10.0.0.1:9097 0.1.0
            report        1.2 s ago
            memory total  4 GiB
              reserve     0 B
              observed    0 B
              committed   0 B
              reserved    0 B
              free        3 GiB
            CPU total     4 vCPU
              free        3.5 vCPU

            takes no placements now:
              cordoned: host a is cordoned

            VMs:
              NAME  HOST  POWER    GUEST  MEMORY  USED  CPU     MIGRATION
              web1  -     running  -      0 B     0 B   0 vCPU  -

            QEMU processes that are not vmferry's:
              pid 77
        "#]]
        .assert_eq(&show(&host));
    }

    #[test]
    fn an_empty_fleet_is_said_in_words() {
        expect![[r#"
            no hosts: none has reported to this planner
        "#]]
        .assert_eq(&list(&[]));
    }
}
