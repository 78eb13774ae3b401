//! Which port a receiver listens on.

use std::collections::BTreeSet;

/// The ports that receivers may use, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// Reads `first-last`; `None` if it is no range of ports.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-')?;
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (0 < first && first <= last).then_some(Self { first, last })
    }

    /// Returns the free ports in the order in which to try them: those after `previous` first, so
    /// that a port is not used again at once while somebody may still hold its last address.
    #[must_use]
    pub fn candidates(self, used: &BTreeSet<u16>, previous: Option<u16>) -> Vec<u16> {
        let start = previous
            .filter(|port| (self.first..self.last).contains(port))
            .map_or(self.first, |port| port.saturating_add(1));
        (start..=self.last).chain(self.first..start).filter(|port| !used.contains(port)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_go_round_and_skip_those_in_use() {
        let range = PortRange::parse("10-13").unwrap();
        assert_eq!(range.candidates(&BTreeSet::new(), None), [10, 11, 12, 13]);
        assert_eq!(range.candidates(&BTreeSet::from([12]), Some(11)), [13, 10, 11]);
        assert_eq!(range.candidates(&BTreeSet::new(), Some(13)), [10, 11, 12, 13]);
        assert_eq!(range.candidates(&BTreeSet::from([10, 11, 12, 13]), None), [0; 0]);
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in ["", "1", "2-1", "0-5", "1-70000", "a-b"] {
            assert_eq!(PortRange::parse(text), None, "{text}");
        }
    }
}
