//! A small world with accidents in it: what the state machine and the reading of evidence are for.

mod any_schedule;
mod cold;
mod deaths;
mod held;
mod model;
mod planner;
