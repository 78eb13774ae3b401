//! The port to the hosts' agents.
//!
//! Every call ends: with an answer, a refusal that an agent spoke, or the statement that the agent
//! could not be reached. The last one says nothing about the host (rule R1: unknown is not gone).

pub mod rpc;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use vmferry_proto::v1::{
    CheckReply, ClaimRequest, ErrorDetail, ExecuteReply, ExecuteRequest, HostReport,
    ObserveRequest, SourceDescription, VmObservation, VmPorts,
};
use vmferry_types::{HostId, VmId};

/// Says why an agent did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AgentError {
    /// Nobody answered. The command may have arrived all the same.
    #[error("agent of host {host} did not answer `{operation}`: {reason}")]
    Unreachable {
        /// The host.
        host: HostId,
        /// What was asked.
        operation: &'static str,
        /// What the transport said.
        reason: String,
    },
    /// The agent answered no.
    #[error("agent of host {host} refused `{operation}`: {message}")]
    Refused {
        /// The host.
        host: HostId,
        /// What was asked.
        operation: &'static str,
        /// What the agent said, for people.
        message: String,
        /// What the agent said, for programs.
        detail: Box<ErrorDetail>,
    },
}

impl AgentError {
    /// Returns the agent's word for its refusal; empty if it did not answer.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::Unreachable { .. } => "",
            Self::Refused { detail, .. } => &detail.code,
        }
    }
}

/// The answer of an agent.
pub type Answer<T> = Result<T, AgentError>;

/// What the planner asks of agents.
pub trait Agents: std::fmt::Debug + Send + Sync + 'static {
    /// Takes a VM for one driver.
    fn claim<'a>(
        &'a self,
        host: &'a HostId,
        request: ClaimRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>>;

    /// Carries out one fenced command.
    fn execute<'a>(
        &'a self,
        host: &'a HostId,
        request: ExecuteRequest,
    ) -> BoxFuture<'a, Answer<ExecuteReply>>;

    /// Looks at a VM once.
    fn observe<'a>(
        &'a self,
        host: &'a HostId,
        request: ObserveRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>>;

    /// Looks at a VM until the stream breaks.
    fn watch(
        &self,
        host: &HostId,
        request: ObserveRequest,
    ) -> BoxStream<'static, Answer<VmObservation>>;

    /// Describes a running VM as its QEMU really is.
    fn describe_source<'a>(
        &'a self,
        host: &'a HostId,
        vm: VmId,
    ) -> BoxFuture<'a, Answer<SourceDescription>>;

    /// Says what a host has of a VM's ports.
    fn describe_ports<'a>(&'a self, host: &'a HostId, vm: VmId) -> BoxFuture<'a, Answer<VmPorts>>;

    /// Names everything that keeps a host from receiving a VM.
    fn check_destination<'a>(
        &'a self,
        host: &'a HostId,
        source: SourceDescription,
    ) -> BoxFuture<'a, Answer<CheckReply>>;

    /// Asks for the report of now, which the host else sends by itself.
    fn report<'a>(&'a self, host: &'a HostId) -> BoxFuture<'a, Answer<HostReport>>;
}
