//! What operators ask of hosts: cordons, maintenance, drains and retirements; and what waits.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use vmferry_proto::v1;

use super::error::RestError;
use super::extract::{Message, Segment};
use super::{Answer, Shared};

/// Who asks is said in the query, for the body is the policy.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct By {
    by: String,
}

type Who = Result<Query<By>, QueryRejection>;

fn who(query: Who) -> Result<String, RestError> {
    let Query(By { by }) = query.map_err(|rejection| RestError::query(&rejection))?;
    Ok(by)
}

/// Answers 202 while it is under way.
fn accepted(emptying: v1::Emptying) -> Response {
    let under_way = matches!(emptying.state.as_str(), "RUNNING" | "EMPTYING");
    let status = if under_way { StatusCode::ACCEPTED } else { StatusCode::OK };
    (status, axum::Json(emptying)).into_response()
}

pub(super) async fn cordon(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::CordonHostRequest>,
) -> Answer<v1::Host> {
    asked.host = id;
    Ok(axum::Json(planner.cordon_host(asked).await?))
}

pub(super) async fn uncordon(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::UncordonHostRequest>,
) -> Answer<v1::Host> {
    asked.host = id;
    Ok(axum::Json(planner.uncordon_host(asked).await?))
}

pub(super) async fn plan(
    State(planner): Shared,
    Segment(host): Segment,
    query: Who,
    Message(policy): Message<v1::MaintenancePolicy>,
) -> Answer<v1::Emptying> {
    let asked = v1::MaintenanceRequest { host, policy: Some(policy), by: who(query)? };
    Ok(axum::Json(planner.plan_maintenance(asked).await?))
}

pub(super) async fn execute(
    State(planner): Shared,
    Segment(host): Segment,
    query: Who,
    Message(policy): Message<v1::MaintenancePolicy>,
) -> Result<Response, RestError> {
    let asked = v1::MaintenanceRequest { host, policy: Some(policy), by: who(query)? };
    Ok(accepted(planner.execute_maintenance(asked).await?))
}

pub(super) async fn drain(
    State(planner): Shared,
    Segment(host): Segment,
    query: Who,
    Message(policy): Message<v1::MaintenancePolicy>,
) -> Result<Response, RestError> {
    let asked = v1::DrainHostRequest { host, policy: Some(policy), by: who(query)? };
    Ok(accepted(planner.drain_host(asked).await?))
}

pub(super) async fn retire(
    State(planner): Shared,
    Segment(host): Segment,
    query: Who,
    Message(policy): Message<v1::MaintenancePolicy>,
) -> Result<Response, RestError> {
    let asked = v1::DrainHostRequest { host, policy: Some(policy), by: who(query)? };
    Ok(accepted(planner.retire_host(asked).await?))
}

pub(super) async fn delete(
    State(planner): Shared,
    Segment(host): Segment,
    query: Who,
) -> Answer<v1::DeleteHostReply> {
    let asked = v1::DeleteHostRequest { host, by: who(query)? };
    Ok(axum::Json(planner.delete_host(asked).await?))
}

pub(super) async fn jobs(
    State(planner): Shared,
    Segment(host): Segment,
) -> Answer<v1::ListEmptyingsReply> {
    let asked = v1::ListEmptyingsRequest { host, kind: "maintenance".to_owned(), open: false };
    Ok(axum::Json(planner.list_emptyings(&asked).await?))
}

pub(super) async fn one(State(planner): Shared, Segment(id): Segment) -> Answer<v1::Emptying> {
    Ok(axum::Json(planner.get_emptying(&id).await?))
}

pub(super) async fn cancel(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::CancelEmptyingRequest>,
) -> Result<Response, RestError> {
    asked.id = id;
    Ok(accepted(planner.cancel_emptying(asked).await?))
}

pub(super) async fn complete(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::CompleteMaintenanceRequest>,
) -> Result<Response, RestError> {
    asked.id = id;
    Ok(accepted(planner.complete_maintenance(asked).await?))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct EmptyingQuery {
    host: String,
    kind: String,
    open: bool,
}

pub(super) async fn all(
    State(planner): Shared,
    query: Result<Query<EmptyingQuery>, QueryRejection>,
) -> Answer<v1::ListEmptyingsReply> {
    let Query(EmptyingQuery { host, kind, open }) =
        query.map_err(|rejection| RestError::query(&rejection))?;
    let asked = v1::ListEmptyingsRequest { host, kind, open };
    Ok(axum::Json(planner.list_emptyings(&asked).await?))
}

pub(super) async fn queue(State(planner): Shared) -> Answer<v1::ListQueueReply> {
    Ok(axum::Json(planner.list_queue().await?))
}
