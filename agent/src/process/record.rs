//! The directory of one QEMU process, and what is written down in it.
//!
//! | file | written by | says |
//! |---|---|---|
//! | `launch.json` | the agent, once | what to start |
//! | `process.json` | the process itself, before exec | who it is |
//! | `exit.json` | the shim, once | that it ended, and how |
//! | `guest.json` | the shim | when the guest last stopped, went on, or ended by itself |
//! | `qemu.log` | QEMU | its stdout and stderr, bounded |
//! | `qmp.sock`, `oob.sock` | the shim, for QEMU | the agent's and the shim's monitor |
//! | `qemu.pid` | QEMU | nothing new; its path tells a scan the directory |
//! | `shim.sock` | the shim | its own service |
//! | `shim.lock` | the shim | held while it lives; nothing starts without it |
//! | `shim.log` | the shim | the few things it has to tell |
//!
//! A directory serves one process and is never used for another: the files
//! are the proof of what became of it. Records are replaced whole and synced
//! to the disk before anybody relies on them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::guest::GuestRecord;
use super::identity::ProcessIdentity;

/// The name of QEMU's own pid file.
pub(crate) const PID_FILE: &str = "qemu.pid";

/// The longest path a Unix socket may have, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The directory of one QEMU process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessDir(PathBuf);

/// What to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// The monitors it gets on top.
    #[serde(default)]
    pub monitors: Vec<MonitorRecord>,
}

/// A monitor that a shim opens for its QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonitorRecord {
    /// The name of its character device.
    pub id: String,
    /// Where it listens.
    pub socket: PathBuf,
}

/// That a process ended, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Who it was. `None` if it never came to be.
    pub identity: Option<ProcessIdentity>,
    /// How it ended.
    pub exit: Exit,
    /// When this was written, in milliseconds since 1970.
    pub at_ms: u64,
    /// The last it said on stderr.
    pub stderr_tail: String,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Exit {
    /// It returned.
    Code {
        /// Its exit code.
        code: i32,
    },
    /// A signal ended it.
    Signal {
        /// Which one.
        signal: i32,
    },
    /// It could not be started.
    ExecFailed {
        /// The operating system's text.
        error: String,
    },
    /// It was never started, and now never will be.
    NeverStarted,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code { code } => write!(f, "exited with code {code}"),
            Self::Signal { signal } => write!(f, "was ended by signal {signal}"),
            Self::ExecFailed { error } => write!(f, "could not be started: {error}"),
            Self::NeverStarted => f.write_str("was never started"),
        }
    }
}

/// A record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Reading failed.
    #[error("read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What was read makes no sense.
    #[error("understand {path}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: serde_json::Error,
    },
    /// Writing failed.
    #[error("write {path}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The path leaves no room for the sockets' names.
    #[error("the directory {path} is too long a path for a socket", path = path.display())]
    PathTooLong {
        /// The directory.
        path: PathBuf,
    },
}

impl ProcessDir {
    /// Names a directory; nothing is created.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Creates the directory, for its owner alone.
    ///
    /// # Errors
    ///
    /// If it cannot be created, or is too deep for a socket in it.
    pub fn create(&self) -> Result<(), RecordError> {
        if self.qmp_socket().as_os_str().as_bytes().len() > SOCKET_PATH_BYTES_MAX {
            return Err(RecordError::PathTooLong { path: self.0.clone() });
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.0)
            .map_err(|source| RecordError::Write { path: self.0.clone(), source })
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// QEMU's own pid file.
    pub(crate) fn pid_file(&self) -> PathBuf {
        self.0.join(PID_FILE)
    }

    /// The agent's monitor.
    #[must_use]
    pub fn qmp_socket(&self) -> PathBuf {
        self.0.join("qmp.sock")
    }

    /// The second monitor, kept for out-of-band commands.
    #[must_use]
    pub fn oob_socket(&self) -> PathBuf {
        self.0.join("oob.sock")
    }

    /// The shim's service.
    #[must_use]
    pub fn shim_socket(&self) -> PathBuf {
        self.0.join("shim.sock")
    }

    /// QEMU's stdout and stderr.
    #[must_use]
    pub fn qemu_log(&self) -> PathBuf {
        self.0.join("qemu.log")
    }

    pub(crate) fn shim_log(&self) -> PathBuf {
        self.0.join("shim.log")
    }

    fn launch_file(&self) -> PathBuf {
        self.0.join("launch.json")
    }

    fn process_file(&self) -> PathBuf {
        self.0.join("process.json")
    }

    fn exit_file(&self) -> PathBuf {
        self.0.join("exit.json")
    }

    fn guest_file(&self) -> PathBuf {
        self.0.join("guest.json")
    }

    /// Reads what was to be started; `None` if nothing was.
    ///
    /// # Errors
    ///
    /// If the record is there but cannot be read.
    pub fn read_launch(&self) -> Result<Option<LaunchRecord>, RecordError> {
        read(&self.launch_file())
    }

    /// Reads who was started; `None` if nobody was yet.
    ///
    /// # Errors
    ///
    /// If the record is there but cannot be read.
    pub fn read_process(&self) -> Result<Option<ProcessIdentity>, RecordError> {
        read(&self.process_file())
    }

    /// Reads how it ended; `None` if nobody wrote that it did.
    ///
    /// # Errors
    ///
    /// If the record is there but cannot be read.
    pub fn read_exit(&self) -> Result<Option<ExitRecord>, RecordError> {
        read(&self.exit_file())
    }

    /// Reads what the guest was last seen to do; `None` if nothing was.
    ///
    /// # Errors
    ///
    /// If the record is there but cannot be read.
    pub fn read_guest(&self) -> Result<Option<GuestRecord>, RecordError> {
        read(&self.guest_file())
    }

    /// Writes what to start and returns whether this call was the first to.
    pub(crate) fn write_launch(&self, record: &LaunchRecord) -> Result<FirstUse, RecordError> {
        write_once(&self.launch_file(), record)
    }

    pub(crate) fn write_process(&self, identity: &ProcessIdentity) -> Result<(), RecordError> {
        write(&self.process_file(), identity)
    }

    pub(crate) fn write_guest(&self, record: &GuestRecord) -> Result<(), RecordError> {
        write(&self.guest_file(), record)
    }

    pub(crate) fn write_exit(&self, record: &ExitRecord) -> Result<(), RecordError> {
        write(&self.exit_file(), record)
    }

    /// Takes the right to start a process here, or `None` if another shim
    /// holds it. It is given back when the file is closed.
    pub(crate) fn try_lock(&self) -> Result<Option<File>, RecordError> {
        let path = self.0.join("shim.lock");
        let failed = |source| RecordError::Write { path: path.clone(), source };
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// Reads the end of what QEMU said, at most `bytes_max` of it.
    ///
    /// # Errors
    ///
    /// If the log cannot be read. One that is not there is empty.
    pub fn stderr_tail(&self, bytes_max: u64) -> Result<String, RecordError> {
        let path = self.qemu_log();
        let failed = |source| RecordError::Read { path: path.clone(), source };
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
            Err(error) => return Err(failed(error)),
        };
        let length = file.metadata().map_err(failed)?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes_max))).map_err(failed)?;
        let mut tail = Vec::new();
        file.take(bytes_max).read_to_end(&mut tail).map_err(failed)?;
        // Zeros are where the log's beginning was freed.
        Ok(String::from_utf8_lossy(&tail).trim_start_matches('\0').to_owned())
    }
}

/// Whether a record that is written once was written by this call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstUse {
    First,
    UsedBefore,
}

/// Returns the time, in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(RecordError::Read { path: path.to_owned(), source }),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| RecordError::Parse { path: path.to_owned(), source })
}

fn write<T: Serialize>(path: &Path, record: &T) -> Result<(), RecordError> {
    let failed = |source| RecordError::Write { path: path.to_owned(), source };
    let temporary = write_temporary(path, record)?;
    fs::rename(&temporary, path).and_then(|()| sync_parent(path)).map_err(failed)
}

fn write_once<T: Serialize>(path: &Path, record: &T) -> Result<FirstUse, RecordError> {
    let failed = |source| RecordError::Write { path: path.to_owned(), source };
    let temporary = write_temporary(path, record)?;
    // Unlike a rename, a link never replaces what is there.
    let linked = fs::hard_link(&temporary, path);
    fs::remove_file(&temporary).map_err(failed)?;
    match linked {
        Ok(()) => sync_parent(path).map(|()| FirstUse::First).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(FirstUse::UsedBefore),
        Err(error) => Err(failed(error)),
    }
}

fn write_temporary<T: Serialize>(path: &Path, record: &T) -> Result<PathBuf, RecordError> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    // Told apart by process and by write, since both may race for one record.
    let write = WRITES.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("tmp.{}.{write}", std::process::id()));
    let failed = |source| RecordError::Write { path: temporary.clone(), source };
    let mut bytes = serde_json::to_vec(record).map_err(io::Error::other).map_err(failed)?;
    bytes.push(b'\n');
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(failed)?;
    file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed)?;
    Ok(temporary)
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or_else(|| Path::new("."));
    File::open(parent)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> (tempfile::TempDir, ProcessDir) {
        let temporary = tempfile::tempdir().unwrap();
        let dir = ProcessDir::new(temporary.path().join("vm"));
        dir.create().unwrap();
        (temporary, dir)
    }

    #[test]
    fn a_directory_is_launched_in_once() {
        let (_temporary, dir) = directory();
        let first = LaunchRecord { argv: vec!["a".to_owned()], monitors: vec![] };
        let second = LaunchRecord { argv: vec!["b".to_owned()], monitors: vec![] };
        assert_eq!(dir.write_launch(&first).unwrap(), FirstUse::First);
        assert_eq!(dir.write_launch(&second).unwrap(), FirstUse::UsedBefore);
        assert_eq!(dir.read_launch().unwrap(), Some(first));
    }

    #[test]
    fn only_one_holds_the_lock() {
        let (_temporary, dir) = directory();
        let held = dir.try_lock().unwrap();
        assert!(held.is_some());
        assert!(dir.try_lock().unwrap().is_none());
        drop(held);
        assert!(dir.try_lock().unwrap().is_some());
    }

    #[test]
    fn a_path_too_deep_for_sockets_is_refused() {
        let dir = ProcessDir::new(format!("/tmp/{}", "d".repeat(120)));
        assert!(matches!(dir.create(), Err(RecordError::PathTooLong { .. })));
    }

    #[test]
    fn a_damaged_record_is_an_error_and_not_an_absence() {
        let (_temporary, dir) = directory();
        assert_eq!(dir.read_exit().unwrap(), None);
        fs::write(dir.exit_file(), b"{").unwrap();
        assert!(matches!(dir.read_exit(), Err(RecordError::Parse { .. })));
    }

    #[test]
    fn the_tail_is_the_end() {
        let (_temporary, dir) = directory();
        assert_eq!(dir.stderr_tail(10).unwrap(), "");
        fs::write(dir.qemu_log(), b"0123456789abc").unwrap();
        assert_eq!(dir.stderr_tail(3).unwrap(), "abc");
        assert_eq!(dir.stderr_tail(99).unwrap(), "0123456789abc");
    }
}
