//! Making connections.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::codegen::http::Uri;
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::{Channel, Endpoint};

use crate::accept::tune;
use crate::certificate::CertificateError;
use crate::connection::{Guarded, Proof};
use crate::live::{Live, Security};
use crate::verify::Expected;

/// What is told to the other end as its name. It has one identity and needs none.
const NAME: &str = "vmferry.invalid";

/// A connection was not made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It says no host and port.
    #[error("`{0}` is not HOST:PORT")]
    Address(String),
    /// Nobody could be reached there.
    #[error("connect to {address}")]
    Reach {
        /// Where.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// Somebody was, and is not the one.
    #[error("prove that {address} is {expected}, and who we are: {source}")]
    Handshake {
        /// Where.
        address: String,
        /// Who should be there.
        expected: Expected,
        /// Why not.
        source: io::Error,
    },
    /// What is loaded cannot be used.
    #[error("use our own certificate")]
    Own(#[from] rustls::Error),
    /// The other end's certificate cannot be read.
    #[error("read the other end's certificate")]
    Certificate(#[from] CertificateError),
}

/// How an address is to be spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `http://`
    PlainText,
    /// `https://`
    Tls,
}

/// An address cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{address}` is no address: {problem}; write it as http://HOST:PORT, or https://HOST:PORT with TLS"
)]
pub struct AddressError {
    address: String,
    problem: String,
}

/// Reads an address like `https://planner:9096`.
///
/// # Errors
///
/// Fails where it has another form.
pub fn endpoint(address: &str) -> Result<(Endpoint, Scheme), AddressError> {
    let wrong = |problem: String| AddressError { address: address.to_owned(), problem };
    let (scheme, rest) = match address.split_once("://") {
        Some(("http", rest)) => (Scheme::PlainText, rest),
        Some(("https", rest)) => (Scheme::Tls, rest),
        Some((other, _)) => return Err(wrong(format!("`{other}` is not spoken"))),
        None => return Err(wrong("it does not begin with http:// or https://".to_owned())),
    };
    // The encryption is ours: tonic only has to know where to.
    let endpoint = Endpoint::from_shared(format!("http://{rest}"))
        .map_err(|error| wrong(error.to_string()))?;
    if endpoint.uri().host().is_none_or(str::is_empty) {
        return Err(wrong("it names no host".to_owned()));
    }
    Ok((endpoint, scheme))
}

/// Opens a channel with the first call, and anew when it broke.
///
/// Over TLS each connection is made with the certificates loaded by then, and only to `expected`.
#[must_use]
pub fn channel(endpoint: &Endpoint, security: &Security, expected: Expected) -> Channel {
    match security {
        Security::PlainText => endpoint.connect_lazy(),
        Security::Tls(live) => {
            endpoint.connect_with_connector_lazy(Connector::new(live.clone(), expected))
        }
    }
}

/// Makes connections to one expected peer.
#[derive(Clone, Debug)]
pub struct Connector {
    live: Arc<Live>,
    expected: Expected,
}

/// A connection that was made.
type Made = TokioIo<Guarded<tokio_rustls::client::TlsStream<TcpStream>>>;

impl Connector {
    /// Connects as `live`, to nobody but `expected`.
    #[must_use]
    pub const fn new(live: Arc<Live>, expected: Expected) -> Self {
        Self { live, expected }
    }

    /// Connects to HOST:PORT.
    ///
    /// # Errors
    ///
    /// Fails where nobody can be reached there, or another one.
    pub async fn connect(
        &self,
        address: &str,
    ) -> Result<Guarded<tokio_rustls::client::TlsStream<TcpStream>>, ConnectError> {
        let mut proof = Proof::begin(&self.live);
        let config = self.live.current().client_config(self.expected.clone())?;
        let stream = TcpStream::connect(address)
            .await
            .map_err(|source| ConnectError::Reach { address: address.to_owned(), source })?;
        tune(&stream);
        let name =
            ServerName::try_from(NAME).map_err(|error| ConnectError::Address(error.to_string()))?;
        let stream =
            TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|source| {
                ConnectError::Handshake {
                    address: address.to_owned(),
                    expected: self.expected.clone(),
                    source,
                }
            })?;
        // Who it is, the handshake has checked; here it is only until when that counts.
        proof.read(stream.get_ref().1.peer_certificates())?;
        Ok(Guarded::new(stream, proof))
    }
}

impl Service<Uri> for Connector {
    type Response = Made;
    type Error = ConnectError;
    type Future = BoxFuture<Made, ConnectError>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            let authority = match (uri.host(), uri.port_u16()) {
                (Some(host), Some(port)) => format!("{host}:{port}"),
                (Some(_) | None, _) => return Err(ConnectError::Address(uri.to_string())),
            };
            connector.connect(&authority).await.map(TokioIo::new)
        })
    }
}
