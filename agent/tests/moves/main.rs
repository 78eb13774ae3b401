//! Moves of a guest between two agents, driven over gRPC as a planner does.

mod back;
mod fence;
mod forward;
mod power;
mod world;
