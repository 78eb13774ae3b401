//! The gRPC service, and the network in front of it.

use std::pin::Pin;
use std::time::Duration;

use anyhow::Context as _;
use futures::Stream;
use futures::stream;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status};
use vmferry_proto::v1;
use vmferry_proto::v1::agent_server::{Agent as AgentService, AgentServer};
use vmferry_types::VmId;

use super::{Agent, Answer, Refusal};
use crate::dice::Dice;
use crate::fleet::Fleet;

/// A listener is told at least so often.
const BEAT: Duration = Duration::from_millis(250);

/// Serves all agents of a fleet, which report to all of `planners`.
///
/// # Errors
///
/// Fails if an address cannot be listened on.
pub async fn serve(fleet: &Fleet, planners: &[String]) -> anyhow::Result<()> {
    for (host, address) in fleet.addresses() {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("listen for the agent of {host} on {address}"))?;
        let agent = Agent::new(fleet.clone(), host);
        let service = AgentServer::new(agent.clone());
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let router = tonic::transport::Server::builder().add_service(service);
        let end = fleet.ended();
        fleet.spawn(async move {
            // What it served has ended with it: who asks next gets no answer.
            router.serve_with_incoming_shutdown(incoming, end.cancelled()).await.ok();
        });
        fleet.spawn(agent.clone().keep_limits());
        for planner in planners {
            fleet.spawn(agent.clone().keep_reporting(planner.clone()));
        }
    }
    Ok(())
}

/// Whether what was sent arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    Arrives,
    Lost,
}

impl Leg {
    fn drawn(dice: &mut Dice, lost: u64) -> Self {
        if dice.chance(lost) { Self::Lost } else { Self::Arrives }
    }
}

/// What the network does to one request.
struct Passage {
    before: Duration,
    there: Leg,
    after: Duration,
    back: Leg,
    /// It arrives once more, so much later.
    again: Option<Duration>,
}

impl Agent {
    fn passage(&self) -> Passage {
        self.fleet.with(|state| {
            let weather = state.weather;
            let dice = &mut state.dice;
            let late = dice.chance(weather.late);
            let before = if late { dice.millis(200, 4_000) } else { dice.millis(0, 5) };
            let passage = Passage {
                before,
                there: Leg::drawn(dice, weather.lost_requests),
                after: dice.millis(0, 5),
                back: Leg::drawn(dice, weather.lost_answers),
                again: dice.chance(weather.doubled).then(|| dice.millis(0, 3_000)),
            };
            let lost = [passage.there, passage.back].map(|leg| leg == Leg::Lost);
            let unlucky = [late, lost[0], lost[1], passage.again.is_some()];
            let mishaps = unlucky.iter().filter(|is| **is).count();
            state.counts.mishaps += u64::try_from(mishaps).unwrap_or(0);
            passage
        })
    }

    /// Carries a request through the network: it arrives though whoever sent it is gone by then.
    async fn carry<Q, A, F>(
        &self,
        what: &'static str,
        request: Q,
        serve: impl Fn(Self, Q) -> F + Send + Sync + 'static,
    ) -> Result<Response<A>, Status>
    where
        Q: Clone + Send + 'static,
        A: Send + 'static,
        F: Future<Output = Answer<A>> + Send,
    {
        let passage = self.passage();
        let (answer, answered) = oneshot::channel();
        let agent = self.clone();
        self.fleet.spawn(async move {
            tokio::time::sleep(passage.before).await;
            if passage.there == Leg::Lost {
                return;
            }
            let told = serve(agent.clone(), request.clone()).await;
            tokio::time::sleep(passage.after).await;
            if passage.back == Leg::Arrives {
                // Whoever asked may have gone; what was done stays done.
                drop(answer.send(told));
            }
            if let Some(later) = passage.again {
                tokio::time::sleep(later).await;
                drop(serve(agent, request).await);
            }
        });
        match answered.await {
            Ok(Ok(told)) => Ok(Response::new(told)),
            Ok(Err(refusal)) => Err(self.status(what, &refusal)),
            Err(_) => Err(Status::unavailable("connection reset by peer")),
        }
    }

    fn status(&self, what: &str, refusal: &Refusal) -> Status {
        let code = match refusal.detail.code.as_str() {
            "stale_claim" | "stale_generation" | "step_reused" => Code::Aborted,
            "learning" | "unresponsive" | "unreadable" => Code::Unavailable,
            "unknown_vm" => Code::NotFound,
            "invalid" | "leap" => Code::InvalidArgument,
            "internal" => Code::Internal,
            _ => Code::FailedPrecondition,
        };
        self.fleet.with(|state| {
            let refused = format!("{what}: {}", refusal.detail.code);
            *state.counts.refusals.entry(refused).or_default() += 1;
        });
        vmferry_proto::refusal::status(code, &refusal.message, refusal.detail.clone())
    }
}

#[tonic::async_trait]
impl AgentService for Agent {
    async fn claim(
        &self,
        request: Request<v1::ClaimRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let serve = async |agent: Self, request| agent.claim(request).await;
        self.carry("claim", request.into_inner(), serve).await
    }

    async fn execute(
        &self,
        request: Request<v1::ExecuteRequest>,
    ) -> Result<Response<v1::ExecuteReply>, Status> {
        let request = request.into_inner();
        let what = request.action.as_ref().map_or("nothing", super::label);
        let serve = async |agent: Self, request| agent.execute(request).await;
        self.carry(what, request, serve).await
    }

    async fn observe(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let seen = self.look(request.get_ref());
        seen.map(Response::new).map_err(|refusal| self.status("observe", &refusal))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::VmObservation, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let refused = |refusal| self.status("watch", &refusal);
        let first = self.look(request.get_ref()).map_err(refused)?;
        let vm = super::vm_id(&first.vm_id).map_err(refused)?;
        let bell = self.fleet.bell(vm).ok_or_else(|| Status::not_found("no such VM"))?;
        let watcher = Watcher { agent: self.clone(), vm, bell, first: Some(first) };
        Ok(Response::new(Box::pin(stream::unfold(watcher, Watcher::next))))
    }

    async fn describe_source(
        &self,
        request: Request<v1::DescribeSourceRequest>,
    ) -> Result<Response<v1::SourceDescription>, Status> {
        let described = super::vm_id(&request.into_inner().vm_id).and_then(|vm| self.describe(vm));
        described.map(Response::new).map_err(|refusal| self.status("describe_source", &refusal))
    }

    async fn check_destination(
        &self,
        _request: Request<v1::CheckDestinationRequest>,
    ) -> Result<Response<v1::CheckReply>, Status> {
        Ok(Response::new(v1::CheckReply::default()))
    }

    async fn describe_ports(
        &self,
        _request: Request<v1::DescribePortsRequest>,
    ) -> Result<Response<v1::VmPorts>, Status> {
        Err(Status::unimplemented("no VM here has a network"))
    }

    async fn next_claim(
        &self,
        _request: Request<v1::NextClaimRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        Err(Status::unimplemented("every caller here has a planner"))
    }

    async fn get_report(
        &self,
        _request: Request<v1::GetReportRequest>,
    ) -> Result<Response<v1::HostReport>, Status> {
        Ok(Response::new(self.report()))
    }
}

/// One who watches a VM.
struct Watcher {
    agent: Agent,
    vm: VmId,
    bell: watch::Receiver<u64>,
    first: Option<v1::VmObservation>,
}

impl Watcher {
    async fn next(mut self) -> Option<(Result<v1::VmObservation, Status>, Self)> {
        if let Some(first) = self.first.take() {
            return Some((Ok(first), self));
        }
        // Rung or not: the next look is due.
        if let Ok(Err(_)) = tokio::time::timeout(BEAT, self.bell.changed()).await {
            return None;
        }
        let seen = self.agent.observe(self.vm);
        Some((Ok(seen), self))
    }
}
