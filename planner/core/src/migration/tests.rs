use std::collections::BTreeSet;
use std::fmt::Write as _;

use expect_test::expect_file;
use proptest::prelude::*;
use vmferry_types::PowerState;

use super::*;

fn name(row: &Migration) -> String {
    rows::all()
        .into_iter()
        .find(|(_, other)| {
            std::mem::discriminant(&other.phase) == std::mem::discriminant(&row.phase)
                && other.outstanding().map(|e| e.label()) == row.outstanding().map(|e| e.label())
                && rank(other) == rank(row)
                && other.method == row.method
                && other.terms.downgrade == row.terms.downgrade
        })
        .or_else(|| similar(row))
        .map_or_else(|| format!("{:?}", row.phase), |(name, _)| name.to_owned())
}

/// A row that differs only in how the guest came to be carried.
fn similar(row: &Migration) -> Option<(&'static str, Migration)> {
    rows::all().into_iter().find(|(_, other)| {
        std::mem::discriminant(&other.phase) == std::mem::discriminant(&row.phase)
            && other.outstanding().map(|e| e.label()) == row.outstanding().map(|e| e.label())
            && rank(other) == rank(row)
    })
}

/// What tells rows of one phase apart.
fn rank(row: &Migration) -> u8 {
    match &row.phase {
        Phase::Captured { switchover, .. } => match switchover {
            Switchover::Withheld => 0,
            Switchover::Ordered => 1,
            Switchover::Forward => 2,
            Switchover::Held { .. } => 3,
            Switchover::Down { .. } => 4,
        },
        Phase::Restored { .. } if row.waits_at().is_some() => 3,
        Phase::Restored { proof, .. } | Phase::Committed { proof, .. } => match proof.source {
            SourceWord::Completed(_) => 0,
            SourceWord::Gone(_) => 1,
            SourceWord::Serves(_) => 2,
            SourceWord::ShutDown(_) => 3,
        },
        Phase::Attached { proof: Handover { source: SourceWord::Serves(_), .. }, .. } => 2,
        Phase::Attached { guest, .. } => match guest {
            Guest::Present => 0,
            Guest::PoweredOff => 1,
        },
        Phase::RollingBack { back, .. } => match back {
            Back::Cancelling => 0,
            Back::Clearing => 1,
            Back::Undoing => 2,
            Back::Resuming { .. } => 3,
            Back::PoweredOff => 4,
        },
        Phase::Failed { cause: Cause::Severed { .. }, cleanup, .. } => match cleanup {
            Cleanup::Receiver => 5,
            Cleanup::Source => 6,
            Cleanup::Nothing | Cleanup::Half | Cleanup::Undecided => 0,
        },
        Phase::Failed { cleanup, .. } => match cleanup {
            Cleanup::Nothing => 0,
            Cleanup::Receiver => 1,
            Cleanup::Source => 2,
            Cleanup::Undecided => 3,
            Cleanup::Half => 4,
        },
        Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Done { .. }
        | Phase::Aborted { .. } => 0,
    }
}

fn end_line(text: &mut String) {
    text.truncate(text.trim_end_matches(' ').len());
    text.push('\n');
}

#[test]
fn the_table_is_as_reviewed() {
    let mut text = String::from(
        "Row × event: the row after, '.' stale, '!' illegal, 'too late' told to the caller.\n",
    );
    for events in rows::events().chunks(8) {
        write!(text, "\n{:<17}", "").unwrap();
        for (event, _) in events {
            write!(text, "{event:<17}").unwrap();
        }
        end_line(&mut text);
        for (row_name, row) in rows::all() {
            write!(text, "{row_name:<17}").unwrap();
            for (_, event) in events {
                let cell = match row.apply(event) {
                    Ok(after) => name(&after),
                    Err(Refusal::Stale) => ".".to_owned(),
                    Err(Refusal::Illegal) => "!".to_owned(),
                    Err(Refusal::TooLate) => "too late".to_owned(),
                };
                write!(text, "{cell:<17}").unwrap();
            }
            end_line(&mut text);
        }
    }
    expect_file!["table/table.txt"].assert_eq(&text);
}

/// What a cold row has become, in few letters.
fn name_cold(after: &Migration) -> String {
    let found = rows::all_cold().into_iter().find(|(_, other)| {
        std::mem::discriminant(&other.phase) == std::mem::discriminant(&after.phase)
            && other.outstanding().map(|e| e.label()) == after.outstanding().map(|e| e.label())
            && rank(other) == rank(after)
            && other.found == after.found
    });
    found.map_or_else(|| after.label().label().to_owned(), |(name, _)| name.to_owned())
}

#[test]
fn the_table_of_guests_that_are_shut_down_is_as_reviewed() {
    let mut text = String::from(
        "Row of a guest that is shut down, or was off × event: the row after, '.' stale, '!' illegal, \
         'too late' told to the caller.\nWhat each row owes.\n",
    );
    for events in rows::events_cold().chunks(8) {
        write!(text, "\n{:<15}", "").unwrap();
        for (event, _) in events {
            write!(text, "{event:<15}").unwrap();
        }
        end_line(&mut text);
        for (row_name, row) in rows::all_cold() {
            write!(text, "{row_name:<15}").unwrap();
            for (_, event) in events {
                let cell = match row.apply(event) {
                    Ok(after) => name_cold(&after),
                    Err(Refusal::Stale) => ".".to_owned(),
                    Err(Refusal::Illegal) => "!".to_owned(),
                    Err(Refusal::TooLate) => "too late".to_owned(),
                };
                write!(text, "{cell:<15}").unwrap();
            }
            end_line(&mut text);
        }
    }
    text.push('\n');
    for (row_name, row) in rows::all_cold() {
        let effect = row.outstanding().map_or("-", |effect| effect.label());
        writeln!(text, "{row_name:<15}{effect}").unwrap();
    }
    expect_file!["table/cold.txt"].assert_eq(&text);
}

#[test]
fn what_is_owed_is_as_reviewed() {
    let mut text =
        String::from("What each row owes the world, and what the store holds beside it.\n\n");
    for (row_name, row) in rows::all() {
        let effect = row.outstanding().map_or("-", |effect| effect.label());
        let books = row.books();
        let reserved: Vec<_> = books.reserved.iter().map(|host| host.as_str()).collect();
        writeln!(
            text,
            "{row_name:<17}{effect:<22}owner {} g{} {:<9}reserved {:<5}{:?}",
            books.host,
            books.generation,
            books.power.map_or("-", |power| power.label()),
            reserved.join("+"),
            books.flight,
        )
        .unwrap();
    }
    expect_file!["table/owed.txt"].assert_eq(&text);
}

#[test]
fn only_what_is_carried_out_is_opened() {
    for method in Method::ALL {
        let opened = Migration::open(Opening { method: *method, ..rows::opening() });
        match method {
            Method::Precopy | Method::Postcopy | Method::Snapshot | Method::Cold => {
                assert!(opened.is_ok());
            }
            Method::DiskCopy => {
                let refusal = opened.unwrap_err();
                assert_eq!(refusal.code(), "method_not_available");
                assert!(refusal.to_string().contains(method.label()), "{refusal}");
            }
        }
    }
}

#[test]
fn the_first_refusal_of_room_is_kept_and_its_note_refreshed() {
    let no_room = |at, note: &str| Event::NoRoom { at: Timestamp(at), note: note.into() };
    let row = rows::queued().apply(&no_room(10, "a is full")).unwrap();
    let row = row.apply(&no_room(20, "b is full")).unwrap();
    let expected = Blocked { since: Timestamp(10), note: "b is full".into() };
    assert_eq!(row.phase, Phase::Queued { blocked: Some(expected), deadline: rows::DEADLINE });
}

#[test]
fn an_expired_wait_ends_with_why_there_was_no_room() {
    let row = rows::waiting().apply(&Event::QueueExpired).unwrap();
    let cause = row.phase.cause().unwrap();
    assert_eq!(cause.label(), "capacity_wait_expired");
    assert!(cause.to_string().contains("full"), "{cause}");
}

#[test]
fn ownership_moves_in_the_same_commit_as_both_complete() {
    let proof = rows::handover();
    let entries = rows::captured(Switchover::Ordered)
        .advance(Event::BothComplete { proof: proof.clone() })
        .unwrap();
    let labels: Vec<_> =
        entries.iter().map(|entry| (entry.event.label(), entry.after.label().label())).collect();
    assert_eq!(labels, [("both_complete", "restored"), ("commit_allowed", "committed")]);
    let last = &entries.last().unwrap().after;
    assert_eq!(last.phase.handover(), Some(&proof));
    let books = last.books();
    assert_eq!(books.host, rows::host("b"));
    assert_eq!(books.generation, rows::GENERATION.next());
}

#[test]
fn a_closed_gate_keeps_ownership_where_it_is() {
    let mut row = rows::captured(Switchover::Ordered);
    row.terms.gates.commit = Gate::Closed;
    let entries = row.advance(Event::BothComplete { proof: rows::handover() }).unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].after.outstanding(), None);
    let entries = entries[0].after.advance(Event::CommitAllowed).unwrap();
    assert_eq!(entries[0].after.label().label(), "committed");
}

#[test]
fn a_closed_gate_keeps_the_switchover_unordered() {
    let mut row = rows::transferring();
    row.terms.gates.switchover = Gate::Closed;
    let row = row.apply(&Event::SourceStopped).unwrap();
    assert_eq!(row.outstanding(), None);
    let row = row.apply(&Event::SwitchoverAllowed).unwrap();
    assert_eq!(row.outstanding(), Some(Effect::OrderSwitchover));
}

#[test]
fn back_from_committed_takes_the_next_generation() {
    let gone = Event::ReceiverGone { proof: rows::gone("b"), ran: Ran::Never };
    let row = rows::committed(rows::handover()).apply(&gone).unwrap();
    let books = row.books();
    assert_eq!(books.host, rows::host("a"));
    assert_eq!(books.generation, rows::GENERATION.next().next());
    assert_eq!(row.outstanding(), Some(Effect::ResumeSource { proof: rows::gone("b") }));
    let row = row.apply(&Event::SourceContinued).unwrap();
    assert_eq!(row.outstanding().map(|effect| effect.label()), Some("destroy_receiver"));
    let row = row.apply(&gone).unwrap();
    assert_eq!(row.books().generation, rows::GENERATION.next().next());
    assert_eq!(row.books().power, Some(PowerState::Running));
}

#[test]
fn a_failed_migration_holds_the_vm_until_its_rest_is_proven_gone() {
    let row = rows::failed(Cleanup::Receiver);
    assert_eq!(row.books().flight, Flight::Held);
    assert_eq!(row.books().reserved, BTreeSet::from([rows::host("b")]));
    let gone = Event::ReceiverGone { proof: rows::gone("b"), ran: Ran::Never };
    let row = row.apply(&gone).unwrap();
    assert_eq!(row.books().flight, Flight::Released);
    assert!(row.books().reserved.is_empty());
    assert_eq!(row.outstanding(), None);
}

#[test]
fn the_first_cause_is_kept_when_loss_is_proven_on_the_way_back() {
    let row =
        rows::rolling_back(Back::Undoing).apply(&rows::source_gone(Receiver::Incomplete)).unwrap();
    let Phase::Failed { cause, first, .. } = &row.phase else { panic!("{:?}", row.phase) };
    assert_eq!(cause.label(), "guest_lost");
    assert_eq!(first.as_ref().map(Cause::label), Some("cancelled"));
}

#[test]
fn a_human_decides_what_nothing_proves() {
    let gone = Event::ReceiverGone { proof: rows::gone("b"), ran: Ran::Maybe };
    let undecided = rows::rolling_back(Back::Undoing).apply(&gone).unwrap();
    assert_eq!(undecided.books().flight, Flight::Held);
    let kept = undecided.apply(&Event::Resolved { keep: Keep::Source }).unwrap();
    assert!(matches!(
        kept.phase,
        Phase::RollingBack { back: Back::Resuming { .. }, generation, .. }
            if generation == undecided.books().generation
    ));
    let ended = undecided.apply(&Event::Resolved { keep: Keep::Neither }).unwrap();
    assert_eq!(ended.outstanding(), Some(Effect::ReleaseSource { serves: Serves::Never }));
    // Nobody is asked about what is proven.
    let keep = Event::Resolved { keep: Keep::Source };
    assert_eq!(rows::failed(Cleanup::Source).apply(&keep), Err(Refusal::Stale));
}

#[test]
fn a_refused_live_move_goes_on_held_in_its_row() {
    let gave_up = |stood| Event::SourceGaveUp { error: "no byte crossed".into(), stood };
    let row = Migration { terms: rows::lenient(), ..rows::transferring() };
    let books = row.books();
    let labels = |row: &Migration| (row.outstanding().map(|effect| effect.label()), row.method);
    let row = row.apply(&gave_up(Stood::No)).unwrap();
    assert_eq!(labels(&row), (Some("cancel_transfer"), Method::Precopy));
    assert_eq!(
        row.refused_live().map(|(from, cause)| (from, cause.label())),
        Some((Method::Precopy, "gave_up"))
    );
    let row = row.apply(&Event::SourceContinued).unwrap();
    assert_eq!(labels(&row), (Some("destroy_receiver"), Method::Precopy));
    let gone = Event::ReceiverGone { proof: rows::gone_before(), ran: Ran::Never };
    let row = row.apply(&gone).unwrap();
    assert_eq!(labels(&row), (Some("arm_receiver"), Method::Snapshot));
    assert_eq!(row.downgraded.as_ref().map(|of| &of.receiver), Some(&rows::gone_before()));
    let row = row.apply(&Event::ReceiverArmed { listener: rows::listener() }).unwrap();
    assert_eq!(labels(&row), (Some("hold_guest"), Method::Snapshot));
    let row = row.apply(&Event::SourceHeld).unwrap();
    assert_eq!(labels(&row), (Some("start_transfer"), Method::Snapshot));
    assert_eq!(row.label(), PhaseLabel::Captured);
    assert_eq!(row.books(), books, "what is reserved stays so all the way");
    let row = row.apply(&Event::SourceStopped).unwrap();
    assert_eq!(labels(&row), (Some("order_switchover"), Method::Snapshot));
    // It is done once: a held move that is refused goes back.
    let row = rows::held().apply(&gave_up(Stood::No)).unwrap();
    assert_eq!(row.label(), PhaseLabel::RollingBack);
}

#[test]
fn a_live_move_is_not_held_where_nobody_allowed_it_or_the_guest_was_touched() {
    let failed = |stood| Event::TransferFailed { error: "broken pipe".into(), stood };
    let strict = rows::transferring();
    let lenient = Migration { terms: rows::lenient(), ..rows::transferring() };
    assert_eq!(strict.apply(&failed(Stood::No)).unwrap().label(), PhaseLabel::RollingBack);
    assert_eq!(lenient.apply(&failed(Stood::Yes)).unwrap().label(), PhaseLabel::RollingBack);
    // A blocker of QEMU's would stop the held one as well.
    let refused = Event::Refused { blockers: vec![] };
    assert_eq!(lenient.apply(&refused).unwrap().label(), PhaseLabel::RollingBack);
    let lost = Event::ReceiverGone { proof: rows::gone("b"), ran: Ran::Never };
    assert_eq!(lenient.apply(&lost).unwrap().label(), PhaseLabel::RollingBack);
    assert_eq!(
        lenient.apply(&Event::TransferTimedOut).unwrap().refused_live().map(|(from, _)| from),
        Some(Method::Precopy)
    );
}

#[test]
fn a_cancel_ends_a_downgrade_wherever_it_is() {
    for (row, owed) in [
        (rows::recalling(), "cancel_transfer"),
        (rows::clearing_live(), "destroy_receiver"),
        (rows::arming_again(), "destroy_receiver"),
        (rows::holding(), "cancel_transfer"),
        (rows::held(), "cancel_transfer"),
    ] {
        let back = row.apply(&Event::CancelRequested).unwrap();
        assert_eq!(back.label(), PhaseLabel::RollingBack);
        assert_eq!(back.outstanding().map(|effect| effect.label()), Some(owed));
        assert_eq!(back.phase.cause().map(Cause::label), Some("cancelled"));
    }
}

#[test]
fn a_held_source_that_failed_and_died_lets_the_whole_receiver_go_on() {
    // Its QEMU did not resume it: what the receiver has is the newest there is.
    let mut row = rows::rolling_back(Back::Undoing);
    if let Phase::RollingBack { cause, .. } = &mut row.phase {
        *cause = Cause::TransferFailed { error: "Channel error".into() };
    }
    let gone = rows::source_gone(Receiver::Complete(rows::handover_alone()));
    assert_eq!(row.apply(&gone).unwrap().label(), PhaseLabel::Failed);
    row.method = Method::Snapshot;
    assert_eq!(row.apply(&gone).unwrap().label(), PhaseLabel::Restored);
}

#[test]
fn the_time_of_each_part_of_a_downgrade_counts_anew() {
    let live = Migration { terms: rows::lenient(), ..rows::transferring() };
    let ways = [rows::arming(), rows::recalling(), rows::arming_again(), rows::held()];
    for pair in ways.windows(2) {
        assert!(pair[1].entered_anew(&pair[0]), "{:?}", pair[1].phase);
    }
    assert!(!live.entered_anew(&rows::arming()));
    assert!(!rows::clearing_live().entered_anew(&rows::recalling()));
    assert!(!rows::holding().entered_anew(&rows::arming_again()));
}

#[test]
fn a_row_that_was_overtaken_is_closed_by_a_human_and_frees_what_it_held() {
    let over = |known| Event::Overtaken { host: rows::host("c"), known };
    let newest = Generation::from_stored(9);
    for (name, row) in rows::all() {
        let before = row.books();
        assert!(row.apply(&over(before.generation)).is_err(), "{name}: nobody knows better");
        let closed = match row.apply(&over(newest)) {
            Ok(closed) => closed,
            Err(refusal) => {
                let queued = matches!(row.phase, Phase::Queued { .. });
                let expected = if queued { Refusal::Illegal } else { Refusal::Stale };
                assert_eq!(refusal, expected, "{name}");
                assert!(queued || before.flight == Flight::Released, "{name}");
                continue;
            }
        };
        let books = closed.books();
        assert_eq!(closed.outstanding(), None, "{name}: nothing is touched");
        assert_eq!((books.flight, books.reserved.len(), books.power), (Flight::Released, 0, None));
        assert_eq!((books.host, books.generation), (before.host, before.generation), "{name}");
        assert!(closed.phase.cause().unwrap().to_string().contains("host c knows generation 9"));
    }
}

#[test]
fn a_migration_stops_at_each_closed_gate_and_goes_on_at_a_word() {
    let armed = Event::ReceiverArmed { listener: rows::listener() };
    let row = rows::gated(rows::arming()).apply(&armed).unwrap();
    assert_eq!((row.waits_at(), row.outstanding()), (Some(GatePoint::Start), None));
    assert_eq!(row.opens(GatePoint::Switchover), None);
    let row = row.apply(&row.opens(GatePoint::Start).unwrap()).unwrap();
    assert_eq!(row.waits_at(), None);
    let row = row.apply(&Event::SourceStopped).unwrap();
    assert_eq!((row.waits_at(), row.outstanding()), (Some(GatePoint::Switchover), None));
    let row = row.apply(&row.opens(GatePoint::Switchover).unwrap()).unwrap();
    let entries = row.advance(Event::BothComplete { proof: rows::handover() }).unwrap();
    let row = &entries.last().unwrap().after;
    assert_eq!((row.waits_at(), row.label()), (Some(GatePoint::Commit), PhaseLabel::Restored));
    let row = row.apply(&row.opens(GatePoint::Commit).unwrap()).unwrap();
    assert_eq!(row.label(), PhaseLabel::Committed);
}

#[test]
fn the_last_word_opens_every_gate_that_is_left() {
    let row = rows::gated(rows::captured(Switchover::Withheld));
    let row = row.apply(&Event::GatesOpened).unwrap();
    assert_eq!(row.outstanding(), Some(Effect::OrderSwitchover));
    let entries = row.advance(Event::BothComplete { proof: rows::handover() }).unwrap();
    assert_eq!(entries.last().unwrap().after.label(), PhaseLabel::Committed);
    let late = rows::gated(rows::restored(rows::handover()));
    let entries = late.advance(Event::GatesOpened).unwrap();
    assert_eq!(entries.last().unwrap().after.label(), PhaseLabel::Committed);
}

#[test]
fn a_gate_that_nobody_opens_ends_the_move_with_a_cause_where_there_is_a_way_back() {
    for (row, owed) in [
        (rows::at_start_gate(), "destroy_receiver"),
        (rows::gated(rows::captured(Switchover::Withheld)), "cancel_transfer"),
        (rows::gated(rows::restored(rows::handover())), "destroy_receiver"),
    ] {
        let back = row.apply(&Event::GateExpired).unwrap();
        assert_eq!(back.phase.cause().map(Cause::label), Some("gate_expired"));
        assert_eq!(back.outstanding().map(|effect| effect.label()), Some(owed));
    }
    for row in [rows::restored(rows::handover_alone()), rows::restored_divided()] {
        let on = rows::gated(row).apply(&Event::GateExpired).unwrap();
        assert_eq!(on.label(), PhaseLabel::Committed);
    }
}

#[test]
fn the_time_at_a_gate_counts_for_itself() {
    let gate = rows::at_start_gate();
    assert!(gate.entered_anew(&rows::arming()) && rows::transferring().entered_anew(&gate));
    let gate = rows::captured(Switchover::Withheld);
    assert!(rows::captured(Switchover::Ordered).entered_anew(&gate));
}

#[cfg(feature = "serde")]
#[test]
fn a_row_from_before_there_was_a_gate_before_the_start_is_read() {
    let mut value = serde_json::to_value(rows::transferring()).unwrap();
    let terms = value["terms"].as_object_mut().unwrap();
    terms.remove("gate_deadline");
    terms["gates"].as_object_mut().unwrap().remove("start");
    let read: Migration = serde_json::from_value(value).unwrap();
    assert_eq!(
        (read.terms.gates, read.terms.gate_deadline),
        (Gates::OPEN, vmferry_types::Millis(600_000))
    );
}

#[cfg(feature = "serde")]
#[test]
fn a_row_from_before_there_were_downgrades_is_read() {
    let mut value = serde_json::to_value(rows::transferring()).unwrap();
    value.as_object_mut().unwrap().remove("downgraded");
    value["terms"].as_object_mut().unwrap().remove("downgrade");
    let read: Migration = serde_json::from_value(value).unwrap();
    assert_eq!(read, rows::transferring());
    let event = serde_json::json!({ "event": "source_gave_up", "error": "stalled" });
    let read: Event = serde_json::from_value(event).unwrap();
    assert_eq!(read, Event::SourceGaveUp { error: "stalled".into(), stood: Stood::Yes });
}

#[cfg(feature = "serde")]
#[test]
fn every_row_and_event_reads_back_as_it_was_written() {
    for (name, row) in rows::all() {
        let text = serde_json::to_string(&row).unwrap();
        let read: Migration = serde_json::from_str(&text).unwrap();
        assert_eq!(read, row, "{name}: {text}");
    }
    for (name, event) in rows::events() {
        let text = serde_json::to_string(&event).unwrap();
        let read: Event = serde_json::from_str(&text).unwrap();
        assert_eq!(read, event, "{name}: {text}");
    }
}

#[test]
fn a_receiver_does_not_go_on_once_the_source_has_run_past_it() {
    let gone = rows::source_gone(Receiver::Complete(rows::handover_alone()));
    let still = rows::rolling_back(Back::Undoing);
    assert_eq!(still.apply(&gone).unwrap().label(), PhaseLabel::Restored);
    let error = "Channel error".to_owned();
    for cause in [Cause::SourceRanAgain { error: error.clone() }, Cause::TransferFailed { error }] {
        let mut ran = still.clone();
        if let Phase::RollingBack { cause: turned_back, .. } = &mut ran.phase {
            *turned_back = cause;
        }
        assert_eq!(ran.apply(&gone).unwrap().label(), PhaseLabel::Failed);
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_row_is_written_as_reviewed() {
    let text = serde_json::to_string_pretty(&rows::committed(rows::handover())).unwrap();
    expect_file!["table/row.json"].assert_eq(&text);
}

proptest! {
    /// Whatever is told in whatever order, and whether or not it can be true.
    #[test]
    fn no_order_of_events_breaks_an_invariant(
        told in prop::collection::vec(prop::sample::select(rows::events()), 0..60),
    ) {
        let first = rows::queued();
        let (mut row, mut log) = (first.clone(), Vec::new());
        for (_, event) in told {
            let Ok(entries) = row.advance(event) else { continue };
            for entry in entries {
                let breaches = check::check_step(&row, &entry.after);
                prop_assert!(breaches.is_empty(), "{}: {breaches:?}", entry.event.label());
                row = entry.after;
                log.push(entry.event);
            }
        }
        prop_assert_eq!(check::replay(&first, &log), Ok(row));
    }
}
