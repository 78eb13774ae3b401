//! One planner process: started, killed, stopped and continued by its process id.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

/// What a planner process is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its name: `planner-0`.
    pub name: String,
    /// The built program.
    pub binary: PathBuf,
    /// Where its configuration, its state and its log are kept.
    pub dir: PathBuf,
    /// Where it serves gRPC.
    pub grpc: SocketAddr,
    /// Where it serves REST.
    pub rest: SocketAddr,
    /// The store that it shares with the others.
    pub store: String,
    /// How long a lease holds, as the configuration says it.
    pub lease: String,
    /// How many migrations one host receives at once.
    pub inbound_max: u32,
}

/// One planner, over all its starts.
#[derive(Debug)]
pub struct PlannerProcess {
    settings: Settings,
    config: PathBuf,
    log: PathBuf,
    starts: u32,
    child: Option<Child>,
}

impl PlannerProcess {
    /// Writes the configuration; nothing is started.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be written.
    pub fn new(settings: Settings) -> Result<Self> {
        let Settings { name, dir, grpc, rest, store, lease, inbound_max, .. } = &settings;
        let config = dir.join(format!("{name}.toml"));
        let log = dir.join(format!("{name}.log"));
        let text = format!(
            "state_dir = {dir:?}\n\
             [listen]\ngrpc = \"{grpc}\"\nrest = \"{rest}\"\n\
             [store]\nurl = {store:?}\n\
             [policy]\nlease = \"{lease}\"\ninbound_max = {inbound_max}\nqueue_retry = \"2s\"\n\
             [security]\nplain_text = \"loopback\"\n"
        );
        std::fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        Ok(Self { settings, config, log, starts: 0, child: None })
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// Returns where it serves gRPC.
    #[must_use]
    pub const fn grpc(&self) -> SocketAddr {
        self.settings.grpc
    }

    /// Returns where it serves REST.
    #[must_use]
    pub const fn rest(&self) -> SocketAddr {
        self.settings.rest
    }

    /// Returns where all its starts log.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns its process id while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// Starts it, under a name of its own in the database's sessions.
    ///
    /// # Errors
    ///
    /// Fails if it runs already or cannot be run.
    pub fn start(&mut self) -> Result<()> {
        if self.child.is_some() {
            bail!("{} runs already", self.name());
        }
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("open {}", self.log.display()))?;
        self.starts += 1;
        let child = Command::new(&self.settings.binary)
            .arg("--config")
            .arg(&self.config)
            .env("PGAPPNAME", format!("{}#{}", self.name(), self.starts))
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the log")?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| {
                format!("start {} ({})", self.name(), self.settings.binary.display())
            })?;
        self.child = Some(child);
        Ok(())
    }

    /// Kills it with SIGKILL and waits for its end.
    ///
    /// # Errors
    ///
    /// Fails if it does not run.
    pub async fn kill(&mut self) -> Result<()> {
        self.check()?;
        let Some(mut child) = self.child.take() else { bail!("{} does not run", self.name()) };
        child.kill().await.with_context(|| format!("kill {}", self.name()))
    }

    /// Stops it where it is: for all others it has fallen silent, and it does not know.
    ///
    /// # Errors
    ///
    /// Fails if it does not run.
    pub fn freeze(&mut self) -> Result<()> {
        self.check()?;
        self.signal(Signal::SIGSTOP)
    }

    /// Lets it go on where it was stopped.
    ///
    /// # Errors
    ///
    /// Fails if it does not run.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.child.as_ref().and_then(Child::id).and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.with_context(|| format!("{} does not run", self.name()))?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("{signal} to {}", self.name()))
    }

    /// Makes sure that it has not ended by itself.
    ///
    /// # Errors
    ///
    /// Says how it ended, if it has.
    pub fn check(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        if let Some(status) = child.try_wait().context("look at a planner")? {
            bail!("{} ended by itself with {status}; see {}", self.name(), self.log.display());
        }
        Ok(())
    }
}
