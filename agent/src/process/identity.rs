//! Which process is meant, and whether it is still there.

use std::fmt;
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use super::pidfd::PidFd;

/// Names one process for good.
///
/// A pid is reused, and start times begin anew after a boot; the three
/// together never come twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The process id.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of its `stat`).
    pub start_time: u64,
    /// The kernel's id of this boot.
    pub boot_id: String,
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} (started at tick {})", self.pid, self.start_time)
    }
}

/// What `/proc` says of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The process is there.
    Present,
    /// Under the same boot there is no such process any more.
    Absent,
    /// The machine was booted since.
    NewBoot {
        /// The boot id of now.
        boot_id: String,
    },
}

/// `/proc` could not be asked, so nothing is known.
#[derive(Debug, thiserror::Error)]
#[error("read {path} to judge a process")]
pub struct IdentityError {
    path: String,
    source: io::Error,
}

impl IdentityError {
    fn new(path: &str, source: io::Error) -> Self {
        Self { path: path.to_owned(), source }
    }
}

impl ProcessIdentity {
    /// Reads the identity of the process that has `pid` now, or `None` if
    /// none has.
    ///
    /// # Errors
    ///
    /// If `/proc` cannot be read.
    pub fn read(pid: u32) -> Result<Option<Self>, IdentityError> {
        let boot_id = boot_id()?;
        Ok(read_stat(pid)?.map(|stat| Self { pid, start_time: stat.start_time, boot_id }))
    }

    /// Tells whether this process is still there.
    ///
    /// A zombie counts as absent once all of its threads have ended: it runs
    /// nothing any more and only waits to be reaped.
    ///
    /// # Errors
    ///
    /// If `/proc` cannot be read. That proves nothing.
    pub fn presence(&self) -> Result<Presence, IdentityError> {
        let boot_id = boot_id()?;
        if boot_id != self.boot_id {
            return Ok(Presence::NewBoot { boot_id });
        }
        match read_stat(self.pid)? {
            Some(stat) if stat.start_time == self.start_time => match stat.life {
                Life::Alive => Ok(Presence::Present),
                // The leader is a zombie, but its threads may run on.
                Life::Zombie => Ok(self.zombie_presence()),
            },
            Some(_) | None => Ok(Presence::Absent),
        }
    }

    /// Opens a descriptor that means exactly this process, or `None` if it is
    /// not there any more.
    ///
    /// # Errors
    ///
    /// If `/proc` cannot be read or the kernel refuses the descriptor.
    pub(crate) fn open(&self) -> Result<Option<PidFd>, IdentityError> {
        let fd = match PidFd::open(self.pid) {
            Ok(fd) => fd,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            Err(error) => return Err(IdentityError::new("pidfd", error)),
        };
        // Looked at only now that the descriptor pins whatever has the pid:
        // if the start time fits, the descriptor is of this process.
        match self.presence()? {
            Presence::Present => Ok(Some(fd)),
            Presence::Absent | Presence::NewBoot { .. } => Ok(None),
        }
    }

    fn zombie_presence(&self) -> Presence {
        let ended = PidFd::open(self.pid).is_ok_and(|fd| fd.ended().unwrap_or(false));
        if ended { Presence::Absent } else { Presence::Present }
    }
}

/// Reads the kernel's id of this boot.
pub(crate) fn boot_id() -> Result<String, IdentityError> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(PATH).map_err(|error| IdentityError::new(PATH, error))?;
    Ok(text.trim().to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Alive,
    Zombie,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    life: Life,
    start_time: u64,
}

fn read_stat(pid: u32) -> Result<Option<Stat>, IdentityError> {
    let path = format!("/proc/{pid}/stat");
    // Not as text: the command's name in it may be anything.
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if vanished(&error) => return Ok(None),
        Err(error) => return Err(IdentityError::new(&path, error)),
    };
    let stat = parse_stat(&String::from_utf8_lossy(&bytes));
    let malformed = || IdentityError::new(&path, io::Error::from(io::ErrorKind::InvalidData));
    stat.map(Some).ok_or_else(malformed)
}

/// Tells whether the process that has `pid` now started at `start_time`.
///
/// # Errors
///
/// If `/proc` cannot be read.
pub(crate) fn runs(pid: u32, start_time: u64) -> Result<bool, IdentityError> {
    Ok(read_stat(pid)?.is_some_and(|stat| stat.start_time == start_time))
}

/// Tells whether an error from `/proc/PID` means that the process is gone.
pub(crate) fn vanished(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The name is in parentheses and may hold spaces and parentheses itself.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let life = match fields.next()? {
        "Z" | "X" | "x" => Life::Zombie,
        _ => Life::Alive,
    };
    // Field 22; the state was field 3.
    let start_time = fields.nth(18)?.parse().ok()?;
    Some(Stat { life, start_time })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_an_odd_name() {
        let text = "42 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(parse_stat(text), Some(Stat { life: Life::Alive, start_time: 4711 }));
        assert_eq!(parse_stat("42 (a) S 1"), None);
    }

    #[test]
    fn this_process_is_present_and_its_double_is_not() {
        let own = ProcessIdentity::read(std::process::id()).unwrap().unwrap();
        assert_eq!(own.presence().unwrap(), Presence::Present);
        let other = ProcessIdentity { start_time: own.start_time + 1, ..own.clone() };
        assert_eq!(other.presence().unwrap(), Presence::Absent);
        let past = ProcessIdentity { boot_id: "another".to_owned(), ..own };
        assert!(matches!(past.presence().unwrap(), Presence::NewBoot { .. }));
    }

    #[test]
    fn a_zombie_is_absent() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let identity = ProcessIdentity::read(child.id()).unwrap();
        let fd = PidFd::open(child.id()).unwrap();
        fd.wait_blocking().unwrap();
        if let Some(identity) = identity {
            assert_eq!(identity.presence().unwrap(), Presence::Absent);
            assert!(identity.open().unwrap().is_none());
        }
        child.wait().unwrap();
    }
}
