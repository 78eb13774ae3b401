//! What is going on.

use vmferry_proto::v1::{DoctorReply, Finding, HostCheck, VmCheck};

use super::migration;
use super::quantity::or_dash;
use super::table::{section, table};

/// Lays out what every host said, who runs each VM, and what contradicts.
pub(crate) fn show(reply: &DoctorReply) -> String {
    let host = |host: &HostCheck| {
        vec![host.id.clone(), host.answer.clone(), host.running.to_string(), or_dash(&host.note)]
    };
    let header = ["HOST", "ANSWER", "RUNNING", "NOTE"];
    let mut text = table(
        &header,
        reply.hosts.iter().map(host).collect(),
        "no hosts: none has reported to this planner",
    );
    let header = ["VM", "STORE SAYS", "ON", "RUNS ON", "GENERATION", "MIGRATION"];
    let rows = reply.vms.iter().map(vm).collect();
    text.push('\n');
    text += &table(&header, rows, "no VMs");
    text += &section("what both QEMUs said when ownership last moved:", &proofs(&reply.vms));
    text += &migration::halves(&reply.halves);
    let findings: Vec<String> = reply.findings.iter().map(finding).collect();
    text += &section("findings, the gravest first:", &findings.join("\n"));
    text.push('\n');
    text += if reply.well { "all is well\n" } else { "a human is needed\n" };
    text
}

fn vm(vm: &VmCheck) -> Vec<String> {
    let runs_on = match vm.runners.as_str() {
        "one" => vm.runs_on.clone(),
        "none" => "-".to_owned(),
        "several" => "SEVERAL HOSTS".to_owned(),
        other => other.to_owned(),
    };
    let migration = match vm.migration_phase.as_str() {
        "" => or_dash(&vm.migration_id),
        phase => format!("{} ({phase})", vm.migration_id),
    };
    vec![
        vm.name.clone(),
        vm.power.clone(),
        or_dash(&vm.host),
        runs_on,
        vm.generation.to_string(),
        migration,
    ]
}

fn proofs(vms: &[VmCheck]) -> String {
    vms.iter()
        .filter(|vm| !vm.proof_words.is_empty())
        .map(|vm| {
            format!("{} ({}, {}): {}", vm.name, vm.last_move, vm.last_move_at, vm.proof_words)
        })
        .collect::<Vec<_>>()
        .join("\n")
}

fn finding(finding: &Finding) -> String {
    format!("{} {}: {}", finding.severity, finding.code, finding.message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    fn check(name: &str, runners: &str, runs_on: &str) -> VmCheck {
        VmCheck {
            name: name.into(),
            host: "a".into(),
            power: "running".into(),
            generation: 2,
            runs_on: runs_on.into(),
            runners: runners.into(),
            ..VmCheck::default()
        }
    }

    #[test]
    fn one_look_tells_who_runs_what_and_what_contradicts() {
        let reply = DoctorReply {
            hosts: vec![
                HostCheck { id: "a".into(), answer: "answered".into(), running: 1, ..HostCheck::default() },
                HostCheck {
                    id: "b".into(),
                    answer: "silent".into(),
                    note: "no answer within 5s".into(),
                    ..HostCheck::default()
                },
            ],
            vms: vec![
                VmCheck {
                    last_move: "m-1".into(),
                    last_move_at: "2026-01-02T03:04:05Z".into(),
                    proof_words: "source b: QEMU 7 said completed and postmigrate; destination a: QEMU 9 said completed and paused".into(),
                    ..check("web1", "one", "a")
                },
                check("web2", "unknown", ""),
            ],
            findings: vec![Finding {
                severity: "error".into(),
                code: "host_silent".into(),
                message: "host b does not answer".into(),
                ..Finding::default()
            }],
            ..DoctorReply::default()
        };
        expect![[r#"
            HOST  ANSWER    RUNNING  NOTE
            a     answered  1        -
            b     silent    0        no answer within 5s

            VM    STORE SAYS  ON  RUNS ON  GENERATION  MIGRATION
            web1  running     a   a        2           -
            web2  running     a   unknown  2           -

            what both QEMUs said when ownership last moved:
              web1 (m-1, 2026-01-02T03:04:05Z): source b: QEMU 7 said completed and postmigrate; destination a: QEMU 9 said completed and paused

            findings, the gravest first:
              error host_silent: host b does not answer

            a human is needed
        "#]].assert_eq(&show(&reply));
    }

    #[test]
    fn an_empty_fleet_is_well() {
        let reply = DoctorReply { well: true, ..DoctorReply::default() };
        assert!(show(&reply).ends_with("no VMs\n\nall is well\n"), "{}", show(&reply));
    }
}
