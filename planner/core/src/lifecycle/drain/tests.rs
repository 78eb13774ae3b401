use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use expect_test::expect_file;
use proptest::prelude::*;
use vmferry_types::{Bytes, Generation, MilliCpu};

use super::*;
use crate::fleet::Lifecycle;
use crate::lifecycle::Ended;
use crate::lifecycle::emptiness::{HostFacts, Inside, Presence};
use crate::lifecycle::job::Cordoned;
use crate::lifecycle::job::tests::policy;
use crate::maintenance::{Assignment, Blocked, Code, Left, Mode, Plan};

const NOW: Timestamp = Timestamp(100_000);
const FIRST: VmId = VmId::from_u128(1);
const SECOND: VmId = VmId::from_u128(2);

fn host(id: &str) -> HostId {
    id.parse().unwrap()
}

fn migration(number: u128) -> MigrationId {
    MigrationId::from_u128(number)
}

pub(in crate::lifecycle) fn opened(goal: Goal) -> Drain {
    Drain::open(Opening {
        id: DrainId::from_u128(9),
        host: host("a"),
        goal,
        policy: policy(2),
        by: "operator".into(),
        at: Timestamp(500),
    })
}

fn with(goal: Goal, phase: Phase, state: Option<State>) -> Drain {
    let resident = |state| Resident { vm: FIRST, failures: 0, state };
    Drain { phase, residents: state.map(resident).into_iter().collect(), ..opened(goal) }
}

fn why() -> Unplaced {
    Unplaced { vm: FIRST, code: Code::InsufficientCapacity, blockers: vec![], more: 0 }
}

fn proof(after: u64) -> Emptiness {
    Emptiness { composed_after: Timestamp(after) }
}

pub(in crate::lifecycle) fn rows() -> Vec<(&'static str, Drain)> {
    let begun = || State::Begun { migration: migration(1) };
    let blocked = State::Blocked { since: NOW, noted: NOW, why: why() };
    let resting = State::Resting { until: Timestamp(1), error: "channel".into() };
    let cancelled = || Phase::Cancelled { at: NOW, by: "alice".into() };
    let cancelling = State::Cancelling { migration: migration(1) };
    let empty = || Phase::Empty { since: NOW, proof: proof(600) };
    let granted = || Phase::Granted { at: NOW, proof: proof(600) };
    let died = || Phase::Died { at: NOW, error: "host a died".into() };
    let drain = |phase, state| with(Goal::Drain, phase, state);
    vec![
        ("emptying", drain(Phase::Emptying, None)),
        ("retiring", with(Goal::Retire, Phase::Emptying, None)),
        ("emptying w", drain(Phase::Emptying, Some(State::Waiting))),
        ("emptying blocked", drain(Phase::Emptying, Some(blocked))),
        ("emptying b", drain(Phase::Emptying, Some(begun()))),
        ("emptying resting", drain(Phase::Emptying, Some(resting))),
        ("empty", drain(empty(), None)),
        ("granted", with(Goal::Retire, granted(), None)),
        ("cancelled", drain(cancelled(), None)),
        ("cancelled b", drain(cancelled(), Some(begun()))),
        ("cancelled c", drain(cancelled(), Some(cancelling))),
        ("died b", drain(died(), Some(begun()))),
    ]
}

fn ended(how: Ended) -> Event {
    Event::MigrationEnded { migration: migration(1), how, at: NOW }
}

fn arrived() -> Ended {
    Ended::Moved { destination: host("b"), generation: Generation::from_stored(4) }
}

fn events() -> Vec<(&'static str, Event)> {
    let error = || "channel".to_owned();
    vec![
        ("appeared", Event::Appeared { vm: FIRST, at: NOW }),
        ("left", Event::Left { vm: FIRST, at: NOW }),
        ("blocked", Event::Blocked { why: why(), at: NOW }),
        ("unblocked", Event::Unblocked { vm: FIRST }),
        ("begun", Event::Begun { vm: FIRST, migration: migration(1) }),
        ("not begun", Event::NotBegun { vm: FIRST, error: error(), at: NOW }),
        ("cancel asked", Event::CancelAsked { vm: FIRST }),
        ("ended moved", ended(arrived())),
        ("ended failed", ended(Ended::Failed { error: error() })),
        ("found empty", Event::FoundEmpty { proof: proof(600), at: NOW }),
        ("found too early", Event::FoundEmpty { proof: proof(500), at: NOW }),
        ("found not empty", Event::FoundNotEmpty { at: NOW }),
        ("cancel", Event::CancelRequested { by: "alice".into(), at: NOW }),
        ("host died", Event::HostDied { how: "declared".into(), at: NOW }),
    ]
}

fn cell(row: &Drain) -> String {
    let states: Vec<&str> = row.residents.iter().map(|one| one.state.label()).collect();
    format!("{} {}", row.phase.label().to_lowercase(), states.join(" ")).trim_end().to_owned()
}

#[test]
fn the_table_is_as_reviewed() {
    let mut text = String::from(
        "Row × event: the row after, '.' stale, '!' illegal, 'denied' told to the caller.\n",
    );
    for events in events().chunks(5) {
        write!(text, "\n{:<18}", "").unwrap();
        for (event, _) in events {
            write!(text, "{event:<21}").unwrap();
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
                write!(text, "{cell:<21}").unwrap();
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
            "{name:<18}cordon {:<8}host {:<12}{owed}",
            format!("{cordon:?}"),
            format!("{lifecycle:?}"),
        )
        .unwrap();
    }
    expect_file!["table/owed.txt"].assert_eq(&text);
}

fn place(vm: VmId) -> Assignment {
    let left = Left { memory: Bytes(0), cpu: MilliCpu(0) };
    Assignment { vm, destination: host("b"), mode: Mode::Live, left, rejected: vec![] }
}

fn no_place(vm: VmId) -> Blocked {
    Blocked { vm, code: Code::InsufficientCapacity, rejected: vec![] }
}

fn plan(placed: &[VmId], blocked: &[VmId]) -> Plan {
    Plan {
        assignments: placed.iter().copied().map(place).collect(),
        blocked: blocked.iter().copied().map(no_place).collect(),
        left: BTreeMap::new(),
        closed: vec![],
    }
}

fn facts(residents: &[VmId], plan: Plan) -> Facts {
    let inside = Inside {
        composed_after: NOW,
        unreadable: None,
        guests: residents.to_vec(),
        receivers: vec![],
        strangers: vec![],
    };
    Facts {
        host: HostFacts {
            presence: Presence::Heard,
            reserved: vec![],
            residents: residents.to_vec(),
            inside: Some(inside),
        },
        ended: BTreeMap::new(),
        in_flight: BTreeSet::new(),
        plan: Some(plan),
    }
}

fn tick(drain: &Drain, facts: &Facts) -> Step {
    step(drain, facts, Timestamp(90_000))
}

#[test]
fn a_vm_that_cannot_move_is_a_blocker_and_the_rest_keeps_moving() {
    let facts = facts(&[FIRST, SECOND], plan(&[SECOND], &[FIRST]));
    let seen = tick(&opened(Goal::Drain), &facts);
    assert_eq!(cell(&seen.after), "emptying blocked waiting");
    let begin = Effect::Begin { vm: SECOND, planned: host("b"), mode: Mode::Live };
    assert_eq!(seen.effects, [begin, Effect::Replan]);
    let waited = "no host that can take the VM has room";
    assert_eq!(seen.waits_for, [format!("a place for VM {FIRST}: {waited}")]);
    let again = tick(&seen.after, &facts);
    assert!(again.events.is_empty(), "a row is not written while nothing is new: {again:?}");
}

#[test]
fn since_when_a_vm_is_blocked_is_kept_and_its_figures_are_refreshed_now_and_then() {
    let at = |ms| Event::Blocked { why: Unplaced { more: ms, ..why() }, at: Timestamp(ms.into()) };
    let row = with(Goal::Drain, Phase::Emptying, Some(State::Waiting));
    let row = row.apply(&at(10)).unwrap().apply(&at(20)).unwrap();
    let State::Blocked { since, noted, .. } = row.residents[0].state else { panic!("{row:?}") };
    assert_eq!((since, noted), (Timestamp(10), Timestamp(20)));
    let placed = facts(&[FIRST], plan(&[FIRST], &[]));
    let freed = tick(&row, &placed);
    assert_eq!(cell(&freed.after), "emptying waiting");
    assert_eq!(freed.effects.len(), 2);
}

#[test]
fn a_vm_whose_migration_failed_rests_longer_each_time_and_is_never_given_up() {
    let mut row = with(Goal::Drain, Phase::Emptying, Some(State::Waiting));
    let mut now = 0;
    let mut rests = Vec::new();
    for number in 1..=9 {
        let begun = Event::Begun { vm: FIRST, migration: migration(number) };
        row = row.apply(&begun).unwrap();
        let how = Ended::Failed { error: "channel".into() };
        let ended = Event::MigrationEnded { migration: migration(number), how, at: Timestamp(now) };
        row = row.apply(&ended).unwrap();
        let State::Resting { until, .. } = row.residents[0].state else { panic!("{row:?}") };
        rests.push(until.since(Timestamp(now)).value() / 1_000);
        assert!(row.to_plan(Timestamp(until.value() - 1)).is_empty());
        assert_eq!(row.to_plan(until), [FIRST]);
        now = until.value();
    }
    assert_eq!(rests, [30, 60, 120, 240, 480, 960, 1_800, 1_800, 1_800]);
    let facts = facts(&[FIRST], plan(&[], &[]));
    let told = step(&row, &facts, Timestamp(now - 1)).waits_for;
    assert!(told[0].contains("whose last migration failed: channel"), "{told:?}");
}

#[test]
fn a_retirement_is_granted_only_on_a_word_from_after_the_last_end() {
    let mut facts = facts(&[], plan(&[], &[]));
    let row = with(Goal::Retire, Phase::Emptying, Some(State::Begun { migration: migration(1) }));
    facts.ended.insert(migration(1), arrived());
    let early = step(&row, &facts, NOW);
    assert_eq!(cell(&early.after), "emptying");
    assert_eq!(early.effects, [Effect::AskWhetherEmpty]);
    assert_eq!(early.waits_for, ["a report from after the last VM had left"]);
    let granted = |facts: &Facts| step(&early.after, facts, NOW).after;
    facts.host.inside.as_mut().unwrap().composed_after = Timestamp(NOW.value() + 1);
    for spoil in [
        |facts: &mut Facts| facts.host.reserved = vec![SECOND],
        |facts: &mut Facts| facts.host.presence = Presence::Silent,
        |facts: &mut Facts| facts.host.inside.as_mut().unwrap().receivers = vec![SECOND],
        |facts: &mut Facts| facts.host.inside.as_mut().unwrap().strangers = vec!["7".into()],
    ] {
        let mut spoiled = facts.clone();
        spoil(&mut spoiled);
        assert_eq!(granted(&spoiled).hold(), Hold::Draining);
    }
    let done = granted(&facts);
    assert_eq!((done.hold(), done.books().lifecycle), (Hold::Retired, Lifecycle::Retired));
    assert_eq!(done.moved[0].destination, host("b"));
}

#[test]
fn a_drained_host_where_something_turns_up_is_emptied_again() {
    let empty = with(Goal::Drain, Phase::Empty { since: NOW, proof: proof(600) }, None);
    let stray = facts(&[SECOND], plan(&[SECOND], &[]));
    assert_eq!(cell(&tick(&empty, &stray).after), "emptying waiting");
    let mut unknown = facts(&[], plan(&[], &[]));
    unknown.host.inside.as_mut().unwrap().strangers = vec!["pid 7".into()];
    let seen = tick(&empty, &unknown);
    assert_eq!(cell(&seen.after), "emptying");
    assert!(seen.waits_for.iter().any(|one| one.contains("pid 7")), "{:?}", seen.waits_for);
    unknown.host.presence = Presence::Silent;
    unknown.host.inside = None;
    assert!(tick(&empty, &unknown).events.is_empty(), "silence is no news");
}

#[test]
fn a_report_from_before_a_host_was_empty_does_not_fill_it() {
    let empty = with(Goal::Drain, Phase::Empty { since: NOW, proof: proof(600) }, None);
    let names = |composed_after| {
        let mut facts = facts(&[], plan(&[], &[]));
        let inside = facts.host.inside.as_mut().unwrap();
        (inside.composed_after, inside.guests) = (composed_after, vec![FIRST]);
        facts
    };
    // One that came by itself is of a time that nobody knows.
    for before in [Timestamp(0), Timestamp(600)] {
        assert!(tick(&empty, &names(before)).events.is_empty());
    }
    assert_eq!(cell(&tick(&empty, &names(NOW)).after), "emptying");
}

#[test]
fn a_cancelled_drain_opens_its_host_at_once_and_takes_back_what_is_under_way() {
    let row = with(Goal::Drain, Phase::Emptying, Some(State::Begun { migration: migration(1) }));
    let row = row.apply(&Event::CancelRequested { by: "alice".into(), at: NOW }).unwrap();
    assert_eq!(row.books(), Books { cordon: Cordoned::Lifted, lifecycle: Lifecycle::Active });
    assert_eq!(row.outstanding(), [Effect::Cancel { vm: FIRST, migration: migration(1) }]);
    assert!(!row.is_settled());
    let row = row.apply(&Event::CancelAsked { vm: FIRST }).unwrap();
    let mut facts = facts(&[FIRST], plan(&[FIRST], &[]));
    assert!(tick(&row, &facts).effects.is_empty());
    facts.ended.insert(migration(1), Ended::Cancelled);
    let over = tick(&row, &facts);
    assert!(over.after.is_settled() && over.effects.is_empty(), "{over:?}");
}

#[test]
fn a_host_that_dies_while_it_is_drained_says_so_and_stays_cordoned() {
    let mut facts = facts(&[FIRST], plan(&[], &[FIRST]));
    facts.host.presence = Presence::Dead { how: "fenced".into() };
    let row = with(Goal::Drain, Phase::Emptying, Some(State::Waiting));
    let after = tick(&row, &facts).after;
    let Phase::Died { error, .. } = &after.phase else { panic!("{after:?}") };
    assert_eq!(error, "host a died while it was emptied, 1 VMs had not left it: fenced");
    assert_eq!(after.books().cordon, Cordoned::AsItIs);
}

#[test]
fn nothing_is_begun_on_a_silent_host_or_past_the_limit() {
    let vms: Vec<VmId> = (1..=5).map(VmId::from_u128).collect();
    let mut facts = facts(&vms, plan(&vms, &[]));
    let begun = |step: &Step| {
        step.effects.iter().filter(|effect| matches!(effect, Effect::Begin { .. })).count()
    };
    assert_eq!(begun(&tick(&opened(Goal::Drain), &facts)), 2);
    facts.in_flight = BTreeSet::from([vms[0]]);
    let due = tick(&opened(Goal::Drain), &facts);
    assert_eq!(begun(&due), 2, "one that is waited for holds no slot");
    facts.host.presence = Presence::Silent;
    let due = tick(&opened(Goal::Drain), &facts);
    assert_eq!(begun(&due), 0);
    assert!(due.waits_for.contains(&"the agent of host a to answer".to_owned()));
}

#[cfg(feature = "serde")]
#[test]
fn every_row_and_event_reads_back_as_it_was_written() {
    for (name, row) in rows() {
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Drain>(&text).unwrap(), row, "{name}: {text}");
    }
    for (name, event) in events() {
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event, "{name}: {text}");
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_row_is_written_as_reviewed() {
    let (_, row) = rows().into_iter().find(|(name, _)| *name == "emptying blocked").unwrap();
    expect_file!["table/row.json"].assert_eq(&serde_json::to_string_pretty(&row).unwrap());
}

proptest! {
    /// Whatever is told in whatever order: a grant is for an empty host, a drain that is over stays
    /// over, and the log replays to the row.
    #[test]
    fn no_order_of_events_breaks_a_drain(
        told in prop::collection::vec(prop::sample::select(events()), 0..60),
        retire in any::<bool>(),
    ) {
        let first = opened(if retire { Goal::Retire } else { Goal::Drain });
        let (mut row, mut log) = (first.clone(), Vec::new());
        for (_, event) in told {
            let Ok(after) = row.apply(&event) else { continue };
            prop_assert!(row.hold() != Hold::Over || after.hold() == Hold::Over);
            let empty = matches!(after.phase, Phase::Empty { .. } | Phase::Granted { .. });
            prop_assert!(!empty || after.residents.is_empty());
            prop_assert!(after.residents.is_sorted_by_key(|one| one.vm));
            row = after;
            log.push(event);
        }
        let replayed = log.iter().try_fold(first, |row, event| row.apply(event));
        prop_assert_eq!(replayed, Ok(row));
    }
}
