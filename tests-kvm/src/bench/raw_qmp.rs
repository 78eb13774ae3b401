//! A guest that is moved with nothing but QMP: the floor for every tool over QEMU's migration.
//!
//! It does what a careful tool must: the destination is started with `-S`, the switchover is
//! ordered, the guest goes on once both ends say that they have all of it, and the source is ended.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use uuid::Uuid;

use super::figures::Move;
use super::{DOWNTIME_LIMIT_MS, MOVE_BOUND};
use crate::accel::Accelerator;
use crate::cluster::Artifacts;
use crate::guest::GuestSpec;
use crate::lab::{Lab, host_address};
use crate::serial::{Serial, now_us};

/// What vmferry turns on as well.
const CAPABILITIES: [&str; 4] =
    ["events", "return-path", "pause-before-switchover", "late-block-activate"];

/// No cap, in whole pages as QEMU wants it.
const UNLIMITED: u64 = i64::MAX as u64 & !0xf_ffff;

/// How long QEMU may take to start or to answer.
const ANSWER_BOUND: Duration = Duration::from_secs(20);

/// A guest, its present QEMU process, and what it prints.
#[derive(Debug)]
pub(super) struct RawGuest<'l> {
    launcher: Launcher<'l>,
    serial: Serial,
    qemu: Qemu,
}

/// Starts the guest's QEMU processes, all alike.
#[derive(Debug)]
struct Launcher<'l> {
    lab: &'l Lab,
    arguments: Vec<String>,
    /// Where their monitors connect.
    socket: PathBuf,
    listener: UnixListener,
}

/// One QEMU process and its monitor.
#[derive(Debug)]
struct Qemu {
    child: Child,
    stream: BufReader<UnixStream>,
    /// Events not waited for yet, with the host's clock when they came.
    events: Vec<(u64, Value)>,
}

impl<'l> RawGuest<'l> {
    /// Boots the guest on host a and waits until it has filled its memory.
    pub(super) async fn boot(
        lab: &'l Lab,
        artifacts: &Artifacts,
        spec: &GuestSpec,
        dir: &Path,
        accelerator: Accelerator,
    ) -> Result<Self> {
        let serial = Serial::listen(&dir.join("raw.s"))?;
        let socket = dir.join("raw.m");
        let listener = UnixListener::bind(&socket)
            .with_context(|| format!("listen on {}", socket.display()))?;
        let mut arguments = arguments(spec, artifacts, accelerator);
        arguments.extend(serial.qemu_arguments());
        let launcher = Launcher { lab, arguments, socket, listener };
        let qemu = launcher.spawn("a", &[]).await?;
        let guest = Self { launcher, serial, qemu };
        guest.serial.wait_text("FILLED", Duration::from_secs(60)).await?;
        guest.serial.wait_ticks(super::SETTLING_TICKS, MOVE_BOUND).await?;
        Ok(guest)
    }

    pub(super) const fn serial(&self) -> &Serial {
        &self.serial
    }

    pub(super) async fn stop(&mut self) -> Result<()> {
        self.qemu.execute("stop", &json!({})).await.map(drop)
    }

    pub(super) async fn go_on(&mut self) -> Result<()> {
        self.qemu.execute("cont", &json!({})).await.map(drop)
    }

    /// Ends the guest.
    pub(super) async fn finish(mut self) -> Result<()> {
        self.qemu.quit().await
    }

    /// Moves the guest to `host`.
    pub(super) async fn move_to(&mut self, host: &str) -> Result<Move> {
        self.qemu.drain().await?;
        let began = now_us();
        let mut destination = self.launcher.spawn(host, &["-S", "-incoming", "defer"]).await?;
        let source = &mut self.qemu;
        source.configure().await?;
        destination.configure().await?;
        let address = host_address(host);
        let listen = json!({"uri": format!("tcp:{address}:0")});
        destination.execute("migrate-incoming", &listen).await?;
        let listening = destination.execute("query-migrate", &json!({})).await?;
        let port = listening["socket-address"][0]["port"].as_str().context("QEMU names no port")?;
        source.execute("migrate", &json!({"uri": format!("tcp:{address}:{port}")})).await?;
        source.status("pre-switchover").await?;
        source.execute("migrate-continue", &json!({"state": "pre-switchover"})).await?;
        source.status("completed").await?;
        destination.status("completed").await?;
        destination.execute("cont", &json!({})).await?;
        let resumed = destination.event(|event| event["event"] == "RESUME").await?;
        let stopped = source.event(|event| event["event"] == "STOP").await?;
        let figures = source.execute("query-migrate", &json!({})).await?;
        source.quit().await?;
        let ended = now_us();
        self.qemu = destination;
        Ok(Move {
            wall_us: ended - began,
            guest_pause_us: resumed.saturating_sub(stopped),
            downtime_ms: figures["downtime"].as_u64().context("QEMU tells no downtime")?,
            serial_gap_us: 0,
            sent_bytes: figures["ram"]["transferred"].as_u64().context("QEMU tells no bytes")?,
        })
    }
}

/// Returns what every QEMU process of the guest is started with: what vmferry's are, but for its own monitors.
fn arguments(spec: &GuestSpec, artifacts: &Artifacts, accelerator: Accelerator) -> Vec<String> {
    let image = |name: &str| artifacts.guests.join(name).display().to_string();
    let pairs = [
        ("-name", "guest=raw,debug-threads=on".to_owned()),
        ("-uuid", Uuid::new_v4().to_string()),
        ("-machine", spec.machine.to_owned()),
        ("-accel", accelerator.label().to_owned()),
        ("-cpu", "qemu64".to_owned()),
        ("-smp", "1".to_owned()),
        ("-m", format!("size={}M", spec.memory_mib)),
        ("-kernel", image("vmlinuz")),
        ("-initrd", image("initrd.gz")),
        ("-append", spec.command_line()),
        ("-display", "none".to_owned()),
    ];
    let mut arguments: Vec<String> =
        pairs.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect();
    arguments.extend(["-nodefaults", "-no-user-config"].map(str::to_owned));
    arguments
}

impl Launcher<'_> {
    /// Starts a QEMU process in the namespace of `host` and takes its monitor.
    async fn spawn(&self, host: &str, more: &[&str]) -> Result<Qemu> {
        let chardev = format!("socket,id=vfmonitor,path={}", self.socket.display());
        let child = Command::new("ip")
            .args(["netns", "exec", &self.lab.namespace(host), "qemu-system-x86_64"])
            .args(&self.arguments)
            .args(more)
            .args(["-chardev", &chardev, "-mon", "chardev=vfmonitor,mode=control"])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("start QEMU")?;
        let accepted = tokio::time::timeout(ANSWER_BOUND, self.listener.accept()).await;
        let (stream, _) =
            accepted.context("wait for QEMU's monitor")?.context("accept QEMU's monitor")?;
        let mut qemu = Qemu { child, stream: BufReader::new(stream), events: Vec::new() };
        qemu.read().await.context("read the greeting")?;
        qemu.execute("qmp_capabilities", &json!({})).await?;
        Ok(qemu)
    }
}

impl Qemu {
    async fn configure(&mut self) -> Result<()> {
        let on: Vec<Value> =
            CAPABILITIES.iter().map(|name| json!({"capability": name, "state": true})).collect();
        self.execute("migrate-set-capabilities", &json!({"capabilities": on})).await?;
        let limits = json!({"max-bandwidth": UNLIMITED, "downtime-limit": DOWNTIME_LIMIT_MS});
        self.execute("migrate-set-parameters", &limits).await.map(drop)
    }

    async fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.stream.get_mut().write_all(line.as_bytes()).await.context("write to the monitor")?;
        loop {
            let mut answer = tokio::time::timeout(ANSWER_BOUND, self.read())
                .await
                .with_context(|| format!("wait for the answer to {command}"))??;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            self.events.push((now_us(), answer));
        }
    }

    /// Waits for an event; returns the host's clock when it came.
    async fn event(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<u64> {
        let mut seen = 0;
        loop {
            if let Some((at, _)) = self.events[seen..].iter().find(|(_, event)| wanted(event)) {
                return Ok(*at);
            }
            seen = self.events.len();
            let next = tokio::time::timeout(MOVE_BOUND, self.read())
                .await
                .context("wait for an event")??;
            self.events.push((now_us(), next));
        }
    }

    /// Waits until a migration has `status`.
    async fn status(&mut self, status: &str) -> Result<()> {
        let is = |event: &Value, status: &str| {
            event["event"] == "MIGRATION" && event["data"]["status"] == status
        };
        let over = |event: &Value| ["failed", "cancelled"].iter().any(|end| is(event, end));
        self.event(|event| is(event, status) || over(event)).await?;
        if let Some((_, event)) = self.events.iter().find(|(_, event)| over(event)) {
            bail!("waiting for {status}: {event}");
        }
        Ok(())
    }

    /// Forgets what happened so far: the answer comes after every event before it.
    async fn drain(&mut self) -> Result<()> {
        self.execute("query-status", &json!({})).await?;
        self.events.clear();
        Ok(())
    }

    /// Ends the process and waits until it is gone.
    async fn quit(&mut self) -> Result<()> {
        self.stream
            .get_mut()
            .write_all(b"{\"execute\":\"quit\"}\n")
            .await
            .context("write to the monitor")?;
        let ended = tokio::time::timeout(ANSWER_BOUND, self.child.wait()).await;
        let status = ended.context("wait for QEMU to end")?.context("wait for QEMU")?;
        if !status.success() {
            bail!("QEMU ended with {status}");
        }
        Ok(())
    }

    async fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await.context("read the monitor")? == 0 {
            bail!("QEMU closed its monitor");
        }
        serde_json::from_str(&line).context("read what QEMU said")
    }
}
