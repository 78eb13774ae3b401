//! What must be true of the machines themselves, whatever the planner says.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::lab::{Lab, is_zombie};
use crate::wait::{Holds, Level, wait_for};

/// How long a process, a tap or a port may outlive its use: PID 1 may be slow to reap.
const LEAK_BOUND: Duration = Duration::from_secs(5);

/// A QEMU process of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuProcess {
    /// Its process id.
    pub pid: i32,
    /// The host in whose namespace it is.
    pub host: String,
    /// The VM that it is for.
    pub uuid: String,
}

/// Returns every QEMU process of a VM on the hosts, as the kernel sees them.
///
/// # Errors
///
/// Fails if a namespace is gone.
pub fn qemu_processes<'h>(
    lab: &Lab,
    hosts: impl IntoIterator<Item = &'h str>,
) -> Result<Vec<QemuProcess>> {
    let mut found = Vec::new();
    for host in hosts {
        for pid in lab.processes(host)? {
            if let Some(uuid) = uuid_of(pid)
                && !is_zombie(pid)
            {
                found.push(QemuProcess { pid, host: host.to_owned(), uuid });
            }
        }
    }
    Ok(found)
}

/// Returns the UUID in the command line of a process, if that is QEMU's.
fn uuid_of(pid: i32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let arguments: Vec<&str> =
        line.split(|byte| *byte == 0).filter_map(|a| std::str::from_utf8(a).ok()).collect();
    let program = arguments.first()?.rsplit('/').next()?;
    if !program.starts_with("qemu-system") {
        return None;
    }
    let at = arguments.iter().position(|argument| *argument == "-uuid")?;
    arguments.get(at + 1).map(|uuid| (*uuid).to_owned())
}

/// Waits until exactly these VMs have exactly one QEMU process each, where they should.
///
/// # Errors
///
/// Fails with what runs instead.
pub async fn expect_processes(
    lab: &Lab,
    hosts: &[&str],
    expected: &[(String, String)],
) -> Result<()> {
    let expected: BTreeSet<_> = expected.iter().cloned().collect();
    wait_for("one QEMU process for each VM and no other", LEAK_BOUND, || async {
        let found = qemu_processes(lab, hosts.iter().copied())?;
        let places: BTreeSet<_> = found.iter().map(|q| (q.uuid.clone(), q.host.clone())).collect();
        let holds = places == expected && found.len() == expected.len();
        Ok(Level::from_condition(Holds::from(holds), || {
            format!("{found:?}, expected {expected:?}")
        }))
    })
    .await
}

/// Waits until nothing is left of a case on a host: processes, taps, listening ports.
///
/// # Errors
///
/// Fails with what was left.
pub async fn expect_nothing_left(lab: &Lab, part: &str) -> Result<()> {
    wait_for(format_args!("nothing to be left in {part}"), LEAK_BOUND, || async {
        let processes: Vec<_> =
            lab.processes(part)?.into_iter().filter(|pid| !is_zombie(*pid)).collect();
        let named: Vec<_> =
            processes.iter().map(|pid| format!("{pid} {}", command_line(*pid))).collect();
        let links = lab.extra_links(part)?;
        let ports = lab.listening_ports(part)?;
        let clean = named.is_empty() && links.is_empty() && ports.is_empty();
        Ok(Level::from_condition(Holds::from(clean), || {
            format!("processes {named:?}, interfaces {links:?}, ports {ports:?}")
        }))
    })
    .await
}

/// Fails if a directory of sockets and other state of running VMs still names one of them.
///
/// # Errors
///
/// Fails with the path that was left.
pub fn expect_no_trace(run_dir: &Path, names: &[String]) -> Result<()> {
    for entry in fs::read_dir(run_dir).into_iter().flatten() {
        let entry = entry.with_context(|| format!("read {}", run_dir.display()))?;
        let path = entry.path();
        let text = path.display().to_string();
        if names.iter().any(|name| text.contains(name.as_str())) {
            bail!("{text} was left");
        }
        if path.is_dir() {
            expect_no_trace(&path, names)?;
        }
    }
    Ok(())
}

/// Fails if a daemon panicked.
///
/// # Errors
///
/// Fails with the panic's line.
pub fn expect_no_panic(log: &Path) -> Result<()> {
    let text = fs::read_to_string(log).unwrap_or_default();
    match text.lines().find(|line| line.contains("panicked at")) {
        Some(line) => bail!("{}: {line}", log.display()),
        None => Ok(()),
    }
}

fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&line).replace('\0', " ");
    text.chars().take(120).collect()
}
