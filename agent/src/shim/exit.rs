//! Notices the end of QEMU and writes it down.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::STDERR_TAIL_BYTES;
use super::log::note;
use super::state::State;
use crate::process::record::now_ms;
use crate::process::{Exit, ExitRecord};

/// How soon a record that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// How long the last words of a QEMU that has ended may take to be heard.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Waits for the child to end and records it.
pub(super) async fn watch(state: &State, mut child: Child) {
    if let Some(process) = &state.process
        && let Err(error) = process.wait().await
    {
        note(&state.dir, &format!("cannot watch QEMU: {error}"));
    }
    let exit = loop {
        match child.try_wait() {
            Ok(Some(status)) => break describe(status),
            // The descriptor said that it ended, or could not be watched.
            Ok(None) => {}
            Err(error) => note(&state.dir, &format!("cannot wait for QEMU: {error}")),
        }
        sleep(RETRY).await;
    };
    // Its last words lie in the second monitor's socket, and whoever finds the exit recorded takes
    // them for written down.
    if timeout(LAST_WORDS, state.heard_all()).await.is_err() {
        note(&state.dir, "the second monitor stays open though QEMU has ended");
    }
    record(state, exit).await;
}

/// Writes down how it ended, and tells everybody once that is on the disk.
pub(super) async fn record(state: &State, exit: Exit) {
    let stderr_tail = state.dir.stderr_tail(STDERR_TAIL_BYTES).unwrap_or_else(|error| {
        note(&state.dir, &format!("cannot read what QEMU said: {error}"));
        String::new()
    });
    let identity = state.identity.clone();
    let record = ExitRecord { identity, exit, at_ms: now_ms(), stderr_tail };
    // A full disk passes; until then nobody is told what a crash would undo.
    while let Err(error) = state.dir.write_exit(&record) {
        // Without its directory nobody can ever ask for the record: who removed it knew that QEMU
        // was to be forgotten, and pid and start time still prove its absence.
        if matches!(state.dir.path().try_exists(), Ok(false)) {
            state.bye.notify_one();
            break;
        }
        note(&state.dir, &format!("cannot record the exit: {error}"));
        sleep(RETRY).await;
    }
    state.exit.send_replace(Some(record));
}

fn describe(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code { code },
        (None, Some(signal)) => Exit::Signal { signal },
        // Neither stopped nor continued processes are waited for.
        (None, None) => Exit::Code { code: -1 },
    }
}
