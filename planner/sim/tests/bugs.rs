//! Each mistake that is made on purpose has to break an invariant in some schedule.

use vmferry_sim::bugs::Bug;
use vmferry_sim::schedule::Schedule;
use vmferry_sim::weather::{Blow, Weather};

/// How many schedules a mistake may hide from.
const SEEDS: u64 = 400;

/// Lets happen what a mistake is about, where chance alone would take too long to.
fn expose(bug: Bug, weather: &mut Weather) {
    if bug == Bug::AgentTrustsLostJournal {
        weather.blows.push(Blow::Journal);
        weather.blow_every = weather.blow_every.max(500);
    }
    if bug == Bug::AgentForgetsHold {
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
}

/// Returns the first schedule that finds a mistake, and what it says.
fn caught(bug: Bug) -> Option<(u64, String)> {
    (1..=SEEDS).find_map(|seed| {
        let mut schedule = Schedule { bug: Some(bug), ..Schedule::drawn(seed) };
        expose(bug, &mut schedule.weather);
        let outcome = schedule.run();
        outcome.violations.first().map(|violation| (seed, violation.to_string()))
    })
}

#[test]
fn every_deliberate_bug_is_caught() {
    let found: Vec<(Bug, Option<(u64, String)>)> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            Bug::ALL.iter().map(|bug| (*bug, scope.spawn(move || caught(*bug)))).collect();
        threads.into_iter().map(|(bug, thread)| (bug, thread.join().unwrap())).collect()
    });
    for (bug, by) in &found {
        match by {
            Some((seed, what)) => println!("{bug:?}: SEED={seed} {what}"),
            None => println!("{bug:?}: NOT CAUGHT by {SEEDS} seeds"),
        }
    }
    let missed: Vec<_> = found.iter().filter(|(_, by)| by.is_none()).map(|(bug, _)| bug).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
