//! What the core says of an inventory, in the names of its file.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use vmferry_planner_core::capacity::{Figures, figures};
use vmferry_planner_core::fleet::Host;
use vmferry_planner_core::maintenance::{Assignment, Blocked, Code, Plan};
use vmferry_planner_core::placement::{Reason, Rejected};
use vmferry_types::{Bytes, HostId, MilliCpu, VmId};

use super::input::Input;
use super::inventory::{Asked, Names};

/// The whole answer. Memory in MiB, rounded down; CPU in thousandths of a vCPU.
#[derive(Debug, Serialize)]
pub(crate) struct Answer {
    pub(crate) plan_state: &'static str,
    pub(crate) source_host: String,
    /// In the order in which they were placed.
    pub(crate) assignments: Vec<Placed>,
    /// In the order of the sorted workloads.
    pub(crate) blockers: Vec<Unplaced>,
    /// Every host, by id.
    pub(crate) hosts: Vec<HostFigures>,
    /// What would surprise a reader: hosts that cannot be counted on.
    pub(crate) warnings: Vec<String>,
}

/// A VM that has a place.
#[derive(Debug, Serialize)]
pub(crate) struct Placed {
    pub(crate) vm: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) target: String,
    pub(crate) mode: &'static str,
    pub(crate) memory_mib: u64,
    pub(crate) cpu_milli: u64,
    /// What is left on the target after it and all before it.
    pub(crate) left_memory_mib: u64,
    pub(crate) left_cpu_milli: u64,
    /// How many hosts could have taken it.
    pub(crate) candidates: usize,
    /// Hosts that take placements, and could not take this VM.
    pub(crate) ruled_out: Vec<RuledOut>,
}

/// A VM that has none.
#[derive(Debug, Serialize)]
pub(crate) struct Unplaced {
    pub(crate) vm: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) memory_mib: u64,
    pub(crate) cpu_milli: u64,
    /// Every host with everything that ruled it out; empty where none was looked at.
    pub(crate) ruled_out: Vec<RuledOut>,
}

/// A host and all that ruled it out.
#[derive(Debug, Serialize)]
pub(crate) struct RuledOut {
    pub(crate) host: String,
    pub(crate) reasons: Vec<Why>,
}

/// One reason.
#[derive(Debug, Serialize)]
pub(crate) struct Why {
    pub(crate) code: &'static str,
    pub(crate) message: String,
}

/// The arithmetic of one host.
#[derive(Debug, Serialize)]
pub(crate) struct HostFigures {
    pub(crate) host: String,
    /// Null where it cannot be read.
    pub(crate) memory_mib: Option<Memory>,
    pub(crate) cpu_milli: Option<Cpu>,
    /// Why it takes nothing. Empty if it does, and for the host that is emptied.
    pub(crate) closed: Vec<Why>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) reserve: u64,
    pub(crate) observed: u64,
    pub(crate) committed: u64,
    pub(crate) free: u64,
    /// Free once the plan is carried out.
    pub(crate) left: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Cpu {
    pub(crate) usable: u64,
    pub(crate) committed: u64,
    pub(crate) free: u64,
    /// Free once the plan is carried out.
    pub(crate) left: u64,
}

const fn mib(bytes: Bytes) -> u64 {
    bytes.value() >> 20
}

/// Puts a plan into the names of its file.
pub(super) fn of(input: &Input, asked: &Asked, plan: &Plan) -> Answer {
    let closed = plan.closed.iter().map(|closed| (&closed.host, closed)).collect();
    let hosts: Vec<HostFigures> =
        asked.fleet.hosts.values().map(|host| host_figures((asked, plan), host, &closed)).collect();
    let warnings = hosts
        .iter()
        .filter(|host| host.memory_mib.is_none())
        .map(|host| {
            let why: Vec<&str> = host.closed.iter().map(|why| why.message.as_str()).collect();
            format!("host {}: {}", host.host, why.join(", "))
        })
        .collect();
    Answer {
        plan_state: plan.state().label(),
        source_host: input.source_host.clone(),
        assignments: plan.assignments.iter().map(|one| placed(input, asked, plan, one)).collect(),
        blockers: plan.blocked.iter().map(|one| unplaced(input, asked, one)).collect(),
        hosts,
        warnings,
    }
}

/// Returns the display name that the file gives a VM.
fn display_name(input: &Input, vm: &str) -> Option<String> {
    input.workloads.iter().find(|one| one.id == vm).and_then(|one| one.name.clone())
}

fn demand(asked: &Asked, vm: VmId) -> (u64, u64) {
    let found = asked.workloads.iter().find(|one| one.vm == vm);
    found.map_or((0, 0), |one| (mib(one.demand.memory), one.demand.cpu.value()))
}

fn placed(input: &Input, asked: &Asked, plan: &Plan, one: &Assignment) -> Placed {
    let vm = asked.names.vm(one.vm).to_owned();
    let (memory_mib, cpu_milli) = demand(asked, one.vm);
    let targets = asked.fleet.hosts.len().saturating_sub(1);
    // Why a host takes nothing at all stands with the host.
    let open = |rejected: &&Arc<Rejected>| plan.left.contains_key(&rejected.host);
    Placed {
        name: display_name(input, &vm),
        vm,
        target: asked.names.host(&one.destination).to_owned(),
        mode: one.mode.label(),
        memory_mib,
        cpu_milli,
        left_memory_mib: mib(one.left.memory),
        left_cpu_milli: one.left.cpu.value(),
        candidates: targets.saturating_sub(one.rejected.len()),
        ruled_out: ruled_out(&asked.names, one.rejected.iter().filter(open)),
    }
}

fn unplaced(input: &Input, asked: &Asked, blocked: &Blocked) -> Unplaced {
    let vm = asked.names.vm(blocked.vm).to_owned();
    let (memory_mib, cpu_milli) = demand(asked, blocked.vm);
    Unplaced {
        name: display_name(input, &vm),
        vm,
        code: blocked.code.label(),
        message: message(asked, &blocked.code),
        memory_mib,
        cpu_milli,
        ruled_out: ruled_out(&asked.names, blocked.rejected.iter()),
    }
}

/// Says what a code means; the one that names a host by the name that the file has for it.
fn message(asked: &Asked, code: &Code) -> String {
    let Code::PinnedTargetUnavailable { pin } = code else { return code.to_string() };
    let name = asked.names.host(pin);
    let problem = if asked.fleet.hosts.contains_key(pin) {
        "takes no placements or lacks what the VM needs"
    } else {
        "is not in the file"
    };
    format!("host {name}, which the VM is pinned to, {problem}")
}

fn ruled_out<'a>(
    names: &Names,
    rejected: impl Iterator<Item = &'a Arc<Rejected>>,
) -> Vec<RuledOut> {
    rejected
        .map(|one| RuledOut {
            host: names.host(&one.host).to_owned(),
            reasons: one.reasons.iter().map(|reason| why(names, reason)).collect(),
        })
        .collect()
}

/// Returns a reason; the one that names a host by the name that the file has for it.
fn why(names: &Names, reason: &Reason) -> Why {
    let message = if let Reason::Pinned { to } = reason {
        format!("the VM is pinned to host {}", names.host(to))
    } else {
        reason.to_string()
    };
    Why { code: reason.code(), message }
}

fn host_figures(
    (asked, plan): (&Asked, &Plan),
    host: &Host,
    closed: &BTreeMap<&HostId, &Arc<Rejected>>,
) -> HostFigures {
    let left = plan.left.get(&host.id).map(|left| (left.memory, left.cpu));
    let figures = figures(host, &asked.fleet.policy).ok();
    let closed = closed.get(&host.id);
    HostFigures {
        host: asked.names.host(&host.id).to_owned(),
        memory_mib: figures.map(|figures| memory(&figures, left)),
        cpu_milli: figures.map(|figures| cpu(&figures, left)),
        closed: closed
            .map(|closed| closed.reasons.iter().map(|one| why(&asked.names, one)).collect())
            .unwrap_or_default(),
    }
}

fn memory(figures: &Figures, left: Option<(Bytes, MilliCpu)>) -> Memory {
    Memory {
        total: mib(figures.total_memory),
        reserve: figures.reserve_memory.value().div_ceil(1 << 20),
        observed: mib(figures.observed_memory),
        committed: mib(figures.committed_memory),
        free: mib(figures.free_memory),
        left: mib(left.map_or(figures.free_memory, |(memory, _)| memory)),
    }
}

fn cpu(figures: &Figures, left: Option<(Bytes, MilliCpu)>) -> Cpu {
    Cpu {
        usable: figures.usable_cpu.value(),
        committed: figures.committed_cpu.value(),
        free: figures.free_cpu.value(),
        left: left.map_or(figures.free_cpu, |(_, cpu)| cpu).value(),
    }
}
