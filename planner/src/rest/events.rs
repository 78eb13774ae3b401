//! A migration as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures::stream::{Stream, StreamExt as _};

use super::error::RestError;
use super::extract::Segment;
use crate::planner::Planner;
use crate::telemetry::Chain;

/// Streams `migration` events until its last phase; an `error` event if it cannot be read any more.
pub(super) async fn migration(
    State(planner): State<Arc<Planner>>,
    Segment(id): Segment,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, RestError> {
    let changes = planner.watch_migration(&id).await?;
    let events = changes.map(|change| {
        let event = match change {
            Ok(migration) => Event::default()
                .event("migration")
                .id(migration.seq.to_string())
                .json_data(&migration)
                .unwrap_or_else(|error| Event::default().event("error").data(error.to_string())),
            Err(error) => Event::default().event("error").data(Chain(&error).to_string()),
        };
        Ok(event)
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}
