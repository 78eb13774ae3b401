//! Runs seeded schedules: many, or one with all that happened.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use vmferry_sim::schedule::{Outcome, Schedule};
use vmferry_sim::trace::Detail;
use vmferry_sim::world::Counts;

/// What breaks first breaks more: so many are shown.
const VIOLATIONS_MAX: usize = 3;
/// How often a long run says how far it is.
const PROGRESS: Duration = Duration::from_secs(60);

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
    /// How many worlds to run at the same time
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// Where the history of the first seed that fails is written; else it is printed
    #[arg(long)]
    trace: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    match arguments.seed {
        Some(seed) => replay(seed, &mut std::io::stdout().lock()),
        None => many(&arguments),
    }
}

/// Runs one seed and writes its history.
fn replay(seed: u64, out: &mut impl Write) -> anyhow::Result<ExitCode> {
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
    writeln!(out, "SEED={seed}\n{:?}", schedule.weather)?;
    for line in &outcome.trace {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "{:?}", outcome.counts)?;
    Ok(report(out, seed, &outcome)?)
}

fn report(out: &mut impl Write, seed: u64, outcome: &Outcome) -> std::io::Result<ExitCode> {
    for violation in outcome.violations.iter().take(VIOLATIONS_MAX) {
        writeln!(out, "SEED={seed} {violation}")?;
    }
    Ok(if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What many seeds came to.
#[derive(Debug, Default)]
struct Run {
    seeds: u64,
    counts: Counts,
    failed: BTreeMap<u64, Outcome>,
}

/// Runs many seeds; stops at the first that fails and writes its history.
fn many(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let next = AtomicU64::new(arguments.from);
    let end = arguments.from.saturating_add(arguments.seeds);
    let run: Mutex<Run> = Mutex::default();
    let lock = || run.lock().unwrap_or_else(PoisonError::into_inner);
    let said = Mutex::new(began);
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let over = !lock().failed.is_empty() && !arguments.keep_going;
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || over {
                        return;
                    }
                    let outcome = Schedule::drawn(seed).run();
                    let mut run = lock();
                    run.seeds += 1;
                    run.counts.add(&outcome.counts);
                    if !outcome.violations.is_empty() {
                        run.failed.insert(seed, outcome);
                    }
                    tell_progress(&said, began, &run);
                }
            });
        }
    });
    let run = run.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut out = std::io::stdout().lock();
    for (seed, outcome) in &run.failed {
        report(&mut out, *seed, outcome)?;
    }
    summarise(&mut out, arguments, &run, Instant::now().duration_since(began))?;
    match run.failed.first_key_value() {
        None => Ok(ExitCode::SUCCESS),
        Some(_) if arguments.keep_going => Ok(ExitCode::FAILURE),
        Some((seed, _)) => match &arguments.trace {
            None => replay(*seed, &mut out),
            Some(path) => {
                writeln!(out, "sim: the history of seed {seed} is in {}", path.display())?;
                write_trace(path, *seed)
            }
        },
    }
}

fn write_trace(path: &Path, seed: u64) -> anyhow::Result<ExitCode> {
    let context = || format!("write the history to {}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(context)?;
    }
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).with_context(context)?);
    let code = replay(seed, &mut file)?;
    file.flush().with_context(context)?;
    Ok(code)
}

/// Says on stderr how far a long run is.
fn tell_progress(said: &Mutex<Instant>, began: Instant, run: &Run) {
    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    if now.duration_since(*said) >= PROGRESS {
        *said = now;
        let (seeds, failed) = (run.seeds, run.failed.len());
        let seconds = now.duration_since(began).as_secs();
        let line = format!("sim: {seeds} schedules, {failed} failed, {seconds} s\n");
        // Whoever closed stderr does not want to know.
        drop(std::io::stderr().write_all(line.as_bytes()));
    }
}

fn summarise(
    out: &mut impl Write,
    arguments: &Arguments,
    run: &Run,
    took: Duration,
) -> std::io::Result<()> {
    let Counts { ended, powers, commands, emptied, .. } = &run.counts;
    let list = |pairs: Vec<(String, u64)>| {
        let texts: Vec<String> =
            pairs.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
        texts.join(", ")
    };
    let moves = ended.iter().map(|(phase, count)| (phase.label().to_owned(), *count)).collect();
    let powers =
        powers.iter().map(|((kind, end), count)| (format!("{kind} {end}"), *count)).collect();
    let commands = commands.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    let counts = &run.counts;
    writeln!(out, "sim: moves: opened {}, {}", counts.opened, list(moves))?;
    writeln!(out, "sim: starts and stops: {}", list(powers))?;
    writeln!(out, "sim: commands: {}", list(commands))?;
    let emptied = emptied.iter().map(|(phase, count)| ((*phase).to_owned(), *count)).collect();
    writeln!(out, "sim: hosts emptied: {}", list(emptied))?;
    writeln!(
        out,
        "sim: died: {} planners, {} agents, {} QEMUs, {} hosts, {} journals ({} seeded again); {} messages went astray, {} calls of the store failed, {} machines stood still",
        counts.planner_deaths,
        counts.agent_deaths,
        counts.qemu_deaths,
        counts.host_crashes,
        counts.journals_lost,
        counts.journals_seeded,
        counts.mishaps,
        counts.store_failures,
        counts.freezes,
    )?;
    writeln!(
        out,
        "sim: {} guests went on from an older past that nobody alive could know of",
        counts.unknowable
    )?;
    let seconds = took.as_secs_f64().max(0.001);
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = run.seeds as f64 * 60.0 / seconds;
    writeln!(
        out,
        "sim: {} schedules from seed {}, {} steps, {} failed, in {seconds:.1} s ({rate:.0} a minute)",
        run.seeds,
        arguments.from,
        counts.steps,
        run.failed.len(),
    )
}
