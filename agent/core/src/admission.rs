//! Whether an admission is open by the journal's own word.

use vmferry_types::MigrationId;

use crate::journal::{Issue, Order, Part, VmRecord};

impl VmRecord {
    /// Returns the admission that is not known to have ended: a receiver that waits, a transfer
    /// that was begun and neither refused nor taken back, an order that is not settled, or a claim
    /// that was taken and not used.
    ///
    /// While there is one, nobody else may begin another without asking whoever began it.
    #[must_use]
    pub fn open_admission(&self) -> Option<MigrationId> {
        let begun = match &self.part {
            Part::Receiver { incoming, .. } => Some(incoming.migration),
            Part::Running { held: Some(hold), .. } => Some(hold.migration),
            Part::Running { held: None, outgoing, leaving: Some(leaving), .. }
                if outgoing.as_ref().is_none_or(|sent| sent.migration != *leaving) =>
            {
                Some(*leaving)
            }
            Part::Running { held: None, outgoing: Some(sent), .. } => {
                match (&sent.order, sent.issue) {
                    (Order::Handed, _) | (Order::Open, Issue::Intended | Issue::Accepted) => {
                        Some(sent.migration)
                    }
                    (Order::Open, Issue::Refused)
                    | (Order::GaveUp { .. } | Order::TakenBack { .. }, _) => None,
                }
            }
            Part::Running { held: None, outgoing: None, .. } | Part::Absent => None,
            Part::Stopped { brought_by, .. } => *brought_by,
        };
        begun.or_else(|| self.unused_claim())
    }

    /// Returns the admission that took the claim and has not commanded anything yet, unless this
    /// record already shows its end.
    fn unused_claim(&self) -> Option<MigrationId> {
        let migration = self.fence.migration.filter(|_| self.fence.last.is_none())?;
        let taken_back = self.sent().is_some_and(|sent| sent.migration == migration);
        let arrived = self.process().is_some_and(|process| process.admission == migration);
        let ended = self.ended.as_ref().is_some_and(|ended| ended.migration == Some(migration));
        (!taken_back && !arrived && !ended).then_some(migration)
    }
}

#[cfg(test)]
mod tests {
    use vmferry_types::{Claim, Generation, VmId};

    use super::*;
    use crate::capabilities::Carries;
    use crate::journal::{
        Continued, Defined, Ended, Gone, GoneKind, Incoming, Outgoing, Parting, Process,
    };

    const ONE: MigrationId = MigrationId::from_u128(1);
    const TWO: MigrationId = MigrationId::from_u128(2);

    fn claimed(migration: MigrationId) -> VmRecord {
        let mut record = VmRecord::new(VmId::from_u128(9));
        record.fence.claim(migration, Generation::from_stored(1), Claim::FIRST);
        record
    }

    fn defined() -> Defined {
        Defined { text: String::new(), resolved_machine: String::new() }
    }

    fn process(admission: MigrationId) -> Process {
        Process {
            dir: "/run/vmferry/x".to_owned(),
            boot_id: "b".to_owned(),
            identity: None,
            taps: Vec::new(),
            generation: Generation::from_stored(1),
            admission,
            announced_ms: 0,
        }
    }

    fn sending(order: Order, issue: Issue) -> VmRecord {
        let outgoing = Some(Outgoing {
            migration: TWO,
            before: Box::default(),
            issue,
            timeout_ms: 0,
            stall_ms: 0,
            downtime_ms: 0,
            tuned: crate::tuning::Tuned::default(),
            carries: Carries::Whole,
            parting: Parting::No,
            order,
        });
        let part = Part::Running {
            defined: defined(),
            process: process(ONE),
            outgoing,
            held: None,
            leaving: None,
        };
        VmRecord { part, ..claimed(TWO) }
    }

    #[test]
    fn a_vm_that_runs_by_the_admission_that_claimed_it_has_none_open() {
        let part = Part::Running {
            defined: defined(),
            process: process(ONE),
            outgoing: None,
            held: None,
            leaving: None,
        };
        assert_eq!(VmRecord { part: part.clone(), ..claimed(ONE) }.open_admission(), None);
        assert_eq!(VmRecord { part, ..claimed(TWO) }.open_admission(), Some(TWO));
    }

    #[test]
    fn a_transfer_is_open_until_it_is_refused_or_taken_back() {
        let cause = || "asked".to_owned();
        for (order, issue, open) in [
            (Order::Open, Issue::Intended, Some(TWO)),
            (Order::Open, Issue::Accepted, Some(TWO)),
            (Order::Open, Issue::Refused, None),
            (Order::Handed, Issue::Accepted, Some(TWO)),
            (Order::GaveUp { cause: cause() }, Issue::Accepted, None),
            (Order::TakenBack { cause: cause() }, Issue::Accepted, None),
        ] {
            assert_eq!(sending(order.clone(), issue).open_admission(), open, "{order:?} {issue:?}");
        }
    }

    #[test]
    fn a_receiver_is_open_and_what_is_left_of_it_is_not() {
        let incoming = Incoming {
            migration: TWO,
            port: None,
            arrives: crate::journal::Arrival::Streamed,
            carries: Carries::Whole,
            cont: Continued::Never,
        };
        let part = Part::Receiver { defined: defined(), process: process(TWO), incoming };
        let mut record = VmRecord { part, ..claimed(TWO) };
        assert_eq!(record.open_admission(), Some(TWO));
        let gone = Gone {
            kind: GoneKind::ExitRecord,
            identity: None,
            boot_id: String::new(),
            ended: String::new(),
            at_ms: 0,
            stderr_tail: String::new(),
        };
        record.part = Part::Absent;
        record.ended = Some(Ended { migration: Some(TWO), gone, cont: Continued::Never });
        assert_eq!(record.open_admission(), None);
    }

    #[test]
    fn what_the_planner_only_told_of_is_no_admission() {
        assert_eq!(VmRecord::new(VmId::from_u128(9)).open_admission(), None);
        assert_eq!(claimed(ONE).open_admission(), Some(ONE));
    }
}
