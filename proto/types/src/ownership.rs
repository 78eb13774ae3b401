//! Who may run a VM, and who may say so.

use std::fmt;

/// How far above the known value a received counter may be.
///
/// Admissions, drivers and commands count by one, so an honest one is this far ahead only after
/// somebody leapt elsewhere, and then comes here in leaps of this size ([`Claim::towards`]).
/// Without a bound a single message with the highest number would leave no number for whoever may
/// really command the VM; with it, whoever leaps can always be caught up with.
const LEAP_MAX: u64 = 1 << 32;

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The first one.
            pub const FIRST: Self = Self(1);

            /// Reads a stored or received value; zero stands for "none yet" and is below [`FIRST`](Self::FIRST).
            #[must_use]
            pub const fn from_stored(value: u64) -> Self {
                Self(value)
            }

            /// Returns the next one. Saturates: at 2⁶⁴ the counter stands still, and what needs a higher one is refused.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }

            /// Says whether a received value is within reach of `known`; an older one is.
            #[must_use]
            pub const fn is_within_reach_of(self, known: Self) -> bool {
                self.0.saturating_sub(known.0) <= LEAP_MAX
            }

            /// Returns this value, or the furthest on the way to it that is within reach of `known`.
            #[must_use]
            pub const fn towards(known: Self, this: Self) -> Self {
                if this.is_within_reach_of(known) { this } else { Self(known.0.saturating_add(LEAP_MAX)) }
            }

            /// Returns the value to store or send.
            #[must_use]
            pub const fn value(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counter! {
    /// Counts who may run a VM.
    ///
    /// Every change of owner takes the next generation, and an agent refuses any command that
    /// carries an older one than it has seen. There is no `Default` and no arithmetic: the only
    /// way to a newer generation is [`Generation::next`].
    Generation
}
counter! {
    /// Counts who may command a VM: every admission, and every driver that takes over, takes the next.
    Claim
}
counter! {
    /// Counts the commands of one driver under one claim.
    Step
}
counter! {
    /// Counts the writes of one row: its optimistic lock.
    Seq
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leap_is_out_of_reach() {
        let known = Claim::from_stored(7);
        for near in [0, 7, 8, 7 + LEAP_MAX] {
            assert!(Claim::from_stored(near).is_within_reach_of(known), "{near}");
        }
        for far in [8 + LEAP_MAX, u64::MAX] {
            assert!(!Claim::from_stored(far).is_within_reach_of(known), "{far}");
        }
    }

    #[test]
    fn whoever_leapt_is_caught_up_with() {
        let (mut known, goal) = (Claim::from_stored(0), Claim::from_stored(3 * LEAP_MAX + 5));
        for _ in 0..4 {
            let next = Claim::towards(known, goal);
            assert!(next > known && next.is_within_reach_of(known));
            known = next;
        }
        assert_eq!(known, goal);
    }
}
