//! Puts the planner on its two ports and sets its own work going.

use std::sync::Arc;
use std::time::Duration;

use tonic::transport::Server;
use tracing::error;
use vmferry_proto::v1::planner_server::PlannerServer;
use vmferry_tls::{Acceptor, Authorized};

use crate::planner::Planner;
use crate::rest::{Caller, Secured};
use crate::{grpc, reconciler, rest};

/// Agents and clients that vanish are noticed within these. A host reports more often than that: no
/// connection that lives is asked.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// A host report with thousands of VMs and their definitions stays below it.
const MESSAGE_MAX: usize = 16 << 20;

/// Serves gRPC and REST, and reconciles, until the planner is told to end.
pub fn serve(planner: &Arc<Planner>, grpc: Acceptor, rest: Acceptor) {
    let shutdown = &planner.parts.shutdown;
    let security = grpc.security().clone();
    if let Some(live) = security.live() {
        shutdown.spawn(live.clone().follow());
    }
    shutdown.spawn(reconciler::run(Arc::clone(planner)));
    let service = PlannerServer::new(grpc::Service::new(Arc::clone(planner)))
        .max_decoding_message_size(MESSAGE_MAX);
    let ending = shutdown.clone();
    shutdown.spawn(async move {
        let served = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(Authorized::new(service, grpc::may_call))
            .serve_with_incoming_shutdown(
                grpc.into_stream(),
                async move { ending.requested().await },
            )
            .await;
        if let Err(error) = served {
            error!(%error, "gRPC ended");
        }
    });
    let router = rest::router(Arc::clone(planner), security);
    shutdown.spawn(async move {
        let service = router.into_make_service_with_connect_info::<Caller>();
        if let Err(error) = axum::serve(Secured(rest), service).await {
            error!(%error, "REST ended");
        }
    });
}
