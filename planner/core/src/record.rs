//! How the shared words, which know no serde, are written in a row.

use serde::{Deserializer, Serializer};
use vmferry_types::{Bytes, BytesPerSec, Generation, MilliCpu, Millis, Percent, Timestamp};

/// Ids: as their text.
pub(crate) mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use super::{Deserializer, Serializer};
    use serde::Deserialize as _;

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Ids that may be absent.
pub(crate) mod text_option {
    use std::fmt::Display;
    use std::str::FromStr;

    use super::{Deserializer, Serializer};
    use serde::Deserialize as _;

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        Option::<String>::deserialize(deserializer)?
            .map(|text| text.parse().map_err(serde::de::Error::custom))
            .transpose()
    }
}

/// Shares: as a number of 0 to 100.
pub(crate) mod percent {
    use super::{Deserializer, Percent, Serializer};
    use serde::Deserialize as _;

    pub(crate) fn serialize<S: Serializer>(
        value: &Percent,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(value.value())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Percent, D::Error> {
        let number = u64::deserialize(deserializer)?;
        let percent = u8::try_from(number).ok().and_then(Percent::new);
        percent.ok_or_else(|| {
            serde::de::Error::custom(format!("{number} is not a percentage: 0 to 100"))
        })
    }
}

/// Counters and quantities: as their number.
pub(crate) mod number {
    use super::{Deserializer, Number, Serializer};
    use serde::Deserialize as _;

    pub(crate) fn serialize<T: Number, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(value.number())
    }

    pub(crate) fn deserialize<'de, T: Number, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        u64::deserialize(deserializer).map(T::of_number)
    }
}

/// A word that is one number.
pub(crate) trait Number: Copy {
    fn number(self) -> u64;
    fn of_number(number: u64) -> Self;
}

macro_rules! numbers {
    (counters: $($counter:ident),*; quantities: $($quantity:ident),*) => {
        $(impl Number for $counter {
            fn number(self) -> u64 {
                self.value()
            }
            fn of_number(number: u64) -> Self {
                Self::from_stored(number)
            }
        })*
        $(impl Number for $quantity {
            fn number(self) -> u64 {
                self.value()
            }
            fn of_number(number: u64) -> Self {
                Self(number)
            }
        })*
    };
}

numbers! { counters: Generation; quantities: Bytes, BytesPerSec, MilliCpu, Millis, Timestamp }

/// Methods: as their label.
pub(crate) mod method {
    use vmferry_types::Method;

    use super::{Deserializer, Serializer};
    use serde::Deserialize as _;

    pub(crate) fn serialize<S: Serializer>(
        value: &Method,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.label())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Method, D::Error> {
        let label = String::deserialize(deserializer)?;
        Method::from_label(&label)
            .ok_or_else(|| serde::de::Error::custom(format!("no such method: {label}")))
    }
}
