//! Runs the end-to-end cases.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use vmferry_tests_kvm::bench::{self, BenchArgs};
use vmferry_tests_kvm::cases::{self, Case, Tier};
use vmferry_tests_kvm::cluster::{Artifacts, FaultPoints};
use vmferry_tests_kvm::demo::{self, DemoArgs};
use vmferry_tests_kvm::lab::Lab;
use vmferry_tests_kvm::matrix::page::Circumstances;
use vmferry_tests_kvm::matrix::workers::Crew;
use vmferry_tests_kvm::matrix::{self, Cell};
use vmferry_tests_kvm::planners::Store;
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
    /// Kill every part at every point, and write down what came of it
    Matrix(MatrixArgs),
    /// Work on the cells of a matrix that other workers share
    #[command(hide = true)]
    MatrixWorker(MatrixWorkerArgs),
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

#[derive(Debug, Args)]
struct Chosen {
    /// Only the cells over this store
    #[arg(long, value_enum)]
    store: Option<StoreName>,
    /// Only the cells whose names contain one of these
    #[arg(long)]
    filter: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StoreName {
    /// One planner with a file of its own
    Sqlite,
    /// Two planners with one PostgreSQL, which scripts/with-postgres provides
    Postgres,
}

impl Chosen {
    fn stores(&self) -> Vec<Store> {
        match self.store {
            Some(StoreName::Sqlite) => vec![Store::Sqlite],
            Some(StoreName::Postgres) => vec![Store::Postgres],
            None => Store::EACH.to_vec(),
        }
    }

    fn cells(&self) -> Vec<Cell> {
        let mut cells = matrix::cells(&self.stores());
        cells.retain(|cell| {
            let name = cell.name();
            self.filter.is_empty() || self.filter.iter().any(|part| name.contains(part.as_str()))
        });
        cells
    }
}

#[derive(Debug, Args)]
struct MatrixArgs {
    #[command(flatten)]
    chosen: Chosen,
    /// Write the outcomes and what proves them as a page in Markdown
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Write a line of JSON for each cell
    #[arg(long)]
    json: Option<PathBuf>,
    /// How many cells are carried out side by side
    #[arg(long, default_value_t = 3)]
    workers: usize,
    /// Name the cells and run none
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    programs: Programs,
    /// Where logs of failed cells are kept
    #[arg(long, default_value = "target/e2e-logs")]
    logs: PathBuf,
}

#[derive(Debug, Args)]
struct MatrixWorkerArgs {
    #[command(flatten)]
    chosen: Chosen,
    #[command(flatten)]
    programs: Programs,
    #[arg(long)]
    logs: PathBuf,
    #[arg(long)]
    shared: PathBuf,
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
        Command::Matrix(arguments) => run_matrix(&arguments),
        Command::MatrixWorker(arguments) => {
            let artifacts = artifacts(&arguments.programs, FaultPoints::Compiled)?;
            let cells = arguments.chosen.cells();
            in_lab(async |lab| {
                let mut runner = Runner::new(lab, artifacts, arguments.logs.clone());
                matrix::workers::work(&mut runner, &cells, &arguments.shared).await
            })?;
            Ok(ExitCode::SUCCESS)
        }
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

fn run_matrix(arguments: &MatrixArgs) -> Result<ExitCode> {
    let cells = arguments.chosen.cells();
    if cells.is_empty() {
        bail!("no cell is called so; see `vmferry-e2e matrix --list`");
    }
    if arguments.list {
        cells.iter().try_for_each(|cell| say(&cell.name()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let crew = Crew {
        workers: arguments.workers.clamp(1, cells.len()),
        arguments: worker_arguments(arguments)?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let (verdicts, seconds) = runtime.block_on(matrix::workers::run(&crew, &cells))?;
    if let Some(path) = &arguments.json {
        let lines: Result<Vec<_>, _> = verdicts.iter().map(serde_json::to_string).collect();
        let lines = lines.context("write the verdicts")?.join("\n");
        fs::write(path, lines + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    if let Some(path) = &arguments.markdown {
        let about = circumstances(crew.workers, seconds)?;
        let page = matrix::page::markdown(&arguments.chosen.stores(), &verdicts, &about);
        fs::write(path, page).with_context(|| format!("write {}", path.display()))?;
    }
    let failed: Vec<_> = verdicts.iter().filter(|verdict| verdict.failure.is_some()).collect();
    for verdict in &failed {
        say(&format!("FAILED {}", verdict.cell))?;
    }
    let passed = verdicts.len() - failed.len();
    say(&format!("{passed} cells as planned, {} not, in {seconds:.0} s", failed.len()))?;
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the arguments that make another process of this program a worker for the same cells.
fn worker_arguments(arguments: &MatrixArgs) -> Result<Vec<String>> {
    // Looked up before the workers are: a program that is missing is one error, not one each.
    let artifacts = artifacts(&arguments.programs, FaultPoints::Compiled)?;
    let text = |path: &Path| path.display().to_string();
    let mut made = vec!["matrix-worker".to_owned()];
    made.extend(["--bin-dir".to_owned(), text(&artifacts.binaries)]);
    made.extend(["--guests".to_owned(), text(&artifacts.guests)]);
    made.extend(["--logs".to_owned(), text(&arguments.logs)]);
    if let Some(store) = arguments.chosen.store {
        let store = store.to_possible_value().map(|value| value.get_name().to_owned());
        made.extend(store.into_iter().flat_map(|name| ["--store".to_owned(), name]));
    }
    for part in &arguments.chosen.filter {
        made.extend(["--filter".to_owned(), part.clone()]);
    }
    Ok(made)
}

/// Says where and of what the matrix was run.
fn circumstances(workers: usize, seconds: f64) -> Result<Circumstances> {
    let said = |program: &str, arguments: &[&str]| -> Result<String> {
        let output = std::process::Command::new(program)
            .args(arguments)
            .output()
            .with_context(|| format!("run {program}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    let mut commit = said("git", &["rev-parse", "--short", "HEAD"])?;
    if !said("git", &["status", "--porcelain", "--untracked-files=no"])?.is_empty() {
        commit.push_str(" with changes that are not committed");
    }
    let machine = format!(
        "{} CPUs, kernel {}, {}",
        said("nproc", &[])?,
        said("uname", &["-r"])?,
        said("qemu-system-x86_64", &["--version"])?
    );
    Ok(Circumstances { commit, date: said("date", &["-u", "+%F"])?, machine, workers, seconds })
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
