//! The planner as its users and its agents see it: real store, real edges, fake agents.

mod bench;
mod crashes;
mod fleet;
mod migrations;
mod rest;
mod world;
