//! How far a job is, in figures.

use std::collections::BTreeSet;

use vmferry_types::{Bytes, BytesPerSec, MigrationId, Millis, Timestamp};

use super::{Job, MoveState};

/// What is known of the job's migrations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Crossed {
    /// By the job's open and ended migrations together.
    pub bytes: Bytes,
    /// How fast it crosses now, all together. Zero if nothing does.
    pub rate: BytesPerSec,
    /// Those that wait in the queue: nothing of them is on its way.
    pub queued: BTreeSet<MigrationId>,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// VMs of the job.
    pub total: u32,
    /// VMs that have left.
    pub moved: u32,
    /// VMs on their way.
    pub running: u32,
    /// VMs whose turn has not come, or that wait for room.
    pub waiting: u32,
    /// VMs that did not move.
    pub failed: u32,
    /// Memory that has crossed.
    pub bytes: Bytes,
    /// Memory of all VMs of the job.
    pub bytes_total: Bytes,
    /// How fast it crosses now.
    pub rate: BytesPerSec,
    /// How long it will still take at this rate. `None` while nothing crosses.
    pub remaining: Option<Millis>,
    /// How long it has taken.
    pub elapsed: Millis,
}

/// Returns how far a job is. Of VMs that have not left, what was sent may have to be sent again: the
/// estimate takes all of their memory.
#[must_use]
pub fn progress(job: &Job, crossed: &Crossed, now: Timestamp) -> Progress {
    let mut progress = Progress {
        bytes: crossed.bytes,
        rate: crossed.rate,
        elapsed: now.since(job.opened),
        ..Progress::default()
    };
    let mut left = Bytes::ZERO;
    for one in &job.moves {
        progress.total += 1;
        progress.bytes_total = progress.bytes_total.plus(one.demand.memory);
        match one.state {
            MoveState::Waiting => progress.waiting += 1,
            MoveState::Begun { migration } if crossed.queued.contains(&migration) => {
                progress.waiting += 1;
            }
            MoveState::Begun { .. } | MoveState::Cancelling { .. } => progress.running += 1,
            MoveState::Moved { .. } | MoveState::Left { .. } => progress.moved += 1,
            MoveState::Failed { .. } | MoveState::Cancelled { .. } | MoveState::NotBegun => {
                progress.failed += 1;
            }
        }
        match one.state {
            MoveState::Waiting | MoveState::Begun { .. } => left = left.plus(one.demand.memory),
            MoveState::Cancelling { .. }
            | MoveState::Moved { .. }
            | MoveState::Left { .. }
            | MoveState::Failed { .. }
            | MoveState::Cancelled { .. }
            | MoveState::NotBegun => {}
        }
    }
    progress.remaining = match crossed.rate.value() {
        0 => None,
        rate => {
            let ms = u128::from(left.value()) * 1_000 / u128::from(rate);
            Some(Millis(u64::try_from(ms).unwrap_or(u64::MAX)))
        }
    };
    progress
}
