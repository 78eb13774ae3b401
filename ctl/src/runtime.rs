//! Moves without a planner: straight to the agents of two hosts.

pub(crate) mod agent;
pub(crate) mod journal;
pub(crate) mod run;
