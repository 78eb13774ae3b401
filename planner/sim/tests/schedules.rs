//! Seeds: many in bad weather, and any one of them again.

use vmferry_sim::schedule::{Outcome, Schedule};
use vmferry_sim::trace::Detail;
use vmferry_sim::weather::{Blow, Weather};

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

/// Runs some seeds of one weather.
fn keeps_the_invariants(weather: &Weather) {
    for seed in 1..=15 {
        let schedule = Schedule { weather: weather.clone(), ..Schedule::drawn(seed) };
        assert_eq!(schedule.run().violations, [], "SEED={seed}");
    }
}

#[test]
fn a_copy_of_a_refused_start_or_stop_does_nothing() {
    keeps_the_invariants(&Weather {
        calm_at_ms: 30_000,
        fails: 300,
        blocked: 300,
        doubled: 800,
        vms: 2,
        hosts: 3,
        migrations: 0,
        powers: 12,
        migration_every: 2_000,
        ..Weather::fair()
    });
}

#[test]
fn a_vm_that_was_moved_by_hand_is_not_stopped_by_its_old_host() {
    keeps_the_invariants(&Weather {
        calm_at_ms: 60_000,
        blows: vec![Blow::PlannerApart, Blow::Agent],
        blow_every: 2_000,
        hosts: 3,
        migrations: 2,
        powers: 8,
        by_hand: 4,
        migration_every: 4_000,
        ..Weather::fair()
    });
}

#[test]
fn a_host_that_is_declared_dead_keeps_nothing_waiting() {
    keeps_the_invariants(&Weather {
        calm_at_ms: 40_000,
        blows: vec![Blow::HostForGood],
        blow_every: 20_000,
        vms: 3,
        hosts: 3,
        migrations: 4,
        powers: 6,
        migration_every: 3_000,
        ..Weather::fair()
    });
}

#[test]
fn a_divided_guest_is_mended_for_as_long_as_both_halves_live() {
    keeps_the_invariants(&Weather {
        calm_at_ms: 60_000,
        postcopy: 1_000,
        channel_breaks: 120,
        blows: vec![Blow::Channel, Blow::HostsApart, Blow::Agent, Blow::Planner, Blow::Qemu],
        blow_every: 1_500,
        planners: 2,
        vms: 2,
        hosts: 3,
        migrations: 8,
        migration_every: 5_000,
        ..Weather::fair()
    });
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
