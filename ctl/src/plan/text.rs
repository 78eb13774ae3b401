//! A plan for people: where each VM would go and why, and what is left where.

use super::answer::{Answer, HostFigures, Placed, RuledOut, Unplaced};
use crate::render::quantity::{bytes, cpus};
use crate::render::table::{section, table};

/// How many hosts are listed one by one. A fleet of thousands is told by its figures; the JSON form
/// has each.
const LISTED_MAX: usize = 20;

/// Lays a plan out.
pub(crate) fn text(answer: &Answer) -> String {
    let mut text = verdict(answer);
    let header = ["VM", "MEMORY", "CPU", "FROM", "TO", "MODE", "LEFT THERE", "WHY"];
    let placed = answer.assignments.iter().map(|one| placed_row(answer, one));
    let unplaced = answer.blockers.iter().map(|one| unplaced_row(answer, one));
    text.push('\n');
    text += &table(&header, placed.chain(unplaced).collect(), "no VM is to leave");
    for blocker in &answer.blockers {
        text += &section(&title(blocker), &ruled_out(&blocker.ruled_out));
    }
    text += &hosts(answer);
    text += &section("Cannot be counted on:", &answer.warnings.join("\n"));
    text
}

fn verdict(answer: &Answer) -> String {
    let (placed, blocked) = (answer.assignments.len(), answer.blockers.len());
    let all = placed + blocked;
    let host = &answer.source_host;
    let what = if blocked == 0 {
        format!("host {host} can be emptied: each of its {all} VMs has a place")
    } else {
        format!("host {host} cannot be emptied: {blocked} of its {all} VMs have no place")
    };
    format!("{}: {what}\n", answer.plan_state)
}

fn named(vm: &str, name: Option<&String>) -> String {
    name.map_or_else(|| vm.to_owned(), |name| format!("{vm} ({name})"))
}

fn placed_row(answer: &Answer, one: &Placed) -> Vec<String> {
    let ruled_out = match one.candidates {
        1 => "the only host that can take it".to_owned(),
        all => format!("most memory left of the {all} hosts that can take it"),
    };
    vec![
        named(&one.vm, one.name.as_ref()),
        mib(one.memory_mib),
        cpus(one.cpu_milli),
        answer.source_host.clone(),
        one.target.clone(),
        one.mode.to_owned(),
        format!("{}, {}", mib(one.left_memory_mib), cpus(one.left_cpu_milli)),
        ruled_out,
    ]
}

fn unplaced_row(answer: &Answer, one: &Unplaced) -> Vec<String> {
    vec![
        named(&one.vm, one.name.as_ref()),
        mib(one.memory_mib),
        cpus(one.cpu_milli),
        answer.source_host.clone(),
        "-".to_owned(),
        "-".to_owned(),
        "-".to_owned(),
        format!("{}: {}", one.code, one.message),
    ]
}

fn title(blocker: &Unplaced) -> String {
    let (memory, cpu) = (mib(blocker.memory_mib), cpus(blocker.cpu_milli));
    format!("{} ({memory}, {cpu}) went nowhere, {}:", blocker.vm, blocker.code)
}

fn ruled_out(all: &[RuledOut]) -> String {
    let mut text = String::new();
    for one in all.iter().take(LISTED_MAX) {
        let reasons: Vec<&str> = one.reasons.iter().map(|why| why.message.as_str()).collect();
        text += &format!("{}: {}\n", one.host, reasons.join("; "));
    }
    if all.len() > LISTED_MAX {
        text += &format!("and {} hosts more; -o json has each\n", all.len() - LISTED_MAX);
    }
    text
}

/// The hosts that matter: all of a small fleet, else those that are given something.
fn hosts(answer: &Answer) -> String {
    let given = |host: &&HostFigures| {
        answer.hosts.len() <= LISTED_MAX
            || host.host == answer.source_host
            || answer.assignments.iter().any(|one| one.target == host.host)
    };
    let header = [
        "HOST",
        "TOTAL",
        "RESERVE",
        "OBSERVED",
        "COMMITTED",
        "FREE",
        "LEFT",
        "CPU FREE",
        "CPU LEFT",
        "TAKES NOTHING BECAUSE",
    ];
    let rows: Vec<Vec<String>> =
        answer.hosts.iter().filter(given).map(|host| host_row(answer, host)).collect();
    section("Hosts, before and after:", &table(&header, rows, "there is no host"))
}

fn host_row(answer: &Answer, host: &HostFigures) -> Vec<String> {
    let dash = || "-".to_owned();
    let memory = host.memory_mib.map_or_else(
        || vec![dash(); 6],
        |of| [of.total, of.reserve, of.observed, of.committed, of.free, of.left].map(mib).to_vec(),
    );
    let cpu =
        host.cpu_milli.map_or_else(|| vec![dash(); 2], |of| [of.free, of.left].map(cpus).to_vec());
    let closed: Vec<&str> = host.closed.iter().map(|why| why.message.as_str()).collect();
    let closed = match closed.as_slice() {
        [] if host.host == answer.source_host => "it is the one to be emptied".to_owned(),
        [] => dash(),
        reasons => reasons.join("; "),
    };
    let mut row = vec![host.host.clone()];
    row.extend(memory);
    row.extend(cpu);
    row.push(closed);
    row
}

fn mib(mib: u64) -> String {
    bytes(mib << 20)
}
