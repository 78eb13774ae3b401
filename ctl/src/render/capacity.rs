//! What the fleet has, and what it has left.

use vmferry_proto::v1::{
    Blocker, CapacityFit, CapacityReply, CpuCapacity, FleetCapacity, HostCapacity, HostLoss,
    HugePages, LossBlocked, MemoryCapacity,
};

use super::quantity::{bytes, cpus, or_dash};
use super::table::{section, table};

/// How many hosts are listed one by one under one VM; the JSON form has each.
const LISTED_MAX: usize = 20;

const HEADER: [&str; 12] = [
    "HOST",
    "TOTAL",
    "RESERVE",
    "OBSERVED",
    "COMMITTED",
    "RESERVED",
    "FREE",
    "CPU",
    "CPU FREE",
    "VMS",
    "BINDS",
    "TAKES NOTHING BECAUSE",
];

/// Lays out the fleet, and the answers to what was asked besides.
pub(crate) fn show(reply: &CapacityReply) -> String {
    let mut rows: Vec<Vec<String>> = reply.hosts.iter().map(host).collect();
    if let Some(fleet) = reply.fleet.as_ref().filter(|_| reply.hosts.len() > 1) {
        rows.push(all(fleet));
    }
    let mut text = table(&HEADER, rows, "no hosts: none has reported to this planner");
    text += &section("Huge pages:", &huge_pages(&reply.hosts));
    text += &section("Look at:", &reply.warnings.join("\n"));
    if let Some(loss) = &reply.without {
        text += &without(loss);
    }
    if let Some(fit) = &reply.fit {
        text += &fits(fit, reply.without.as_ref());
    }
    text
}

fn host(host: &HostCapacity) -> Vec<String> {
    let mut row = vec![host.id.clone()];
    row.extend(figures(host.memory.as_ref(), host.cpu.as_ref()));
    let why: Vec<&str> = host.blockers.iter().map(without_host).collect();
    row.extend([host.vms.to_string(), binds(&host.binds), or_dash(&why.join("; "))]);
    row
}

/// The hosts that take placements, together.
fn all(fleet: &FleetCapacity) -> Vec<String> {
    let mut row = vec![format!("{} open", fleet.open_hosts)];
    row.extend(figures(fleet.memory.as_ref(), fleet.cpu.as_ref()));
    let closed = match fleet.closed_hosts {
        0 => "-".to_owned(),
        closed => format!("{closed} more take nothing, and are not counted"),
    };
    row.extend(["-".to_owned(), binds(&fleet.binds), closed]);
    row
}

fn figures(memory: Option<&MemoryCapacity>, cpu: Option<&CpuCapacity>) -> Vec<String> {
    let dash = || "-".to_owned();
    let mut row = memory.map_or_else(
        || vec![dash(); 6],
        |of| {
            [
                of.total_bytes,
                of.reserve_bytes,
                of.observed_bytes,
                of.committed_bytes,
                of.reserved_bytes,
                of.free_bytes,
            ]
            .map(bytes)
            .to_vec()
        },
    );
    row.extend(
        cpu.map_or_else(
            || vec![dash(); 2],
            |of| [of.usable_milli, of.free_milli].map(cpus).to_vec(),
        ),
    );
    row
}

fn binds(label: &str) -> String {
    or_dash(&label.replace('_', " "))
}

/// A reason without the host that its row names.
fn without_host(blocker: &Blocker) -> &str {
    let head = format!("host {}: ", blocker.host_id);
    blocker.message.strip_prefix(&head).unwrap_or(&blocker.message)
}

fn huge_pages(hosts: &[HostCapacity]) -> String {
    let pool = |host: &HostCapacity, pool: &HugePages| {
        let of = |pages: u64| bytes(pages.saturating_mul(pool.page_bytes));
        let left = pool.free.saturating_sub(pool.reserved);
        let size = bytes(pool.page_bytes);
        format!("{}: {} free of {} in pages of {size}\n", host.id, of(left), of(pool.total))
    };
    hosts.iter().flat_map(|host| host.hugepages.iter().map(move |one| pool(host, one))).collect()
}

fn without(loss: &HostLoss) -> String {
    let (placed, blocked) = (loss.placed.len(), loss.blocked.len());
    let host = &loss.host;
    let verdict = if loss.can_be_lost {
        format!("Without host {host}: it can be lost, each of its {placed} VMs has a place.")
    } else {
        let all = placed + blocked;
        format!("Without host {host}: it cannot be lost, {blocked} of its {all} VMs have no place.")
    };
    let size = |memory: u64, cpu: u64| [bytes(memory), cpus(cpu)];
    let mut rows = Vec::new();
    for one in &loss.placed {
        let mut row = vec![one.vm_name.clone()];
        row.extend(size(one.memory_bytes, one.cpu_milli));
        row.push(one.host.clone());
        row.push(size(one.left_memory_bytes, one.left_cpu_milli).join(", "));
        row.push("-".to_owned());
        rows.push(row);
    }
    for one in &loss.blocked {
        let mut row = vec![one.vm_name.clone()];
        row.extend(size(one.memory_bytes, one.cpu_milli));
        row.extend(["-".to_owned(), "-".to_owned(), format!("{}: {}", one.code, one.message)]);
        rows.push(row);
    }
    let header = ["VM", "MEMORY", "CPU", "TO", "LEFT THERE", "WHY NOT"];
    let mut text = section(&verdict, &table(&header, rows, "no VM runs there"));
    for one in &loss.blocked {
        text += &section(&format!("{} goes nowhere:", one.vm_name), &reasons(one));
    }
    text
}

fn reasons(blocked: &LossBlocked) -> String {
    let all = &blocked.blockers;
    let mut text: String =
        all.iter().take(LISTED_MAX).map(|reason| format!("{}\n", reason.message)).collect();
    if all.len() > LISTED_MAX {
        text += &format!("and {} reasons more; -o json has each\n", all.len() - LISTED_MAX);
    }
    text
}

fn fits(fit: &CapacityFit, without: Option<&HostLoss>) -> String {
    let then = without.map(|loss| format!(", without host {}", loss.host)).unwrap_or_default();
    let title = format!(
        "{} more of {} and {} fit{then} ({} of it for QEMU):",
        fit.count,
        bytes(fit.memory_bytes),
        cpus(fit.cpu_milli),
        bytes(fit.overhead_bytes)
    );
    let some = fit.hosts.iter().filter(|host| host.count > 0);
    let rows = some.map(|host| vec![host.host.clone(), host.count.to_string()]).collect();
    section(&title, &table(&["HOST", "FIT"], rows, "no host has room for one"))
}
