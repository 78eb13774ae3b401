use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::num::NonZeroU32;

use expect_test::expect_file;
use proptest::prelude::*;
use vmferry_types::{Bytes, BytesPerSec, MilliCpu, Millis, Percent};

use super::*;
use crate::lifecycle::Ended;
use crate::lifecycle::emptiness::{HostFacts, Inside, Presence};
use crate::maintenance::{Code, Crossing, PinsToSource, Strategy as Carrying};

const NOW: Timestamp = Timestamp(1_000);
const FIRST: VmId = VmId::from_u128(1);
const SECOND: VmId = VmId::from_u128(2);

fn host(id: &str) -> HostId {
    id.parse().unwrap()
}

fn migration(number: u128) -> MigrationId {
    MigrationId::from_u128(number)
}

pub(in crate::lifecycle) fn policy(max_parallel: u32) -> Policy {
    Policy {
        strategy: Carrying::LiveOnly,
        max_parallel: NonZeroU32::new(max_parallel).unwrap(),
        reserve_cpu_percent: Percent::new(0).unwrap(),
        reserve_memory_percent: Percent::new(10).unwrap(),
        crossing: Crossing::Refused,
        pins: PinsToSource::Hold,
        dry_run: false,
    }
}

fn one(vm: VmId, state: MoveState) -> Move {
    let demand = Demand { memory: Bytes(4 << 30), cpu: MilliCpu(1_000) };
    Move { vm, demand, mode: Mode::Live, planned: host("b"), state }
}

fn job(phase: Phase, states: [MoveState; 2]) -> Job {
    let [first, second] = states;
    Job {
        id: JobId::from_u128(7),
        host: host("a"),
        policy: policy(1),
        by: "operator".into(),
        opened: Timestamp(100),
        moves: vec![one(FIRST, first), one(SECOND, second)],
        unplaced: vec![],
        phase,
    }
}

pub(in crate::lifecycle) fn planned() -> Job {
    job(Phase::Planned, [MoveState::Waiting, MoveState::Waiting])
}

fn begun(number: u128) -> MoveState {
    MoveState::Begun { migration: migration(number) }
}

fn moved(number: u128) -> MoveState {
    MoveState::Moved {
        migration: migration(number),
        destination: host("b"),
        generation: Generation::from_stored(4),
        at: Timestamp(500),
    }
}

fn failure() -> MoveState {
    MoveState::Failed { migration: Some(migration(1)), error: "channel".into(), at: NOW }
}

fn proof(after: u64) -> Emptiness {
    Emptiness { composed_after: Timestamp(after) }
}

fn returns(state: ReturnState) -> Vec<Return> {
    vec![Return {
        vm: FIRST,
        from: host("b"),
        generation: Generation::from_stored(4),
        mode: Mode::Live,
        state,
    }]
}

pub(in crate::lifecycle) fn rows() -> Vec<(&'static str, Job)> {
    use MoveState::{NotBegun, Waiting};
    let unplaced = Unplaced { vm: SECOND, code: Code::PinnedToSource, blockers: vec![], more: 0 };
    let blocked = Job { unplaced: vec![unplaced], ..job(Phase::Blocked, [Waiting, Waiting]) };
    let failure_of = || Stop::Failure { error: "VM 1: channel".into() };
    let asked = || Stop::Asked { by: "alice".into() };
    let died = || Stop::Died { error: "host a died".into() };
    let done = |back| Phase::Completed { at: NOW, back };
    let ended = |phase| job(phase, [moved(1), moved(2)]);
    vec![
        ("planned", planned()),
        ("dry run", Job { policy: Policy { dry_run: true, ..policy(1) }, ..planned() }),
        ("blocked", blocked),
        ("running w w", job(Phase::Running, [Waiting, Waiting])),
        ("running b w", job(Phase::Running, [begun(1), Waiting])),
        ("running d w", job(Phase::Running, [moved(1), Waiting])),
        ("running b b", job(Phase::Running, [begun(1), begun(2)])),
        ("running b d", job(Phase::Running, [begun(1), moved(2)])),
        ("verifying", ended(Phase::Verifying { since: Timestamp(500) })),
        ("stopping asked", job(Phase::Stopping { why: asked() }, [begun(1), NotBegun])),
        ("stopping failed", job(Phase::Stopping { why: failure_of() }, [begun(1), failure()])),
        (
            "stopping asked c",
            job(
                Phase::Stopping { why: asked() },
                [MoveState::Cancelling { migration: migration(1) }, NotBegun],
            ),
        ),
        ("stopping died", job(Phase::Stopping { why: died() }, [begun(1), NotBegun])),
        ("maintenance", ended(Phase::Maintenance { since: NOW, proof: proof(600) })),
        ("completed", ended(done(vec![]))),
        ("returning w", ended(done(returns(ReturnState::Waiting)))),
        ("returning b", ended(done(returns(ReturnState::Begun { migration: migration(1) })))),
        ("returned", ended(done(returns(ReturnState::Returned { at: NOW })))),
        (
            "failed",
            job(Phase::Failed { at: NOW, error: "VM 1: channel".into() }, [failure(), NotBegun]),
        ),
        (
            "cancelled",
            job(
                Phase::Cancelled { at: NOW, why: Cancelled::Asked { by: "alice".into() } },
                [MoveState::Cancelled { migration: migration(1), at: NOW }, NotBegun],
            ),
        ),
    ]
}

fn ended(number: u128, how: Ended) -> Event {
    Event::MigrationEnded { migration: migration(number), how, at: NOW }
}

fn arrived() -> Ended {
    Ended::Moved { destination: host("b"), generation: Generation::from_stored(4) }
}

fn failed(error: &str) -> Ended {
    Ended::Failed { error: error.into() }
}

fn events() -> Vec<(&'static str, Event)> {
    let complete = |returning| Event::CompleteRequested { returning, at: NOW };
    vec![
        ("execute", Event::ExecuteRequested { at: NOW }),
        ("cancel", Event::CancelRequested { by: "alice".into(), at: NOW }),
        ("superseded", Event::Superseded { by: JobId::from_u128(8), at: NOW }),
        ("begun 1", Event::Begun { vm: FIRST, migration: migration(1) }),
        ("not begun 1", Event::NotBegun { vm: FIRST, error: "missing_path".into(), at: NOW }),
        ("left 2", Event::Left { vm: SECOND, at: NOW }),
        ("cancel asked 1", Event::CancelAsked { vm: FIRST }),
        ("ended moved 1", ended(1, arrived())),
        ("ended failed 1", ended(1, failed("channel"))),
        ("ended cancel. 1", ended(1, Ended::Cancelled)),
        ("host died", Event::HostDied { how: "declared".into(), at: NOW }),
        ("found empty", Event::FoundEmpty { proof: proof(600), at: NOW }),
        ("found too early", Event::FoundEmpty { proof: proof(500), at: NOW }),
        ("verify expired", Event::VerifyExpired { note: "guests".into(), at: NOW }),
        ("complete", complete(Returning::Stay)),
        ("complete return", complete(Returning::Return)),
    ]
}

/// Writes a row as its phase and what became of its VMs.
fn cell(row: &Job) -> String {
    let letter = |one: &Move| match one.state {
        MoveState::Waiting => "w",
        MoveState::Begun { .. } => "b",
        MoveState::Cancelling { .. } => "c",
        MoveState::Moved { .. } => "d",
        MoveState::Left { .. } => "l",
        MoveState::Failed { .. } => "f",
        MoveState::Cancelled { .. } => "x",
        MoveState::NotBegun => "n",
    };
    let states: Vec<&str> = row.moves.iter().map(letter).collect();
    let phase = match &row.phase {
        Phase::Planned => "planned",
        Phase::Blocked => "blocked",
        Phase::Running => "running",
        Phase::Verifying { .. } => "verifying",
        Phase::Stopping { why: Stop::Asked { .. } } => "stop ask",
        Phase::Stopping { why: Stop::Failure { .. } } => "stop fail",
        Phase::Stopping { why: Stop::Died { .. } } => "stop died",
        Phase::Maintenance { .. } => "maint.",
        Phase::Completed { back, .. } => {
            let open = back.iter().any(Return::is_open);
            return if open { "returning".into() } else { "completed".into() };
        }
        Phase::Failed { .. } => "failed",
        Phase::Cancelled { .. } => "cancelled",
    };
    format!("{phase} {}", states.join(" "))
}

#[test]
fn the_table_is_as_reviewed() {
    let mut text = String::from(
        "Row × event: the row after, '.' stale, '!' illegal, 'denied' told to the caller.\n\
         VMs: w waiting, b begun, c cancelling, d done, l left, f failed, x cancelled, n not begun.\n",
    );
    for events in events().chunks(6) {
        write!(text, "\n{:<18}", "").unwrap();
        for (event, _) in events {
            write!(text, "{event:<17}").unwrap();
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
        for (row_name, row) in rows() {
            write!(text, "{row_name:<18}").unwrap();
            for (_, event) in events {
                let cell = match row.apply(event) {
                    Ok(after) => cell(&after),
                    Err(Refusal::Stale) => ".".to_owned(),
                    Err(Refusal::Illegal) => "!".to_owned(),
                    Err(Refusal::Denied) => "denied".to_owned(),
                };
                write!(text, "{cell:<17}").unwrap();
            }
            text.truncate(text.trim_end_matches(' ').len());
            text.push('\n');
        }
    }
    expect_file!["table/table.txt"].assert_eq(&text);
}

#[test]
fn what_is_owed_is_as_reviewed() {
    let mut text = String::from("What each row owes, and what the store holds beside it.\n\n");
    for (name, row) in rows() {
        let owed: Vec<&str> = row.outstanding().iter().map(Effect::label).collect();
        let Books { cordon, lifecycle } = row.books();
        let owed = if owed.is_empty() { "-".to_owned() } else { owed.join(", ") };
        writeln!(
            text,
            "{name:<18}{:<12}cordon {:<8}host {:<12}{owed}",
            row.label().label(),
            format!("{cordon:?}"),
            format!("{lifecycle:?}"),
        )
        .unwrap();
    }
    expect_file!["table/owed.txt"].assert_eq(&text);
}

fn inside(after: u64) -> Inside {
    Inside {
        composed_after: Timestamp(after),
        unreadable: None,
        guests: vec![],
        receivers: vec![],
        strangers: vec![],
    }
}

fn facts() -> Facts {
    let here = |vm| (vm, (Some(host("a")), Generation::from_stored(3)));
    Facts {
        host: HostFacts {
            presence: Presence::Heard,
            reserved: vec![],
            residents: vec![],
            inside: Some(inside(400)),
        },
        ended: BTreeMap::new(),
        owners: BTreeMap::from([here(FIRST), here(SECOND)]),
        in_flight: BTreeSet::new(),
        waiting: BTreeSet::new(),
    }
}

fn execute(job: &Job) -> Job {
    job.apply(&Event::ExecuteRequested { at: NOW }).unwrap()
}

#[test]
fn no_more_move_at_once_than_the_policy_says() {
    let row = execute(&planned());
    let due = step(&row, &facts(), NOW);
    assert_eq!(due.effects.len(), 1);
    let row = row.apply(&Event::Begun { vm: FIRST, migration: migration(1) }).unwrap();
    assert!(step(&row, &facts(), NOW).effects.is_empty());
    let wide = Job { policy: policy(2), ..row };
    let effects = step(&wide, &facts(), NOW).effects;
    let [Effect::Begin { vm, .. }] = effects.as_slice() else { panic!("{effects:?}") };
    assert_eq!(*vm, SECOND);
}

#[test]
fn a_migration_that_waits_for_room_holds_back_no_other() {
    let row = execute(&planned());
    let row = row.apply(&Event::Begun { vm: FIRST, migration: migration(1) }).unwrap();
    let waits = Facts { waiting: BTreeSet::from([migration(1)]), ..facts() };
    let due = step(&row, &waits, NOW);
    let [Effect::Begin { vm, .. }] = due.effects.as_slice() else { panic!("{due:?}") };
    assert_eq!(*vm, SECOND);
    let queued = format!("room for VM {FIRST}, whose migration {} is in the queue", migration(1));
    assert_eq!(due.waits_for, [queued]);
    // Begun, the other one has the only turn.
    let row = row.apply(&Event::Begun { vm: SECOND, migration: migration(2) }).unwrap();
    assert!(step(&row, &waits, NOW).effects.is_empty());
}

#[test]
fn a_vm_that_something_else_carries_is_waited_for_and_holds_nobody_up() {
    let mut facts = facts();
    facts.in_flight.insert(FIRST);
    let due = step(&execute(&planned()), &facts, NOW);
    let [Effect::Begin { vm, .. }] = due.effects.as_slice() else { panic!("{due:?}") };
    assert_eq!(*vm, SECOND);
    assert_eq!(due.waits_for, [format!("what is under way with VM {FIRST} to end")]);
}

#[test]
fn a_vm_that_left_by_itself_is_not_moved_again() {
    let mut facts = facts();
    facts.owners.insert(FIRST, (Some(host("c")), Generation::from_stored(4)));
    facts.owners.remove(&SECOND);
    let done = step(&execute(&planned()), &facts, NOW);
    assert_eq!(cell(&done.after), "verifying l l");
}

#[test]
fn maintenance_is_entered_only_on_a_word_from_after_the_last_end() {
    let (_, row) = rows().into_iter().find(|(name, _)| *name == "running b d").unwrap();
    let mut facts = facts();
    facts.ended.insert(migration(1), arrived());
    facts.host.inside = Some(inside(NOW.value()));
    let waiting = step(&row, &facts, NOW);
    assert_eq!(cell(&waiting.after), "verifying d d");
    assert_eq!(waiting.effects, [Effect::AskWhetherEmpty]);
    assert_eq!(waiting.waits_for, ["a report from after the last VM had left"]);
    facts.host.inside = Some(Inside { guests: vec![SECOND], ..inside(1_001) });
    let waiting = step(&waiting.after, &facts, NOW);
    assert_eq!(waiting.waits_for, [format!("these guests to leave: {SECOND}")]);
    facts.host.inside = Some(inside(1_001));
    facts.host.reserved = vec![FIRST];
    assert_eq!(step(&waiting.after, &facts, NOW).events, []);
    facts.host.reserved.clear();
    let entered = step(&waiting.after, &facts, NOW).after;
    assert_eq!(entered.label(), Label::Maintenance);
    assert_eq!(entered.books().lifecycle, crate::fleet::Lifecycle::Maintenance);
}

#[test]
fn a_host_that_never_says_it_is_empty_fails_the_job_by_name() {
    let mut facts = facts();
    facts.host.inside = Some(Inside { guests: vec![SECOND], ..inside(900_000) });
    let (_, row) = rows().into_iter().find(|(name, _)| *name == "verifying").unwrap();
    let late = Timestamp(500 + VERIFY_LIMIT.value());
    assert!(step(&row, &facts, late).events.is_empty());
    let after = step(&row, &facts, Timestamp(late.value() + 1)).after;
    let Phase::Failed { error, .. } = &after.phase else { panic!("{after:?}") };
    assert!(error.contains(&format!("these guests to leave: {SECOND}")), "{error}");
}

#[test]
fn the_first_failure_is_the_jobs_own_and_the_rest_is_driven_to_its_end() {
    let row = job(Phase::Running, [begun(1), begun(2)]);
    let mut facts = facts();
    facts.ended.insert(migration(1), failed("disk quota 77 exceeded"));
    let stopped = step(&row, &facts, NOW);
    assert_eq!(cell(&stopped.after), "stop fail f b");
    assert_eq!(stopped.effects, [Effect::Cancel { vm: SECOND, migration: migration(2) }]);
    let asked = stopped.after.apply(&Event::CancelAsked { vm: SECOND }).unwrap();
    assert_eq!(asked.label(), Label::Running);
    assert!(asked.outstanding().is_empty());
    // It was too late to take it back.
    let over = asked.apply(&ended(2, arrived())).unwrap();
    let Phase::Failed { error, .. } = &over.phase else { panic!("{over:?}") };
    assert!(error.contains("disk quota 77 exceeded"), "{error}");
    let MoveState::Failed { error, .. } = &over.moves[0].state else { panic!("{over:?}") };
    assert_eq!(error, "disk quota 77 exceeded");
    assert_eq!(over.moves[1].state.label(), "done");
    assert_eq!(over.books().cordon, Cordoned::AsItIs);
}

#[test]
fn a_migration_that_somebody_else_cancels_is_a_failure() {
    let row = job(Phase::Running, [begun(1), MoveState::Waiting]);
    let after = row.apply(&ended(1, Ended::Cancelled)).unwrap();
    let Phase::Failed { error, .. } = &after.phase else { panic!("{after:?}") };
    assert!(error.contains("cancelled by somebody else"), "{error}");
    assert_eq!(after.moves[1].state, MoveState::NotBegun);
}

#[test]
fn a_cancelled_job_leaves_the_cordon_as_it_was_and_begins_nothing() {
    let row = job(Phase::Running, [begun(1), MoveState::Waiting]);
    let row = row.apply(&Event::CancelRequested { by: "alice".into(), at: NOW }).unwrap();
    let row = row.apply(&Event::CancelAsked { vm: FIRST }).unwrap();
    let row = row.apply(&ended(1, Ended::Cancelled)).unwrap();
    assert_eq!(cell(&row), "cancelled x n");
    assert_eq!(row.books().cordon, Cordoned::Lifted);
    assert!(row.outstanding().is_empty());
}

#[test]
fn a_silent_host_is_waited_for_and_a_dead_one_ends_the_job_with_what_was_there() {
    let row = job(Phase::Running, [begun(1), MoveState::Waiting]);
    let mut facts = facts();
    facts.host.presence = Presence::Silent;
    let waiting = step(&Job { policy: policy(2), ..row.clone() }, &facts, NOW);
    assert!(waiting.events.is_empty() && waiting.effects.is_empty(), "{waiting:?}");
    assert_eq!(waiting.waits_for[0], "the agent of host a to answer");
    facts.host.presence = Presence::Dead { how: "an operator powered it off".into() };
    let stopping = step(&row, &facts, NOW).after;
    assert_eq!(cell(&stopping), "stop died b n");
    facts.ended.insert(migration(1), failed("guest lost"));
    let over = step(&stopping, &facts, NOW).after;
    let Phase::Failed { error, .. } = &over.phase else { panic!("{over:?}") };
    let expected = "host a died while it was emptied, 2 VMs had not left it: an operator powered";
    assert!(error.contains(expected), "{error}");
    let expected = "VM 00000000-0000-0000-0000-000000000001: guest lost";
    assert!(!error.contains(expected), "the death is the cause: {error}");
}

#[test]
fn only_what_the_job_moved_and_nobody_since_comes_back() {
    let states = [moved(1), MoveState::Left { at: NOW }];
    let row = job(Phase::Maintenance { since: NOW, proof: proof(600) }, states);
    let complete = |returning| row.apply(&Event::CompleteRequested { returning, at: NOW }).unwrap();
    assert!(complete(Returning::Stay).outstanding().is_empty());
    let row = complete(Returning::Return);
    assert_eq!((row.label(), row.hold()), (Label::Completed, Hold::Returning));
    assert_eq!(row.books().cordon, Cordoned::Lifted);
    let mut facts = facts();
    facts.owners.insert(FIRST, (Some(host("b")), Generation::from_stored(4)));
    let due = step(&row, &facts, NOW);
    let [Effect::BringBack { vm: FIRST, .. }] = due.effects.as_slice() else { panic!("{due:?}") };
    let refused = Event::NotBegun { vm: FIRST, error: "no room".into(), at: NOW };
    let stays = row.apply(&refused).unwrap();
    let Phase::Completed { back, .. } = &stays.phase else { panic!("{stays:?}") };
    assert_eq!(back[0].state, ReturnState::Stays { reason: "no room".into(), at: NOW });
    assert_eq!(stays.hold(), Hold::Over);
    facts.owners.insert(FIRST, (Some(host("b")), Generation::from_stored(6)));
    let moved_since = step(&row, &facts, NOW);
    assert!(moved_since.effects.is_empty());
    assert_eq!(moved_since.after.hold(), Hold::Over);
}

#[test]
fn a_plan_without_a_place_for_each_is_never_carried_out() {
    let rows = rows();
    let (_, blocked) = rows.iter().find(|(name, _)| *name == "blocked").unwrap();
    assert_eq!(blocked.apply(&Event::ExecuteRequested { at: NOW }), Err(Refusal::Denied));
    let empty = Job { moves: vec![], ..planned() };
    assert_eq!(cell(&execute(&empty)), "verifying ");
}

#[test]
fn progress_is_told_in_vms_and_bytes() {
    let row = job(Phase::Running, [moved(1), MoveState::Waiting]);
    let crossed =
        Crossed { bytes: Bytes(5 << 30), rate: BytesPerSec(1 << 30), queued: BTreeSet::new() };
    let progress = progress(&row, &crossed, Timestamp(10_100));
    assert_eq!((progress.moved, progress.waiting, progress.total), (1, 1, 2));
    assert_eq!(progress.bytes_total, Bytes(8 << 30));
    assert_eq!((progress.remaining, progress.elapsed), (Some(Millis(4_000)), Millis(10_000)));
    assert_eq!(super::progress(&row, &Crossed::default(), NOW).remaining, None);
    // What waits in the queue is not on its way.
    let row = job(Phase::Running, [begun(1), begun(2)]);
    let queued = Crossed { queued: BTreeSet::from([migration(1)]), ..Crossed::default() };
    let progress = super::progress(&row, &queued, NOW);
    assert_eq!((progress.running, progress.waiting), (1, 1));
}

#[cfg(feature = "serde")]
#[test]
fn every_row_and_event_reads_back_as_it_was_written() {
    for (name, row) in rows() {
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Job>(&text).unwrap(), row, "{name}: {text}");
    }
    for (name, event) in events() {
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event, "{name}: {text}");
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_row_is_written_as_reviewed() {
    let (_, row) = rows().into_iter().find(|(name, _)| *name == "returning w").unwrap();
    expect_file!["table/row.json"].assert_eq(&serde_json::to_string_pretty(&row).unwrap());
}

proptest! {
    /// Whatever is told in whatever order: a job that is over stays over, nothing is forgotten or
    /// moved twice, and the log replays to the row.
    #[test]
    fn no_order_of_events_breaks_a_job(
        told in prop::collection::vec(prop::sample::select(events()), 0..40),
    ) {
        let first = planned();
        let (mut row, mut log) = (first.clone(), Vec::new());
        for (_, event) in told {
            let Ok(after) = row.apply(&event) else { continue };
            prop_assert_eq!(after.moves.len(), row.moves.len());
            let was_over = row.hold() == Hold::Over;
            prop_assert!(!was_over || after.hold() == Hold::Over, "{} after {row:?}", event.label());
            for (before, after) in row.moves.iter().zip(&after.moves) {
                let ended = before.state.open().is_none() && before.state != MoveState::Waiting;
                prop_assert!(!ended || before == after, "{} after {before:?}", event.label());
            }
            let terminal =
                matches!(after.label(), Label::Failed | Label::Cancelled | Label::Maintenance);
            prop_assert!(!terminal || after.open_migrations().next().is_none());
            row = after;
            log.push(event);
        }
        let replayed = log.iter().try_fold(first, |row, event| row.apply(event));
        prop_assert_eq!(replayed, Ok(row));
    }
}
