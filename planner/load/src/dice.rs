//! Chance, from one seed.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// A source of chance.
///
/// What it draws is the same for the same seed; what comes of it is not, for threads and processes
/// take turns as they like.
#[derive(Debug)]
pub struct Dice {
    rng: StdRng,
}

impl Dice {
    /// Seeds a source; `kind` tells several of one seed apart.
    #[must_use]
    pub fn new(seed: u64, kind: &str) -> Self {
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

    /// Picks an index below `length`; zero if there is none.
    pub fn index(&mut self, length: usize) -> usize {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        usize::try_from(self.below(length)).unwrap_or(0)
    }

    /// Makes an id.
    pub fn id(&mut self) -> u128 {
        (u128::from(self.rng.next_u64()) << 64) | u128::from(self.rng.next_u64())
    }
}
