//! How a host stands, told in a few sentences: why, and what is waited for.
//!
//! Each sentence says what is known, and since when: what an agent said once is not told as if it
//! were seen now, and what is over is told with its end.

use vmferry_proto::v1;

/// Tells how a host stands.
#[must_use]
pub(super) fn of_host(host: &v1::Host) -> Vec<String> {
    let mut story = Vec::new();
    story.push(if host.blockers.is_empty() {
        "it takes placements".to_owned()
    } else {
        format!("it is {} and takes no placements", host.status)
    });
    for cordon in &host.cordons {
        let until = match cordon.expires.as_str() {
            "" => String::new(),
            at => format!(", until {at}"),
        };
        let (owner, since, reason) = (&cordon.owner, &cordon.since, &cordon.reason);
        story.push(format!("cordoned by {owner} since {since}{until}: {reason}"));
    }
    if let Some(emptying) = &host.emptying {
        story.extend(of_emptying(emptying));
    }
    story
}

/// Tells in a few sentences how a host stands for the sake of what empties it.
fn of_emptying(of: &v1::Emptying) -> Vec<String> {
    let mut story = vec![standing(of)];
    for one in &of.blocked {
        let (name, since) = (name(&one.vm_name, &one.vm_id), &one.since);
        let since = if since.is_empty() { String::new() } else { format!(" since {since}") };
        story.push(format!("VM {name} cannot leave{since}: {}; to do: {}", one.message, one.fix));
    }
    for one in of.moves.iter().filter(|one| !one.error.is_empty()) {
        let again = if one.state == "resting" { ", and is tried again" } else { "" };
        let name = name(&one.vm_name, &one.vm_id);
        story.push(format!("VM {name} did not move{again}: {}", one.error));
    }
    story.extend(of.returns.iter().filter_map(of_return));
    story.extend(of.waits_for.iter().map(|what| format!("waits for {what}")));
    story
}

/// Says in a sentence what empties, emptied or was to empty a host, and how far it came.
fn standing(of: &v1::Emptying) -> String {
    let progress = of.progress.unwrap_or_default();
    let what = match of.kind.as_str() {
        "maintenance" => "maintenance job",
        "retire" => "retirement",
        _ => "drain",
    };
    let (id, by) = (&of.id, &of.by);
    let named = format!("{what} {id} by {by}");
    let counted = format!("{} of {} VMs have left", progress.moved, progress.total);
    let under_way = match progress.running {
        0 => String::new(),
        1 => ", 1 is on its way".to_owned(),
        more => format!(", {more} are on their way"),
    };
    let ended = if of.ended.is_empty() { String::new() } else { format!(" {}", of.ended) };
    match of.state.as_str() {
        "PLANNED" => format!("{named} is planned since {} and not begun", of.opened),
        "BLOCKED" => format!(
            "{named} was planned {} and cannot be carried out, nothing was touched: {}",
            of.opened,
            match of.blocked.len() {
                1 => "1 VM has no place to go".to_owned(),
                more => format!("{more} VMs have no place to go"),
            }
        ),
        "RUNNING" if !of.error.is_empty() => {
            format!("{named} stops and begins nothing more, {counted}{under_way}: {}", of.error)
        }
        "RUNNING" | "EMPTYING" => format!("{named} since {}: {counted}{under_way}", of.opened),
        "MAINTENANCE" => format!(
            "in maintenance since {}, when its own agent said that it is empty ({named})",
            of.empty_since
        ),
        "EMPTY" => format!(
            "drained: its own agent said {} that it is empty, and it is kept so ({named})",
            of.empty_since
        ),
        "GRANTED" => format!(
            "retired since {}, when its own agent said that it is empty: it may be deleted ({named})",
            of.empty_since
        ),
        "COMPLETED" => {
            let back = of.returns.iter().filter(|one| one.state == "returned").count();
            let came = match of.returns.len() {
                0 => String::new(),
                all => format!(", {back} of {all} VMs came back"),
            };
            format!("back in service after {named}{ended}{came}")
        }
        "FAILED" => {
            format!("{named} failed{ended}, {counted}, and the host stays cordoned: {}", of.error)
        }
        "DIED" => format!("{named} ended{ended} with {counted}{under_way}: {}", of.error),
        _ => format!("{named} was given up{ended} ({}): {counted}{under_way}", of.error),
    }
}

fn of_return(one: &v1::EmptyingReturn) -> Option<String> {
    let what = match one.state.as_str() {
        "returned" => return None,
        "waiting" => "its turn to come back has not come".to_owned(),
        "running" => "it is on its way back".to_owned(),
        _ => format!("it stays there: {}", one.reason),
    };
    let name = name(&one.vm_name, &one.vm_id);
    Some(format!("VM {name}, which the job moved to host {}: {what}", one.from_host))
}

fn name<'a>(name: &'a str, id: &'a str) -> &'a str {
    if name.is_empty() { id } else { name }
}
