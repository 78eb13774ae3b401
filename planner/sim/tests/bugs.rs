//! Each mistake that is made on purpose has to break an invariant in some schedule.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmferry_sim::bugs::Bug;
use vmferry_sim::schedule::{Asked, Schedule};
use vmferry_sim::weather::{Blow, Weather};
use vmferry_sim::world::{Invariant, Mishap, PointKind, Violation};

/// How many schedules a mistake may hide from.
const SEEDS: u64 = 2000;

/// Lets happen what a mistake is about, where chance alone would take too long to.
#[expect(clippy::too_many_lines, reason = "one arm a mistake")]
fn expose(bug: Bug, weather: &mut Weather) {
    match bug {
        Bug::AgentTrustsLostJournal => {
            weather.blows.push(Blow::Journal);
            weather.blow_every = weather.blow_every.max(500);
        }
        Bug::AgentForgetsHold => {
            *weather = Weather {
                planners: 1,
                planner_back: 60_000,
                calm_at_ms: 60_000,
                blows: vec![Blow::Planner, Blow::Agent, Blow::Agent],
                blow_every: 1_500,
                vms: 3,
                migrations: 12,
                migration_every: 3_000,
                ..Weather::fair()
            };
        }
        Bug::AgentTellsOldCompletion => {
            *weather = Weather {
                calm_at_ms: 90_000,
                channel_breaks: 200,
                gated: 600,
                cancelled: 600,
                migrations: 20,
                migration_every: 6_000,
                ..Weather::fair()
            };
        }
        Bug::AgentBootsTwice => {
            *weather = Weather {
                calm_at_ms: 60_000,
                agent_dies: 150,
                doubled: 600,
                vms: 3,
                migrations: 0,
                powers: 20,
                migration_every: 3_000,
                ..Weather::fair()
            };
        }
        Bug::AgentLendsClaim => {
            weather.by_hand = 3;
            weather.migrations = 5;
            weather.powers = 0;
            weather.migration_every = 1_500;
            weather.vms = 1;
            weather.hosts = 3;
            // Whoever moves by hand looks for no room, and is nobody's to end.
            weather.room = 4;
            weather.qemu_dies = 0;
            weather.channel_breaks = 0;
        }
        Bug::PlannerDestroysBlindly => {
            weather.silent = 400;
            weather.qemu_dies = 40;
            weather.blows.extend([Blow::HostsApart, Blow::HostsApart]);
            weather.blow_every = weather.blow_every.max(500);
        }
        Bug::StoreTakesSilenceForLoss | Bug::OperatorLies => {
            weather.planners = 1;
            weather.powers = 12;
            weather.migrations = 2;
            weather.blows = vec![Blow::PlannerApart];
            weather.blow_every = 2_000;
            weather.calm_at_ms = 60_000;
        }
        Bug::AgentForgetsAnswers => {
            weather.doubled = 700;
            weather.late = 200;
            weather.by_hand = 0;
        }
        Bug::StoreOverbooks => {
            *weather = Weather {
                room: 2,
                vms: 4,
                hosts: 3,
                planners: 3,
                migrations: 12,
                migration_every: 300,
                ..Weather::fair()
            };
        }
        Bug::StoreForgetsCordons => {
            *weather = Weather {
                calm_at_ms: 60_000,
                store_max: 2_000,
                room: 4,
                vms: 3,
                hosts: 3,
                planners: 2,
                migrations: 30,
                migration_every: 1_500,
                emptyings: 20,
                ..Weather::fair()
            };
        }
        Bug::AgentSkipsFence
        | Bug::AgentObeysDelayedStep
        | Bug::AgentTakesOlderClaim
        | Bug::AgentForgetsOrder
        | Bug::AgentForgetsCont
        | Bug::AgentTakesSilenceForDeath
        | Bug::AgentForgetsProcesses
        | Bug::AgentLiesAboutGone
        | Bug::AgentLeaksTap
        | Bug::AgentStartsBySelf
        | Bug::AgentActsBeforeNote
        | Bug::PlannerKeepsClaim
        | Bug::PlannerClaimsUnheard
        | Bug::PlannerTakesSilenceForDeath
        | Bug::PlannerContinuesEarly
        | Bug::PlannerResumesEarly
        | Bug::PlannerKillsUndecided
        | Bug::PlannerReleasesEarly
        | Bug::StoreCommitsTwice
        | Bug::StoreBreaksLeases
        | Bug::StoreWritesAnyway
        | Bug::StoreLosesWrites => {}
    }
}

/// Says whether a violation shows a mistake.
///
/// That nobody owed a command is known without anything having come of it, so it does not count,
/// where something can come of it. The other mistakes are made good by whoever is commanded: a
/// source that went on tells so, and is never overtaken; the fence keeps a killed source's successor
/// from deciding otherwise; a row that was not written is read again at the next write. What is left
/// of them is that they are made.
fn shows(bug: Bug, invariant: Invariant) -> bool {
    match bug {
        Bug::PlannerContinuesEarly | Bug::PlannerDestroysBlindly => {
            matches!(invariant, Invariant::OneRuns | Invariant::NoOlderPast | Invariant::NotLost)
        }
        Bug::PlannerResumesEarly
        | Bug::PlannerKillsUndecided
        | Bug::PlannerReleasesEarly
        | Bug::StoreLosesWrites => true,
        Bug::AgentSkipsFence
        | Bug::AgentObeysDelayedStep
        | Bug::AgentForgetsAnswers
        | Bug::AgentTakesOlderClaim
        | Bug::AgentForgetsOrder
        | Bug::AgentForgetsCont
        | Bug::AgentForgetsHold
        | Bug::AgentTrustsLostJournal
        | Bug::AgentTakesSilenceForDeath
        | Bug::AgentForgetsProcesses
        | Bug::AgentLiesAboutGone
        | Bug::AgentLeaksTap
        | Bug::AgentStartsBySelf
        | Bug::AgentTellsOldCompletion
        | Bug::AgentActsBeforeNote
        | Bug::AgentBootsTwice
        | Bug::AgentLendsClaim
        | Bug::PlannerKeepsClaim
        | Bug::PlannerClaimsUnheard
        | Bug::PlannerTakesSilenceForDeath
        | Bug::StoreTakesSilenceForLoss
        | Bug::StoreCommitsTwice
        | Bug::StoreOverbooks
        | Bug::StoreBreaksLeases
        | Bug::OperatorLies
        | Bug::StoreWritesAnyway
        | Bug::StoreForgetsCordons => invariant != Invariant::CommitThenAct,
    }
}

/// Returns the schedule of a seed, with what a mistake is about.
fn schedule_for(bug: Bug, seed: u64) -> Schedule {
    if bug == Bug::PlannerKillsUndecided {
        // Whether a source falls silent between its last byte and its word of that is no matter of
        // chance: the seed is the step at which it does.
        return Schedule {
            weather: Weather::fair(),
            mishaps: vec![(PointKind::QemuStep, seed, Mishap::SourceFreezes)],
            asked: Some(Asked::Move),
            ..Schedule::drawn(seed)
        };
    }
    let mut schedule = Schedule::drawn(seed);
    expose(bug, &mut schedule.weather);
    schedule
}

/// What became of a mistake.
struct Found {
    bug: Bug,
    /// The schedule that it was found in, and what it led to.
    by: Option<(u64, Violation)>,
    /// All that it broke there.
    broken: BTreeSet<Invariant>,
    /// Schedules that break something without it.
    unsound: Vec<(u64, Violation)>,
}

/// Returns the first schedule that finds a mistake, and that breaks nothing without it.
fn caught(bug: Bug) -> Found {
    let mut found = Found { bug, by: None, broken: BTreeSet::new(), unsound: Vec::new() };
    for seed in 1..=SEEDS {
        let control = schedule_for(bug, seed);
        let violations = Schedule { bug: Some(bug), ..control.clone() }.run().violations;
        let outcome = violations.iter().find(|violation| shows(bug, violation.invariant));
        let Some(outcome) = outcome else { continue };
        if let Some(violation) = control.run().violations.into_iter().next() {
            found.unsound.push((seed, violation));
            continue;
        }
        found.by = Some((seed, outcome.clone()));
        found.broken = violations.iter().map(|violation| violation.invariant).collect();
        break;
    }
    found
}

/// The mistakes to look for: all, or the ones that `BUGS` names, to look at them alone.
fn looked_for() -> Vec<Bug> {
    let named = std::env::var("BUGS").unwrap_or_default();
    let is_named = |bug: &&Bug| named.split(',').any(|name| name == format!("{bug:?}"));
    if named.is_empty() {
        return Bug::ALL.to_vec();
    }
    Bug::ALL.iter().filter(is_named).copied().collect()
}

#[test]
fn every_deliberate_bug_is_caught() {
    let bugs = looked_for();
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<Found>> = Mutex::default();
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let caught = caught(*bug);
                    found.lock().unwrap().push(caught);
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap();
    found.sort_by_key(|found| found.bug);
    for Found { bug, by, unsound, .. } in &found {
        match by {
            Some((seed, violation)) => println!("{bug:?}: SEED={seed} {violation}"),
            None => println!("{bug:?}: NOT CAUGHT by {SEEDS} seeds"),
        }
        for (seed, violation) in unsound {
            println!("{bug:?}: SEED={seed} breaks something without it: {violation}");
        }
    }
    let missed: Vec<Bug> =
        found.iter().filter(|found| found.by.is_none()).map(|found| found.bug).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
    if bugs.len() < Bug::ALL.len() {
        return;
    }
    // An invariant that nothing breaks says nothing.
    let broken: BTreeSet<Invariant> =
        found.iter().flat_map(|found| found.broken.iter().copied()).collect();
    let silent: Vec<&Invariant> =
        Invariant::ALL.iter().filter(|invariant| !broken.contains(invariant)).collect();
    assert!(silent.is_empty(), "nothing breaks {silent:?}");
}
