//! Each mistake that is made on purpose has to break an invariant in some schedule.

use vmferry_sim::bugs::Bug;
use vmferry_sim::schedule::Schedule;
use vmferry_sim::world::{Mishap, PointKind};

/// How many schedules a mistake may hide from.
const SEEDS: u64 = 400;

/// Returns the first schedule that finds a mistake, and what it says: seeds, and then one move with
/// one death at each step.
fn caught(bug: Bug) -> Option<(String, String)> {
    let fails = |schedule: Schedule| {
        let outcome = Schedule { bug: Some(bug), ..schedule }.run();
        outcome.violations.first().map(ToString::to_string)
    };
    let by_seed = (1..=SEEDS)
        .find_map(|seed| fails(Schedule::drawn(seed)).map(|what| (format!("SEED={seed}"), what)));
    by_seed.or_else(|| {
        let kinds = [PointKind::AgentStep, PointKind::QemuStep];
        let deaths = [Mishap::SourceQemuDies, Mishap::DestinationQemuDies, Mishap::ChannelBreaks];
        let all = kinds.iter().flat_map(|kind| {
            deaths.iter().flat_map(move |death| (1..=60).map(move |at| (*kind, at, *death)))
        });
        all.into_iter().find_map(|mishap| {
            fails(Schedule::directed(1, &[mishap])).map(|what| (format!("{mishap:?}"), what))
        })
    })
}

#[test]
fn every_deliberate_bug_is_caught() {
    let found: Vec<(Bug, Option<(String, String)>)> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            Bug::ALL.iter().map(|bug| (*bug, scope.spawn(move || caught(*bug)))).collect();
        threads.into_iter().map(|(bug, thread)| (bug, thread.join().unwrap())).collect()
    });
    for (bug, by) in &found {
        match by {
            Some((schedule, what)) => println!("{bug:?}: {schedule} {what}"),
            None => println!("{bug:?}: NOT CAUGHT by {SEEDS} seeds"),
        }
    }
    let missed: Vec<_> = found.iter().filter(|(_, by)| by.is_none()).map(|(bug, _)| bug).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
