//! What a test that failed leaves running, and its end.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The longest that a killed process may take to be gone.
const BOUND: Duration = Duration::from_secs(5);
/// From one look to the next.
const PAUSE: Duration = Duration::from_millis(5);

/// Ends every process that was started over a directory, and returns when they are gone: shims and
/// QEMUs outlive the agent on purpose, and a test that panics tells nobody to stop them.
pub(crate) fn end(dir: &Path) {
    let begun = Instant::now();
    loop {
        let left = processes(dir);
        if left.is_empty() || Instant::now().duration_since(begun) > BOUND {
            return;
        }
        for pid in left {
            // It may have ended by itself since.
            let _gone = kill(pid, Signal::SIGKILL);
        }
        std::thread::park_timeout(PAUSE);
    }
}

/// Returns the living processes that name a directory in their arguments.
fn processes(dir: &Path) -> Vec<Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let wanted = dir.as_os_str().as_bytes();
    let own = std::process::id();
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| u32::try_from(*pid) != Ok(own))
        .filter(|pid| {
            // Of a process that has ended and waits for its parent nothing is left to read.
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.windows(wanted.len()).any(|part| part == wanted)
        })
        .map(Pid::from_raw)
        .collect()
}
