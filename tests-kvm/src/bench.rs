//! Measures vmferry's moves beside the same steps driven by nothing but QMP.
//!
//! Two guests of the same make stand on the same two hosts. They take turns: while one is moved,
//! the other is stopped, so that each move has the machine for itself. Every move carries the same
//! capabilities and limits on both ends, and the memory that a receiver will be given is touched
//! before each move. Figures of one run are compared with each other only.

mod figures;
mod raw_qmp;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use futures::StreamExt as _;
use serde_json::{Value, json};
use vmferry_proto::v1::{GetMigrationRequest, MigrateVmRequest, Migration};

use crate::accel;
use crate::client::move_to;
use crate::cluster::{Artifacts, Cluster, GuestVm};
use crate::guest::{GuestKind, GuestSpec, Load};
use crate::lab::Lab;
use crate::monitor::{Monitor, Monitors};
use crate::pki::Wire;
use crate::planners::Store;
use crate::runner::say;
use crate::serial::now_us;
use figures::{Figures, Move};
use raw_qmp::RawGuest;

/// Enough for a median that one disturbed pair does not carry.
const PAIRS: usize = 15;

/// How long QEMU may plan to stand still: the planner's default.
const DOWNTIME_LIMIT_MS: u64 = 100;

/// No move of half a GiB takes as long.
const MOVE_BOUND: Duration = Duration::from_secs(120);

/// What the guests print after a move before the next begins.
const SETTLING_TICKS: usize = 30;

/// What is measured, and how often.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    what: What,
    /// How many pairs of moves
    #[arg(long, default_value_t = PAIRS)]
    pairs: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum What {
    /// A live move of a Linux guest of 1 GiB
    Move,
}

/// Runs the pairs and prints what they took.
///
/// # Errors
///
/// Fails if a move does, or if the guests are not what they were before.
pub async fn run(arguments: &BenchArgs, lab: &Lab, artifacts: &mut Artifacts) -> Result<()> {
    let What::Move = arguments.what;
    let accelerator = accel::choose(GuestKind::Linux, &artifacts.guests, lab.dir()).await?;
    artifacts.accelerators.insert(GuestKind::Linux, accelerator);
    let spec = GuestSpec {
        memory_mib: 1024,
        load: Load::Filled { fill_mib: 512, dirty_mib_per_s: 20 },
        address: None,
        ..GuestSpec::linux("bench", "")
    };
    say(&format!(
        "{} pairs of moves: Linux guest of {} MiB, 512 MiB filled, 20 MiB/s dirtied, {}, no cap on the bandwidth",
        arguments.pairs,
        spec.memory_mib,
        accelerator.label()
    ))?;
    let dir = lab.dir().join("bench");
    let mut cluster =
        Cluster::start(lab, artifacts, &dir, &["a", "b"], (Store::Sqlite, Wire::PlainText)).await?;
    let mut ferried = Ferried::start(&mut cluster, &spec, &dir).await?;
    ferried.stop().await?;
    let mut raw = RawGuest::boot(lab, artifacts, &spec, &dir, accelerator).await?;
    raw.stop().await?;

    let mut figures = Figures::default();
    for pair in 0..arguments.pairs {
        let destination = if pair % 2 == 0 { "b" } else { "a" };
        // Who goes first changes too: what the first leaves behind is then each one's half the time.
        let (by_hand, by_vmferry) = if pair % 4 < 2 {
            let by_hand = raw_move(&mut raw, destination, &spec).await?;
            (by_hand, ferried.measure(&cluster, destination, &spec).await?)
        } else {
            let by_vmferry = ferried.measure(&cluster, destination, &spec).await?;
            (raw_move(&mut raw, destination, &spec).await?, by_vmferry)
        };
        say(&format!("pair {:>2}   raw {by_hand}   vmferry {by_vmferry}", pair + 1))?;
        figures.push(by_hand, by_vmferry);
    }
    raw.finish().await?;
    ferried.go_on().await?;
    cluster.finish().await.context("after the moves")?;
    say(&figures.text())?;
    if arguments.json { say(&figures.json().to_string()) } else { Ok(()) }
}

/// Touches as much memory as a receiver will be given: pages that the machine has to fetch first
/// cost several times the copy, and whoever moves first would pay for both.
async fn warm(spec: &GuestSpec) -> Result<()> {
    let bytes = usize::try_from(spec.memory_mib)? * (1 << 20) + (128 << 20);
    let touch = move || drop(std::hint::black_box(vec![1u8; bytes]));
    tokio::task::spawn_blocking(touch).await.context("warm the memory")
}

async fn raw_move(
    raw: &mut RawGuest<'_>,
    destination: &'static str,
    spec: &GuestSpec,
) -> Result<Move> {
    raw.go_on().await?;
    warm(spec).await?;
    let moved = raw.move_to(destination).await.context("move with QMP alone")?;
    raw.serial().wait_ticks(SETTLING_TICKS, MOVE_BOUND).await?;
    raw.serial().history().check().context("the guest that was moved with QMP alone")?;
    let gap = raw.serial().history().hand_over_us().unwrap_or_default();
    raw.stop().await?;
    Ok(Move { serial_gap_us: gap, ..moved })
}

/// The guest that vmferry moves, and a monitor to stop it between its moves.
#[derive(Debug)]
struct Ferried {
    vm: std::sync::Arc<GuestVm>,
    monitors: Monitors,
    monitor: Monitor,
}

impl Ferried {
    async fn start(cluster: &mut Cluster<'_>, spec: &GuestSpec, dir: &Path) -> Result<Self> {
        let monitors = Monitors::listen(&dir.join("bench.m"))?;
        let mut spec = spec.clone();
        spec.extra_args.extend(monitors.qemu_arguments());
        let starting = cluster.start_vm(&spec, "a");
        let (vm, monitor) = tokio::try_join!(starting, monitors.next())?;
        Ok(Self { vm, monitors, monitor })
    }

    async fn stop(&mut self) -> Result<()> {
        self.execute("stop").await
    }

    async fn go_on(&mut self) -> Result<()> {
        self.execute("cont").await
    }

    async fn execute(&mut self, command: &str) -> Result<()> {
        let answer: Value = self.monitor.execute(command, json!({})).await?;
        drop(answer);
        Ok(())
    }

    async fn measure(
        &mut self,
        cluster: &Cluster<'_>,
        destination: &str,
        spec: &GuestSpec,
    ) -> Result<Move> {
        self.go_on().await?;
        cluster.clients.wait_vm(&self.vm, MOVE_BOUND, |seen| seen.run_state == "running").await?;
        warm(spec).await?;
        let request = MigrateVmRequest {
            downtime_limit_ms: DOWNTIME_LIMIT_MS,
            ..move_to(&self.vm, destination)
        };
        let began = now_us();
        let id = cluster.clients.migrate(&request).await.context("ask for the move")?.id;
        let last = tokio::time::timeout(MOVE_BOUND, watch(cluster, id))
            .await
            .context("the move took too long")??;
        let ended = now_us();
        if last.phase != "done" {
            bail!("the move ended as {}: {}", last.phase, last.error);
        }
        self.monitor = self.monitors.next().await?;
        self.vm.serial.wait_ticks(SETTLING_TICKS, MOVE_BOUND).await?;
        cluster.expect_one_guest(&self.vm)?;
        let gap = self.vm.serial.history().hand_over_us().unwrap_or_default();
        self.stop().await?;
        Ok(Move {
            wall_us: ended - began,
            guest_pause_us: last.pause_us,
            downtime_ms: last.downtime_ms,
            serial_gap_us: gap,
            sent_bytes: last.bytes_transferred,
        })
    }
}

/// Follows a migration to its last state.
async fn watch(cluster: &Cluster<'_>, id: String) -> Result<Migration> {
    let mut planner = cluster.clients.planner();
    let mut states = planner
        .watch_migration(GetMigrationRequest { id })
        .await
        .context("watch the move")?
        .into_inner();
    let mut last = None;
    while let Some(state) = states.next().await {
        last = Some(state.context("watch the move")?);
    }
    last.context("the planner showed no state of the move")
}
