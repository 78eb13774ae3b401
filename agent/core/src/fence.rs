//! Who may command a VM: rule R2.
//!
//! The agent keeps the newest generation, claim and step of each VM. A command goes through if it
//! is newer in (claim, step) and not older in generation; an exact repeat of the last one is
//! answered with the first answer; everything else is refused. So a delayed, doubled or reordered
//! command can at worst be answered again.

use serde::{Deserialize, Serialize};
use vmferry_types::{Claim, Fence, FenceRefusal, Generation, MigrationId, Step};

use crate::journal::{as_counter, as_id_option};

/// What is remembered of the commands for one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceState {
    /// The newest generation that any command or claim carried.
    #[serde(with = "as_counter")]
    pub generation: Generation,
    /// The newest claim.
    #[serde(with = "as_counter")]
    pub claim: Claim,
    /// The admission that the claim was taken for. `None` before the first.
    #[serde(with = "as_id_option")]
    pub migration: Option<MigrationId>,
    /// The newest step under the claim.
    #[serde(with = "as_counter")]
    pub step: Step,
    /// The command of that step. `None` right after a claim.
    pub last: Option<LastCommand>,
}

/// The last command and how it was answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastCommand {
    /// The digest of the whole command.
    pub digest: String,
    /// The first answer, encoded, in hexadecimal. `None` while the command is carried out, and
    /// after a crash in the middle of it.
    pub answer: Option<String>,
}

/// What to do with a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is new: note it, then carry it out.
    Execute,
    /// It was answered: answer the same again.
    Replay {
        /// The first answer, as it was noted.
        answer: String,
    },
    /// It was begun and never answered: carry it out again, its effects are idempotent.
    Resume,
    /// It is not to be carried out.
    Refuse(FenceRefusal),
}

/// What to do with a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimDecision {
    /// It is new: note it, then answer.
    Take,
    /// It is the one that is held already.
    Held,
    /// Somebody holds a newer one.
    Refuse(FenceRefusal),
}

impl Default for FenceState {
    fn default() -> Self {
        Self {
            generation: Generation::from_stored(0),
            claim: Claim::from_stored(0),
            migration: None,
            step: Step::from_stored(0),
            last: None,
        }
    }
}

impl FenceState {
    /// Decides on a command.
    #[must_use]
    pub fn decide(&self, fence: &Fence, digest: &str) -> Decision {
        let stale = FenceRefusal::StaleClaim { known: self.claim, step: self.step };
        if let Some(leap) = self.leap(fence.generation, fence.claim) {
            return Decision::Refuse(leap);
        }
        let step = if fence.claim == self.claim { self.step } else { Step::from_stored(0) };
        if !fence.step.is_within_reach_of(step) {
            return Decision::Refuse(self.leap_of("step"));
        }
        if fence.generation < self.generation {
            return Decision::Refuse(FenceRefusal::StaleGeneration { known: self.generation });
        }
        if fence.claim < self.claim {
            return Decision::Refuse(stale);
        }
        if fence.claim > self.claim {
            return Decision::Execute;
        }
        // One claim serves one admission; the same number for another one was never handed out.
        if self.migration != Some(fence.migration) || fence.step < self.step {
            return Decision::Refuse(stale);
        }
        if fence.step > self.step {
            return Decision::Execute;
        }
        match &self.last {
            Some(last) if last.digest == digest => match &last.answer {
                Some(answer) => Decision::Replay { answer: answer.clone() },
                None => Decision::Resume,
            },
            Some(_) => Decision::Refuse(FenceRefusal::StepReused { step: fence.step }),
            None => Decision::Refuse(stale),
        }
    }

    /// Notes a command that [`decide`](Self::decide) let through, as not answered yet.
    pub fn note(&mut self, fence: &Fence, digest: String) {
        self.generation = self.generation.max(fence.generation);
        self.claim = fence.claim;
        self.migration = Some(fence.migration);
        self.step = fence.step;
        self.last = Some(LastCommand { digest, answer: None });
    }

    /// Notes the answer to the last command.
    pub fn answer(&mut self, answer: String) {
        if let Some(last) = &mut self.last {
            last.answer = Some(answer);
        }
    }

    /// Notes that the last command was refused: who asked was told so, and has gone on from that.
    /// A copy of it that arrives later is refused as well.
    pub fn refused(&mut self) {
        if let Some(last) = &mut self.last {
            last.digest.clear();
        }
    }

    /// Decides on a claim.
    #[must_use]
    pub fn decide_claim(
        &self,
        migration: MigrationId,
        generation: Generation,
        claim: Claim,
    ) -> ClaimDecision {
        if let Some(leap) = self.leap(generation, claim) {
            ClaimDecision::Refuse(leap)
        } else if generation < self.generation {
            ClaimDecision::Refuse(FenceRefusal::StaleGeneration { known: self.generation })
        } else if claim > self.claim {
            ClaimDecision::Take
        } else if claim == self.claim && self.migration == Some(migration) {
            ClaimDecision::Held
        } else {
            ClaimDecision::Refuse(FenceRefusal::StaleClaim { known: self.claim, step: self.step })
        }
    }

    /// Refuses a counter that is out of reach of what is known.
    fn leap(&self, generation: Generation, claim: Claim) -> Option<FenceRefusal> {
        if !generation.is_within_reach_of(self.generation) {
            Some(self.leap_of("generation"))
        } else if !claim.is_within_reach_of(self.claim) {
            Some(self.leap_of("claim"))
        } else {
            None
        }
    }

    const fn leap_of(&self, field: &'static str) -> FenceRefusal {
        let (generation, claim, step) = (self.generation, self.claim, self.step);
        FenceRefusal::Leap { field, generation, claim, step }
    }

    /// Notes a claim that [`decide_claim`](Self::decide_claim) let through.
    pub fn claim(&mut self, migration: MigrationId, generation: Generation, claim: Claim) {
        let newer = claim > self.claim;
        self.generation = self.generation.max(generation);
        self.claim = claim;
        self.migration = Some(migration);
        if newer {
            self.step = Step::from_stored(0);
            self.last = None;
        }
    }
}

/// Returns the digest of an encoded command, the same in every version: FNV-1a of 128 bits, which
/// tells mix-ups apart; nobody is kept from forging one who may command an agent at all.
#[must_use]
pub fn digest(encoded: &[u8]) -> String {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let hash =
        encoded.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME));
    format!("{hash:032x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_types::VmId;

    const MOVE: MigrationId = MigrationId::from_u128(7);

    fn fence(generation: u64, claim: u64, step: u64) -> Fence {
        Fence {
            vm: VmId::from_u128(1),
            migration: MOVE,
            generation: Generation::from_stored(generation),
            claim: Claim::from_stored(claim),
            step: Step::from_stored(step),
        }
    }

    /// Knows generation 3, claim 5, step 2, command "arm".
    fn known() -> FenceState {
        let mut state = FenceState::default();
        state.note(&fence(3, 5, 2), "arm".to_owned());
        state
    }

    fn stale() -> Decision {
        Decision::Refuse(FenceRefusal::StaleClaim {
            known: Claim::from_stored(5),
            step: Step::from_stored(2),
        })
    }

    #[test]
    fn the_first_command_of_all_is_carried_out() {
        assert_eq!(FenceState::default().decide(&fence(1, 1, 1), "x"), Decision::Execute);
    }

    #[test]
    fn the_next_step_is_carried_out() {
        assert_eq!(known().decide(&fence(3, 5, 3), "start"), Decision::Execute);
    }

    #[test]
    fn a_repeat_is_answered_with_the_first_answer() {
        let mut state = known();
        state.answer("0a".to_owned());
        assert_eq!(
            state.decide(&fence(3, 5, 2), "arm"),
            Decision::Replay { answer: "0a".to_owned() }
        );
    }

    #[test]
    fn a_repeat_that_was_never_answered_is_carried_out_again() {
        assert_eq!(known().decide(&fence(3, 5, 2), "arm"), Decision::Resume);
    }

    #[test]
    fn a_repeat_of_a_refused_command_is_refused() {
        let mut state = known();
        state.refused();
        let refusal = FenceRefusal::StepReused { step: Step::from_stored(2) };
        assert_eq!(state.decide(&fence(3, 5, 2), "arm"), Decision::Refuse(refusal));
        assert_eq!(state.decide(&fence(3, 5, 3), "arm"), Decision::Execute);
    }

    #[test]
    fn another_command_under_the_last_step_is_refused() {
        let refusal = FenceRefusal::StepReused { step: Step::from_stored(2) };
        assert_eq!(known().decide(&fence(3, 5, 2), "destroy"), Decision::Refuse(refusal));
    }

    #[test]
    fn an_older_step_is_refused_even_if_it_was_once_answered() {
        assert_eq!(known().decide(&fence(3, 5, 1), "arm"), stale());
    }

    #[test]
    fn an_older_claim_is_refused_whatever_its_step() {
        assert_eq!(known().decide(&fence(3, 4, 99), "start"), stale());
    }

    #[test]
    fn an_older_generation_is_refused_whatever_its_claim() {
        let refusal = FenceRefusal::StaleGeneration { known: Generation::from_stored(3) };
        assert_eq!(known().decide(&fence(2, 9, 1), "start"), Decision::Refuse(refusal));
    }

    #[test]
    fn a_newer_generation_goes_with_the_next_step_only() {
        assert_eq!(known().decide(&fence(4, 5, 3), "continue"), Decision::Execute);
        let refusal = FenceRefusal::StepReused { step: Step::from_stored(2) };
        assert_eq!(known().decide(&fence(4, 5, 2), "continue"), Decision::Refuse(refusal));
    }

    #[test]
    fn another_admission_cannot_use_the_same_claim() {
        let other = Fence { migration: MigrationId::from_u128(8), ..fence(3, 5, 3) };
        assert_eq!(known().decide(&other, "start"), stale());
    }

    #[test]
    fn a_new_claim_begins_its_steps_anew_and_forgets_the_last_answer() {
        let mut state = known();
        state.answer("0a".to_owned());
        let six = Claim::from_stored(6);
        assert_eq!(state.decide_claim(MOVE, Generation::from_stored(3), six), ClaimDecision::Take);
        state.claim(MOVE, Generation::from_stored(3), six);
        assert!(matches!(state.decide(&fence(3, 5, 3), "start"), Decision::Refuse(_)));
        assert_eq!(state.decide(&fence(3, 6, 1), "start"), Decision::Execute);
    }

    #[test]
    fn an_equal_claim_is_answered_again_to_the_same_admission_only() {
        let state = known();
        let (generation, five) = (Generation::from_stored(3), Claim::from_stored(5));
        assert_eq!(state.decide_claim(MOVE, generation, five), ClaimDecision::Held);
        let other = MigrationId::from_u128(8);
        assert!(matches!(state.decide_claim(other, generation, five), ClaimDecision::Refuse(_)));
    }

    #[test]
    fn a_claim_that_is_held_keeps_its_last_step() {
        let mut state = known();
        state.claim(MOVE, Generation::from_stored(4), Claim::from_stored(5));
        assert_eq!(state.step, Step::from_stored(2));
        assert_eq!(state.generation, Generation::from_stored(4));
    }

    #[test]
    fn an_older_claim_or_generation_is_not_taken() {
        let state = known();
        let older = state.decide_claim(MOVE, Generation::from_stored(3), Claim::from_stored(4));
        assert!(matches!(older, ClaimDecision::Refuse(FenceRefusal::StaleClaim { .. })));
        let stale = state.decide_claim(MOVE, Generation::from_stored(2), Claim::from_stored(9));
        assert!(matches!(stale, ClaimDecision::Refuse(FenceRefusal::StaleGeneration { .. })));
    }

    #[test]
    fn the_highest_number_of_all_does_not_shut_out_whoever_counts() {
        let (state, highest) = (known(), u64::MAX);
        for (generation, claim, step, field) in [
            (highest, 6, 1, "generation"),
            (3, highest, 1, "claim"),
            (3, 5, highest, "step"),
            (3, 6, highest, "step"),
        ] {
            let refused = Decision::Refuse(state.leap_of(field));
            assert_eq!(state.decide(&fence(generation, claim, step), "stop"), refused);
        }
        for (generation, claim, field) in [(highest, 6, "generation"), (3, highest, "claim")] {
            let (generation, claim) =
                (Generation::from_stored(generation), Claim::from_stored(claim));
            let refused = ClaimDecision::Refuse(state.leap_of(field));
            assert_eq!(state.decide_claim(MOVE, generation, claim), refused);
        }
        assert_eq!(state.decide(&fence(3, 5, 3), "start"), Decision::Execute);
    }

    #[test]
    fn a_digest_tells_commands_apart_and_stays_the_same() {
        assert_eq!(digest(b""), "6c62272e07bb014262b821756295c58d");
        assert_ne!(digest(b"arm"), digest(b"mar"));
    }
}
