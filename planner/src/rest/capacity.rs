//! What the fleet has left, over HTTP.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;
use vmferry_proto::v1;

use super::error::RestError;
use super::{Answer, Shared};

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Asked {
    without: String,
    fit_memory_bytes: u64,
    fit_cpu_milli: u64,
}

pub(super) async fn capacity(
    State(planner): Shared,
    query: Result<Query<Asked>, QueryRejection>,
) -> Answer<v1::CapacityReply> {
    let Query(asked) = query.map_err(|rejection| RestError::query(&rejection))?;
    let Asked { without, fit_memory_bytes, fit_cpu_milli } = asked;
    let asked = v1::CapacityRequest { without, fit_memory_bytes, fit_cpu_milli };
    Ok(axum::Json(planner.capacity(&asked).await?))
}
