//! Real planner processes against thousands of simulated VMs, disturbed.
//!
//! The hosts, their agents and their QEMU processes are simulated in one process, in real time, over
//! gRPC on loopback; the planners are the built binary, killed or stopped and continued while they
//! drive. What a planner does wrong shows at the simulated hosts at once, or in the store at the end.

pub mod admission;
pub mod agent;
pub mod binaries;
pub mod caller;
pub mod checks;
pub mod console;
pub mod database;
pub mod dice;
pub mod disturbance;
pub mod fleet;
pub mod process;
pub mod summary;
pub mod trial;

mod channel;
mod journal;
mod qemu;
mod rest;
