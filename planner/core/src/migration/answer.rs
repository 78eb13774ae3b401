//! What is answered to a precopy that will not converge, and limits that change while it runs.
//!
//! The source's agent judges, pass by pass; what follows from its verdict is decided here, from the
//! terms alone, and kept in the row with the verdict.

use vmferry_types::{BytesPerSec, Method, Millis};

use super::event::{Event, Stood};
use super::{AutoConverge, Migration, NotConverging, Phase, Stage, Switchover, Takes};

/// The limits of a transfer that may change while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Limits {
    /// Cap on the transfer; zero is none.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub max_bandwidth: BytesPerSec,
    /// How long QEMU may plan to let the guest stand still.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub downtime_limit: Millis,
}

/// How a transfer is tuned: what its source's QEMU is told, and says that it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Cap on the transfer; zero is none.
    pub max_bandwidth: BytesPerSec,
    /// How long QEMU may plan to let the guest stand still.
    pub downtime_limit: Millis,
    /// Whether QEMU slows the guest down.
    pub throttle: AutoConverge,
}

impl Migration {
    /// Returns how the transfer is to be tuned now, by the row.
    #[must_use]
    pub fn tuning(&self) -> Tuning {
        let throttled = self.terms.auto_converge == AutoConverge::On
            || self.answered == Some(NotConverging::AutoConverge);
        Tuning {
            max_bandwidth: self.terms.max_bandwidth,
            downtime_limit: self.terms.downtime_limit,
            throttle: if throttled && self.dirties() {
                AutoConverge::On
            } else {
                AutoConverge::Off
            },
        }
    }

    /// Says whether the guest runs while its memory crosses.
    const fn dirties(&self) -> bool {
        match self.method {
            Method::Precopy | Method::Postcopy => true,
            Method::Snapshot | Method::Cold | Method::DiskCopy => false,
        }
    }

    /// Says whether the limits can still change anything: the switchover is not ordered.
    #[must_use]
    pub const fn takes_limits(&self) -> bool {
        match &self.phase {
            Phase::Queued { .. } | Phase::Admitted { .. } => true,
            Phase::Captured { switchover, .. } => match switchover {
                Switchover::Held { .. } | Switchover::Withheld => true,
                Switchover::Down { .. } | Switchover::Ordered | Switchover::Forward => false,
            },
            Phase::Restored { .. }
            | Phase::Committed { .. }
            | Phase::Attached { .. }
            | Phase::Done { .. }
            | Phase::RollingBack { .. }
            | Phase::Aborted { .. }
            | Phase::Failed { .. } => false,
        }
    }

    /// Returns what is done about a precopy that will not converge.
    ///
    /// What was asked for comes first. What cannot be done, or was done in vain, becomes `abort`; and a
    /// move that may be downgraded is held instead of aborted. `pause` is a word of its own: it holds
    /// the guest whatever is said of downgrades, which are about all other refusals.
    #[must_use]
    pub fn answer(&self) -> NotConverging {
        let postcopy = matches!(
            &self.phase,
            Phase::Admitted { stage: Stage::Transferring { listener }, .. }
                if listener.takes != Takes::Precopy
        );
        let aborts = if self.terms.downgrade.may_hold() {
            NotConverging::Pause
        } else {
            NotConverging::Abort
        };
        match self.terms.not_converging {
            NotConverging::Wait => NotConverging::Wait,
            NotConverging::Pause => NotConverging::Pause,
            NotConverging::Postcopy if postcopy => NotConverging::Postcopy,
            // It is throttled already, all it may be: the verdict came all the same.
            NotConverging::AutoConverge if self.tuning().throttle == AutoConverge::Off => {
                NotConverging::AutoConverge
            }
            NotConverging::Abort | NotConverging::Postcopy | NotConverging::AutoConverge => aborts,
        }
    }

    /// Notes what `event` says of convergence and of limits, beside the phase.
    pub(super) fn answers(self, before: &Self, event: &Event) -> Self {
        if let Event::LimitsSet { limits } = event {
            return self.with_limits(*limits);
        }
        if let Event::Diverges { verdict } = event {
            let answered = Some(before.answer());
            return Self { diverged: Some(verdict.clone()), answered, ..self };
        }
        if matches!(event, Event::PostcopyDue { verdict: Some(_) }) {
            return Self { answered: Some(NotConverging::Postcopy), ..self };
        }
        self
    }

    fn with_limits(mut self, limits: Limits) -> Self {
        self.terms.max_bandwidth = limits.max_bandwidth;
        self.terms.downtime_limit = limits.downtime_limit;
        self
    }

    /// Says whether a transfer that will not converge goes on with its guest held.
    pub(super) fn holds_instead(&self) -> bool {
        self.answer() == NotConverging::Pause && (self.may_hold_instead(Stood::No) || self.pauses())
    }

    fn pauses(&self) -> bool {
        self.method == Method::Precopy && self.terms.not_converging == NotConverging::Pause
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;
    use crate::migration::Downgrade;
    use crate::migration::{Cause, Effect, Refusal};

    const VERDICT: &str = "will not converge: dirties 900 MB/s over a 300 MB/s link";

    fn asked(answer: NotConverging, downgrade: Downgrade, takes: Takes) -> Migration {
        let mut row = rows::transferring();
        row.terms.not_converging = answer;
        row.terms.downgrade = downgrade;
        if let Phase::Admitted { stage: Stage::Transferring { listener }, .. } = &mut row.phase {
            listener.takes = takes;
        }
        row
    }

    fn diverges() -> Event {
        Event::Diverges { verdict: VERDICT.to_owned() }
    }

    #[test]
    fn the_answer_follows_from_the_terms() {
        use Downgrade::{Never, Snapshot};
        use NotConverging::{Abort, AutoConverge, Pause, Postcopy, Wait};
        use Takes::{Precopy, Preempt};
        for (answer, downgrade, takes, expected) in [
            (Wait, Never, Precopy, Wait),
            (Wait, Snapshot, Preempt, Wait),
            (Abort, Never, Preempt, Abort),
            (Abort, Snapshot, Precopy, Pause),
            (Pause, Never, Precopy, Pause),
            (Pause, Snapshot, Precopy, Pause),
            (AutoConverge, Never, Precopy, AutoConverge),
            (AutoConverge, Snapshot, Precopy, AutoConverge),
            (Postcopy, Never, Preempt, Postcopy),
            (Postcopy, Snapshot, Takes::Postcopy, Postcopy),
            (Postcopy, Never, Precopy, Abort),
            (Postcopy, Snapshot, Precopy, Pause),
        ] {
            let row = asked(answer, downgrade, takes);
            assert_eq!(row.answer(), expected, "{answer:?}, {downgrade:?}, {takes:?}");
        }
    }

    #[test]
    fn a_guest_that_is_throttled_in_vain_is_not_throttled_again() {
        for (downgrade, expected) in
            [(Downgrade::Never, NotConverging::Abort), (Downgrade::Snapshot, NotConverging::Pause)]
        {
            let row = asked(NotConverging::AutoConverge, downgrade, Takes::Precopy);
            let throttled = row.apply(&diverges()).unwrap();
            assert_eq!(throttled.phase, row.phase);
            assert_eq!(throttled.tuning().throttle, AutoConverge::On);
            assert_eq!(throttled.answered, Some(NotConverging::AutoConverge));
            let over = throttled.apply(&diverges()).unwrap();
            assert_eq!(over.answered, Some(expected));
            // From the beginning on is no different.
            let mut always = row.clone();
            always.terms.auto_converge = AutoConverge::On;
            assert_eq!(always.answer(), expected);
        }
    }

    #[test]
    fn what_will_not_converge_is_taken_back_or_held_with_its_cause() {
        let aborted = asked(NotConverging::Abort, Downgrade::Never, Takes::Precopy)
            .apply(&diverges())
            .unwrap();
        let cause = aborted.phase.cause().unwrap();
        assert_eq!(*cause, Cause::NotConverging { verdict: VERDICT.to_owned() });
        assert_eq!(aborted.diverged.as_deref(), Some(VERDICT));
        let held = asked(NotConverging::Pause, Downgrade::Never, Takes::Precopy)
            .apply(&diverges())
            .unwrap();
        assert!(matches!(held.outstanding(), Some(Effect::CancelTransfer { .. })));
        assert_eq!(held.answered, Some(NotConverging::Pause));
        let waits = asked(NotConverging::Wait, Downgrade::Snapshot, Takes::Precopy);
        assert_eq!(waits.apply(&diverges()), Err(Refusal::Stale));
    }

    #[test]
    fn limits_change_until_the_order() {
        let limits = Limits { max_bandwidth: BytesPerSec(9), downtime_limit: Millis(700) };
        let row = rows::transferring();
        let set = row.apply(&Event::LimitsSet { limits }).unwrap();
        assert_eq!(set.phase, row.phase);
        assert_eq!(set.tuning().downtime_limit, Millis(700));
        assert_eq!(set.tuning().max_bandwidth, BytesPerSec(9));
        for (name, row) in rows::all() {
            let expected = if row.takes_limits() { None } else { Some(Refusal::TooLate) };
            assert_eq!(row.apply(&Event::LimitsSet { limits }).err(), expected, "{name}");
        }
    }
}
