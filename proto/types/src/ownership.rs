//! Who may run a VM, and who may say so.

use std::fmt;

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
