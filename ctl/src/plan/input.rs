//! An inventory as people and programs write it.
//!
//! Every field is required unless it says otherwise, and a field that is not known is refused: a
//! word that was misspelled must not turn into a plan that is silently another one.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use vmferry_planner_core::lifecycle::Policy;
use vmferry_types::Bytes;

/// Why a text is no inventory.
#[derive(Debug, thiserror::Error)]
#[error("{place}{problem}")]
pub(crate) struct Invalid {
    /// `hosts[2].id: `, or nothing where it is the whole text.
    place: String,
    problem: String,
}

impl Invalid {
    fn at(place: &str, problem: impl Into<String>) -> Self {
        Self { place: format!("{place}: "), problem: problem.into() }
    }
}

/// A host that is to be emptied, and the fleet around it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Input {
    #[serde(deserialize_with = "name")]
    pub(crate) source_host: String,
    pub(crate) max_report_age_s: u64,
    pub(crate) policy: Policy,
    pub(crate) hosts: Vec<Host>,
    pub(crate) workloads: Vec<Workload>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Connected,
    Disconnected,
    Maintenance,
    Draining,
    Retired,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "the published form has them")]
pub(crate) struct Host {
    #[serde(deserialize_with = "name")]
    pub(crate) id: String,
    #[serde(deserialize_with = "name")]
    pub(crate) cluster: String,
    pub(crate) status: Status,
    pub(crate) cordoned: bool,
    pub(crate) readable: bool,
    pub(crate) report_age_s: u64,
    #[serde(deserialize_with = "mib")]
    pub(crate) total_memory_mib: Bytes,
    #[serde(deserialize_with = "mib")]
    pub(crate) available_memory_mib: Bytes,
    pub(crate) total_cpu_milli: u64,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) vms: Vec<Vm>,
    pub(crate) inbound_reservations: Vec<Reservation>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Vm {
    #[serde(deserialize_with = "name")]
    pub(crate) id: String,
    #[serde(deserialize_with = "mib")]
    pub(crate) configured_memory_mib: Bytes,
    #[serde(deserialize_with = "mib")]
    pub(crate) observed_memory_mib: Bytes,
    pub(crate) cpu_milli: u64,
    /// Optional.
    #[serde(default, rename = "name")]
    pub(crate) _name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reservation {
    #[serde(deserialize_with = "name")]
    pub(crate) vm_id: String,
    #[serde(deserialize_with = "mib")]
    pub(crate) memory_mib: Bytes,
    pub(crate) cpu_milli: u64,
    #[serde(rename = "phase")]
    pub(crate) _phase: String,
    #[serde(rename = "migration_id")]
    pub(crate) _migration_id: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Workload {
    #[serde(deserialize_with = "name")]
    pub(crate) id: String,
    /// Null if it is nowhere.
    #[serde(deserialize_with = "nullable")]
    pub(crate) host: Option<String>,
    #[serde(deserialize_with = "mib")]
    pub(crate) configured_memory_mib: Bytes,
    #[serde(deserialize_with = "mib")]
    pub(crate) observed_memory_mib: Bytes,
    pub(crate) cpu_milli: u64,
    pub(crate) live_migratable: bool,
    /// Null if it is.
    #[serde(deserialize_with = "nullable")]
    pub(crate) not_live_migratable_reason: Option<String>,
    /// Null if it may be anywhere.
    #[serde(deserialize_with = "nullable")]
    pub(crate) pinned_host: Option<String>,
    pub(crate) required_labels: BTreeMap<String, String>,
    /// Optional.
    #[serde(default)]
    pub(crate) name: Option<String>,
}

/// Reads a text that is not empty.
fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.is_empty() { Err(D::Error::custom("is empty")) } else { Ok(text) }
}

/// Reads a text or null. Unlike an option that serde reads by itself, it has to be there.
fn nullable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Option::<String>::deserialize(deserializer)
}

/// Reads mebibytes.
fn mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    let mib = u64::deserialize(deserializer)?;
    let bytes = mib
        .checked_mul(1 << 20)
        .ok_or_else(|| D::Error::custom(format!("{mib} MiB is more memory than can be counted")))?;
    Ok(Bytes(bytes))
}

/// Reads an inventory.
pub(crate) fn parse(text: &[u8]) -> Result<Input, Invalid> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let input: Input = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let place = if path == "." { String::new() } else { format!("{path}: ") };
        Invalid { place, problem: error.inner().to_string() }
    })?;
    reader.end().map_err(|error| Invalid { place: String::new(), problem: error.to_string() })?;
    check(&input)?;
    Ok(input)
}

/// Refuses what is named twice: which of both was meant, only its writer knows.
fn check(input: &Input) -> Result<(), Invalid> {
    let twice = "is there twice";
    let mut hosts = BTreeSet::new();
    for (at, host) in input.hosts.iter().enumerate() {
        if !hosts.insert(&host.id) {
            return Err(Invalid::at(&format!("hosts[{at}].id"), format!("{} {twice}", host.id)));
        }
        let mut vms = BTreeSet::new();
        for (vm_at, vm) in host.vms.iter().enumerate() {
            if !vms.insert(&vm.id) {
                let place = format!("hosts[{at}].vms[{vm_at}].id");
                return Err(Invalid::at(&place, format!("{} {twice}", vm.id)));
            }
        }
    }
    let mut workloads = BTreeSet::new();
    for (at, workload) in input.workloads.iter().enumerate() {
        if !workloads.insert(&workload.id) {
            let place = format!("workloads[{at}].id");
            return Err(Invalid::at(&place, format!("{} {twice}", workload.id)));
        }
    }
    Ok(())
}
