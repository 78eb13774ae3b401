//! How a transfer is tuned while it runs: what QEMU was told, and what it is told next.

use serde::{Deserialize, Serialize};

/// Whether QEMU slows the guest down until its memory converges.
///
/// The capability for it cannot be turned on while a transfer runs, so one that may need it later has
/// it from the beginning, bound to a single percent ([`THROTTLE_READY`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Throttle {
    /// It cannot.
    #[default]
    Off,
    /// It can be told to.
    Ready,
    /// It does, more and more.
    On,
}

/// What a running transfer was told last, beside how long its guest may stand still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuned {
    /// Cap in bytes per second; 0 is none.
    pub max_bandwidth: u64,
    /// Whether the guest is slowed down.
    pub throttle: Throttle,
}

/// The most that QEMU slows a guest down, in percent.
pub const THROTTLE_MAX: u64 = 99;

/// QEMU's parameters for a guest that may be slowed down and is not yet.
pub const THROTTLE_READY: [(&str, u64); 4] = [
    ("cpu-throttle-initial", 1),
    ("cpu-throttle-increment", 1),
    ("max-cpu-throttle", 1),
    ("throttle-trigger-threshold", 100),
];

/// QEMU's parameters for a guest that is slowed down: by a fifth first, by a tenth more each pass.
pub const THROTTLE_ON: [(&str, u64); 4] = [
    ("cpu-throttle-initial", 20),
    ("cpu-throttle-increment", 10),
    ("max-cpu-throttle", THROTTLE_MAX),
    ("throttle-trigger-threshold", 50),
];

impl Throttle {
    /// Returns the parameters that QEMU is told.
    #[must_use]
    pub const fn parameters(self) -> &'static [(&'static str, u64)] {
        match self {
            Self::Off => &[],
            Self::Ready => &THROTTLE_READY,
            Self::On => &THROTTLE_ON,
        }
    }
}
