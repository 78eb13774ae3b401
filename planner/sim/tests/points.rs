//! One move, start or stop, and one thing that goes wrong at each point in turn.

#![expect(clippy::print_stdout, clippy::panic, reason = "what helps a test fails as the test does")]

use std::collections::BTreeSet;

use vmferry_planner_core::migration::{
    AutoConverge, Effect, GoneProof, Listener, ProofKind, Serves, Tuning,
};
use vmferry_sim::schedule::{Asked, Outcome, Schedule};
use vmferry_sim::trace::Detail;
use vmferry_sim::world::{Mishap, PointKind};
use vmferry_types::{BytesPerSec, Millis, Timestamp};

type Mishaps = Vec<(PointKind, u64, Mishap)>;

/// What is done at a point, and what goes wrong there.
type Covered = BTreeSet<(&'static str, String)>;

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

/// What a run does at its points of a kind.
fn points(outcome: &Outcome, kind: PointKind) -> &[&'static str] {
    outcome.points.get(&kind).map(Vec::as_slice).unwrap_or_default()
}

/// Every point of a kind in a run, with a mishap.
fn each(outcome: &Outcome, kind: PointKind, mishap: Mishap) -> impl Iterator<Item = Mishaps> {
    let count = points(outcome, kind).len() as u64;
    (1..=count).map(move |at| vec![(kind, at, mishap)])
}

/// Ways that what is asked for can take, one for each set of commands that a single accident leads
/// to.
fn ways(asked: Asked) -> Vec<(Mishaps, Outcome)> {
    let plain = holds(asked, &[]);
    let mut candidates: Vec<Mishaps> = vec![Vec::new()];
    for accident in [
        Mishap::ChannelBreaks,
        Mishap::SourceQemuDies,
        Mishap::DestinationQemuDies,
        Mishap::SourceFreezes,
        Mishap::Cancel,
    ] {
        candidates.extend(each(&plain, PointKind::QemuStep, accident));
    }
    candidates.extend(each(&plain, PointKind::Command, Mishap::Cancel));
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

/// Runs every way with one more mishap at each of its points of a kind; returns what was covered.
fn at_every_point(asked: Asked, kind: PointKind, mishaps: &[Mishap]) -> Covered {
    let mut covered = Covered::new();
    for (way, outcome) in ways(asked) {
        for mishap in mishaps {
            for (more, what) in each(&outcome, kind, *mishap).zip(points(&outcome, kind)) {
                let both: Mishaps = way.iter().copied().chain(more).collect();
                holds(asked, &both);
                covered.insert((what, format!("{mishap:?}")));
            }
        }
    }
    covered
}

/// All that can become of a command on its way to an agent, and back.
const COMMAND: [Mishap; 12] = [
    Mishap::Refused,
    Mishap::RequestLost,
    Mishap::AnswerLost,
    Mishap::Doubled,
    Mishap::DoubledLate(50),
    Mishap::DoubledLate(60_000),
    Mishap::Late(200),
    Mishap::Late(40_000),
    Mishap::AgentDiesBefore,
    Mishap::AgentDiesAfter,
    Mishap::PlannerDiesBefore,
    Mishap::PlannerDiesAfter,
];
/// All that can become of a transaction: it fails, it fails to say that it did not, it is slow, or
/// the planner ends and another one does it again.
const TRANSACTION: [Mishap; 5] = [
    Mishap::Refused,
    Mishap::AnswerLost,
    Mishap::Late(12_000),
    Mishap::PlannerDiesBefore,
    Mishap::PlannerDiesAfter,
];
const DIES: [Mishap; 3] = [Mishap::AgentDies, Mishap::SourceQemuDies, Mishap::DestinationQemuDies];
const HOSTS_DIE: [Mishap; 2] = [Mishap::SourceHostDies, Mishap::DestinationHostDies];
const BREAKS: [Mishap; 5] = [
    Mishap::ChannelBreaks,
    Mishap::SourceFreezes,
    Mishap::Cancel,
    Mishap::SourceHostDies,
    Mishap::DestinationHostDies,
];
/// Every method there is: precopy, snapshot, postcopy, and the one that becomes another.
const MOVES: [Asked; 5] =
    [Asked::Move, Asked::MoveHeld, Asked::MoveSomehow, Asked::MoveParted, Asked::MoveDiverging];
/// A start and both kinds of stops.
const POWER: [Asked; 3] = [Asked::Start, Asked::PowerDown, Asked::Quit];

/// Who carries an effect out.
enum By {
    Agent,
    /// The planner itself, in one of its transactions.
    Store(&'static str),
}

/// Says who carries an effect out: each new one has to be named here.
const fn by(effect: &Effect) -> By {
    match effect {
        Effect::TryAdmit => By::Store("grant"),
        Effect::Commit => By::Store("commit"),
        Effect::ArmReceiver
        | Effect::HoldGuest
        | Effect::ShutDownGuest
        | Effect::StartReceiver
        | Effect::RestartSource { .. }
        | Effect::StartTransfer { .. }
        | Effect::OrderSwitchover
        | Effect::KillSource { .. }
        | Effect::ContinueDestination
        | Effect::StartPostcopy
        | Effect::RecoverReceiver
        | Effect::ResumeTransfer { .. }
        | Effect::SetLimits { .. }
        | Effect::ReleaseSource { .. }
        | Effect::CancelTransfer { .. }
        | Effect::DestroyReceiver { .. }
        | Effect::ResumeSource { .. } => By::Agent,
    }
}

/// Returns the effect that comes after another in [`every_effect`]: each new one has to be put in.
fn after(effect: &Effect) -> Option<Effect> {
    let cause = String::new;
    Some(match effect {
        Effect::TryAdmit => Effect::ArmReceiver,
        Effect::ArmReceiver => Effect::HoldGuest,
        Effect::HoldGuest => {
            let listener = Listener::new(String::new(), 0);
            Effect::StartTransfer { listener }
        }
        Effect::StartTransfer { .. } => Effect::StartPostcopy,
        Effect::StartPostcopy => Effect::RecoverReceiver,
        Effect::RecoverReceiver => {
            let listener = Listener::new(String::new(), 0);
            Effect::ResumeTransfer { listener }
        }
        Effect::ResumeTransfer { .. } => {
            let tuning = Tuning {
                max_bandwidth: BytesPerSec(0),
                downtime_limit: Millis(0),
                throttle: AutoConverge::Off,
            };
            Effect::SetLimits { tuning }
        }
        Effect::SetLimits { .. } => Effect::OrderSwitchover,
        Effect::OrderSwitchover => Effect::KillSource { cause: cause() },
        Effect::KillSource { .. } => Effect::Commit,
        Effect::Commit => Effect::ContinueDestination,
        Effect::ContinueDestination => Effect::ReleaseSource { serves: Serves::Never },
        Effect::ReleaseSource { .. } => Effect::CancelTransfer { cause: cause() },
        Effect::CancelTransfer { .. } => {
            Effect::DestroyReceiver { cause: cause(), source_gone: None }
        }
        Effect::DestroyReceiver { .. } => Effect::ResumeSource { proof: some_proof() },
        // Nobody is shut down in the simulation: the core's own world tries that.
        Effect::ShutDownGuest
        | Effect::StartReceiver
        | Effect::RestartSource { .. }
        | Effect::ResumeSource { .. } => return None,
    })
}

#[expect(clippy::unwrap_used, reason = "a letter is a host's id")]
fn some_proof() -> GoneProof {
    GoneProof {
        kind: ProofKind::ExitRecord,
        host: "b".parse().unwrap(),
        boot_id: String::new(),
        pid: 0,
        start_time: 0,
        ended: String::new(),
        at: Timestamp(0),
        stderr_tail: String::new(),
    }
}

/// What is done only for a guest that goes before its memory.
const DIVIDED: [&str; 3] = ["start_postcopy", "recover_receiver", "resume_transfer"];

fn every_effect() -> Vec<Effect> {
    std::iter::successors(Some(Effect::TryAdmit), after).collect()
}

/// Asserts that each effect that a move may owe was hit by each mishap.
fn assert_complete(covered: &Covered, mishaps: &[Mishap], effects: &[&'static str]) {
    for effect in effects {
        for mishap in mishaps {
            let pair = (*effect, format!("{mishap:?}"));
            assert!(covered.contains(&pair), "{effect} never meets {mishap:?}: {covered:?}");
        }
    }
}

/// The commands that a move of a kind may lead to.
fn commands_of(asked: Asked) -> Vec<&'static str> {
    let agents = every_effect();
    let agents = agents.iter().filter(|effect| matches!(by(effect), By::Agent));
    // No simulated operator sets limits anew, and no simulated transfer is slowed down.
    let all = agents.map(Effect::label).filter(|name| *name != "set_limits");
    let all: Vec<&'static str> = all.collect();
    match asked {
        // Its guest is never held.
        Asked::Move => {
            let own = |name: &&str| *name != "hold_guest" && !DIVIDED.contains(name);
            all.into_iter().filter(own).collect()
        }
        Asked::MoveHeld | Asked::MoveSomehow | Asked::MoveQueued => {
            all.into_iter().filter(|name| !DIVIDED.contains(name)).collect()
        }
        Asked::MoveParted => all.into_iter().filter(|name| *name != "hold_guest").collect(),
        Asked::MoveDiverging => all,
        Asked::Start => vec!["start_vm"],
        Asked::PowerDown | Asked::Quit => vec!["stop_vm"],
    }
}

/// What befalls one command of what is asked for, whichever way that goes.
fn every_command_meets(asked: Asked, mishaps: &[Mishap]) {
    let covered = at_every_point(asked, PointKind::Command, mishaps);
    assert_complete(&covered, mishaps, &commands_of(asked));
}

#[test]
fn every_effect_of_a_precopy_may_fail_repeat_come_late_or_be_the_last() {
    every_command_meets(Asked::Move, &COMMAND);
}

#[test]
fn every_effect_of_a_held_move_may_fail_repeat_come_late_or_be_the_last() {
    every_command_meets(Asked::MoveHeld, &COMMAND);
}

#[test]
fn every_effect_may_fail_or_repeat_while_a_live_move_becomes_a_held_one() {
    every_command_meets(Asked::MoveSomehow, &COMMAND[..6]);
}

#[test]
fn every_effect_may_come_late_or_be_the_last_while_a_live_move_becomes_a_held_one() {
    every_command_meets(Asked::MoveSomehow, &COMMAND[6..]);
}

#[test]
fn every_effect_of_a_postcopy_may_fail_repeat_come_late_or_be_the_last() {
    every_command_meets(Asked::MoveParted, &COMMAND);
}

#[test]
fn an_agent_or_a_qemu_may_die_at_every_step_of_a_postcopy() {
    at_every_point(Asked::MoveParted, PointKind::AgentStep, &DIES);
}

#[test]
fn every_start_and_stop_may_fail_repeat_come_late_or_be_the_last() {
    for asked in POWER {
        every_command_meets(asked, &COMMAND);
    }
}

#[test]
fn every_transaction_may_fail_be_slow_or_be_the_last() {
    let mut covered = Covered::new();
    for asked in MOVES.into_iter().chain(POWER).chain([Asked::MoveQueued]) {
        covered.extend(at_every_point(asked, PointKind::StoreWrite, &TRANSACTION));
    }
    let own: Vec<&'static str> = every_effect()
        .iter()
        .filter_map(|effect| match by(effect) {
            By::Store(what) => Some(what),
            By::Agent => None,
        })
        .collect();
    assert_complete(&covered, &TRANSACTION, &own);
}

#[test]
fn an_agent_or_a_qemu_may_die_at_every_step_of_a_precopy() {
    at_every_point(Asked::Move, PointKind::AgentStep, &DIES);
}

#[test]
fn an_agent_or_a_qemu_may_die_at_every_step_of_a_held_move() {
    at_every_point(Asked::MoveHeld, PointKind::AgentStep, &DIES);
}

#[test]
fn an_agent_may_die_at_every_step_while_a_live_move_becomes_a_held_one() {
    at_every_point(Asked::MoveSomehow, PointKind::AgentStep, &[Mishap::AgentDies]);
}

#[test]
fn anything_may_die_at_every_step_of_a_start_or_stop() {
    for asked in POWER {
        at_every_point(asked, PointKind::AgentStep, &DIES);
        at_every_point(asked, PointKind::AgentStep, &HOSTS_DIE);
    }
}

#[test]
fn a_transfer_may_break_at_each_of_its_steps() {
    for asked in MOVES {
        at_every_point(asked, PointKind::QemuStep, &BREAKS);
        at_every_point(asked, PointKind::Command, &[Mishap::ChannelBreaks]);
    }
}
