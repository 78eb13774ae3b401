//! Waiting for a level, with a bound.
//!
//! Nothing in the lane sleeps for a guessed time: it asks for what it wants to
//! be true, again and again, and gives up at a bound that names what was missing.

use std::fmt::Display;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How often a level is looked at. A move takes about 100 ms, so phases must be seen much faster.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Says what a look at a level found.
#[derive(Debug)]
pub enum Level<T> {
    /// It holds.
    Reached(T),
    /// It does not yet; what was seen instead.
    NotYet(String),
}

impl<T> Level<T> {
    /// Turns an option into a level; `seen` says what was there instead.
    pub fn from_option(value: Option<T>, seen: impl FnOnce() -> String) -> Self {
        value.map_or_else(|| Self::NotYet(seen()), Self::Reached)
    }
}

impl Level<()> {
    /// Turns a condition into a level; `seen` says what was there instead.
    pub fn from_condition(holds: Holds, seen: impl FnOnce() -> String) -> Self {
        match holds {
            Holds::Yes => Self::Reached(()),
            Holds::No => Self::NotYet(seen()),
        }
    }
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// It does.
    Yes,
    /// It does not.
    No,
}

impl From<bool> for Holds {
    fn from(value: bool) -> Self {
        if value { Self::Yes } else { Self::No }
    }
}

/// Looks at a level until it is reached.
///
/// # Errors
///
/// Fails when the bound is over, with what was last seen, or when a look fails.
pub async fn wait_for<T, F, Fut>(what: impl Display, bound: Duration, mut look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Level<T>>>,
{
    let end = Instant::now() + bound;
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = String::from("nothing");
    loop {
        ticks.tick().await;
        match tokio::time::timeout_at(end + LOOK_EVERY, look()).await {
            Ok(Ok(Level::Reached(value))) => return Ok(value),
            Ok(Ok(Level::NotYet(instead))) => seen = instead,
            Ok(Err(error)) => return Err(error.context(format!("waiting for {what}"))),
            Err(_) => {
                bail!("waited {bound:?} for {what}; the last look did not end; seen before: {seen}")
            }
        }
        if Instant::now() >= end {
            bail!("waited {bound:?} for {what}; seen: {seen}");
        }
    }
}

/// Lets time pass that the case is about: a planner that is down for a while, a guest that must
/// be seen to go on. Never a substitute for a level.
pub async fn let_pass(time: Duration) {
    let mut ticks = interval(time);
    ticks.tick().await;
    ticks.tick().await;
}
