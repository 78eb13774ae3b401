//! The gRPC service: decodes, hands on, encodes; decides nothing.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::fence::{self, ClaimDecision, FenceState};
use vmferry_proto::v1::agent_server::{Agent as AgentService, AgentServer};
use vmferry_proto::{refusal, v1};
use vmferry_tls::{Acceptor, Authorized, Caller, Peer, Protocol, Role};
use vmferry_types::{Claim, Generation, VmId};

use crate::agent::{Agent, StartError};
use crate::error::CommandError;
use crate::vm::{ClaimCommand, Command};
use crate::{check, describe, idle, observe, report, watch, wire, wiring};

/// The largest message taken; a definition is a few kilobytes.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// How many observations a slow listener may be behind.
const STREAM_QUEUE: usize = 4;
/// How many calls one connection may have open.
const STREAMS_MAX: u32 = 1024;
/// How often a silent connection is asked whether it lives, and how long it may take.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// Serves an agent.
#[derive(Clone, Debug)]
struct Service {
    agent: Arc<Agent>,
}

/// Serves gRPC until the agent's end.
///
/// # Errors
///
/// Fails if the address cannot be listened on.
pub(crate) async fn serve(agent: &Arc<Agent>) -> Result<SocketAddr, StartError> {
    let address = agent.config.grpc;
    let failed = |source| StartError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let service = AgentServer::new(Service { agent: agent.clone() })
        .max_decoding_message_size(MESSAGE_BYTES_MAX);
    let router = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .max_concurrent_streams(Some(STREAMS_MAX))
        .add_service(Authorized::new(service, may_call));
    let incoming = Acceptor::new(listener, agent.security.clone(), Protocol::Grpc).into_stream();
    agent.shutdown.spawn(async move {
        if let Err(error) = router.serve_with_incoming(incoming).await {
            tracing::error!(error = %crate::error::chain(&error), "gRPC service ended");
        }
    });
    Ok(bound)
}

/// Says who may command this host: planners and operators, and no other host. Over plain text
/// whoever reaches it may, which is why plain text is spoken where nobody else does.
fn may_call(peer: &Peer, method: &str) -> Result<(), Status> {
    let no = |why: String| {
        tracing::warn!(caller = %peer.caller, peer = %peer.address, method, "call refused");
        let detail =
            v1::ErrorDetail { code: "not_allowed".to_owned(), ..v1::ErrorDetail::default() };
        Err(refusal::status(Code::PermissionDenied, &why, detail))
    };
    match &peer.caller {
        Caller::PlainText => Ok(()),
        Caller::Anonymous => no("show a certificate of a planner or an operator".to_owned()),
        Caller::Known(identity) => match identity.role() {
            Role::Planner => Ok(()),
            Role::Operator => {
                tracing::info!(by = %identity, method, "called by hand");
                Ok(())
            }
            Role::Host => {
                no(format!("{identity} may not call `{method}` here: a host acts for itself only"))
            }
        },
    }
}

impl Service {
    fn known(&self, vm: VmId) -> Result<crate::vm::VmHandle, CommandError> {
        self.agent.vm(vm).ok_or(CommandError::UnknownVm)
    }

    /// Returns the VM that a claim is for. One that was never heard of is taken up for a claim
    /// that it will take, and for nothing else: each has a task of its own from then on.
    async fn claimed(
        &self,
        vm: VmId,
        claim: &ClaimCommand,
    ) -> Result<crate::vm::VmHandle, CommandError> {
        if let Some(known) = self.agent.vm(vm) {
            return Ok(known);
        }
        let nothing = FenceState::default();
        match nothing.decide_claim(claim.migration, claim.generation, claim.claim) {
            ClaimDecision::Refuse(refusal) => return Err(CommandError::Fence(refusal)),
            ClaimDecision::Take | ClaimDecision::Held => {}
        }
        let _one_at_a_time = self.agent.taking_up.lock().await;
        idle::make_room(&self.agent).await?;
        Ok(self.agent.vm_or_new(vm))
    }

    /// Notes that a driver is heard, if it is the current one.
    fn hear(&self, request: &v1::ObserveRequest) -> Result<VmId, CommandError> {
        let vm = wire::vm_id(&request.vm_id, "vm_id")?;
        if let Some(handle) = self.agent.vm(vm) {
            let claim = handle.shared.record.borrow().fence.claim.value();
            if request.claim != 0 && request.claim == claim {
                handle.shared.hear();
            }
        }
        Ok(vm)
    }
}

#[tonic::async_trait]
impl AgentService for Service {
    async fn claim(
        &self,
        request: Request<v1::ClaimRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let request = request.into_inner();
        let vm = wire::vm_id(&request.vm_id, "vm_id")?;
        let migration = wire::migration_id(&request.migration_id, "migration_id")?;
        if request.claim == 0 || request.generation == 0 {
            return Err(
                CommandError::invalid("claim", "claim and generation must be at least 1").into()
            );
        }
        let claim = ClaimCommand {
            migration,
            generation: Generation::from_stored(request.generation),
            claim: Claim::from_stored(request.claim),
            hold_limit_ms: request.hold_limit_ms,
        };
        let observation = self.claimed(vm, &claim).await?.claim(claim).await?;
        Ok(Response::new(observation))
    }

    async fn next_claim(
        &self,
        request: Request<v1::NextClaimRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let request = request.into_inner();
        let vm = wire::vm_id(&request.vm_id, "vm_id")?;
        let migration = wire::migration_id(&request.migration_id, "migration_id")?;
        Ok(Response::new(self.known(vm)?.next_claim(migration).await?))
    }

    async fn execute(
        &self,
        request: Request<v1::ExecuteRequest>,
    ) -> Result<Response<v1::ExecuteReply>, Status> {
        let request = request.into_inner();
        let fence = wire::fence(request.fence.as_ref())?;
        let digest = fence::digest(&prost::Message::encode_to_vec(&request));
        let action = request.action.ok_or_else(|| CommandError::invalid("action", "is missing"))?;
        wire::check(&action)?;
        let command = Command { fence, digest, action };
        // Whoever commands a VM has claimed it before.
        let reply = self.known(fence.vm)?.execute(command).await?;
        Ok(Response::new(reply))
    }

    async fn observe(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let vm = self.hear(request.get_ref())?;
        let observation = match self.agent.vm(vm) {
            Some(handle) => handle.observe(&self.agent),
            None => observe::unknown(&self.agent, vm),
        };
        Ok(Response::new(observation))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::VmObservation, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let vm = self.hear(request.get_ref())?;
        let (listener, stream) = mpsc::channel(STREAM_QUEUE);
        self.agent.shutdown.spawn(watch::run(self.agent.clone(), vm, listener));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn describe_source(
        &self,
        request: Request<v1::DescribeSourceRequest>,
    ) -> Result<Response<v1::SourceDescription>, Status> {
        let vm = wire::vm_id(&request.into_inner().vm_id, "vm_id")?;
        let handle = self.known(vm)?;
        Ok(Response::new(describe::source(&self.agent, &handle.shared).await?))
    }

    async fn describe_ports(
        &self,
        request: Request<v1::DescribePortsRequest>,
    ) -> Result<Response<v1::VmPorts>, Status> {
        let vm = wire::vm_id(&request.into_inner().vm_id, "vm_id")?;
        let handle = self.known(vm)?;
        Ok(Response::new(wiring::of(&handle.shared).await?))
    }

    async fn check_destination(
        &self,
        request: Request<v1::CheckDestinationRequest>,
    ) -> Result<Response<v1::CheckReply>, Status> {
        let source = request.into_inner().source;
        let source = source.ok_or_else(|| CommandError::invalid("source", "is missing"))?;
        let vm = Definition::parse(&source.definition)
            .map_err(|errors| CommandError::invalid("source.definition", errors.to_string()))?;
        let blockers = check::receivable(&self.agent, &vm, &source).await;
        Ok(Response::new(v1::CheckReply { blockers }))
    }

    async fn get_report(
        &self,
        _request: Request<v1::GetReportRequest>,
    ) -> Result<Response<v1::HostReport>, Status> {
        Ok(Response::new(report::host_report(&self.agent).await))
    }
}
