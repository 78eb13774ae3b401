//! Named points at which a test build can be held or killed.
//!
//! The file `NAME.hold` holds whoever comes to the point NAME: it creates `NAME.reached` and waits
//! until the hold is removed. The file `NAME.kill` ends the process at once, as a crash does.
//! Without the feature `fault-points` nothing of this is compiled.

use std::path::PathBuf;

use vmferry_planner_core::lifecycle::{Emptying, drain, job};
use vmferry_planner_core::migration::{Back, Entry, Migration, Phase, Stage, Switchover};

use crate::store::EmptyingChange;

/// The names of the points, each once before and once after its commit. The crash matrix has to come
/// to each of them.
#[cfg(feature = "fault-points")]
const NAMES: &str = include_str!("faults.txt");

/// Those around commits of what empties a host and of what waits: no part of the matrix of a move.
#[cfg(feature = "fault-points")]
const NAMES_OF_HOSTS: &str = include_str!("faults_hosts.txt");

/// Those where a move waits for an operator, which one of the matrix does not.
#[cfg(feature = "fault-points")]
const NAMES_OF_GATES: &str = include_str!("faults_gates.txt");

/// The fault points of this process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct FaultPoints {
    #[cfg(feature = "fault-points")]
    dir: Option<std::sync::Arc<PathBuf>>,
}

impl FaultPoints {
    /// Looks for its files under `dir`, or never if there is none.
    #[must_use]
    #[cfg_attr(
        not(feature = "fault-points"),
        expect(
            unused_variables,
            clippy::needless_pass_by_value,
            reason = "only test builds have fault points"
        )
    )]
    pub fn new(dir: Option<PathBuf>) -> Self {
        #[cfg(feature = "fault-points")]
        return Self { dir: dir.map(std::sync::Arc::new) };
        #[cfg(not(feature = "fault-points"))]
        return Self {};
    }

    /// Passes the points of a commit, one after the other.
    pub(crate) async fn pass_all(&self, side: &'static str, names: &[&'static str]) {
        for name in names {
            self.pass(side, name).await;
        }
    }

    /// Passes the point `<side>.<name>`; ends or waits there if a test says so.
    #[cfg_attr(
        not(feature = "fault-points"),
        expect(
            unused_variables,
            clippy::unused_async,
            reason = "only test builds have fault points"
        )
    )]
    pub async fn pass(&self, side: &'static str, name: &'static str) {
        #[cfg(feature = "fault-points")]
        if let Some(dir) = &self.dir {
            let mut known =
                NAMES.lines().chain(NAMES_OF_HOSTS.lines()).chain(NAMES_OF_GATES.lines());
            assert!(known.any(|known| known == name), "{name} is not in faults.txt");
            hold_or_die(dir, &format!("{side}.{name}")).await;
        }
    }
}

/// Names the points around a commit: one for each phase, or step within one, that it enters.
pub(crate) fn points(before: &Migration, entries: &[Entry]) -> Vec<&'static str> {
    let mut points = Vec::new();
    let mut last = point(before);
    for entry in entries {
        let name = point(&entry.after);
        if name != last {
            points.push(name);
        }
        last = name;
    }
    points
}

/// Names the points around a commit of what empties a host: one for each phase that it enters.
pub(crate) fn emptying_points(before: &Emptying, changes: &[EmptyingChange]) -> Vec<&'static str> {
    let mut points = Vec::new();
    let mut last = emptying_point(before);
    for change in changes {
        let name = emptying_point(&change.after);
        if name != last {
            points.push(name);
        }
        last = name;
    }
    points
}

fn emptying_point(emptying: &Emptying) -> &'static str {
    match emptying {
        Emptying::Job(job) => match job.phase {
            job::Phase::Planned | job::Phase::Blocked => "job_planned",
            job::Phase::Running => "job_running",
            job::Phase::Verifying { .. } => "job_verifying",
            job::Phase::Stopping { .. } => "job_stopping",
            job::Phase::Maintenance { .. } => "job_maintenance",
            job::Phase::Completed { .. } => "job_completed",
            job::Phase::Failed { .. } => "job_failed",
            job::Phase::Cancelled { .. } => "job_cancelled",
        },
        Emptying::Drain(drain) => match drain.phase {
            drain::Phase::Emptying => "drain_emptying",
            drain::Phase::Empty { .. } => "drain_empty",
            drain::Phase::Granted { .. } => "drain_granted",
            drain::Phase::Cancelled { .. } => "drain_cancelled",
            drain::Phase::Died { .. } => "drain_died",
        },
    }
}

fn point(migration: &Migration) -> &'static str {
    match &migration.phase {
        Phase::Admitted { stage: Stage::Transferring { .. } | Stage::Holding { .. }, .. } => {
            "armed"
        }
        Phase::Admitted { stage: Stage::Waiting { .. }, .. } => "waiting",
        Phase::Admitted { stage: Stage::Parting { .. }, .. } => "parting",
        Phase::Admitted { stage: Stage::ShuttingDown, .. } => "shutting_down",
        Phase::Captured { switchover: Switchover::Down { .. }, .. } => "down",
        Phase::Admitted { stage: Stage::Recalling { .. }, .. } => "recalling",
        Phase::Admitted { stage: Stage::Clearing { .. }, .. } => "clearing_live",
        Phase::Captured { switchover: Switchover::Held { .. }, .. } => "held",
        Phase::Captured { switchover: Switchover::Ordered, .. } => "ordered",
        Phase::Captured { switchover: Switchover::Forward, .. } => "decided_forward",
        Phase::RollingBack { back, .. } => match back {
            Back::Cancelling => "cancelling",
            Back::Clearing => "clearing",
            Back::Undoing => "undoing",
            Back::Resuming { .. } => "resuming",
            Back::PoweredOff => "powered_off",
        },
        Phase::Queued { .. }
        | Phase::Admitted { stage: Stage::Arming, .. }
        | Phase::Captured { switchover: Switchover::Withheld, .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => migration.label().label(),
    }
}

#[cfg(feature = "fault-points")]
async fn hold_or_die(dir: &std::path::Path, name: &str) {
    if dir.join(format!("{name}.kill")).exists() {
        // One death a file: a restarted process must be able to pass.
        if std::fs::remove_file(dir.join(format!("{name}.kill"))).is_ok() {
            kill_self();
        }
    }
    let hold = dir.join(format!("{name}.hold"));
    if !hold.exists() {
        return;
    }
    if let Err(error) = std::fs::write(dir.join(format!("{name}.reached")), b"") {
        tracing::warn!(%error, name, "fault point could not say that it was reached");
    }
    while hold.exists() {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

#[cfg(feature = "fault-points")]
fn kill_self() {
    let own = nix::unistd::Pid::this();
    if nix::sys::signal::kill(own, nix::sys::signal::Signal::SIGKILL).is_err() {
        std::process::abort();
    }
    // The signal is on its way; nothing may happen until it arrives.
    loop {
        std::thread::park();
    }
}
