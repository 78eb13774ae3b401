//! Chance, one source a kind: drawing more often of one kind leaves all others as they were.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// One source of chance.
#[derive(Debug)]
pub struct Dice {
    rng: StdRng,
}

impl Dice {
    /// Seeds the source of one kind.
    #[must_use]
    pub fn new(seed: u64, kind: &str) -> Self {
        // FNV-1a: kinds must differ, and stay the same from build to build.
        let hash = kind.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self { rng: StdRng::seed_from_u64(seed ^ hash) }
    }

    /// Returns a number below `end`; zero if `end` is.
    pub fn below(&mut self, end: u64) -> u64 {
        if end == 0 { 0 } else { self.rng.next_u64() % end }
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// Says yes so many times in a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// Returns a span of so many milliseconds, both included.
    pub fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.between(low, high))
    }

    /// Picks one of several.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        let length = u64::try_from(of.len()).unwrap_or(u64::MAX);
        usize::try_from(self.below(length)).ok().and_then(|at| of.get(at))
    }
}
