//! The end-to-end lane: built binaries, real QEMU, hosts as network namespaces.
//!
//! A case gets a [`cluster::Cluster`] of fresh agents and a fresh planner on the
//! machines of a [`lab::Lab`], starts test guests that notice what a move loses,
//! moves them, and disturbs that. After every case the same invariants are
//! checked, on the machines themselves where that can be done.

pub mod accel;
pub mod bench;
pub mod cases;
pub mod client;
pub mod cluster;
pub mod daemon;
pub mod demo;
pub mod disk;
pub mod faults;
pub mod guest;
pub mod host;
pub mod hostile;
pub mod lab;
pub mod matrix;
pub mod monitor;
pub mod pinger;
pub mod pki;
pub mod planners;
pub mod proof;
pub mod rest;
pub mod runner;
pub mod selftest;
pub mod serial;
pub mod story;
pub mod ticks;
pub mod wait;
pub mod whereabouts;
