//! What a process has used of the machine.

use std::time::Duration;

use anyhow::{Context as _, Result};

/// What the kernel counts for a process so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    cpu: Duration,
    pub(super) rss_mib: u64,
}

impl Usage {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            std::fs::read_to_string(&path).with_context(|| format!("read {path}"))
        };
        let stat = read("stat")?;
        let (_, fields) = stat.rsplit_once(')').context("read the process's times")?;
        // Fields 14 and 15; the state was field 3.
        let ticks = fields.split_ascii_whitespace().skip(11).take(2);
        let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
        let status = read("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        // USER_HZ is 100 on every Linux that runs here.
        let cpu = Duration::from_millis(ticks * 10);
        Ok(Self { cpu, rss_mib: kib.context("read the process's memory")?.div_ceil(1024) })
    }

    pub(super) fn cores_since(&self, before: &Self, wall: Duration) -> f64 {
        self.cpu.saturating_sub(before.cpu).as_secs_f64() / wall.as_secs_f64().max(0.001)
    }
}
