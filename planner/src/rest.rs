//! The API over HTTP: the proto messages as JSON.

mod capacity;
mod error;
mod events;
mod extract;
mod lifecycle;
mod native;
mod operator;
mod secured;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post};
use axum::{Extension, middleware};
use serde::Deserialize;
use vmferry_proto::v1;
use vmferry_tls::Security;

use self::error::RestError;
use self::extract::{Message, Segment};
pub use self::secured::{Caller, Secured};
use crate::planner::Planner;

/// Definitions are a few KiB; nothing here needs more.
const BODY_MAX: usize = 1 << 20;

type Answer<T> = Result<axum::Json<T>, RestError>;
type Shared = State<Arc<Planner>>;

/// Returns all routes.
pub fn router(planner: Arc<Planner>, security: Security) -> Router {
    Router::new()
        .route("/api/capacity", get(capacity::capacity))
        .route("/api/hosts", get(hosts))
        .route("/api/hosts/{id}", get(host).delete(lifecycle::delete))
        .route("/api/hosts/{id}/cordon", post(lifecycle::cordon))
        .route("/api/hosts/{id}/uncordon", post(lifecycle::uncordon))
        .route("/api/hosts/{id}/drain", post(lifecycle::drain))
        .route("/api/hosts/{id}/retire", post(lifecycle::retire))
        .route("/api/hosts/{id}/maintenance/plan", post(lifecycle::plan))
        .route("/api/hosts/{id}/maintenance/execute", post(lifecycle::execute))
        .route("/api/hosts/{id}/maintenance/jobs", get(lifecycle::jobs))
        .route("/api/maintenance/jobs/{id}", get(lifecycle::one))
        .route("/api/maintenance/jobs/{id}/cancel", post(lifecycle::cancel))
        .route("/api/maintenance/jobs/{id}/complete", post(lifecycle::complete))
        .route("/api/emptyings", get(lifecycle::all))
        .route("/api/emptyings/{id}", get(lifecycle::one))
        .route("/api/emptyings/{id}/cancel", post(lifecycle::cancel))
        .route("/api/queue", get(lifecycle::queue))
        .route("/api/hosts/{id}/declare-dead", post(operator::declare_dead))
        .route("/api/hosts/{id}/fence", post(operator::fence))
        .route("/api/vms", get(vms).post(start_new))
        .route("/api/vms/{name}", get(vm).delete(operator::delete_vm))
        .route("/api/vms/{name}/start", post(start))
        .route("/api/vms/{name}/stop", post(stop))
        .route("/api/vms/{name}/migration/native/prepare-receiver", post(native::prepare))
        .route("/api/vms/{name}/migration/native/start", post(native::start))
        .route("/api/vms/{name}/migration/native/status", get(native::status))
        .route("/api/vms/{name}/migration/native/cancel", post(native::cancel))
        .route("/api/vms/{name}/migration/native/network-state", get(native::network_state))
        .route("/api/migration/receivers/{id}/activate", post(native::activate))
        .route("/api/migration/receivers/{id}", delete(native::destroy))
        .route("/api/migrations/{id}/go", post(native::go))
        .route("/api/migrations", get(migrations).post(migrate))
        .route("/api/migrations/{id}", get(migration))
        .route("/api/migrations/{id}/events", get(events::migration))
        .route("/api/migrations/{id}/cancel", post(cancel))
        .route("/api/migrations/{id}/limits", post(limits))
        .route("/api/migrations/{id}/resolve", post(operator::resolve))
        .route("/api/doctor", get(operator::doctor))
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .fallback(|| async { RestError::no_route() })
        .method_not_allowed_fallback(|| async { RestError::no_method() })
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(middleware::from_fn(secured::authorize))
        .layer(Extension(security))
        .with_state(planner)
}

async fn hosts(State(planner): Shared) -> Answer<v1::ListHostsReply> {
    Ok(axum::Json(planner.list_hosts().await?))
}

async fn host(State(planner): Shared, Segment(id): Segment) -> Answer<v1::Host> {
    Ok(axum::Json(planner.get_host(&id).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VmQuery {
    #[serde(default)]
    host: String,
}

async fn vms(
    State(planner): Shared,
    query: Result<Query<VmQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer<v1::ListVmsReply> {
    let Query(query) = query.map_err(|rejection| RestError::query(&rejection))?;
    Ok(axum::Json(planner.list_vms(&query.host).await?))
}

async fn vm(State(planner): Shared, Segment(name): Segment) -> Answer<v1::Vm> {
    Ok(axum::Json(planner.get_vm(&name).await?))
}

/// Answers 202 while the start or stop is under way.
fn accepted(vm: v1::Vm) -> Response {
    let under_way = matches!(vm.power.as_str(), "starting" | "stopping") || vm.queued.is_some();
    let status = if under_way { StatusCode::ACCEPTED } else { StatusCode::OK };
    (status, axum::Json(vm)).into_response()
}

async fn start_new(
    State(planner): Shared,
    Message(asked): Message<v1::StartVmRequest>,
) -> Result<Response, RestError> {
    Ok(accepted(planner.start_vm(asked).await?))
}

async fn start(
    State(planner): Shared,
    Segment(name): Segment,
    Message(mut asked): Message<v1::StartVmRequest>,
) -> Result<Response, RestError> {
    asked.vm = name;
    Ok(accepted(planner.start_vm(asked).await?))
}

async fn stop(
    State(planner): Shared,
    Segment(name): Segment,
    Message(mut asked): Message<v1::StopVmRequest>,
) -> Result<Response, RestError> {
    asked.vm = name;
    Ok(accepted(planner.stop_vm(asked).await?))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "two independent filters, as the message has them"
)]
struct MigrationQuery {
    vm: String,
    open: bool,
    stuck: bool,
    limit: u32,
}

async fn migrations(
    State(planner): Shared,
    query: Result<Query<MigrationQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer<v1::ListMigrationsReply> {
    let Query(MigrationQuery { vm, open, stuck, limit }) =
        query.map_err(|rejection| RestError::query(&rejection))?;
    let asked = v1::ListMigrationsRequest { vm, open, stuck, limit };
    Ok(axum::Json(planner.list_migrations(&asked).await?))
}

async fn migrate(
    State(planner): Shared,
    Message(asked): Message<v1::MigrateVmRequest>,
) -> Result<Response, RestError> {
    let migration = planner.migrate_vm(asked).await?;
    let location = format!("/api/migrations/{}", migration.id);
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], axum::Json(migration))
        .into_response())
}

async fn migration(State(planner): Shared, Segment(id): Segment) -> Answer<v1::Migration> {
    Ok(axum::Json(planner.get_migration(&id).await?))
}

async fn cancel(State(planner): Shared, Segment(id): Segment) -> Result<Response, RestError> {
    let migration = planner.cancel_migration(&id).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(migration)).into_response())
}

async fn limits(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::SetMigrationLimitsRequest>,
) -> Result<Response, RestError> {
    asked.id = id;
    let migration = planner.set_limits(&asked).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(migration)).into_response())
}

async fn metrics(
    State(planner): Shared,
    Extension(security): Extension<Security>,
) -> Result<Response, RestError> {
    let text = crate::metrics::render(&planner, &security).await?;
    const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, TEXT)], text).into_response())
}

/// Ready once the store answers.
async fn ready(State(planner): Shared) -> Result<&'static str, RestError> {
    planner.store().hosts().await.map_err(crate::api::ApiError::from)?;
    Ok("ready\n")
}
