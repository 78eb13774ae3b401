//! Running cases one after another, and saying how they went.

use std::fs;
use std::io::Write as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::FutureExt as _;

use crate::accel::{self, Accelerator};
use crate::cases::{Case, Note};
use crate::cluster::{Artifacts, Cluster};
use crate::lab::{Lab, Plug};

/// How long one case may take, whatever it waits for.
const CASE_BOUND: Duration = Duration::from_secs(180);

/// How much of each log is shown when a case fails.
const TAIL_LINES: usize = 25;

/// How one case went.
#[derive(Debug)]
pub struct Outcome {
    /// The case.
    pub name: String,
    /// What its guest was run with.
    pub accelerator: Accelerator,
    /// How long it took, its start and its checks included.
    pub took: Duration,
    /// What it found worth telling, or why it failed.
    pub result: Result<Note>,
}

/// Runs cases and reports each as it ends.
#[derive(Debug)]
pub struct Runner {
    lab: Lab,
    artifacts: Artifacts,
    logs: PathBuf,
}

impl Runner {
    /// Takes the machines and the programs; logs of failed cases are kept below `logs`.
    #[must_use]
    pub fn new(lab: Lab, artifacts: Artifacts, logs: PathBuf) -> Self {
        Self { lab, artifacts, logs }
    }

    /// Runs the cases in order.
    ///
    /// # Errors
    ///
    /// Fails only where the lane itself does; a failed case is an outcome.
    pub async fn run(&mut self, cases: &[Case]) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        for (number, case) in cases.iter().enumerate() {
            let accelerator = self.accelerator(case).await?;
            let started = Instant::now();
            let dir = self.lab.dir().join(format!("{number}"));
            let result = self.run_case(case, &dir).await;
            let outcome = Outcome {
                name: case.name.clone(),
                accelerator: case.accelerator.unwrap_or(accelerator),
                took: Instant::now() - started,
                result,
            };
            report(&outcome)?;
            if outcome.result.is_err() {
                keep_logs(&self.logs.join(&case.name), &dir)?;
            }
            self.clean_up(&dir)?;
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    async fn accelerator(&mut self, case: &Case) -> Result<Accelerator> {
        if let Some(known) = self.artifacts.accelerators.get(&case.guest) {
            return Ok(*known);
        }
        let chosen = accel::choose(case.guest, &self.artifacts.guests, self.lab.dir()).await?;
        self.artifacts.accelerators.insert(case.guest, chosen);
        Ok(chosen)
    }

    async fn run_case(&self, case: &Case, dir: &Path) -> Result<Note> {
        let whole = async {
            let mut cluster = Cluster::start(
                &self.lab,
                &self.artifacts,
                dir,
                case.hosts,
                (case.store, case.wire),
            )
            .await?;
            let note = (case.body)(&mut cluster).await?;
            cluster.finish().await.context("after the case")?;
            Ok(note)
        };
        let caught = AssertUnwindSafe(whole).catch_unwind();
        match tokio::time::timeout(CASE_BOUND, caught).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(anyhow::anyhow!("the case panicked")),
            Err(_) => Err(anyhow::anyhow!("the case took longer than {CASE_BOUND:?}")),
        }
    }

    /// Ends what a case left and removes its state, so that the next one starts from nothing.
    fn clean_up(&self, dir: &Path) -> Result<()> {
        self.lab.end_processes();
        for host in crate::lab::HOSTS {
            for link in self.lab.extra_links(host)? {
                self.lab.remove_link(host, &link)?;
            }
            self.lab.set_plug(host, Plug::In)?;
        }
        match fs::remove_dir_all(dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", dir.display()))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

/// Keeps the logs of what failed in `dir`, and shows the end of each.
///
/// # Errors
///
/// Fails if they cannot be kept.
pub fn keep_logs(kept: &Path, dir: &Path) -> Result<()> {
    fs::create_dir_all(kept).with_context(|| format!("create {}", kept.display()))?;
    let mut text = String::new();
    for entry in fs::read_dir(dir.join("log")).into_iter().flatten().flatten() {
        let log = fs::read_to_string(entry.path()).unwrap_or_default();
        fs::write(kept.join(entry.file_name()), &log).context("keep a log")?;
        let lines: Vec<_> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        text.push_str(&format!("  --- {}\n", entry.file_name().display()));
        for line in tail {
            text.push_str(&format!("  {line}\n"));
        }
    }
    say(&format!("{text}  logs kept in {}", kept.display()))
}

/// Prints the line of one case.
fn report(outcome: &Outcome) -> Result<()> {
    let (word, rest) = match &outcome.result {
        Ok(note) => ("ok    ", note.clone()),
        Err(error) => ("FAILED", format!("\n  {error:#}")),
    };
    let seconds = outcome.took.as_secs_f64();
    say(format!(
        "{word} {:<58} {} {seconds:6.2} s  {rest}",
        outcome.name,
        outcome.accelerator.label()
    )
    .trim_end())
}

/// Prints a line at once: whoever watches should see each case as it ends.
///
/// # Errors
///
/// Fails if nobody reads any more.
pub fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("print")
}

/// Writes the outcomes as a table for people.
#[must_use]
pub fn markdown(outcomes: &[Outcome]) -> String {
    let mut text =
        String::from("| case | result | accelerator | seconds | note |\n|---|---|---|---|---|\n");
    for outcome in outcomes {
        let (word, note) = match &outcome.result {
            Ok(note) => ("ok", note.clone()),
            Err(error) => ("FAILED", format!("{error:#}")),
        };
        let note = note.replace('|', "\\|").replace('\n', " ");
        let seconds = outcome.took.as_secs_f64();
        text.push_str(&format!(
            "| {} | {word} | {} | {seconds:.2} | {note} |\n",
            outcome.name,
            outcome.accelerator.label()
        ));
    }
    text
}
