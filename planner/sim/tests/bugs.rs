//! Each mistake that is made on purpose has to break an invariant in some schedule.

use vmferry_sim::bugs::Bug;
use vmferry_sim::schedule::Schedule;

/// How many schedules a mistake may hide from.
const SEEDS: u64 = 600;

/// Returns the first schedule that finds a mistake, and what it says.
fn caught(bug: Bug) -> Option<(u64, String)> {
    (1..=SEEDS).find_map(|seed| {
        let outcome = Schedule { bug: Some(bug), ..Schedule::drawn(seed) }.run();
        outcome.violations.first().map(|violation| (seed, violation.to_string()))
    })
}

#[test]
fn every_deliberate_bug_is_caught() {
    let found: Vec<(Bug, Option<(u64, String)>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = Bug::ALL
            .iter()
            .map(|bug| (*bug, scope.spawn(move || caught(*bug))))
            .collect();
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
