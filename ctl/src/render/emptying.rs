//! Maintenance jobs, drains and retirements; and what waits for room.

use vmferry_proto::v1::{
    Emptying, EmptyingBlocked, EmptyingMove, EmptyingReturn, LogEntry, QueueEntry,
};

use super::quantity::{bytes, millis, or_dash, rate};
use super::table::{fields, section, table};

/// Says in a line how far one is: n of m, bytes, rate, time left.
pub(crate) fn progress(of: &Emptying) -> String {
    let progress = of.progress.unwrap_or_default();
    let mut text = format!("{}: {} of {} VMs have left", of.state, progress.moved, progress.total);
    if progress.running > 0 {
        text += &format!(", {} on their way", progress.running);
    }
    if progress.failed > 0 {
        text += &format!(", {} did not", progress.failed);
    }
    if progress.bytes_transferred > 0 {
        text += &format!(
            ", {} of {} sent",
            bytes(progress.bytes_transferred),
            bytes(progress.bytes_total)
        );
    }
    if progress.bytes_per_second > 0 {
        text += &format!(" at {}", rate(progress.bytes_per_second));
    }
    if progress.remaining_ms > 0 {
        text += &format!(", about {} left", millis(progress.remaining_ms));
    }
    if !of.blocked.is_empty() {
        text += &format!(", {} cannot leave", of.blocked.len());
    }
    if !of.returns.is_empty() {
        let back = of.returns.iter().filter(|one| one.state == "returned").count();
        text += &format!(", {back} of {} VMs came back", of.returns.len());
    }
    text
}

/// Says in a line what it is and how far.
pub(crate) fn summary(of: &Emptying) -> String {
    let error = if of.error.is_empty() { String::new() } else { format!("  {}", of.error) };
    let mut text = format!("{}  {} of host {}  {}{error}", of.id, of.kind, of.host, progress(of));
    for one in of.returns.iter().filter(|one| one.state == "stays") {
        let name = name(&one.vm_name, &one.vm_id);
        text += &format!("\nVM {name} stays on host {}: {}", one.from_host, one.reason);
    }
    text
}

/// Lays out a list.
pub(crate) fn list(all: &[Emptying]) -> String {
    let header = ["ID", "HOST", "KIND", "STATE", "LEFT", "BY", "OPENED", "ERROR"];
    let row = |of: &Emptying| {
        let progress = of.progress.unwrap_or_default();
        vec![
            of.id.clone(),
            of.host.clone(),
            of.kind.clone(),
            of.state.clone(),
            format!("{}/{}", progress.moved, progress.total),
            or_dash(&of.by),
            of.opened.clone(),
            or_dash(&of.error),
        ]
    };
    table(&header, all.iter().map(row).collect(), "no maintenance jobs")
}

/// Lays out a plan: where each VM goes, or why it cannot and what to do about it.
pub(crate) fn plan(of: &Emptying) -> String {
    let header = ["VM", "MEMORY", "FROM", "TO", "MODE", "BLOCKED BY"];
    let goes = |one: &EmptyingMove| {
        vec![
            name(&one.vm_name, &one.vm_id),
            bytes(one.memory_bytes),
            of.host.clone(),
            or_dash(&one.planned_host),
            one.mode.clone(),
            "-".to_owned(),
        ]
    };
    let stays = |one: &EmptyingBlocked| {
        vec![
            name(&one.vm_name, &one.vm_id),
            bytes(one.memory_bytes),
            of.host.clone(),
            "-".to_owned(),
            "-".to_owned(),
            one.code.clone(),
        ]
    };
    let rows = of.moves.iter().map(goes).chain(of.blocked.iter().map(stays)).collect();
    let mut text = format!("{}  {}  host {}\n", of.id, of.state, of.host);
    text += &section("VMs:", &table(&header, rows, "nothing has to leave it"));
    text += &section("cannot leave:", &reasons(&of.blocked));
    text
}

/// Lays out one.
pub(crate) fn show(of: &Emptying) -> String {
    let policy = of.policy.clone().unwrap_or_default();
    let mut text = fields(&[
        ("id", of.id.clone()),
        ("kind", of.kind.clone()),
        ("host", of.host.clone()),
        ("state", of.state.clone()),
        ("by", of.by.clone()),
        ("opened", of.opened.clone()),
        ("empty since", of.empty_since.clone()),
        ("ended", of.ended.clone()),
        ("error", of.error.clone()),
        ("progress", progress(of)),
        ("strategy", policy.strategy),
        ("at once", policy.max_parallel.unwrap_or_default().to_string()),
    ]);
    text += &section("waits for:", &of.waits_for.join("\n"));
    if !of.moves.is_empty() {
        let header = ["VM", "MEMORY", "PLANNED", "TO", "STATE", "DONE", "MIGRATION", "ERROR"];
        text += &section("VMs:", &table(&header, of.moves.iter().map(of_move).collect(), ""));
    }
    text += &section("cannot leave:", &reasons(&of.blocked));
    if !of.returns.is_empty() {
        let row = |one: &EmptyingReturn| {
            vec![
                name(&one.vm_name, &one.vm_id),
                one.from_host.clone(),
                one.state.clone(),
                or_dash(&one.migration_id),
                or_dash(&one.reason),
            ]
        };
        let header = ["VM", "FROM", "STATE", "MIGRATION", "WHY"];
        let rows = of.returns.iter().map(row).collect();
        text += &section("coming back:", &table(&header, rows, ""));
    }
    if !of.log.is_empty() {
        let row = |entry: &LogEntry| {
            vec![
                entry.seq.to_string(),
                entry.at.clone(),
                entry.event.clone(),
                entry.phase.clone(),
                entry.note.clone(),
            ]
        };
        let rows = of.log.iter().map(row).collect();
        text += &section("log:", &table(&["SEQ", "AT", "EVENT", "PHASE", "WHAT"], rows, ""));
    }
    text
}

fn of_move(one: &EmptyingMove) -> Vec<String> {
    let done = match one.state.as_str() {
        "running" | "cancelling" => format!("{}%", one.progress_percent),
        _ => "-".to_owned(),
    };
    vec![
        name(&one.vm_name, &one.vm_id),
        bytes(one.memory_bytes),
        or_dash(&one.planned_host),
        or_dash(&one.target_host),
        one.state.clone(),
        done,
        or_dash(&one.migration_id),
        or_dash(&one.error),
    ]
}

/// Writes each VM that cannot leave with every reason, and what to do about it.
pub(super) fn reasons(blocked: &[EmptyingBlocked]) -> String {
    let mut lines = Vec::new();
    for one in blocked {
        lines.push(format!("{}: {}: {}", name(&one.vm_name, &one.vm_id), one.code, one.message));
        lines.extend(one.blockers.iter().map(|of| format!("  {}: {}", of.code, of.message)));
        if one.more > 0 {
            lines.push(format!("  and {} more reasons", one.more));
        }
        lines.push(format!("  what to do: {}", one.fix));
    }
    lines.join("\n")
}

/// Lays out what waits for room, in the order in which it is tried.
pub(crate) fn queue(entries: &[QueueEntry]) -> String {
    let header = ["POS", "VM", "KIND", "PRIORITY", "SINCE", "GIVEN UP", "WHY"];
    let row = |one: &QueueEntry| {
        vec![
            format!("{}/{}", one.position, one.of),
            name(&one.vm_name, &one.vm_id),
            one.kind.clone(),
            one.priority.clone(),
            or_dash(&one.blocked_since),
            one.deadline.clone(),
            or_dash(&one.note),
        ]
    };
    table(&header, entries.iter().map(row).collect(), "nothing waits for room")
}

fn name(name: &str, id: &str) -> String {
    if name.is_empty() { id.to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;
    use vmferry_proto::v1::Blocker;

    #[test]
    fn a_plan_shows_each_vm_with_its_place_or_its_blocker_and_the_fix() {
        let of = Emptying {
            id: "1".into(),
            host: "a".into(),
            state: "BLOCKED".into(),
            moves: vec![EmptyingMove {
                vm_name: "web1".into(),
                memory_bytes: 1 << 30,
                planned_host: "b".into(),
                mode: "live".into(),
                ..EmptyingMove::default()
            }],
            blocked: vec![EmptyingBlocked {
                vm_name: "db1".into(),
                memory_bytes: 4 << 30,
                code: "insufficient_capacity".into(),
                message: "no host that can take the VM has room".into(),
                fix: "free memory or CPU elsewhere, or add a host".into(),
                blockers: vec![Blocker {
                    code: "memory".into(),
                    message: "host b: 4 GiB of memory needed, 3 GiB free".into(),
                    host_id: "b".into(),
                }],
                ..EmptyingBlocked::default()
            }],
            ..Emptying::default()
        };
        expect![[r#"
            1  BLOCKED  host a

            VMs:
              VM    MEMORY  FROM  TO  MODE  BLOCKED BY
              web1  1 GiB   a     b   live  -
              db1   4 GiB   a     -   -     insufficient_capacity

            cannot leave:
              db1: insufficient_capacity: no host that can take the VM has room
                memory: host b: 4 GiB of memory needed, 3 GiB free
                what to do: free memory or CPU elsewhere, or add a host
        "#]]
        .assert_eq(&plan(&of));
    }
}
