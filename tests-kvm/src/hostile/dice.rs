//! Chance that can be repeated.

use uuid::Uuid;

/// A seeded source of numbers (splitmix64: the same on every machine and in every build).
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
    turns: u64,
}

impl Dice {
    /// Seeds it.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed, turns: 0 }
    }

    /// Returns the next number.
    pub const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Counts: 1, 2, 3 and so on.
    pub const fn turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    /// Returns a number below `end`, which is not zero.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns a length below `end`, which is not zero.
    pub fn length(&mut self, end: u64) -> usize {
        usize::try_from(self.below(end)).unwrap_or_default()
    }

    /// Returns a byte.
    pub const fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    /// Returns so many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }

    /// Picks one of several.
    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        let count = u64::try_from(of.len()).unwrap_or(1);
        of[self.length(count)].clone()
    }

    /// Returns a UUID that nobody has.
    pub const fn uuid(&mut self) -> Uuid {
        Uuid::from_u64_pair(self.next(), self.next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let mut dice = Dice::new(1);
        assert_eq!(dice.next(), 0x910a_2dec_8902_5cc1);
        assert_eq!(Dice::new(7).bytes(9), Dice::new(7).bytes(9));
    }
}
