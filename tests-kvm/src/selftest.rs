//! The lane checks itself: bare QEMU in the hosts' namespaces, moved over its own
//! monitors, without agent and planner.
//!
//! What is right must pass, and what is wrong must be seen: two guests of one VM
//! that run at once, and a memory that differs.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use uuid::Uuid;

use crate::accel::{self, Accelerator};
use crate::disk;
use crate::guest::{GuestDisk, GuestKind, GuestSpec, Load, Sharing};
use crate::lab::{Lab, host_address};
use crate::monitor::{Monitor, Monitors, differing_pages};
use crate::pinger::Pinger;
use crate::proof;
use crate::runner::say;
use crate::serial::Serial;
use crate::wait::{Level, let_pass, wait_for};

const BOUND: Duration = Duration::from_secs(30);
const MEMORY_MIB: u32 = 192;

/// Runs all checks.
///
/// # Errors
///
/// Says which check did not hold.
pub async fn run(lab: &Lab, guests: &Path) -> Result<()> {
    let best = accel::choose(GuestKind::Rom, guests, lab.dir()).await?;
    let mut accelerators = vec![Accelerator::Tcg];
    accelerators.extend((best == Accelerator::Kvm).then_some(Accelerator::Kvm));
    for accelerator in accelerators {
        let pause = moved_rom(lab, guests, accelerator)
            .await
            .with_context(|| format!("ROM guest, {}", accelerator.label()))?;
        say(&format!(
            "ok     a moved ROM guest passes, {}: pause {:.1} ms",
            accelerator.label(),
            pause.as_secs_f64() * 1e3
        ))?;
        split_brain(lab, guests, accelerator)
            .await
            .with_context(|| format!("split brain, {}", accelerator.label()))?;
        say(&format!("ok     two guests that run at once are seen, {}", accelerator.label()))?;
    }
    let loss = pinged_linux(lab, guests).await.context("Linux guest")?;
    say(&format!("ok     a pinged Linux guest passes: {loss}"))
}

/// A VM of bare QEMU processes.
struct Bare<'l> {
    lab: &'l Lab,
    uuid: Uuid,
    accelerator: Accelerator,
    arguments: Vec<String>,
    serial: Serial,
    monitors: Monitors,
    processes: Vec<Child>,
}

impl Drop for Bare<'_> {
    fn drop(&mut self) {
        for process in &mut self.processes {
            process.kill().ok();
            process.wait().ok();
        }
    }
}

impl<'l> Bare<'l> {
    fn new(lab: &'l Lab, accelerator: Accelerator, arguments: Vec<String>) -> Result<Self> {
        Ok(Self {
            lab,
            uuid: Uuid::new_v4(),
            accelerator,
            arguments,
            serial: Serial::listen(&lab.dir().join("bare.s"))?,
            monitors: Monitors::listen(&lab.dir().join("bare.m"))?,
            processes: Vec::new(),
        })
    }

    async fn start(&mut self, host: &str, extra: &[&str]) -> Result<Monitor> {
        let process = Command::new("ip")
            .args(["netns", "exec", &self.lab.namespace(host), "qemu-system-x86_64"])
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-machine",
                "q35",
                "-cpu",
                "qemu64",
            ])
            .args([
                "-uuid",
                &self.uuid.to_string(),
                "-accel",
                self.accelerator.label(),
                "-m",
                &format!("{MEMORY_MIB}M"),
            ])
            .args(&self.arguments)
            .args(self.serial.qemu_arguments())
            .args(self.monitors.qemu_arguments())
            .args(extra)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start QEMU")?;
        self.processes.push(process);
        self.monitors.next().await
    }

    /// Moves the guest from `source` to a new process on host b, which stands still afterwards.
    async fn copy(&mut self, source: &mut Monitor) -> Result<Monitor> {
        let mut destination = self.start("b", &["-S", "-incoming", "defer"]).await?;
        let capabilities = json!({"capabilities": [{"capability": "return-path", "state": true}]});
        for monitor in [&mut *source, &mut destination] {
            monitor.execute("migrate-set-capabilities", capabilities.clone()).await?;
        }
        let uri = json!({"uri": format!("tcp:{}:49152", host_address("b"))});
        destination.execute("migrate-incoming", uri.clone()).await?;
        source.execute("migrate", uri).await?;
        let source = tokio::sync::Mutex::new(source);
        wait_for("the migration to complete", BOUND, || async {
            let seen = source.lock().await.execute("query-migrate", json!({})).await?;
            Ok(Level::from_option((seen["status"] == "completed").then_some(()), || {
                seen["status"].to_string()
            }))
        })
        .await?;
        Ok(destination)
    }
}

fn rom_arguments(lab: &Lab, guests: &Path, disk: Option<&GuestDisk>) -> Result<Vec<String>> {
    let rom = GuestSpec::rom("bare").with_load(Load::Busy).write_rom(guests, lab.dir())?;
    let mut arguments = vec!["-bios".to_owned(), rom.display().to_string()];
    arguments.extend(disk.map(disk_arguments).unwrap_or_default());
    Ok(arguments)
}

fn disk_arguments(disk: &GuestDisk) -> Vec<String> {
    let file = format!("driver=file,filename={},node-name=f0,cache.direct=on", disk.path.display());
    let format = format!("driver={},file=f0,node-name=d0", disk.format);
    ["-blockdev", &file, "-blockdev", &format, "-device", "virtio-blk-pci,drive=d0"]
        .map(str::to_owned)
        .into()
}

fn new_disk(lab: &Lab, format: &'static str) -> Result<GuestDisk> {
    let path: PathBuf = lab.dir().join(format!("{}.{format}", Uuid::new_v4()));
    disk::create(&path, format)?;
    Ok(GuestDisk { path, format, sharing: Sharing::Shared })
}

async fn moved_rom(lab: &Lab, guests: &Path, accelerator: Accelerator) -> Result<Duration> {
    let disk = new_disk(lab, "qcow2")?;
    let mut vm = Bare::new(lab, accelerator, rom_arguments(lab, guests, Some(&disk))?)?;
    let mut source = vm.start("a", &[]).await?;
    vm.serial.wait_ticks(50, BOUND).await?;
    let uuid = vm.uuid.to_string();
    proof::expect_processes(lab, &["a", "b"], &[(uuid.clone(), "a".to_owned())]).await?;
    let mut destination = vm.copy(&mut source).await?;
    let bytes = u64::from(MEMORY_MIB) << 20;
    let here = source.memory(bytes, &lab.dir().join("here")).await?;
    let mut there = destination.memory(bytes, &lab.dir().join("there")).await?;
    let differing = differing_pages(&here, &there);
    if !differing.is_empty() {
        bail!("{} pages differ, the first at {:#x}", differing.len(), differing[0]);
    }
    there[0x40_0000] ^= 1;
    if differing_pages(&here, &there) != [0x40_0000] {
        bail!("a page that differs was not seen");
    }
    destination.execute("cont", json!({})).await?;
    vm.serial.wait_ticks(50, BOUND).await?;
    if proof::qemu_processes(lab, ["a", "b"])?.len() != 2 {
        bail!("the second QEMU process was not seen");
    }
    source.execute("quit", json!({})).await?;
    vm.processes[0].wait().context("wait for the source")?;
    proof::expect_processes(lab, &["a", "b"], &[(uuid, "b".to_owned())]).await?;
    destination.execute("stop", json!({})).await?;
    let history = vm.serial.history();
    history.check()?;
    destination.execute("quit", json!({})).await?;
    vm.processes[1].wait().context("wait for the destination")?;
    if disk::check(&disk, history.boot_id().context("no boot id")?)? == 0 {
        bail!("the guest wrote nothing to its disk");
    }
    Ok(Duration::from_micros(history.hand_over_us().context("no hand-over was seen")?))
}

async fn split_brain(lab: &Lab, guests: &Path, accelerator: Accelerator) -> Result<()> {
    let mut vm = Bare::new(lab, accelerator, rom_arguments(lab, guests, None)?)?;
    let mut source = vm.start("a", &[]).await?;
    vm.serial.wait_ticks(20, BOUND).await?;
    let mut destination = vm.copy(&mut source).await?;
    destination.execute("cont", json!({})).await?;
    source.execute("cont", json!({})).await?;
    vm.serial.wait_ticks(50, BOUND).await?;
    if vm.serial.history().check().is_ok() {
        bail!("nobody noticed");
    }
    Ok(())
}

async fn pinged_linux(lab: &Lab, guests: &Path) -> Result<String> {
    let accelerator = accel::choose(GuestKind::Linux, guests, lab.dir()).await?;
    let disk = new_disk(lab, "raw")?;
    let spec = GuestSpec::linux("bare", "10.88.0.9").with_load(Load::Busy);
    let image = |name: &str| guests.join(name).display().to_string();
    let mut arguments = disk_arguments(&disk);
    arguments.extend([
        "-kernel".to_owned(),
        image("vmlinuz"),
        "-initrd".to_owned(),
        image("initrd.gz"),
    ]);
    arguments.extend(["-append".to_owned(), spec.command_line()]);
    arguments
        .extend(["-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no"].map(str::to_owned));
    arguments
        .extend(["-device", "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:09"].map(str::to_owned));
    let mut vm = Bare::new(lab, accelerator, arguments)?;
    for host in ["a", "b"] {
        lab.add_tap(host, "tap0")?;
    }
    let mut source = vm.start("a", &[]).await?;
    vm.serial.wait_text("FILLED", BOUND).await?;
    let pinger = Pinger::start(lab, Ipv4Addr::new(10, 88, 0, 9))?;
    let_pass(Duration::from_secs(1)).await;
    let mut destination = vm.copy(&mut source).await?;
    destination.execute("cont", json!({})).await?;
    vm.serial.wait_ticks(100, BOUND).await?;
    let loss = pinger.finish()?;
    let history = vm.serial.history();
    history.check()?;
    if loss.sent < 50 || loss.longest_gap_us > 2_000_000 {
        bail!("{loss:?}");
    }
    let turns = history.ticks.last().map_or(0, |tick| tick.disk_seq);
    if turns == 0 {
        bail!("the guest wrote nothing to its disk");
    }
    for host in ["a", "b"] {
        lab.remove_link(host, "tap0")?;
    }
    Ok(format!(
        "{} of {} pings lost, longest gap {} ms, {turns} disk turns",
        loss.lost,
        loss.sent,
        loss.longest_gap_us / 1000
    ))
}
