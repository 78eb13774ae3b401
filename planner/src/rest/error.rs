//! Failures in HTTP's words: `{code, message, details}`.

use axum::Json;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use vmferry_proto::v1::ErrorDetail;

use crate::api::{ApiError, Kind};
use crate::grpc::detail;
use crate::telemetry::Chain;

/// A failure on its way out.
#[derive(Debug)]
pub(super) struct RestError {
    status: StatusCode,
    body: Box<Body>,
}

#[derive(Debug, Serialize)]
struct Body {
    code: String,
    message: String,
    details: ErrorDetail,
}

impl RestError {
    fn new(status: StatusCode, code: &str, message: String, field: String) -> Self {
        let details = ErrorDetail { code: code.to_owned(), field, ..ErrorDetail::default() };
        Self { status, body: Box::new(Body { code: code.to_owned(), message, details }) }
    }

    /// Says that a body is not the JSON of its message; names the field where there is one.
    pub(super) fn body(error: &serde_json::Error) -> Self {
        let message = error.to_string();
        let field = quoted(&message).unwrap_or_default();
        Self::new(StatusCode::BAD_REQUEST, "invalid", format!("body: {message}"), field)
    }

    /// Says that a query string holds what is not asked for.
    pub(super) fn query(rejection: &QueryRejection) -> Self {
        let message = rejection.body_text();
        let field = quoted(&message).unwrap_or_default();
        Self::new(StatusCode::BAD_REQUEST, "invalid", message, field)
    }

    /// Says that a body could not be read to its end: it is too large, or whoever sent it broke off.
    pub(super) fn unread(rejection: &BytesRejection) -> Self {
        let status = rejection.status();
        let code = if status == StatusCode::PAYLOAD_TOO_LARGE { "too_large" } else { "invalid" };
        let message = format!("body: {}", rejection.body_text());
        Self::new(status, code, message, String::new())
    }

    /// Says that a path holds what is no name.
    pub(super) fn path(rejection: &PathRejection) -> Self {
        let message = format!("path: {}", rejection.body_text());
        Self::new(rejection.status(), "invalid", message, String::new())
    }

    /// Says that whoever calls may not.
    pub(super) fn not_allowed(status: StatusCode, message: String) -> Self {
        Self::new(status, "not_allowed", message, String::new())
    }

    pub(super) fn no_route() -> Self {
        let message = "there is no such path".to_owned();
        Self::new(StatusCode::NOT_FOUND, "not_found", message, String::new())
    }

    pub(super) fn no_method() -> Self {
        let message = "the path does not take this method".to_owned();
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message, String::new())
    }
}

/// Returns the first name in backticks: serde names the field so.
fn quoted(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('`')?;
    let (name, _) = rest.split_once('`')?;
    Some(name.to_owned())
}

impl From<ApiError> for RestError {
    fn from(error: ApiError) -> Self {
        let status = match error.kind() {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Conflict => StatusCode::CONFLICT,
            Kind::Capacity => StatusCode::INSUFFICIENT_STORAGE,
            Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Internal => {
                tracing::error!(error = %Chain(&error), "request failed");
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        let body = Body {
            code: error.code().to_owned(),
            message: Chain(&error).to_string(),
            details: detail(&error),
        };
        Self { status, body: Box::new(body) }
    }
}

impl IntoResponse for RestError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}
