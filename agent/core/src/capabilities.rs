//! Which migration capabilities are turned on: what both ends have, set alike on both.

use std::collections::BTreeSet;

/// Without these a move is not safe: events tell what happens, the return path tells that the
/// destination really has the guest, and the pause before the switchover leaves the order to us.
pub const REQUIRED: [&str; 3] = ["events", "pause-before-switchover", "return-path"];

/// Wanted where both ends have it: keeps an older destination from taking disks before it is told to.
pub const WANTED: [&str; 1] = ["late-block-activate"];

/// What lets a guest go before its memory. Never together with `multifd`: QEMU before 10.1 refuses
/// that pair, and nothing here turns it on.
pub const POSTCOPY: &str = "postcopy-ram";

/// What gives the pages that such a guest waits for a channel of their own.
pub const PREEMPT: &str = "postcopy-preempt";

/// Whether the guest may go before its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carries {
    /// It goes with all of it.
    #[default]
    Whole,
    /// It may go first.
    Postcopy,
    /// The same, and what it waits for comes on a channel of its own.
    Preempt,
}

impl Carries {
    /// Returns the most that every end offers.
    #[must_use]
    pub fn of(ends: &[&BTreeSet<String>]) -> Self {
        let all = |name: &str| ends.iter().all(|offered| offered.contains(name));
        match (all(POSTCOPY), all(PREEMPT)) {
            (true, true) => Self::Preempt,
            (true, false) => Self::Postcopy,
            (false, _) => Self::Whole,
        }
    }

    /// Returns the capabilities that are turned on for it.
    #[must_use]
    pub const fn on(self) -> &'static [&'static str] {
        match self {
            Self::Whole => &[],
            Self::Postcopy => &[POSTCOPY],
            Self::Preempt => &[POSTCOPY, PREEMPT],
        }
    }

    /// Returns those that are turned off, as far as they are offered: an earlier attempt may have
    /// left them on.
    #[must_use]
    pub const fn off(self) -> &'static [&'static str] {
        match self {
            Self::Whole => &[PREEMPT, POSTCOPY],
            Self::Postcopy => &[PREEMPT],
            Self::Preempt => &[],
        }
    }
}

/// Whether a guest that writes too fast may be slowed down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Throttling {
    /// The guest keeps its speed.
    Off,
    /// QEMU slows its vCPUs until memory converges.
    AutoConverge,
}

/// Returns the required capabilities that `offered` lacks.
#[must_use]
pub fn missing(offered: &BTreeSet<String>) -> Vec<&'static str> {
    REQUIRED.into_iter().filter(|name| !offered.contains(*name)).collect()
}

/// Returns what to turn on: required and wanted, as far as every end offers it.
///
/// Those not named are turned off, so that an earlier attempt leaves nothing behind.
#[must_use]
pub fn chosen(ends: &[&BTreeSet<String>], throttling: Throttling) -> Vec<&'static str> {
    let throttle: &[&str] = match throttling {
        Throttling::Off => &[],
        Throttling::AutoConverge => &["auto-converge"],
    };
    REQUIRED
        .iter()
        .chain(&WANTED)
        .chain(throttle)
        .copied()
        .filter(|name| ends.iter().all(|offered| offered.contains(*name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn only_what_both_ends_have_is_turned_on() {
        let new = set(&[
            "events",
            "return-path",
            "pause-before-switchover",
            "late-block-activate",
            "auto-converge",
        ]);
        let old = set(&["events", "return-path", "pause-before-switchover"]);
        assert_eq!(
            chosen(&[&new, &old], Throttling::AutoConverge),
            ["events", "pause-before-switchover", "return-path"]
        );
        assert!(chosen(&[&new, &new], Throttling::AutoConverge).contains(&"auto-converge"));
        assert!(!chosen(&[&new, &new], Throttling::Off).contains(&"auto-converge"));
    }

    #[test]
    fn what_a_move_cannot_do_without_is_named() {
        assert_eq!(missing(&set(&["events"])), ["pause-before-switchover", "return-path"]);
    }
}
