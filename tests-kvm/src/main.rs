//! Runs the end-to-end cases.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use vmferry_tests_kvm::bench::{self, BenchArgs};
use vmferry_tests_kvm::cases::{self, Case, Tier};
use vmferry_tests_kvm::cluster::{Artifacts, FaultPoints};
use vmferry_tests_kvm::demo::{self, DemoArgs};
use vmferry_tests_kvm::lab::Lab;
use vmferry_tests_kvm::runner::{Outcome, Runner, keep_logs, markdown, say};
use vmferry_tests_kvm::selftest;

/// Move real guests between hosts in network namespaces, and disturb it
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the cases
    List,
    /// Run cases
    Run(RunArgs),
    /// Check the lane itself with bare QEMU: guests, namespaces, and that it sees what is wrong
    SelfTest(SelfTestArgs),
    /// Move one running guest and say what happened
    Demo {
        #[command(flatten)]
        programs: Programs,
        #[command(flatten)]
        demo: DemoArgs,
    },
    /// Measure moves beside the same steps driven by nothing but QMP
    Bench {
        #[command(flatten)]
        programs: Programs,
        #[command(flatten)]
        bench: BenchArgs,
    },
}

/// Where what is tried is.
#[derive(Debug, Args)]
struct Programs {
    /// Where vmferry-agent, vmferry-planner and vmferry are [default: beside this program]
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Where the guests are that scripts/guest-image builds
    #[arg(long, default_value = "target/guests")]
    guests: PathBuf,
}

#[derive(Debug, Args)]
struct SelfTestArgs {
    /// Where the guests are that scripts/guest-image builds
    #[arg(long, default_value = "target/guests")]
    guests: PathBuf,
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line are switches")]
struct RunArgs {
    /// Run every case
    #[arg(long, conflicts_with_all = ["subset", "names"])]
    all: bool,
    /// Run the cases that are run at every change (the default)
    #[arg(long, conflicts_with = "names")]
    subset: bool,
    /// Run the cases whose names contain one of these
    names: Vec<String>,
    #[command(flatten)]
    programs: Programs,
    /// Where logs of failed cases are kept
    #[arg(long, default_value = "target/e2e-logs")]
    logs: PathBuf,
    /// Write the results as a table in Markdown
    #[arg(long)]
    table: Option<PathBuf>,
}

fn main() -> ExitCode {
    match carry_out(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            // Nobody reads any more where this fails: the exit code says it.
            writeln!(std::io::stderr(), "vmferry-e2e: {error:#}").ok();
            ExitCode::FAILURE
        }
    }
}

fn carry_out(command: Command) -> Result<ExitCode> {
    match command {
        Command::List => {
            for case in cases::all() {
                let tier = match case.tier {
                    Tier::Subset => "subset",
                    Tier::All => "all",
                };
                say(&format!("{:<58} {tier:<6} {}", case.name, case.guest.label()))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(arguments) => run(&arguments),
        Command::SelfTest(arguments) => self_test(&arguments),
        Command::Demo { programs, demo } => {
            let mut artifacts = artifacts(&programs, FaultPoints::Absent)?;
            in_lab(async |lab| kept(&lab, "demo", demo::run(&demo, &lab, &mut artifacts).await))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { programs, bench } => {
            let mut artifacts = artifacts(&programs, FaultPoints::Absent)?;
            in_lab(async |lab| {
                kept(&lab, "bench", bench::run(&bench, &lab, &mut artifacts).await)
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Keeps the logs of a demonstration or a benchmark that failed.
fn kept(lab: &Lab, name: &str, result: Result<()>) -> Result<()> {
    if result.is_err() {
        keep_logs(&Path::new("target/e2e-logs").join(name), &lab.dir().join(name))?;
    }
    result
}

fn run(arguments: &RunArgs) -> Result<ExitCode> {
    let chosen = choose(arguments)?;
    let artifacts = artifacts(&arguments.programs, FaultPoints::Compiled)?;
    let logs = arguments.logs.clone();
    let outcomes = in_lab(async |lab| Runner::new(lab, artifacts, logs).run(&chosen).await)?;
    summarize(arguments, &outcomes)
}

fn self_test(arguments: &SelfTestArgs) -> Result<ExitCode> {
    let guests =
        fs::canonicalize(&arguments.guests).context("find the guests (run scripts/guest-image)")?;
    in_lab(async |lab| selftest::run(&lab, &guests).await)?;
    Ok(ExitCode::SUCCESS)
}

/// Makes the lab, works in it until done or told to stop, and removes it.
fn in_lab<T>(work: impl AsyncFnOnce(Lab) -> Result<T>) -> Result<T> {
    // The runner lives in the switch's namespace. Every thread inherits it, so this comes first.
    let lab = Lab::create().context("make the hosts' namespaces (needs root)")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        // Whichever ends first drops the lab, and with it all that runs there.
        tokio::select! {
            result = work(lab) => result,
            _ = terminate.recv() => bail!("stopped by SIGTERM"),
            _ = interrupt.recv() => bail!("stopped by SIGINT"),
        }
    })
}

fn summarize(arguments: &RunArgs, outcomes: &[Outcome]) -> Result<ExitCode> {
    if let Some(path) = &arguments.table {
        fs::write(path, markdown(outcomes)).with_context(|| format!("write {}", path.display()))?;
    }
    let failed = outcomes.iter().filter(|outcome| outcome.result.is_err()).count();
    say(&format!("{} passed, {failed} failed", outcomes.len() - failed))?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn choose(arguments: &RunArgs) -> Result<Vec<Case>> {
    let wanted = |case: &Case| {
        if arguments.names.is_empty() {
            arguments.all || case.tier == Tier::Subset
        } else {
            arguments.names.iter().any(|name| case.name.contains(name.as_str()))
        }
    };
    let chosen: Vec<_> = cases::all().into_iter().filter(wanted).collect();
    if chosen.is_empty() {
        bail!("no case is called so; see `vmferry-e2e list`");
    }
    Ok(chosen)
}

fn artifacts(programs: &Programs, fault_points: FaultPoints) -> Result<Artifacts> {
    let beside = std::env::current_exe().context("find this program")?;
    let binaries = match &programs.bin_dir {
        Some(dir) => dir.clone(),
        None => beside.parent().context("find this program's directory")?.to_owned(),
    };
    let absolute =
        |path: PathBuf| fs::canonicalize(&path).with_context(|| format!("find {}", path.display()));
    let artifacts = Artifacts {
        binaries: absolute(binaries)?,
        guests: absolute(programs.guests.clone()).context("run scripts/guest-image first")?,
        fault_points,
        accelerators: BTreeMap::new(),
    };
    for binary in ["vmferry-agent", "vmferry-planner", "vmferry"] {
        if !artifacts.binaries.join(binary).exists() {
            bail!(
                "{} has no {binary}; build it with the feature fault-points",
                artifacts.binaries.display()
            );
        }
    }
    Ok(artifacts)
}
