//! One move, and one thing that goes wrong at each point in turn.

#![expect(clippy::print_stdout, clippy::panic, reason = "what helps a test fails as the test does")]

use std::collections::{BTreeMap, BTreeSet};

use vmferry_sim::schedule::{Asked, Outcome, Schedule};
use vmferry_sim::trace::Detail;
use vmferry_sim::world::{Mishap, PointKind};

type Mishaps = Vec<(PointKind, u64, Mishap)>;

/// Runs one move with mishaps, and shows its history if it breaks anything.
fn holds(mishaps: &[(PointKind, u64, Mishap)]) -> Outcome {
    let schedule = Schedule::directed(1, Asked::Move, mishaps);
    let outcome = schedule.run();
    if !outcome.violations.is_empty() {
        let replay = Schedule { detail: Detail::Everything, ..schedule }.run();
        for line in &replay.trace {
            println!("{line}");
        }
        panic!("{mishaps:?}: {}", outcome.violations[0]);
    }
    outcome
}

/// How many points of a kind a run comes to.
fn points(outcome: &Outcome, kind: PointKind) -> u64 {
    outcome.points.get(&kind).copied().unwrap_or(0)
}

/// Ways that a move can take, one for each order of commands that a single accident leads to.
fn ways() -> Vec<(Mishaps, Outcome)> {
    let plain = holds(&[]);
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
        let outcome = holds(&mishaps);
        let way = format!("{:?} {:?}", outcome.counts.commands, outcome.counts.ended);
        if known.insert(way) {
            ways.push((mishaps, outcome));
        }
    }
    ways
}

/// Runs every way with one more mishap at each of its points of a kind.
fn at_every_point(kind: PointKind, mishaps: &[Mishap]) {
    for (way, outcome) in ways() {
        for at in 1..=points(&outcome, kind) {
            for mishap in mishaps {
                let mut both = way.clone();
                both.push((kind, at, *mishap));
                holds(&both);
            }
        }
    }
}

#[test]
fn the_ways_of_a_move_ask_for_every_effect() {
    let mut commands: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, outcome) in ways() {
        for (name, count) in outcome.counts.commands {
            *commands.entry(name).or_default() += count;
        }
    }
    let asked: Vec<&str> = commands.into_keys().collect();
    assert_eq!(
        asked,
        [
            "arm_receiver",
            "cancel_transfer",
            "continue_destination",
            "destroy_receiver",
            "kill_source",
            "order_switchover",
            "release_source",
            "resume_source",
            "start_transfer",
        ]
    );
}

#[test]
fn every_effect_may_fail() {
    let failures = [Mishap::RequestLost, Mishap::AnswerLost, Mishap::Refused];
    at_every_point(PointKind::Command, &failures);
}

#[test]
fn every_effect_may_repeat() {
    let repeats = [Mishap::Doubled, Mishap::DoubledLate(50), Mishap::DoubledLate(2_000)];
    at_every_point(PointKind::Command, &repeats);
}

#[test]
fn every_effect_may_come_late() {
    let late = [Mishap::Late(200), Mishap::Late(40_000), Mishap::DoubledLate(60_000)];
    at_every_point(PointKind::Command, &late);
}

#[test]
fn a_planner_may_die_at_every_command() {
    at_every_point(PointKind::Command, &[Mishap::PlannerDiesBefore, Mishap::PlannerDiesAfter]);
}

#[test]
fn a_planner_may_die_around_every_write_of_its_store() {
    at_every_point(PointKind::StoreWrite, &[Mishap::PlannerDiesBefore, Mishap::PlannerDiesAfter]);
}

#[test]
fn an_agent_may_die_at_every_step() {
    at_every_point(PointKind::AgentStep, &[Mishap::AgentDies]);
}

#[test]
fn a_source_may_die_at_every_step_of_an_agent() {
    at_every_point(PointKind::AgentStep, &[Mishap::SourceQemuDies]);
}

#[test]
fn a_receiver_may_die_at_every_step_of_an_agent() {
    at_every_point(PointKind::AgentStep, &[Mishap::DestinationQemuDies]);
}

#[test]
fn a_channel_may_break_at_every_step_of_a_transfer() {
    at_every_point(PointKind::QemuStep, &[Mishap::ChannelBreaks]);
    at_every_point(PointKind::Command, &[Mishap::ChannelBreaks]);
}

#[test]
fn a_host_may_crash_at_every_step_of_a_transfer() {
    at_every_point(PointKind::QemuStep, &[Mishap::SourceHostDies, Mishap::DestinationHostDies]);
}
