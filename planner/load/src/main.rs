//! Runs a trial with built planners.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use vmferry_load::binaries;
use vmferry_load::console::{complain, say};
use vmferry_load::database::Kind;
use vmferry_load::disturbance::Disturb;
use vmferry_load::fleet::{Fencing, Shape, Weather};
use vmferry_load::trial::{self, Afterwards, Plan};

/// Real planners against simulated hosts, disturbed
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// One planner admits VMs while thousands of hosts report to it
    Admission(AdmissionArguments),
    /// Planners on one store move VMs while they are killed, or stopped and continued
    TwoPlanners(Arguments),
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line are switches")]
struct Arguments {
    /// Where vmferry-planner is [default: beside this program]
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// The store: a database of its own on the server of VMFERRY_TEST_POSTGRES, or a file, which
    /// one planner has alone
    #[arg(long, value_enum, default_value = "postgres")]
    store: Store,
    /// What is done to planners
    #[arg(long, value_enum, default_value = "kill")]
    disturb: What,
    /// How many migrations are asked for
    #[arg(long, default_value_t = 200)]
    migrations: usize,
    /// How many hosts there are
    #[arg(long, default_value_t = 10)]
    hosts: usize,
    /// How many VMs each host has at the start
    #[arg(long, default_value_t = 20)]
    vms_per_host: usize,
    /// How many VMs a host has room for
    #[arg(long, default_value_t = 24)]
    room: u64,
    /// How many migrations a host receives at once
    #[arg(long, default_value_t = 2)]
    inbound: u32,
    /// How long a lease holds
    #[arg(long, default_value = "1s")]
    lease: String,
    /// The time between two disturbances, from and to, in milliseconds
    #[arg(long, num_args = 2, default_values_t = [3_000, 5_000], value_names = ["FROM", "TO"])]
    every_ms: Vec<u64>,
    /// Past so many seconds it has failed
    #[arg(long, default_value_t = 300)]
    bound_s: u64,
    /// Where chance comes from [default: a fresh one, which is printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Nothing is lost, late, doubled or broken between planners and agents
    #[arg(long)]
    calm: bool,
    /// Where the planners' logs are kept if it fails
    #[arg(long, default_value = "target/load-logs")]
    logs: PathBuf,
    /// Keep the database and the planners' logs for a look
    #[arg(long)]
    keep: bool,
    /// Print the summary as one JSON object in the last line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct AdmissionArguments {
    /// Where vmferry-planner is [default: beside this program]
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// The store: a database of its own on the server of VMFERRY_TEST_POSTGRES, or a file
    #[arg(long, value_enum, default_value = "sqlite")]
    store: Store,
    /// How many hosts report
    #[arg(long, default_value_t = 10_000)]
    hosts: u32,
    /// How many VMs each has
    #[arg(long, default_value_t = 20)]
    vms_per_host: u32,
    /// The time between two reports of a host, in milliseconds
    #[arg(long, default_value_t = 5_000)]
    interval_ms: u64,
    /// How many VMs are asked for in a second
    #[arg(long, default_value_t = 20)]
    per_second: u32,
    /// For how many seconds
    #[arg(long, default_value_t = 30)]
    seconds: u32,
    /// Print the figures as one JSON object in the last line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Store {
    Sqlite,
    Postgres,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// Nothing
    Nothing,
    /// Killed every 3 to 5 s, and started again at once
    Kill,
    /// Stopped for 2 to 4 s and continued
    Freeze,
    /// Either
    Both,
}

fn main() -> ExitCode {
    let ended = match Cli::parse().command {
        Command::TwoPlanners(arguments) => run(&arguments),
        Command::Admission(arguments) => admission(&arguments),
    };
    match ended {
        Ok(code) => code,
        Err(error) => {
            complain(&format!("vmferry-load: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let plan = plan(arguments)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let summary = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        // Whichever ends first drops the planners, which are killed by that.
        tokio::select! {
            summary = trial::run(&plan) => summary,
            _ = terminate.recv() => anyhow::bail!("stopped by SIGTERM"),
            _ = interrupt.recv() => anyhow::bail!("stopped by SIGINT"),
        }
    })?;
    for failure in &summary.failures {
        complain(&format!("load: {failure}"));
    }
    say(&summary.told());
    if arguments.json {
        say(&summary.json().to_string());
    }
    Ok(if summary.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn admission(arguments: &AdmissionArguments) -> Result<ExitCode> {
    let plan = vmferry_load::admission::Plan {
        planner: binaries::planner(arguments.bin_dir.as_deref())?,
        store: match arguments.store {
            Store::Sqlite => Kind::Sqlite,
            Store::Postgres => Kind::Postgres,
        },
        hosts: arguments.hosts,
        vms_per_host: arguments.vms_per_host,
        interval: Duration::from_millis(arguments.interval_ms),
        per_second: arguments.per_second,
        seconds: arguments.seconds,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let figures = runtime.block_on(vmferry_load::admission::run(&plan))?;
    say(&figures.told());
    if arguments.json {
        say(&figures.json().to_string());
    }
    Ok(ExitCode::SUCCESS)
}

fn plan(arguments: &Arguments) -> Result<Plan> {
    let quiet = Weather {
        fence: Fencing::Kept,
        lost_requests: 0,
        lost_answers: 0,
        late: 0,
        doubled: 0,
        breaks: 0,
    };
    let every =
        |at: usize| Duration::from_millis(arguments.every_ms.get(at).copied().unwrap_or(4_000));
    let (store, planners) = match arguments.store {
        Store::Sqlite => (Kind::Sqlite, 1),
        Store::Postgres => (Kind::Postgres, 2),
    };
    Ok(Plan {
        planner: binaries::planner(arguments.bin_dir.as_deref())?,
        store,
        planners,
        migrations: arguments.migrations,
        shape: Shape {
            hosts: arguments.hosts,
            vms_per_host: arguments.vms_per_host,
            room: arguments.room,
        },
        weather: if arguments.calm { quiet } else { Weather::default() },
        disturb: match arguments.disturb {
            What::Nothing => Disturb::Not,
            What::Kill => Disturb::Kill,
            What::Freeze => Disturb::Freeze,
            What::Both => Disturb::Both,
        },
        every: (every(0), every(1)),
        lease: arguments.lease.clone(),
        inbound_max: arguments.inbound,
        bound: Duration::from_secs(arguments.bound_s),
        seed: arguments.seed.unwrap_or_else(binaries::fresh_seed),
        logs: arguments.logs.clone(),
        afterwards: if arguments.keep { Afterwards::Keep } else { Afterwards::Remove },
    })
}
