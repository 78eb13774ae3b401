//! What planners last said of the VMs that are known here: who owns each, by which generation.

use std::collections::BTreeMap;

use vmferry_agent_core::journal::{Part, VmRecord};
use vmferry_types::{Claim, Generation, Millis, VmId};

/// For so long what is under way may look like something that was left behind.
const GRACE: Millis = Millis(60_000);
/// For so long a planner may not know a VM yet that another host has still to report.
const UNKNOWN: Millis = Millis(15_000);

/// Whose a VM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// This host's.
    Here,
    /// Another host's.
    Elsewhere(String),
    /// Nobody's yet.
    Unplaced,
    /// The planner knows no such VM.
    NoSuchVm,
}

/// What was said of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) owner: Owner,
    pub(crate) generation: Generation,
    pub(crate) claim: Claim,
    /// Since when that is said.
    since: Millis,
}

/// What was said of all of them. Of several planners, the one that knows the newest is believed.
#[derive(Debug, Default)]
pub(crate) struct Told(BTreeMap<VmId, Word>);

impl Told {
    /// Takes up what a planner says.
    pub(crate) fn hear(
        &mut self,
        vm: VmId,
        owner: Owner,
        (generation, claim): (Generation, Claim),
        now: Millis,
    ) {
        let before = self.0.get(&vm);
        if before.is_some_and(|word| (word.generation, word.claim) > (generation, claim)) {
            return;
        }
        let same = before.filter(|word| word.owner == owner);
        let since = same.map_or(now, |word| word.since);
        self.0.insert(vm, Word { owner, generation, claim, since });
    }

    /// Notes that a planner did not name a VM that it was told of.
    pub(crate) fn hear_nothing(&mut self, vm: VmId, now: Millis) {
        let none = (Generation::from_stored(0), Claim::from_stored(0));
        let deleted = self.0.get(&vm).map(|word| (word.generation, word.claim));
        self.hear(vm, Owner::NoSuchVm, deleted.unwrap_or(none), now);
    }

    /// Drops what was said of VMs that are not known here.
    pub(crate) fn retain(&mut self, known: impl Fn(VmId) -> bool) {
        self.0.retain(|vm, _| known(*vm));
    }

    pub(crate) fn of(&self, vm: VmId) -> Option<&Word> {
        self.0.get(&vm)
    }
}

impl Word {
    /// Says whether a guest that runs here under `generation` is another host's by now.
    pub(crate) fn supersedes(&self, generation: Generation) -> bool {
        match self.owner {
            Owner::Elsewhere(_) => self.generation > generation,
            Owner::Here | Owner::Unplaced | Owner::NoSuchVm => false,
        }
    }

    /// Says why what is here of a VM does not belong here; `None` if it does, or if whoever drives
    /// the VM may be about to clear it away.
    pub(crate) fn disowns(&self, record: &VmRecord, now: Millis) -> Option<String> {
        let said_for = now.less(self.since);
        let older = match &record.part {
            Part::Absent => return None,
            Part::Stopped { .. } => self.generation >= record.fence.generation,
            Part::Running { process, .. } | Part::Receiver { process, .. } => {
                self.generation > process.generation
            }
        };
        let driven = self.claim <= record.fence.claim && record.open_admission().is_some();
        match &self.owner {
            Owner::Here | Owner::Unplaced => None,
            Owner::Elsewhere(host) => (older && (said_for >= GRACE || !driven))
                .then(|| format!("host {host} owns it under generation {}", self.generation)),
            Owner::NoSuchVm => {
                (said_for >= UNKNOWN).then(|| "the planner knows no such VM".to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use vmferry_agent_core::journal::Defined;
    use vmferry_types::MigrationId;

    use super::*;

    const VM: VmId = VmId::from_u128(1);

    fn counters(generation: u64, claim: u64) -> (Generation, Claim) {
        (Generation::from_stored(generation), Claim::from_stored(claim))
    }

    fn elsewhere() -> Owner {
        Owner::Elsewhere("b".to_owned())
    }

    fn stopped(generation: u64, claim: u64) -> VmRecord {
        let mut record = VmRecord::new(VM);
        let (generation, claim) = counters(generation, claim);
        record.fence.claim(MigrationId::from_u128(1), generation, claim);
        let defined = Defined { text: String::new(), resolved_machine: String::new() };
        record.part = Part::Stopped { defined, brought_by: None };
        record
    }

    #[test]
    fn the_newest_word_is_believed_whoever_says_it() {
        let mut told = Told::default();
        told.hear(VM, elsewhere(), counters(3, 5), Millis(1));
        told.hear(VM, Owner::Here, counters(2, 9), Millis(2));
        assert_eq!(told.of(VM).unwrap().owner, elsewhere());
        told.hear(VM, Owner::Here, counters(4, 1), Millis(3));
        assert_eq!(told.of(VM).unwrap().owner, Owner::Here);
        told.retain(|_| false);
        assert_eq!(told.of(VM), None);
    }

    #[test]
    fn a_definition_is_left_over_once_another_host_owns_the_vm() {
        let mut told = Told::default();
        told.hear(VM, elsewhere(), counters(3, 9), Millis(0));
        let word = told.of(VM).unwrap();
        let record = stopped(2, 5);
        // Its claim was never used, and a newer one was given out since.
        assert!(word.disowns(&record, Millis(0)).unwrap().contains("host b"));
        assert_eq!(word.disowns(&stopped(4, 5), Millis(0)), None, "this host heard of a newer one");
        assert_eq!(word.disowns(&VmRecord::new(VM), GRACE), None, "nothing is left");
    }

    #[test]
    fn what_is_being_driven_is_no_orphan_for_a_while() {
        let mut told = Told::default();
        told.hear(VM, elsewhere(), counters(3, 5), Millis(0));
        told.hear(VM, elsewhere(), counters(3, 5), Millis(9));
        let word = told.of(VM).unwrap();
        assert_eq!(word.disowns(&stopped(3, 5), Millis(10)), None);
        assert!(word.disowns(&stopped(3, 5), GRACE).is_some());
    }

    #[test]
    fn a_vm_that_no_planner_knows_is_left_over_after_a_while() {
        let mut told = Told::default();
        told.hear(VM, Owner::Here, counters(3, 5), Millis(0));
        told.hear_nothing(VM, Millis(5));
        told.hear_nothing(VM, Millis(10));
        let word = told.of(VM).unwrap();
        assert_eq!(word.disowns(&stopped(3, 5), Millis(10)), None);
        assert!(word.disowns(&stopped(3, 5), UNKNOWN.plus(Millis(5))).is_some());
        told.hear(VM, Owner::Here, counters(3, 5), Millis(11));
        assert_eq!(told.of(VM).unwrap().owner, Owner::Here, "it is known again");
    }

    #[test]
    fn only_a_newer_generation_elsewhere_takes_a_guest_away() {
        let mut told = Told::default();
        told.hear(VM, elsewhere(), counters(3, 5), Millis(0));
        let supersedes = |told: &Told, generation| {
            told.of(VM).unwrap().supersedes(Generation::from_stored(generation))
        };
        assert!(supersedes(&told, 2) && !supersedes(&told, 3));
        told.hear(VM, Owner::Here, counters(4, 6), Millis(0));
        assert!(!supersedes(&told, 3));
    }
}
