//! Agents over gRPC: one channel a host, opened when first needed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt as _};
use prost::Message as _;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{
    CheckDestinationRequest, CheckReply, ClaimRequest, DescribePortsRequest, DescribeSourceRequest,
    ErrorDetail, ExecuteReply, ExecuteRequest, GetReportRequest, HostReport, ObserveRequest,
    SourceDescription, VmObservation, VmPorts,
};
use vmferry_tls::{Expected, Identity, Security};
use vmferry_types::{HostId, VmId};

use super::{AgentError, Agents, Answer};

/// A dead peer is noticed within this and [`KEEPALIVE_TIMEOUT`], rather than after the kernel's 15 minutes.
const KEEPALIVE: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Looking and claiming touch a journal and a monitor: both answer in milliseconds or are in trouble.
const LOOK_DEADLINE: Duration = Duration::from_secs(5);
/// Commands may start or end a QEMU process.
const COMMAND_DEADLINE: Duration = Duration::from_secs(30);

/// Where each host's agent was last heard from.
#[derive(Debug, Default)]
pub struct Directory {
    addresses: Mutex<BTreeMap<HostId, String>>,
}

impl Directory {
    /// Notes where a host's agent is reached.
    pub fn learn(&self, host: &HostId, address: &str) {
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if addresses.get(host).is_none_or(|known| known != address) {
            addresses.insert(host.clone(), address.to_owned());
        }
    }

    fn address(&self, host: &HostId) -> Option<String> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).get(host).cloned()
    }
}

#[derive(Debug)]
struct Connection {
    address: String,
    client: AgentClient<Channel>,
}

/// The agents of all hosts that the directory knows.
#[derive(Debug)]
pub struct GrpcAgents {
    directory: Arc<Directory>,
    security: Security,
    connections: Mutex<BTreeMap<HostId, Connection>>,
}

impl GrpcAgents {
    /// Reaches agents at the addresses that `directory` holds at the time of the call. Over TLS each
    /// has to prove that it is that host's.
    #[must_use]
    pub fn new(directory: Arc<Directory>, security: Security) -> Self {
        Self { directory, security, connections: Mutex::new(BTreeMap::new()) }
    }

    fn client(&self, host: &HostId, operation: &'static str) -> Answer<AgentClient<Channel>> {
        let unreachable =
            |reason: String| AgentError::Unreachable { host: host.clone(), operation, reason };
        let address = self
            .directory
            .address(host)
            .ok_or_else(|| unreachable("it has not reported its address yet".to_owned()))?;
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = connections.get(host).filter(|known| known.address == address) {
            return Ok(known.client.clone());
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| unreachable(format!("`{address}` is not an address: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        let expected = Expected::Exactly(Identity::host(host.clone()));
        let client = AgentClient::new(vmferry_tls::channel(&endpoint, &self.security, expected));
        connections.insert(host.clone(), Connection { address, client: client.clone() });
        Ok(client)
    }
}

/// Waits for a unary answer, at most until the deadline.
async fn answer<T>(
    host: &HostId,
    operation: &'static str,
    deadline: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Answer<T> {
    match tokio::time::timeout(deadline, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(error(host, operation, &status)),
        Err(_) => Err(AgentError::Unreachable {
            host: host.clone(),
            operation,
            reason: format!("no answer within {}", humantime::format_duration(deadline)),
        }),
    }
}

/// Tells an agent's no from a transport's silence: only an agent sends a detail.
fn error(host: &HostId, operation: &'static str, status: &Status) -> AgentError {
    let detail =
        if status.details().is_empty() { None } else { ErrorDetail::decode(status.details()).ok() };
    match (detail, status.code()) {
        (Some(detail), _) => AgentError::Refused {
            host: host.clone(),
            operation,
            message: status.message().to_owned(),
            detail: Box::new(detail),
        },
        (
            None,
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Unauthenticated,
        ) => AgentError::Refused {
            host: host.clone(),
            operation,
            message: status.message().to_owned(),
            detail: Box::default(),
        },
        (
            None,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss,
        ) => AgentError::Unreachable {
            host: host.clone(),
            operation,
            reason: format!("{}: {}", status.code(), said(status)),
        },
    }
}

/// Says why a call failed: what the transport met is only in the causes.
fn said(status: &Status) -> String {
    let cause = std::error::Error::source(status);
    cause.map_or_else(
        || status.message().to_owned(),
        |cause| format!("{}: {}", status.message(), crate::telemetry::Chain(cause)),
    )
}

/// Refuses the word of another host's agent: an address may have passed on since it was learnt, and
/// what one host says of a VM proves nothing of another.
fn of_host(
    host: &HostId,
    operation: &'static str,
    observation: VmObservation,
) -> Answer<VmObservation> {
    if observation.host_id == host.as_str() {
        return Ok(observation);
    }
    Err(anothers(host, operation, &observation.host_id))
}

fn anothers(host: &HostId, operation: &'static str, by: &str) -> AgentError {
    AgentError::Unreachable {
        host: host.clone(),
        operation,
        reason: format!("the agent of host `{by}` answered at its address"),
    }
}

fn operation(action: Option<&Action>) -> &'static str {
    match action {
        None => "nothing",
        Some(Action::StartVm(_)) => "start_vm",
        Some(Action::StopVm(_)) => "stop_vm",
        Some(Action::ArmReceiver(_)) => "arm_receiver",
        Some(Action::StartTransfer(_)) => "start_transfer",
        Some(Action::OrderSwitchover(_)) => "order_switchover",
        Some(Action::CancelTransfer(_)) => "cancel_transfer",
        Some(Action::ResumeSource(_)) => "resume_source",
        Some(Action::ContinueDestination(_)) => "continue_destination",
        Some(Action::DestroyReceiver(_)) => "destroy_receiver",
        Some(Action::ReleaseSource(_)) => "release_source",
        Some(Action::KillSource(_)) => "kill_source",
        Some(Action::ForgetVm(_)) => "forget_vm",
        Some(Action::HoldGuest(_)) => "hold_guest",
        Some(Action::ShutDownGuest(_)) => "shut_down_guest",
        Some(Action::StartReceiver(_)) => "start_receiver",
        Some(Action::StartPostcopy(_)) => "start_postcopy",
        Some(Action::SetLimits(_)) => "set_limits",
        Some(Action::RecoverReceiver(_)) => "recover_receiver",
        Some(Action::ResumeTransfer(_)) => "resume_transfer",
    }
}

fn deadline(action: Option<&Action>) -> Duration {
    match action {
        Some(Action::StopVm(stop)) => {
            COMMAND_DEADLINE.saturating_add(Duration::from_millis(stop.deadline_ms))
        }
        Some(_) | None => COMMAND_DEADLINE,
    }
}

impl Agents for GrpcAgents {
    fn claim<'a>(
        &'a self,
        host: &'a HostId,
        request: ClaimRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>> {
        Box::pin(async move {
            let mut client = self.client(host, "claim")?;
            let seen = answer(host, "claim", LOOK_DEADLINE, client.claim(request)).await?;
            of_host(host, "claim", seen)
        })
    }

    fn execute<'a>(
        &'a self,
        host: &'a HostId,
        request: ExecuteRequest,
    ) -> BoxFuture<'a, Answer<ExecuteReply>> {
        Box::pin(async move {
            let name = operation(request.action.as_ref());
            let deadline = deadline(request.action.as_ref());
            let mut client = self.client(host, name)?;
            let mut reply = answer(host, name, deadline, client.execute(request)).await?;
            if let Some(seen) = reply.observation.take() {
                reply.observation = Some(of_host(host, name, seen)?);
            }
            Ok(reply)
        })
    }

    fn observe<'a>(
        &'a self,
        host: &'a HostId,
        request: ObserveRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>> {
        Box::pin(async move {
            let mut client = self.client(host, "observe")?;
            let seen = answer(host, "observe", LOOK_DEADLINE, client.observe(request)).await?;
            of_host(host, "observe", seen)
        })
    }

    fn watch(
        &self,
        host: &HostId,
        request: ObserveRequest,
    ) -> BoxStream<'static, Answer<VmObservation>> {
        let client = self.client(host, "watch");
        let host = host.clone();
        let opened = async move {
            let mut client = client?;
            let opening = client.watch(Request::new(request));
            let stream = answer(&host, "watch", LOOK_DEADLINE, opening).await?;
            let each = move |item: Result<VmObservation, Status>| {
                item.map_err(|status| error(&host, "watch", &status))
                    .and_then(|seen| of_host(&host, "watch", seen))
            };
            Ok(stream.map(each))
        };
        stream::once(opened)
            .flat_map(|opened: Answer<_>| match opened {
                Ok(stream) => stream.left_stream(),
                Err(error) => stream::once(async move { Err(error) }).right_stream(),
            })
            .boxed()
    }

    fn describe_source<'a>(
        &'a self,
        host: &'a HostId,
        vm: VmId,
    ) -> BoxFuture<'a, Answer<SourceDescription>> {
        Box::pin(async move {
            let mut client = self.client(host, "describe_source")?;
            let request = DescribeSourceRequest { vm_id: vm.to_string() };
            let call = client.describe_source(request);
            let told = answer(host, "describe_source", LOOK_DEADLINE, call).await?;
            if told.tls_host.is_empty() || told.tls_host == host.as_str() {
                return Ok(told);
            }
            Err(anothers(host, "describe_source", &told.tls_host))
        })
    }

    fn describe_ports<'a>(&'a self, host: &'a HostId, vm: VmId) -> BoxFuture<'a, Answer<VmPorts>> {
        Box::pin(async move {
            let mut client = self.client(host, "describe_ports")?;
            let request = DescribePortsRequest { vm_id: vm.to_string() };
            answer(host, "describe_ports", LOOK_DEADLINE, client.describe_ports(request)).await
        })
    }

    fn check_destination<'a>(
        &'a self,
        host: &'a HostId,
        source: SourceDescription,
    ) -> BoxFuture<'a, Answer<CheckReply>> {
        Box::pin(async move {
            let mut client = self.client(host, "check_destination")?;
            let request = CheckDestinationRequest { source: Some(source) };
            answer(host, "check_destination", LOOK_DEADLINE, client.check_destination(request))
                .await
        })
    }

    fn report<'a>(&'a self, host: &'a HostId) -> BoxFuture<'a, Answer<HostReport>> {
        Box::pin(async move {
            let mut client = self.client(host, "get_report")?;
            let call = client.get_report(GetReportRequest {});
            let report = answer(host, "get_report", LOOK_DEADLINE, call).await?;
            if report.host_id == host.as_str() {
                return Ok(report);
            }
            Err(anothers(host, "get_report", &report.host_id))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_of_another_hosts_agent_counts_for_nothing() {
        let host: HostId = "a".parse().unwrap();
        let said = |by: &str| VmObservation { host_id: by.to_owned(), ..VmObservation::default() };
        assert!(of_host(&host, "claim", said("a")).is_ok());
        let error = of_host(&host, "claim", said("b")).unwrap_err();
        assert!(error.to_string().contains("host `b` answered"), "{error}");
        assert_eq!(error.code(), "");
    }
}
