//! VMs.

use vmferry_proto::v1::{DeleteVmReply, NetworkState, Vm};

use super::quantity::{bytes, cpus, or_dash, quoted_or};
use super::table::{fields, section, table};

/// Lays out VMs.
pub(crate) fn list(vms: &[Vm]) -> String {
    let header = ["NAME", "HOST", "POWER", "GUEST", "MEMORY", "USED", "CPU", "MIGRATION"];
    let row = |vm: &Vm| {
        vec![
            vm.name.clone(),
            or_dash(&vm.host),
            or_dash(&vm.power),
            or_dash(&vm.run_state),
            bytes(vm.memory_bytes),
            bytes(vm.observed_memory_bytes),
            cpus(vm.cpu_milli),
            migration(vm),
        ]
    };
    table(&header, vms.iter().map(row).collect(), "no VMs")
}

/// Says in one line how a VM is.
pub(crate) fn summary(vm: &Vm) -> String {
    let on = if vm.host.is_empty() { String::new() } else { format!(" on {}", vm.host) };
    let error = if vm.error.is_empty() { String::new() } else { format!("  {}", vm.error) };
    if let Some(queued) = &vm.queued {
        return format!("{}  waits for room: {}", vm.name, queued.words);
    }
    format!("{}  {}{on}{error}", vm.name, or_dash(&vm.power))
}

/// Lays out one VM.
pub(crate) fn show(vm: &Vm) -> String {
    let mut text = fields(&[
        ("name", vm.name.clone()),
        ("id", vm.id.clone()),
        ("host", vm.host.clone()),
        ("power", vm.power.clone()),
        ("guest", vm.run_state.clone()),
        ("error", vm.error.clone()),
        ("waits", vm.queued.as_ref().map(|of| of.words.clone()).unwrap_or_default()),
        ("memory", bytes(vm.memory_bytes)),
        ("  used", bytes(vm.observed_memory_bytes)),
        ("CPU", cpus(vm.cpu_milli)),
        ("machine", vm.resolved_machine.clone()),
        ("migration", if vm.migration_id.is_empty() { String::new() } else { migration(vm) }),
        ("generation", vm.generation.to_string()),
        ("claim", vm.claim.to_string()),
    ]);
    text += &section("definition:", vm.definition.trim_end());
    text
}

fn migration(vm: &Vm) -> String {
    match (vm.migration_id.as_str(), vm.migration_phase.as_str()) {
        ("", _) => "-".to_owned(),
        (id, "") => id.to_owned(),
        (id, phase) => format!("{id} ({phase})"),
    }
}

/// Says that a VM is forgotten, and what is left of it.
pub(crate) fn deleted(reply: &DeleteVmReply) -> String {
    let left = if reply.left.is_empty() { String::new() } else { format!("\n{}", reply.left) };
    format!("{} is deleted; its disks are where they were{left}", reply.name)
}

/// Lays out the ports of a VM.
pub(crate) fn network(state: &NetworkState) -> String {
    let header = ["HOST", "SIDE", "NIC", "MAC", "BRIDGE", "TAP", "MTU", "STATE", "NOTE"];
    let mut rows = Vec::new();
    for host in &state.hosts {
        let ports = host.ports.as_ref().map(|ports| ports.ports.as_slice()).unwrap_or_default();
        let row = |cells: [String; 7]| {
            let mut row = vec![host.host.clone(), host.side.clone()];
            row.extend(cells);
            row
        };
        if ports.is_empty() {
            let note = quoted_or(&host.error, "it has no ports there");
            let dash = || "-".to_owned();
            rows.push(row([dash(), dash(), dash(), dash(), dash(), dash(), note]));
        }
        rows.extend(ports.iter().map(|port| {
            row([
                port.nic.clone(),
                port.mac.clone(),
                or_dash(&port.bridge),
                or_dash(&port.tap),
                port.mtu.to_string(),
                port.state.clone(),
                or_dash(&port.trouble),
            ])
        }));
    }
    table(&header, rows, "nothing is known of its network")
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    #[test]
    fn a_list_shows_where_each_runs_and_moves() {
        let moving = Vm {
            name: "web1".into(),
            host: "a".into(),
            power: "running".into(),
            run_state: "running".into(),
            memory_bytes: 512 << 20,
            observed_memory_bytes: 300 << 20,
            cpu_milli: 1000,
            migration_id: "m-1".into(),
            migration_phase: "admitted".into(),
            ..Vm::default()
        };
        let stopped = Vm { name: "db1".into(), power: "stopped".into(), ..Vm::default() };
        expect![[r#"
            NAME  HOST  POWER    GUEST    MEMORY   USED     CPU     MIGRATION
            web1  a     running  running  512 MiB  300 MiB  1 vCPU  m-1 (admitted)
            db1   -     stopped  -        0 B      0 B      0 vCPU  -
        "#]]
        .assert_eq(&list(&[moving, stopped]));
    }

    #[test]
    fn one_line_says_where_it_runs_or_why_not() {
        let running =
            Vm { name: "web1".into(), host: "a".into(), power: "running".into(), ..Vm::default() };
        assert_eq!(summary(&running), "web1  running on a");
        let failed = Vm { power: "stopped".into(), error: "no room".into(), ..Vm::default() };
        assert_eq!(summary(&Vm { name: "web1".into(), ..failed }), "web1  stopped  no room");
    }

    #[test]
    fn a_lost_vm_shows_the_real_cause() {
        let vm = Vm {
            name: "web1".into(),
            id: "u-1".into(),
            power: "lost".into(),
            error: "QEMU on a ended: signal 9".into(),
            generation: 3,
            claim: 7,
            definition: "name = \"web1\"\nvcpus = 1\n".into(),
            ..Vm::default()
        };
        expect![[r#"
            name        web1
            id          u-1
            power       lost
            error       QEMU on a ended: signal 9
            memory      0 B
              used      0 B
            CPU         0 vCPU
            generation  3
            claim       7

            definition:
              name = "web1"
              vcpus = 1
        "#]]
        .assert_eq(&show(&vm));
    }
}
