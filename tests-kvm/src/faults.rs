//! Arming the named fault points of a daemon.
//!
//! A build with the feature `fault-points` looks for a file when it passes a
//! point: `NAME.hold` makes it write `NAME.reached` and wait until the hold is
//! gone, `NAME.kill` makes it kill itself with SIGKILL. Release a point before the
//! daemon is started again, or it dies there once more.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::wait::{Holds, Level, wait_for};

/// The fault points of one daemon.
#[derive(Clone, Debug)]
pub struct Faults {
    dir: PathBuf,
}

impl Faults {
    /// Takes the directory that the daemon's configuration names.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be made.
    pub fn new(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Makes the daemon wait at a point.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn hold(&self, point: &str) -> Result<()> {
        self.touch(point, "hold")
    }

    /// Makes the daemon kill itself at a point.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn kill_at(&self, point: &str) -> Result<()> {
        self.touch(point, "kill")
    }

    /// Says whether the daemon waits at a held point.
    #[must_use]
    pub fn is_reached(&self, point: &str) -> bool {
        self.dir.join(format!("{point}.reached")).exists()
    }

    /// Waits until the daemon waits at a held point.
    ///
    /// # Errors
    ///
    /// Fails if it does not get there within the bound.
    pub async fn wait_reached(&self, point: &str, bound: Duration) -> Result<()> {
        wait_for(format_args!("fault point {point} to be reached"), bound, || async {
            Ok(Level::from_condition(Holds::from(self.is_reached(point)), || {
                "not there".to_owned()
            }))
        })
        .await
    }

    /// Lets the daemon go on, and disarms the point.
    ///
    /// # Errors
    ///
    /// Fails if a file is there and cannot be removed.
    pub fn release(&self, point: &str) -> Result<()> {
        for kind in ["hold", "kill", "reached"] {
            let path = self.dir.join(format!("{point}.{kind}"));
            match fs::remove_file(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("remove {}", path.display()));
                }
            }
        }
        Ok(())
    }

    /// Disarms every point.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be emptied.
    pub fn disarm(&self) -> Result<()> {
        for entry in fs::read_dir(&self.dir).context("read the fault points")?.flatten() {
            fs::remove_file(entry.path())
                .with_context(|| format!("remove {}", entry.path().display()))?;
        }
        Ok(())
    }

    fn touch(&self, point: &str, kind: &str) -> Result<()> {
        let path = self.dir.join(format!("{point}.{kind}"));
        fs::write(&path, "").with_context(|| format!("write {}", path.display()))
    }
}
