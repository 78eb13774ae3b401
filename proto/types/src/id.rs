//! Names of things, one type each, so that they cannot be swapped.

use std::fmt;
use std::str::FromStr;

/// Says why a text is not an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidId {
    /// What the text was meant to name.
    pub kind: &'static str,
    /// The rule that it breaks.
    pub rule: &'static str,
}

impl fmt::Display for InvalidId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a {}: {}", self.kind, self.rule)
    }
}

impl std::error::Error for InvalidId {}

/// Names a host: 1 to 63 of `a-z 0-9 . -`, beginning with a letter or digit.
///
/// Ordered by bytes, which is the last tie-breaker of placement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(String);

impl HostId {
    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = text.as_bytes();
        let legal =
            |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'.' || *b == b'-';
        let begins_well = bytes.first().is_some_and(u8::is_ascii_alphanumeric);
        if bytes.len() <= 63 && begins_well && bytes.iter().all(legal) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidId {
                kind: "host id",
                rule: "1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or digit",
            })
        }
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Parses the 8-4-4-4-12 form of a UUID, either case.
fn parse_uuid(text: &str) -> Option<u128> {
    let bytes = text.as_bytes();
    if bytes.len() != 36 {
        return None;
    }
    let mut value: u128 = 0;
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 8 | 13 | 18 | 23) {
            if *byte != b'-' {
                return None;
            }
        } else {
            let digit = char::from(*byte).to_digit(16)?;
            value = (value << 4) | u128::from(digit);
        }
    }
    Some(value)
}

/// Writes the lower-case 8-4-4-4-12 form of a UUID.
fn write_uuid(value: u128, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let hex = format!("{value:032x}");
    write!(f, "{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u128);

        impl $name {
            /// Makes the id of the 128 bits of a UUID.
            #[must_use]
            pub const fn from_u128(value: u128) -> Self {
                Self(value)
            }

            /// Returns the 128 bits of the UUID.
            #[must_use]
            pub const fn as_u128(self) -> u128 {
                self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                parse_uuid(text)
                    .map(Self)
                    .ok_or(InvalidId { kind: $kind, rule: "a UUID like 01234567-89ab-cdef-0123-456789abcdef" })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_uuid(self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_uuid(self.0, f)
            }
        }
    };
}

uuid_id! {
    /// Names a VM for its whole life: the UUID that QEMU is given. A name may be reused, this may not.
    VmId, "VM id"
}
uuid_id! {
    /// Names one attempt to move one VM, and any other admission (a start, a stop, a hold).
    MigrationId, "migration id"
}
uuid_id! {
    /// Names one maintenance job: the emptying of one host for an operator's work on it.
    JobId, "job id"
}
uuid_id! {
    /// Names one drain, or one retirement, of a host.
    DrainId, "drain id"
}
uuid_id! {
    /// Names one request of a caller: the same id answers the same migration.
    RequestId, "request id"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_back_as_they_are_written() {
        let text = "01234567-89ab-cdef-0123-456789abcdef";
        assert_eq!(text.parse::<VmId>().unwrap().to_string(), text);
        assert_eq!(text.to_uppercase().parse::<VmId>().unwrap().to_string(), text);
    }

    #[test]
    fn what_is_no_uuid_is_refused() {
        for text in [
            "",
            "x",
            "0123456789abcdef0123456789abcdef",
            "01234567-89ab-cdef-0123_456789abcdef",
            "é1234567-89ab-cdef-0123-456789abcde",
        ] {
            assert!(text.parse::<VmId>().is_err(), "{text}");
        }
    }

    #[test]
    fn host_ids_are_short_lower_case_names() {
        for good in ["a", "host-1.rack2", "0"] {
            assert_eq!(good.parse::<HostId>().unwrap().as_str(), good);
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", ".a", "A", "a b", "a/b", "ä", long.as_str()] {
            assert!(bad.parse::<HostId>().is_err(), "{bad}");
        }
    }
}
