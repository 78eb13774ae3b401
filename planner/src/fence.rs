//! The command that powers a host off from outside: a switched power strip, an out-of-band
//! controller.
//!
//! No shell is involved, and only an exit with 0 within the time proves anything. A command that
//! fails, or that does not end, proves nothing: the host may run on (rule R1).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use vmferry_types::HostId;

/// Stands for the host's id in an argument.
const HOST: &str = "{host}";
/// As much of what the command prints is kept, the last of it.
const TAIL: usize = 4096;

/// The configured command, valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    program: PathBuf,
    arguments: Vec<String>,
    timeout: Duration,
}

/// The table `[fence]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawFence {
    command: Vec<String>,
    #[serde(default = "default_timeout")]
    timeout: String,
}

/// Controllers that switch a machine off answer within seconds, or after a retry or two.
fn default_timeout() -> String {
    "60s".to_owned()
}

/// What became of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// It says that the host is off.
    Succeeded {
        /// The last of what it printed.
        output: String,
    },
    /// It proves nothing.
    Failed {
        /// How it ended.
        how: String,
        /// The last of what it printed.
        output: String,
    },
}

impl Fence {
    /// Reads the table.
    ///
    /// # Errors
    ///
    /// Names the field that cannot be used, and what is wrong with it.
    pub(crate) fn read(raw: RawFence) -> Result<Self, (&'static str, String)> {
        let RawFence { command, timeout } = raw;
        let Some((program, arguments)) = command.split_first() else {
            return Err((
                "fence.command",
                "is empty; write [\"/path/to/command\", \"{host}\"]".to_owned(),
            ));
        };
        if !Path::new(program).is_absolute() {
            return Err((
                "fence.command",
                format!("`{program}` is not an absolute path; no shell looks for it"),
            ));
        }
        if !arguments.iter().any(|argument| argument.contains(HOST)) {
            return Err((
                "fence.command",
                format!(
                    "no argument contains {HOST}: the command would not know which host to power off"
                ),
            ));
        }
        let timeout = humantime::parse_duration(&timeout).map_err(|error| {
            ("fence.timeout", format!("`{timeout}`: {error}; write for example \"60s\""))
        })?;
        if timeout.is_zero() {
            return Err(("fence.timeout", "must be longer than nothing".to_owned()));
        }
        Ok(Self { program: PathBuf::from(program), arguments: arguments.to_vec(), timeout })
    }

    /// Returns how long the command may take.
    #[must_use]
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }

    fn arguments(&self, host: &HostId) -> Vec<OsString> {
        let with_host = |argument: &String| argument.replace(HOST, host.as_str()).into();
        self.arguments.iter().map(with_host).collect()
    }

    /// Runs the command for a host, to its end or until its time is over.
    pub async fn run(&self, host: &HostId) -> Fenced {
        let mut command = Command::new(&self.program);
        command
            .args(self.arguments(host))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let failed = |how: String, output: String| Fenced::Failed { how, output };
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                let how = format!("{} could not be started: {error}", self.program.display());
                return failed(how, String::new());
            }
        };
        let mut group = Group::of(&child);
        let (mut out, mut err) = (Tail::default(), Tail::default());
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let ended = {
            let reading = async { tokio::join!(out.follow(stdout), err.follow(stderr)) };
            let ending = async {
                // Something that it left behind may hold its output open: its own end counts.
                tokio::pin!(reading);
                tokio::select! {
                    status = child.wait() => {
                        let _rest = tokio::time::timeout(Duration::from_millis(200), &mut reading).await;
                        status
                    }
                    _ = &mut reading => child.wait().await,
                }
            };
            tokio::time::timeout(self.timeout, ending).await
        };
        let output = [out.text(), err.text()].join("\n").trim().to_owned();
        if ended.is_ok() {
            group.leave();
        }
        match ended {
            Ok(Ok(status)) if status.success() => Fenced::Succeeded { output },
            Ok(Ok(status)) => failed(format!("it ended with {status}"), output),
            Ok(Err(error)) => failed(format!("its end could not be read: {error}"), output),
            Err(_) => {
                group.kill();
                if let Err(error) = child.kill().await {
                    tracing::warn!(%error, "the fence command could not be ended");
                }
                let limit = humantime::format_duration(self.timeout);
                failed(format!("it did not end within {limit}"), output)
            }
        }
    }
}

/// The command with all that it started: what one that is given up left running would go on
/// switching power, perhaps while somebody tries again.
#[derive(Debug)]
struct Group(Option<Pid>);

impl Group {
    /// The group that the command leads. Its number is its own as long as the command is not waited
    /// for to its end.
    fn of(child: &Child) -> Self {
        let leader = child.id().and_then(|id| i32::try_from(id).ok());
        Self(leader.filter(|id| *id > 1).map(Pid::from_raw))
    }

    /// It has ended by itself; what it left behind is meant to stay.
    fn leave(&mut self) {
        self.0 = None;
    }

    fn kill(&mut self) {
        let Some(group) = self.0.take() else { return };
        if let Err(error) = killpg(group, Signal::SIGKILL) {
            tracing::warn!(%error, "what the fence command started could not be ended");
        }
    }
}

impl Drop for Group {
    /// Whoever ran the command was dropped in the middle of it.
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last of what was printed.
#[derive(Debug, Default)]
struct Tail(Vec<u8>);

impl Tail {
    async fn follow(&mut self, stream: Option<impl AsyncRead + Unpin>) {
        let Some(mut stream) = stream else { return };
        let mut buffer = [0_u8; 1024];
        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
            self.0.extend_from_slice(&buffer[..read]);
            let over = self.0.len().saturating_sub(TAIL);
            self.0.drain(..over);
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0).trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(command: &[&str], timeout: &str) -> Result<Fence, (&'static str, String)> {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        Fence::read(RawFence { command, timeout: timeout.to_owned() })
    }

    fn host() -> HostId {
        "a".parse().unwrap()
    }

    async fn run(script: &str, timeout: &str) -> Fenced {
        fence(&["/bin/sh", "-c", script, "{host}"], timeout).unwrap().run(&host()).await
    }

    #[tokio::test]
    async fn a_command_that_ends_well_proves_it_and_leaves_what_it_said() {
        let Fenced::Succeeded { output } = run("echo off: $0", "10s").await else { panic!() };
        assert_eq!(output, "off: a");
    }

    #[tokio::test]
    async fn a_command_that_fails_or_hangs_proves_nothing() {
        let Fenced::Failed { how, output } = run("echo no power >&2; exit 3", "10s").await else {
            panic!()
        };
        assert!(how.contains("exit status: 3"), "{how}");
        assert_eq!(output, "no power");
        let Fenced::Failed { how, output } = run("echo busy; sleep 60", "100ms").await else {
            panic!()
        };
        assert!(how.contains("did not end within 100ms"), "{how}");
        assert_eq!(output, "busy");
        let missing = fence(&["/nonexistent/fence", "{host}"], "1s").unwrap();
        let Fenced::Failed { how, .. } = missing.run(&host()).await else { panic!() };
        assert!(how.contains("could not be started"), "{how}");
    }

    /// Says whether a process is there and has not ended.
    fn runs(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
            !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
        })
    }

    #[tokio::test]
    async fn what_a_command_that_is_given_up_started_ends_with_it() {
        let script = "sleep 600 & echo $!; wait";
        let Fenced::Failed { output, .. } = run(script, "300ms").await else { panic!() };
        let ends = async {
            while runs(&output) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(!output.is_empty());
        assert!(tokio::time::timeout(Duration::from_secs(10), ends).await.is_ok(), "{output}");
    }

    #[tokio::test]
    async fn only_the_last_of_a_long_output_is_kept() {
        let script = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done";
        let Fenced::Succeeded { output } = run(script, "10s").await else { panic!() };
        assert!(output.len() <= TAIL && output.ends_with("line 1999"), "{}", output.len());
    }

    #[test]
    fn a_command_that_cannot_work_is_refused_when_it_is_read() {
        for (command, timeout, field) in [
            (&[][..], "1s", "fence.command"),
            (&["ipmi", "{host}"][..], "1s", "fence.command"),
            (&["/bin/true"][..], "1s", "fence.command"),
            (&["/bin/true", "{host}"][..], "soon", "fence.timeout"),
            (&["/bin/true", "{host}"][..], "0s", "fence.timeout"),
        ] {
            assert_eq!(fence(command, timeout).unwrap_err().0, field, "{command:?}");
        }
    }
}
