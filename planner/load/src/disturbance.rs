//! What is done to planners while they drive.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::sync::Mutex;

use crate::console::say;
use crate::dice::Dice;
use crate::process::PlannerProcess;

/// What is done to planners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturb {
    /// Nothing.
    Not,
    /// Killed, and started again at once.
    Kill,
    /// Stopped for some seconds and continued: it has lost its leases and does not know.
    Freeze,
    /// Either.
    Both,
}

/// How often what was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disturbed {
    /// Planners killed.
    pub kills: u64,
    /// Planners stopped and continued.
    pub freezes: u64,
}

/// How long a stopped planner stays so, in milliseconds: longer than its leases.
const FROZEN_MS: (u64, u64) = (2_000, 4_000);

/// The planners, and whoever disturbs them.
#[derive(Debug)]
pub struct Disturbance {
    planners: Mutex<Vec<PlannerProcess>>,
    counts: Mutex<Disturbed>,
    frozen: Mutex<Option<usize>>,
}

impl Disturbance {
    /// Takes the planners.
    #[must_use]
    pub fn new(planners: Vec<PlannerProcess>) -> Self {
        Self { planners: Mutex::new(planners), counts: Mutex::default(), frozen: Mutex::default() }
    }

    /// Returns what was done so far.
    pub async fn counts(&self) -> Disturbed {
        *self.counts.lock().await
    }

    /// Makes sure that no planner has ended by itself.
    ///
    /// # Errors
    ///
    /// Names one that has.
    pub async fn check(&self) -> Result<()> {
        self.planners.lock().await.iter_mut().try_for_each(PlannerProcess::check)
    }

    /// Disturbs one planner after the other, for good; returns only what went wrong.
    pub async fn keep_disturbing(
        &self,
        disturb: Disturb,
        every: (Duration, Duration),
        mut dice: Dice,
    ) -> anyhow::Error {
        loop {
            let (low, high) = (every.0.as_millis(), every.1.as_millis());
            let millis = |value| u64::try_from(value).unwrap_or(u64::MAX);
            tokio::time::sleep(dice.millis(millis(low), millis(high))).await;
            let which = dice.index(self.planners.lock().await.len());
            let freeze = dice.chance(500);
            let frozen = dice.millis(FROZEN_MS.0, FROZEN_MS.1);
            let done = match (disturb, freeze) {
                (Disturb::Not, _) => self.check().await,
                (Disturb::Kill, _) | (Disturb::Both, false) => self.kill(which).await,
                (Disturb::Freeze, _) | (Disturb::Both, true) => self.freeze(which, frozen).await,
            };
            if let Err(error) = done {
                return error;
            }
        }
    }

    async fn kill(&self, which: usize) -> Result<()> {
        let mut planners = self.planners.lock().await;
        planners.iter_mut().try_for_each(PlannerProcess::check)?;
        let planner = planners.get_mut(which).context("there is no such planner")?;
        planner.kill().await?;
        say(&format!("load: {} is killed and started again", planner.name()));
        planner.start()?;
        self.counts.lock().await.kills += 1;
        Ok(())
    }

    async fn freeze(&self, which: usize, frozen: Duration) -> Result<()> {
        {
            let mut planners = self.planners.lock().await;
            planners.iter_mut().try_for_each(PlannerProcess::check)?;
            let planner = planners.get_mut(which).context("there is no such planner")?;
            say(&format!("load: {} is stopped for {} ms", planner.name(), frozen.as_millis()));
            planner.freeze()?;
        }
        *self.frozen.lock().await = Some(which);
        self.counts.lock().await.freezes += 1;
        tokio::time::sleep(frozen).await;
        self.let_go_on().await
    }

    /// Continues whoever is stopped.
    ///
    /// # Errors
    ///
    /// Fails if it has ended meanwhile.
    pub async fn let_go_on(&self) -> Result<()> {
        let Some(which) = self.frozen.lock().await.take() else { return Ok(()) };
        let planners = self.planners.lock().await;
        planners.get(which).context("there is no such planner")?.thaw()
    }

    /// Ends all planners.
    ///
    /// # Errors
    ///
    /// Fails if one of them has ended by itself.
    pub async fn end(&self) -> Result<()> {
        for planner in self.planners.lock().await.iter_mut() {
            planner.kill().await?;
        }
        Ok(())
    }

    /// Returns what planners logged that no planner should.
    pub async fn panics(&self) -> Vec<String> {
        let planners = self.planners.lock().await;
        let mut found = Vec::new();
        for planner in planners.iter() {
            // One that never started has no log.
            let log = std::fs::read_to_string(planner.log()).unwrap_or_default();
            let wrong = log.lines().filter(|line| {
                line.contains("panicked at") || line.contains("a step was used twice")
            });
            found.extend(wrong.take(3).map(|line| format!("{}: {line}", planner.name())));
        }
        found
    }
}
