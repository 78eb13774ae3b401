//! Drives one migration.

mod link;
mod notes;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{Instrument as _, debug, error, info, info_span, warn};
use vmferry_planner_core::evidence::{self, Seen, Sides, Times};
use vmferry_planner_core::fleet::Demand;
use vmferry_planner_core::migration::{Blocker, Effect, Event, Phase, Refusal, Side as End};
use vmferry_planner_core::stuck::Trouble;
use vmferry_proto::v1::{ClaimRequest, ExecuteReply, SourceDescription};
use vmferry_types::{Bytes, Claim, MigrationId, MilliCpu, PhaseLabel, Seq, Step, Timestamp};

use self::link::Link;
use super::Backoff;
use super::seen::{dead, heed_death, seen};
use super::side::{Side, SideView};
use vmferry_wire::command::{Command, command, host_of, listener};
use vmferry_wire::refused::{blockers, had_no_effect, passes};

use crate::agents::{AgentError, Answer};
use crate::clock;
use crate::faults;
use crate::planner::Planner;
use crate::store::{Commit, Declaration, MigrationRow, Sharing, StoreError, TakeOver};
use crate::telemetry::Chain;

/// Time limits are looked at this often; nothing on the pause path waits for it.
const TICK: Duration = Duration::from_millis(500);
/// An effect that was answered is asked for again if nothing came of it for so long.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Drives a migration until nothing is owed any more, or another driver has it.
pub async fn drive(planner: &Arc<Planner>, id: MigrationId, nudge: &Notify) {
    let mut backoff = Backoff::new();
    loop {
        let row = match take_over(planner, id).await {
            Ok(TakeOver::Taken(row)) => row,
            Ok(TakeOver::Busy) => {
                debug!(migration_id = %id, "another driver has it");
                return;
            }
            Ok(TakeOver::Ended) => return,
            Err(error) => {
                error!(migration_id = %id, error = %Chain(&error), "migration could not be taken over");
                planner.live.keeps_from_going_on(id, &error);
                return;
            }
        };
        let span = info_span!(parent: None, "migration", migration_id = %id,
            vm_id = %row.migration.vm, source = %row.migration.source,
            destination = row.migration.destination().map(tracing::field::display),
            claim = %row.claim);
        let outcome = match Run::open(planner, *row) {
            Some(mut run) => run.finish(nudge).instrument(span).await,
            None => return,
        };
        match outcome {
            Ok(Outcome::Ended) => {
                planner.live.end(id);
                planner.wake.notify_one();
                planner.hosts_changed();
                return;
            }
            Ok(Outcome::Superseded) => return,
            Ok(Outcome::ClaimAnew { progress }) => {
                if progress {
                    backoff.reset();
                }
            }
            Err(error) => {
                error!(migration_id = %id, error = %Chain(&error), "driver stopped; the row stays as it is");
                planner.live.keeps_from_going_on(id, &error);
                return;
            }
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

async fn take_over(planner: &Planner, id: MigrationId) -> Result<TakeOver, StoreError> {
    let (now, until) = planner.lease().await?;
    planner.store().take_over(id, &planner.owner, until, now).await
}

/// How driving under one claim ended.
enum Outcome {
    /// Nothing is owed any more.
    Ended,
    /// Another driver has the row.
    Superseded,
    /// A command went unanswered, or the claim is behind: only a newer one makes the next look safe.
    ClaimAnew { progress: bool },
}

/// What became of an event.
enum Applied {
    /// The row has moved on.
    Moved,
    /// The event changed nothing.
    Nothing,
    /// Someone else wrote the row: it was read again.
    Reread,
    /// Another driver has the row.
    Superseded,
}

/// How a command ended.
enum Said {
    /// The agent's answer.
    Executed(Box<Answer<ExecuteReply>>),
    /// The source could not be described, so nothing was sent to the destination.
    NotDescribed(AgentError),
    /// The definition could not be read, so nothing was sent.
    NotSent(String),
}

struct Pending {
    end: End,
    effect: Effect,
    said: BoxFuture<'static, Said>,
}

/// Driving under one claim.
struct Run<'a> {
    planner: &'a Arc<Planner>,
    row: MigrationRow,
    source: (Side, watch::Receiver<SideView>),
    destination: (Side, watch::Receiver<SideView>),
    step: Step,
    pending: Option<Pending>,
    answered: Option<(Seq, Effect, Instant)>,
    backoff: Backoff,
    not_before: Instant,
    lease_due: Instant,
    progress: bool,
    trouble: Option<String>,
    /// The ends whose hosts are dead, as they were heeded last: nothing rests on another word.
    dead: Dead,
    link: Link,
}

/// By what word each end's host is dead, if it is.
#[derive(Debug, Default)]
struct Dead {
    source: Option<Declaration>,
    destination: Option<Declaration>,
}

impl<'a> Run<'a> {
    /// Claims both ends in parallel; `None` for a row without a destination, which the queue owns.
    fn open(planner: &'a Arc<Planner>, row: MigrationRow) -> Option<Self> {
        let migration = &row.migration;
        let claim = ClaimRequest {
            vm_id: migration.vm.to_string(),
            migration_id: migration.id.to_string(),
            generation: migration.books().generation.value(),
            claim: row.claim.value(),
            hold_limit_ms: migration.terms.hold_limit.value(),
        };
        let open = |end: End| {
            let host = host_of(migration, end)?;
            let side = Side::open(Arc::clone(&planner.parts.agents), host, claim.clone());
            let view = side.subscribe();
            Some((side, view))
        };
        let destination = open(End::Destination)?;
        let source = open(End::Source)?;
        let now = Instant::now();
        Some(Self {
            planner,
            source,
            destination,
            step: Step::from_stored(0),
            pending: None,
            answered: None,
            backoff: Backoff::new(),
            not_before: now,
            lease_due: now + planner.lease_renewal(),
            progress: false,
            trouble: None,
            dead: Dead::default(),
            link: Link::AskedAt(now),
            row,
        })
    }

    const fn claim_anew(&self) -> Outcome {
        Outcome::ClaimAnew { progress: self.progress }
    }

    /// Decides and acts on whatever is seen next, until there is nothing left to do.
    async fn finish(&mut self, nudge: &Notify) -> Result<Outcome, StoreError> {
        let mut tick = tokio::time::interval(TICK.min(self.planner.lease_renewal()));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.source.0.beat();
            self.destination.0.beat();
            if let Some(outcome) = self.decide().await? {
                return Ok(outcome);
            }
            tokio::select! {
                biased;
                said = answer(&mut self.pending) => {
                    if let Some(outcome) = self.hear(said).await? {
                        return Ok(outcome);
                    }
                }
                _ = self.source.1.changed() => {}
                _ = self.destination.1.changed() => {}
                () = nudge.notified() => {
                    if matches!(self.reread().await?, Applied::Superseded) {
                        return Ok(Outcome::Superseded);
                    }
                }
                _ = tick.tick() => {
                    if !self.keep_lease().await? {
                        return Ok(Outcome::Superseded);
                    }
                }
            }
        }
    }

    /// Applies all that is seen, then sends what is owed.
    async fn decide(&mut self) -> Result<Option<Outcome>, StoreError> {
        loop {
            if self.row.ended_us.is_some() {
                return Ok(Some(Outcome::Ended));
            }
            self.heed_deaths().await?;
            let sides = self.sides();
            if self.fenced().await? {
                return Ok(Some(self.claim_anew()));
            }
            let times =
                Times { now: clock::now(), entered: Timestamp(self.row.notes.entered_us / 1000) };
            let event = evidence::read(&self.row.migration, &sides, times)
                .or_else(|| self.row.migration.follows());
            match event {
                Some(event) => match self.apply(event).await? {
                    Applied::Moved | Applied::Reread => {}
                    Applied::Superseded => return Ok(Some(Outcome::Superseded)),
                    Applied::Nothing => {
                        self.go_on(&sides).await?;
                        return Ok(None);
                    }
                },
                None => {
                    self.go_on(&sides).await?;
                    return Ok(None);
                }
            }
        }
    }

    /// Takes note of ends that answer though their hosts were declared dead: such a declaration is
    /// void before anything rests on it.
    async fn heed_deaths(&mut self) -> Result<(), StoreError> {
        let vm = self.row.migration.vm;
        let source = self.source.1.borrow().clone();
        let destination = self.destination.1.borrow().clone();
        self.dead.source = match host_of(&self.row.migration, End::Source) {
            Some(host) => heed_death(self.planner, (&host, vm), &source).await?,
            None => None,
        };
        self.dead.destination = match host_of(&self.row.migration, End::Destination) {
            Some(host) => heed_death(self.planner, (&host, vm), &destination).await?,
            None => None,
        };
        Ok(())
    }

    /// Reads both ends. An end with a command under way says nothing: the command may still land
    /// on top of what it said.
    fn sides(&mut self) -> Sides {
        let source = self.source.1.borrow_and_update().clone();
        let destination = self.destination.1.borrow_and_update().clone();
        let behind = source.behind.as_ref().or(destination.behind.as_ref());
        let silent = source.trouble.as_ref().or(destination.trouble.as_ref());
        let trouble = behind
            .map(|error| self.behind(error))
            .or_else(|| silent.map(|error| Chain(error).to_string()))
            .or_else(|| self.trouble.clone());
        self.planner.live.update(self.row.migration.id, |live| {
            live.source.clone_from(&source.observation);
            live.destination.clone_from(&destination.observation);
            live.set_trouble(trouble, clock::now());
        });
        let busy = self.pending.as_ref().map(|pending| pending.end);
        let read = |end: End, view: &SideView| {
            let host = host_of(&self.row.migration, end)?;
            // No answer will come, and no command lands there any more.
            let declared = match end {
                End::Source => &self.dead.source,
                End::Destination => &self.dead.destination,
            };
            if let Some(declaration) = declared {
                return Some(dead(&self.row, end, declaration));
            }
            let observation =
                view.observation.as_ref().filter(|_| view.claimed && busy != Some(end))?;
            let said = seen(&host, self.row.migration.id, observation);
            Some(Seen { heard: view.heard(clock::now()), ..said })
        };
        Sides {
            claim: self.row.claim,
            source: read(End::Source, &source),
            destination: read(End::Destination, &destination),
        }
    }

    /// Says that the row is older than what an agent knows, and what a human can do.
    fn behind(&self, error: &AgentError) -> String {
        format!(
            "{}: the store is older than what happened (was it restored from a backup?), and nothing is commanded. Look at both hosts with `vmferry doctor`, then close the migration with `vmferry migration resolve {}`",
            Chain(error),
            self.row.migration.id
        )
    }

    /// Says whether an agent knows a newer claim; then the next one is taken above it.
    async fn fenced(&mut self) -> Result<bool, StoreError> {
        let refused = |view: &watch::Receiver<SideView>| view.borrow().fenced.clone();
        if let Some(error) = refused(&self.source.1).or_else(|| refused(&self.destination.1)) {
            self.raise(&error).await?;
            return Ok(true);
        }
        // One that answered this driver and was claimed by somebody else since obeys it no more, and
        // nothing is sent that could be refused.
        let seen = |view: &watch::Receiver<SideView>| {
            view.borrow().observation.as_ref().map_or(0, |observation| observation.claim)
        };
        let known = Claim::from_stored(seen(&self.source.1).max(seen(&self.destination.1)));
        if known <= self.row.claim || !known.is_within_reach_of(self.row.claim) {
            return Ok(false);
        }
        warn!(%known, "an agent was claimed by somebody else");
        self.planner.store().raise_claim(self.row.migration.vm, known, clock::now()).await?;
        Ok(true)
    }

    async fn raise(&mut self, error: &AgentError) -> Result<(), StoreError> {
        warn!(error = %Chain(error), "an agent knows a newer claim");
        if let AgentError::Refused { detail, .. } = error {
            let known = Claim::from_stored(detail.known_claim);
            self.planner.store().raise_claim(self.row.migration.vm, known, clock::now()).await?;
        }
        Ok(())
    }

    /// Commits what follows from an event.
    async fn apply(&mut self, event: Event) -> Result<Applied, StoreError> {
        let label = event.label();
        let entries = match self.row.migration.advance(event) {
            Ok(entries) => entries,
            Err(Refusal::Stale | Refusal::TooLate) => {
                debug!(event = label, phase = self.row.migration.label().label(), "event is late");
                return Ok(Applied::Nothing);
            }
            Err(Refusal::Illegal) => {
                warn!(
                    event = label,
                    phase = self.row.migration.label().label(),
                    refusal = "illegal",
                    "event cannot happen here"
                );
                return Ok(Applied::Nothing);
            }
        };
        let notes = notes::after(
            &self.row,
            self.source.1.borrow().observation.as_ref(),
            self.destination.1.borrow().observation.as_ref(),
        );
        let points = faults::points(&self.row.migration, &entries);
        self.planner.parts.faults.pass_all("before_commit", &points).await;
        let phase_before = self.row.migration.label();
        self.count_arrival(&entries);
        match self.planner.store().commit(&self.row, &entries, &notes, clock::now_us()).await? {
            Commit::Raced => self.reread().await,
            Commit::Done(row) => {
                self.row = *row;
                self.progress = true;
                self.trouble = None;
                self.planner.parts.faults.pass_all("after_commit", &points).await;
                self.log(phase_before, &entries);
                self.planner.live.ring(self.row.migration.id);
                Ok(Applied::Moved)
            }
        }
    }

    /// A VM that has arrived is counted where it is, before its reservation there is closed.
    fn count_arrival(&self, entries: &[vmferry_planner_core::migration::Entry]) {
        if let Some(Phase::Done { destination, .. }) =
            entries.last().map(|entry| &entry.after.phase)
        {
            let notes = &self.row.notes;
            let demand =
                Demand { memory: Bytes(notes.memory_bytes), cpu: MilliCpu(notes.cpu_milli) };
            let inventory = &self.planner.parts.inventory;
            inventory.note_arrival(destination, self.row.migration.vm, demand);
        }
    }

    fn log(&self, before: PhaseLabel, entries: &[vmferry_planner_core::migration::Entry]) {
        let mut phase = before;
        for entry in entries {
            let after = entry.after.label();
            if after != phase {
                info!(phase = after.label(), event = entry.event.label(), seq = %self.row.seq, "phase changed");
            }
            phase = after;
        }
    }

    async fn reread(&mut self) -> Result<Applied, StoreError> {
        match self.planner.store().migration(self.row.migration.id).await? {
            Some(row) if row.claim == self.row.claim => {
                self.row = row;
                Ok(Applied::Reread)
            }
            Some(_) | None => Ok(Applied::Superseded),
        }
    }

    async fn keep_lease(&mut self) -> Result<bool, StoreError> {
        let now = Instant::now();
        if now < self.lease_due {
            return Ok(true);
        }
        self.lease_due = now + self.planner.lease_renewal();
        let (_, until) = self.planner.lease().await?;
        let held = self.planner.store().renew_lease(&self.row, &self.planner.owner, until).await?;
        if held {
            self.share_trouble().await;
        }
        Ok(held)
    }

    /// Sends what is owed, once there is a link for it.
    async fn go_on(&mut self, sides: &Sides) -> Result<(), StoreError> {
        if self.has_link().await? {
            self.launch(sides);
        }
        Ok(())
    }

    /// Lets those who look at the row with another planner see what keeps it from going on. What
    /// cannot be written now is tried again at the next renewal: a note ends no drive.
    async fn share_trouble(&mut self) {
        if self.planner.store().sharing() == Sharing::Alone {
            return;
        }
        let seen = self.planner.live.seen(self.row.migration.id).trouble;
        let trouble = seen.map(|(text, since)| Trouble { text, since: Timestamp(since) });
        if trouble == self.row.trouble {
            return;
        }
        match self.planner.store().note_trouble(&self.row, trouble.as_ref()).await {
            Ok(()) => self.row.trouble = trouble,
            Err(error) => warn!(error = %Chain(&error), "what keeps it from going on is not noted"),
        }
    }

    /// Sends what is owed, unless it is under way, was just answered, or has to wait.
    fn launch(&mut self, sides: &Sides) {
        if self.pending.is_some() {
            return;
        }
        // A guest that is divided waits for each page: its channel comes first.
        let mend = evidence::mend(&self.row.migration, sides);
        let owed = mend
            .or_else(|| evidence::tune(&self.row.migration, sides))
            .or_else(|| self.row.migration.outstanding());
        let Some(effect) = owed else { return };
        let Some(end) = effect.side() else { return };
        let now = Instant::now();
        let answered = self.answered.as_ref().is_some_and(|(seq, answered, at)| {
            *seq == self.row.seq && *answered == effect && now < *at + ASK_AGAIN
        });
        if answered || now < self.not_before {
            return;
        }
        if let Err(withheld) = evidence::permit(&self.row.migration, &effect, sides) {
            debug!(effect = effect.label(), waits_for = %withheld, "effect withheld");
            return;
        }
        self.step = self.step.next();
        let Some(said) = self.send(&effect) else { return };
        debug!(effect = effect.label(), step = %self.step, "effect sent");
        self.pending = Some(Pending { end, effect, said });
    }

    fn send(&self, effect: &Effect) -> Option<BoxFuture<'static, Said>> {
        let agents = Arc::clone(&self.planner.parts.agents);
        let (row, step) = (self.row.clone(), self.step);
        if *effect == Effect::ArmReceiver {
            let effect = effect.clone();
            return Some(Box::pin(async move {
                let source = &row.migration.source;
                match agents.describe_source(source, row.migration.vm).await {
                    Ok(description) => {
                        let command =
                            command((&row.migration, row.claim), &effect, Some(description), step);
                        execute(agents.as_ref(), command).await
                    }
                    Err(error) => Said::NotDescribed(error),
                }
            }));
        }
        if effect.starts_from_disks() {
            let (planner, effect) = (Arc::clone(self.planner), effect.clone());
            return Some(Box::pin(async move {
                match planner.store().vm(row.migration.vm).await {
                    Ok(Some(vm)) => {
                        let (definition, resolved_machine) = (vm.definition, vm.resolved_machine);
                        let known = SourceDescription {
                            definition,
                            resolved_machine,
                            ..SourceDescription::default()
                        };
                        execute(
                            agents.as_ref(),
                            command((&row.migration, row.claim), &effect, Some(known), step),
                        )
                        .await
                    }
                    Ok(None) => Said::NotSent("the store has no such VM".to_owned()),
                    Err(error) => Said::NotSent(Chain(&error).to_string()),
                }
            }));
        }
        let command = command((&row.migration, row.claim), effect, None::<SourceDescription>, step);
        Some(Box::pin(async move { execute(agents.as_ref(), command).await }))
    }

    /// Takes what came of the command under way.
    async fn hear(&mut self, said: Said) -> Result<Option<Outcome>, StoreError> {
        let Some(Pending { end, effect, .. }) = self.pending.take() else { return Ok(None) };
        let reply = match said {
            Said::Executed(answer) => match *answer {
                Ok(reply) => reply,
                Err(error) => return self.refused(end, &effect, error).await,
            },
            Said::NotDescribed(error) => return self.not_described(error).await,
            Said::NotSent(error) => {
                self.trouble = Some(error);
                self.not_before = Instant::now() + self.backoff.next();
                return Ok(None);
            }
        };
        self.backoff.reset();
        self.trouble = None;
        let Some(observation) = reply.observation else {
            warn!(effect = effect.label(), "an agent answered without saying what it sees");
            return Ok(Some(self.claim_anew()));
        };
        match end {
            End::Source => self.source.0.take(observation),
            End::Destination => self.destination.0.take(observation),
        }
        let armed = reply.listener.as_ref().and_then(listener);
        self.answered = Some((self.row.seq, effect.clone(), Instant::now()));
        match (effect, armed) {
            (Effect::ArmReceiver, Some(listener)) => {
                match self.apply(Event::ReceiverArmed { listener }).await? {
                    Applied::Superseded => Ok(Some(Outcome::Superseded)),
                    Applied::Moved | Applied::Nothing | Applied::Reread => Ok(None),
                }
            }
            (
                Effect::ArmReceiver
                | Effect::TryAdmit
                | Effect::HoldGuest
                | Effect::ShutDownGuest
                | Effect::StartReceiver
                | Effect::RestartSource { .. }
                | Effect::StartTransfer { .. }
                | Effect::OrderSwitchover
                | Effect::KillSource { .. }
                | Effect::Commit
                | Effect::ContinueDestination
                | Effect::StartPostcopy
                | Effect::RecoverReceiver
                | Effect::ResumeTransfer { .. }
                | Effect::SetLimits { .. }
                | Effect::ReleaseSource { .. }
                | Effect::CancelTransfer { .. }
                | Effect::DestroyReceiver { .. }
                | Effect::ResumeSource { .. },
                _,
            ) => Ok(None),
        }
    }

    /// Takes an agent's no, or its silence.
    async fn refused(
        &mut self,
        end: End,
        effect: &Effect,
        error: AgentError,
    ) -> Result<Option<Outcome>, StoreError> {
        self.trouble = Some(Chain(&error).to_string());
        let AgentError::Refused { message, detail, .. } = &error else {
            // It may have arrived all the same: only under a newer claim can it land no more.
            debug!(effect = effect.label(), error = %Chain(&error), "effect went unanswered");
            return Ok(Some(self.claim_anew()));
        };
        match detail.code.as_str() {
            "stale_claim" | "stale_generation" => {
                self.raise(&error).await?;
                return Ok(Some(self.claim_anew()));
            }
            "step_reused" => {
                error!(effect = effect.label(), error = %Chain(&error), "a step was used twice");
                return Ok(Some(self.claim_anew()));
            }
            _ => {}
        }
        let passes = passes(detail);
        let had_no_effect = had_no_effect(detail);
        if !passes && self.row.migration.begins_with(effect) {
            info!(effect = effect.label(), error = %Chain(&error), "refused");
            let blockers = blockers(host_of(&self.row.migration, end), message, detail);
            let outcome = self.give_back(blockers).await?;
            return Ok(outcome.or_else(|| (!had_no_effect).then(|| self.claim_anew())));
        }
        warn!(effect = effect.label(), error = %Chain(&error), "effect refused; it is tried again");
        if !had_no_effect {
            return Ok(Some(self.claim_anew()));
        }
        self.not_before = Instant::now() + self.backoff.next();
        Ok(None)
    }

    async fn not_described(&mut self, error: AgentError) -> Result<Option<Outcome>, StoreError> {
        self.trouble = Some(Chain(&error).to_string());
        match &error {
            AgentError::Refused { message, detail, .. } if !passes(detail) => {
                info!(error = %Chain(&error), "source could not be described");
                let host = Some(self.row.migration.source.clone());
                let blockers = blockers(host, message, detail);
                self.give_back(blockers).await
            }
            AgentError::Refused { .. } | AgentError::Unreachable { .. } => {
                self.not_before = Instant::now() + self.backoff.next();
                Ok(None)
            }
        }
    }

    async fn give_back(&mut self, blockers: Vec<Blocker>) -> Result<Option<Outcome>, StoreError> {
        match self.apply(Event::Refused { blockers }).await? {
            Applied::Superseded => Ok(Some(Outcome::Superseded)),
            Applied::Moved | Applied::Nothing | Applied::Reread => Ok(None),
        }
    }
}

/// Waits for the command under way; for ever if there is none.
async fn answer(pending: &mut Option<Pending>) -> Said {
    match pending {
        Some(pending) => (&mut pending.said).await,
        None => std::future::pending().await,
    }
}

async fn execute(agents: &dyn crate::agents::Agents, command: Option<Command>) -> Said {
    match command {
        Some(command) => {
            Said::Executed(Box::new(agents.execute(&command.host, command.request).await))
        }
        None => std::future::pending().await,
    }
}
