//! Finding what is tried.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use uuid::Uuid;

/// The variable that names the directory of the built programs, for tests.
pub const BIN_DIR: &str = "VMFERRY_BIN_DIR";

/// Finds the built planner: in `dir`, or beside this program.
///
/// # Errors
///
/// Fails if it is not there.
pub fn planner(dir: Option<&Path>) -> Result<PathBuf> {
    let dir = match dir {
        Some(dir) => dir.to_owned(),
        None => {
            let own = std::env::current_exe().context("find this program")?;
            own.parent().context("find this program's directory")?.to_owned()
        }
    };
    let path = dir.join("vmferry-planner");
    if !path.exists() {
        bail!(
            "{} has no vmferry-planner; build it with: cargo build -p vmferry-planner",
            dir.display()
        );
    }
    std::fs::canonicalize(&path).with_context(|| format!("find {}", path.display()))
}

/// Draws a seed.
#[must_use]
pub fn fresh_seed() -> u64 {
    // Short enough to be typed again.
    u64::from(Uuid::new_v4().as_fields().0)
}
