//! How far a migration is, in the words of its users.

use vmferry_types::{Bytes, UserState};

use crate::migration::{Cause, Migration, Phase, Stage, Switchover};

/// What the source's QEMU says of a transfer's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossed {
    /// What is still to be sent in this pass. It rises again when the guest dirties memory.
    pub remaining: Bytes,
    /// All of the guest's memory; zero while QEMU has not said.
    pub total: Bytes,
}

/// Returns the migration's state for users.
#[must_use]
pub const fn user_state(phase: &Phase) -> UserState {
    match phase {
        Phase::Queued { .. } => UserState::Pending,
        Phase::Admitted {
            stage:
                Stage::Arming
                | Stage::Waiting { .. }
                | Stage::Recalling { .. }
                | Stage::Clearing { .. }
                | Stage::Holding { .. },
            ..
        } => UserState::Precheck,
        Phase::Admitted { stage: Stage::Transferring { .. } | Stage::Parting { .. }, .. }
        | Phase::Captured { switchover: Switchover::Held { .. }, .. }
        | Phase::Admitted { stage: Stage::ShuttingDown, .. } => UserState::Syncing,
        Phase::Captured {
            switchover:
                Switchover::Withheld
                | Switchover::Ordered
                | Switchover::Forward
                | Switchover::Down { .. },
            ..
        }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::RollingBack { .. } => UserState::Switching,
        Phase::Done { .. } => UserState::Completed,
        Phase::Aborted { cause: Cause::Cancelled, .. } => UserState::Cancelled,
        Phase::Aborted { .. } | Phase::Failed { .. } => UserState::Failed,
    }
}

/// Returns the progress in percent: 100 only when done, and 0 when the guest did not move.
///
/// Memory that is sent twice makes a transfer fall back; a display that must not keeps the
/// greatest it has shown.
#[must_use]
pub fn percent(migration: &Migration, crossed: Crossed) -> u8 {
    const TRANSFER_FROM: u64 = 5;
    const TRANSFER_SHARE: u64 = 85;
    match &migration.phase {
        Phase::Queued { .. } => 0,
        Phase::Admitted {
            stage: Stage::Arming | Stage::Recalling { .. } | Stage::Clearing { .. },
            ..
        } => 2,
        Phase::Admitted {
            stage: Stage::Waiting { .. } | Stage::Holding { .. } | Stage::ShuttingDown,
            ..
        } => 4,
        Phase::Admitted { stage: Stage::Transferring { .. } | Stage::Parting { .. }, .. }
        | Phase::Captured { switchover: Switchover::Held { .. }, .. } => {
            let total = u128::from(crossed.total.value().max(1));
            let sent = u128::from(crossed.total.less(crossed.remaining).value());
            let share = sent * u128::from(TRANSFER_SHARE) / total;
            let percent = u128::from(TRANSFER_FROM) + share;
            u8::try_from(percent).unwrap_or(u8::MAX).min(90)
        }
        Phase::Captured {
            switchover:
                Switchover::Withheld
                | Switchover::Ordered
                | Switchover::Forward
                | Switchover::Down { .. },
            ..
        } => 92,
        Phase::Restored { .. } => 95,
        Phase::Committed { .. } => 97,
        Phase::Attached { .. } => 99,
        Phase::Done { .. } => 100,
        Phase::RollingBack { .. } | Phase::Aborted { .. } | Phase::Failed { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::rows;

    #[test]
    fn a_transfer_is_between_its_neighbours() {
        for row in [rows::transferring(), rows::held()] {
            transfers(&row);
        }
    }

    fn transfers(row: &Migration) {
        for (remaining, expected) in [(100, 5), (50, 47), (0, 90), (200, 5)] {
            let crossed = Crossed { remaining: Bytes(remaining), total: Bytes(100) };
            assert_eq!(percent(row, crossed), expected, "{remaining} remain");
        }
        assert_eq!(percent(row, Crossed::default()), 5);
    }

    #[test]
    fn users_are_told_whether_an_end_was_asked_for() {
        assert_eq!(user_state(&rows::aborted(Cause::Cancelled).phase), UserState::Cancelled);
        assert_eq!(user_state(&rows::aborted(Cause::TransferTimedOut).phase), UserState::Failed);
        assert_eq!(user_state(&rows::done().phase), UserState::Completed);
        assert_eq!(user_state(&rows::transferring().phase), UserState::Syncing);
        assert_eq!(user_state(&rows::held().phase), UserState::Syncing);
        assert_eq!(user_state(&rows::arming().phase), UserState::Precheck);
        assert_eq!(user_state(&rows::queued().phase), UserState::Pending);
    }
}
