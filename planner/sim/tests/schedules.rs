//! Seeds: many in bad weather, and any one of them again.

use vmferry_sim::schedule::{Outcome, Schedule};
use vmferry_sim::trace::Detail;

/// Reads a number from the environment: how a run is told how long to take, or which seed to show.
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn replay(seed: u64) -> Outcome {
    Schedule { detail: Detail::Everything, ..Schedule::drawn(seed) }.run()
}

#[test]
fn any_schedule_keeps_the_invariants() {
    let from = asked("SIM_FROM").unwrap_or(1);
    for seed in from..from + asked("SIM_SEEDS").unwrap_or(100) {
        let outcome = Schedule::drawn(seed).run();
        if !outcome.violations.is_empty() {
            println!("SEED={seed}");
            for line in &replay(seed).trace {
                println!("{line}");
            }
            panic!("SEED={seed}: {}", outcome.violations[0]);
        }
    }
}

#[test]
fn one_seed() {
    let seed = asked("SEED").unwrap_or(397);
    let outcome = replay(seed);
    println!("SEED={seed}");
    for line in &outcome.trace {
        println!("{line}");
    }
    assert_eq!(outcome.violations, [], "SEED={seed}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in [2, 10, 16, 136, 142, 397, 458] {
        let (one, other) = (replay(seed), replay(seed));
        let differs = one.trace.iter().zip(&other.trace).find(|(one, other)| one != other);
        assert_eq!(differs, None, "SEED={seed}");
        assert_eq!(one.trace.join("\n").as_bytes(), other.trace.join("\n").as_bytes());
        assert_eq!(one.counts, other.counts, "SEED={seed}");
    }
}
