//! The words between a driver of migrations and its agents.
//!
//! A driver decides by `planner-core`: it reads what agents say as evidence ([`seen`]), and says what is
//! owed as commands ([`command`]). The planner is one driver, `vmferry runtime migrate` another.

pub mod command;
pub mod refused;
pub mod seen;
