//! What the planner decides, without doing any of it.
//!
//! [`migration`] is the durable state machine of one migration, [`evidence`] reads what the two
//! agents say into its events, [`stuck`] names what an unfinished one waits for and [`progress`] how
//! far it is. [`placement`] says where a VM should go by the figures of [`capacity`] over a
//! [`fleet`], [`maintenance`] where all VMs of one host would go, and [`headroom`] what is left. [`lifecycle`] says what
//! becomes of a host meanwhile: cordons, maintenance jobs, drains and retirements, and [`queue`] who
//! waits for what. [`doctor`] holds what every host says against the store.
//!
//! With the feature `serde`, everything a store keeps can be serialised: ids as text, counters and
//! quantities as numbers, enums by their snake-case names.
//!
//! **Invariant:** no IO, clock, randomness, thread or environment. Time comes in as an argument.

#![warn(missing_docs)]

pub mod capacity;
pub mod doctor;
pub mod evidence;
pub mod fleet;
pub mod headroom;
pub mod lifecycle;
pub mod maintenance;
pub mod migration;
pub mod placement;
pub mod progress;
pub mod queue;
#[cfg(feature = "serde")]
mod record;
pub mod stuck;
