//! What keeps this host from running or receiving a VM, all of it at once.

use std::path::Path;

use vmferry_agent_core::capabilities;
use vmferry_agent_core::definition::{Definition, Sharing};
use vmferry_proto::v1;
use vmferry_types::{HostId, VmId};

use crate::agent::Agent;
use crate::error::CommandError;
use crate::probe::Probe;
use crate::{network, report};

/// Collects blockers of this host.
struct Blockers<'a> {
    host: &'a HostId,
    probe: &'a Probe,
    found: Vec<v1::Blocker>,
}

impl<'a> Blockers<'a> {
    fn of(agent: &'a Agent, found: Vec<v1::Blocker>) -> Self {
        Self { host: &agent.config.host_id, probe: &agent.probe, found }
    }

    fn add(&mut self, code: &str, message: String) {
        let host_id = self.host.to_string();
        self.found.push(v1::Blocker { code: code.to_owned(), message, host_id });
    }

    fn machine(&mut self, machine: &str) {
        if !self.probe.machines.contains(machine) {
            let version = &self.probe.qemu_version;
            self.add(
                "machine_type_missing",
                format!("QEMU {version} here has no machine type {machine}; upgrade QEMU or choose another type"),
            );
        }
    }

    fn cpu(&mut self, vm: &Definition) {
        let accelerator = vm.accelerator.label();
        if !self.probe.accelerators.iter().any(|found| found == accelerator) {
            self.add(
                "accelerator_missing",
                format!("{accelerator} cannot be used here; check /dev/{accelerator}"),
            );
        }
        let model = vm.cpu.split(',').next().unwrap_or_default();
        let known = &self.probe.cpu_models;
        if !known.is_empty() && !known.contains(model) {
            self.add("cpu_model_missing", format!("QEMU here has no CPU model {model}"));
        }
    }

    fn paths(&mut self, vm: &Definition) {
        let kernel =
            vm.kernel.iter().flat_map(|kernel| [Some(&kernel.image), kernel.initrd.as_ref()]);
        let paths = kernel.chain([vm.firmware.as_ref()]).flatten();
        for path in paths.filter(|path| !Path::new(path).exists()) {
            self.add("missing_path", format!("{path} is not on this host; put it there"));
        }
        for disk in vm.disks.iter().filter(|disk| !Path::new(&disk.path).exists()) {
            self.add(
                "disk_missing",
                format!("disk {} is not on this host: {}", disk.id, disk.path),
            );
        }
    }

    async fn bridges(&mut self, vm: &Definition) {
        if vm.nics.is_empty() {
            return;
        }
        match network::bridges().await {
            Ok(bridges) => {
                for nic in vm.nics.iter().filter(|nic| !bridges.contains(&nic.bridge)) {
                    self.add(
                        "missing_bridge",
                        format!("NIC {} needs the bridge {}; create it", nic.id, nic.bridge),
                    );
                }
            }
            Err(error) => self.add("missing_bridge", crate::error::chain(&error)),
        }
    }
}

/// Refuses where a QEMU of this VM runs here that the journal does not know.
pub(crate) async fn alone(agent: &Agent, vm: VmId) -> Result<(), CommandError> {
    if agent.stranger_of(vm).is_some() {
        // It was seen a while ago; it may have gone.
        report::look_for_strangers(agent).await;
    }
    match agent.stranger_of(vm) {
        None => Ok(()),
        Some(stranger) => Err(CommandError::wrong_state(format!(
            "another QEMU of this VM runs here, and it is not the agent's: {stranger}; end it first"
        ))),
    }
}

/// Returns what keeps a VM from being started here.
pub(crate) async fn startable(
    agent: &Agent,
    vm: &Definition,
    resolved_machine: &str,
) -> Vec<v1::Blocker> {
    let mut blockers = Blockers::of(agent, Vec::new());
    let machine = if resolved_machine.is_empty() {
        agent.probe.resolve_machine(&vm.machine)
    } else {
        resolved_machine.to_owned()
    };
    blockers.machine(&machine);
    blockers.cpu(vm);
    blockers.paths(vm);
    blockers.bridges(vm).await;
    blockers.found
}

/// Returns what keeps a VM from being booted here that was shut down, or stopped, elsewhere.
pub(crate) async fn bootable(
    agent: &Agent,
    vm: &Definition,
    resolved_machine: &str,
) -> Vec<v1::Blocker> {
    let mut blockers = Blockers::of(agent, startable(agent, vm, resolved_machine).await);
    for disk in vm.disks.iter().filter(|disk| disk.sharing == Sharing::Local) {
        blockers.add(
            "disk_not_shared",
            format!(
                "disk {} is not shared, and what {} is here is not it; put it on storage that both hosts have",
                disk.id, disk.path
            ),
        );
    }
    blockers.found
}

/// Returns what keeps a VM from being received here.
pub(crate) async fn receivable(
    agent: &Agent,
    vm: &Definition,
    source: &v1::SourceDescription,
) -> Vec<v1::Blocker> {
    if source.from_disks {
        return bootable(agent, vm, &source.resolved_machine).await;
    }
    let mut found = source.blockers.clone();
    found.extend(startable(agent, vm, &source.resolved_machine).await);
    let mut blockers = Blockers::of(agent, found);
    let ours = &agent.probe;
    if version(&source.qemu_version) > version(&ours.qemu_version) {
        blockers.add(
            "qemu_older",
            format!(
                "QEMU here is {}, the source's is {}; upgrade this host first",
                ours.qemu_version, source.qemu_version
            ),
        );
    }
    match (source.tls_host.is_empty(), agent.security.live()) {
        (false, Some(_)) | (true, None) => {}
        (true, Some(_)) => blockers.add(
            "tls_mismatch",
            "tls_host: the source sends plain text and this host takes none; give the source's agent a [tls] dir"
                .to_owned(),
        ),
        (false, None) => blockers.add(
            "tls_mismatch",
            format!(
                "tls_host: host {} sends over TLS only and this host has no certificate; give its agent a [tls] dir",
                source.tls_host
            ),
        ),
    }
    let offered = source.capabilities.iter().cloned().collect();
    for (end, set) in [("the source", &offered), ("this host", &ours.migration_capabilities)] {
        for missing in capabilities::missing(set) {
            blockers.add(
                "qemu_older",
                format!("the QEMU of {end} has no migration capability {missing}"),
            );
        }
    }
    blockers.found
}

/// Reads a version so that versions can be compared; what is no number counts as 0.
fn version(text: &str) -> Vec<u64> {
    text.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A QEMU that has one machine type, one CPU model, and no KVM.
    fn without_kvm() -> Probe {
        Probe {
            qemu_version: "10.0.2".to_owned(),
            accelerators: vec!["tcg".to_owned()],
            machines: ["pc-q35-10.0".to_owned()].into(),
            cpu_models: ["qemu64".to_owned()].into(),
            ..Probe::default()
        }
    }

    fn codes(accelerator: &str, cpu: &str, machine: &str) -> Vec<String> {
        let text = format!(
            "name = 'vm'\nuuid = '{}'\nmachine = 'q35'\naccel = '{accelerator}'\ncpu = '{cpu}'\nmemory = '64MiB'\n",
            uuid::Uuid::from_u128(1)
        );
        let vm = Definition::parse(&text).unwrap();
        let (host, probe) = ("h".parse::<HostId>().unwrap(), without_kvm());
        let mut blockers = Blockers { host: &host, probe: &probe, found: Vec::new() };
        blockers.machine(machine);
        blockers.cpu(&vm);
        assert!(blockers.found.iter().all(|found| found.host_id == "h"));
        blockers.found.into_iter().map(|found| found.code).collect()
    }

    #[test]
    fn what_qemu_here_has_is_no_blocker() {
        assert!(codes("tcg", "qemu64,-svm", "pc-q35-10.0").is_empty());
    }

    #[test]
    fn an_accelerator_that_is_not_here_is_named_beside_all_else() {
        assert_eq!(codes("kvm", "qemu64", "pc-q35-10.0"), ["accelerator_missing"]);
        assert_eq!(
            codes("kvm", "Nowhere-v1", "pc-q35-99.0"),
            ["machine_type_missing", "accelerator_missing", "cpu_model_missing"]
        );
    }

    #[test]
    fn a_version_is_compared_by_its_numbers() {
        assert!(version("10.0.2") > version("9.2.4"));
        assert!(version("10.0.2") == version("10.0.2"));
    }
}
