//! Moves of a guest between two agents, driven over gRPC as a planner does.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends where something is not as it must be"
)]

mod accounting;
mod back;
mod cold;
mod fence;
mod forward;
mod held;
mod left;
mod leftovers;
mod limits;
mod outlived;
mod planner;
mod planners;
mod postcopy;
mod power;
mod refusals;
mod restarts;
mod rom;
mod tls;
mod world;
