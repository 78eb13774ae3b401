//! The planner's process: flags, configuration, wiring, signals.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};
use vmferry_planner::agents::rpc::{Directory, GrpcAgents};
use vmferry_planner::config::Config;
use vmferry_planner::faults::FaultPoints;
use vmferry_planner::inventory::Inventory;
use vmferry_planner::planner::{Parts, Planner};
use vmferry_planner::shutdown::Shutdown;
use vmferry_planner::store::sql::SqlStore;
use vmferry_planner::store::{Sharing, Store};
use vmferry_planner::{security, server, telemetry};
use vmferry_tls::{Acceptor, Protocol};

/// Thousands of reports a second are hundreds of small allocations each, made on one thread and
/// freed on another: the C library's allocator takes a fifth of the planner's time for it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Decides where VMs go, and sees every move through to its end.
#[derive(Debug, Parser)]
#[command(name = "vmferry-planner", version)]
struct Flags {
    /// The configuration file.
    #[arg(long, default_value = "/etc/vmferry/planner.toml")]
    config: PathBuf,
}

/// Reports come by the thousand and each is some work; what an operator waits for hangs on many short
/// steps, each woken by the store or the network. So the runtime looks for those after every few
/// tasks, where by default it would first do some dozens of those that it has.
const TASKS_BETWEEN_LOOKS: u32 = 4;

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .event_interval(TASKS_BETWEEN_LOOKS)
        .global_queue_interval(TASKS_BETWEEN_LOOKS)
        .build()
        .context("start the runtime")?
        .block_on(run(&flags))
}

async fn run(flags: &Flags) -> anyhow::Result<()> {
    let config = Config::load(&flags.config)?;
    telemetry::install().map_err(|error| anyhow::anyhow!("set up logging: {error}"))?;
    let (security, rest_security) = security::open(config.tls.as_ref())?;
    let store = SqlStore::open(&config.store).await?;
    if store.sharing() == Sharing::Alone {
        // Whoever held leases in it is gone.
        store.clear_leases().await?;
    }
    let store: Arc<dyn Store> = Arc::new(store);
    let directory = Arc::new(Directory::default());
    let inventory = Inventory::load(&config, Arc::clone(&directory), store.as_ref()).await?;
    let shutdown = Shutdown::default();
    let (grpc_address, rest_address) = (config.grpc, config.rest);
    let planner = Planner::new(Parts {
        faults: FaultPoints::new(config.fault_points.clone()),
        agents: Arc::new(GrpcAgents::new(directory, security.clone())),
        config,
        store,
        inventory,
        shutdown: shutdown.clone(),
    });
    let grpc = TcpListener::bind(grpc_address)
        .await
        .with_context(|| format!("listen for gRPC on {grpc_address}"))?;
    let rest = TcpListener::bind(rest_address)
        .await
        .with_context(|| format!("listen for REST on {rest_address}"))?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let grpc = Acceptor::new(grpc, security, Protocol::Grpc);
    let rest = Acceptor::new(rest, rest_security, Protocol::Http);
    server::serve(&planner, grpc, rest);
    info!(grpc = %grpc_address, rest = %rest_address, "planner is up");
    notify(&[sd_notify::NotifyState::Ready]);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = shutdown.requested() => {}
        () = feed_watchdog() => {}
    }
    info!("planner is ending");
    notify(&[sd_notify::NotifyState::Stopping]);
    planner.leave().await;
    Ok(())
}

/// Tells systemd's watchdog, if one waits, that the runtime still turns. Does not end.
///
/// A store that does not answer is no reason to be started again: that would not bring it back.
async fn feed_watchdog() {
    let Some(patience) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut due = tokio::time::interval(patience / 2);
    loop {
        due.tick().await;
        notify(&[sd_notify::NotifyState::Watchdog]);
    }
}

/// Tells systemd, if it is there.
fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "systemd could not be told");
    }
}
