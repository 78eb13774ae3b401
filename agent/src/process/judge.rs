//! Whether the process of a directory lives, without talking to it.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::identity::{IdentityError, Presence, ProcessIdentity};
use super::proof::GoneProof;
use super::record::{Exit, ExitRecord, ProcessDir, RecordError, now_ms};
use super::scan::{ScanError, scan};

/// How often a start in progress is looked at. It takes some milliseconds.
const STARTING_RETRY: Duration = Duration::from_millis(5);

/// What the records and `/proc` say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// It is there.
    Alive(ProcessIdentity),
    /// It is gone.
    Gone(GoneProof),
    /// A shim is about to start it.
    Starting,
}

/// The records or `/proc` could not be read, so nothing is known.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    /// A record could not be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// `/proc` could not be read.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// `/proc` could not be searched.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// There is no such directory, or its files are missing. That is no
    /// proof: it may be on a disk that is not mounted, or was emptied.
    #[error("there is no record of a launch in {dir}", dir = dir.display())]
    NothingHere {
        /// The directory.
        dir: std::path::PathBuf,
    },
}

/// Judges whether the process of `dir` lives.
///
/// Where the directory was made, or a launch written down, but nobody started
/// it and no shim holds the right to, this takes that right away for good: it
/// records that the process was never started, and a shim that comes an hour
/// late refuses. So it is not for a launch that is still in progress.
///
/// # Errors
///
/// See [`JudgeError`]. An error proves nothing.
pub fn judge(dir: &ProcessDir) -> Result<Judgement, JudgeError> {
    if let Some(record) = dir.read_exit()? {
        return Ok(Judgement::Gone(GoneProof::recorded(record)));
    }
    if let Some(identity) = dir.read_process()? {
        return judge_identity(dir, identity);
    }
    if dir.read_launch()?.is_none() && !untouched(dir)? {
        return Err(JudgeError::NothingHere { dir: dir.path().to_owned() });
    }
    let Some(lock) = dir.try_lock()? else {
        return Ok(Judgement::Starting);
    };
    // A shim may have come and gone between the look and the lock.
    if let Some(record) = dir.read_exit()? {
        return Ok(Judgement::Gone(GoneProof::recorded(record)));
    }
    if let Some(identity) = dir.read_process()? {
        return judge_identity(dir, identity);
    }
    let record = ExitRecord {
        identity: None,
        exit: Exit::NeverStarted,
        at_ms: now_ms(),
        stderr_tail: String::new(),
    };
    dir.write_exit(&record)?;
    drop(lock);
    Ok(Judgement::Gone(GoneProof::recorded(record)))
}

/// Tells whether the directory was made and the launch then not even written
/// down, so that nothing can have been started in it.
///
/// An emptied directory looks the same, hence the look at what runs.
fn untouched(dir: &ProcessDir) -> Result<bool, JudgeError> {
    if !dir.path().is_dir() {
        return Ok(false);
    }
    let found = scan()?;
    let qemu = found.qemus.iter().any(|qemu| qemu.dir.as_deref() == Some(dir.path()));
    let shim = found.shims.iter().any(|shim| shim.dir == dir.path());
    Ok(found.unreadable.is_empty() && !qemu && !shim)
}

/// As [`judge`], but waits until `until` for a start in progress to end.
///
/// # Errors
///
/// As [`judge`].
pub(super) async fn judge_settled(
    dir: &ProcessDir,
    until: Instant,
) -> Result<Judgement, JudgeError> {
    loop {
        let judgement = judge(dir)?;
        if judgement != Judgement::Starting || Instant::now() >= until {
            return Ok(judgement);
        }
        sleep(STARTING_RETRY).await;
    }
}

fn judge_identity(dir: &ProcessDir, identity: ProcessIdentity) -> Result<Judgement, JudgeError> {
    match identity.presence()? {
        Presence::Present => Ok(Judgement::Alive(identity)),
        // The record may have been written since, and it says more.
        Presence::Absent => Ok(Judgement::Gone(match dir.read_exit()? {
            Some(record) => GoneProof::recorded(record),
            None => GoneProof::absent(identity),
        })),
        Presence::NewBoot { boot_id } => {
            Ok(Judgement::Gone(GoneProof::new_boot(identity, boot_id)))
        }
    }
}
