//! What a receiver's QEMU is doing.

use vmferry_qmp::{MigrateInfo, MigrationStatus, RunState};

/// What a receiver's QEMU is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receiving {
    /// It waits for a source.
    Waiting,
    /// Memory arrives.
    Moving,
    /// It has everything, and the guest stands still.
    Complete,
    /// It has everything, or all but memory that follows, and the guest runs.
    Running,
    /// It has all but memory that follows, and the guest stands still.
    Divided,
    /// It failed and cannot be used again.
    Failed,
    /// Something that only a newer QEMU knows: nothing to be decided from.
    Other,
}

/// Says what a receiver's QEMU is doing.
///
/// Both figures must agree: `cont` on one that still waits would be taken, and silently make it
/// run by itself at the end.
#[must_use]
pub fn classify(run: &RunState, seen: &MigrateInfo) -> Receiving {
    let status = seen.status.as_ref().unwrap_or(&MigrationStatus::None);
    match status {
        MigrationStatus::None | MigrationStatus::Setup | MigrationStatus::WaitUnplug => {
            Receiving::Waiting
        }
        MigrationStatus::Active | MigrationStatus::PreSwitchover | MigrationStatus::Device => {
            Receiving::Moving
        }
        MigrationStatus::Completed if *run == RunState::Paused => Receiving::Complete,
        MigrationStatus::Completed if *run == RunState::Running => Receiving::Running,
        // The run state follows the status by a moment.
        MigrationStatus::Completed if *run == RunState::InMigrate => Receiving::Moving,
        MigrationStatus::Failed | MigrationStatus::Cancelled | MigrationStatus::Cancelling => {
            Receiving::Failed
        }
        MigrationStatus::PostcopyActive
        | MigrationStatus::PostcopyPaused
        | MigrationStatus::PostcopyRecoverSetup
        | MigrationStatus::PostcopyRecover => divided(run),
        MigrationStatus::Completed | MigrationStatus::Colo | MigrationStatus::Unknown(_) => {
            Receiving::Other
        }
    }
}

/// Says what a receiver is doing that is sent nothing: its guest is booted from its disks.
#[must_use]
pub fn from_disks(run: &RunState) -> Receiving {
    if *run == RunState::PreLaunch {
        return Receiving::Complete;
    }
    if *run == RunState::Running { Receiving::Running } else { Receiving::Other }
}

/// What a receiver does whose memory is still on its way.
fn divided(run: &RunState) -> Receiving {
    // Its devices are loaded by then.
    if *run == RunState::Paused {
        return Receiving::Divided;
    }
    if *run == RunState::Running {
        return Receiving::Running;
    }
    if *run == RunState::InMigrate { Receiving::Moving } else { Receiving::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(status: Option<MigrationStatus>) -> MigrateInfo {
        MigrateInfo { status, ..MigrateInfo::default() }
    }

    #[test]
    fn a_receiver_has_the_guest_only_if_status_and_run_state_agree() {
        use MigrationStatus as M;
        use RunState as R;
        let cases = [
            (None, R::InMigrate, Receiving::Waiting),
            (Some(M::Setup), R::InMigrate, Receiving::Waiting),
            (Some(M::Active), R::InMigrate, Receiving::Moving),
            (Some(M::Completed), R::InMigrate, Receiving::Moving),
            (Some(M::Completed), R::Paused, Receiving::Complete),
            (Some(M::Completed), R::Running, Receiving::Running),
            (Some(M::Completed), R::InternalError, Receiving::Other),
            (Some(M::Failed), R::InMigrate, Receiving::Failed),
            (Some(M::PostcopyActive), R::InMigrate, Receiving::Moving),
            (Some(M::PostcopyActive), R::Paused, Receiving::Divided),
            (Some(M::PostcopyPaused), R::Paused, Receiving::Divided),
            (Some(M::PostcopyActive), R::Running, Receiving::Running),
            (Some(M::PostcopyRecover), R::Running, Receiving::Running),
            (Some(M::PostcopyActive), R::InternalError, Receiving::Other),
        ];
        for (status, run, expected) in cases {
            assert_eq!(classify(&run, &seen(status.clone())), expected, "{status:?} {run}");
        }
    }
}
