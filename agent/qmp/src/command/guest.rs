//! The guest: what it does, its CPU, its memory.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::command;
use crate::Command;
use crate::migration::RunState;

/// Reads what the guest is doing.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryStatus {}
command!(QueryStatus, "query-status" -> StatusInfo);

/// What the guest is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusInfo {
    /// The run state.
    pub status: RunState,
    /// Whether the vCPUs run.
    pub running: bool,
}

/// Reads the VM's UUID.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryUuid {}
command!(QueryUuid, "query-uuid" -> Uuid);

/// A VM's UUID; all zero if none was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uuid {
    /// In lower case, with dashes.
    #[serde(rename = "UUID")]
    pub uuid: String,
}

/// Reads the VM's name.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryName {}
command!(QueryName, "query-name" -> Name);

/// A VM's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Name {
    /// From `-name`; `None` if none was given.
    pub name: Option<String>,
}

/// Lists the commands that this QEMU knows.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryCommands {}
command!(QueryCommands, "query-commands" -> Vec<CommandName>);

/// A command's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandName {
    /// As it is executed.
    pub name: String,
}

/// Reads the configured memory, which says nothing about its use.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMemorySizeSummary {}
command!(QueryMemorySizeSummary, "query-memory-size-summary" -> MemorySizeSummary);

/// The configured memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemorySizeSummary {
    /// From `-m`, in bytes.
    pub base_memory: u64,
    /// Plugged at run time, in bytes. `None` without hotplug support.
    #[serde(default)]
    pub plugged_memory: Option<u64>,
}

/// Reads the balloon.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryBalloon {}
command!(QueryBalloon, "query-balloon" -> BalloonInfo);

/// The balloon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonInfo {
    /// What the guest may use, in bytes.
    pub actual: u64,
}

/// Lists the vCPUs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryCpusFast {}
command!(QueryCpusFast, "query-cpus-fast" -> Vec<CpuFast>);

/// One vCPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CpuFast {
    /// Its number.
    pub cpu_index: i64,
    /// Its path in the object tree.
    pub qom_path: String,
    /// Its thread on the host.
    pub thread_id: i64,
    /// QEMU's word for the architecture.
    #[serde(default)]
    pub target: String,
}

/// Asks what a CPU model stands for on this host.
///
/// The generated reply type demands a field that x86 never sends.
#[derive(Clone, Debug, Serialize)]
pub struct QueryCpuModelExpansion {
    /// How far to expand.
    #[serde(rename = "type")]
    pub kind: CpuModelExpansionKind,
    /// The model.
    pub model: CpuModel,
}
command!(QueryCpuModelExpansion, "query-cpu-model-expansion" -> CpuModelExpansion);

/// How far to expand a CPU model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuModelExpansionKind {
    /// To a base model and its differences.
    Static,
    /// To every property.
    Full,
}

/// A CPU model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuModel {
    /// Its name.
    pub name: String,
    /// Its properties.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub props: Map<String, Value>,
}

/// What a CPU model stands for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CpuModelExpansion {
    /// The expanded model.
    pub model: CpuModel,
    /// Properties that QEMU wants to be rid of.
    #[serde(default)]
    pub deprecated_props: Vec<String>,
}
