//! What others hold of a VM.
//!
//! Whoever wants something of a VM holds a [`VmHandle`]; its [lane](crate::lane) alone changes its
//! record and its process. What is seen of it can be read at any time, whatever the lane is busy
//! with.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tracing::Instrument as _;
use vmferry_agent_core::journal::VmRecord;
use vmferry_agent_core::outgoing::GiveUp;
use vmferry_proto::v1;
use vmferry_types::{Claim, Fence, Generation, MigrationId, VmId};

use crate::agent::Agent;
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::{Knowledge, Shared, Sight};
use crate::observe;

/// How many commands may wait for a VM's lane.
const QUEUE: usize = 16;

/// A command, checked as far as its form goes.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) fence: Fence,
    pub(crate) digest: String,
    pub(crate) action: v1::execute_request::Action,
}

/// A claim, checked as far as its form goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClaimCommand {
    pub(crate) migration: MigrationId,
    pub(crate) generation: Generation,
    pub(crate) claim: Claim,
    pub(crate) hold_limit_ms: u64,
}

pub(crate) type Answer<T> = oneshot::Sender<Result<T, CommandError>>;

/// What a lane is told.
#[derive(Debug)]
pub(crate) enum Message {
    Claim(ClaimCommand, Answer<v1::VmObservation>),
    NextClaim(MigrationId, Answer<v1::VmObservation>),
    Execute(Box<Command>, Answer<v1::ExecuteReply>),
    GiveUp(MigrationId, GiveUp),
    /// The channel of a divided guest is silent.
    Silent(MigrationId),
    Gone,
    Forget(Answer<()>),
    Seed(Generation, Claim, Answer<()>),
}

/// The way into a lane.
#[derive(Clone, Debug)]
pub(crate) struct LaneSender(mpsc::Sender<Message>);

impl LaneSender {
    /// Says that a transfer's limit is past. May be said again: the lane looks anew.
    pub(crate) fn give_up(&self, migration: MigrationId, cause: GiveUp) {
        // A full lane is busy with this VM; the observer says it again.
        if self.0.try_send(Message::GiveUp(migration, cause)).is_err() {
            tracing::debug!(%migration, "lane is busy");
        }
    }

    /// Says that nothing crosses any more. May be said again: the lane looks anew.
    pub(crate) fn silent(&self, migration: MigrationId) {
        if self.0.try_send(Message::Silent(migration)).is_err() {
            tracing::debug!(%migration, "lane is busy");
        }
    }

    /// Says that the process is proven gone.
    pub(crate) fn gone(&self) {
        // A full lane comes to it with the commands that fill it: they find the same proof.
        if self.0.try_send(Message::Gone).is_err() {
            tracing::debug!("lane is busy");
        }
    }
}

/// What others hold of a VM.
#[derive(Clone, Debug)]
pub(crate) struct VmHandle {
    pub(crate) shared: Arc<Shared>,
    lane: LaneSender,
}

impl VmHandle {
    /// Takes up a VM whose record is whole.
    pub(crate) fn known(agent: &Arc<Agent>, record: VmRecord) -> Self {
        let knowledge =
            if record.process().is_some() { Knowledge::Learning } else { Knowledge::Known };
        Self::spawn(agent, record, Sight::nothing(knowledge))
    }

    /// Takes up a VM whose record cannot be read: nothing may be done to it.
    pub(crate) fn unreadable(agent: &Arc<Agent>, vm: VmId, trouble: String) -> Self {
        let sight = Sight { trouble, ..Sight::nothing(Knowledge::Unreadable) };
        Self::spawn(agent, VmRecord::new(vm), sight)
    }

    fn spawn(agent: &Arc<Agent>, record: VmRecord, sight: Sight) -> Self {
        let (sender, inbox) = mpsc::channel(QUEUE);
        let learn = record.process().is_some();
        let shared = Arc::new(Shared::new(record.clone(), sight));
        let lane = LaneSender(sender);
        let mut task = Lane::new(agent, &shared, record, lane.clone());
        let span = tracing::info_span!(parent: None, "vm", vm_id = %shared.id);
        agent.shutdown.spawn(
            async move {
                if learn {
                    task.observe(None);
                }
                task.run(inbox).await;
            }
            .instrument(span),
        );
        Self { shared, lane }
    }

    pub(crate) fn unreadable_cause(&self) -> Option<String> {
        let sight = self.shared.sight.borrow();
        (sight.knowledge == Knowledge::Unreadable).then(|| sight.trouble.clone())
    }

    pub(crate) fn unreadable_vm(&self) -> bool {
        self.unreadable_cause().is_some()
    }

    /// Takes the VM for a driver.
    pub(crate) async fn claim(
        &self,
        claim: ClaimCommand,
    ) -> Result<v1::VmObservation, CommandError> {
        self.ask(|answer| Message::Claim(claim, answer)).await
    }

    /// Takes the VM's next claim for whoever counts none.
    pub(crate) async fn next_claim(
        &self,
        migration: MigrationId,
    ) -> Result<v1::VmObservation, CommandError> {
        self.ask(|answer| Message::NextClaim(migration, answer)).await
    }

    /// Carries out a command.
    pub(crate) async fn execute(&self, command: Command) -> Result<v1::ExecuteReply, CommandError> {
        self.ask(|answer| Message::Execute(Box::new(command), answer)).await
    }

    /// Ends the lane of a VM that nothing was ever done to, and removes its record.
    pub(crate) async fn forget(&self) -> Result<(), CommandError> {
        self.ask(Message::Forget).await
    }

    /// Takes up the planner's word on who owns the VM.
    pub(crate) async fn seed(
        &self,
        generation: Generation,
        claim: Claim,
    ) -> Result<(), CommandError> {
        self.ask(|answer| Message::Seed(generation, claim, answer)).await
    }

    async fn ask<T>(&self, message: impl FnOnce(Answer<T>) -> Message) -> Result<T, CommandError> {
        let (answer, answered) = oneshot::channel();
        let ended = || CommandError::Failed {
            operation: "command the VM",
            cause: "the agent is shutting down; ask again".to_owned(),
        };
        self.lane.0.send(message(answer)).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }

    /// Returns what is observed of the VM.
    pub(crate) fn observe(&self, agent: &Agent) -> v1::VmObservation {
        observe::observation(agent, &self.shared)
    }
}
