//! driver
pub mod side;
