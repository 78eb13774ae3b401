//! Calls to the planner, each with a deadline and with errors that name what was being done.

mod hosts;

use prost::Message as _;
use std::error::Error as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_proto::v1::{
    CancelMigrationRequest, CapacityReply, CapacityRequest, DeclareHostDeadRequest, DeleteVmReply,
    DeleteVmRequest, DoctorReply, DoctorRequest, ErrorDetail, FenceHostRequest, GetHostRequest,
    GetMigrationRequest, GetVmRequest, Host, ListHostsReply, ListHostsRequest, ListMigrationsReply,
    ListMigrationsRequest, ListVmsReply, ListVmsRequest, MigrateVmRequest, Migration, NetworkState,
    NetworkStateRequest, OpenGateRequest, ResolveMigrationRequest, SetMigrationLimitsRequest,
    StartVmRequest, StopVmRequest, Vm,
};

use vmferry_tls::{Expected, Live, Role, Scheme, Security, Use};

use crate::config::Settings;
use crate::failure::{Failure, Refusal};

/// How long one call may take. The planner answers from its store; only the calls that preflight
/// a host also ask an agent.
const CALL_MAX: Duration = Duration::from_secs(30);
/// A fence command has its own limit, which the planner keeps.
const FENCE_MAX: Duration = Duration::from_secs(600);
/// Up to four commands to agents, each of which may end a QEMU process.
const RESOLVE_MAX: Duration = Duration::from_secs(180);
/// A plan asks an agent about each VM of a host, several at a time.
const PLAN_MAX: Duration = Duration::from_secs(120);
/// A planner on the same network accepts within milliseconds; a powered-off one never does.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Finds out that the other end of a quiet stream is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The planner, as one address.
#[derive(Debug)]
pub(crate) struct Client {
    planner: String,
    api: PlannerClient<Channel>,
}

/// Whether an unanswered call may have been carried out.
#[derive(Clone, Debug)]
enum Unanswered {
    /// It only reads, or repeats what was said already.
    Harmless,
    /// It may have been accepted; says how to find out.
    InDoubt(String),
}

impl Client {
    /// Prepares calls to the planner; connects with the first.
    pub(crate) fn new(settings: Settings) -> Result<Self, Failure> {
        let Settings { planner, tls_dir } = settings;
        let wrong = |problem: String| Failure::Usage {
            operation: format!("read the planner's address {planner:?}"),
            problem,
        };
        let (endpoint, scheme) =
            vmferry_tls::endpoint(&planner).map_err(|error| wrong(error.to_string()))?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_MAX)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        let security = match (scheme, tls_dir) {
            (Scheme::PlainText, None) => Security::PlainText,
            (Scheme::Tls, Some(dir)) => Security::Tls(identity(&dir)?),
            (Scheme::Tls, None) => {
                return Err(wrong(
                    "https takes a certificate: name its directory with --tls-dir, VMFERRY_TLS_DIR or \
                     `tls_dir` in the config file; `vmferry pki issue operator NAME` makes one"
                        .to_owned(),
                ));
            }
            // Never silently without what the caller counts on.
            (Scheme::PlainText, Some(dir)) => {
                return Err(wrong(format!(
                    "http is plain text, and a certificate is given ({}); write https://, or leave the \
                     certificate out",
                    dir.display()
                )));
            }
        };
        let channel = vmferry_tls::channel(&endpoint, &security, Expected::Any(Role::Planner));
        Ok(Self { planner, api: PlannerClient::new(channel) })
    }

    pub(crate) async fn list_hosts(&self) -> Result<ListHostsReply, Failure> {
        let reply = self.api.clone().list_hosts(timed(ListHostsRequest {})).await;
        self.answer("list hosts", reply, &Unanswered::Harmless)
    }

    pub(crate) async fn host(&self, host: &str) -> Result<Host, Failure> {
        let request = GetHostRequest { host: host.to_owned() };
        let reply = self.api.clone().get_host(timed(request)).await;
        self.answer(&format!("show host {host}"), reply, &Unanswered::Harmless)
    }

    pub(crate) async fn list_vms(&self, host: &str) -> Result<ListVmsReply, Failure> {
        let request = ListVmsRequest { host: host.to_owned() };
        let reply = self.api.clone().list_vms(timed(request)).await;
        self.answer("list VMs", reply, &Unanswered::Harmless)
    }

    pub(crate) async fn vm(&self, vm: &str) -> Result<Vm, Failure> {
        let request = GetVmRequest { vm: vm.to_owned() };
        let reply = self.api.clone().get_vm(timed(request)).await;
        self.answer(&format!("show VM {vm}"), reply, &Unanswered::Harmless)
    }

    pub(crate) async fn start_vm(
        &self,
        operation: &str,
        request: StartVmRequest,
    ) -> Result<Vm, Failure> {
        let doubt = in_doubt("vmferry vm list");
        let reply = self.api.clone().start_vm(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn stop_vm(
        &self,
        operation: &str,
        request: StopVmRequest,
    ) -> Result<Vm, Failure> {
        let doubt = in_doubt(&format!("vmferry vm show {}", request.vm));
        let reply = self.api.clone().stop_vm(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn migrate_vm(
        &self,
        operation: &str,
        request: MigrateVmRequest,
    ) -> Result<Migration, Failure> {
        let doubt = Unanswered::InDoubt(format!(
            "it may have been accepted; give the command again with --request-id {}: the same \
             request is carried out once",
            request.request_id
        ));
        let reply = self.api.clone().migrate_vm(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn list_migrations(
        &self,
        request: ListMigrationsRequest,
    ) -> Result<ListMigrationsReply, Failure> {
        let reply = self.api.clone().list_migrations(timed(request)).await;
        self.answer("list migrations", reply, &Unanswered::Harmless)
    }

    pub(crate) async fn migration(&self, id: &str) -> Result<Migration, Failure> {
        let request = GetMigrationRequest { id: id.to_owned() };
        let reply = self.api.clone().get_migration(timed(request)).await;
        self.answer(&format!("show migration {id}"), reply, &Unanswered::Harmless)
    }

    pub(crate) async fn open_gate(
        &self,
        operation: &str,
        request: OpenGateRequest,
    ) -> Result<Migration, Failure> {
        let doubt = in_doubt(&format!("vmferry migration show {}", request.id));
        let reply = self.api.clone().open_gate(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn network_state(&self, vm: &str) -> Result<NetworkState, Failure> {
        let request = NetworkStateRequest { vm: vm.to_owned() };
        let reply = self.api.clone().get_network_state(timed(request)).await;
        self.answer(&format!("show the network of VM {vm}"), reply, &Unanswered::Harmless)
    }

    pub(crate) async fn cancel_migration(&self, id: &str) -> Result<Migration, Failure> {
        let request = CancelMigrationRequest { id: id.to_owned() };
        let doubt = in_doubt(&format!("vmferry migration show {id}"));
        let reply = self.api.clone().cancel_migration(timed(request)).await;
        self.answer(&format!("cancel migration {id}"), reply, &doubt)
    }

    pub(crate) async fn set_migration_limits(
        &self,
        request: SetMigrationLimitsRequest,
    ) -> Result<Migration, Failure> {
        let operation = format!("set limits of migration {}", request.id);
        let doubt = in_doubt(&format!("vmferry migration show {}", request.id));
        let reply = self.api.clone().set_migration_limits(timed(request)).await;
        self.answer(&operation, reply, &doubt)
    }

    pub(crate) async fn declare_host_dead(
        &self,
        operation: &str,
        request: DeclareHostDeadRequest,
    ) -> Result<Host, Failure> {
        let doubt = in_doubt(&format!("vmferry host show {}", request.host));
        let reply = self.api.clone().declare_host_dead(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn fence_host(
        &self,
        operation: &str,
        request: FenceHostRequest,
    ) -> Result<Host, Failure> {
        let doubt = in_doubt(&format!("vmferry host show {}", request.host));
        let mut request = Request::new(request);
        request.set_timeout(FENCE_MAX);
        let reply = self.api.clone().fence_host(request).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn delete_vm(
        &self,
        operation: &str,
        request: DeleteVmRequest,
    ) -> Result<DeleteVmReply, Failure> {
        let reply = self.api.clone().delete_vm(timed(request)).await;
        self.answer(operation, reply, &in_doubt("vmferry vm list"))
    }

    pub(crate) async fn resolve_migration(
        &self,
        operation: &str,
        request: ResolveMigrationRequest,
    ) -> Result<Migration, Failure> {
        let doubt = in_doubt("vmferry doctor");
        let mut request = Request::new(request);
        request.set_timeout(RESOLVE_MAX);
        let reply = self.api.clone().resolve_migration(request).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn capacity(
        &self,
        request: CapacityRequest,
    ) -> Result<CapacityReply, Failure> {
        let reply = self.api.clone().get_capacity(timed(request)).await;
        self.answer("capacity", reply, &Unanswered::Harmless)
    }

    pub(crate) async fn doctor(&self, vm: &str) -> Result<DoctorReply, Failure> {
        let request = DoctorRequest { vm: vm.to_owned() };
        let reply = self.api.clone().doctor(timed(request)).await;
        self.answer("doctor", reply, &Unanswered::Harmless)
    }

    /// Opens the stream of a migration's states. It has no deadline: the caller has one.
    pub(crate) async fn watch_migration(&self, id: &str) -> Result<Streaming<Migration>, Failure> {
        let request = GetMigrationRequest { id: id.to_owned() };
        let reply = self.api.clone().watch_migration(request).await;
        self.answer(&format!("watch migration {id}"), reply, &Unanswered::Harmless)
    }

    /// Turns an error of a call or of its stream into a failure.
    pub(crate) fn failure(&self, operation: &str, status: &Status) -> Failure {
        self.failed(operation, status, &Unanswered::Harmless)
    }

    fn answer<T>(
        &self,
        operation: &str,
        reply: Result<tonic::Response<T>, Status>,
        unanswered: &Unanswered,
    ) -> Result<T, Failure> {
        reply
            .map(tonic::Response::into_inner)
            .map_err(|status| self.failed(operation, &status, unanswered))
    }

    fn failed(&self, operation: &str, status: &Status, unanswered: &Unanswered) -> Failure {
        let operation = operation.to_owned();
        let Some(refusal) = refusal(status) else {
            let advice = match unanswered {
                Unanswered::InDoubt(advice) if !never_sent(status) => advice.clone(),
                Unanswered::Harmless | Unanswered::InDoubt(_) => {
                    "is vmferry-planner running there? Set another address with --planner \
                     https://HOST:9096, or `planner` in /etc/vmferry/ctl.toml; a planner with certificates \
                     takes https and --tls-dir only"
                        .to_owned()
                }
            };
            let problem = chain(status);
            return Failure::Unreachable {
                operation,
                planner: self.planner.clone(),
                problem,
                advice,
            };
        };
        // Details that do not decode are from another version: the message still stands.
        let detail = ErrorDetail::decode(status.details()).unwrap_or_default();
        let refusal = if detail.blockers.is_empty() { refusal } else { Refusal::Blocked };
        let message = status.message().to_owned();
        Failure::Refused { operation, refusal, message, detail: Box::new(detail) }
    }
}

/// Loads the caller's own certificate.
pub(crate) fn identity(dir: &Path) -> Result<Arc<Live>, Failure> {
    Live::open(dir, Use::Client).map_err(|error| {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        Failure::Usage {
            operation: format!("load the certificate in {}", dir.display()),
            problem: format!("{error}{cause}"),
        }
    })
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_MAX);
    request
}

/// Of calls that ask the agents of a whole host's VMs.
fn patient<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(PLAN_MAX);
    request
}

fn in_doubt(command: &str) -> Unanswered {
    Unanswered::InDoubt(format!("it may have been accepted; see `{command}`"))
}

/// Says what the planner means by an error; `None` if it is not the planner's word.
fn refusal(status: &Status) -> Option<Refusal> {
    match status.code() {
        Code::InvalidArgument | Code::NotFound | Code::AlreadyExists | Code::OutOfRange => {
            Some(Refusal::Wrong)
        }
        Code::FailedPrecondition | Code::ResourceExhausted | Code::Aborted => {
            Some(Refusal::Blocked)
        }
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown
            if status.details().is_empty() =>
        {
            None
        }
        Code::Ok
        | Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Unknown
        | Code::PermissionDenied
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => Some(Refusal::Broken),
    }
}

/// Says whether the call certainly never left this process.
fn never_sent(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.kind() == std::io::ErrorKind::ConnectionRefused;
        }
        source = error.source();
    }
    false
}

/// Returns the message with what caused it, each part once.
pub(crate) fn chain(status: &Status) -> String {
    let mut parts = vec![status.message().to_owned()];
    let mut source = status.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !parts.iter().any(|part| part.contains(&text)) {
            parts.push(text);
        }
        source = error.source();
    }
    parts.join(": ")
}
