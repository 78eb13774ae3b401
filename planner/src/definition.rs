//! What the planner needs to know of a VM's definition.
//!
//! The agent that starts a VM checks the whole text. The planner reads only what decides where the
//! VM may go, keeps the text as it came, and hands it on.

use std::collections::BTreeMap;

use serde::Deserialize;
use vmferry_types::overhead::{Execution, expected};
use vmferry_types::{Bytes, HostId, MilliCpu, VmId};

/// The share of a definition that placement reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// The VM's name.
    pub name: String,
    /// The VM's id.
    pub id: VmId,
    /// Memory with its hotplug ceiling and QEMU's overhead.
    pub memory: Bytes,
    /// vCPUs.
    pub cpu: MilliCpu,
    /// The machine type as asked for.
    pub machine: String,
    /// The accelerator.
    pub accelerator: String,
    /// The CPU model with its flags.
    pub cpu_model: String,
    /// The only host that it may run on.
    pub pin: Option<HostId>,
    /// Labels that its host must carry.
    pub required_labels: BTreeMap<String, String>,
    /// Bridges that its NICs join.
    pub bridges: Vec<String>,
    /// Disks that all of its hosts have to see.
    pub shared_paths: Vec<String>,
}

/// Says what is wrong with a definition, by the field's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the definition's {field} {problem}")]
pub struct DefinitionError {
    /// The field; `toml` if the text is none.
    pub field: &'static str,
    /// What is wrong and what would be right.
    pub problem: String,
}

#[derive(Deserialize)]
struct Raw {
    name: Option<String>,
    uuid: Option<String>,
    machine: Option<String>,
    accel: Option<String>,
    cpu: Option<String>,
    vcpus: Option<u32>,
    memory: Option<String>,
    max_memory: Option<String>,
    pin: Option<String>,
    #[serde(default)]
    required_labels: BTreeMap<String, String>,
    #[serde(default)]
    nic: Vec<RawNic>,
    #[serde(default)]
    disk: Vec<RawDisk>,
}

#[derive(Deserialize)]
struct RawDisk {
    path: Option<String>,
    #[serde(default)]
    shared: bool,
}

#[derive(Deserialize)]
struct RawNic {
    bridge: Option<String>,
}

fn wrong(field: &'static str, problem: impl Into<String>) -> DefinitionError {
    DefinitionError { field, problem: problem.into() }
}

impl Outline {
    /// Reads the outline of a definition.
    ///
    /// # Errors
    ///
    /// Fails at the first field that placement needs and cannot use.
    pub fn read(text: &str) -> Result<Self, DefinitionError> {
        let raw: Raw =
            toml::from_str(text).map_err(|error| wrong("toml", error.message().to_owned()))?;
        let missing = |field| move || wrong(field, "is missing");
        let name = raw.name.ok_or_else(missing("name"))?;
        check_name(&name)?;
        let id = raw.uuid.ok_or_else(missing("uuid"))?;
        let id: VmId = id.parse().map_err(|_| wrong("uuid", format!("`{id}` is not a UUID")))?;
        if id.as_u128() == 0 {
            return Err(wrong("uuid", "must not be all zero"));
        }
        let memory = size("memory", &raw.memory.ok_or_else(missing("memory"))?)?;
        let ceiling = match &raw.max_memory {
            Some(text) => size("max_memory", text)?.max(memory),
            None => memory,
        };
        let vcpus = raw.vcpus.unwrap_or(1);
        if vcpus == 0 {
            return Err(wrong("vcpus", "must be 1 or more"));
        }
        let pin = raw
            .pin
            .map(|pin| pin.parse().map_err(|_| wrong("pin", format!("`{pin}` is not a host id"))))
            .transpose()?;
        let accelerator = raw.accel.unwrap_or_else(|| "kvm".to_owned());
        let overhead = expected(ceiling, Execution::of_accelerator(&accelerator));
        Ok(Self {
            name,
            id,
            memory: ceiling.plus(overhead),
            cpu: MilliCpu(u64::from(vcpus) * 1000),
            machine: raw.machine.unwrap_or_default(),
            accelerator,
            cpu_model: raw.cpu.unwrap_or_else(|| "qemu64".to_owned()),
            pin,
            required_labels: raw.required_labels,
            bridges: raw.nic.into_iter().filter_map(|nic| nic.bridge).collect(),
            shared_paths: raw
                .disk
                .into_iter()
                .filter(|disk| disk.shared)
                .filter_map(|disk| disk.path)
                .collect(),
        })
    }
}

/// Gives a definition without a UUID one of its own, so that the VM has an identity for life.
///
/// # Errors
///
/// Fails if the text is not TOML.
pub fn with_identity(text: &str, fresh: VmId) -> Result<String, DefinitionError> {
    let raw: Raw =
        toml::from_str(text).map_err(|error| wrong("toml", error.message().to_owned()))?;
    Ok(match raw.uuid {
        Some(_) => text.to_owned(),
        // The first line is outside of any table.
        None => format!("uuid = \"{fresh}\"\n{text}"),
    })
}

/// Returns the name in a definition that has no UUID; `None` if it has one, or is no definition.
#[must_use]
pub fn name_without_identity(text: &str) -> Option<String> {
    let raw: Raw = toml::from_str(text).ok()?;
    if raw.uuid.is_some() { None } else { raw.name }
}

fn check_name(name: &str) -> Result<(), DefinitionError> {
    name.parse::<HostId>().map(|_| ()).map_err(|_| {
        wrong("name", "must be 1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or digit")
    })
}

fn size(field: &'static str, text: &str) -> Result<Bytes, DefinitionError> {
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) if size.as_u64() >= 1 << 20 => Ok(Bytes(size.as_u64())),
        Ok(_) => Err(wrong(field, format!("`{text}` is below 1MiB"))),
        Err(_) => {
            Err(wrong(field, format!("`{text}` is not a size; write for example \"512MiB\"")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = r#"
        name = "web1"
        uuid = "01234567-89ab-cdef-0123-456789abcdef"
        machine = "q35"
        memory = "512MiB"
        max_memory = "1GiB"
        vcpus = 2
        pin = "a"
        required_labels = { rack = "1" }
        [[nic]]
        bridge = "br0"
    "#;

    #[test]
    fn the_outline_counts_the_ceiling_and_the_overhead() {
        let outline = Outline::read(WEB).unwrap();
        assert_eq!(outline.memory, Bytes((1 << 30) + (64 << 20) + (1 << 22)));
        assert_eq!(outline.cpu, MilliCpu(2000));
        assert_eq!(outline.bridges, ["br0"]);
        assert_eq!(outline.pin, Some("a".parse().unwrap()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (from, to, field) in [
            ("name = \"web1\"", "name = \"Web 1\"", "name"),
            ("512MiB", "lots", "memory"),
            ("512MiB", "1KiB", "memory"),
            ("vcpus = 2", "vcpus = 0", "vcpus"),
            ("01234567-", "x", "uuid"),
            ("[[nic]]", "[[nic", "toml"),
        ] {
            assert_eq!(Outline::read(&WEB.replace(from, to)).unwrap_err().field, field, "{to}");
        }
    }

    #[test]
    fn a_definition_without_identity_is_given_one() {
        let bare: String =
            WEB.lines().filter(|line| !line.contains("uuid")).collect::<Vec<_>>().join("\n");
        let fresh = VmId::from_u128(7);
        let text = with_identity(&bare, fresh).unwrap();
        assert_eq!(Outline::read(&text).unwrap().id, fresh);
        assert_eq!(with_identity(WEB, fresh).unwrap(), WEB);
    }
}
