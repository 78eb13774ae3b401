//! The journal of one run: what is decided is on the disk before anybody is told.

use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use vmferry_planner_core::migration::{Event, Migration};

use crate::failure::Failure;

/// What a run keeps.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    /// The version of this form.
    pub(crate) version: u32,
    pub(crate) vm_name: String,
    /// Where both agents are.
    pub(crate) source: String,
    pub(crate) destination: String,
    /// The machine, as the planner has it.
    pub(crate) migration: Migration,
    /// The newest claim of this run; 0 before one was taken.
    pub(crate) claim: u64,
    /// When the present part of the way was begun, in milliseconds since 1970.
    pub(crate) entered_ms: u64,
    /// What happened, and when.
    pub(crate) log: Vec<Happened>,
}

/// One entry of the log.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Happened {
    pub(crate) at_ms: u64,
    pub(crate) event: Event,
}

/// The version of the form that this program writes.
pub(crate) const VERSION: u32 = 1;

/// The file, held so that nobody else drives by it at once.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) path: PathBuf,
    _lock: File,
}

impl Journal {
    /// Makes the journal of a new run, which must not be there.
    pub(crate) fn create(path: &Path, kept: &Kept) -> Result<Self, Failure> {
        let journal = Self::hold(path)?;
        if path.exists() {
            let problem = "it is the journal of another run: go on with it by --resume";
            return Err(wrong(path, problem));
        }
        journal.write(kept)?;
        Ok(journal)
    }

    /// Opens the journal of a run that was interrupted.
    pub(crate) fn open(path: &Path) -> Result<(Self, Kept), Failure> {
        if !path.exists() {
            return Err(wrong(path, "there is no such file"));
        }
        // Only whoever holds it may believe what it says: another run may write to it until then.
        let journal = Self::hold(path)?;
        let text = std::fs::read(path).map_err(|error| wrong(path, &error.to_string()))?;
        let kept: Kept =
            serde_json::from_slice(&text).map_err(|error| wrong(path, &error.to_string()))?;
        if kept.version > VERSION {
            return Err(wrong(path, "a newer vmferry wrote it"));
        }
        Ok((journal, kept))
    }

    fn hold(path: &Path) -> Result<Self, Failure> {
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.with_extension("lock"))
            .map_err(|error| wrong(path, &error.to_string()))?;
        lock.try_lock().map_err(|error| {
            wrong(path, &format!("another run goes on by it, or it cannot be locked: {error}"))
        })?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Writes down where the run is; on the disk when it returns.
    pub(crate) fn write(&self, kept: &Kept) -> Result<(), Failure> {
        self.written(kept).map_err(|error| wrong(&self.path, &error.to_string()))
    }

    fn written(&self, kept: &Kept) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(kept)?;
        let fresh = self.path.with_extension("new");
        let mut file = File::create(&fresh)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&fresh, &self.path)?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()
    }

    /// Removes it: nothing is owed any more.
    pub(crate) fn remove(self) -> Result<(), Failure> {
        let gone = |path: &Path| std::fs::remove_file(path);
        gone(&self.path)
            .and_then(|()| gone(&self.path.with_extension("lock")))
            .map_err(|error| wrong(&self.path, &error.to_string()))
    }
}

fn wrong(path: &Path, problem: &str) -> Failure {
    Failure::Usage {
        operation: format!("keep the journal {}", path.display()),
        problem: problem.to_owned(),
    }
}
