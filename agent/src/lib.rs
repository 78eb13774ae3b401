//! The agent of one host: it owns the host's QEMU processes.
//!
//! ```text
//! server ──► vm (one lane a VM: one command at a time) ──► actions/* ──► process, monitor, network
//!   │         │                                              │
//!   │         └── journal (on the disk before anything is done)
//!   └──► observe ◄── observer (one task a process: events and figures) ◄── monitor
//! ```
//!
//! **Invariant:** nothing that starts, runs, stops or ends a guest happens before the journal says
//! so. **Invariant:** a QEMU process that the agent did not start is never touched.

mod accounting;
mod actions;
pub mod agent;
mod check;
pub mod clock;
pub mod config;
mod describe;
mod disks;
mod error;
mod faults;
mod footprint;
mod host;
mod idle;
mod journal;
mod lane;
mod learning;
mod live;
mod metrics;
pub mod monitor;
mod network;
mod observe;
mod observer;
mod orphans;
mod ownership;
mod probe;
pub mod process;
mod report;
mod reporter;
mod seed;
mod server;
pub mod shim;
pub mod shutdown;
pub mod telemetry;
mod told;
mod vm;
mod watch;
mod wire;
mod wiring;
