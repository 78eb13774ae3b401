//! How much of a host is left.
//!
//! ```text
//! observed  = total − available
//! committed = Σ over VMs in (reported ∪ reserved) of the worst figure known of each
//! free      = total − reserve − max(observed, committed), not below zero
//! ```
//!
//! The union is by VM, so one that is both reported and reserved counts once. CPU has no observed
//! figure. An exact fit fits.

use std::collections::BTreeMap;

use vmferry_types::{Bytes, MilliCpu, Role, VmId};

use crate::fleet::{Demand, Host, Policy, Report, VmUse};

/// The figures of one host that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// The host's memory.
    pub total_memory: Bytes,
    /// What of it is kept for what is not VMs.
    pub reserve_memory: Bytes,
    /// What is in use, by the host's own word.
    pub observed_memory: Bytes,
    /// What is promised to VMs.
    pub committed_memory: Bytes,
    /// What of the promises is reserved and not yet reported.
    pub reserved_memory: Bytes,
    /// What may still be promised.
    pub free_memory: Bytes,
    /// What is available now, by the host's own word.
    pub available_memory: Bytes,
    /// The host's CPU.
    pub total_cpu: MilliCpu,
    /// What of it may be promised, overcommit and reserve included.
    pub usable_cpu: MilliCpu,
    /// What is promised to VMs.
    pub committed_cpu: MilliCpu,
    /// What may still be promised.
    pub free_cpu: MilliCpu,
}

/// Says why a host's figures cannot be used: it fails closed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Unreadable {
    /// It never sent a report.
    #[error("it has never reported")]
    NeverReported,
    /// The agent says so.
    #[error("its agent says: {why}")]
    Journal {
        /// The agent's words.
        why: String,
    },
    /// Zero memory: a host that has not found out yet.
    #[error("unreadable: total memory 0")]
    NoMemory,
    /// More available than there is.
    #[error("unreadable: {available} available of {total}")]
    MoreAvailableThanTotal {
        /// What it says is available.
        available: Bytes,
        /// What it says there is.
        total: Bytes,
    },
    /// It could not list its VMs.
    #[error("unreadable: its list of VMs was not answered")]
    VmsUnanswered,
}

/// Returns the figures of a host.
///
/// # Errors
///
/// Says why they cannot be read.
pub fn figures(host: &Host, policy: &Policy) -> Result<Figures, Unreadable> {
    figures_without(host, policy, None)
}

/// Returns the figures of a host as if it had nothing of one VM: what is left for that VM there.
pub(crate) fn figures_without(
    host: &Host,
    policy: &Policy,
    without: Option<VmId>,
) -> Result<Figures, Unreadable> {
    let report = host.report.as_ref().ok_or(Unreadable::NeverReported)?;
    let vms = readable(report)?;
    let Claims { committed, reserved } = claims(vms, &host.reservations, without);
    let (free_memory, free_cpu) = free(report, policy, committed);
    Ok(Figures {
        total_memory: report.total_memory,
        reserve_memory: reserve_memory(report, policy),
        observed_memory: observed_memory(report),
        committed_memory: committed.memory,
        reserved_memory: reserved.memory,
        free_memory,
        available_memory: report.available_memory,
        total_cpu: report.total_cpu,
        usable_cpu: usable_cpu(report.total_cpu, policy),
        committed_cpu: committed.cpu,
        free_cpu,
    })
}

/// Returns what may still be promised on a host that has promised so much.
pub(crate) fn free(report: &Report, policy: &Policy, committed: Demand) -> (Bytes, MilliCpu) {
    let used = observed_memory(report).max(committed.memory);
    let memory = report.total_memory.less(reserve_memory(report, policy)).less(used);
    (memory, usable_cpu(report.total_cpu, policy).less(committed.cpu))
}

fn reserve_memory(report: &Report, policy: &Policy) -> Bytes {
    Bytes(policy.reserve_memory.of_rounded_up(report.total_memory.value()))
}

const fn observed_memory(report: &Report) -> Bytes {
    report.total_memory.less(report.available_memory)
}

/// Returns what the VMs of a report are promised together, whatever is reserved beside; `None` if the
/// report cannot be read.
#[must_use]
pub fn promised(report: &Report) -> Option<Demand> {
    let vms = readable(report).ok()?;
    Some(claims(vms, &BTreeMap::new(), None).committed)
}

/// Returns the report's VMs if the report can be believed.
pub(crate) fn readable(report: &Report) -> Result<&BTreeMap<VmId, VmUse>, Unreadable> {
    if let Some(why) = &report.unreadable {
        return Err(Unreadable::Journal { why: why.clone() });
    }
    if report.total_memory == Bytes::ZERO {
        return Err(Unreadable::NoMemory);
    }
    if report.available_memory > report.total_memory {
        return Err(Unreadable::MoreAvailableThanTotal {
            available: report.available_memory,
            total: report.total_memory,
        });
    }
    report.vms.as_ref().ok_or(Unreadable::VmsUnanswered)
}

/// What all VMs of a host are promised together.
#[derive(Default)]
struct Claims {
    /// Reported or reserved.
    committed: Demand,
    /// What of it has no QEMU process yet.
    reserved: Demand,
}

/// Returns what the VMs are promised: each that is reported or reserved, once, by its worst figure.
fn claims(
    vms: &BTreeMap<VmId, VmUse>,
    reservations: &BTreeMap<VmId, Demand>,
    without: Option<VmId>,
) -> Claims {
    let mut claims = Claims::default();
    for (id, vm) in vms.iter().filter(|(id, _)| without != Some(**id)) {
        let own = Demand::of(vm.configured, vm.observed, vm.cpu);
        // A reservation is also told the size that a stopped VM of the report would have.
        match (takes_memory(vm), reservations.get(id)) {
            (true, None) => claims.committed = claims.committed.plus(own),
            (true, Some(held)) => claims.committed = claims.committed.plus(own.worst(*held)),
            (false, Some(held)) => claims.reserve(own.worst(*held)),
            (false, None) => {}
        }
    }
    let unreported = |id: &VmId| without != Some(*id) && !vms.contains_key(id);
    for (_, held) in reservations.iter().filter(|(id, _)| unreported(id)) {
        claims.reserve(*held);
    }
    claims
}

impl Claims {
    fn reserve(&mut self, demand: Demand) {
        self.committed = self.committed.plus(demand);
        self.reserved = self.reserved.plus(demand);
    }
}

/// Says whether a reported VM has a QEMU process, and so takes memory.
const fn takes_memory(vm: &VmUse) -> bool {
    match vm.role {
        Role::Running | Role::Held | Role::Receiver => true,
        Role::Absent | Role::Stopped => false,
    }
}

/// Returns the CPU that may be promised.
fn usable_cpu(total: MilliCpu, policy: &Policy) -> MilliCpu {
    let reserve = policy.reserve_cpu.of_rounded_up(total.value());
    let left = u128::from(total.value().saturating_sub(reserve));
    let usable = left * u128::from(policy.cpu_overcommit_percent) / 100;
    MilliCpu(u64::try_from(usable).unwrap_or(u64::MAX))
}
