//! The agents of those hosts, which do what they are told to a VM that is placed there.
//!
//! One listener serves all of them: each has an address of its own in the loopback's network.

use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures::{Stream, StreamExt as _, stream};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::{Request, Response, Status};
use vmferry_proto::v1;
use vmferry_proto::v1::agent_server::{Agent as AgentService, AgentServer};
use vmferry_proto::v1::execute_request::Action;

use super::hosts::{Hosts, host_at, name};

/// Serves all agents.
pub(super) async fn serve(hosts: &Arc<Hosts>, port: u16, tasks: &mut JoinSet<()>) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await.context("listen")?;
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let service = AgentServer::new(Agents { hosts: Arc::clone(hosts) });
    let router = tonic::transport::Server::builder().add_service(service);
    tasks.spawn(async move {
        router.serve_with_incoming(incoming).await.ok();
    });
    Ok(())
}

struct Agents {
    hosts: Arc<Hosts>,
}

/// Returns the host that was meant.
fn meant<T>(request: &Request<T>) -> Result<usize, Status> {
    let info = request.extensions().get::<TcpConnectInfo>();
    match info.and_then(TcpConnectInfo::local_addr).map(|address| address.ip()) {
        Some(IpAddr::V4(address)) => Ok(host_at(address)),
        Some(IpAddr::V6(_)) | None => Err(Status::internal("whose agent?")),
    }
}

impl Agents {
    fn observe(&self, host: usize, vm_id: &str) -> v1::VmObservation {
        let absent = v1::VmObservation {
            host_id: name(host),
            vm_id: vm_id.to_owned(),
            boot_id: format!("4d9f9a5e-0000-4000-8000-{host:012x}"),
            sequence: self.hosts.fresh_sequence(host),
            knowledge: v1::Knowledge::UnknownVm.into(),
            role: "absent".to_owned(),
            ..v1::VmObservation::default()
        };
        let Some(vm) = self.hosts.has(host, vm_id) else { return absent };
        v1::VmObservation {
            knowledge: v1::Knowledge::Known.into(),
            role: vm.role,
            generation: vm.generation,
            claim: vm.claim,
            migration_id: vm.migration_id,
            run_state: vm.run_state,
            qemu: Some(v1::QemuProcess {
                pid: 4711,
                start_time: 1,
                boot_id: absent.boot_id.clone(),
                alive: true,
            }),
            ..absent
        }
    }
}

#[tonic::async_trait]
impl AgentService for Agents {
    async fn claim(
        &self,
        request: Request<v1::ClaimRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let host = meant(&request)?;
        let claim = request.into_inner();
        let seen = self.observe(host, &claim.vm_id);
        let (generation, migration_id) = (claim.generation, claim.migration_id);
        let seen = v1::VmObservation { generation, claim: claim.claim, migration_id, ..seen };
        Ok(Response::new(seen))
    }

    async fn execute(
        &self,
        request: Request<v1::ExecuteRequest>,
    ) -> Result<Response<v1::ExecuteReply>, Status> {
        let host = meant(&request)?;
        let request = request.into_inner();
        let (Some(fence), Some(Action::StartVm(start))) = (request.fence, request.action) else {
            return Err(Status::unimplemented("only starts are measured"));
        };
        if self.hosts.has(host, &fence.vm_id).is_none() {
            let vm = v1::VmReport {
                vm_id: fence.vm_id.clone(),
                role: "running".to_owned(),
                generation: fence.generation,
                claim: fence.claim,
                knowledge: v1::Knowledge::Known.into(),
                configured_memory_bytes: (4 << 30) + (80 << 20),
                observed_memory_bytes: 1 << 30,
                cpu_milli: 2_000,
                run_state: "running".to_owned(),
                migration_id: fence.migration_id,
                definition: start.definition,
                resolved_machine: "pc-q35-10.0".to_owned(),
                ever_continued: true,
                ..v1::VmReport::default()
            };
            self.hosts.arrived(host, vm);
        }
        Ok(Response::new(v1::ExecuteReply {
            observation: Some(self.observe(host, &fence.vm_id)),
            resolved_machine: "pc-q35-10.0".to_owned(),
            ..v1::ExecuteReply::default()
        }))
    }

    async fn observe(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<v1::VmObservation>, Status> {
        let host = meant(&request)?;
        Ok(Response::new(self.observe(host, &request.get_ref().vm_id)))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::VmObservation, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let host = meant(&request)?;
        let first = self.observe(host, &request.get_ref().vm_id);
        let stream = stream::once(async move { Ok(first) }).chain(stream::pending());
        Ok(Response::new(Box::pin(stream)))
    }

    async fn describe_source(
        &self,
        request: Request<v1::DescribeSourceRequest>,
    ) -> Result<Response<v1::SourceDescription>, Status> {
        let vm_id = request.into_inner().vm_id;
        let resolved_machine = "pc-q35-10.0".to_owned();
        let described = v1::SourceDescription { vm_id, resolved_machine, ..Default::default() };
        Ok(Response::new(described))
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
        Err(Status::unimplemented("a report comes by itself"))
    }
}
