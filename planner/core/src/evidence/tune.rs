//! What keeps a running transfer as its row wants it (rule R7).
//!
//! A function of what the source says that it was told, not of the row's history: limits that changed
//! while nobody drove, or whose command was lost, are told by whoever drives next.

use super::{Handed, Knowledge, Seen, Sides, TransferState};
use crate::migration::{Effect, Migration, Phase, Stage, Switchover};

/// Returns what the source is to be told of its transfer, if that differs from what it was told.
#[must_use]
pub fn tune(migration: &Migration, sides: &Sides) -> Option<Effect> {
    let crosses = match &migration.phase {
        Phase::Admitted { stage: Stage::Transferring { .. }, .. }
        | Phase::Captured { switchover: Switchover::Held { .. }, .. } => true,
        Phase::Admitted {
            stage:
                Stage::Arming
                | Stage::Waiting { .. }
                | Stage::Parting { .. }
                | Stage::Recalling { .. }
                | Stage::Clearing { .. }
                | Stage::ShuttingDown
                | Stage::Holding { .. },
            ..
        }
        | Phase::Captured {
            switchover:
                Switchover::Withheld
                | Switchover::Down { .. }
                | Switchover::Ordered
                | Switchover::Forward,
            ..
        }
        | Phase::Queued { .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => false,
    };
    let source = sides.source.as_ref().filter(|seen| crosses && sends(migration, sides, seen))?;
    // An agent of an older release does not say it, and does not know the command either.
    let told = source.tuning?;
    let wanted = migration.tuning();
    (told != wanted).then_some(Effect::SetLimits { tuning: wanted })
}

fn sends(migration: &Migration, sides: &Sides, seen: &Seen) -> bool {
    seen.claim == sides.claim
        && seen.knowledge == Knowledge::Known
        && seen.gone.is_none()
        && seen.gave_up.is_none()
        && seen.handed == Handed::No
        && seen.migration == Some(migration.id)
        && matches!(seen.transfer, TransferState::Setup | TransferState::Active)
}

#[cfg(test)]
mod tests {
    use vmferry_types::Millis;

    use super::*;
    use crate::migration::{AutoConverge, Tuning, rows};

    #[test]
    fn a_source_is_told_what_it_was_not_told() {
        let row = rows::transferring();
        let said = |tuning| Seen { tuning, ..rows::source_seen() };
        let sides = |seen| rows::sides(seen, rows::destination_seen());
        assert_eq!(tune(&row, &sides(said(Some(row.tuning())))), None);
        assert_eq!(tune(&row, &sides(said(None))), None, "an older agent");
        let other = Tuning { downtime_limit: Millis(7), ..row.tuning() };
        let wanted = Some(Effect::SetLimits { tuning: row.tuning() });
        assert_eq!(tune(&row, &sides(said(Some(other)))), wanted);
        let throttled = Tuning { throttle: AutoConverge::On, ..row.tuning() };
        assert_eq!(tune(&row, &sides(said(Some(throttled)))), wanted);
        let ordered = Seen { handed: Handed::Yes, ..said(Some(other)) };
        assert_eq!(tune(&row, &sides(ordered)), None);
        let stands = Seen { transfer: TransferState::PreSwitchover, ..said(Some(other)) };
        assert_eq!(tune(&row, &sides(stands)), None);
    }
}
