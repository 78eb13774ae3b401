//! A planner that answers as it is told to, on a port of its own.

use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use vmferry_proto::v1::planner_server::{Planner, PlannerServer};
use vmferry_proto::v1::{
    CancelEmptyingRequest, CancelMigrationRequest, CompleteMaintenanceRequest, CordonHostRequest,
    DeclareHostDeadRequest, DeleteHostReply, DeleteHostRequest, DeleteVmReply, DeleteVmRequest,
    DoctorReply, DoctorRequest, DrainHostRequest, Emptying, FenceHostRequest, GetEmptyingRequest,
    GetHostRequest, GetMigrationRequest, GetVmRequest, Host, HostReport, ListEmptyingsReply,
    ListEmptyingsRequest, ListHostsReply, ListHostsRequest, ListMigrationsReply,
    ListMigrationsRequest, ListQueueReply, ListQueueRequest, ListVmsReply, ListVmsRequest,
    MaintenanceRequest, MigrateVmRequest, Migration, NetworkState, NetworkStateRequest,
    OpenGateRequest, OpenHalf, ReportReply, ResolveMigrationRequest, SetMigrationLimitsRequest,
    StartVmRequest, StopVmRequest, UncordonHostRequest, Vm,
};
use vmferry_proto::v1::{CapacityReply, CapacityRequest};

/// What the planner says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    /// Every call ends with this, if set.
    pub(crate) refusal: Option<Status>,
    pub(crate) hosts: Vec<Host>,
    /// What a VM is at the first call about it, the second, ...; the last stays.
    pub(crate) vms: Vec<Vm>,
    /// The states that a migration goes through.
    pub(crate) states: Vec<Migration>,
    pub(crate) stream: StreamEnd,
    pub(crate) halves: Vec<OpenHalf>,
    pub(crate) deleted: DeleteVmReply,
    pub(crate) doctor: DoctorReply,
    pub(crate) capacity: CapacityReply,
    pub(crate) emptying: Emptying,
}

/// When a stream of states ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// After the last state.
    #[default]
    AfterLast,
    /// Never.
    Never,
    /// After each state, as when the planner restarts.
    AfterEach,
    /// Before it begins, the first time: the planner restarts just now.
    BeforeFirst,
}

/// What the planner was asked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked {
    pub(crate) vms: usize,
    pub(crate) watched: usize,
    pub(crate) cancelled: Vec<String>,
    pub(crate) limits: Vec<SetMigrationLimitsRequest>,
    pub(crate) capacity: Vec<CapacityRequest>,
    pub(crate) declared: Vec<DeclareHostDeadRequest>,
    pub(crate) resolved: Vec<ResolveMigrationRequest>,
    pub(crate) migrated: Vec<MigrateVmRequest>,
    pub(crate) started: Vec<StartVmRequest>,
    /// Of which migration, which gate.
    pub(crate) gates: Vec<(String, String)>,
}

/// The planner; gone when dropped.
pub(crate) struct FakePlanner {
    port: u16,
    asked: Arc<Mutex<Asked>>,
    _serving: JoinSet<()>,
}

impl FakePlanner {
    pub(crate) async fn start(answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::<Mutex<Asked>>::default();
        let service = Service { answers, asked: Arc::clone(&asked) };
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            tonic::transport::Server::builder()
                .add_service(PlannerServer::new(service))
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        Self { port, asked, _serving: serving }
    }

    pub(crate) fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn asked(&self) -> Asked {
        self.asked.lock().unwrap().clone()
    }
}

struct Service {
    answers: Answers,
    asked: Arc<Mutex<Asked>>,
}

type Reply<T> = Result<Response<T>, Status>;

impl Service {
    fn reply<T>(&self, answer: impl FnOnce(&mut Asked) -> T) -> Reply<T> {
        match &self.answers.refusal {
            Some(refusal) => Err(refusal.clone()),
            None => Ok(Response::new(answer(&mut self.asked.lock().unwrap()))),
        }
    }

    fn next_vm(&self, asked: &mut Asked) -> Vm {
        let last = self.answers.vms.len() - 1;
        let vm = self.answers.vms[asked.vms.min(last)].clone();
        asked.vms += 1;
        vm
    }

    fn first_state(&self) -> Migration {
        self.answers.states.first().cloned().unwrap_or_default()
    }
}

#[tonic::async_trait]
impl Planner for Service {
    type ReportStream = std::pin::Pin<Box<dyn Stream<Item = Result<ReportReply, Status>> + Send>>;
    type WatchMigrationStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<Migration, Status>> + Send>>;

    async fn report(&self, _: Request<Streaming<HostReport>>) -> Reply<Self::ReportStream> {
        Err(Status::unimplemented("no host reports here"))
    }

    async fn list_hosts(&self, _: Request<ListHostsRequest>) -> Reply<ListHostsReply> {
        self.reply(|_| ListHostsReply { hosts: self.answers.hosts.clone() })
    }

    async fn get_host(&self, _: Request<GetHostRequest>) -> Reply<Host> {
        self.reply(|_| self.answers.hosts.first().cloned().unwrap_or_default())
    }

    async fn declare_host_dead(&self, request: Request<DeclareHostDeadRequest>) -> Reply<Host> {
        self.reply(|asked| {
            asked.declared.push(request.into_inner());
            self.answers.hosts.first().cloned().unwrap_or_default()
        })
    }

    async fn fence_host(&self, _: Request<FenceHostRequest>) -> Reply<Host> {
        self.reply(|_| self.answers.hosts.first().cloned().unwrap_or_default())
    }

    async fn cordon_host(&self, _: Request<CordonHostRequest>) -> Reply<Host> {
        self.reply(|_| self.answers.hosts.first().cloned().unwrap_or_default())
    }

    async fn uncordon_host(&self, _: Request<UncordonHostRequest>) -> Reply<Host> {
        self.reply(|_| self.answers.hosts.first().cloned().unwrap_or_default())
    }

    async fn plan_maintenance(&self, _: Request<MaintenanceRequest>) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn execute_maintenance(&self, _: Request<MaintenanceRequest>) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn complete_maintenance(
        &self,
        _: Request<CompleteMaintenanceRequest>,
    ) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn drain_host(&self, _: Request<DrainHostRequest>) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn retire_host(&self, _: Request<DrainHostRequest>) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn delete_host(&self, _: Request<DeleteHostRequest>) -> Reply<DeleteHostReply> {
        self.reply(|_| DeleteHostReply::default())
    }

    async fn list_emptyings(&self, _: Request<ListEmptyingsRequest>) -> Reply<ListEmptyingsReply> {
        self.reply(|_| ListEmptyingsReply::default())
    }

    async fn get_emptying(&self, _: Request<GetEmptyingRequest>) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn cancel_emptying(&self, _: Request<CancelEmptyingRequest>) -> Reply<Emptying> {
        self.reply(|_| self.answers.emptying.clone())
    }

    async fn list_queue(&self, _: Request<ListQueueRequest>) -> Reply<ListQueueReply> {
        self.reply(|_| ListQueueReply::default())
    }

    async fn delete_vm(&self, request: Request<DeleteVmRequest>) -> Reply<DeleteVmReply> {
        self.reply(|_| DeleteVmReply {
            name: request.into_inner().vm,
            ..self.answers.deleted.clone()
        })
    }

    async fn resolve_migration(
        &self,
        request: Request<ResolveMigrationRequest>,
    ) -> Reply<Migration> {
        self.reply(|asked| {
            asked.resolved.push(request.into_inner());
            self.first_state()
        })
    }

    async fn get_capacity(&self, request: Request<CapacityRequest>) -> Reply<CapacityReply> {
        self.reply(|asked| {
            asked.capacity.push(request.into_inner());
            self.answers.capacity.clone()
        })
    }

    async fn doctor(&self, _: Request<DoctorRequest>) -> Reply<DoctorReply> {
        self.reply(|_| self.answers.doctor.clone())
    }

    async fn list_vms(&self, _: Request<ListVmsRequest>) -> Reply<ListVmsReply> {
        self.reply(|_| ListVmsReply { vms: self.answers.vms.clone() })
    }

    async fn get_vm(&self, _: Request<GetVmRequest>) -> Reply<Vm> {
        self.reply(|asked| self.next_vm(asked))
    }

    async fn start_vm(&self, request: Request<StartVmRequest>) -> Reply<Vm> {
        self.reply(|asked| {
            asked.started.push(request.into_inner());
            self.next_vm(asked)
        })
    }

    async fn stop_vm(&self, _: Request<StopVmRequest>) -> Reply<Vm> {
        self.reply(|asked| self.next_vm(asked))
    }

    async fn migrate_vm(&self, request: Request<MigrateVmRequest>) -> Reply<Migration> {
        self.reply(|asked| {
            asked.migrated.push(request.into_inner());
            self.first_state()
        })
    }

    async fn prepare_receiver(&self, request: Request<MigrateVmRequest>) -> Reply<Migration> {
        self.migrate_vm(request).await
    }

    async fn open_gate(&self, request: Request<OpenGateRequest>) -> Reply<Migration> {
        self.reply(|asked| {
            let OpenGateRequest { id, gate, .. } = request.into_inner();
            asked.gates.push((id, gate));
            self.first_state()
        })
    }

    async fn get_network_state(&self, _: Request<NetworkStateRequest>) -> Reply<NetworkState> {
        self.reply(|_| NetworkState::default())
    }

    async fn list_migrations(
        &self,
        _: Request<ListMigrationsRequest>,
    ) -> Reply<ListMigrationsReply> {
        self.reply(|_| ListMigrationsReply {
            migrations: self.answers.states.clone(),
            halves: self.answers.halves.clone(),
        })
    }

    async fn get_migration(&self, _: Request<GetMigrationRequest>) -> Reply<Migration> {
        self.reply(|_| self.first_state())
    }

    async fn cancel_migration(&self, request: Request<CancelMigrationRequest>) -> Reply<Migration> {
        self.reply(|asked| {
            asked.cancelled.push(request.into_inner().id);
            self.first_state()
        })
    }

    async fn set_migration_limits(
        &self,
        request: Request<SetMigrationLimitsRequest>,
    ) -> Reply<Migration> {
        self.reply(|asked| {
            asked.limits.push(request.into_inner());
            self.first_state()
        })
    }

    async fn watch_migration(
        &self,
        _: Request<GetMigrationRequest>,
    ) -> Reply<Self::WatchMigrationStream> {
        let first = self.asked.lock().unwrap().watched == 0;
        if first && self.answers.stream == StreamEnd::BeforeFirst {
            self.asked.lock().unwrap().watched += 1;
            return Err(Status::unavailable("shutting down"));
        }
        self.reply(|asked| {
            let (from, count) = match self.answers.stream {
                StreamEnd::AfterEach => (asked.watched, 1),
                StreamEnd::AfterLast | StreamEnd::Never | StreamEnd::BeforeFirst => (0, usize::MAX),
            };
            asked.watched += 1;
            let states: Vec<_> =
                self.answers.states.iter().skip(from).take(count).cloned().map(Ok).collect();
            let states = tokio_stream::iter(states);
            if self.answers.stream == StreamEnd::Never {
                Box::pin(states.chain(tokio_stream::pending())) as Self::WatchMigrationStream
            } else {
                Box::pin(states)
            }
        })
    }
}
