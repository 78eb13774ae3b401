//! Drives one migration by what both agents say, with the machine and the evidence of the planner.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep};
use vmferry_planner_core::evidence::{self, Heard, Seen, Sides, Times};
use vmferry_planner_core::migration::{Blocker, Cause, Effect, Event, Phase, Refusal, Side};
use vmferry_proto::v1;
use vmferry_types::{Claim, PhaseLabel, Step, Timestamp};
use vmferry_wire::command::{command, host_of, listener};
use vmferry_wire::refused::{blockers, had_no_effect, passes};
use vmferry_wire::seen::seen;

use super::agent::{Agent, No};
use super::journal::{Happened, Journal, Kept};
use crate::failure::Failure;
use crate::output::Output;

/// How often both agents are looked at: a guest that stands still waits for it.
const LOOK: Duration = Duration::from_millis(20);
/// How long one that does not answer, or refuses for now, is left alone.
const RETRY: Duration = Duration::from_millis(500);
/// An effect that was answered is asked for again if nothing came of it for so long.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// One end, as it was seen last under the present claim.
#[derive(Debug)]
struct End {
    agent: Agent,
    claimed: bool,
    observation: Option<v1::VmObservation>,
    heard: Heard,
    trouble: String,
}

impl End {
    const fn new(agent: Agent) -> Self {
        Self {
            agent,
            claimed: false,
            observation: None,
            heard: Heard::Before,
            trouble: String::new(),
        }
    }

    fn take(&mut self, answer: Result<v1::VmObservation, No>) {
        match answer {
            Ok(observation) => {
                self.heard = Heard::Now;
                self.trouble.clear();
                let newer = self.observation.as_ref().is_none_or(|known| {
                    observation.boot_id != known.boot_id || observation.sequence > known.sequence
                });
                if newer {
                    self.observation = Some(observation);
                }
            }
            Err(no) => {
                self.heard = Heard::Before;
                self.trouble = no.to_string();
            }
        }
    }

    fn forget(&mut self) {
        self.claimed = false;
        self.observation = None;
    }
}

/// One migration under way.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    journal: &'a Journal,
    kept: Kept,
    source: End,
    destination: End,
    step: Step,
    answered: Option<(usize, Effect, Instant)>,
    not_before: Instant,
    trouble: String,
    told: String,
}

impl<'a> Run<'a> {
    pub(crate) fn new(journal: &'a Journal, kept: Kept, source: Agent, destination: Agent) -> Self {
        Self {
            journal,
            kept,
            source: End::new(source),
            destination: End::new(destination),
            step: Step::from_stored(0),
            answered: None,
            not_before: Instant::now(),
            trouble: String::new(),
            told: String::new(),
        }
    }

    /// Takes the first claim of a run, from the source's agent.
    pub(crate) async fn begin(&mut self) -> Result<(), Failure> {
        let asked = self.next_claim();
        let seen = self.source.agent.next_claim(asked).await.map_err(|no| self.not_begun(&no))?;
        if seen.generation != self.kept.migration.generation.value() {
            return Err(Failure::Blocked {
                operation: self.operation(),
                problem: "the VM changed hands while it was looked at; look again".to_owned(),
            });
        }
        self.kept.claim = seen.claim;
        self.journal.write(&self.kept)
    }

    fn not_begun(&self, no: &No) -> Failure {
        let operation = self.operation();
        match no {
            No::Unanswered { .. } => Failure::Failed { operation, cause: no.to_string() },
            No::Refused { .. } => Failure::Blocked { operation, problem: no.to_string() },
        }
    }

    fn next_claim(&self) -> v1::NextClaimRequest {
        v1::NextClaimRequest {
            vm_id: self.kept.migration.vm.to_string(),
            migration_id: self.kept.migration.id.to_string(),
        }
    }

    fn operation(&self) -> String {
        format!("move VM {} without a planner", self.kept.vm_name)
    }

    /// Decides and acts until nothing is owed, or until `deadline`.
    pub(crate) async fn drive(
        &mut self,
        output: &Output,
        deadline: Option<Instant>,
    ) -> Result<(), Failure> {
        // Whatever an earlier run told may still land: a newer claim lies behind it first.
        self.claim_anew().await?;
        loop {
            let migration = &self.kept.migration;
            if migration.label().is_terminal() && migration.outstanding().is_none() {
                return self.verdict();
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(self.timed_out());
            }
            self.look().await?;
            self.tell(output);
            let sides = self.sides();
            let entered = Timestamp(self.kept.entered_ms);
            let times = Times { now: Timestamp(now_ms()), entered };
            let migration = &self.kept.migration;
            let event = evidence::read(migration, &sides, times).or_else(|| migration.follows());
            if let Some(event) = event
                && self.apply(event)?
            {
                continue;
            }
            if !self.act(&sides).await? {
                sleep(LOOK).await;
            }
        }
    }

    /// Takes the next claim of this run; both ends have to answer it before they are believed.
    async fn claim_anew(&mut self) -> Result<(), Failure> {
        let mut next = self.kept.claim.saturating_add(1);
        let asked = self.next_claim();
        if let Ok(seen) = self.source.agent.next_claim(asked).await {
            next = next.max(seen.claim);
        }
        self.raise(next)
    }

    fn raise(&mut self, claim: u64) -> Result<(), Failure> {
        self.kept.claim = claim;
        self.journal.write(&self.kept)?;
        self.step = Step::from_stored(0);
        self.answered = None;
        self.source.forget();
        self.destination.forget();
        Ok(())
    }

    /// Claims at whoever has not answered the claim yet, and looks at whoever has.
    async fn look(&mut self) -> Result<(), Failure> {
        let (source, destination) =
            tokio::join!(ask(&self.kept, &self.source), ask(&self.kept, &self.destination));
        let ours = self.kept.migration.id.to_string();
        let mut newest = self.kept.claim;
        for (end, answer) in [(&mut self.source, source), (&mut self.destination, destination)] {
            let known = match &answer {
                Ok(seen) => (seen.claim, seen.migration_id.clone()),
                Err(No::Refused { detail, .. }) if detail.code == "stale_claim" => {
                    let vm_id = self.kept.migration.vm.to_string();
                    let look = v1::ObserveRequest { vm_id, claim: 0 };
                    let whose = end.agent.observe(look).await.map(|seen| seen.migration_id);
                    (detail.known_claim, whose.unwrap_or_else(|_| ours.clone()))
                }
                Err(_) => (0, ours.clone()),
            };
            if known.0 > self.kept.claim && known.1 != ours {
                return Err(taken_over(&self.kept, self.journal, &end.agent.address));
            }
            newest = newest.max(known.0);
            end.claimed |= answer.is_ok();
            end.take(answer);
        }
        if newest > self.kept.claim {
            self.raise(newest.saturating_add(1))?;
        }
        Ok(())
    }

    fn sides(&self) -> Sides {
        let migration = &self.kept.migration;
        let read = |side: Side, end: &End| -> Option<Seen> {
            let host = host_of(migration, side)?;
            let observation = end.observation.as_ref().filter(|_| end.claimed)?;
            Some(Seen { heard: end.heard, ..seen(&host, migration.id, observation) })
        };
        Sides {
            claim: Claim::from_stored(self.kept.claim),
            source: read(Side::Source, &self.source),
            destination: read(Side::Destination, &self.destination),
        }
    }

    /// Writes down what follows from an event; says whether anything does.
    fn apply(&mut self, event: Event) -> Result<bool, Failure> {
        let entries = match self.kept.migration.advance(event) {
            Ok(entries) => entries,
            Err(Refusal::Stale | Refusal::TooLate | Refusal::Illegal) => return Ok(false),
        };
        let at_ms = now_ms();
        for entry in entries {
            if entry.after.entered_anew(&self.kept.migration) {
                self.kept.entered_ms = at_ms;
            }
            self.kept.migration = entry.after;
            self.kept.log.push(Happened { at_ms, event: entry.event });
        }
        self.journal.write(&self.kept)?;
        self.trouble.clear();
        Ok(true)
    }

    /// Tells an agent what is owed; says whether one was told.
    async fn act(&mut self, sides: &Sides) -> Result<bool, Failure> {
        let migration = &self.kept.migration;
        let Some(effect) = migration.outstanding() else { return Ok(false) };
        let Some(side) = effect.side() else { return Ok(false) };
        let now = Instant::now();
        let answered = self.answered.as_ref().is_some_and(|(entries, answered, at)| {
            *entries == self.kept.log.len() && *answered == effect && now < *at + ASK_AGAIN
        });
        if answered || now < self.not_before {
            return Ok(false);
        }
        if evidence::permit(migration, &effect, sides).is_err() {
            return Ok(false);
        }
        let description = if effect == Effect::ArmReceiver {
            match self.source.agent.describe(migration.vm.to_string()).await {
                Ok(description) => Some(description),
                Err(no) => return self.refused(Side::Source, &effect, &no).await.map(|()| true),
            }
        } else {
            None
        };
        self.step = self.step.next();
        let claim = Claim::from_stored(self.kept.claim);
        let Some(told) = command((migration, claim), &effect, description, self.step) else {
            return Ok(false);
        };
        let end = match side {
            Side::Source => &mut self.source,
            Side::Destination => &mut self.destination,
        };
        match end.agent.execute(told.request).await {
            Ok(reply) => {
                self.answered = Some((self.kept.log.len(), effect, Instant::now()));
                let Some(observation) = reply.observation else {
                    return self.claim_anew().await.map(|()| true);
                };
                end.take(Ok(observation));
                if let Some(listener) = reply.listener.as_ref().and_then(listener) {
                    self.apply(Event::ReceiverArmed { listener })?;
                }
            }
            Err(no) => self.refused(side, &effect, &no).await?,
        }
        Ok(true)
    }

    /// Takes an agent's no, or its silence, after which only a newer claim makes the next look safe.
    async fn refused(&mut self, side: Side, effect: &Effect, no: &No) -> Result<(), Failure> {
        self.trouble = no.to_string();
        self.not_before = Instant::now() + RETRY;
        let No::Refused { message, detail, .. } = no else { return self.claim_anew().await };
        if matches!(no.code(), "stale_claim" | "stale_generation" | "step_reused") {
            return self.claim_anew().await;
        }
        if !passes(detail) && self.kept.migration.begins_with(effect) {
            let host = host_of(&self.kept.migration, side);
            self.apply(Event::Refused { blockers: blockers(host, message, detail) })?;
        }
        if had_no_effect(detail) { Ok(()) } else { self.claim_anew().await }
    }

    fn tell(&mut self, output: &Output) {
        let transfer = self.source.observation.as_ref().and_then(|seen| seen.transfer.as_ref());
        let sent = transfer.filter(|of| of.bytes_total > 0).map_or_else(String::new, |of| {
            let done = of.bytes_total.saturating_sub(of.bytes_remaining);
            format!(", {} % of its memory", done.saturating_mul(100) / of.bytes_total)
        });
        let troubles = [&self.trouble, &self.source.trouble, &self.destination.trouble];
        let trouble: String = troubles
            .iter()
            .filter(|text| !text.is_empty())
            .map(|text| format!("; {text}"))
            .collect();
        let phase = self.kept.migration.label();
        output.progress(&mut self.told, &format!("{}: {phase}{sent}{trouble}", self.kept.vm_name));
    }

    /// Says how it ended.
    fn verdict(&self) -> Result<(), Failure> {
        let operation = self.operation();
        let cause = |cause: Option<&Cause>| {
            cause.map_or_else(|| "no cause was recorded".to_owned(), ToString::to_string)
        };
        let migration = &self.kept.migration;
        match (migration.label(), &migration.phase) {
            (PhaseLabel::Done, _) => Ok(()),
            (_, Phase::Aborted { cause: Cause::Refused { blockers }, .. }) => {
                Err(Failure::RolledBack { operation, cause: list(blockers) })
            }
            (PhaseLabel::Aborted, phase) => {
                Err(Failure::RolledBack { operation, cause: cause(phase.cause()) })
            }
            (
                PhaseLabel::Queued
                | PhaseLabel::Admitted
                | PhaseLabel::Captured
                | PhaseLabel::Restored
                | PhaseLabel::Committed
                | PhaseLabel::Attached
                | PhaseLabel::RollingBack
                | PhaseLabel::Failed,
                phase,
            ) => Err(Failure::NeedsHuman {
                operation,
                cause: cause(phase.cause()),
                advice: format!("what happened is kept in {}", self.journal.path.display()),
            }),
        }
    }

    fn timed_out(&self) -> Failure {
        Failure::WaitTimedOut {
            operation: self.operation(),
            waited: "its time limit".to_owned(),
            standing: format!("{}{}", self.kept.migration.label(), self.trouble),
            advice: resume(&self.journal.path),
        }
    }
}

async fn ask(kept: &Kept, end: &End) -> Result<v1::VmObservation, No> {
    let vm_id = kept.migration.vm.to_string();
    if end.claimed {
        return end.agent.observe(v1::ObserveRequest { vm_id, claim: kept.claim }).await;
    }
    let claim = v1::ClaimRequest {
        vm_id,
        migration_id: kept.migration.id.to_string(),
        generation: kept.migration.books().generation.value(),
        claim: kept.claim,
        hold_limit_ms: kept.migration.terms.hold_limit.value(),
    };
    end.agent.claim(claim).await
}

fn taken_over(kept: &Kept, journal: &Journal, address: &str) -> Failure {
    Failure::NeedsHuman {
        operation: format!("move VM {} without a planner", kept.vm_name),
        cause: format!(
            "the agent at {address} obeys somebody else's newer claim now: this run commands nothing any more"
        ),
        advice: format!(
            "see `vmferry doctor`; what happened until now is kept in {}",
            journal.path.display()
        ),
    }
}

/// Says how an interrupted run is gone on with.
pub(crate) fn resume(path: &Path) -> String {
    format!("go on with `vmferry runtime migrate --resume {}`", path.display())
}

fn list(blockers: &[Blocker]) -> String {
    let each = blockers.iter().map(|one| format!("{}: {}", one.code, one.message));
    each.collect::<Vec<_>>().join("; ")
}

/// Reads the wall clock in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
