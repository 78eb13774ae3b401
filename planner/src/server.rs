//! Puts the planner on its two ports and sets its own work going.

use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt as _;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tracing::{debug, error};
use vmferry_proto::v1::planner_server::PlannerServer;

use crate::planner::Planner;
use crate::{grpc, reconciler, rest};

/// Agents and clients that vanish are noticed within these.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that says nothing at all, not even HTTP, is asked by the kernel.
const SILENT: Duration = Duration::from_secs(60);
/// A host report with thousands of VMs and their definitions stays below it.
const MESSAGE_MAX: usize = 16 << 20;

/// Serves gRPC and REST, and reconciles, until the planner is told to end.
pub fn serve(planner: &Arc<Planner>, grpc: TcpListener, rest: TcpListener) {
    let shutdown = &planner.parts.shutdown;
    shutdown.spawn(reconciler::run(Arc::clone(planner)));
    let service = PlannerServer::new(grpc::Service::new(Arc::clone(planner)))
        .max_decoding_message_size(MESSAGE_MAX);
    let ending = shutdown.clone();
    shutdown.spawn(async move {
        let incoming =
            TcpIncoming::from(grpc).with_nodelay(Some(true)).with_keepalive(Some(SILENT));
        let served = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, async move { ending.requested().await })
            .await;
        if let Err(error) = served {
            error!(%error, "gRPC ended");
        }
    });
    let router = rest::router(Arc::clone(planner));
    shutdown.spawn(async move {
        let rest = rest.tap_io(|stream| {
            // Without it an answer may wait for the acknowledgement of the one before.
            if let Err(error) = stream.set_nodelay(true) {
                debug!(%error, "a connection keeps its delay");
            }
            keep_alive(stream);
        });
        if let Err(error) = axum::serve(rest, router).await {
            error!(%error, "REST ended");
        }
    });
}

/// Lets the kernel ask a silent peer whether it is still there: one that lost its power is gone
/// after two minutes, not never.
fn keep_alive(stream: &TcpStream) {
    let set = setsockopt(stream, sockopt::TcpKeepIdle, &60)
        .and_then(|()| setsockopt(stream, sockopt::TcpKeepInterval, &15))
        .and_then(|()| setsockopt(stream, sockopt::TcpKeepCount, &4))
        .and_then(|()| setsockopt(stream, sockopt::KeepAlive, &true));
    if let Err(error) = set {
        debug!(%error, "a connection is not kept alive");
    }
}
