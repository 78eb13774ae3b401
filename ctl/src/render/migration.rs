//! Migrations.

use vmferry_proto::v1::{Migration, OpenHalf, QueueEntry};

use super::quantity::{bytes, micros, millis, or_dash, quoted_or, rate};
use super::table::{fields, section, table};

/// Lays out migrations.
pub(crate) fn list(migrations: &[Migration]) -> String {
    let header = ["ID", "VM", "FROM", "TO", "METHOD", "STATE", "PHASE", "DONE", "STARTED", "NOTE"];
    let row = |migration: &Migration| {
        vec![
            migration.id.clone(),
            or_dash(&migration.vm_name),
            or_dash(&migration.source_host),
            or_dash(&migration.target_host),
            or_dash(&migration.method),
            or_dash(&migration.state),
            or_dash(&migration.phase),
            format!("{} %", migration.progress_percent),
            or_dash(&migration.started),
            or_dash(&note(migration)),
        ]
    };
    table(&header, migrations.iter().map(row).collect(), "no migrations")
}

/// Lays out halves of migrations that nobody drives; nothing where there are none.
pub(crate) fn halves(halves: &[OpenHalf]) -> String {
    if halves.is_empty() {
        return String::new();
    }
    let row = |half: &OpenHalf| {
        vec![
            half.migration_id.clone(),
            or_dash(&half.vm_name),
            half.host.clone(),
            half.side.clone(),
            or_dash(&half.run_state),
            half.words.clone(),
        ]
    };
    let header = ["MIGRATION", "VM", "HOST", "SIDE", "GUEST", "WHAT"];
    let rows = table(&header, halves.iter().map(row).collect(), "");
    section("open halves, which no migration of this planner drives (see `vmferry doctor`):", &rows)
}

/// Says in one line how far a migration is, as it is drawn over and over.
pub(crate) fn progress(migration: &Migration) -> String {
    let mut parts = vec![quoted_or(&migration.phase, "pending")];
    if migration.bytes_total > 0 {
        parts.push(format!(
            "{} sent, {} left",
            bytes(migration.bytes_transferred),
            bytes(migration.bytes_remaining)
        ));
    }
    if migration.bytes_per_second > 0 {
        parts.push(rate(migration.bytes_per_second));
    }
    if migration.dirty_bytes_per_second > 0 {
        parts.push(format!("dirties {}", rate(migration.dirty_bytes_per_second)));
    }
    if migration.expected_downtime_ms > 0 {
        parts.push(format!("expects {} downtime", millis(migration.expected_downtime_ms)));
    }
    if migration.eta_ms > 0 {
        parts.push(format!("switches in {}", millis(migration.eta_ms)));
    }
    if !migration.forecast.is_empty() {
        parts.push(migration.forecast.clone());
    }
    if migration.throttle_percent > 0 {
        parts.push(format!("guest slowed by {} %", migration.throttle_percent));
    }
    if migration.guest_still_ms > 0 {
        parts.push(format!("guest still for {}", millis(migration.guest_still_ms)));
    }
    let note = note(migration);
    if !note.is_empty() {
        parts.push(note);
    }
    parts.join("  ")
}

/// Says in one line what became of a migration, or where it stands.
pub(crate) fn summary(migration: &Migration) -> String {
    let Migration { id, vm_name, source_host, .. } = migration;
    let to = quoted_or(&migration.target_host, "a host yet to be chosen");
    let way = format!("{vm_name}: {} -> {to}", or_dash(source_host));
    let mut text = format!("{id}  {way}  {} ({})", migration.state, migration.phase);
    if migration.pause_us > 0 {
        text += &format!("  guest paused {}", micros(migration.pause_us));
    } else if migration.downtime_ms > 0 {
        text += &format!("  QEMU's downtime {}", millis(migration.downtime_ms));
    }
    let note = note(migration);
    if !note.is_empty() {
        text += &format!("  {note}");
    }
    text
}

/// Lays out one migration.
pub(crate) fn show(migration: &Migration) -> String {
    let mut text = head(migration);
    text += &figures(migration);
    if let Some(stuck) = &migration.stuck {
        let waits = fields(&[
            ("cause", stuck.cause.clone()),
            ("waits for", stuck.waits_for.clone()),
            ("for", millis(stuck.age_ms)),
        ]);
        text += &section("stuck:", &waits);
    }
    if !migration.phases.is_empty() {
        let row = |time: &vmferry_proto::v1::PhaseTime| {
            vec![time.phase.clone(), micros(time.us), or_dash(&time.entered)]
        };
        let rows = migration.phases.iter().map(row).collect();
        text += &section("phases:", &table(&["PHASE", "LASTED", "ENTERED"], rows, ""));
    }
    if !migration.log.is_empty() {
        let row = |entry: &vmferry_proto::v1::LogEntry| {
            vec![
                entry.seq.to_string(),
                entry.at.clone(),
                entry.event.clone(),
                entry.phase.clone(),
                or_dash(&entry.note),
            ]
        };
        let rows = migration.log.iter().map(row).collect();
        text += &section("log:", &table(&["SEQ", "AT", "EVENT", "PHASE", "NOTE"], rows, ""));
    }
    text += &section("what both QEMUs said when ownership moved:", &migration.proof);
    text
}

fn head(migration: &Migration) -> String {
    let asked = if migration.cancel_requested { "asked for" } else { "" };
    let ordered = if migration.ordered { "ordered" } else { "" };
    fields(&[
        ("id", migration.id.clone()),
        ("VM", format!("{} ({})", migration.vm_name, migration.vm_id)),
        ("from", migration.source_host.clone()),
        ("to", migration.target_host.clone()),
        ("method", format!("{} {}", migration.migration_type, migration.method)),
        ("instead of", migration.downgraded_from.clone()),
        ("  since", migration.downgrade_cause.clone()),
        ("verdict", migration.verdict.clone()),
        ("  answered by", migration.verdict_answer.clone()),
        ("state", migration.state.clone()),
        ("phase", migration.phase.clone()),
        ("switchover", ordered.to_owned()),
        ("cancel", asked.to_owned()),
        ("error", migration.error.clone()),
        ("source said", migration.source_status.clone()),
        ("destination said", migration.destination_status.clone()),
        ("waits for room", migration.capacity_note.clone()),
        ("  since", migration.capacity_blocked_since.clone()),
        ("  standing", migration.queued.as_ref().map(standing).unwrap_or_default()),
        ("waits for a link", migration.waits_for_link.clone()),
        ("for the sake of", migration.emptying_id.clone()),
        ("started", migration.started.clone()),
        ("completed", migration.completed.clone()),
        ("request", migration.request_id.clone()),
        ("generation", migration.generation.to_string()),
        ("claim", migration.claim.to_string()),
        ("seq", migration.seq.to_string()),
    ])
}

/// Says where in the queue a migration stands, and until when it may.
fn standing(queued: &QueueEntry) -> String {
    let QueueEntry { position, of, priority, deadline, .. } = queued;
    format!("{position} of {of}, priority {priority}, given up at {deadline}")
}

fn figures(migration: &Migration) -> String {
    let some = |value: u64, write: fn(u64) -> String| {
        if value == 0 { String::new() } else { write(value) }
    };
    fields(&[
        ("done", format!("{} %", migration.progress_percent)),
        ("sent", some(migration.bytes_transferred, bytes)),
        ("left", some(migration.bytes_remaining, bytes)),
        ("guest memory", some(migration.bytes_total, bytes)),
        ("rate", some(migration.bytes_per_second, rate)),
        ("dirty rate", some(migration.dirty_bytes_per_second, rate)),
        ("passes", some(migration.passes, |passes| passes.to_string())),
        ("expected downtime", some(migration.expected_downtime_ms, millis)),
        ("expected", migration.forecast.clone()),
        ("switches in", some(migration.eta_ms, millis)),
        ("bandwidth limit", some(migration.bandwidth_limit, rate)),
        ("downtime limit", some(migration.downtime_limit_ms, millis)),
        ("QEMU's downtime", some(migration.downtime_ms, millis)),
        ("guest paused", some(migration.pause_us, micros)),
        ("channel", channel(migration)),
        ("guest still for", some(migration.guest_still_ms, millis)),
    ])
}

/// What a reader of one line has to know besides: what holds or ended it.
fn note(migration: &Migration) -> String {
    if let Some(stuck) = &migration.stuck {
        let age = millis(stuck.age_ms);
        return format!("stuck for {age}: {}, waits for {}", stuck.cause, stuck.waits_for);
    }
    if !migration.waits_at_gate.is_empty() {
        return waits_at_gate(migration);
    }
    if migration.error.is_empty() {
        migration.capacity_note.clone()
    } else {
        migration.error.clone()
    }
}

/// Says what an operator is waited for, and what to do.
fn waits_at_gate(migration: &Migration) -> String {
    let Migration { id, waits_at_gate: gate, gate_expires, .. } = migration;
    let still = match migration.guest_still_ms {
        0 => String::new(),
        still => format!(", guest still for {}", millis(still)),
    };
    format!("waits at the {gate} gate until {gate_expires}{still}: `vmferry migration go {id}`")
}

/// Says how the channel between both halves of a divided guest is; empty if it never broke.
fn channel(migration: &Migration) -> String {
    match (migration.channel_breaks, migration.channel_broken) {
        (0, _) => String::new(),
        (breaks, true) => format!("broken ({breaks} times so far), being mended"),
        (breaks, false) => format!("broke {breaks} times, mended each time"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;
    use vmferry_proto::v1::{LogEntry, PhaseTime, Stuck};

    fn moving() -> Migration {
        Migration {
            id: "m-1".into(),
            vm_id: "u-1".into(),
            vm_name: "web1".into(),
            source_host: "a".into(),
            target_host: "b".into(),
            migration_type: "live".into(),
            method: "precopy".into(),
            state: "syncing".into(),
            phase: "admitted".into(),
            progress_percent: 40,
            bytes_transferred: 200 << 20,
            bytes_remaining: 300 << 20,
            bytes_total: 512 << 20,
            bytes_per_second: 100 << 20,
            dirty_bytes_per_second: 20 << 20,
            expected_downtime_ms: 87,
            started: "2026-01-02T03:04:05Z".into(),
            ..Migration::default()
        }
    }

    fn done() -> Migration {
        let lasted = |phase: &str, us| PhaseTime {
            phase: phase.into(),
            entered: "2026-01-02T03:04:05Z".into(),
            us,
        };
        Migration {
            state: "completed".into(),
            phase: "done".into(),
            progress_percent: 100,
            downtime_ms: 31,
            pause_us: 42_300,
            ordered: true,
            generation: 2,
            claim: 1,
            seq: 7,
            phases: vec![lasted("admitted", 1_204_000), lasted("captured", 38_000)],
            log: vec![LogEntry {
                seq: 1,
                at: "2026-01-02T03:04:05Z".into(),
                event: "admitted".into(),
                phase: "admitted".into(),
                note: String::new(),
            }],
            ..moving()
        }
    }

    fn stuck() -> Migration {
        let stuck = Stuck {
            cause: "agent b does not answer".into(),
            waits_for: "b".into(),
            age_ms: 95_000,
        };
        Migration { stuck: Some(stuck), phase: "rolling_back".into(), ..moving() }
    }

    #[test]
    fn progress_names_every_unit() {
        expect!["admitted  200 MiB sent, 300 MiB left  100 MiB/s  dirties 20 MiB/s  expects 87 ms downtime"].assert_eq(&progress(&moving()));
    }

    #[test]
    fn a_queued_migration_says_why_it_waits() {
        let queued = Migration {
            phase: "queued".into(),
            capacity_note: "b lacks 1 GiB".into(),
            ..Migration::default()
        };
        expect!["queued  b lacks 1 GiB"].assert_eq(&progress(&queued));
    }

    #[test]
    fn a_list_names_what_holds_the_stuck_one() {
        expect![[r#"
            ID   VM    FROM  TO  METHOD   STATE    PHASE         DONE  STARTED               NOTE
            m-1  web1  a     b   precopy  syncing  admitted      40 %  2026-01-02T03:04:05Z  -
            m-1  web1  a     b   precopy  syncing  rolling_back  40 %  2026-01-02T03:04:05Z  stuck for 1 min 35 s: agent b does not answer, waits for b
        "#]].assert_eq(&list(&[moving(), stuck()]));
    }

    #[test]
    fn the_summary_of_a_finished_one_says_how_long_the_guest_stood_still() {
        expect!["m-1  web1: a -> b  completed (done)  guest paused 42.3 ms"]
            .assert_eq(&summary(&done()));
    }

    #[test]
    fn everything_known_is_shown() {
        expect![[r#"
            id          m-1
            VM          web1 (u-1)
            from        a
            to          b
            method      live precopy
            state       completed
            phase       done
            switchover  ordered
            started     2026-01-02T03:04:05Z
            generation  2
            claim       1
            seq         7
            done               100 %
            sent               200 MiB
            left               300 MiB
            guest memory       512 MiB
            rate               100 MiB/s
            dirty rate         20 MiB/s
            expected downtime  87 ms
            QEMU's downtime    31 ms
            guest paused       42.3 ms

            phases:
              PHASE     LASTED  ENTERED
              admitted  1.2 s   2026-01-02T03:04:05Z
              captured  38 ms   2026-01-02T03:04:05Z

            log:
              SEQ  AT                    EVENT     PHASE     NOTE
              1    2026-01-02T03:04:05Z  admitted  admitted  -
        "#]]
        .assert_eq(&show(&done()));
    }

    #[test]
    fn a_stuck_one_shows_cause_and_age() {
        expect![[r#"
            id          m-1
            VM          web1 (u-1)
            from        a
            to          b
            method      live precopy
            state       syncing
            phase       rolling_back
            started     2026-01-02T03:04:05Z
            generation  0
            claim       0
            seq         0
            done               40 %
            sent               200 MiB
            left               300 MiB
            guest memory       512 MiB
            rate               100 MiB/s
            dirty rate         20 MiB/s
            expected downtime  87 ms

            stuck:
              cause      agent b does not answer
              waits for  b
              for        1 min 35 s
        "#]]
        .assert_eq(&show(&stuck()));
    }
}
