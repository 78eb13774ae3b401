//! The published form of a case.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) input: Input,
    pub(crate) expected: Expected,
    pub(crate) derived: BTreeMap<String, Derived>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Input {
    pub(crate) source_host: String,
    pub(crate) max_report_age_s: u64,
    pub(crate) policy: PolicyInput,
    pub(crate) hosts: Vec<HostInput>,
    pub(crate) workloads: Vec<WorkloadInput>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StrategyInput {
    LiveOnly,
    PreferLive,
    ColdOnly,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "the published input has them")]
pub(crate) struct PolicyInput {
    pub(crate) strategy: StrategyInput,
    #[serde(rename = "max_parallel")]
    pub(crate) _max_parallel: u32,
    pub(crate) reserve_cpu_percent: u8,
    pub(crate) reserve_memory_percent: u8,
    pub(crate) allow_cross_cluster: bool,
    pub(crate) allow_pinned: bool,
    #[serde(rename = "dry_run")]
    pub(crate) _dry_run: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Connected,
    Disconnected,
    Maintenance,
    Draining,
    Retired,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "the published input has them")]
pub(crate) struct HostInput {
    pub(crate) id: String,
    pub(crate) cluster: String,
    pub(crate) status: Status,
    pub(crate) cordoned: bool,
    pub(crate) readable: bool,
    pub(crate) report_age_s: u64,
    pub(crate) total_memory_mib: u64,
    pub(crate) available_memory_mib: u64,
    pub(crate) total_cpu_milli: u64,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) vms: Vec<VmInput>,
    pub(crate) inbound_reservations: Vec<ReservationInput>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmInput {
    pub(crate) id: String,
    pub(crate) configured_memory_mib: u64,
    pub(crate) observed_memory_mib: u64,
    pub(crate) cpu_milli: u64,
    #[serde(rename = "name")]
    pub(crate) _name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReservationInput {
    pub(crate) vm_id: String,
    pub(crate) memory_mib: u64,
    pub(crate) cpu_milli: u64,
    #[serde(rename = "phase")]
    pub(crate) _phase: Option<String>,
    #[serde(rename = "migration_id")]
    pub(crate) _migration_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkloadInput {
    pub(crate) id: String,
    pub(crate) host: Option<String>,
    pub(crate) configured_memory_mib: u64,
    pub(crate) observed_memory_mib: u64,
    pub(crate) cpu_milli: u64,
    pub(crate) live_migratable: bool,
    pub(crate) not_live_migratable_reason: Option<String>,
    pub(crate) pinned_host: Option<String>,
    pub(crate) required_labels: BTreeMap<String, String>,
    #[serde(rename = "name")]
    pub(crate) _name: Option<String>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expected {
    pub(crate) plan_state: String,
    pub(crate) assignments_in_order: Vec<ExpectedAssignment>,
    pub(crate) blockers: Vec<ExpectedBlocker>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpectedAssignment {
    pub(crate) vm: String,
    pub(crate) target: String,
    pub(crate) mode: String,
}

#[derive(Debug, Deserialize, PartialEq)]
pub(crate) struct ExpectedBlocker {
    pub(crate) vm: String,
    pub(crate) code: String,
}

#[derive(Deserialize)]
pub(crate) struct Derived {
    pub(crate) free_mib_after: Option<u64>,
    pub(crate) free_cpu_after: Option<u64>,
}

#[derive(Deserialize)]
pub(crate) struct Admission {
    pub(crate) policy: AdmissionPolicy,
    pub(crate) hosts: Vec<HostInput>,
    pub(crate) request: AdmissionRequest,
    pub(crate) expected_steps: Vec<AdmissionStep>,
}

#[derive(Deserialize)]
pub(crate) struct AdmissionPolicy {
    pub(crate) reserve_memory_percent: u8,
    pub(crate) reserve_cpu_percent: u8,
    pub(crate) max_report_age_s: u64,
    pub(crate) max_capacity_wait_s: u64,
    pub(crate) cluster: String,
}

#[derive(Deserialize)]
pub(crate) struct AdmissionRequest {
    pub(crate) memory_mib: u64,
    pub(crate) cpu_milli: u64,
    pub(crate) received_at: String,
}

#[derive(Deserialize)]
pub(crate) struct AdmissionStep {
    pub(crate) at: String,
    pub(crate) result: String,
    pub(crate) reason: String,
    pub(crate) capacity_blocked_since: Option<String>,
}
