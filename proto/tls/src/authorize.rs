//! Who may call what.

use std::convert::Infallible;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

use crate::connection::Peer;

/// Decides of one call, by its method's name (`Execute`).
type Rule = fn(&Peer, &str) -> Result<(), Status>;

/// A service that asks a rule before each call. What no rule allows does not reach the service.
#[derive(Clone, Debug)]
pub struct Authorized<S> {
    service: S,
    rule: Rule,
}

impl<S> Authorized<S> {
    /// Guards `service`.
    #[must_use]
    pub const fn new(service: S, rule: Rule) -> Self {
        Self { service, rule }
    }
}

impl<S: NamedService> NamedService for Authorized<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Authorized<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let verdict = match request.extensions().get::<Peer>() {
            Some(peer) => (self.rule)(peer, method),
            None => Err(Status::internal("nobody knows who calls")),
        };
        match verdict {
            Ok(()) => Box::pin(self.service.call(request)),
            Err(refusal) => Box::pin(async move { Ok(refusal.into_http()) }),
        }
    }
}
