//! What an agent decides, without doing any of it.
//!
//! VM definitions, QEMU command lines, the fence, the journal's records, and what a QEMU process
//! that sends or receives a guest is doing. The agent reads and writes the world around it.
//!
//! **Invariant:** nothing here does IO, reads a clock, or draws a random number; times come in as
//! arguments.

#![warn(missing_docs)]

pub mod admission;
pub mod argv;
pub mod capabilities;
pub mod compare;
pub mod convergence;
pub mod definition;
pub mod fence;
pub mod hold;
pub mod incoming;
pub mod journal;
pub mod outgoing;
pub mod ports;
pub mod tuning;
