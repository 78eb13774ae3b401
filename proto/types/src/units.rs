//! Quantities whose unit is their type. Integer arithmetic that saturates: a hostile figure must not panic or wrap.

use std::fmt;

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// None of it.
            pub const ZERO: Self = Self(0);

            /// Returns the plain number, in this type's unit.
            #[must_use]
            pub const fn value(self) -> u64 {
                self.0
            }

            /// Adds; stays at the greatest value rather than wrap.
            #[must_use]
            pub const fn plus(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }

            /// Takes away; stays at zero rather than wrap.
            #[must_use]
            pub const fn less(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }
    };
}

quantity! {
    /// An amount of memory or data, in bytes.
    Bytes
}
quantity! {
    /// A rate of data, in bytes per second.
    BytesPerSec
}
quantity! {
    /// A span of time, in milliseconds.
    Millis
}
quantity! {
    /// CPU, in thousandths of a virtual CPU.
    MilliCpu
}
quantity! {
    /// A moment, in milliseconds since 1970-01-01 UTC, by the clock of who says it.
    Timestamp
}

impl Timestamp {
    /// Returns how long after `earlier` this is; zero if it is not.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }
}

/// A share of 0 to 100.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u8);

impl Percent {
    /// Reads a percentage; `None` above 100.
    #[must_use]
    pub const fn new(value: u8) -> Option<Self> {
        if value <= 100 { Some(Self(value)) } else { None }
    }

    /// Returns the number, 0 to 100.
    #[must_use]
    pub const fn value(self) -> u8 {
        self.0
    }

    /// Returns `ceil(total × percent / 100)` (how a reserve is counted).
    #[must_use]
    pub fn of_rounded_up(self, total: u64) -> u64 {
        let exact = u128::from(total) * u128::from(self.0);
        u64::try_from(exact.div_ceil(100)).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Bytes {
    /// Writes a binary unit with at most one decimal: `512 MiB`, `1.5 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut unit = 0;
        let mut scale: u64 = 1;
        while unit + 1 < UNITS.len() && self.0 / scale >= 1024 {
            scale <<= 10;
            unit += 1;
        }
        let whole = self.0 / scale;
        let tenth = u128::from(self.0 % scale) * 10 / u128::from(scale);
        if tenth == 0 {
            write!(f, "{whole} {}", UNITS[unit])
        } else {
            write!(f, "{whole}.{tenth} {}", UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_is_rounded_up() {
        assert_eq!(Percent::new(10).unwrap().of_rounded_up(101), 11);
        assert_eq!(Percent::new(0).unwrap().of_rounded_up(101), 0);
        assert_eq!(Percent::new(100).unwrap().of_rounded_up(u64::MAX), u64::MAX);
        assert!(Percent::new(101).is_none());
    }

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Bytes(1).less(Bytes(2)), Bytes::ZERO);
        assert_eq!(Bytes(u64::MAX).plus(Bytes(2)), Bytes(u64::MAX));
    }

    #[test]
    fn bytes_are_written_with_their_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (512 << 20, "512 MiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
