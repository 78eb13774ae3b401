//! What the planner decides, without doing any of it.
//!
//! [`migration`] is the durable state machine of one migration, [`evidence`] reads what the two
//! agents say into its events, [`placement`] says where a VM should go by the figures of
//! [`capacity`], [`maintenance`] plans how a host is emptied, and [`stuck`] names what an
//! unfinished migration waits for.
//!
//! With the feature `serde`, everything a store keeps can be serialised: ids as text, counters and
//! quantities as numbers, enums by their snake-case names.
//!
//! **Invariant:** no IO, clock, randomness, thread or environment. Time comes in as an argument.

#![warn(missing_docs)]

pub mod evidence;
pub mod migration;
#[cfg(feature = "serde")]
mod record;
