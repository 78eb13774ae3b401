//! Which migration capabilities are turned on: what both ends have, set alike on both.

use std::collections::BTreeSet;

/// Without these a move is not safe: events tell what happens, the return path tells that the
/// destination really has the guest, and the pause before the switchover leaves the order to us.
pub const REQUIRED: [&str; 3] = ["events", "pause-before-switchover", "return-path"];

/// Wanted where both ends have it: keeps an older destination from taking disks before it is told to.
pub const WANTED: [&str; 1] = ["late-block-activate"];

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
