//! What keeps this host from running or receiving a VM, all of it at once.

use std::path::Path;

use vmferry_agent_core::capabilities;
use vmferry_agent_core::definition::Definition;
use vmferry_proto::v1;
use vmferry_types::VmId;

use crate::agent::Agent;
use crate::error::CommandError;
use crate::{network, report};

/// Collects blockers of this host.
struct Blockers<'a> {
    agent: &'a Agent,
    found: Vec<v1::Blocker>,
}

impl Blockers<'_> {
    fn add(&mut self, code: &str, message: String) {
        let host_id = self.agent.config.host_id.to_string();
        self.found.push(v1::Blocker { code: code.to_owned(), message, host_id });
    }

    fn machine(&mut self, machine: &str) {
        if !self.agent.probe.machines.contains(machine) {
            let version = &self.agent.probe.qemu_version;
            self.add(
                "machine_type_missing",
                format!("QEMU {version} here has no machine type {machine}; upgrade QEMU or choose another type"),
            );
        }
    }

    fn cpu(&mut self, vm: &Definition) {
        let accelerator = vm.accelerator.label();
        if !self.agent.probe.accelerators.iter().any(|found| found == accelerator) {
            self.add(
                "accelerator_missing",
                format!("{accelerator} cannot be used here; check /dev/{accelerator}"),
            );
        }
        let model = vm.cpu.split(',').next().unwrap_or_default();
        let known = &self.agent.probe.cpu_models;
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
    let mut blockers = Blockers { agent, found: Vec::new() };
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

/// Returns what keeps a VM from being received here.
pub(crate) async fn receivable(
    agent: &Agent,
    vm: &Definition,
    source: &v1::SourceDescription,
) -> Vec<v1::Blocker> {
    let mut found = source.blockers.clone();
    found.extend(startable(agent, vm, &source.resolved_machine).await);
    let mut blockers = Blockers { agent, found };
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
