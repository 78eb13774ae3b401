//! Drives admissions to their end: load, decide, commit, then act.
//!
//! One task owns each open migration, start or stop. Its first act is to claim the VM at the
//! agents, under a claim that no driver before it had; it commands an agent only after that agent
//! answered (rule R2). It holds nothing that matters: whatever it decided is in the row, so the
//! task may be dropped at any await, and the next one goes on by the same path.

pub mod emptying;
pub mod migration;
pub mod power;
pub mod seen;
pub mod side;

use std::time::Duration;

/// Waits that grow from one failure to the next and never end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(50);
    const MAX: Duration = Duration::from_secs(5);

    pub(crate) const fn new() -> Self {
        Self { next: Self::FIRST }
    }

    /// Returns how long to wait now, and waits twice as long the next time.
    pub(crate) fn next(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(Self::MAX);
        wait
    }

    pub(crate) fn reset(&mut self) {
        self.next = Self::FIRST;
    }
}
