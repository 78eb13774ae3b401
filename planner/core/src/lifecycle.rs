//! How a host is emptied, and what it is to everyone else meanwhile.
//!
//! A [`cordon`] is someone's word that a host takes no placements. A maintenance [`job`] empties a
//! host once, by a plan: it stops at the first failure. A [`drain`] empties it for as long as it
//! stands, by planning again and again; a retirement is a drain that ends in a grant. [`request`]
//! says which of them may be asked of a host now.
//!
//! Both machines are values, as a migration is: `apply` returns the next row, `outstanding` what it
//! owes, `books` what the store holds beside it, and `read` turns what was seen into events. A
//! planner that restarts goes on by loading the row.
//!
//! **Invariant I6:** a host enters maintenance, or is granted retirement, only while its own agent
//! says that it is empty ([`emptiness`]).

pub mod cordon;
pub mod drain;
pub mod emptiness;
mod emptying;
pub mod job;
mod policy;
pub mod request;

pub use emptying::{Emptying, EmptyingEvent, EmptyingId, Kind, StillThere};
pub use policy::{Ended, Policy, REASONS_MAX, Refusal, Unplaced};
