//! Moves that are made step by step, as an operator says.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use vmferry_proto::v1;

use super::error::RestError;
use super::extract::{Message, Segment};
use super::{Answer, Shared};

fn accepted(migration: v1::Migration) -> Response {
    let location = format!("/api/migrations/{}", migration.id);
    (StatusCode::ACCEPTED, [(header::LOCATION, location)], axum::Json(migration)).into_response()
}

pub(super) async fn prepare(
    State(planner): Shared,
    Segment(name): Segment,
    Message(mut asked): Message<v1::MigrateVmRequest>,
) -> Result<Response, RestError> {
    asked.vm_name = name;
    Ok(accepted(planner.prepare_receiver(asked).await?))
}

pub(super) async fn start(
    State(planner): Shared,
    Segment(name): Segment,
) -> Result<Response, RestError> {
    let gate = "start".to_owned();
    let asked = v1::OpenGateRequest { vm: name, gate, ..v1::OpenGateRequest::default() };
    Ok(accepted(planner.open_gate(&asked).await?))
}

pub(super) async fn status(
    State(planner): Shared,
    Segment(name): Segment,
) -> Answer<v1::Migration> {
    Ok(axum::Json(planner.newest_migration(&name).await?))
}

pub(super) async fn cancel(
    State(planner): Shared,
    Segment(name): Segment,
) -> Result<Response, RestError> {
    let newest = planner.newest_migration(&name).await?;
    Ok(accepted(planner.cancel_migration(&newest.id).await?))
}

pub(super) async fn network_state(
    State(planner): Shared,
    Segment(vm): Segment,
) -> Answer<v1::NetworkState> {
    Ok(axum::Json(planner.network_state(&v1::NetworkStateRequest { vm }).await?))
}

/// The receiver takes the guest over: every gate that is left is opened.
pub(super) async fn activate(
    State(planner): Shared,
    Segment(id): Segment,
) -> Result<Response, RestError> {
    let gate = "all".to_owned();
    let asked = v1::OpenGateRequest { id, gate, ..v1::OpenGateRequest::default() };
    Ok(accepted(planner.open_gate(&asked).await?))
}

pub(super) async fn destroy(
    State(planner): Shared,
    Segment(id): Segment,
) -> Result<Response, RestError> {
    Ok(accepted(planner.cancel_migration(&id).await?))
}

pub(super) async fn go(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::OpenGateRequest>,
) -> Result<Response, RestError> {
    asked.id = id;
    Ok(accepted(planner.open_gate(&asked).await?))
}
