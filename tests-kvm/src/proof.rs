//! What must be true of the machines themselves, whatever the planner says.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
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

/// Returns where a process listens for TCP.
///
/// # Errors
///
/// Fails if the process is gone.
pub fn listening_sockets(pid: i32) -> Result<Vec<SocketAddr>> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
        .with_context(|| format!("list the descriptors of {pid}"))?;
    let own: BTreeSet<String> = descriptors
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter_map(|link| {
            let text = link.to_str()?.strip_prefix("socket:[")?;
            Some(text.strip_suffix(']')?.to_owned())
        })
        .collect();
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let path = format!("/proc/{pid}/net/{table}");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        found.extend(listening(&text, &own));
    }
    Ok(found)
}

/// Reads the listening sockets with these inodes out of the text of `/proc/net/tcp`.
fn listening(text: &str, inodes: &BTreeSet<String>) -> Vec<SocketAddr> {
    const LISTENING: &str = "0A";
    let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|fields| fields.get(3) == Some(&LISTENING))
        .filter(|fields| fields.get(9).is_some_and(|inode| inodes.contains(*inode)))
        .filter_map(|fields| socket(fields.get(1)?))
        .collect()
}

/// Reads an address as the kernel prints it: words in the machine's order, then the port.
fn socket(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| {
        let word = u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    let ip = if address.len() == 8 {
        IpAddr::from(word(0)?)
    } else {
        let octets: Vec<u8> = [word(0)?, word(1)?, word(2)?, word(3)?].concat();
        IpAddr::from(<[u8; 16]>::try_from(octets).ok()?)
    };
    Some(SocketAddr::new(ip, port))
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

/// Returns what the daemons of a case logged at a level, each line with the name of its log.
///
/// # Errors
///
/// Fails if a log cannot be read.
pub fn logged(dir: &Path, level: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir.join("log")).context("read the logs")?.flatten() {
        let text = fs::read_to_string(entry.path()).context("read a log")?;
        let name = entry.file_name().display().to_string();
        let lines = text.lines().filter(|line| is_at(line, level));
        found.extend(lines.map(|line| format!("{name}: {line}")));
    }
    Ok(found)
}

/// Says whether a line of a log is at a level: the planner logs words, the agents JSON.
fn is_at(line: &str, level: &str) -> bool {
    line.split_whitespace().nth(1) == Some(level)
        || line.contains(&format!("\"level\":\"{level}\""))
}

fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&line).replace('\0', " ");
    text.chars().take(120).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_of_a_line_is_read() {
        assert!(is_at("2026-11-30T17:01:04Z ERROR vmferry_planner: no", "ERROR"));
        assert!(is_at(r#"{"timestamp":"2026","level":"ERROR","message":"no"}"#, "ERROR"));
        assert!(!is_at("2026-11-30T17:01:04Z  WARN vmferry_planner: ERROR", "ERROR"));
    }

    #[test]
    fn listening_sockets_are_those_of_one_process() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
                    0: 01004D0A:C000 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1\n\
                    1: 0100007F:C001 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 78 1\n\
                    2: 01004D0A:C002 02004D0A:0001 01 00000000:00000000 00:00000000 00000000 0 0 77 1\n";
        let own = BTreeSet::from(["77".to_owned()]);
        assert_eq!(listening(text, &own), ["10.77.0.1:49152".parse().unwrap()]);
        let any = socket("00000000000000000000000000000000:0016").unwrap();
        assert_eq!(any, "[::]:22".parse().unwrap());
    }
}
