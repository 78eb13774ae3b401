//! What runs on this host, whoever started it.
//!
//! A journal can be lost. Before anything is destroyed or started the agent
//! looks for what is there: QEMU processes with the UUID of their VM, and
//! shims with their directory. Only processes in our own network namespace
//! count, so that several hosts can be tried on one machine.

use std::fs;
use std::io;
use std::path::PathBuf;

use uuid::Uuid;

use super::identity::{IdentityError, Presence, ProcessIdentity, vanished};
use super::record::PID_FILE;

/// The name of the agent's monitor, by which our QEMUs are told from others.
pub(super) const MONITOR_ID: &str = "vmferry-qmp";

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// QEMU processes.
    pub qemus: Vec<QemuFound>,
    /// Shims.
    pub shims: Vec<ShimFound>,
    /// Processes that would not show what they are. While there are any, an
    /// empty finding proves nothing.
    pub unreadable: Vec<u32>,
}

/// A QEMU process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuFound {
    /// Who it is.
    pub identity: ProcessIdentity,
    /// From `-uuid`. `None` if it has none, or one that is not a UUID.
    pub uuid: Option<Uuid>,
    /// From `-name`.
    pub name: Option<String>,
    /// Its directory, if vmferry started it.
    pub dir: Option<PathBuf>,
}

/// A shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimFound {
    /// Who it is.
    pub identity: ProcessIdentity,
    /// The directory it serves.
    pub dir: PathBuf,
}

/// `/proc` could not be searched.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// `/proc` itself could not be listed.
    #[error("list /proc")]
    List(#[source] io::Error),
    /// Our own network namespace could not be read.
    #[error("read our own network namespace")]
    OwnNamespace(#[source] io::Error),
    /// A process could not be identified.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Searches `/proc` for QEMU processes and shims in our network namespace.
///
/// Blocks; it reads a few files per process.
///
/// # Errors
///
/// See [`ScanError`]. A single process that cannot be read is no error: it is
/// listed as [`Scan::unreadable`].
pub fn scan() -> Result<Scan, ScanError> {
    let own = fs::read_link("/proc/self/ns/net").map_err(ScanError::OwnNamespace)?;
    let mut found = Scan::default();
    for entry in fs::read_dir("/proc").map_err(ScanError::List)? {
        let entry = entry.map_err(ScanError::List)?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let argv = match fs::read(entry.path().join("cmdline")) {
            Ok(cmdline) => split_cmdline(&cmdline),
            Err(error) if vanished(&error) => continue,
            Err(_) => {
                found.unreadable.push(pid);
                continue;
            }
        };
        let Some(kind) = classify(&argv) else {
            if half_ended_qemu(pid)? {
                found.unreadable.push(pid);
            }
            continue;
        };
        match fs::read_link(entry.path().join("ns/net")) {
            Ok(namespace) if namespace == own => {}
            Ok(_) => continue,
            Err(error) if vanished(&error) => continue,
            Err(_) => {
                found.unreadable.push(pid);
                continue;
            }
        }
        let Some(identity) = ProcessIdentity::read(pid)? else { continue };
        match kind {
            Kind::Qemu { uuid, name, dir } => {
                found.qemus.push(QemuFound { identity, uuid, name, dir });
            }
            Kind::Shim { dir } => found.shims.push(ShimFound { identity, dir }),
        }
    }
    Ok(found)
}

/// Tells whether `pid` was a QEMU that has lost its arguments already, while
/// a thread of it still hangs in the kernel and may yet write to a disk.
fn half_ended_qemu(pid: u32) -> Result<bool, ScanError> {
    let comm = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let cmdline = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if !comm.starts_with(b"qemu-system") || !cmdline.is_empty() {
        return Ok(false);
    }
    let Some(identity) = ProcessIdentity::read(pid)? else { return Ok(false) };
    Ok(identity.presence()? == Presence::Present)
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Qemu { uuid: Option<Uuid>, name: Option<String>, dir: Option<PathBuf> },
    Shim { dir: PathBuf },
}

fn split_cmdline(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    bytes.split(|&byte| byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
}

fn classify(argv: &[String]) -> Option<Kind> {
    let program = argv.first()?.rsplit('/').next()?;
    if program.starts_with("qemu-system-") || program == "qemu-kvm" || program == "kvm" {
        return Some(Kind::Qemu {
            uuid: option(argv, "uuid").and_then(|value| value.parse().ok()),
            name: option(argv, "name").map(guest_name),
            dir: own_dir(argv),
        });
    }
    if program == "vmferry-agent" && argv.get(1).map(String::as_str) == Some("shim") {
        return option(argv, "dir").map(|dir| Kind::Shim { dir: dir.into() });
    }
    None
}

/// Returns the value of the last `-key`, since QEMU lets the last one count.
fn option<'a>(argv: &'a [String], key: &str) -> Option<&'a str> {
    let named = |arg: &str| arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) == Some(key);
    let at = argv.iter().rposition(|arg| named(arg))?;
    argv.get(at + 1).map(String::as_str)
}

fn guest_name(value: &str) -> String {
    let first = value.split(',').next().unwrap_or_default();
    first.strip_prefix("guest=").unwrap_or(first).to_owned()
}

/// Returns the directory of a QEMU that has one of our monitors.
fn own_dir(argv: &[String]) -> Option<PathBuf> {
    let monitor = format!("socket,id={MONITOR_ID},");
    if !argv.iter().any(|arg| arg.starts_with(&monitor)) {
        return None;
    }
    let path = PathBuf::from(option(argv, "pidfile")?);
    let ours = path.file_name().is_some_and(|name| name == PID_FILE);
    path.parent().filter(|_| ours).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_qemu_is_known_by_its_arguments() {
        let line = "/usr/bin/qemu-system-x86_64 -name guest=web,debug-threads=on --uuid \
                    01928f3e-0000-7000-8000-000000000001 -chardev \
                    socket,id=vmferry-qmp,fd=5,server=on,wait=off -pidfile /run/v,m/qemu.pid";
        let found = classify(&argv(line)).unwrap();
        let expected = Kind::Qemu {
            uuid: Some("01928f3e-0000-7000-8000-000000000001".parse().unwrap()),
            name: Some("web".to_owned()),
            dir: Some("/run/v,m".into()),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_shim_is_known_by_its_directory() {
        let found = classify(&argv("/usr/bin/vmferry-agent shim --dir /run/vm/1"));
        assert_eq!(found, Some(Kind::Shim { dir: "/run/vm/1".into() }));
        assert_eq!(classify(&argv("vmferry-agent --config x")), None);
    }

    #[test]
    fn the_command_line_of_a_kernel_thread_is_nobody() {
        assert_eq!(classify(&split_cmdline(b"")), None);
    }
}
