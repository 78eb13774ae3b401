//! A guest that stands still on purpose, durably (rule R4).
//!
//! A hold is written down before QEMU hears it and stays in the record until all that it switched
//! off is seen to be on again: so a new start of the agent finds it, keeps it, and knows what to
//! re-arm.

use serde::{Deserialize, Serialize};
use vmferry_types::MigrationId;

use crate::capabilities::Carries;
use crate::journal::{Issue, Order, Outgoing, Part, Parting, VmRecord, as_id};
use crate::tuning::Tuned;

/// A guest that stands still on purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The migration that holds it.
    #[serde(with = "as_id")]
    pub migration: MigrationId,
    /// What was switched off, in that order.
    pub switched_off: Vec<SwitchedOff>,
    /// Whether it is to stay so.
    pub holding: Holding,
}

/// One thing that a hold switches off.
///
/// The vCPUs are all there is: no timer, watchdog or restart policy of this agent acts on a guest
/// that stands still, and a transfer's throttle is set anew by each transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchedOff {
    /// The guest's vCPUs, by `stop`; `cont` re-arms them.
    Vcpus,
}

impl SwitchedOff {
    /// Everything that a hold switches off.
    pub const ALL: [Self; 1] = [Self::Vcpus];

    /// Returns the one spelling of this thing.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Vcpus => "vcpus",
        }
    }
}

/// Whether a hold is to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holding {
    /// The guest stands still until somebody commands otherwise.
    Kept,
    /// It was decided that the guest goes on; not all is on again.
    LettingGo,
}

impl VmRecord {
    /// Returns what holds the guest, whichever migration that is.
    #[must_use]
    pub const fn hold(&self) -> Option<&Hold> {
        match &self.part {
            Part::Running { held, .. } => held.as_ref(),
            Part::Absent | Part::Stopped { .. } | Part::Receiver { .. } => None,
        }
    }

    /// Notes that the guest is held by `migration`, which has sent nothing since.
    pub fn begin_hold(&mut self, migration: MigrationId) {
        if let Part::Running { outgoing, held, .. } = &mut self.part {
            *outgoing = None;
            *held = Some(Hold {
                migration,
                switched_off: SwitchedOff::ALL.to_vec(),
                holding: Holding::Kept,
            });
        }
    }

    /// Notes that the guest is held by `migration`, whose transfer goes on and is to be turned to
    /// postcopy: QEMU never lets one go on by itself that was stopped before.
    pub fn begin_parting(&mut self, migration: MigrationId) {
        if let Part::Running { outgoing: Some(sent), held, .. } = &mut self.part
            && sent.migration == migration
        {
            sent.parting = Parting::Told;
            *held = Some(Hold {
                migration,
                switched_off: SwitchedOff::ALL.to_vec(),
                holding: Holding::Kept,
            });
        }
    }

    /// Notes that the guest is to go on, if it is held.
    pub fn let_go(&mut self) {
        if let Part::Running { held: Some(hold), .. } = &mut self.part {
            hold.holding = Holding::LettingGo;
        }
    }

    /// Notes that all is on again that the hold had switched off.
    pub fn end_hold(&mut self) {
        if let Part::Running { held, .. } = &mut self.part {
            *held = None;
        }
    }

    /// Notes that `migration` sends nothing from here any more, unless that was ordered or decided
    /// before, and that the guest goes on. Written down even if nothing was ever begun: it must not
    /// begin later.
    pub fn give_up(&mut self, migration: MigrationId, cause: String) {
        let Part::Running { outgoing, .. } = &mut self.part else { return };
        match outgoing.as_mut().filter(|sent| sent.migration == migration) {
            Some(sent) => match sent.order {
                Order::Open => sent.order = Order::GaveUp { cause },
                Order::GaveUp { .. } => {}
                Order::Handed | Order::TakenBack { .. } => return,
            },
            None => {
                *outgoing = Some(Outgoing {
                    migration,
                    before: Box::default(),
                    issue: Issue::Refused,
                    timeout_ms: 0,
                    stall_ms: 0,
                    downtime_ms: 0,
                    tuned: Tuned::default(),
                    carries: Carries::Whole,
                    parting: Parting::No,
                    order: Order::GaveUp { cause },
                });
            }
        }
        self.let_go();
    }
}

#[cfg(test)]
mod tests {
    use vmferry_types::{Claim, Generation, Role, VmId};

    use super::*;
    use crate::journal::{Defined, Process};

    const MOVE: MigrationId = MigrationId::from_u128(2);

    fn running() -> VmRecord {
        let mut record = VmRecord::new(VmId::from_u128(1));
        record.fence.claim(MOVE, Generation::from_stored(3), Claim::FIRST);
        record.part = Part::Running {
            defined: Defined { text: String::new(), resolved_machine: String::new() },
            process: Process {
                dir: "/run/vmferry/x".to_owned(),
                boot_id: "b".to_owned(),
                identity: None,
                taps: Vec::new(),
                generation: Generation::from_stored(3),
                admission: MigrationId::from_u128(1),
                announced_ms: 0,
            },
            outgoing: None,
            held: None,
            leaving: None,
        };
        record
    }

    fn order(record: &VmRecord) -> Option<&Order> {
        record.outgoing().map(|sent| &sent.order)
    }

    #[test]
    fn a_held_guest_is_still_held_when_its_record_is_read_back() {
        let mut record = running();
        record.begin_hold(MOVE);
        let read = VmRecord::from_json(&record.to_json().unwrap()).unwrap();
        assert_eq!(read, record);
        assert_eq!(read.role(), Role::Held);
        assert_eq!(read.hold().unwrap().switched_off, [SwitchedOff::Vcpus]);
    }

    #[test]
    fn a_hold_forgets_the_attempt_that_was_given_up_before() {
        let mut record = running();
        record.give_up(MOVE, "stalled".to_owned());
        assert!(matches!(order(&record), Some(Order::GaveUp { .. })));
        record.begin_hold(MOVE);
        assert_eq!(order(&record), None);
    }

    #[test]
    fn a_hold_that_is_given_up_lasts_until_all_is_on_again() {
        let mut record = running();
        record.begin_hold(MOVE);
        record.give_up(MOVE, "unheard".to_owned());
        assert!(
            matches!(order(&record), Some(Order::GaveUp { .. })),
            "a later transfer is refused"
        );
        assert_eq!(record.hold().unwrap().holding, Holding::LettingGo);
        assert_eq!(record.role(), Role::Held);
        record.end_hold();
        assert_eq!(record.role(), Role::Running);
    }

    #[test]
    fn what_was_handed_over_is_not_given_up() {
        let mut record = running();
        record.begin_hold(MOVE);
        let Part::Running { outgoing, .. } = &mut record.part else { panic!("it runs") };
        *outgoing = Some(Outgoing {
            migration: MOVE,
            before: Box::default(),
            issue: Issue::Accepted,
            timeout_ms: 0,
            stall_ms: 0,
            downtime_ms: 0,
            tuned: Tuned::default(),
            carries: Carries::Whole,
            parting: Parting::No,
            order: Order::Handed,
        });
        record.give_up(MOVE, "late".to_owned());
        assert_eq!(order(&record), Some(&Order::Handed));
        assert_eq!(record.hold().unwrap().holding, Holding::Kept);
    }

    #[test]
    fn a_record_from_before_there_were_holds_is_read() {
        let written = String::from_utf8(running().to_json().unwrap()).unwrap();
        let old = written.replace("\"version\": 3", "\"version\": 1").replace("\"held\": null", "");
        let old = old.replace("\"outgoing\": null,", "\"outgoing\": null");
        let read = VmRecord::from_json(old.as_bytes()).unwrap();
        assert_eq!(read, running());
    }
}
