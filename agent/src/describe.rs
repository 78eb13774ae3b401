//! A VM as its QEMU really is (rule R12).

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Value, json};
use vmferry_agent_core::compare::Shape;
use vmferry_agent_core::definition::{Definition, Sharing};
use vmferry_agent_core::{capabilities, journal::Part};
use vmferry_proto::v1;
use vmferry_qmp::RunState;
use vmferry_qmp::command::{
    QueryCpusFast, QueryMemorySizeSummary, QueryMigrate, QueryMigrateCapabilities,
    QueryNamedBlockNodes, QueryStatus,
};

use crate::agent::Agent;
use crate::error::CommandError;
use crate::live::Shared;
use crate::monitor::{COMMAND_DEADLINE, Monitor, MonitorError};
use crate::process::QemuProcess;

/// Properties of a device that must be equal on both ends.
const PROPERTIES: [&str; 8] = [
    "addr",
    "mac",
    "queue-size",
    "num-queues",
    "rx_queue_size",
    "tx_queue_size",
    "serial",
    "bootindex",
];

#[derive(Deserialize)]
struct Property {
    name: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct FeatureWord {
    #[serde(rename = "cpuid-input-eax")]
    eax: i64,
    #[serde(rename = "cpuid-input-ecx")]
    ecx: Option<i64>,
    #[serde(rename = "cpuid-register")]
    register: String,
    features: i64,
}

fn failed(error: &MonitorError) -> CommandError {
    CommandError::failed("read how this QEMU is built", error)
}

/// Reads what both ends must agree on from a QEMU process.
pub(crate) async fn shape(
    process: &QemuProcess,
    vm: &Definition,
    resolved_machine: &str,
) -> Result<Shape, CommandError> {
    let monitor = process.monitor();
    let (machine, cpus, memory, nodes, devices) = tokio::try_join!(
        get(monitor, "/machine", "type"),
        monitor.execute(QueryCpusFast {}),
        monitor.execute(QueryMemorySizeSummary {}),
        monitor.execute(QueryNamedBlockNodes { flat: Some(true) }),
        devices(monitor),
    )
    .map_err(|error| failed(&error))?;
    let machine = machine.as_ref().and_then(Value::as_str).map_or_else(
        || resolved_machine.to_owned(),
        |kind| kind.strip_suffix("-machine").unwrap_or(kind).to_owned(),
    );
    let first = cpus.first().map(|cpu| cpu.qom_path.clone()).unwrap_or_default();
    let (words, macs) = tokio::try_join!(get(monitor, &first, "feature-words"), macs(monitor, vm))
        .map_err(|error| failed(&error))?;
    let size_of = |id: &str| {
        let node = nodes.iter().find(|node| node.node_name == format!("{id}-format"));
        node.and_then(|node| node.image.as_ref()).map_or(0, |image| image.virtual_size)
    };
    Ok(Shape {
        machine,
        accelerator: vm.accelerator.label().to_owned(),
        cpu_model: vm.cpu.clone(),
        cpu_features: words.map(|words| features(&words)).unwrap_or_default(),
        vcpus: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        memory_bytes: memory.base_memory,
        disks: vm.disks.iter().map(|disk| (disk.id.clone(), size_of(&disk.id))).collect(),
        nics: macs,
        devices,
    })
}

async fn macs(
    monitor: &Monitor,
    vm: &Definition,
) -> Result<BTreeMap<String, String>, MonitorError> {
    let mut found = BTreeMap::new();
    for nic in &vm.nics {
        let mac = get(monitor, &format!("/machine/peripheral/{}", nic.id), "mac").await?;
        let mac = mac.as_ref().and_then(Value::as_str).unwrap_or_default().to_ascii_lowercase();
        found.insert(nic.id.clone(), mac);
    }
    Ok(found)
}

/// Returns one line a device that was put on the command line.
async fn devices(monitor: &Monitor) -> Result<BTreeSet<String>, MonitorError> {
    let mut lines = BTreeSet::new();
    for container in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let children = list(monitor, container).await?;
        let described = children.iter().filter_map(|child| {
            let kind = child.kind.strip_prefix("child<")?.strip_suffix('>')?;
            Some(device(monitor, format!("{container}/{}", child.name), kind.to_owned()))
        });
        lines.extend(futures::future::try_join_all(described).await?);
    }
    Ok(lines)
}

async fn device(monitor: &Monitor, path: String, kind: String) -> Result<String, MonitorError> {
    let has = list(monitor, &path).await?;
    let mut line = format!("{kind} {}", path.rsplit('/').next().unwrap_or_default());
    for name in PROPERTIES.iter().filter(|name| has.iter().any(|property| property.name == **name))
    {
        if let Some(value) = get(monitor, &path, name).await? {
            line.push_str(&format!(" {name}={value}"));
        }
    }
    Ok(line)
}

async fn list(monitor: &Monitor, path: &str) -> Result<Vec<Property>, MonitorError> {
    let value = monitor.execute_raw("qom-list", json!({ "path": path }), COMMAND_DEADLINE).await?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

/// Reads a property; `None` if there is no such thing.
async fn get(monitor: &Monitor, path: &str, property: &str) -> Result<Option<Value>, MonitorError> {
    let arguments = json!({ "path": path, "property": property });
    match monitor.execute_raw("qom-get", arguments, COMMAND_DEADLINE).await {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.refused().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Names every feature bit that the guest's CPU shows: `+1.ecx.0`, or `+7:0.ebx.5` with a sub-leaf.
fn features(words: &Value) -> BTreeSet<String> {
    let words: Vec<FeatureWord> = serde_json::from_value(words.clone()).unwrap_or_default();
    let mut found = BTreeSet::new();
    for word in words {
        let leaf = match word.ecx {
            Some(ecx) => format!("{:x}:{ecx:x}", word.eax),
            None => format!("{:x}", word.eax),
        };
        let register = word.register.to_ascii_lowercase();
        let bits = (0..32).filter(|bit| word.features >> bit & 1 == 1);
        found.extend(bits.map(|bit| format!("+{leaf}.{register}.{bit}")));
    }
    found
}

/// Returns the migration capabilities that a QEMU process offers; it may be older than what is
/// installed now.
pub(crate) async fn offered(monitor: &Monitor) -> Result<BTreeSet<String>, MonitorError> {
    let found = monitor.execute(QueryMigrateCapabilities {}).await?;
    Ok(found.into_iter().map(|found| found.capability).collect())
}

/// Reads a description's shape.
pub(crate) fn shape_of(source: &v1::SourceDescription) -> Shape {
    Shape {
        machine: source.resolved_machine.clone(),
        accelerator: source.accelerator.clone(),
        cpu_model: source.cpu_model.clone(),
        cpu_features: source.cpu_features.iter().cloned().collect(),
        vcpus: source.vcpus,
        memory_bytes: source.memory_bytes,
        disks: source.disks.iter().map(|disk| (disk.id.clone(), disk.virtual_bytes)).collect(),
        nics: source.nics.iter().map(|nic| (nic.id.clone(), nic.mac.clone())).collect(),
        devices: source.devices.iter().cloned().collect(),
    }
}

/// Describes a VM for a destination to compare with.
pub(crate) async fn source(
    agent: &Agent,
    shared: &Shared,
) -> Result<v1::SourceDescription, CommandError> {
    let record = shared.record.borrow().clone();
    let defined = match &record.part {
        Part::Running { defined, .. } => defined.clone(),
        Part::Absent | Part::Stopped { .. } | Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("the VM does not run here"));
        }
    };
    let vm = Definition::parse(&defined.text)
        .map_err(|error| CommandError::failed("read the VM's own definition", &error))?;
    let process = shared
        .process()
        .ok_or_else(|| CommandError::Unresponsive(shared.sight.borrow().trouble.clone()))?;
    let (shape, status, migrate, offered) = tokio::try_join!(
        shape(&process, &vm, &defined.resolved_machine),
        async { process.monitor().execute(QueryStatus {}).await.map_err(|error| failed(&error)) },
        async { process.monitor().execute(QueryMigrate {}).await.map_err(|error| failed(&error)) },
        async { offered(process.monitor()).await.map_err(|error| failed(&error)) },
    )?;
    let qemu_version = process.monitor().greeting().version.as_ref().map_or_else(
        || agent.probe.qemu_version.clone(),
        |version| format!("{}.{}.{}", version.major, version.minor, version.micro),
    );
    let blockers = blockers(&offered, &vm, &status.status, &migrate.blocked_reasons);
    Ok(v1::SourceDescription {
        vm_id: record.vm.to_string(),
        vm_name: vm.name.clone(),
        definition: defined.text,
        resolved_machine: shape.machine,
        accelerator: shape.accelerator,
        cpu_model: shape.cpu_model,
        qemu_version,
        vcpus: shape.vcpus,
        memory_bytes: shape.memory_bytes,
        disks: disks(&vm, &shape.disks),
        nics: vm
            .nics
            .iter()
            .map(|nic| v1::Nic {
                id: nic.id.clone(),
                mac: shape.nics.get(&nic.id).cloned().unwrap_or_default(),
                bridge: nic.bridge.clone(),
            })
            .collect(),
        devices: shape.devices.into_iter().collect(),
        capabilities: offered.into_iter().collect(),
        blockers,
        run_state: status.status.label().to_owned(),
        cpu_features: shape.cpu_features.into_iter().collect(),
        from_disks: false,
        tls_host: agent.tls_host(),
    })
}

fn disks(vm: &Definition, sizes: &BTreeMap<String, u64>) -> Vec<v1::Disk> {
    vm.disks
        .iter()
        .map(|disk| v1::Disk {
            id: disk.id.clone(),
            path: disk.path.clone(),
            format: disk.format.label().to_owned(),
            shared: disk.sharing == Sharing::Shared,
            virtual_bytes: sizes.get(&disk.id).copied().unwrap_or(0),
        })
        .collect()
}

/// Names everything that keeps this VM from moving live.
fn blockers(
    offered: &BTreeSet<String>,
    vm: &Definition,
    run_state: &RunState,
    blocked_reasons: &[String],
) -> Vec<v1::Blocker> {
    let blocker = |code: &str, message: String| v1::Blocker {
        code: code.to_owned(),
        message,
        host_id: String::new(),
    };
    let mut found: Vec<v1::Blocker> =
        blocked_reasons.iter().map(|reason| blocker("qemu_blocked", reason.clone())).collect();
    for disk in vm.disks.iter().filter(|disk| disk.sharing == Sharing::Local) {
        found.push(blocker(
            "disk_not_shared",
            format!(
                "disk {} ({}) is this host's own; mark it `shared = true` if every host sees it",
                disk.id, disk.path
            ),
        ));
    }
    if *run_state != RunState::Running {
        found.push(blocker("guest_paused", format!("the guest does not run: it is {run_state}")));
    }
    for missing in capabilities::missing(offered) {
        found.push(blocker(
            "qemu_older",
            format!("this QEMU has no migration capability {missing}; upgrade it"),
        ));
    }
    found
}
