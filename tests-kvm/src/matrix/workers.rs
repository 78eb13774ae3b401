//! Running cells side by side: each worker is a process with machines of its own.
//!
//! A worker takes the next cell that nobody has taken, by making a file, so that none waits for the
//! slowest. What came of each is a line of JSON in the worker's results.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::Cell;
use super::evidence::Evidence;
use crate::cases::Tier;
use crate::runner::{Runner, say};

/// How one cell went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The cell.
    pub cell: String,
    /// What its guest was run with.
    pub accelerator: String,
    /// How long it took, in seconds, its start and its checks included.
    pub seconds: f64,
    /// What it proved; `None` if it failed.
    pub evidence: Option<Evidence>,
    /// Why it failed.
    pub failure: Option<String>,
}

/// Takes one cell after another until none is left, and writes down how each went.
///
/// # Errors
///
/// Fails only where the lane itself does; a failed cell is a verdict.
pub async fn work(runner: &mut Runner, cells: &[Cell], shared: &Path) -> Result<()> {
    let path = shared.join(format!("results-{}", std::process::id()));
    let mut results = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    for (number, cell) in cells.iter().enumerate() {
        if File::create_new(shared.join(format!("taken-{number}"))).is_err() {
            continue;
        }
        let verdict = judge(runner, *cell).await?;
        let line = serde_json::to_string(&verdict).context("write a verdict")?;
        writeln!(results, "{line}").context("write a verdict")?;
    }
    Ok(())
}

async fn judge(runner: &mut Runner, cell: Cell) -> Result<Verdict> {
    let seen = Arc::new(Mutex::new(None));
    let case = cell.case(Tier::All, {
        let seen = Arc::clone(&seen);
        move |evidence| *seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(evidence)
    });
    let mut outcomes = runner.run(&[case]).await?;
    let Some(outcome) = outcomes.pop() else { bail!("{} was not run", cell.name()) };
    let evidence = seen.lock().unwrap_or_else(PoisonError::into_inner).take();
    let failure = outcome.result.err().map(|error| format!("{error:#}"));
    Ok(Verdict {
        cell: cell.name(),
        accelerator: outcome.accelerator.label().to_owned(),
        seconds: outcome.took.as_secs_f64(),
        evidence,
        failure,
    })
}

/// How the workers are started: this program again, with what tells a worker what to do.
#[derive(Clone, Debug)]
pub struct Crew {
    /// How many work side by side.
    pub workers: usize,
    /// The arguments of each, without the directory that they share.
    pub arguments: Vec<String>,
}

/// Starts the workers, waits for them, and returns what they found, in the order of the cells, and
/// how long that took, in seconds.
///
/// # Errors
///
/// Fails if a worker cannot be started. One that dies leaves its cell without a verdict, which is
/// a failure of that cell.
pub async fn run(crew: &Crew, cells: &[Cell]) -> Result<(Vec<Verdict>, f64)> {
    let shared = tempfile::tempdir().context("make a directory for the workers")?;
    let program = std::env::current_exe().context("find this program")?;
    let started = Instant::now();
    let mut children = Vec::new();
    for _ in 0..crew.workers {
        let child = Command::new(&program)
            .args(&crew.arguments)
            .arg("--shared")
            .arg(shared.path())
            .kill_on_drop(false)
            .spawn()
            .context("start a worker")?;
        children.push(child);
    }
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let all_ended = futures::future::try_join_all(children.iter_mut().map(Child::wait));
    let ended = tokio::select! {
        ended = all_ended => Some(ended.context("wait for the workers")?),
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
    };
    let Some(ended) = ended else {
        // Each removes its own machines when it is told to stop.
        for pid in children.iter().filter_map(Child::id) {
            kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM).context("stop a worker")?;
        }
        futures::future::join_all(children.iter_mut().map(Child::wait)).await;
        bail!("stopped by a signal");
    };
    for status in ended.iter().filter(|status| !status.success()) {
        say(&format!("a worker ended with {status}"))?;
    }
    let took = (Instant::now() - started).as_secs_f64();
    let mut found = verdicts(shared.path())?;
    let lost = |cell: &Cell| Verdict {
        cell: cell.name(),
        accelerator: String::new(),
        seconds: 0.0,
        evidence: None,
        failure: Some("the worker that had taken it died".to_owned()),
    };
    let ordered = cells.iter().map(|cell| found.remove(&cell.name()).unwrap_or_else(|| lost(cell)));
    Ok((ordered.collect(), took))
}

fn verdicts(shared: &Path) -> Result<BTreeMap<String, Verdict>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(shared).context("read the verdicts")?.flatten() {
        let path: PathBuf = entry.path();
        if !entry.file_name().to_string_lossy().starts_with("results-") {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        for line in text.lines() {
            let verdict: Verdict = serde_json::from_str(line).context("read a verdict")?;
            found.insert(verdict.cell.clone(), verdict);
        }
    }
    Ok(found)
}
