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

/// Finds the built planner for a test: where the environment says, or where cargo puts it.
///
/// # Errors
///
/// Fails if it is not there.
pub fn planner_for_tests() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(BIN_DIR) {
        return planner(Some(Path::new(&dir)));
    }
    // Tests are in a directory of their own below that of the programs.
    let own = std::env::current_exe().context("find this program")?;
    let dir = own.parent().and_then(Path::parent).context("find the programs' directory")?;
    planner(Some(dir))
}

/// Draws a seed.
#[must_use]
pub fn fresh_seed() -> u64 {
    // Short enough to be typed again.
    u64::from(Uuid::new_v4().as_fields().0)
}
