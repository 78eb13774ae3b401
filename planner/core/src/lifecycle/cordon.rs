//! Someone's word that a host takes no placements.
//!
//! Each cordon has an owner, who alone lifts it: a job that ends does not open a host that an
//! operator closed. A host takes placements only while nobody holds one.

use std::fmt;
use std::str::FromStr;

use vmferry_types::{DrainId, HostId, JobId, Timestamp};

use crate::fleet;

/// Who holds a cordon.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// An operator, or whatever acts for one.
    Operator {
        /// Who. Never begins with `job:` or `drain:`.
        name: String,
    },
    /// A maintenance job.
    Job(JobId),
    /// A drain or a retirement.
    Drain(DrainId),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator { name } => f.write_str(name),
            Self::Job(id) => write!(f, "job:{id}"),
            Self::Drain(id) => write!(f, "drain:{id}"),
        }
    }
}

/// Says why a text names no owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an owner of a cordon: {text:?}")]
pub struct InvalidOwner {
    /// The text.
    pub text: String,
}

impl FromStr for Owner {
    type Err = InvalidOwner;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidOwner { text: text.to_owned() };
        if let Some(id) = text.strip_prefix("job:") {
            return id.parse().map(Self::Job).map_err(|_| invalid());
        }
        if let Some(id) = text.strip_prefix("drain:") {
            return id.parse().map(Self::Drain).map_err(|_| invalid());
        }
        if text.is_empty() {
            return Err(invalid());
        }
        Ok(Self::Operator { name: text.to_owned() })
    }
}

/// One cordon of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Cordon {
    /// The host.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub host: HostId,
    /// Whose word it is. One owner has at most one cordon of a host.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::text"))]
    pub owner: Owner,
    /// Why.
    pub reason: String,
    /// Since when.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub since: Timestamp,
    /// Until when. `None` holds until it is lifted.
    #[cfg_attr(feature = "serde", serde(with = "until", default))]
    pub expires: Option<Timestamp>,
}

impl Cordon {
    /// Says whether it holds at `now`: up to, and not at, its end.
    #[must_use]
    pub fn holds(&self, now: Timestamp) -> bool {
        self.expires.is_none_or(|end| now < end)
    }

    /// Returns it in the form that placement reads.
    #[must_use]
    pub fn in_fleet(&self) -> fleet::Cordon {
        fleet::Cordon { owner: self.owner.to_string(), reason: self.reason.clone() }
    }
}

/// Says whether a host takes placements, as far as cordons go: while nobody holds one.
#[must_use]
pub fn is_open(host: &HostId, cordons: &[Cordon], now: Timestamp) -> bool {
    !cordons.iter().any(|cordon| cordon.host == *host && cordon.holds(now))
}

/// Returns when the next cordon ends by itself: capacity changes then, and who waits is tried again.
#[must_use]
pub fn next_end(cordons: &[Cordon], now: Timestamp) -> Option<Timestamp> {
    cordons.iter().filter_map(|cordon| cordon.expires).filter(|end| *end > now).min()
}

/// Ends: as a number, or nothing.
#[cfg(feature = "serde")]
mod until {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
    use vmferry_types::Timestamp;

    #[expect(clippy::ref_option, reason = "serde's form")]
    pub(super) fn serialize<S: Serializer>(
        value: &Option<Timestamp>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(Timestamp::value).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Timestamp>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Timestamp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cordon(owner: Owner, expires: Option<u64>) -> Cordon {
        Cordon {
            host: "a".parse().unwrap(),
            owner,
            reason: "new disks".into(),
            since: Timestamp(10),
            expires: expires.map(Timestamp),
        }
    }

    #[test]
    fn an_owner_reads_back_as_it_is_written() {
        let owners = [
            Owner::Operator { name: "alice".into() },
            Owner::Job(JobId::from_u128(7)),
            Owner::Drain(DrainId::from_u128(8)),
        ];
        for owner in owners {
            assert_eq!(owner.to_string().parse::<Owner>().unwrap(), owner);
        }
        for text in ["", "job:7", "drain:"] {
            assert!(text.parse::<Owner>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_host_is_open_only_while_nobody_holds_a_cordon() {
        let host: HostId = "a".parse().unwrap();
        let job = cordon(Owner::Job(JobId::from_u128(7)), None);
        let alice = cordon(Owner::Operator { name: "alice".into() }, Some(100));
        let both = [job, alice.clone()];
        assert!(!is_open(&host, &both, Timestamp(200)), "the job holds it still");
        let alone = std::slice::from_ref(&alice);
        assert!(!is_open(&host, alone, Timestamp(99)));
        assert!(is_open(&host, alone, Timestamp(100)), "an end is the end");
        assert!(is_open(&"b".parse().unwrap(), alone, Timestamp(20)));
        assert_eq!(next_end(&both, Timestamp(20)), Some(Timestamp(100)));
        assert_eq!(next_end(&both, Timestamp(100)), None);
    }
}
