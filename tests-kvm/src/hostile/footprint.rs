//! What a process holds: tasks, file descriptors, and that it is still the same one.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::http;
use crate::daemon::Daemon;
use crate::wait::{Holds, Level, wait_for};

/// How long connections that nobody wants any more may take to go: an HTTP/2 connection whose
/// client vanished is noticed by its keep-alive.
const BOUND: Duration = Duration::from_secs(20);

/// How far above what it was a figure may be: the lane's own clients come and go.
const SLACK: u64 = 4;

/// What a daemon holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    name: String,
    pid: i32,
    metrics: String,
    tasks: u64,
    descriptors: u64,
    /// VMs that an agent knows, gone ones included: each has a task of its own.
    vms: u64,
}

impl Footprint {
    /// Measures a daemon that shows its metrics at `metrics`.
    ///
    /// # Errors
    ///
    /// Fails if it does not run or does not answer.
    pub async fn of(daemon: &Daemon, metrics: &str) -> Result<Self> {
        let pid = daemon.pid().with_context(|| format!("{} does not run", daemon.name()))?;
        measure(daemon.name(), pid, metrics).await
    }

    /// Waits until the daemon holds about what it held here.
    ///
    /// # Errors
    ///
    /// Fails with what it holds instead, or if it is another process.
    pub async fn expect_again(&self, daemon: &Daemon) -> Result<Self> {
        if daemon.pid() != Some(self.pid) {
            bail!("{} was process {} and is {:?}", self.name, self.pid, daemon.pid());
        }
        wait_for(format_args!("{} to hold what it held", self.name), BOUND, || async {
            let now = measure(&self.name, self.pid, &self.metrics).await?;
            let tasks = self.tasks + now.vms.saturating_sub(self.vms) + SLACK;
            let holds = now.tasks <= tasks && now.descriptors <= self.descriptors + SLACK;
            Ok(match Holds::from(holds) {
                Holds::Yes => Level::Reached(now),
                Holds::No => Level::NotYet(format!("{now}, before {self}")),
            })
        })
        .await
    }
}

impl std::fmt::Display for Footprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tasks and {} descriptors, {} VMs", self.tasks, self.descriptors, self.vms)
    }
}

async fn measure(name: &str, pid: i32, metrics: &str) -> Result<Footprint> {
    let text = http::get(metrics, "/metrics").await?;
    let tasks = sum(&text, "_tokio_tasks").with_context(|| format!("{name} counts no tasks"))?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).context("list descriptors")?.count();
    Ok(Footprint {
        name: name.to_owned(),
        pid,
        metrics: metrics.to_owned(),
        tasks,
        descriptors: u64::try_from(descriptors).unwrap_or(u64::MAX),
        vms: sum(&text, "vmferry_agent_vms").unwrap_or(0),
    })
}

/// Adds up the series of a metric whose name ends so; `None` if there is none.
fn sum(text: &str, name: &str) -> Option<u64> {
    let figures: Vec<u64> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.rsplit_once(' '))
        .filter(|(series, _)| series.split('{').next().is_some_and(|head| head.ends_with(name)))
        .filter_map(|(_, figure)| figure.parse().ok())
        .collect();
    (!figures.is_empty()).then(|| figures.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_a_metric_are_added_up() {
        let text = "# TYPE vmferry_agent_vms gauge\n\
                    vmferry_agent_vms{role=\"running\"} 1\n\
                    vmferry_agent_vms{role=\"absent\"} 41\n\
                    vmferry_agent_tokio_tasks 17\n# EOF\n";
        assert_eq!(sum(text, "vmferry_agent_vms"), Some(42));
        assert_eq!(sum(text, "_tokio_tasks"), Some(17));
        assert_eq!(sum(text, "none"), None);
    }
}
