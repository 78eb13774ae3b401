//! A seeded world to run the planner in.
//!
//! The real driver, reconciler, inventory and state machine run under tokio's paused clock against
//! simulated agents over simulated QEMUs ([`schedule`]), a store in memory whose every call may be
//! a planner's last, and a network that loses, delays and doubles. The same seed gives the same
//! history; what must never happen is checked wherever it could.
//!
//! **Invariant:** no sockets, files or real time.

#![warn(missing_docs)]

mod agent;
pub mod bugs;
mod by_hand;
mod channel;
mod cluster;
pub mod dice;
mod emptying;
mod faults;
mod fence;
mod host;
mod invariants;
mod journal;
mod life;
mod mistakes;
mod network;
mod operator;
mod populate;
mod qemu;
pub mod schedule;
mod store;
pub mod trace;
pub mod weather;
pub mod world;

pub use store::in_fair_weather;
