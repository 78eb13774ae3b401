//! The central planner: decides where a VM goes, writes every move down before it acts, and drives
//! each one to its end over crashes of any part.
//!
//! ```text
//! grpc, rest ─► api ─► admission ─► store ◄─ driver ─► agents
//!                 inventory ▲  reconciler ─────▲
//! ```
//!
//! **Invariant:** only [`store`] knows SQL. **Invariant:** no command leaves for an agent before
//! the row that it follows from is committed.

#![warn(missing_docs)]

pub mod admission;
pub mod agents;
pub mod api;
pub mod clock;
pub mod config;
pub mod definition;
pub mod driver;
pub mod faults;
pub mod fence;
pub mod grpc;
pub mod inventory;
pub mod live;
pub mod metrics;
pub mod picture;
pub mod plan;
pub mod planner;
pub mod queue;
pub mod reconciler;
pub mod rest;
pub mod security;
pub mod server;
mod sharing;
pub mod shutdown;
pub mod store;
mod sweep;
pub mod telemetry;
pub mod view;
pub mod whereabouts;
