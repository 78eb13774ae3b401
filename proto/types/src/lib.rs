//! The words that every part of vmferry shares.
//!
//! Identity, ownership, units and the labels of states: what code, wire, SQL, CLI, logs and docs
//! must call by the same name. Plain values without IO, clock or randomness.
//!
//! **Invariant:** this crate depends on `std` alone.

#![warn(missing_docs)]

pub mod fence;
pub mod id;
pub mod overhead;
pub mod ownership;
pub mod spread;
pub mod state;
pub mod units;

pub use fence::{Fence, FenceRefusal};
pub use id::{DrainId, HostId, InvalidId, JobId, MigrationId, RequestId, VmId};
pub use ownership::{Claim, Generation, Seq, Step};
pub use spread::spread;
pub use state::{Method, MigrationType, PhaseLabel, PowerState, Role, UserState};
pub use units::{Bytes, BytesPerSec, MilliCpu, Millis, Percent, Timestamp};
