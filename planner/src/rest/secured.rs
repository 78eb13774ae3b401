//! Who calls over HTTP, and whether they may.

use std::io;

use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{FromRequestParts as _, Request};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::serve::{IncomingStream, Listener};
use vmferry_tls::{Acceptor, Caller as Who, Connection, Peer, Role};

use super::error::RestError;

/// What monitoring reads, and whoever restarts what is ill: it says nothing of any VM by name.
const OPEN: [&str; 3] = ["/metrics", "/healthz", "/readyz"];

/// A listener that knows who connects.
#[derive(Debug)]
pub struct Secured(pub Acceptor);

impl Listener for Secured {
    type Io = Connection;
    type Addr = Peer;

    async fn accept(&mut self) -> (Connection, Peer) {
        let connection = self.0.accept().await;
        let peer = connection.peer().clone();
        (connection, peer)
    }

    fn local_addr(&self) -> io::Result<Peer> {
        Ok(Peer { address: self.0.local_addr()?, caller: Who::PlainText })
    }
}

/// Whoever calls.
#[derive(Clone, Debug)]
pub struct Caller(pub Peer);

impl Connected<IncomingStream<'_, Secured>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Secured>) -> Self {
        Self(stream.remote_addr().clone())
    }
}

/// Lets operators do everything, and everybody look whether the planner is well.
pub(super) async fn authorize(request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let caller = ConnectInfo::<Caller>::from_request_parts(&mut parts, &()).await;
    let verdict = match caller {
        Ok(ConnectInfo(Caller(peer))) => may(&peer.caller, parts.uri.path()),
        Err(_unknown) => may(&Who::Anonymous, parts.uri.path()),
    };
    match verdict {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(refusal) => refusal.into_response(),
    }
}

fn may(caller: &Who, path: &str) -> Result<(), RestError> {
    match caller {
        Who::PlainText => Ok(()),
        _ if OPEN.contains(&path) => Ok(()),
        Who::Known(identity) if identity.role() == Role::Operator => Ok(()),
        Who::Known(identity) => Err(RestError::not_allowed(
            StatusCode::FORBIDDEN,
            format!("{identity} may not do this: it is for operators"),
        )),
        Who::Anonymous => Err(RestError::not_allowed(
            StatusCode::UNAUTHORIZED,
            "show an operator's certificate; `vmferry pki issue operator NAME` makes one"
                .to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_do_everything_and_others_only_look_whether_it_is_well() {
        let known = |text: &str| Who::Known(text.parse().unwrap());
        for path in ["/api/hosts", "/api/vms", "/", "/metrics/../api/hosts"] {
            assert!(may(&known("vmferry://operator/ann"), path).is_ok());
            assert!(may(&known("vmferry://host/a"), path).is_err());
            assert!(may(&known("vmferry://planner/p"), path).is_err());
            assert!(may(&Who::Anonymous, path).is_err(), "{path}");
            assert!(may(&Who::PlainText, path).is_ok());
        }
        assert!(may(&Who::Anonymous, "/healthz").is_ok());
    }
}
