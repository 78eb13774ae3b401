use proptest::prelude::*;
use vmferry_types::{Claim, Role, Timestamp};

use super::*;
use crate::migration::rows::{self, CLAIM, LATE, SOON, sides};
use crate::migration::{Back, Cleanup, Effect, Guest, Phase, Ran, Receiver, Side, Switchover};

/// What is read, by its label.
fn label(migration: &Migration, sides: &Sides, times: Times) -> &'static str {
    read(migration, sides, times).map_or("-", |event| event.label())
}

fn standing() -> Seen {
    Seen {
        run_state: RunState::FinishMigrate,
        transfer: TransferState::PreSwitchover,
        stopped_at_us: 5,
        ..rows::source_seen()
    }
}

fn switching() -> Seen {
    Seen { transfer: TransferState::Device, handed: Handed::Yes, ..standing() }
}

#[test]
fn what_was_answered_under_another_claim_counts_for_nothing() {
    for (name, row) in rows::all() {
        for other in [CLAIM.next(), Claim::from_stored(1)] {
            let mut both =
                sides(rows::dead(rows::source_sent()), rows::dead(rows::destination_full()));
            for seen in [&mut both.source, &mut both.destination].into_iter().flatten() {
                seen.claim = other;
            }
            assert_eq!(label(&row, &both, SOON), "-", "{name}");
        }
    }
}

#[test]
fn silence_proves_nothing() {
    for (name, row) in rows::all() {
        let nobody = Sides { claim: CLAIM, source: None, destination: None };
        assert_eq!(label(&row, &nobody, SOON), "-", "{name}");
        for knowledge in [Knowledge::Learning, Knowledge::Unresponsive, Knowledge::Unreadable] {
            let dim = |seen: Seen| Seen { knowledge, ..rows::dead(seen) };
            let both = sides(dim(rows::source_sent()), dim(rows::destination_full()));
            assert_eq!(label(&row, &both, SOON), "-", "{name} {knowledge:?}");
        }
    }
}

#[test]
fn unknown_words_of_qemu_prove_nothing() {
    let strange = |seen: Seen| Seen {
        run_state: RunState::from_qemu("suspended"),
        transfer: TransferState::from_agent("colo"),
        ..seen
    };
    for (name, row) in rows::all() {
        let both = sides(strange(rows::source_seen()), strange(rows::destination_seen()));
        assert_eq!(label(&row, &both, SOON), "-", "{name}");
    }
}

#[test]
fn a_transfer_of_an_earlier_attempt_proves_nothing() {
    // An agent whose journal speaks of another admission, whatever its QEMU says.
    let other = |seen: Seen| Seen { migration: None, ..seen };
    for (name, row) in rows::all() {
        let both = sides(other(rows::source_sent()), other(rows::destination_full()));
        assert_eq!(label(&row, &both, SOON), "-", "{name}");
    }
}

#[test]
fn a_source_that_stands_still_is_captured_whatever_its_run_state_was_read_as() {
    // STOP may come before or after the status: only the status counts.
    for run_state in [RunState::FinishMigrate, RunState::Running, RunState::Paused] {
        let both = sides(Seen { run_state, ..standing() }, rows::destination_seen());
        assert_eq!(label(&rows::transferring(), &both, SOON), "source_stopped");
    }
}

#[test]
fn both_have_to_say_that_all_has_arrived() {
    let row = rows::captured(Switchover::Ordered);
    let check = |source: Seen, destination: Seen| label(&row, &sides(source, destination), SOON);
    assert_eq!(check(rows::source_sent(), rows::destination_full()), "both_complete");
    assert_eq!(check(rows::source_sent(), rows::destination_seen()), "-");
    assert_eq!(check(switching(), rows::destination_full()), "-");
    let running = Seen { run_state: RunState::Running, ..rows::destination_full() };
    assert_eq!(check(rows::source_sent(), running), "-");
    let continued = Seen { continued: Continued::Yes, ..rows::destination_full() };
    assert_eq!(check(rows::source_sent(), continued), "-");
    let unordered = Seen { handed: Handed::No, ..rows::source_sent() };
    assert_eq!(check(unordered, rows::destination_full()), "-");
}

#[test]
fn a_source_seen_running_after_the_order_is_the_only_way() {
    let runs = Seen { run_state: RunState::Running, ..switching() };
    let ran = Seen { resumed_at_us: 6, ..rows::source_sent() };
    for row in [
        rows::captured(Switchover::Ordered),
        rows::captured(Switchover::Forward),
        rows::restored(rows::handover()),
    ] {
        for source in [&runs, &ran] {
            let both = sides(source.clone(), rows::destination_full());
            assert_eq!(label(&row, &both, SOON), "source_runs_again");
        }
    }
}

#[test]
fn an_answer_from_before_the_guest_stopped_is_not_taken_for_a_source_that_runs_again() {
    let both = sides(rows::source_seen(), rows::destination_seen());
    assert_eq!(label(&rows::captured(Switchover::Ordered), &both, SOON), "-");
}

#[test]
fn a_dead_source_is_decided_by_what_the_destination_says() {
    let row = rows::captured(Switchover::Ordered);
    let check = |destination: Option<Seen>, times| {
        let source = Some(rows::dead(switching()));
        match read(&row, &Sides { claim: CLAIM, source, destination }, times) {
            Some(Event::SourceGone { receiver: Receiver::Complete(_), .. }) => "forward",
            Some(Event::SourceGone { receiver: Receiver::Incomplete, .. }) => "lost",
            Some(_) => "other",
            None => "-",
        }
    };
    assert_eq!(check(Some(rows::destination_full()), SOON), "forward");
    assert_eq!(check(None, LATE), "-");
    let failed = Seen { transfer: TransferState::Failed, ..rows::destination_seen() };
    assert_eq!(check(Some(failed), SOON), "lost");
    assert_eq!(check(Some(rows::dead(rows::destination_full())), SOON), "lost");
    // It may still be loading what had arrived; but not for ever.
    assert_eq!(check(Some(rows::destination_seen()), SOON), "-");
    assert_eq!(check(Some(rows::destination_seen()), LATE), "lost");
    // What it said before it fell silent may be from before the last of it arrived.
    let fell_silent = Seen { heard: Heard::Before, ..rows::destination_seen() };
    assert_eq!(check(Some(fell_silent), LATE), "-");
}

#[test]
fn a_dead_source_that_had_run_on_is_lost_though_the_destination_has_everything() {
    let source = rows::dead(Seen { resumed_at_us: 6, ..switching() });
    let both = sides(source, rows::destination_full());
    for row in [rows::captured(Switchover::Ordered), rows::rolling_back(Back::Undoing)] {
        let event = read(&row, &both, SOON).unwrap();
        let lost = matches!(event, Event::SourceGone { receiver: Receiver::Incomplete, .. });
        assert!(lost, "{event:?}");
    }
}

#[test]
fn an_overdue_switchover_is_decided_only_by_both_answers() {
    let row = rows::captured(Switchover::Ordered);
    let silent = Seen { knowledge: Knowledge::Unresponsive, ..switching() };
    let full = rows::destination_full;
    assert_eq!(label(&row, &sides(switching(), full()), SOON), "-");
    assert_eq!(label(&row, &sides(switching(), rows::destination_seen()), LATE), "decided_back");
    assert_eq!(label(&row, &sides(silent.clone(), full()), LATE), "decided_forward");
    assert_eq!(label(&row, &sides(silent, rows::destination_seen()), LATE), "-");
    // Its host may have died since it said so, and then the receiver has the only whole guest.
    let fell_silent = |seen: Seen| Seen { heard: Heard::Before, ..seen };
    assert_eq!(label(&row, &sides(fell_silent(switching()), full()), LATE), "-");
    assert_eq!(label(&row, &sides(switching(), fell_silent(full())), LATE), "-");
    let alone = Sides { destination: None, ..sides(switching(), full()) };
    assert_eq!(label(&row, &alone, LATE), "-");
}

#[test]
fn only_a_whole_journal_says_that_an_owner_never_ran_the_guest() {
    let row = rows::committed(rows::handover());
    let ran = |destination: Seen| match read(&row, &sides(rows::source_sent(), destination), SOON) {
        Some(Event::ReceiverGone { ran, .. }) => Some(ran),
        Some(_) | None => None,
    };
    let gone = rows::dead(rows::destination_full());
    assert_eq!(ran(gone.clone()), Some(Ran::Never));
    for continued in [Continued::Yes, Continued::Unknown] {
        assert_eq!(ran(Seen { continued, ..gone.clone() }), Some(Ran::Maybe));
    }
    assert_eq!(ran(Seen { knowledge: Knowledge::UnknownVm, ..gone.clone() }), Some(Ran::Maybe));
    assert_eq!(ran(Seen { knowledge: Knowledge::Unreadable, ..gone }), None);
    let declared = crate::migration::GoneProof {
        kind: crate::migration::ProofKind::HostDeclaredDead,
        ..rows::gone("b")
    };
    let dead = Seen::dead(CLAIM, rows::GENERATION, Role::Receiver, declared);
    assert_eq!(ran(dead), Some(Ran::Maybe));
}

#[test]
fn a_guest_is_attached_when_it_was_seen_to_run_under_the_new_generation() {
    let row = rows::committed(rows::handover());
    let runs = Seen {
        generation: rows::GENERATION.next(),
        continued: Continued::Yes,
        run_state: RunState::Running,
        role: Role::Running,
        ..rows::destination_full()
    };
    let check = |destination| label(&row, &sides(rows::source_sent(), destination), SOON);
    assert_eq!(check(runs.clone()), "destination_runs");
    // Its agent died before it wrote down that the guest is its own: it has to be told again.
    assert_eq!(check(Seen { role: Role::Receiver, ..runs.clone() }), "-");
    assert_eq!(check(Seen { generation: rows::GENERATION, ..runs.clone() }), "-");
    assert_eq!(check(Seen { continued: Continued::No, ..runs.clone() }), "-");
    // The order to continue is journalled before QEMU hears it.
    assert_eq!(check(Seen { run_state: RunState::Paused, ..runs }), "-");
}

#[test]
fn a_source_has_kept_its_guest_only_when_its_transfer_is_over() {
    let row = rows::rolling_back(Back::Cancelling);
    let check = |source| label(&row, &sides(source, rows::destination_seen()), SOON);
    let cancelled = Seen { transfer: TransferState::Cancelled, ..rows::source_seen() };
    assert_eq!(check(cancelled.clone()), "source_continued");
    assert_eq!(
        check(Seen { transfer: TransferState::None, ..cancelled.clone() }),
        "source_continued"
    );
    assert_eq!(check(rows::source_seen()), "-");
    assert_eq!(check(standing()), "-");
    let paused = Seen { run_state: RunState::Paused, ..cancelled };
    assert_eq!(check(paused.clone()), "-");
    // Its user has paused it since: it is given back as it is.
    let given_up = Seen { gave_up: Some("cancelled".into()), ..paused };
    assert_eq!(check(given_up.clone()), "source_continued");
    assert_eq!(check(Seen { held: Held::Yes, ..given_up }), "-");
}

#[test]
fn a_source_that_went_on_by_itself_is_back_only_when_its_journal_says_so() {
    let row = rows::rolling_back(Back::Resuming { gone: rows::gone("b") });
    let check = |gave_up: Option<&str>| {
        let gave_up = gave_up.map(str::to_owned);
        let source = Seen { gave_up, run_state: RunState::Running, ..switching() };
        label(&row, &sides(source, rows::destination_seen()), SOON)
    };
    assert_eq!(check(None), "-");
    assert_eq!(check(Some("the receiver is gone")), "source_continued");
}

#[test]
fn the_reason_of_a_failed_transfer_is_told_by_both_sides() {
    let failed = |seen: Seen, error: &str| Seen {
        transfer: TransferState::Failed,
        transfer_error: error.into(),
        ..seen
    };
    let both = sides(
        failed(rows::source_seen(), "Channel error: Input/output error"),
        failed(rows::destination_seen(), "Unknown ramblock \"mem0\""),
    );
    let Some(Event::TransferFailed { error, .. }) = read(&rows::transferring(), &both, SOON) else {
        panic!("nothing was read");
    };
    assert_eq!(
        error,
        "source: Channel error: Input/output error; destination: Unknown ramblock \"mem0\""
    );
}

#[test]
fn a_guest_that_turns_itself_off_is_not_lost() {
    let off = Seen { ended: Ended::ByGuest, ..rows::dead(rows::source_seen()) };
    let both = sides(off, rows::destination_seen());
    for row in [rows::arming(), rows::transferring(), rows::rolling_back(Back::Cancelling)] {
        assert_eq!(label(&row, &both, SOON), "guest_powered_off");
    }
    let off = Seen { ended: Ended::ByGuest, ..rows::dead(rows::destination_full()) };
    let both = sides(rows::source_sent(), off);
    for row in [rows::committed(rows::handover()), rows::attached(Guest::Present)] {
        assert_eq!(label(&row, &both, SOON), "guest_powered_off");
    }
}

#[test]
fn what_is_absent_while_arming_may_only_be_not_there_yet() {
    let absent = Seen { role: Role::Absent, ..rows::dead(rows::destination_seen()) };
    let both = sides(rows::source_seen(), absent);
    assert_eq!(label(&rows::arming(), &both, SOON), "-");
    let both = sides(rows::source_seen(), rows::dead(rows::destination_seen()));
    assert_eq!(label(&rows::arming(), &both, SOON), "receiver_gone");
}

#[test]
fn a_release_is_done_when_the_gone_source_is_out_of_its_agents_journal() {
    let gone = rows::dead(rows::source_sent());
    let cleared = Seen { role: Role::Absent, ..gone.clone() };
    for row in [
        rows::attached(Guest::Present),
        rows::attached(Guest::PoweredOff),
        rows::failed(Cleanup::Source),
    ] {
        let both = sides(cleared.clone(), rows::destination_full());
        assert_eq!(label(&row, &both, SOON), "source_released");
        // Its agent would go on saying that the VM runs there.
        let both = sides(gone.clone(), rows::destination_full());
        assert_eq!(label(&row, &both, SOON), "-");
    }
}

#[test]
fn nobody_has_to_acknowledge_for_a_host_that_was_declared_dead() {
    let declared = |host: &str| crate::migration::GoneProof {
        kind: crate::migration::ProofKind::HostDeclaredDead,
        ..rows::gone(host)
    };
    let dead = |host, role| Seen::dead(CLAIM, rows::GENERATION, role, declared(host));
    let source = dead("a", Role::Running);
    let both = sides(source, rows::destination_full());
    assert_eq!(label(&rows::attached(Guest::Present), &both, SOON), "source_released");
    let both = sides(rows::source_seen(), dead("b", Role::Receiver));
    // One that never said that it armed a receiver will not arm one either.
    for row in [rows::arming(), rows::rolling_back(Back::Clearing), rows::failed(Cleanup::Receiver)]
    {
        assert_eq!(label(&row, &both, SOON), "receiver_gone");
    }
}

#[test]
fn a_way_back_ends_when_nothing_of_the_receiver_is_left() {
    let row = rows::rolling_back(Back::Clearing);
    let gone = rows::dead(rows::destination_seen());
    assert_eq!(label(&row, &sides(rows::source_seen(), gone.clone()), SOON), "-");
    let cleared = Seen { role: Role::Absent, ..gone };
    assert_eq!(label(&row, &sides(rows::source_seen(), cleared), SOON), "receiver_gone");
}

#[test]
fn an_agent_is_commanded_only_after_it_answered() {
    for (name, row) in rows::all() {
        let Some(effect) = row.outstanding() else { continue };
        let Some(side) = effect.side() else { continue };
        let nobody = Sides { claim: CLAIM, source: None, destination: None };
        let refusal = permit(&row, &effect, &nobody).unwrap_err();
        assert_eq!(refusal, Withheld::NotAnswered { side }, "{name}");
        let learning = |seen: Seen| Seen { knowledge: Knowledge::Learning, ..seen };
        let both = sides(learning(rows::source_sent()), learning(rows::destination_full()));
        assert_eq!(permit(&row, &effect, &both), Err(Withheld::Learning { side }), "{name}");
    }
}

#[test]
fn a_receiver_is_ended_after_the_order_only_with_the_sources_word() {
    let row = rows::rolling_back(Back::Undoing);
    let effect = row.outstanding().unwrap();
    let check = |source: Option<Seen>, destination: Seen| {
        permit(&row, &effect, &Sides { claim: CLAIM, source, destination: Some(destination) })
    };
    let full = rows::destination_full;
    assert_eq!(check(None, full()), Err(Withheld::SourceMayBeLost));
    assert_eq!(check(Some(rows::dead(switching())), full()), Err(Withheld::SourceMayBeLost));
    let silent = Seen { knowledge: Knowledge::Unresponsive, ..switching() };
    assert_eq!(check(Some(silent), full()), Err(Withheld::SourceMayBeLost));
    assert_eq!(check(Some(rows::source_sent()), full()), Ok(()));
    let fell_silent = Seen { heard: Heard::Before, ..rows::source_sent() };
    assert_eq!(check(Some(fell_silent), full()), Err(Withheld::SourceMayBeLost));
    // One that failed to load can carry nothing on.
    let failed = Seen { transfer: TransferState::Failed, ..rows::destination_seen() };
    assert_eq!(check(None, failed), Ok(()));
}

#[test]
fn a_source_is_killed_only_if_it_stands_still_and_the_destination_has_everything() {
    let row = rows::captured(Switchover::Forward);
    let effect = row.outstanding().unwrap();
    assert_eq!(effect.side(), Some(Side::Source));
    let silent =
        Seen { knowledge: Knowledge::Unresponsive, run_state: RunState::Unknown, ..switching() };
    let check = |source, destination| permit(&row, &effect, &sides(source, destination));
    assert_eq!(check(silent.clone(), rows::destination_full()), Ok(()));
    let incomplete = check(silent.clone(), rows::destination_seen());
    assert_eq!(incomplete, Err(Withheld::DestinationIncomplete));
    let fell_silent = Seen { heard: Heard::Before, ..rows::destination_full() };
    assert_eq!(check(silent.clone(), fell_silent), Err(Withheld::DestinationIncomplete));
    let runs = Seen { run_state: RunState::Running, ..switching() };
    assert_eq!(check(runs, rows::destination_full()), Err(Withheld::SourceRuns));
    let ran = Seen { resumed_at_us: 6, ..silent };
    assert_eq!(check(ran, rows::destination_full()), Err(Withheld::SourceRuns));
}

fn any_seen(base: Seen) -> impl Strategy<Value = Seen> {
    let knowledge = prop_oneof![
        4 => Just(Knowledge::Known),
        1 => Just(Knowledge::Unresponsive),
        1 => Just(Knowledge::Learning),
        1 => Just(Knowledge::UnknownVm),
    ];
    let run_state = prop::sample::select(vec![
        RunState::Running,
        RunState::Paused,
        RunState::InMigrate,
        RunState::FinishMigrate,
        RunState::PostMigrate,
        RunState::IoError,
        RunState::Unknown,
    ]);
    let transfer = prop::sample::select(vec![
        TransferState::None,
        TransferState::Active,
        TransferState::PreSwitchover,
        TransferState::Device,
        TransferState::Cancelled,
        TransferState::Completed,
        TransferState::Failed,
        TransferState::Unknown,
    ]);
    let journal = (
        prop::sample::select(vec![Handed::No, Handed::Yes]),
        prop::option::of(Just("stalled".to_owned())),
        prop::sample::select(vec![Continued::No, Continued::Yes, Continued::Unknown]),
        0u64..3,
        0u64..3,
    );
    (knowledge, run_state, transfer, journal, prop::bool::weighted(0.3)).prop_map(
        move |(knowledge, run_state, transfer, journal, gone)| {
            let (handed, gave_up, continued, stopped_at_us, resumed_at_us) = journal;
            let seen = Seen {
                knowledge,
                run_state,
                transfer,
                handed,
                gave_up,
                continued,
                stopped_at_us,
                resumed_at_us,
                ..base.clone()
            };
            if gone { rows::dead(seen) } else { seen }
        },
    )
}

proptest! {
    /// Whatever two sides say, and however absurd, what is read of it is legal in its phase.
    #[test]
    fn what_is_read_is_never_illegal(
        source in any_seen(rows::source_seen()),
        destination in any_seen(rows::destination_seen()),
        late in prop::bool::ANY,
    ) {
        let both = sides(source, destination);
        for (name, row) in rows::all() {
            if let Some(event) = read(&row, &both, if late { LATE } else { SOON }) {
                prop_assert!(row.apply(&event).is_ok(), "{name}: {event:?}");
            }
        }
    }

    /// Ownership follows evidence only: nothing that two sides say alone continues a destination
    /// while its source may run.
    #[test]
    fn a_source_that_can_run_is_never_passed_over(
        source in any_seen(rows::source_seen()),
        destination in any_seen(rows::destination_seen()),
    ) {
        let may_run = source.gone.is_none()
            && (source.run_state.has_run() || source.ran_again());
        let both = sides(source, destination);
        for (name, row) in rows::all() {
            let before = matches!(row.phase, Phase::Captured { .. } | Phase::RollingBack { .. });
            let Some(event) = read(&row, &both, LATE).filter(|_| before) else { continue };
            let after = row.apply(&event).unwrap();
            let forward = after.outstanding() == Some(Effect::Commit);
            prop_assert!(!(forward && may_run), "{name}: {event:?}");
        }
    }
}

/// A held source whose memory crosses.
fn crossing() -> Seen {
    Seen { transfer: TransferState::Active, ..rows::source_held() }
}

#[test]
fn a_guest_is_captured_only_when_it_stands_still_by_the_journal() {
    let row = rows::holding();
    let check = |source: Seen| label(&row, &sides(source, rows::destination_seen()), SOON);
    let held = rows::source_held();
    assert_eq!(check(held.clone()), "source_held");
    // Stopped by somebody else, or not stopped yet, or given up.
    assert_eq!(check(Seen { held: Held::No, ..held.clone() }), "-");
    assert_eq!(check(Seen { run_state: RunState::Running, ..held.clone() }), "-");
    assert_eq!(check(Seen { gave_up: Some("unheard".into()), ..held.clone() }), "-");
    assert_eq!(check(Seen { resumed_at_us: 9, ..held }), "-");
}

#[test]
fn what_the_source_says_of_the_live_attempt_is_not_taken_for_the_held_one() {
    let before = Seen {
        transfer: TransferState::Failed,
        transfer_error: "broken pipe".into(),
        gave_up: Some("no byte crossed".into()),
        ..rows::source_seen()
    };
    let both = sides(before, rows::destination_seen());
    assert_eq!(label(&rows::arming_again(), &both, SOON), "-");
    assert_eq!(label(&rows::holding(), &both, SOON), "-");
}

#[test]
fn a_held_guest_that_runs_turns_its_move_back() {
    let runs = Seen { run_state: RunState::Running, ..crossing() };
    let ran = Seen { resumed_at_us: 9, ..crossing() };
    for source in [runs, ran] {
        for row in [rows::held(), rows::captured(Switchover::Withheld)] {
            let both = sides(source.clone(), rows::destination_seen());
            assert_eq!(label(&row, &both, SOON), "source_runs_again");
        }
    }
    let both = sides(crossing(), rows::destination_seen());
    assert_eq!(label(&rows::held(), &both, SOON), "-");
}

#[test]
fn a_held_guest_goes_from_its_capture_to_the_order_like_any_other() {
    let standing = Seen {
        transfer: TransferState::PreSwitchover,
        run_state: RunState::FinishMigrate,
        ..crossing()
    };
    let both = sides(standing, rows::destination_seen());
    assert_eq!(label(&rows::held(), &both, SOON), "source_stopped");
}

#[test]
fn a_guest_is_back_only_when_it_is_not_held_any_more() {
    let cancelled = Seen {
        transfer: TransferState::Cancelled,
        run_state: RunState::Running,
        held: Held::Yes,
        ..rows::source_seen()
    };
    for (row, handed) in [
        (rows::rolling_back(Back::Cancelling), Handed::No),
        (rows::rolling_back(Back::Resuming { gone: rows::gone("b") }), Handed::No),
        (rows::recalling(), Handed::No),
    ] {
        let source = Seen { handed, ..cancelled.clone() };
        let check = |source: Seen| label(&row, &sides(source, rows::destination_seen()), SOON);
        assert_eq!(check(source.clone()), "-");
        assert_eq!(check(Seen { held: Held::No, ..source }), "source_continued");
    }
}

#[test]
fn a_held_source_is_released_only_when_its_journal_says_so() {
    let row = rows::attached(Guest::Present);
    let dead = rows::dead(Seen { role: Role::Held, ..rows::source_sent() });
    let both = sides(dead.clone(), rows::destination_full());
    assert_eq!(label(&row, &both, SOON), "-");
    let both = sides(Seen { role: Role::Absent, ..dead }, rows::destination_full());
    assert_eq!(label(&row, &both, SOON), "source_released");
}

#[test]
fn the_receiver_of_the_attempt_before_is_not_taken_for_this_one() {
    let old = Seen { gone: Some(rows::gone_before()), ..rows::dead(rows::destination_seen()) };
    for row in [rows::holding(), rows::held()] {
        let both = sides(rows::source_held(), old.clone());
        assert_ne!(label(&row, &both, SOON), "receiver_gone");
        let both = sides(rows::source_held(), rows::dead(rows::destination_seen()));
        assert_eq!(label(&row, &both, SOON), "receiver_gone");
    }
    // Nor what it had, whatever it says.
    let before = rows::gone_before();
    let process = crate::migration::Process {
        pid: before.pid,
        start_time: before.start_time,
        boot_id: before.boot_id,
    };
    let full = Seen { process: Some(process), ..rows::destination_full() };
    let mut row = rows::held();
    row.phase = rows::captured(Switchover::Ordered).phase;
    let sent = rows::source_sent;
    assert_eq!(label(&row, &sides(sent(), full), SOON), "-");
    assert_eq!(label(&row, &sides(sent(), rows::destination_full()), SOON), "both_complete");
}

#[test]
fn a_transfer_that_stood_still_is_told_from_one_that_did_not() {
    use crate::migration::Stood;
    let check = |stopped_at_us, resumed_at_us| {
        let source = Seen {
            gave_up: Some("no byte crossed".into()),
            stopped_at_us,
            resumed_at_us,
            ..rows::source_seen()
        };
        match read(&rows::transferring(), &sides(source, rows::destination_seen()), SOON) {
            Some(Event::SourceGaveUp { stood, .. }) => stood,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(check(0, 0), Stood::No);
    // It was let run at its start: long before this attempt.
    assert_eq!(check(0, 4), Stood::No);
    assert_eq!(check(5, 6), Stood::Yes);
}

#[test]
fn a_guest_that_is_held_in_vain_is_brought_back_after_the_stall_limit() {
    let late = Times { now: Timestamp(SOON.entered.value() + 30_001), ..SOON };
    let armed = || Seen { transfer: TransferState::Setup, ..rows::destination_seen() };
    let came = || Seen { transfer: TransferState::Active, ..rows::destination_seen() };
    let waiting =
        |knowledge| Seen { knowledge, run_state: RunState::Unknown, ..rows::source_held() };
    for row in [rows::holding(), rows::held()] {
        for (knowledge, receiver, decided) in [
            (Knowledge::Known, armed(), "transfer_timed_out"),
            (Knowledge::Known, came(), "transfer_timed_out"),
            (Knowledge::Unresponsive, armed(), "transfer_timed_out"),
            (Knowledge::Learning, armed(), "transfer_timed_out"),
            // What crosses, the one that learns may not know yet.
            (Knowledge::Unresponsive, came(), "-"),
            (Knowledge::Learning, came(), "-"),
        ] {
            let both = sides(waiting(knowledge), receiver);
            assert_eq!(label(&row, &both, SOON), "-", "{knowledge:?}");
            assert_eq!(label(&row, &both, late), decided, "{knowledge:?}");
        }
        let runs = Seen { held: Held::No, ..waiting(Knowledge::Unresponsive) };
        assert_eq!(label(&row, &sides(runs, armed()), late), "-");
        let silent = Sides { source: None, ..sides(waiting(Knowledge::Known), armed()) };
        assert_eq!(label(&row, &silent, late), "-");
    }
    let crosses = sides(crossing(), came());
    assert_eq!(label(&rows::held(), &crosses, late), "-");
}

#[test]
fn nothing_is_sent_for_a_held_move_unless_the_guest_is_held() {
    let effect = Effect::StartTransfer { listener: rows::listener() };
    let check = |source| permit(&rows::held(), &effect, &sides(source, rows::destination_seen()));
    assert_eq!(check(rows::source_held()), Ok(()));
    assert_eq!(check(rows::source_seen()), Err(Withheld::NotHeld));
}

#[test]
fn a_receiver_that_failed_waits_for_what_its_source_is_about_to_tell() {
    let failed = || Seen {
        transfer: TransferState::Failed,
        transfer_error: "load of migration failed".into(),
        ..rows::destination_seen()
    };
    for row in [rows::transferring(), rows::held()] {
        let check = |source: Seen| label(&row, &sides(source, failed()), SOON);
        assert_eq!(check(crossing()), "-");
        assert_eq!(check(Seen { gave_up: Some("late".into()), ..crossing() }), "source_gave_up");
        for transfer in [TransferState::Failed, TransferState::Cancelled] {
            assert_eq!(check(Seen { transfer, ..crossing() }), "transfer_failed");
        }
        // A driver that has just taken over, and has heard the destination first.
        let unheard = Sides { source: None, ..sides(crossing(), failed()) };
        assert_eq!(label(&row, &unheard, SOON), "-");
        assert_eq!(check(Seen { knowledge: Knowledge::Learning, ..crossing() }), "-");
    }
    let ordered = rows::captured(Switchover::Ordered);
    assert_eq!(label(&ordered, &sides(switching(), failed()), SOON), "transfer_failed");
}
