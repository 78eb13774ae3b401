//! A VM's lane: one command at a time is carried out.
//!
//! ```text
//! fence ──► knowledge ──► note ──► action (journal, then act) ──► answer in the journal ──► reply
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;
use vmferry_agent_core::fence::{ClaimDecision, Decision};
use vmferry_agent_core::journal::{Continued, Order, Part, VmRecord};
use vmferry_agent_core::outgoing::GiveUp;
use vmferry_proto::v1;
use vmferry_types::{Claim, Generation, MigrationId};

use crate::actions::{self, Outcome};
use crate::agent::Agent;
use crate::error::CommandError;
use crate::live::{Knowledge, Shared, Sight};
use crate::process::{OobError, OutOfBand, ProcessDir, QemuProcess};
use crate::vm::{ClaimCommand, Command, LaneSender, Message};
use crate::{clock, observe, observer, ownership};

/// The command that a lane is carrying out.
#[derive(Debug)]
struct Current {
    label: &'static str,
    journalled: Journalled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Journalled {
    NotYet,
    Once,
}

/// A watch over a process.
#[derive(Debug)]
struct Observation {
    stop: CancellationToken,
    ended: tokio::task::JoinHandle<()>,
}

/// The one task that changes a VM.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) agent: Arc<Agent>,
    pub(crate) shared: Arc<Shared>,
    /// The record as it is to be; on the disk after [`Lane::persist`].
    pub(crate) record: VmRecord,
    current: Option<Current>,
    discarded: Vec<PathBuf>,
    watch: Option<Observation>,
    own: LaneSender,
}

impl Lane {
    pub(crate) fn new(
        agent: &Arc<Agent>,
        shared: &Arc<Shared>,
        record: VmRecord,
        own: LaneSender,
    ) -> Self {
        Self {
            agent: agent.clone(),
            shared: shared.clone(),
            record,
            current: None,
            discarded: Vec::new(),
            watch: None,
            own,
        }
    }

    pub(crate) async fn run(&mut self, mut inbox: mpsc::Receiver<Message>) {
        while let Some(message) = inbox.recv().await {
            match message {
                Message::Claim(claim, answer) => {
                    let reply = self.claim(claim).await;
                    // Whoever asked may have gone; what was done stays done.
                    drop(answer.send(reply));
                }
                Message::NextClaim(migration, answer) => {
                    drop(answer.send(self.next_claim(migration).await));
                }
                Message::Execute(command, answer) => {
                    let label = actions::label(&command.action);
                    let span = tracing::info_span!("command", action = label,
                        migration_id = %command.fence.migration, claim = %command.fence.claim,
                        step = %command.fence.step, generation = %command.fence.generation);
                    let reply = Box::pin(self.execute(*command)).instrument(span).await;
                    drop(answer.send(reply));
                }
                Message::GiveUp(migration, cause) => {
                    Box::pin(self.give_up(migration, cause)).await;
                }
                Message::Silent(migration) => self.force(migration).await,
                Message::Gone => self.clear_receiver().await,
                Message::Forget(answer) => {
                    let forgotten = self.forget();
                    let over = forgotten.is_ok();
                    drop(answer.send(forgotten));
                    if over {
                        return;
                    }
                }
                Message::Seed(generation, claim, answer) => {
                    drop(answer.send(self.seed(generation, claim).await));
                }
            }
        }
    }

    /// Removes the record of a VM that nothing was ever done to.
    fn forget(&self) -> Result<(), CommandError> {
        if !crate::idle::only_claimed(&self.record) {
            return Err(CommandError::wrong_state("the VM has been used since"));
        }
        self.agent
            .journal
            .remove(self.shared.id)
            .map_err(|error| CommandError::failed("remove a record", &error))
    }

    /// Refuses where the record itself proves nothing.
    fn check_record(&self) -> Result<(), CommandError> {
        let sight = self.shared.sight.borrow();
        match sight.knowledge {
            Knowledge::Unreadable => Err(CommandError::Unreadable(sight.trouble.clone())),
            Knowledge::Learning | Knowledge::Known | Knowledge::Unresponsive => Ok(()),
        }
    }

    async fn claim(&mut self, claim: ClaimCommand) -> Result<v1::VmObservation, CommandError> {
        self.check_record()?;
        match self.record.fence.decide_claim(claim.migration, claim.generation, claim.claim) {
            ClaimDecision::Refuse(refusal) => return Err(CommandError::Fence(refusal)),
            ClaimDecision::Take | ClaimDecision::Held => {}
        }
        self.shared.hear();
        self.record.fence.claim(claim.migration, claim.generation, claim.claim);
        if claim.hold_limit_ms != 0 {
            self.record.hold_limit_ms = claim.hold_limit_ms;
        }
        self.persist_changes().await?;
        Ok(observe::observation(&self.agent, &self.shared))
    }

    /// Takes the next claim for a caller that has no planner to count for it.
    ///
    /// For the admission that holds the VM already, an unused claim is answered again and a used
    /// one is followed by the next: so a caller that lost an answer, or died, goes on.
    async fn next_claim(
        &mut self,
        migration: MigrationId,
    ) -> Result<v1::VmObservation, CommandError> {
        self.check_record()?;
        if let Some(open) = self.record.open_admission().filter(|open| *open != migration) {
            return Err(CommandError::MigrationOpen(open));
        }
        let fence = &mut self.record.fence;
        let unused = fence.migration == Some(migration) && fence.last.is_none();
        if !unused {
            let (generation, next) = (fence.generation.max(Generation::FIRST), fence.claim.next());
            if next == fence.claim {
                return Err(CommandError::wrong_state("every claim of this VM was given out"));
            }
            fence.claim(migration, generation, next);
        }
        self.shared.hear();
        self.persist_changes().await?;
        Ok(observe::observation(&self.agent, &self.shared))
    }

    async fn seed(&mut self, generation: Generation, claim: Claim) -> Result<(), CommandError> {
        self.check_record()?;
        let fence = &mut self.record.fence;
        if generation > fence.generation || claim > fence.claim {
            fence.generation = fence.generation.max(generation);
            if claim > fence.claim {
                fence.claim = claim;
                fence.migration = None;
                fence.step = vmferry_types::Step::from_stored(0);
                fence.last = None;
            }
        }
        self.persist_changes().await
    }

    /// Writes the record down unless the disk has it: what is only in memory, because a write
    /// failed before, was never answered for.
    async fn persist_changes(&mut self) -> Result<(), CommandError> {
        let written = *self.shared.record.borrow().as_ref() == self.record;
        if written { Ok(()) } else { self.persist().await }
    }

    async fn execute(&mut self, command: Command) -> Result<v1::ExecuteReply, CommandError> {
        self.check_record()?;
        match self.record.fence.decide(&command.fence, &command.digest) {
            Decision::Refuse(refusal) => return Err(CommandError::Fence(refusal)),
            Decision::Replay { answer } => return actions::replay(&answer),
            Decision::Execute | Decision::Resume => {}
        }
        ownership::check(&self.agent, &command.fence, &command.action)
            .map_err(CommandError::Fence)?;
        self.shared.hear();
        actions::check_knowledge(&command.action, &self.shared.sight.borrow())?;
        let label = actions::label(&command.action);
        self.record.fence.note(&command.fence, command.digest);
        let noted = self.record.clone();
        self.current = Some(Current { label, journalled: Journalled::NotYet });
        let outcome = Box::pin(actions::run(self, &command.fence, command.action)).await;
        let reply = match outcome {
            Ok(outcome) => self.answer(label, outcome).await,
            Err(error) => {
                self.refuse(noted, &error).await;
                Err(error)
            }
        };
        self.current = None;
        reply
    }

    /// Writes the first answer down before it is given.
    async fn answer(
        &mut self,
        label: &str,
        outcome: Outcome,
    ) -> Result<v1::ExecuteReply, CommandError> {
        self.agent.faults.at("before_answer", label).await;
        let host = &self.agent.config.host_id;
        let sight = self.shared.sight.borrow().clone();
        if let Some(written) = self.record.process_mut()
            && written.identity.is_none()
        {
            written.identity.clone_from(&sight.identity);
        }
        let reply = v1::ExecuteReply {
            observation: Some(v1::VmObservation {
                waits_at: self.shared.waits_at(),
                ..observe::of(&self.agent, &self.record, &sight)
            }),
            replayed: false,
            listener: outcome.listener,
            gone: outcome.gone.map(|gone| crate::wire::gone_to_wire(&gone, host)),
            resolved_machine: outcome.resolved_machine,
        };
        self.record.fence.answer(actions::encode_answer(&reply));
        if let Err(error) = self.persist().await {
            // An answer that is not on the disk is none: the repeat has to write it.
            if let Some(last) = &mut self.record.fence.last {
                last.answer = None;
            }
            return Err(error);
        }
        self.discard();
        tracing::info!("command carried out");
        Ok(reply)
    }

    /// Puts the record back to what is on the disk, with the command noted: what is older than it
    /// stays refused.
    async fn refuse(&mut self, noted: VmRecord, error: &CommandError) {
        tracing::info!(code = error.label(), error = %error, "command refused");
        let journalled = self.current.as_ref().map(|current| current.journalled);
        if journalled == Some(Journalled::Once) {
            self.record = VmRecord::clone(&self.shared.record.borrow());
            self.discard();
        } else {
            self.record = noted;
        }
        self.record.fence.refused();
        if let Err(error) = self.persist().await {
            tracing::error!(%error, "cannot note a refused command");
        }
    }

    /// Calls a transfer back by the agent's own word.
    async fn give_up(&mut self, migration: MigrationId, cause: GiveUp) {
        let unheard = match cause {
            GiveUp::Unheard(limit) => clock::monotonic().less(self.shared.heard()) >= limit,
            GiveUp::Stalled(_) | GiveUp::TimedOut(_) | GiveUp::Unfinished => true,
        };
        if self.superseded() {
            // Whatever became of it, it goes on elsewhere: here it must never run again.
            return;
        }
        let held = self.record.hold().is_some_and(|hold| hold.migration == migration);
        let sent = self.record.sent().filter(|sent| sent.migration == migration);
        if !unheard || !(held || sent.is_some()) {
            return;
        }
        match (sent.map(|sent| &sent.order), cause) {
            // Noted before, and never called back or let go on.
            (None | Some(Order::GaveUp { .. } | Order::TakenBack { .. }), GiveUp::Unfinished) => {}
            (
                None | Some(Order::Open),
                GiveUp::Stalled(_) | GiveUp::TimedOut(_) | GiveUp::Unheard(_),
            ) => {
                self.record.give_up(migration, cause.to_string());
                if let Err(error) = self.persist().await {
                    // Not written, so not done: the driver may still order.
                    self.record = VmRecord::clone(&self.shared.record.borrow());
                    tracing::error!(%error, "cannot note that a transfer is given up");
                    return;
                }
            }
            (
                Some(Order::Open | Order::Handed | Order::GaveUp { .. } | Order::TakenBack { .. }),
                GiveUp::Stalled(_) | GiveUp::TimedOut(_) | GiveUp::Unheard(_) | GiveUp::Unfinished,
            ) => return,
        }
        tracing::warn!(%migration, cause = %cause, "transfer is called back");
        if let Err(error) = actions::go_on(self).await {
            if self.shared.sight.borrow().gone.is_some() {
                // It died with its transfer: nothing is left to be called back.
                tracing::info!(%error, "transfer ended with its process");
            } else if matches!(error, CommandError::Unresponsive(_)) {
                // It may be dying; what is noted and not done is called back again.
                tracing::warn!(%error, "transfer is not called back yet");
            } else {
                tracing::error!(%error, "transfer could not be called back");
            }
        }
    }

    /// Forces the channel of a divided guest to break, so that it can be mended.
    async fn force(&mut self, migration: MigrationId) {
        let handed = self
            .record
            .sent()
            .is_some_and(|sent| sent.migration == migration && sent.order == Order::Handed);
        if !handed {
            return;
        }
        tracing::warn!(%migration, "nothing crosses: the channel is forced to break");
        if let Err(error) = actions::force(self).await {
            // The observer says it again.
            tracing::warn!(%error, "the channel is not forced to break yet");
        }
    }

    /// Executes out of band, also in a QEMU whose monitor does not greet: its main loop may wait for
    /// a page of its own guest.
    pub(crate) async fn oob<C: vmferry_qmp::Command>(
        &self,
        command: C,
        deadline: std::time::Duration,
    ) -> Result<C::Ok, CommandError> {
        let failed = |error: OobError| CommandError::failed("reach QEMU out of band", &error);
        if let Some(process) = self.shared.process() {
            return process.oob(command, deadline).await.map_err(failed);
        }
        let Some(written) = self.record.process() else {
            return Err(CommandError::wrong_state("no QEMU of this VM is here"));
        };
        let dir = ProcessDir::new(&written.dir);
        OutOfBand::of(dir).execute(command, deadline).await.map_err(failed)
    }

    /// Says whether the guest is another host's by now: somebody commands under a newer generation
    /// than the one it runs under here, or a planner says so.
    fn superseded(&self) -> bool {
        let Some(process) = self.record.process() else { return false };
        self.record.fence.generation > process.generation
            || self.agent.superseded(self.shared.id, process.generation)
    }

    /// Clears away what is left of a receiver that is proven gone and was never to run: nobody has
    /// to ask for that, and whoever asks what became of it still finds the proof.
    async fn clear_receiver(&mut self) {
        let migration = match &self.record.part {
            Part::Receiver { incoming, .. } if incoming.cont == Continued::Never => {
                incoming.migration
            }
            Part::Receiver { .. } | Part::Running { .. } | Part::Stopped { .. } | Part::Absent => {
                return;
            }
        };
        let Some(gone) = self.shared.sight.borrow().gone.clone() else { return };
        if let Err(error) = actions::clear(self, migration, &gone).await {
            // The next command, or the next start of the agent, does it.
            self.record = VmRecord::clone(&self.shared.record.borrow());
            tracing::error!(%error, "cannot clear away a receiver that is gone");
            return;
        }
        self.discard();
        tracing::info!(%migration, ended = %gone.ended, "receiver is gone and cleared away");
    }

    /// Writes the record down. After it returned, a power cut finds it.
    pub(crate) async fn persist(&mut self) -> Result<(), CommandError> {
        let first = self
            .current
            .as_ref()
            .filter(|current| current.journalled == Journalled::NotYet)
            .map(|current| current.label);
        if let Some(label) = first {
            self.agent.faults.at("before_journal", label).await;
        }
        self.agent
            .journal
            .write(&self.record)
            .await
            .map_err(|error| CommandError::failed("write the journal", &error))?;
        self.shared.record.send_replace(Arc::new(self.record.clone()));
        self.agent.changed();
        if let Some(current) = &mut self.current {
            current.journalled = Journalled::Once;
        }
        if let Some(label) = first {
            self.agent.faults.at("after_journal", label).await;
        }
        Ok(())
    }

    /// Watches a process that was just launched, or looks for the one in the record.
    pub(crate) fn observe(&mut self, launched: Option<QemuProcess>) {
        let stop = CancellationToken::new();
        let (agent, shared, lane) = (self.agent.clone(), self.shared.clone(), self.own.clone());
        let task = observer::watch(agent, shared, lane, launched, stop.clone());
        let ended = self.agent.shutdown.spawn(task.in_current_span());
        self.watch = Some(Observation { stop, ended });
    }

    /// Ends the watch: there is no process any more.
    pub(crate) async fn forget_process(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.stop.cancel();
            if let Err(error) = watch.ended.await {
                tracing::error!(%error, "the observer ended badly");
            }
        }
        self.shared.set_process(None);
        self.shared.sight.send_replace(Sight::nothing(Knowledge::Known));
    }

    /// Refuses where the journal is new or was lost: nothing may be started over what it forgot.
    pub(crate) fn check_journal(&self) -> Result<(), CommandError> {
        if self.agent.journal_proves() {
            return Ok(());
        }
        Err(CommandError::Unreadable(
            "it is new or was lost; it counts again once the planner has answered a report"
                .to_owned(),
        ))
    }

    /// Removes the directories of launches whose end is on the disk.
    fn discard(&mut self) {
        let record = self.shared.record.borrow().clone();
        let kept = record.process().map(|process| PathBuf::from(&process.dir));
        for dir in std::mem::take(&mut self.discarded) {
            if Some(&dir) != kept.as_ref() {
                self.agent.discard(&dir);
            }
        }
    }

    /// Removes a launch's directory once the answer is written down.
    pub(crate) fn discard_later(&mut self, dir: &str) {
        self.discarded.push(dir.into());
    }

    /// Returns the process, whose monitor was last seen to answer.
    pub(crate) fn process(&self) -> Result<Arc<QemuProcess>, CommandError> {
        if let Some(process) = self.shared.process() {
            return Ok(process);
        }
        let sight = self.shared.sight.borrow();
        match &sight.gone {
            Some(gone) => Err(CommandError::wrong_state(format!(
                "the QEMU of this VM is gone: {} {}",
                gone.ended, gone.stderr_tail
            ))),
            None if self.record.process().is_none() => {
                Err(CommandError::wrong_state("no QEMU of this VM is here"))
            }
            None => Err(CommandError::Unresponsive(sight.trouble.clone())),
        }
    }
}
