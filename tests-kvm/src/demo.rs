//! One live move of a running guest, told to whoever watches.
//!
//! The move is asked for through the command line, as an operator would. What is told afterwards
//! is what was measured: by planner and QEMU, by the guest's own lines, and by the kernel.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use tokio::process::Command;
use vmferry_proto::v1::Migration;

use crate::accel;
use crate::cluster::{Artifacts, Cluster, GuestVm};
use crate::guest::{GuestKind, GuestSpec, Load};
use crate::lab::{Lab, PLANNER_ADDRESS, host_address};
use crate::pki::Wire;
use crate::planners::Store;
use crate::proof;
use crate::runner::say;
use crate::ticks::History;

/// How long the guest runs before it is moved, and after: in lines, one every 10 ms.
const LINES_BEFORE: usize = 100;

/// How the demonstration ends.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

/// What was seen of the move from outside.
#[derive(Debug)]
struct Seen {
    wall: Duration,
    /// The guest's lines when the move was asked for.
    before: History,
    /// And at the end.
    after: History,
    running: Vec<proof::QemuProcess>,
}

/// Moves one guest and says what happened.
///
/// # Errors
///
/// Fails if the move does not end well, or if the guest is not the one that it was.
pub async fn run(arguments: &DemoArgs, lab: &Lab, artifacts: &mut Artifacts) -> Result<()> {
    let accelerator = accel::choose(GuestKind::Linux, &artifacts.guests, lab.dir()).await?;
    artifacts.accelerators.insert(GuestKind::Linux, accelerator);
    say(&format!(
        "A planner ({PLANNER_ADDRESS}) and two hosts, a ({}) and b ({}), in network namespaces; between them all is TLS.",
        host_address("a"),
        host_address("b")
    ))?;
    let mut cluster = Cluster::start(
        lab,
        artifacts,
        &lab.dir().join("demo"),
        &["a", "b"],
        (Store::Sqlite, Wire::Tls),
    )
    .await?;
    let spec = GuestSpec {
        memory_mib: 512,
        load: Load::Filled { fill_mib: 128, dirty_mib_per_s: 20 },
        ..GuestSpec::linux("demo", "10.88.0.10")
    };
    let spec = spec.with_disk(&cluster.disk_path("demo.raw"), "raw");
    let vm = cluster.start_vm(&spec, "a").await?;
    vm.serial.wait_ticks(LINES_BEFORE, Duration::from_secs(60)).await?;
    say(&format!(
        "A Linux guest runs on a: 512 MiB, rewrites 20 MiB/s, writes to a shared disk, prints a line every 10 ms ({}).",
        accelerator.label()
    ))?;
    let (migration, seen) = move_it(&cluster, &vm).await?;
    cluster.expect_running(&vm, "b").await?;
    let seen = Seen {
        after: vm.serial.history(),
        running: proof::qemu_processes(lab, cluster.host_names())?,
        ..seen
    };
    cluster.finish().await.context("after the move")?;
    say(&account(&migration, &seen))?;
    if arguments.json {
        say(&summary(&migration, &seen, accelerator.label()).to_string())?;
    }
    Ok(())
}

async fn move_it(cluster: &Cluster<'_>, vm: &Arc<GuestVm>) -> Result<(Migration, Seen)> {
    say("\n$ vmferry vm migrate demo --to b --wait")?;
    let before = vm.serial.history();
    let began = Instant::now();
    let output = Command::new(cluster.artifacts.binaries.join("vmferry"))
        .args(cluster.cli_options(PLANNER_ADDRESS))
        .args(["--output", "json", "vm", "migrate", "demo", "--to", "b", "--wait"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("run vmferry")?
        .wait_with_output()
        .await
        .context("wait for vmferry")?;
    let wall = Instant::now() - began;
    if !output.status.success() {
        bail!("vmferry ended with {}", output.status);
    }
    let migration = serde_json::from_slice(&output.stdout)
        .context("read the migration that vmferry printed")?;
    let seen = Seen { wall, before, after: History::default(), running: Vec::new() };
    Ok((migration, seen))
}

impl Seen {
    /// The guest's pause as an outsider saw it, in milliseconds.
    fn guest_pause_ms(&self) -> f64 {
        ms(self.after.hand_over_us().unwrap_or_default())
    }

    fn same_boot_id(&self) -> bool {
        self.before.boot_id().is_some() && self.before.boot_id() == self.after.boot_id()
    }

    /// Lines that the guest printed and nobody read.
    fn lost_ticks(&self) -> u64 {
        let ticks = &self.after.ticks;
        let printed = match (ticks.first(), ticks.last()) {
            (Some(first), Some(last)) => last.seq - first.seq + 1,
            _ => 0,
        };
        printed.saturating_sub(
            u64::try_from(ticks.len() + self.after.torn_lines()).unwrap_or(u64::MAX),
        )
    }
}

/// Tells what happened, for people.
fn account(migration: &Migration, seen: &Seen) -> String {
    let mut text = format!("\n{:<14} {:>10}\n", "phase", "lasted");
    for time in &migration.phases {
        text += &format!("{:<14} {:>7.1} ms\n", time.phase, ms(time.us));
    }
    let mib = |bytes: u64| bytes >> 20;
    text += &format!(
        "\nThe move took {:.1} ms; {} MiB crossed in {} passes ({}, {}).\n",
        seen.wall.as_secs_f64() * 1e3,
        mib(migration.bytes_transferred),
        migration.passes,
        migration.method,
        migration.phase,
    );
    text += &format!(
        "The guest stood still: QEMU's downtime {} ms; host clock, STOP to RESUME, {:.1} ms; between two of its \
         lines {:.1} ms.\n",
        migration.downtime_ms,
        ms(migration.pause_us),
        seen.guest_pause_ms()
    );
    let boot = seen.after.boot_id().unwrap_or("unknown");
    text += &format!(
        "It is the same guest: boot id {boot} before and after; {} lines read, {} lost, none repeated; no memory \
         error, no disk error.\n",
        seen.after.ticks.len(),
        seen.lost_ticks()
    );
    match seen.running.as_slice() {
        [only] => {
            text += &format!(
                "It runs once: QEMU process {} on {}, no other on any host.\n",
                only.pid, only.host
            );
        }
        others => text += &format!("QEMU processes of it: {others:?}.\n"),
    }
    text
}

/// The same as one JSON object.
fn summary(migration: &Migration, seen: &Seen, accelerator: &str) -> Value {
    let phases: Vec<Value> = migration
        .phases
        .iter()
        .map(|time| json!({"phase": time.phase, "ms": round(ms(time.us))}))
        .collect();
    json!({
        "outcome": migration.phase,
        "method": migration.method,
        "accel": accelerator,
        "wall_ms": round(seen.wall.as_secs_f64() * 1e3),
        "downtime_ms": migration.downtime_ms,
        "stop_to_resume_ms": round(ms(migration.pause_us)),
        "guest_pause_ms": round(seen.guest_pause_ms()),
        "transferred_bytes": migration.bytes_transferred,
        "same_boot_id": seen.same_boot_id(),
        "lost_ticks": seen.lost_ticks(),
        "running_copies": seen.running.len(),
        "phases": phases,
    })
}

/// Microseconds as milliseconds.
fn ms(us: u64) -> f64 {
    Duration::from_micros(us).as_secs_f64() * 1e3
}

fn round(ms: f64) -> f64 {
    (ms * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ticks::Chunk;

    fn seen(lines: &str) -> Seen {
        let chunk = Chunk { at_us: 0, connection: 0, bytes: lines.into() };
        let after = History::read(&[chunk]);
        Seen { wall: Duration::ZERO, before: after.clone(), after, running: Vec::new() }
    }

    #[test]
    fn a_line_that_nobody_read_is_counted() {
        assert_eq!(seen("T 1234abcd 1 0\nT 1234abcd 2 0\n").lost_ticks(), 0);
        assert_eq!(seen("T 1234abcd 1 0\nT 1234abcd 4 0\n").lost_ticks(), 2);
        assert!(seen("T 1234abcd 1 0\n").same_boot_id());
    }

    #[test]
    fn a_guest_that_said_nothing_is_not_the_same() {
        assert!(!seen("").same_boot_id());
    }
}
