//! What lies between planners and agents, and the port to the latter over it.
//!
//! A message may be lost, late, doubled, or overtaken. Whoever waits for its answer gives up after
//! a while; the message may still arrive.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt as _};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use vmferry_planner::agents::{AgentError, Agents, Answer};
use vmferry_proto::v1::{
    CheckReply, ClaimRequest, ExecuteReply, ExecuteRequest, HostReport, ObserveRequest,
    SourceDescription, VmObservation, VmPorts,
};
use vmferry_types::{HostId, Role, VmId};

use crate::agent::{Ask, Refusal, Tell, label};
use crate::bugs::Bug;
use crate::life::{Fate, Life};
use crate::mistakes::taken_for_dead;
use crate::world::{Mishap, Place, PointKind, State, Told, World};

/// A dead peer is noticed within this.
const KEEPALIVE_MS: u64 = 5_000;
const LOOK_DEADLINE: Duration = Duration::from_secs(5);
const COMMAND_DEADLINE: Duration = Duration::from_secs(30);
/// While data is crossing a watch says something at least this often.
const BUSY: Duration = Duration::from_millis(250);
/// Else it says something when anything changes, and now and then.
const IDLE: Duration = Duration::from_secs(5);

/// The agents, as one life of a planner reaches them.
#[derive(Debug)]
pub(crate) struct SimAgents {
    pub(crate) life: Arc<Life>,
}

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(crate) enum NoAnswer {
    Silence(&'static str),
    Refused(Refusal),
}

/// How one message fares.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that are true or not, each by itself, as a world has them"
)]
pub(crate) struct Passage {
    delay: Duration,
    arrives: bool,
    answered: bool,
    /// After how long it arrives once more, if it does.
    again: Option<Duration>,
    /// The agent answers no, having done nothing.
    refused: bool,
    agent: Survives,
}

/// How much of a message the agent that gets it lives to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Survives {
    Everything,
    /// It carries it out, and does not answer.
    TheCall,
    Not,
}

impl Passage {
    /// A message that nothing befalls but a delay.
    pub(crate) const fn plain(delay: Duration) -> Self {
        Self {
            delay,
            arrives: true,
            answered: true,
            again: None,
            refused: false,
            agent: Survives::Everything,
        }
    }

    /// Draws how a message fares.
    fn draw(world: &World, fate: Fate, kind: PointKind) -> Self {
        world.with(|state| {
            let weather = state.weather.clone();
            let storm = state.at_ms() < weather.calm_at_ms;
            let dice = &mut state.dice.network;
            let delay = dice.millis(0, weather.delay_max);
            let mut passage = Self::plain(delay);
            let commands = kind == PointKind::Command;
            if storm {
                passage.arrives = !dice.chance(weather.lost / 2);
                passage.answered = !dice.chance(weather.lost / 2);
                if commands && dice.chance(weather.doubled) {
                    passage.again = Some(dice.millis(0, 3_000));
                }
                if commands && dice.chance(weather.late) {
                    let late = dice.millis(500, 60_000);
                    if dice.chance(500) { passage.delay = late } else { passage.again = Some(late) }
                }
            }
            match fate {
                Fate::Goes | Fate::DiesAfter => {}
                Fate::Mishap(mishap) => passage.befall(mishap),
            }
            let odd = !passage.arrives || !passage.answered || passage.again.is_some();
            if odd {
                state.counts.mishaps += 1;
            }
            passage
        })
    }

    const fn befall(&mut self, mishap: Mishap) {
        match mishap {
            Mishap::RequestLost => self.arrives = false,
            Mishap::AnswerLost => self.answered = false,
            Mishap::Refused => self.refused = true,
            Mishap::Doubled => self.again = Some(Duration::ZERO),
            Mishap::DoubledLate(ms) => self.again = Some(Duration::from_millis(ms)),
            Mishap::Late(ms) => self.delay = Duration::from_millis(ms),
            Mishap::AgentDiesBefore => self.agent = Survives::Not,
            Mishap::AgentDiesAfter => self.agent = Survives::TheCall,
            Mishap::PlannerDiesBefore
            | Mishap::PlannerDiesAfter
            | Mishap::AgentDies
            | Mishap::SourceJournalLost
            | Mishap::DestinationJournalLost
            | Mishap::SourceQemuDies
            | Mishap::DestinationQemuDies
            | Mishap::SourceHostDies
            | Mishap::DestinationHostDies
            | Mishap::ChannelBreaks
            | Mishap::SourceFreezes
            | Mishap::Cancel => {}
        }
    }
}

impl SimAgents {
    fn place(&self) -> Place {
        Place::Planner(self.life.number)
    }

    /// Asks an agent, and waits for its answer until a deadline.
    async fn ask(&self, host: &HostId, operation: &'static str, ask: Ask) -> Answer<Tell> {
        let (kind, deadline) = match &ask {
            Ask::Execute(_) => (PointKind::Command, COMMAND_DEADLINE),
            Ask::Claim(_)
            | Ask::NextClaim(..)
            | Ask::Observe(_)
            | Ask::Describe(_)
            | Ask::Check => (PointKind::Look, LOOK_DEADLINE),
        };
        let what = match &ask {
            Ask::Execute(request) => request.action.as_ref().map_or("nothing", label),
            Ask::Claim(_)
            | Ask::NextClaim(..)
            | Ask::Observe(_)
            | Ask::Describe(_)
            | Ask::Check => operation,
        };
        let fate = self.life.before(kind, what).await;
        let world = &self.life.world;
        let passage = Passage::draw(world, fate, kind);
        let (answer, answered) = oneshot::channel();
        world.carry(self.place(), host.clone(), ask.clone(), passage, Some(answer));
        if let Some(after) = passage.again {
            let again = Passage {
                delay: passage.delay + after,
                again: None,
                refused: false,
                arrives: true,
                agent: Survives::Everything,
                ..passage
            };
            world.carry(self.place(), host.clone(), ask, again, None);
        }
        let heard = tokio::time::timeout(deadline, answered).await;
        self.life.after(fate).await;
        let unreachable = |reason: &str| AgentError::Unreachable {
            host: host.clone(),
            operation,
            reason: reason.to_owned(),
        };
        match heard {
            Ok(Ok(Ok(tell))) => Ok(tell),
            Ok(Ok(Err(NoAnswer::Silence(why)))) => Err(unreachable(why)),
            Ok(Ok(Err(NoAnswer::Refused(refusal)))) => Err(AgentError::Refused {
                host: host.clone(),
                operation,
                message: refusal.message,
                detail: Box::new(refusal.detail),
            }),
            Ok(Err(_)) => Err(unreachable("the connection broke")),
            Err(_) => Err(unreachable("no answer in time")),
        }
    }

    /// Notes when a command left.
    fn note_sent(&self, request: &ExecuteRequest) {
        let Some(fence) = &request.fence else { return };
        let Ok(vm) = fence.vm_id.parse::<VmId>() else { return };
        self.life.world.with(|state| {
            let at = state.at_ms();
            state.sent.insert((vm, fence.claim, fence.step), at);
        });
    }

    fn observation(tell: Tell) -> VmObservation {
        match tell {
            Tell::Observation(seen) => *seen,
            Tell::Reply(_) | Tell::Description(_) | Tell::Check(_) => VmObservation::default(),
        }
    }
}

impl State {
    /// Notes what a planner was told in an answer.
    fn told(&mut self, tell: &Tell) {
        match tell {
            Tell::Observation(seen) => self.told_of(seen),
            Tell::Reply(reply) => {
                if let Some(seen) = &reply.observation {
                    self.told_of(seen);
                }
            }
            Tell::Description(_) | Tell::Check(_) => {}
        }
    }

    /// Notes that whoever holds a claim was told that one end's process is gone.
    fn told_of(&mut self, seen: &VmObservation) {
        let end = match Role::from_label(&seen.role) {
            Some(Role::Running | Role::Held) => Told::Source,
            Some(Role::Receiver) => Told::Destination,
            Some(Role::Stopped | Role::Absent) | None => return,
        };
        if let (Some(_), Ok(vm)) = (&seen.gone, seen.vm_id.parse()) {
            let at = self.at_ms();
            self.ends_told.entry((vm, seen.claim, end)).or_insert(at);
        }
    }

    /// Says whether a command left a planner that knew by then that an end's process is gone.
    pub(crate) fn knew(&self, vm: VmId, (claim, step): (u64, u64), end: Told) -> bool {
        let told = self.ends_told.get(&(vm, claim, end));
        let sent = self.sent.get(&(vm, claim, step));
        matches!((told, sent), (Some(told), Some(sent)) if told < sent)
    }
}

pub(crate) type Answerer = oneshot::Sender<Result<Tell, NoAnswer>>;

impl World {
    /// Carries a message to an agent, and its answer back, whatever becomes of who sent it.
    #[expect(clippy::too_many_arguments, reason = "a message with all that befalls it")]
    pub(crate) fn carry(
        &self,
        from: Place,
        host: HostId,
        ask: Ask,
        passage: Passage,
        answer: Option<Answerer>,
    ) {
        let world = self.clone();
        self.spawn(async move {
            let outcome = world.there_and_back(&from, &host, ask, passage).await;
            if let Some(answer) = answer {
                // Who gave up hears nothing.
                drop(answer.send(outcome));
            }
        });
    }

    async fn there_and_back(
        &self,
        from: &Place,
        host: &HostId,
        ask: Ask,
        passage: Passage,
    ) -> Result<Tell, NoAnswer> {
        tokio::time::sleep(passage.delay).await;
        let there = Place::Host(host.clone());
        if !passage.arrives || !self.with(|state| state.reaches(from, &there)) {
            return self.breaks().await;
        }
        let Some(agent) = self.agent(host) else {
            return Err(NoAnswer::Silence("connection refused"));
        };
        if passage.refused {
            return Err(NoAnswer::Refused(Refusal::new("internal", "something here failed")));
        }
        if passage.agent == Survives::Not {
            agent.die();
            return self.breaks().await;
        }
        let told = agent.answer(ask).await;
        if passage.agent == Survives::TheCall {
            agent.die();
            return self.breaks().await;
        }
        let back = self.with(|state| {
            let max = state.weather.delay_max;
            state.dice.network.millis(0, max)
        });
        tokio::time::sleep(back).await;
        if !passage.answered || !self.with(|state| state.reaches(&there, from)) {
            return self.breaks().await;
        }
        match told {
            None => Err(NoAnswer::Silence("the connection broke")),
            Some(Ok(tell)) => {
                self.with(|state| state.told(&tell));
                Ok(tell)
            }
            Some(Err(refusal)) => Err(NoAnswer::Refused(refusal)),
        }
    }

    /// The connection breaks, which takes a while to be noticed.
    async fn breaks(&self) -> Result<Tell, NoAnswer> {
        let after = self.with(|state| state.dice.network.millis(1_000, KEEPALIVE_MS));
        tokio::time::sleep(after).await;
        Err(NoAnswer::Silence("keep-alive timed out"))
    }

    /// Sends what an agent sees, until one of both is gone.
    async fn watching(
        &self,
        from: Place,
        host: HostId,
        vm: VmId,
        out: mpsc::Sender<Option<VmObservation>>,
    ) {
        let there = Place::Host(host.clone());
        let Some(token) = self.with(|state| {
            state.reaches(&from, &there).then_some(())?;
            Some(state.agent(&host)?.token.clone())
        }) else {
            let after = self.with(|state| state.dice.network.millis(1, KEEPALIVE_MS));
            tokio::time::sleep(after).await;
            drop(out.send(None).await);
            return;
        };
        let mut bell = self.with(|state| state.bell(&host, vm));
        loop {
            let (seen, delay) = self.with(|state| {
                let max = state.weather.delay_max;
                (state.observe(&host, vm), state.dice.network.millis(0, max))
            });
            let busy = seen.transfer.as_ref().is_some_and(|transfer| {
                matches!(transfer.status.as_str(), "setup" | "active" | "device")
            });
            tokio::time::sleep(delay).await;
            if !self.with(|state| state.reaches(&there, &from)) {
                let after = self.with(|state| state.dice.network.millis(1_000, KEEPALIVE_MS));
                tokio::time::sleep(after).await;
                drop(out.send(None).await);
                return;
            }
            self.with(|state| state.told_of(&seen));
            if out.send(Some(seen)).await.is_err() {
                return;
            }
            let rest = if busy { BUSY } else { IDLE };
            tokio::select! {
                biased;
                () = token.cancelled() => {
                    drop(out.send(None).await);
                    return;
                }
                () = out.closed() => return,
                _ = bell.changed() => {}
                () = tokio::time::sleep(rest) => {}
            }
        }
    }
}

impl Agents for SimAgents {
    fn claim<'a>(
        &'a self,
        host: &'a HostId,
        request: ClaimRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>> {
        Box::pin(async move {
            let claim = request.claim;
            let unasked = self.life.world.with(|state| state.bugged(Bug::PlannerClaimsUnheard));
            let vm = request.vm_id.clone();
            if unasked {
                let look = ObserveRequest { vm_id: vm, claim: 0 };
                let seen = self.ask(host, "observe", Ask::Observe(look)).await?;
                return Ok(VmObservation { claim, ..Self::observation(seen) });
            }
            self.ask(host, "claim", Ask::Claim(request)).await.map(Self::observation)
        })
    }

    fn execute<'a>(
        &'a self,
        host: &'a HostId,
        request: ExecuteRequest,
    ) -> BoxFuture<'a, Answer<ExecuteReply>> {
        Box::pin(async move {
            self.mistaken_command(&request);
            self.note_sent(&request);
            let told = self.ask(host, "execute", Ask::Execute(Box::new(request))).await?;
            Ok(match told {
                Tell::Reply(reply) => *reply,
                Tell::Observation(_) | Tell::Description(_) | Tell::Check(_) => {
                    ExecuteReply::default()
                }
            })
        })
    }

    fn observe<'a>(
        &'a self,
        host: &'a HostId,
        request: ObserveRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>> {
        Box::pin(async move {
            let told = self.ask(host, "observe", Ask::Observe(request.clone())).await;
            let dead = self.life.world.with(|state| state.bugged(Bug::PlannerTakesSilenceForDeath));
            match told {
                Err(AgentError::Unreachable { .. }) if dead => Ok(taken_for_dead(host, &request)),
                told => {
                    let seen = told.map(Self::observation);
                    if let Ok(seen) = &seen {
                        self.mistaken_hearing(seen);
                    }
                    seen
                }
            }
        })
    }

    fn watch(
        &self,
        host: &HostId,
        request: ObserveRequest,
    ) -> BoxStream<'static, Answer<VmObservation>> {
        let (out, seen) = mpsc::channel(4);
        let world = self.life.world.clone();
        let (from, there) = (self.place(), host.clone());
        if let Ok(vm) = request.vm_id.parse() {
            let carrier = world.clone();
            world.spawn(async move { carrier.watching(from, there, vm, out).await });
        }
        let host = host.clone();
        let broken = move || AgentError::Unreachable {
            host: host.clone(),
            operation: "watch",
            reason: "the stream broke".to_owned(),
        };
        ReceiverStream::new(seen).map(move |seen| seen.ok_or_else(&broken)).boxed()
    }

    fn describe_source<'a>(
        &'a self,
        host: &'a HostId,
        vm: VmId,
    ) -> BoxFuture<'a, Answer<SourceDescription>> {
        Box::pin(async move {
            Ok(match self.ask(host, "describe_source", Ask::Describe(vm)).await? {
                Tell::Description(description) => *description,
                Tell::Observation(_) | Tell::Reply(_) | Tell::Check(_) => {
                    SourceDescription::default()
                }
            })
        })
    }

    fn describe_ports<'a>(
        &'a self,
        _host: &'a HostId,
        _vm: VmId,
    ) -> BoxFuture<'a, Answer<VmPorts>> {
        // Nothing here has a network of its own.
        Box::pin(async move { Ok(VmPorts::default()) })
    }

    fn check_destination<'a>(
        &'a self,
        host: &'a HostId,
        _source: SourceDescription,
    ) -> BoxFuture<'a, Answer<CheckReply>> {
        Box::pin(async move {
            Ok(match self.ask(host, "check_destination", Ask::Check).await? {
                Tell::Check(reply) => reply,
                Tell::Observation(_) | Tell::Reply(_) | Tell::Description(_) => {
                    CheckReply::default()
                }
            })
        })
    }

    fn report<'a>(&'a self, host: &'a HostId) -> BoxFuture<'a, Answer<HostReport>> {
        Box::pin(async move {
            let (from, there) = (self.place(), Place::Host(host.clone()));
            let report = self.life.world.with(|state| {
                let reached = state.reaches(&from, &there) && state.reaches(&there, &from);
                if reached { state.report(host) } else { None }
            });
            report.ok_or_else(|| AgentError::Unreachable {
                host: host.clone(),
                operation: "get_report",
                reason: "no answer in time".to_owned(),
            })
        })
    }
}
