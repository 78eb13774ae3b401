//! What an operator says and asks: which host is dead, which side is right, what is going on.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;
use vmferry_proto::v1;

use super::error::RestError;
use super::extract::{Message, Segment};
use super::{Answer, Shared};

pub(super) async fn declare_dead(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::DeclareHostDeadRequest>,
) -> Answer<v1::Host> {
    asked.host = id;
    Ok(axum::Json(planner.declare_host_dead(asked).await?))
}

pub(super) async fn fence(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::FenceHostRequest>,
) -> Answer<v1::Host> {
    asked.host = id;
    Ok(axum::Json(planner.fence_host(asked).await?))
}

/// What a deletion may say beside the VM.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct DeleteQuery {
    confirmation: String,
}

pub(super) async fn delete_vm(
    State(planner): Shared,
    Segment(name): Segment,
    query: Result<Query<DeleteQuery>, QueryRejection>,
) -> Answer<v1::DeleteVmReply> {
    let Query(DeleteQuery { confirmation }) =
        query.map_err(|rejection| RestError::query(&rejection))?;
    let asked = v1::DeleteVmRequest { vm: name, confirmation };
    Ok(axum::Json(planner.delete_vm(asked).await?))
}

pub(super) async fn resolve(
    State(planner): Shared,
    Segment(id): Segment,
    Message(mut asked): Message<v1::ResolveMigrationRequest>,
) -> Answer<v1::Migration> {
    asked.id = id;
    Ok(axum::Json(planner.resolve_migration(asked).await?))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DoctorQuery {
    vm: String,
}

pub(super) async fn doctor(
    State(planner): Shared,
    query: Result<Query<DoctorQuery>, QueryRejection>,
) -> Answer<v1::DoctorReply> {
    let Query(DoctorQuery { vm }) = query.map_err(|rejection| RestError::query(&rejection))?;
    Ok(axum::Json(planner.doctor(&v1::DoctorRequest { vm }).await?))
}
