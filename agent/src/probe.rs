//! What this host's QEMU can do, asked once at the start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

/// How long QEMU may take to answer; it takes a fifth of a second.
const DEADLINE: Duration = Duration::from_secs(20);

/// What QEMU can do.
#[derive(Clone, Debug, Default)]
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

async fn ask(path: &Path) -> Result<Probe, ProbeError> {
    let talk = |source| ProbeError::Talk { path: path.to_owned(), source };
    let mut child = tokio::process::Command::new(path)
        .args([
            "-machine",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-qmp",
            "stdio",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| ProbeError::Start { path: path.to_owned(), source })?;
    let ended = || ProbeError::Ended { path: path.to_owned() };
    let mut input = child.stdin.take().ok_or_else(ended)?;
    let mut lines = BufReader::new(child.stdout.take().ok_or_else(ended)?).lines();
    let mut answers = Vec::new();
    const COMMANDS: [&str; 5] = [
        "qmp_capabilities",
        "query-version",
        "query-machines",
        "query-cpu-definitions",
        "query-migrate-capabilities",
    ];
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
    async fn what_is_no_qemu_is_an_error() {
        assert!(matches!(
            Probe::run(Path::new("/bin/true")).await,
            Err(ProbeError::Ended { .. } | ProbeError::Talk { .. })
        ));
        assert!(matches!(Probe::run(Path::new("/nowhere")).await, Err(ProbeError::Start { .. })));
    }
}
