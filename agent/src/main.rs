//! The agent's command line.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use vmferry_agent::agent::{self, Agent};
use vmferry_agent::config::Config;
use vmferry_agent::process::Launcher;
use vmferry_agent::shim::{self, ShimArgs};
use vmferry_agent::shutdown::Shutdown;
use vmferry_agent::telemetry;

/// Own the QEMU processes of this host
#[derive(Debug, Parser)]
#[command(name = "vmferry-agent", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The configuration
    #[arg(long, default_value = "/etc/vmferry/agent.toml")]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Be the parent of one QEMU process (started by the agent itself)
    Shim(ShimArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        // Before any runtime: a shim forks first.
        Some(Command::Shim(args)) => shim::run(&args),
        None => match run(&cli.run) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                #[expect(clippy::print_stderr, reason = "logging may not have begun")]
                {
                    eprintln!("vmferry-agent: {error:#}");
                }
                ExitCode::FAILURE
            }
        },
    }
}

fn run(args: &RunArgs) -> anyhow::Result<()> {
    if let Err(error) = telemetry::init() {
        anyhow::bail!("begin to log: {error}");
    }
    let config = Config::load(&args.config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("vmferry-agent")
        .build()
        .context("make the runtime")?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let shutdown = Shutdown::default();
    let binary = std::env::current_exe().context("find this program, to start shims with")?;
    let host_id = config.host_id.clone();
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let agent = Agent::start(config, Launcher::detect(binary), shutdown.clone()).await?;
    let address = agent::serve(&agent).await?;
    tracing::info!(%host_id, %address, "agent is up");
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::debug!(%error, "nobody to tell that the agent is up");
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = feed_watchdog() => {}
    }
    tracing::info!("agent ends; its guests run on");
    shutdown.finish().await;
    Ok(())
}

/// Tells systemd's watchdog, if one waits, that the runtime still turns. Does not end.
async fn feed_watchdog() {
    let Some(patience) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut due = tokio::time::interval(patience / 2);
    loop {
        due.tick().await;
        if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]) {
            tracing::warn!(%error, "systemd's watchdog could not be told");
        }
    }
}
