//! What this host's QEMU can do, asked once at the start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Child;

/// How long QEMU may take to answer; it takes a fifth of a second.
const DEADLINE: Duration = Duration::from_secs(20);

/// What QEMU can do.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Probe {
    pub(crate) qemu_version: String,
    pub(crate) accelerators: Vec<String>,
    /// Versioned machine types.
    pub(crate) machines: BTreeSet<String>,
    /// From an alias such as `q35` to its versioned type.
    pub(crate) aliases: BTreeMap<String, String>,
    pub(crate) cpu_models: BTreeSet<String>,
    pub(crate) migration_capabilities: BTreeSet<String>,
}

/// QEMU did not say what it can do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    #[error("start {path}", path = path.display())]
    Start { path: PathBuf, source: std::io::Error },
    #[error("talk to {path}", path = path.display())]
    Talk { path: PathBuf, source: std::io::Error },
    #[error("{path} ended before it had answered", path = path.display())]
    Ended { path: PathBuf },
    #[error("understand the answer of {path} to {command}", path = path.display())]
    Answer { path: PathBuf, command: &'static str, source: serde_json::Error },
    #[error("{path} did not answer in time", path = path.display())]
    Silent { path: PathBuf },
}

/// An answer, and of which file it is.
#[derive(Serialize, Deserialize)]
struct Kept {
    stamp: (PathBuf, u64, i64, u64),
    probe: Probe,
}

/// Tells one QEMU binary from another: its path, length, time and inode.
fn stamp(path: &Path) -> Option<(PathBuf, u64, i64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let path = std::fs::canonicalize(path).ok()?;
    let file = std::fs::metadata(&path).ok()?;
    let (len, time, inode) = (file.len(), file.mtime(), file.ino());
    Some((path, len, time, inode))
}

#[derive(Deserialize)]
struct Version {
    qemu: Numbers,
}

#[derive(Deserialize)]
struct Numbers {
    major: u64,
    minor: u64,
    micro: u64,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    alias: Option<String>,
}

#[derive(Deserialize)]
struct Capability {
    capability: String,
}

impl Probe {
    /// Returns what the QEMU at `path` can do, from `cache` if it is still the same file: an agent
    /// that comes back must not keep a guest waiting for this.
    pub(crate) async fn cached(path: &Path, cache: &Path) -> Result<Self, ProbeError> {
        let Some(stamp) = stamp(path) else { return Self::run(path).await };
        let kept = std::fs::read(cache).ok();
        let kept: Option<Kept> = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(kept) = kept.filter(|kept| kept.stamp == stamp) {
            // Devices come and go without the file.
            return Ok(Self { accelerators: accelerators(), ..kept.probe });
        }
        let probe = Self::run(path).await?;
        let kept = Kept { stamp, probe: probe.clone() };
        let written = serde_json::to_vec(&kept)
            .map_err(std::io::Error::from)
            .and_then(|bytes| std::fs::write(cache, bytes));
        if let Err(error) = written {
            tracing::warn!(%error, "what QEMU can do will be asked again at the next start");
        }
        Ok(probe)
    }

    /// Asks the QEMU at `path`.
    pub(crate) async fn run(path: &Path) -> Result<Self, ProbeError> {
        tokio::time::timeout(DEADLINE, ask(path))
            .await
            .map_err(|_| ProbeError::Silent { path: path.to_owned() })?
    }

    /// Returns the versioned machine type that a name stands for.
    pub(crate) fn resolve_machine(&self, machine: &str) -> String {
        self.aliases.get(machine).map_or(machine, String::as_str).to_owned()
    }
}

/// What QEMU is asked for, in this order.
const COMMANDS: [&str; 5] = [
    "qmp_capabilities",
    "query-version",
    "query-machines",
    "query-cpu-definitions",
    "query-migrate-capabilities",
];

/// Starts a QEMU without a machine.
fn start(path: &Path) -> Result<Child, ProbeError> {
    const ARGUMENTS: [&str; 8] =
        ["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-qmp", "stdio"];
    tokio::process::Command::new(path)
        .args(ARGUMENTS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| ProbeError::Start { path: path.to_owned(), source })
}

async fn ask(path: &Path) -> Result<Probe, ProbeError> {
    let talk = |source| ProbeError::Talk { path: path.to_owned(), source };
    let mut child = start(path)?;
    let ended = || ProbeError::Ended { path: path.to_owned() };
    let mut input = child.stdin.take().ok_or_else(ended)?;
    let mut lines = BufReader::new(child.stdout.take().ok_or_else(ended)?).lines();
    let mut answers = Vec::with_capacity(COMMANDS.len());
    for command in COMMANDS {
        let line = format!("{}\n", json!({ "execute": command }));
        input.write_all(line.as_bytes()).await.map_err(talk)?;
        answers.push(loop {
            let line = lines.next_line().await.map_err(talk)?.ok_or_else(ended)?;
            let mut message: Value = serde_json::from_str(&line)
                .map_err(|source| ProbeError::Answer { path: path.to_owned(), command, source })?;
            // The greeting and events come in between.
            if let Some(answer) = message.get_mut("return") {
                break answer.take();
            }
            if message.get("error").is_some() {
                break Value::Null;
            }
        });
    }
    child.kill().await.map_err(talk)?;
    read(path, answers)
}

/// Reads what was answered to [`COMMANDS`].
fn read(path: &Path, answers: Vec<Value>) -> Result<Probe, ProbeError> {
    let mut answers = answers.into_iter().skip(1);
    let mut next = || answers.next().unwrap_or(Value::Null);
    let understand =
        |command| move |source| ProbeError::Answer { path: path.to_owned(), command, source };
    let version: Version = serde_json::from_value(next()).map_err(understand("query-version"))?;
    let machines: Vec<Named> =
        serde_json::from_value(next()).map_err(understand("query-machines"))?;
    // A QEMU of another architecture may not have this command.
    let cpus: Vec<Named> = serde_json::from_value(next()).unwrap_or_default();
    let capabilities: Vec<Capability> =
        serde_json::from_value(next()).map_err(understand("query-migrate-capabilities"))?;
    let Numbers { major, minor, micro } = version.qemu;
    Ok(Probe {
        qemu_version: format!("{major}.{minor}.{micro}"),
        accelerators: accelerators(),
        aliases: machines
            .iter()
            .filter_map(|machine| Some((machine.alias.clone()?, machine.name.clone())))
            .collect(),
        machines: machines.into_iter().map(|machine| machine.name).collect(),
        cpu_models: cpus.into_iter().map(|cpu| cpu.name).collect(),
        migration_capabilities: capabilities.into_iter().map(|found| found.capability).collect(),
    })
}

/// KVM counts only if its device can be opened for use.
fn accelerators() -> Vec<String> {
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    kvm.then(|| "kvm".to_owned()).into_iter().chain(["tcg".to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn qemu_says_what_it_can_do() {
        let probe = Probe::run(Path::new("/usr/bin/qemu-system-x86_64")).await.unwrap();
        assert!(probe.resolve_machine("q35").starts_with("pc-q35-"));
        assert!(probe.cpu_models.contains("qemu64"));
        assert!(probe.migration_capabilities.contains("return-path"));
    }

    #[tokio::test]
    async fn an_answer_is_kept_for_the_same_binary_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (qemu, cache) =
            (Path::new("/usr/bin/qemu-system-x86_64"), dir.path().join("probe.json"));
        let first = Probe::cached(qemu, &cache).await.unwrap();
        let mut kept: Kept = serde_json::from_slice(&std::fs::read(&cache).unwrap()).unwrap();
        kept.probe.qemu_version = "kept".to_owned();
        std::fs::write(&cache, serde_json::to_vec(&kept).unwrap()).unwrap();
        assert_eq!(Probe::cached(qemu, &cache).await.unwrap().qemu_version, "kept");
        kept.stamp.1 += 1;
        std::fs::write(&cache, serde_json::to_vec(&kept).unwrap()).unwrap();
        assert_eq!(Probe::cached(qemu, &cache).await.unwrap().qemu_version, first.qemu_version);
    }

    #[tokio::test]
    async fn what_is_no_qemu_is_an_error() {
        assert!(matches!(
            Probe::run(Path::new("/bin/true")).await,
            Err(ProbeError::Ended { .. } | ProbeError::Talk { .. })
        ));
        assert!(matches!(Probe::run(Path::new("/nowhere")).await, Err(ProbeError::Start { .. })));
    }
}
