//! One move, and one thing that goes wrong at each point in turn.

#![expect(clippy::print_stdout, clippy::panic, reason = "what helps a test fails as the test does")]

use std::collections::{BTreeMap, BTreeSet};

use vmferry_sim::schedule::{Asked, Outcome, Schedule};
use vmferry_sim::trace::Detail;
use vmferry_sim::world::{Mishap, PointKind};

type Mishaps = Vec<(PointKind, u64, Mishap)>;

/// Runs one move, start or stop with mishaps, and shows its history if it breaks anything.
fn holds(asked: Asked, mishaps: &[(PointKind, u64, Mishap)]) -> Outcome {
    let schedule = Schedule::directed(1, asked, mishaps);
    let outcome = schedule.run();
    if !outcome.violations.is_empty() {
        let replay = Schedule { detail: Detail::Everything, ..schedule }.run();
        for line in &replay.trace {
            println!("{line}");
        }
        panic!("{asked:?} {mishaps:?}: {}", outcome.violations[0]);
    }
    outcome
}

/// How many points of a kind a run comes to.
fn points(outcome: &Outcome, kind: PointKind) -> u64 {
    outcome.points.get(&kind).copied().unwrap_or(0)
}

/// Ways that what is asked for can take, one for each set of commands that a single accident leads
/// to.
fn ways(asked: Asked) -> Vec<(Mishaps, Outcome)> {
    let plain = holds(asked, &[]);
    let (steps, commands) =
        (points(&plain, PointKind::QemuStep), points(&plain, PointKind::Command));
    let mut candidates: Vec<Mishaps> = vec![Vec::new()];
    for accident in [
        Mishap::ChannelBreaks,
        Mishap::SourceQemuDies,
        Mishap::DestinationQemuDies,
        Mishap::SourceFreezes,
        Mishap::Cancel,
    ] {
        candidates.extend((1..=steps).map(|at| vec![(PointKind::QemuStep, at, accident)]));
    }
    candidates.extend((1..=commands).map(|at| vec![(PointKind::Command, at, Mishap::Cancel)]));
    let mut known: BTreeSet<String> = BTreeSet::new();
    let mut ways = Vec::new();
    for mishaps in candidates {
        let outcome = holds(asked, &mishaps);
        let counts = &outcome.counts;
        let way = format!("{:?} {:?} {:?}", counts.commands, counts.ended, counts.powers);
        if known.insert(way) {
            ways.push((mishaps, outcome));
        }
    }
    ways
}

/// Runs every way with one more mishap at each of its points of a kind.
fn at_every_point(asked: Asked, kind: PointKind, mishaps: &[Mishap]) {
    for (way, outcome) in ways(asked) {
        for at in 1..=points(&outcome, kind) {
            for mishap in mishaps {
                let mut both = way.clone();
                both.push((kind, at, *mishap));
                holds(asked, &both);
            }
        }
    }
}

const FAILURES: [Mishap; 3] = [Mishap::RequestLost, Mishap::AnswerLost, Mishap::Refused];
const REPEATS: [Mishap; 3] = [Mishap::Doubled, Mishap::DoubledLate(50), Mishap::DoubledLate(2_000)];
const LATE: [Mishap; 3] = [Mishap::Late(200), Mishap::Late(40_000), Mishap::DoubledLate(60_000)];
const PLANNER_DIES: [Mishap; 2] = [Mishap::PlannerDiesBefore, Mishap::PlannerDiesAfter];
const HOSTS_DIE: [Mishap; 2] = [Mishap::SourceHostDies, Mishap::DestinationHostDies];
const QEMUS_DIE: [Mishap; 2] = [Mishap::SourceQemuDies, Mishap::DestinationQemuDies];
/// A start and both kinds of stops.
const POWER: [Asked; 3] = [Asked::Start, Asked::PowerDown, Asked::Quit];

fn commands_of(all: &[Asked]) -> Vec<&'static str> {
    let mut commands: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, outcome) in all.iter().flat_map(|asked| ways(*asked)) {
        for (name, count) in outcome.counts.commands {
            *commands.entry(name).or_default() += count;
        }
    }
    commands.into_keys().collect()
}

#[test]
fn the_ways_ask_for_every_effect() {
    let all = [
        Asked::Move,
        Asked::MoveHeld,
        Asked::MoveSomehow,
        Asked::Start,
        Asked::PowerDown,
        Asked::Quit,
    ];
    assert_eq!(
        commands_of(&all),
        [
            "arm_receiver",
            "cancel_transfer",
            "continue_destination",
            "destroy_receiver",
            "hold_guest",
            "kill_source",
            "order_switchover",
            "release_source",
            "resume_source",
            "start_transfer",
            "start_vm",
            "stop_vm",
        ]
    );
}

#[test]
fn every_effect_may_fail() {
    at_every_point(Asked::Move, PointKind::Command, &FAILURES);
}

#[test]
fn every_effect_may_repeat() {
    at_every_point(Asked::Move, PointKind::Command, &REPEATS);
}

#[test]
fn every_effect_may_come_late() {
    at_every_point(Asked::Move, PointKind::Command, &LATE);
}

#[test]
fn a_planner_may_die_at_every_command() {
    at_every_point(Asked::Move, PointKind::Command, &PLANNER_DIES);
}

#[test]
fn a_planner_may_die_around_every_write_of_its_store() {
    at_every_point(Asked::Move, PointKind::StoreWrite, &PLANNER_DIES);
}

#[test]
fn an_agent_may_die_at_every_step() {
    at_every_point(Asked::Move, PointKind::AgentStep, &[Mishap::AgentDies]);
}

#[test]
fn a_source_may_die_at_every_step_of_an_agent() {
    at_every_point(Asked::Move, PointKind::AgentStep, &[Mishap::SourceQemuDies]);
}

#[test]
fn a_receiver_may_die_at_every_step_of_an_agent() {
    at_every_point(Asked::Move, PointKind::AgentStep, &[Mishap::DestinationQemuDies]);
}

#[test]
fn a_channel_may_break_at_every_step_of_a_transfer() {
    at_every_point(Asked::Move, PointKind::QemuStep, &[Mishap::ChannelBreaks]);
    at_every_point(Asked::Move, PointKind::Command, &[Mishap::ChannelBreaks]);
}

#[test]
fn a_host_may_crash_at_every_step_of_a_transfer() {
    at_every_point(Asked::Move, PointKind::QemuStep, &HOSTS_DIE);
}

#[test]
fn every_effect_of_a_held_move_may_fail() {
    at_every_point(Asked::MoveHeld, PointKind::Command, &FAILURES);
}

#[test]
fn every_effect_of_a_held_move_may_repeat_or_come_late() {
    at_every_point(Asked::MoveHeld, PointKind::Command, &REPEATS);
    at_every_point(Asked::MoveHeld, PointKind::Command, &LATE);
}

#[test]
fn a_planner_may_die_at_every_command_and_write_of_a_held_move() {
    at_every_point(Asked::MoveHeld, PointKind::Command, &PLANNER_DIES);
    at_every_point(Asked::MoveHeld, PointKind::StoreWrite, &PLANNER_DIES);
}

#[test]
fn an_agent_may_die_at_every_step_of_a_held_move() {
    at_every_point(Asked::MoveHeld, PointKind::AgentStep, &[Mishap::AgentDies]);
}

#[test]
fn a_qemu_may_die_at_every_step_of_a_held_move() {
    at_every_point(Asked::MoveHeld, PointKind::AgentStep, &QEMUS_DIE);
}

#[test]
fn a_channel_or_a_host_may_break_at_every_step_of_a_held_transfer() {
    at_every_point(Asked::MoveHeld, PointKind::QemuStep, &[Mishap::ChannelBreaks]);
    at_every_point(Asked::MoveHeld, PointKind::QemuStep, &HOSTS_DIE);
}

#[test]
fn every_effect_may_fail_and_repeat_while_a_live_move_becomes_a_held_one() {
    at_every_point(Asked::MoveSomehow, PointKind::Command, &[Mishap::AnswerLost, Mishap::Refused]);
    at_every_point(Asked::MoveSomehow, PointKind::Command, &[Mishap::Doubled]);
}

#[test]
fn every_start_and_stop_may_fail_repeat_or_come_late() {
    for asked in POWER {
        at_every_point(asked, PointKind::Command, &FAILURES);
        at_every_point(asked, PointKind::Command, &REPEATS);
        at_every_point(asked, PointKind::Command, &LATE);
    }
}

#[test]
fn a_planner_may_die_anywhere_in_a_start_or_stop() {
    for asked in POWER {
        at_every_point(asked, PointKind::Command, &PLANNER_DIES);
        at_every_point(asked, PointKind::StoreWrite, &PLANNER_DIES);
    }
}

#[test]
fn an_agent_a_qemu_or_a_host_may_die_at_every_step_of_a_start_or_stop() {
    for asked in POWER {
        at_every_point(asked, PointKind::AgentStep, &[Mishap::AgentDies]);
        at_every_point(asked, PointKind::AgentStep, &QEMUS_DIE);
        at_every_point(asked, PointKind::AgentStep, &HOSTS_DIE);
    }
}
