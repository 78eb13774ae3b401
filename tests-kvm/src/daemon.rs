//! One agent or planner process in its namespace.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

/// How long a daemon may take to end when asked to.
const STOP_BOUND: Duration = Duration::from_secs(10);

/// A daemon that can be killed and started again over the same state.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    namespace: String,
    binary: PathBuf,
    config: PathBuf,
    log: PathBuf,
    boot_id: Option<PathBuf>,
    starts: u32,
    child: Option<Child>,
}

impl Daemon {
    /// Describes a daemon; it is not started.
    #[must_use]
    pub fn new(name: &str, namespace: &str, binary: &Path, config: &Path, log_dir: &Path) -> Self {
        Self {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            binary: binary.to_owned(),
            config: config.to_owned(),
            log: log_dir.join(format!("{name}.log")),
            boot_id: None,
            starts: 0,
            child: None,
        }
    }

    /// Runs it under the boot id in `file`, as if its host were a machine of its own: what it starts
    /// sees the same.
    #[must_use]
    pub fn with_boot_id(mut self, file: &Path) -> Self {
        self.boot_id = Some(file.to_owned());
        self
    }

    /// Returns its name: `agent-a`, `planner`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns where it logs.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Starts it. All starts log to one file.
    ///
    /// # Errors
    ///
    /// Fails if it runs already or cannot be run.
    pub fn start(&mut self) -> Result<()> {
        if self.child.is_some() {
            bail!("{} runs already", self.name);
        }
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("open {}", self.log.display()))?;
        self.starts += 1;
        // `ip netns exec` becomes the daemon: the process id stays.
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]);
        if let Some(boot_id) = &self.boot_id {
            // `ip netns exec` has made a mount namespace, so nobody else sees this.
            let masked = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
            command.args(["sh", "-c", masked]).arg(boot_id);
        }
        let child = command
            .arg(&self.binary)
            .arg("--config")
            .arg(&self.config)
            .env("RUST_LOG", std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned()))
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the log")?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {} ({})", self.name, self.binary.display()))?;
        self.child = Some(child);
        Ok(())
    }

    /// Kills it with SIGKILL and waits for its end.
    ///
    /// # Errors
    ///
    /// Fails if it does not run.
    pub async fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { bail!("{} does not run", self.name) };
        child.kill().await.with_context(|| format!("kill {}", self.name))
    }

    /// Waits for it to end by itself: it was told to kill itself at a fault point.
    ///
    /// # Errors
    ///
    /// Fails if it does not end within the bound.
    pub async fn wait_end(&mut self, bound: Duration) -> Result<ExitStatus> {
        let Some(child) = self.child.as_mut() else { bail!("{} does not run", self.name) };
        let Ok(status) = tokio::time::timeout(bound, child.wait()).await else {
            bail!("waited {bound:?} for {} to end", self.name);
        };
        self.child = None;
        status.with_context(|| format!("wait for {}", self.name))
    }

    /// Asks it to stop and waits for its end.
    ///
    /// # Errors
    ///
    /// Fails if it does not end, or not well.
    pub async fn stop(&mut self) -> Result<()> {
        let Some(pid) = self.pid() else { return Ok(()) };
        kill(Pid::from_raw(pid), Signal::SIGTERM).with_context(|| format!("stop {}", self.name))?;
        let status = self.wait_end(STOP_BOUND).await?;
        if !status.success() {
            bail!(
                "{} ended with {status} when asked to stop; see {}",
                self.name,
                self.log.display()
            );
        }
        Ok(())
    }

    /// Waits for ever, or returns what is to be said of it if it ends: a level that needs it is then
    /// never reached.
    pub async fn ended(&mut self) -> anyhow::Error {
        let Some(child) = self.child.as_mut() else { return std::future::pending().await };
        let ended = child.wait().await;
        let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
        anyhow!("{} ended with {status}; see {}", self.name, self.log.display())
    }

    /// Returns its process id while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().and_then(Child::id).and_then(|pid| i32::try_from(pid).ok())
    }
}
