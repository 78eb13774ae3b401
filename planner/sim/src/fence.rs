//! The fence of rule R2, as a small reference model.
//!
//! The agent has its own; imports do not let a simulated planner see it, and two that were written
//! apart have to agree.

use vmferry_types::{Claim, Generation, MigrationId, Step};

/// What a command or a claim says of whose word it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) migration: MigrationId,
    pub(crate) generation: Generation,
    pub(crate) claim: Claim,
    pub(crate) step: Step,
}

/// What an agent remembers of the commands for one VM.
#[derive(Clone, Debug)]
pub(crate) struct Fence<B, A> {
    pub(crate) generation: Generation,
    pub(crate) claim: Claim,
    pub(crate) migration: Option<MigrationId>,
    pub(crate) step: Step,
    /// The command of that step, and its answer, once there was one.
    pub(crate) last: Option<(B, Option<A>)>,
    /// It was refused.
    pub(crate) last_refused: bool,
}

impl<B, A> Default for Fence<B, A> {
    fn default() -> Self {
        Self {
            generation: Generation::from_stored(0),
            claim: Claim::from_stored(0),
            migration: None,
            step: Step::from_stored(0),
            last: None,
            last_refused: false,
        }
    }
}

/// Why a command is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stale {
    Generation,
    Claim,
    Step,
}

/// What to do with a command.
#[derive(Clone, Debug)]
pub(crate) enum Verdict<A> {
    Execute,
    Replay(A),
    Refuse(Stale),
}

impl<B: PartialEq, A: Clone> Fence<B, A> {
    /// Decides on a command.
    pub(crate) fn command(&self, word: &Word, body: &B) -> Verdict<A> {
        if word.generation < self.generation {
            return Verdict::Refuse(Stale::Generation);
        }
        if word.claim != self.claim {
            let newer = word.claim > self.claim;
            return if newer { Verdict::Execute } else { Verdict::Refuse(Stale::Claim) };
        }
        if self.migration != Some(word.migration) {
            return Verdict::Refuse(Stale::Claim);
        }
        match (word.step.cmp(&self.step), &self.last) {
            (std::cmp::Ordering::Greater, _) => Verdict::Execute,
            (std::cmp::Ordering::Less, _) | (std::cmp::Ordering::Equal, None) => {
                Verdict::Refuse(Stale::Claim)
            }
            (std::cmp::Ordering::Equal, Some(_)) if self.last_refused => {
                Verdict::Refuse(Stale::Step)
            }
            (std::cmp::Ordering::Equal, Some((known, answer))) if known == body => {
                // Begun and never answered: its effects are idempotent.
                answer.clone().map_or(Verdict::Execute, Verdict::Replay)
            }
            (std::cmp::Ordering::Equal, Some(_)) => Verdict::Refuse(Stale::Step),
        }
    }

    /// Notes a command that is about to be carried out.
    pub(crate) fn note(&mut self, word: &Word, body: B) {
        self.generation = self.generation.max(word.generation);
        self.claim = word.claim;
        self.migration = Some(word.migration);
        self.step = word.step;
        self.last = Some((body, None));
        self.last_refused = false;
    }

    /// Notes that the last command was refused: a copy of it that arrives later is, too.
    pub(crate) fn refused(&mut self) {
        self.last_refused = true;
    }

    /// Takes a claim, or says why not.
    pub(crate) fn take(&mut self, word: &Word) -> Result<(), Stale> {
        if word.generation < self.generation {
            return Err(Stale::Generation);
        }
        let held = word.claim == self.claim && self.migration == Some(word.migration);
        if word.claim <= self.claim && !held {
            return Err(Stale::Claim);
        }
        self.generation = word.generation;
        self.migration = Some(word.migration);
        if !held {
            self.claim = word.claim;
            self.step = Step::from_stored(0);
            self.last = None;
            self.last_refused = false;
        }
        Ok(())
    }
}
