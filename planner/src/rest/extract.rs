//! What is read of a request, refused in the words of [`RestError`] where it cannot be.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::error::RestError;

/// The one parameter of a path.
pub(super) struct Segment(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = RestError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RestError> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(segment)) => Ok(Self(segment)),
            Err(rejection) => Err(RestError::path(&rejection)),
        }
    }
}

/// A body: JSON of the message, or nothing for one without mandatory fields.
pub(super) struct Message<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for Message<T> {
    type Rejection = RestError;

    async fn from_request(request: Request, state: &S) -> Result<Self, RestError> {
        let read = Bytes::from_request(request, state).await;
        let body = read.map_err(|rejection| RestError::unread(&rejection))?;
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self(T::default()));
        }
        serde_json::from_slice(&body).map(Self).map_err(|error| RestError::body(&error))
    }
}
