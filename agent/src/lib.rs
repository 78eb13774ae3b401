//! The agent of one host: it owns the host's QEMU processes.

pub mod monitor;
pub mod process;
pub mod shim;
