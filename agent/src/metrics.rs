//! What monitoring reads: `/metrics` and `/healthz`.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use vmferry_types::Role;

use self::bounded::Bounded;
use crate::agent::{Agent, StartError};
use crate::live::Knowledge;

mod bounded;

/// Renders what is true at the moment of the question: a VM that left has no series.
#[derive(Debug)]
struct Live {
    agent: Arc<Agent>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateLabels {
    of: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VmLabels {
    vm: String,
}

impl Collector for Live {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let vms = self.agent.vms();
        let mut family = encoder.encode_descriptor(
            "vmferry_agent_vms",
            "VMs by what this host has of them",
            None,
            prometheus_client::metrics::MetricType::Gauge,
        )?;
        for role in Role::ALL {
            let count = vms.iter().filter(|vm| vm.shared.record.borrow().role() == *role).count();
            let labels = RoleLabels { role: role.label().to_owned() };
            ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX))
                .encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "vmferry_agent_vm_transfer_bytes",
            "Bytes of the transfer under way",
            None,
            prometheus_client::metrics::MetricType::Gauge,
        )?;
        for vm in vms.iter().filter(|vm| vm.shared.record.borrow().outgoing().is_some()) {
            let sight = vm.shared.sight.borrow().clone();
            let bytes = sight.migrate.ram.and_then(|ram| ram.transferred).unwrap_or(0);
            let labels = VmLabels { vm: vm.shared.record.borrow().name.clone() };
            ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX))
                .encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "vmferry_agent_vm_known",
            "Whether a VM's process answers (1) or not (0)",
            None,
            prometheus_client::metrics::MetricType::Gauge,
        )?;
        for vm in vms.iter().filter(|vm| vm.shared.record.borrow().process().is_some()) {
            let known = vm.shared.sight.borrow().knowledge == Knowledge::Known;
            let labels = VmLabels { vm: vm.shared.record.borrow().name.clone() };
            ConstGauge::new(i64::from(known)).encode(family.encode_family(&labels)?)?;
        }
        let metric = encoder.encode_descriptor(
            "vmferry_agent_journal_readable",
            "Whether the journal proves anything (1) or was lost (0)",
            None,
            prometheus_client::metrics::MetricType::Gauge,
        )?;
        let readable = i64::from(self.agent.journal_proves());
        ConstGauge::new(readable).encode(metric)?;
        if let Some(live) = self.agent.security.live() {
            certificates(&mut encoder, live)?;
        }
        let metric = encoder.encode_descriptor(
            "vmferry_agent_tokio_tasks",
            "Tasks of the agent that have not ended",
            None,
            prometheus_client::metrics::MetricType::Gauge,
        )?;
        ConstGauge::new(tasks()).encode(metric)
    }
}

/// Says until when certificates count, and whether the files that are there are the ones in use.
fn certificates(
    encoder: &mut DescriptorEncoder<'_>,
    live: &vmferry_tls::Live,
) -> Result<(), std::fmt::Error> {
    let mut family = encoder.encode_descriptor(
        "vmferry_agent_certificate_not_after_seconds",
        "Until when certificates count, in seconds since 1970",
        None,
        prometheus_client::metrics::MetricType::Gauge,
    )?;
    for expiry in live.current().expiries() {
        let labels = CertificateLabels { of: expiry.of.to_owned() };
        ConstGauge::new(i64::try_from(expiry.not_after).unwrap_or(i64::MAX))
            .encode(family.encode_family(&labels)?)?;
    }
    let metric = encoder.encode_descriptor(
        "vmferry_agent_certificate_files_usable",
        "Whether the certificate files that are there are in use (1) or broken (0)",
        None,
        prometheus_client::metrics::MetricType::Gauge,
    )?;
    ConstGauge::new(i64::from(live.trouble().is_none())).encode(metric)
}

/// Counts the tasks that have not ended: connections, calls, lanes of VMs.
fn tasks() -> i64 {
    let runtime = tokio::runtime::Handle::try_current();
    let alive = runtime.map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    i64::try_from(alive).unwrap_or(i64::MAX)
}

/// Serves metrics and health until the agent's end.
pub(crate) async fn serve(agent: &Arc<Agent>) -> Result<SocketAddr, StartError> {
    let address = agent.config.metrics;
    let failed = |source| StartError::Listen { address, source };
    let listener = tokio::net::TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Live { agent: agent.clone() }));
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .with_state(Arc::new(registry));
    agent.shutdown.spawn(async move {
        if let Err(error) = axum::serve(Bounded::new(listener), router).await {
            tracing::error!(%error, "metrics service ended");
        }
    });
    Ok(bound)
}

async fn metrics(State(registry): State<Arc<Registry>>) -> impl IntoResponse {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
