//! `vmferry runtime`: straight to agents, where there is no planner.

use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;
use uuid::Uuid;
use vmferry_planner_core::migration::{
    AutoConverge, Downgrade, Event, Gates, Guest, Migration, NotConverging, Opening, Terms,
};
use vmferry_proto::v1;
use vmferry_types::{BytesPerSec, Generation, HostId, Method, Millis, Timestamp};

use crate::config::{self, Given};
use crate::failure::Failure;
use crate::output::Output;
use crate::render;
use crate::runtime::agent::{Agent, No};
use crate::runtime::journal::{Journal, Kept, VERSION};
use crate::runtime::run::{Run, now_ms, resume};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what a host can do and has, by its own agent's word
    Capabilities {
        /// The agent: a URL, HOST, or HOST:PORT
        agent: String,
    },
    /// Move a running VM between two hosts whose planner is not there
    Migrate(MigrateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// Name or id
    #[arg(required_unless_present = "resume")]
    vm: Option<String>,
    /// The agent of the host where it runs: a URL, HOST, or HOST:PORT
    #[arg(long, value_name = "AGENT", required_unless_present = "resume")]
    from: Option<String>,
    /// The agent of the host where it is to run
    #[arg(long, value_name = "AGENT", required_unless_present = "resume")]
    to: Option<String>,
    /// Where this run keeps its journal [default: vmferry-NAME-ID.json here]
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    journal: Option<PathBuf>,
    /// Go on with a run that was interrupted, by its journal
    #[arg(long, value_name = "FILE", conflicts_with_all = ["vm", "from", "to"])]
    resume: Option<PathBuf>,
    /// Stop after this long; what was begun is gone on with by --resume
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Send at most this many megabits per second
    #[arg(long, value_name = "MBIT/S", default_value_t = 0, hide_default_value = true)]
    bandwidth: u32,
}

pub(crate) async fn run(
    command: Command,
    (given, path): (Given, &Path),
    output: &Output,
) -> Result<(), Failure> {
    let tls_dir = config::settings(given, path)?.tls_dir;
    match command {
        Command::Capabilities { agent } => {
            let agent = Agent::new(&agent, tls_dir)?;
            let report = agent.report().await.map_err(|no| unread("show its capabilities", &no))?;
            output.answer(&report, render::runtime::capabilities);
            Ok(())
        }
        Command::Migrate(args) => migrate(args, tls_dir, output).await,
    }
}

fn unread(operation: &str, no: &No) -> Failure {
    Failure::Failed { operation: operation.to_owned(), cause: no.to_string() }
}

async fn migrate(
    args: MigrateArgs,
    tls_dir: Option<PathBuf>,
    output: &Output,
) -> Result<(), Failure> {
    let deadline = args.timeout.and_then(|limit| Instant::now().checked_add(limit));
    let (journal, kept, source, destination) = if let Some(path) = &args.resume {
        let (journal, kept) = Journal::open(path)?;
        let source = Agent::new(&kept.source, tls_dir.clone())?;
        let destination = Agent::new(&kept.destination, tls_dir)?;
        (journal, kept, source, destination)
    } else {
        let source = Agent::new(args.from.as_deref().unwrap_or_default(), tls_dir.clone())?;
        let destination = Agent::new(args.to.as_deref().unwrap_or_default(), tls_dir)?;
        let vm = args.vm.as_deref().unwrap_or_default();
        let kept = prepare((vm, args.bandwidth), &source, &destination).await?;
        let name = format!("vmferry-{}-{}.json", kept.vm_name, kept.migration.id);
        let path = args.journal.unwrap_or_else(|| PathBuf::from(name));
        (Journal::create(&path, &kept)?, kept, source, destination)
    };
    let never_begun = kept.claim == 0;
    let mut run = Run::new(&journal, kept, source, destination);
    if never_begun && let Err(failure) = run.begin().await {
        drop(run);
        // Refused, nothing was begun; unanswered, it may have been.
        if matches!(failure, Failure::Blocked { .. }) {
            journal.remove()?;
        }
        return Err(failure);
    }
    output.progress(&mut String::new(), &format!("if interrupted, {}", resume(&journal.path)));
    let ended = run.drive(output, deadline).await;
    drop(run);
    if matches!(ended, Ok(()) | Err(Failure::RolledBack { .. })) {
        journal.remove()?;
    }
    ended
}

/// Looks whether the VM can move, and writes down what is to be done. Nothing is begun.
async fn prepare(
    (vm, bandwidth): (&str, u32),
    source: &Agent,
    destination: &Agent,
) -> Result<Kept, Failure> {
    let operation = format!("move VM {vm} without a planner");
    let failed = |no: No| Failure::Failed { operation: operation.clone(), cause: no.to_string() };
    let blocked = |problem: String| Failure::Blocked { operation: operation.clone(), problem };
    let (here, there) = tokio::try_join!(source.report(), destination.report()).map_err(failed)?;
    let known = here.vms.iter().find(|known| known.vm_id == vm || known.vm_name == vm);
    let Some(known) = known else {
        return Err(Failure::Usage {
            operation,
            problem: format!("host {} knows no VM of that name or id", here.host_id),
        });
    };
    let host = |id: &str| id.parse::<HostId>().map_err(|error| blocked(error.to_string()));
    let (from, to) = (host(&here.host_id)?, host(&there.host_id)?);
    if from == to {
        return Err(blocked(format!("both agents are of host {from}")));
    }
    let described = source.describe(known.vm_id.clone()).await;
    let described = described.map_err(|no| blocked(no.to_string()))?;
    let in_the_way = destination.check(described.clone()).await.map_err(failed)?;
    let reasons: Vec<&v1::Blocker> = described.blockers.iter().chain(&in_the_way).collect();
    if !reasons.is_empty() {
        let each = reasons.iter().map(|one| format!("{}: {}", one.code, one.message));
        return Err(blocked(each.collect::<Vec<_>>().join("; ")));
    }
    let opened = Migration::open(Opening {
        id: vmferry_types::MigrationId::from_u128(Uuid::new_v4().as_u128()),
        vm: known.vm_id.parse().map_err(|error| blocked(format!("its id: {error}")))?,
        source: from,
        method: Method::Precopy,
        terms: terms(bandwidth),
        generation: Generation::from_stored(known.generation),
        deadline: Timestamp(u64::MAX),
        found: Guest::Present,
    });
    let opened = opened.map_err(|error| blocked(error.to_string()))?;
    let granted = opened.apply(&Event::Granted { destination: to });
    Ok(Kept {
        version: VERSION,
        vm_name: known.vm_name.clone(),
        source: source.address.clone(),
        destination: destination.address.clone(),
        migration: granted.map_err(|refusal| blocked(refusal.to_string()))?,
        claim: 0,
        entered_ms: now_ms(),
        log: Vec::new(),
    })
}

/// The limits that a planner has unless it is told otherwise.
fn terms(bandwidth: u32) -> Terms {
    Terms {
        asked_destination: None,
        hold_limit: Millis(10_000),
        downtime_limit: Millis(100),
        transfer_timeout: Millis(3_600_000),
        stall_limit: Millis(30_000),
        switchover_limit: Millis(30_000),
        max_bandwidth: BytesPerSec(u64::from(bandwidth) * 125_000),
        auto_converge: AutoConverge::Off,
        shutdown_limit: Millis(300_000),
        gates: Gates::OPEN,
        gate_deadline: Millis(600_000),
        downgrade: Downgrade::Never,
        not_converging: NotConverging::Abort,
    }
}
