//! What an unfinished migration waits for, said by name (rule R9).
//!
//! A stuck migration keeps its reservation and harms no other. It is never given up silently: it
//! shows why, for what and since when, until the world answers or a human does.

use vmferry_types::{Millis, Timestamp};

use crate::evidence::{Sides, Times, Withheld, permit};
use crate::migration::{
    Back, Channel, Cleanup, Effect, Gate, Migration, Phase, Serves, Stage, Switchover,
};

/// How long a step between two agents may take before it is called stuck.
///
/// A whole move of a small guest takes a tenth of a second, and an agent that restarts is back in
/// seconds: past half a minute someone should look.
const PATIENCE: Millis = Millis(30_000);

/// What last went wrong while the migration was driven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The real error text.
    pub text: String,
    /// Since when it goes wrong.
    pub since: Timestamp,
}

/// Why a migration does not get on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Why, in the words of what went wrong.
    pub cause: String,
    /// What would let it go on.
    pub waits_for: String,
    /// For how long.
    pub age: Millis,
}

/// Says whether, and why, the migration is stuck. A terminal one that owes nothing never is, nor
/// is one in the queue, which says for itself since when it is blocked.
#[must_use]
pub fn stuck(
    migration: &Migration,
    sides: &Sides,
    times: Times,
    trouble: Option<&Trouble>,
) -> Option<Stuck> {
    let waits_for = waits_for(migration, sides)?;
    let elapsed = times.now.since(times.entered);
    let troubled =
        trouble.map_or(Millis::ZERO, |trouble| times.now.since(trouble.since.max(times.entered)));
    let late = patience(migration, sides).is_some_and(|patience| elapsed > patience);
    if !late && troubled <= PATIENCE {
        return None;
    }
    let cause = match (trouble, migration.phase.cause()) {
        (Some(trouble), _) => trouble.text.clone(),
        (None, Some(cause)) => cause.to_string(),
        (None, None) => format!("{} took longer than expected", migration.label()),
    };
    Some(Stuck { cause, waits_for, age: if late { elapsed } else { troubled } })
}

/// How long the present step may take. `None` if it has no limit of its own: memory may cross for
/// as long as the transfer's time limit says.
fn patience(migration: &Migration, sides: &Sides) -> Option<Millis> {
    // It gives up by itself when this is over.
    if migration.waits_at().is_some() {
        return Some(migration.terms.gate_deadline);
    }
    match &migration.phase {
        Phase::Admitted { stage: Stage::Transferring { .. }, .. }
        | Phase::Captured { switchover: Switchover::Held { .. }, .. } => None,
        // Memory follows the guest for as long as that takes, unless its channel is broken.
        Phase::Attached { .. } if migration.is_served() => {
            let serves = Effect::ReleaseSource { serves: Serves::NoMore };
            let follows = permit(migration, &serves, sides) == Err(Withheld::PagesMissing);
            (!follows || migration.channel == Channel::Broken).then_some(PATIENCE)
        }
        Phase::Captured { switchover: Switchover::Ordered | Switchover::Forward, .. } => {
            Some(migration.terms.switchover_limit)
        }
        // So long the guest may take.
        Phase::Admitted { stage: Stage::ShuttingDown, .. } => {
            Some(migration.terms.shutdown_limit.plus(PATIENCE))
        }
        Phase::Queued { .. }
        | Phase::Admitted {
            stage:
                Stage::Arming
                | Stage::Waiting { .. }
                | Stage::Parting { .. }
                | Stage::Recalling { .. }
                | Stage::Clearing { .. }
                | Stage::Holding { .. },
            ..
        }
        | Phase::Captured { switchover: Switchover::Withheld | Switchover::Down { .. }, .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => Some(PATIENCE),
    }
}

/// Says what would let the migration go on. `None` if nothing is waited for, or room only.
#[must_use]
pub fn waits_for(migration: &Migration, sides: &Sides) -> Option<String> {
    if migration.channel == Channel::Broken && migration.may_be_divided() {
        return Some("a way between both halves of the guest, to mend their channel".to_owned());
    }
    let effect = migration.outstanding();
    if let Some(Err(withheld)) = effect.as_ref().map(|effect| permit(migration, effect, sides)) {
        return Some(withheld.to_string());
    }
    let words = match &migration.phase {
        Phase::Queued { .. } | Phase::Done { .. } | Phase::Aborted { .. } => return None,
        Phase::Admitted { stage: Stage::Arming, .. } => "the destination's receiver to listen",
        Phase::Admitted { stage: Stage::Waiting { .. }, .. } => {
            "an operator's word before anything is sent"
        }
        Phase::Admitted { stage: Stage::Transferring { .. }, .. } => {
            "the guest's memory to cross and the source to reach the switchover"
        }
        Phase::Admitted { stage: Stage::Parting { .. }, .. } => {
            "the source to stop its guest and to reach the switchover"
        }
        Phase::Admitted { stage: Stage::Recalling { .. }, .. } => {
            "the source to take its transfer back and run on"
        }
        Phase::Admitted { stage: Stage::Clearing { .. }, .. } => "proof that the receiver is gone",
        Phase::Admitted { stage: Stage::Holding { .. }, .. } => {
            "the source's guest to be held still"
        }
        Phase::Admitted { stage: Stage::ShuttingDown, .. } => "the source's guest to power off",
        Phase::Captured { switchover: Switchover::Down { .. }, .. } => {
            "the destination's QEMU to stand still with the disks locked"
        }
        Phase::Captured { switchover: Switchover::Held { .. }, .. } => {
            "the held guest's memory to cross"
        }
        Phase::Captured { switchover: Switchover::Withheld, .. } => {
            "an operator's word before the switchover"
        }
        Phase::Captured { switchover: Switchover::Ordered, .. } => {
            "both QEMUs to say that all has arrived, or one to be proven gone"
        }
        Phase::Captured { switchover: Switchover::Forward, .. } => {
            "proof that the source's QEMU is gone"
        }
        Phase::Restored { .. } => match migration.terms.gates.commit {
            Gate::Open => "ownership to be moved in the store",
            Gate::Closed => "an operator's word before ownership moves",
        },
        Phase::Committed { .. } => "the guest to be seen running on the destination",
        Phase::Attached { .. } => "proof that the source's QEMU is gone",
        Phase::RollingBack { back, .. } => match back {
            Back::Cancelling => "the source to take its transfer back and run on",
            Back::Clearing | Back::Undoing | Back::PoweredOff => "proof that the receiver is gone",
            Back::Resuming { .. } => "the guest to be seen running on the source",
        },
        Phase::Failed { cleanup, .. } => match cleanup {
            Cleanup::Nothing => return None,
            Cleanup::Receiver => "proof that the receiver is gone",
            Cleanup::Half => "proof that the destination's QEMU is gone",
            Cleanup::Source => "proof that the source's QEMU is gone",
            Cleanup::Undecided => "a human to say which side's guest is the right one",
        },
    };
    Some(words.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::rows::{self, CLAIM, LATE, SOON};

    const NOBODY: Sides = Sides { claim: CLAIM, source: None, destination: None };

    #[test]
    fn a_step_within_its_time_is_not_stuck() {
        for (name, row) in rows::all() {
            assert_eq!(stuck(&row, &NOBODY, SOON, None), None, "{name}");
        }
    }

    #[test]
    fn every_row_that_owes_something_is_stuck_in_time_with_what_it_waits_for() {
        for (name, row) in rows::all() {
            let stuck = stuck(&row, &NOBODY, LATE, None);
            let free = [
                "queued",
                "transferring",
                "transferring +",
                "transferring p",
                "held",
                "done",
                "aborted",
                "failed",
            ];
            let free = free.contains(&name);
            assert_eq!(stuck.is_none(), free, "{name}: {stuck:?}");
            if let Some(stuck) = stuck {
                assert_eq!(stuck.age, Millis(39_100), "{name}");
                assert!(!stuck.waits_for.is_empty() && !stuck.cause.is_empty(), "{name}");
            }
        }
    }

    #[test]
    fn the_agent_that_does_not_answer_is_named_with_the_real_error() {
        let row = rows::committed(rows::handover());
        let trouble = Trouble { text: "connect to 10.0.0.2: refused".into(), since: LATE.entered };
        let stuck = stuck(&row, &NOBODY, LATE, Some(&trouble)).unwrap();
        assert_eq!(stuck.waits_for, "the destination agent to answer");
        assert_eq!(stuck.cause, "connect to 10.0.0.2: refused");
    }

    #[test]
    fn a_transfer_is_stuck_only_once_trouble_lasts() {
        let row = rows::transferring();
        assert_eq!(stuck(&row, &NOBODY, LATE, None), None);
        let trouble = |since| Trouble { text: "no route".into(), since: Timestamp(since) };
        assert_eq!(stuck(&row, &NOBODY, LATE, Some(&trouble(20_000))), None);
        let stuck = stuck(&row, &NOBODY, LATE, Some(&trouble(5_000))).unwrap();
        assert_eq!(stuck.age, Millis(35_000));
    }

    #[test]
    fn a_way_back_says_why_it_was_taken() {
        let row = rows::rolling_back(Back::Undoing);
        let stuck = stuck(&row, &NOBODY, LATE, None).unwrap();
        assert_eq!(stuck.cause, "cancelled as asked");
    }
}
