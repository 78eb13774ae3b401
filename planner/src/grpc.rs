//! The API over gRPC: decode, call, encode.

use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use tonic::{Code, Request, Response, Status, Streaming};
use vmferry_proto::v1::planner_server::Planner as PlannerService;
use vmferry_proto::{refusal, v1};
use vmferry_tls::{Caller, Peer, Role};

use crate::api::{ApiError, Kind};
use crate::planner::Planner;
use crate::telemetry::Chain;
use crate::view;

/// Serves one planner.
#[derive(Clone, Debug)]
pub struct Service {
    planner: Arc<Planner>,
}

impl Service {
    /// Serves `planner`.
    #[must_use]
    pub const fn new(planner: Arc<Planner>) -> Self {
        Self { planner }
    }
}

/// Writes a failure as the detail that goes with it on every edge.
#[must_use]
pub fn detail(error: &ApiError) -> v1::ErrorDetail {
    v1::ErrorDetail {
        code: error.code().to_owned(),
        field: error.field().to_owned(),
        blockers: error.blockers().iter().map(view::blocker).collect(),
        ..v1::ErrorDetail::default()
    }
}

/// Writes a failure in gRPC's words. Ours are logged here, once.
fn status(error: &ApiError) -> Status {
    let code = match error.kind() {
        Kind::Invalid => Code::InvalidArgument,
        Kind::NotFound => Code::NotFound,
        Kind::Conflict => Code::FailedPrecondition,
        Kind::Capacity => Code::ResourceExhausted,
        Kind::Unavailable => Code::Unavailable,
        Kind::Internal => {
            tracing::error!(error = %Chain(error), "request failed");
            Code::Internal
        }
    };
    refusal::status(code, &Chain(error).to_string(), detail(error))
}

fn reply<T>(result: Result<T, ApiError>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|error| status(&error))
}

/// Says who may call what: hosts report, operators do everything else. Over plain text whoever
/// reaches it may, which is why plain text is spoken where nobody else does.
pub(crate) fn may_call(peer: &Peer, method: &str) -> Result<(), Status> {
    let wanted = if method == "Report" { Role::Host } else { Role::Operator };
    match &peer.caller {
        Caller::PlainText => Ok(()),
        Caller::Known(identity) if identity.role() == wanted => Ok(()),
        Caller::Known(_) | Caller::Anonymous => Err(not_allowed(
            peer,
            method,
            &format!("{} may not call `{method}`: that is for a {wanted}", peer.caller),
        )),
    }
}

/// Refuses a report about another host than the one that sends it.
fn check_reporter(peer: Option<&Peer>, report: &v1::HostReport) -> Result<(), Status> {
    let Some(peer) = peer else { return Err(Status::internal("nobody knows who calls")) };
    match &peer.caller {
        Caller::PlainText => Ok(()),
        Caller::Known(identity)
            if identity.host_id().is_some_and(|id| id.as_str() == report.host_id) =>
        {
            Ok(())
        }
        Caller::Known(_) | Caller::Anonymous => Err(not_allowed(
            peer,
            "Report",
            &format!(
                "host_id: {} may not report for host `{}`: a host speaks for itself only",
                peer.caller, report.host_id
            ),
        )),
    }
}

fn not_allowed(peer: &Peer, method: &str, why: &str) -> Status {
    tracing::warn!(caller = %peer.caller, peer = %peer.address, method, "call refused");
    let detail = v1::ErrorDetail { code: "not_allowed".to_owned(), ..v1::ErrorDetail::default() };
    refusal::status(Code::PermissionDenied, why, detail)
}

#[tonic::async_trait]
impl PlannerService for Service {
    type ReportStream = BoxStream<'static, Result<v1::ReportReply, Status>>;
    type WatchMigrationStream = BoxStream<'static, Result<v1::Migration, Status>>;

    async fn report(
        &self,
        request: Request<Streaming<v1::HostReport>>,
    ) -> Result<Response<Self::ReportStream>, Status> {
        let peer = request.extensions().get::<Peer>().cloned();
        let planner = Arc::clone(&self.planner);
        let shutdown = planner.parts.shutdown.clone();
        // The first failure ends the call: the agent makes another one, with a whole report.
        let replies = request.into_inner().and_then(move |report| {
            let (peer, planner) = (peer.clone(), Arc::clone(&planner));
            async move {
                check_reporter(peer.as_ref(), &report)?;
                planner.report(report).await.map_err(|error| status(&error))
            }
        });
        let ending = async move { shutdown.requested().await };
        Ok(Response::new(replies.take_until(Box::pin(ending)).boxed()))
    }

    async fn list_hosts(
        &self,
        _request: Request<v1::ListHostsRequest>,
    ) -> Result<Response<v1::ListHostsReply>, Status> {
        reply(self.planner.list_hosts().await)
    }

    async fn get_host(
        &self,
        request: Request<v1::GetHostRequest>,
    ) -> Result<Response<v1::Host>, Status> {
        reply(self.planner.get_host(&request.into_inner().host).await)
    }

    async fn declare_host_dead(
        &self,
        request: Request<v1::DeclareHostDeadRequest>,
    ) -> Result<Response<v1::Host>, Status> {
        reply(self.planner.declare_host_dead(request.into_inner()).await)
    }

    async fn fence_host(
        &self,
        request: Request<v1::FenceHostRequest>,
    ) -> Result<Response<v1::Host>, Status> {
        reply(self.planner.fence_host(request.into_inner()).await)
    }

    async fn cordon_host(
        &self,
        request: Request<v1::CordonHostRequest>,
    ) -> Result<Response<v1::Host>, Status> {
        reply(self.planner.cordon_host(request.into_inner()).await)
    }

    async fn uncordon_host(
        &self,
        request: Request<v1::UncordonHostRequest>,
    ) -> Result<Response<v1::Host>, Status> {
        reply(self.planner.uncordon_host(request.into_inner()).await)
    }

    async fn plan_maintenance(
        &self,
        request: Request<v1::MaintenanceRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.plan_maintenance(request.into_inner()).await)
    }

    async fn execute_maintenance(
        &self,
        request: Request<v1::MaintenanceRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.execute_maintenance(request.into_inner()).await)
    }

    async fn complete_maintenance(
        &self,
        request: Request<v1::CompleteMaintenanceRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.complete_maintenance(request.into_inner()).await)
    }

    async fn drain_host(
        &self,
        request: Request<v1::DrainHostRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.drain_host(request.into_inner()).await)
    }

    async fn retire_host(
        &self,
        request: Request<v1::DrainHostRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.retire_host(request.into_inner()).await)
    }

    async fn delete_host(
        &self,
        request: Request<v1::DeleteHostRequest>,
    ) -> Result<Response<v1::DeleteHostReply>, Status> {
        reply(self.planner.delete_host(request.into_inner()).await)
    }

    async fn list_emptyings(
        &self,
        request: Request<v1::ListEmptyingsRequest>,
    ) -> Result<Response<v1::ListEmptyingsReply>, Status> {
        reply(self.planner.list_emptyings(&request.into_inner()).await)
    }

    async fn get_emptying(
        &self,
        request: Request<v1::GetEmptyingRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.get_emptying(&request.into_inner().id).await)
    }

    async fn cancel_emptying(
        &self,
        request: Request<v1::CancelEmptyingRequest>,
    ) -> Result<Response<v1::Emptying>, Status> {
        reply(self.planner.cancel_emptying(request.into_inner()).await)
    }

    async fn list_queue(
        &self,
        _request: Request<v1::ListQueueRequest>,
    ) -> Result<Response<v1::ListQueueReply>, Status> {
        reply(self.planner.list_queue().await)
    }

    async fn delete_vm(
        &self,
        request: Request<v1::DeleteVmRequest>,
    ) -> Result<Response<v1::DeleteVmReply>, Status> {
        reply(self.planner.delete_vm(request.into_inner()).await)
    }

    async fn resolve_migration(
        &self,
        request: Request<v1::ResolveMigrationRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.resolve_migration(request.into_inner()).await)
    }

    async fn get_capacity(
        &self,
        request: Request<v1::CapacityRequest>,
    ) -> Result<Response<v1::CapacityReply>, Status> {
        reply(self.planner.capacity(&request.into_inner()).await)
    }

    async fn doctor(
        &self,
        request: Request<v1::DoctorRequest>,
    ) -> Result<Response<v1::DoctorReply>, Status> {
        reply(self.planner.doctor(&request.into_inner()).await)
    }

    async fn list_vms(
        &self,
        request: Request<v1::ListVmsRequest>,
    ) -> Result<Response<v1::ListVmsReply>, Status> {
        reply(self.planner.list_vms(&request.into_inner().host).await)
    }

    async fn get_vm(&self, request: Request<v1::GetVmRequest>) -> Result<Response<v1::Vm>, Status> {
        reply(self.planner.get_vm(&request.into_inner().vm).await)
    }

    async fn start_vm(
        &self,
        request: Request<v1::StartVmRequest>,
    ) -> Result<Response<v1::Vm>, Status> {
        reply(self.planner.start_vm(request.into_inner()).await)
    }

    async fn stop_vm(
        &self,
        request: Request<v1::StopVmRequest>,
    ) -> Result<Response<v1::Vm>, Status> {
        reply(self.planner.stop_vm(request.into_inner()).await)
    }

    async fn migrate_vm(
        &self,
        request: Request<v1::MigrateVmRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.migrate_vm(request.into_inner()).await)
    }

    async fn list_migrations(
        &self,
        request: Request<v1::ListMigrationsRequest>,
    ) -> Result<Response<v1::ListMigrationsReply>, Status> {
        reply(self.planner.list_migrations(&request.into_inner()).await)
    }

    async fn get_migration(
        &self,
        request: Request<v1::GetMigrationRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.get_migration(&request.into_inner().id).await)
    }

    async fn cancel_migration(
        &self,
        request: Request<v1::CancelMigrationRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.cancel_migration(&request.into_inner().id).await)
    }

    async fn prepare_receiver(
        &self,
        request: Request<v1::MigrateVmRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.prepare_receiver(request.into_inner()).await)
    }

    async fn open_gate(
        &self,
        request: Request<v1::OpenGateRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.open_gate(request.get_ref()).await)
    }

    async fn get_network_state(
        &self,
        request: Request<v1::NetworkStateRequest>,
    ) -> Result<Response<v1::NetworkState>, Status> {
        reply(self.planner.network_state(request.get_ref()).await)
    }

    async fn set_migration_limits(
        &self,
        request: Request<v1::SetMigrationLimitsRequest>,
    ) -> Result<Response<v1::Migration>, Status> {
        reply(self.planner.set_limits(&request.into_inner()).await)
    }

    async fn watch_migration(
        &self,
        request: Request<v1::GetMigrationRequest>,
    ) -> Result<Response<Self::WatchMigrationStream>, Status> {
        let stream = self
            .planner
            .watch_migration(&request.into_inner().id)
            .await
            .map_err(|error| status(&error))?;
        Ok(Response::new(stream.map(|item| item.map_err(|error| status(&error))).boxed()))
    }
}
