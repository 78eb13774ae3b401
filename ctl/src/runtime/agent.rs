//! Calls to one host's agent.

use prost::Message as _;
use std::path::PathBuf;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};
use vmferry_proto::v1;
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_tls::{Expected, Role, Scheme, Security};

use crate::client::{chain, identity};
use crate::failure::Failure;

/// How long a look may take.
const LOOK_MAX: Duration = Duration::from_secs(5);
/// How long a command may take: one may have to start or to end a QEMU process.
const COMMAND_MAX: Duration = Duration::from_secs(60);
/// A host on the same network accepts within milliseconds; a powered-off one never does.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The port of agents.
const PORT: u16 = 9097;

/// Why an agent did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum No {
    /// Nobody answered. A command may have arrived all the same.
    #[error("the agent at {address} did not answer: {reason}")]
    Unanswered { address: String, reason: String },
    /// The agent answered no.
    #[error("the agent at {address} refused: {message}")]
    Refused { address: String, message: String, detail: Box<v1::ErrorDetail> },
}

impl No {
    /// Returns the agent's word for its refusal; empty if it did not answer.
    pub(crate) fn code(&self) -> &str {
        match self {
            Self::Unanswered { .. } => "",
            Self::Refused { detail, .. } => &detail.code,
        }
    }
}

/// The agent of one host.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub(crate) address: String,
    api: AgentClient<Channel>,
}

impl Agent {
    /// Prepares calls to an agent, by its URL, or by HOST or HOST:PORT; connects with the first.
    pub(crate) fn new(given: &str, tls_dir: Option<PathBuf>) -> Result<Self, Failure> {
        let address = address(given, tls_dir.as_ref());
        let wrong = |problem: String| Failure::Usage {
            operation: format!("read the agent's address {given:?}"),
            problem,
        };
        let (endpoint, scheme) =
            vmferry_tls::endpoint(&address).map_err(|error| wrong(error.to_string()))?;
        let security = match (scheme, tls_dir) {
            (Scheme::PlainText, None) => Security::PlainText,
            (Scheme::Tls, Some(dir)) => Security::Tls(identity(&dir)?),
            (Scheme::Tls, None) => {
                return Err(wrong("https takes a certificate: name its --tls-dir".to_owned()));
            }
            (Scheme::PlainText, Some(_)) => {
                return Err(wrong(
                    "http is plain text, and a certificate is given; write https://".to_owned(),
                ));
            }
        };
        let endpoint = endpoint.connect_timeout(CONNECT_MAX);
        let channel = vmferry_tls::channel(&endpoint, &security, Expected::Any(Role::Host));
        Ok(Self { address, api: AgentClient::new(channel) })
    }

    pub(crate) async fn report(&self) -> Result<v1::HostReport, No> {
        self.answer(self.api.clone().get_report(timed(v1::GetReportRequest {}, LOOK_MAX)).await)
    }

    pub(crate) async fn describe(&self, vm_id: String) -> Result<v1::SourceDescription, No> {
        let request = timed(v1::DescribeSourceRequest { vm_id }, LOOK_MAX);
        self.answer(self.api.clone().describe_source(request).await)
    }

    pub(crate) async fn check(
        &self,
        source: v1::SourceDescription,
    ) -> Result<Vec<v1::Blocker>, No> {
        let request = timed(v1::CheckDestinationRequest { source: Some(source) }, LOOK_MAX);
        Ok(self.answer(self.api.clone().check_destination(request).await)?.blockers)
    }

    pub(crate) async fn next_claim(
        &self,
        request: v1::NextClaimRequest,
    ) -> Result<v1::VmObservation, No> {
        self.answer(self.api.clone().next_claim(timed(request, LOOK_MAX)).await)
    }

    pub(crate) async fn claim(&self, request: v1::ClaimRequest) -> Result<v1::VmObservation, No> {
        self.answer(self.api.clone().claim(timed(request, COMMAND_MAX)).await)
    }

    pub(crate) async fn observe(
        &self,
        request: v1::ObserveRequest,
    ) -> Result<v1::VmObservation, No> {
        self.answer(self.api.clone().observe(timed(request, LOOK_MAX)).await)
    }

    pub(crate) async fn execute(
        &self,
        request: v1::ExecuteRequest,
    ) -> Result<v1::ExecuteReply, No> {
        self.answer(self.api.clone().execute(timed(request, COMMAND_MAX)).await)
    }

    fn answer<T>(&self, reply: Result<Response<T>, Status>) -> Result<T, No> {
        reply.map(Response::into_inner).map_err(|status| {
            let address = self.address.clone();
            let spoken = !status.details().is_empty()
                || matches!(status.code(), Code::InvalidArgument | Code::PermissionDenied);
            if spoken {
                let detail = v1::ErrorDetail::decode(status.details()).unwrap_or_default();
                let message = status.message().to_owned();
                No::Refused { address, message, detail: Box::new(detail) }
            } else {
                No::Unanswered { address, reason: chain(&status) }
            }
        })
    }
}

fn timed<T>(message: T, limit: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}

/// Returns the URL that is meant by `given`.
fn address(given: &str, tls_dir: Option<&PathBuf>) -> String {
    if given.contains("://") {
        return given.to_owned();
    }
    let scheme = if tls_dir.is_some() { "https" } else { "http" };
    let has_port = given.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port { format!("{scheme}://{given}") } else { format!("{scheme}://{given}:{PORT}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_named_by_its_host_or_by_a_url() {
        assert_eq!(address("10.0.0.1", None), "http://10.0.0.1:9097");
        assert_eq!(address("a.example:1234", Some(&PathBuf::from("x"))), "https://a.example:1234");
        assert_eq!(address("https://a:9097", None), "https://a:9097");
    }
}
