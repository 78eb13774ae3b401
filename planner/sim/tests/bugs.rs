//! Each mistake that is made on purpose has to break an invariant in some schedule.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmferry_sim::bugs::Bug;
use vmferry_sim::schedule::Schedule;
use vmferry_sim::weather::{Blow, Weather};
use vmferry_sim::world::Invariant;

/// How many schedules a mistake may hide from.
const SEEDS: u64 = 400;

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
        }
        Bug::PlannerDestroysBlindly | Bug::PlannerKillsUndecided => {
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
        | Bug::PlannerReleasesEarly
        | Bug::StoreCommitsTwice
        | Bug::StoreWritesAnyway
        | Bug::StoreLosesWrites => {}
    }
}

/// What found a mistake.
struct Found {
    bug: Bug,
    by: Option<(u64, String)>,
    broken: BTreeSet<Invariant>,
}

/// Returns the first schedule that finds a mistake, and what it says.
fn caught(bug: Bug) -> Found {
    let first = (1..=SEEDS).find_map(|seed| {
        let mut schedule = Schedule { bug: Some(bug), ..Schedule::drawn(seed) };
        expose(bug, &mut schedule.weather);
        let violations = schedule.run().violations;
        (!violations.is_empty()).then_some((seed, violations))
    });
    match first {
        None => Found { bug, by: None, broken: BTreeSet::new() },
        Some((seed, violations)) => Found {
            bug,
            by: Some((seed, violations[0].to_string())),
            broken: violations.iter().map(|violation| violation.invariant).collect(),
        },
    }
}

#[test]
fn every_deliberate_bug_is_caught() {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<Found>> = Mutex::default();
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(bug) = Bug::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let caught = caught(*bug);
                    found.lock().unwrap().push(caught);
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap();
    found.sort_by_key(|found| found.bug);
    let mut broken = BTreeSet::new();
    for Found { bug, by, broken: by_it } in &found {
        match by {
            Some((seed, what)) => println!("{bug:?}: SEED={seed} {what}"),
            None => println!("{bug:?}: NOT CAUGHT by {SEEDS} seeds"),
        }
        broken.extend(by_it.iter().copied());
    }
    let missed: Vec<Bug> =
        found.iter().filter(|found| found.by.is_none()).map(|found| found.bug).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
    // An invariant that nothing breaks says nothing.
    let silent: Vec<&Invariant> =
        Invariant::ALL.iter().filter(|invariant| !broken.contains(invariant)).collect();
    assert!(silent.is_empty(), "nothing breaks {silent:?}");
}
