//! Starts a process.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::task::TaskTracker;

use super::QemuProcess;
use super::judge::{JudgeError, Judgement, judge};
use super::oob::OutOfBand;
use super::record::{
    Exit, ExitRecord, FirstUse, LaunchRecord, MonitorRecord, ProcessDir, RecordError,
};
use super::scan::MONITOR_ID;
use crate::monitor::{Monitor, MonitorError};
use crate::shim::{ShimClient, ShimError};

/// How often a socket that is not there yet is tried again.
///
/// A shim opens it some milliseconds after its own start. A try costs a few
/// microseconds, and the guest stands still for each one that comes late.
const CONNECT_RETRY: Duration = Duration::from_millis(1);

/// How long a process whose monitor broke is given to end.
const EXIT_DEADLINE: Duration = Duration::from_secs(1);

/// What systemd puts into the environment of one service alone.
const SYSTEMD_VARIABLES: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];

/// How a shim comes to live outside of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LauncherKind {
    /// In a session of its own. What ends the agent's whole control group
    /// ends the guests as well.
    Detached,
    /// In a scope of its own below `vmferry-vms.slice`, which systemd leaves
    /// alone when it stops or restarts the agent.
    SystemdScope,
}

/// Starts shims, and waits for them to end.
///
/// Clones share the waiting.
#[derive(Clone, Debug)]
pub struct Launcher {
    kind: LauncherKind,
    shim_binary: PathBuf,
    reaper: TaskTracker,
}

impl Launcher {
    /// Returns a launcher that starts `shim_binary shim --dir …`.
    #[must_use]
    pub fn new(kind: LauncherKind, shim_binary: impl Into<PathBuf>) -> Self {
        Self { kind, shim_binary: shim_binary.into(), reaper: TaskTracker::new() }
    }

    /// Returns a launcher as this machine wants it.
    #[must_use]
    pub fn detect(shim_binary: impl Into<PathBuf>) -> Self {
        // What `sd_booted()` looks at.
        let systemd = Path::new("/run/systemd/system").is_dir();
        let kind = if systemd { LauncherKind::SystemdScope } else { LauncherKind::Detached };
        Self::new(kind, shim_binary)
    }

    /// Returns how it starts them.
    #[must_use]
    pub fn kind(&self) -> LauncherKind {
        self.kind
    }

    fn command(&self, dir: &ProcessDir) -> Command {
        let mut command = match self.kind {
            LauncherKind::Detached => Command::new(&self.shim_binary),
            LauncherKind::SystemdScope => {
                let mut command = Command::new("systemd-run");
                command.args(["--scope", "--quiet", "--collect", "--slice=vmferry-vms.slice"]);
                command.arg(format!("--unit={}", unit_name(dir))).arg("--").arg(&self.shim_binary);
                command
            }
        };
        command.arg("shim").arg("--dir").arg(dir.path());
        // What systemd tells the agent is not meant for a shim or its QEMU.
        for variable in SYSTEMD_VARIABLES {
            command.env_remove(variable);
        }
        command
    }

    /// Starts a shim and returns how its end will be told.
    fn spawn(&self, dir: &ProcessDir) -> io::Result<oneshot::Receiver<io::Result<ExitStatus>>> {
        // What `systemd-run` has to say lands where a shim leaves its own word.
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.shim_log())?;
        let mut command = self.command(dir);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn()?;
        let (ended, end) = oneshot::channel();
        // Nobody else reaps it while this agent lives.
        self.reaper.spawn(reap(child, ended));
        Ok(end)
    }
}

async fn reap(mut child: Child, ended: oneshot::Sender<io::Result<ExitStatus>>) {
    let status = child.wait().await;
    tracing::debug!(?status, "shim ended");
    // Only a launch in progress listens.
    drop(ended.send(status));
}

/// A unit's name: unique among the directories, and readable.
fn unit_name(dir: &ProcessDir) -> String {
    let path = dir.path().to_string_lossy();
    let readable: String = path
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' })
        .collect();
    format!("vmferry-vm{readable}")
}

/// A process could not be started, or did not come up.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// There is nothing to start.
    #[error("an empty command line cannot be launched in {dir}", dir = dir.display())]
    EmptyArgv {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory was used before. It proves what became of its process,
    /// so each launch takes a new one.
    #[error("{dir} was used for a process before: launch in a new directory", dir = dir.display())]
    UsedBefore {
        /// The directory.
        dir: PathBuf,
    },
    /// A record could not be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The shim could not be started.
    #[error("start the shim {program}", program = program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The shim ended and left no record.
    #[error("the shim of {dir} ended ({status}) and started nothing: {said}", dir = dir.display())]
    ShimEnded {
        /// The directory.
        dir: PathBuf,
        /// How.
        status: String,
        /// The last it wrote to its log.
        said: String,
    },
    /// The process ended before its monitor answered. It is gone.
    #[error("QEMU {exit} before its monitor answered: {stderr}", exit = record.exit, stderr = record.stderr_tail.trim_end())]
    Exited {
        /// How.
        record: Box<ExitRecord>,
    },
    /// The monitor broke. The process may live: end it.
    #[error("connect to the monitor of a process that was just started")]
    Monitor(#[source] MonitorError),
    /// The monitor did not answer in time. The process may live: end it.
    #[error("the monitor in {dir} did not answer within {waited:?}", dir = dir.display())]
    Silent {
        /// The directory.
        dir: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// The new process could not be judged. It may live: end it.
    #[error("judge the process that was just started in {dir}", dir = dir.display())]
    Judge {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: JudgeError,
    },
}

/// Starts `argv` in `dir` and returns it once its monitor answers.
///
/// Two monitors and a pid file are added to `argv`; it must bring neither.
/// The directory is created, and serves this one process for ever. Before
/// anything is started the launch is on the disk, so that a crash at any
/// point leaves something for [`adopt()`](super::adopt()) to find.
///
/// # Errors
///
/// See [`LaunchError`]. Unless it is [`LaunchError::Exited`] the process may
/// live or come to live: end it with
/// [`kill_and_prove_gone`](super::kill_and_prove_gone).
pub async fn launch(
    dir: &ProcessDir,
    argv: &[String],
    launcher: &Launcher,
    deadline: Duration,
) -> Result<QemuProcess, LaunchError> {
    if argv.is_empty() {
        return Err(LaunchError::EmptyArgv { dir: dir.path().to_owned() });
    }
    let until = Instant::now() + deadline;
    dir.create()?;
    let record = launch_record(dir, argv);
    match dir.write_launch(&record)? {
        FirstUse::First => {}
        FirstUse::UsedBefore => {
            return Err(LaunchError::UsedBefore { dir: dir.path().to_owned() });
        }
    }
    let shim_end = launcher
        .spawn(dir)
        .map_err(|source| LaunchError::Spawn { program: launcher.shim_binary.clone(), source })?;
    let monitor = tokio::select! {
        monitor = timeout_at(until, connect_patiently(dir, deadline)) => match monitor {
            Ok(monitor) => monitor.map_err(LaunchError::Monitor),
            Err(_) => Err(LaunchError::Silent { dir: dir.path().to_owned(), waited: deadline }),
        },
        error = early_end(dir, shim_end) => Err(error),
    };
    let monitor = match monitor {
        Ok(monitor) => monitor,
        // A monitor that broke off is most often a process that ended.
        Err(error) => return Err(exit_instead(dir, error).await),
    };
    match judge(dir) {
        Ok(Judgement::Alive(identity)) => Ok(QemuProcess {
            dir: dir.clone(),
            identity,
            monitor,
            oob: OutOfBand::new(dir.clone()),
        }),
        Ok(Judgement::Gone(_) | Judgement::Starting) => {
            let silent = LaunchError::Silent { dir: dir.path().to_owned(), waited: deadline };
            Err(exit_instead(dir, silent).await)
        }
        Err(source) => Err(LaunchError::Judge { dir: dir.path().to_owned(), source }),
    }
}

async fn connect_patiently(dir: &ProcessDir, deadline: Duration) -> Result<Monitor, MonitorError> {
    let path = dir.qmp_socket();
    loop {
        match Monitor::connect(&path, deadline).await {
            // The shim has not opened it yet.
            Err(MonitorError::Connect { .. }) => sleep(CONNECT_RETRY).await,
            connected => return connected,
        }
    }
}

/// Resolves once the process has ended, or the shim without it.
async fn early_end(
    dir: &ProcessDir,
    shim_end: oneshot::Receiver<io::Result<ExitStatus>>,
) -> LaunchError {
    let shim = ShimClient::new(dir);
    let recorded = async {
        loop {
            match shim.wait().await {
                Ok(record) => return LaunchError::Exited { record: Box::new(record) },
                Err(ShimError::Connect { .. }) => sleep(CONNECT_RETRY).await,
                // Its end, if it is that, is told by the other branch.
                Err(_) => return std::future::pending().await,
            }
        }
    };
    let ended = async {
        let status = match shim_end.await {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "nobody waited for it".to_owned(),
        };
        let said = std::fs::read_to_string(dir.shim_log()).unwrap_or_default();
        let said = said.lines().last().unwrap_or("nothing in its log").to_owned();
        LaunchError::ShimEnded { dir: dir.path().to_owned(), status, said }
    };
    tokio::select! {
        error = recorded => error,
        error = ended => error,
    }
}

/// Exchanges `error` for the recorded exit, if there is or soon will be one.
async fn exit_instead(dir: &ProcessDir, error: LaunchError) -> LaunchError {
    match &error {
        LaunchError::Exited { .. } => return error,
        // A monitor breaks a moment before its process has ended.
        LaunchError::Monitor(_) => {
            let recorded = timeout(EXIT_DEADLINE, ShimClient::new(dir).wait()).await;
            if let Ok(Ok(record)) = recorded {
                return LaunchError::Exited { record: Box::new(record) };
            }
        }
        LaunchError::EmptyArgv { .. }
        | LaunchError::UsedBefore { .. }
        | LaunchError::Record(_)
        | LaunchError::Spawn { .. }
        | LaunchError::ShimEnded { .. }
        | LaunchError::Silent { .. }
        | LaunchError::Judge { .. } => {}
    }
    let Ok(Judgement::Gone(proof)) = judge(dir) else {
        return error;
    };
    let proof = super::adopt::settle(dir, proof).await;
    match proof.exit_record() {
        // The shim's own word says more than that nothing was started.
        Some(record) if record.exit != Exit::NeverStarted => {
            LaunchError::Exited { record: Box::new(record.clone()) }
        }
        Some(_) | None => error,
    }
}

fn launch_record(dir: &ProcessDir, argv: &[String]) -> LaunchRecord {
    let mut argv = argv.to_vec();
    argv.extend(["-pidfile".to_owned(), dir.pid_file().to_string_lossy().into_owned()]);
    let monitors = vec![
        MonitorRecord { id: MONITOR_ID.to_owned(), socket: dir.qmp_socket() },
        MonitorRecord { id: "vmferry-oob".to_owned(), socket: dir.oob_socket() },
    ];
    LaunchRecord { argv, monitors }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_names_tell_directories_apart() {
        let name = unit_name(&ProcessDir::new("/run/vmferry/vm/0192.x"));
        assert_eq!(name, "vmferry-vm-run-vmferry-vm-0192-x");
    }
}
