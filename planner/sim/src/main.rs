//! Runs seeded schedules: many, or one with all that happened.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use clap::Parser;
use vmferry_sim::schedule::{Outcome, Schedule};
use vmferry_sim::trace::Detail;

/// Run the planner in simulated worlds
#[derive(Debug, Parser)]
struct Arguments {
    /// How many seeds to try
    #[arg(long, default_value_t = 500, conflicts_with = "seed")]
    seeds: u64,
    /// The first seed to try
    #[arg(long, default_value_t = 1, conflicts_with = "seed")]
    from: u64,
    /// Replay one seed, with its whole history
    #[arg(long)]
    seed: Option<u64>,
    /// Go on after a seed that fails, and list all
    #[arg(long)]
    keep_going: bool,
    /// Threads; each runs its own worlds
    #[arg(long, default_value_t = 2)]
    threads: u64,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    match arguments.seed {
        Some(seed) => replay(seed),
        None => many(&arguments),
    }
}

/// Runs one seed and prints its history.
fn replay(seed: u64) -> anyhow::Result<ExitCode> {
    // The planner's own log goes between the lines of the world, on stderr, without a clock.
    if std::env::var_os("RUST_LOG").is_some() {
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_writer(std::io::stderr)
            .without_time()
            .with_ansi(false)
            .init();
    }
    let schedule = Schedule { detail: Detail::Everything, ..Schedule::drawn(seed) };
    let outcome = schedule.run();
    let mut out = std::io::stdout().lock();
    writeln!(out, "SEED={seed}\n{:?}", schedule.weather)?;
    for line in &outcome.trace {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "{:?}", outcome.counts)?;
    Ok(report(&mut out, seed, &outcome)?)
}

fn report(
    out: &mut impl std::io::Write,
    seed: u64,
    outcome: &Outcome,
) -> std::io::Result<ExitCode> {
    for violation in &outcome.violations {
        writeln!(out, "SEED={seed} {violation}")?;
    }
    Ok(if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs many seeds; prints the first that fails with its history.
fn many(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let next = AtomicU64::new(arguments.from);
    let end = arguments.from.saturating_add(arguments.seeds);
    let failed: Mutex<BTreeMap<u64, Outcome>> = Mutex::default();
    let ended: Mutex<BTreeMap<String, u64>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let over = !failed.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
                    if seed >= end || (over && !arguments.keep_going) {
                        return;
                    }
                    let outcome = Schedule::drawn(seed).run();
                    let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                    for (phase, count) in &outcome.counts.ended {
                        *ended.entry(phase.label().to_owned()).or_default() += count;
                    }
                    for (name, count) in &outcome.counts.commands {
                        *ended.entry((*name).to_owned()).or_default() += count;
                    }
                    *ended.entry("UNKNOWABLE".to_owned()).or_default() += outcome.counts.unknowable;
                    drop(ended);
                    if !outcome.violations.is_empty() {
                        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        failed.insert(seed, outcome);
                    }
                }
            });
        }
    });
    let mut out = std::io::stdout().lock();
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (seed, outcome) in &failed {
        report(&mut out, *seed, outcome)?;
    }
    let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    writeln!(out, "{} seeds, {} failed: {ended:?}", arguments.seeds, failed.len())?;
    match failed.first_key_value() {
        None => Ok(ExitCode::SUCCESS),
        Some(_) if arguments.keep_going => Ok(ExitCode::FAILURE),
        Some((seed, _)) => {
            drop(out);
            replay(*seed)
        }
    }
}
