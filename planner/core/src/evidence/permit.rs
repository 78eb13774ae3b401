//! Whether an effect may leave now.

use crate::evidence::Sides;
use crate::migration::{Effect, Migration, Side};

/// Says why an effect has to wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withheld {
    /// The agent that would carry it out has not answered this driver's claim.
    NotAnswered {
        /// Which.
        side: Side,
    },
    /// The agent that would carry it out is still learning, or its journal is unreadable.
    NotReady {
        /// Which.
        side: Side,
    },
    /// The receiver may hold the only whole guest: it needs the source's word that its QEMU lives.
    SourceMayBeLost,
    /// The source's guest runs: it must not be killed.
    SourceRuns,
    /// The destination has not said that it has everything.
    DestinationIncomplete,
}

/// Says whether `effect` may leave now, by what both sides answered.
///
/// # Errors
///
/// Says what it has to wait for.
pub fn permit(_migration: &Migration, _effect: &Effect, _sides: &Sides) -> Result<(), Withheld> {
    Ok(())
}
