//! Taking connections.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::certificate::CertificateError;
use crate::connection::{Caller, Connection, Guarded, Proof};
use crate::live::{Live, Security};

/// How many handshakes may be under way; more connections wait in the kernel.
const HANDSHAKES_MAX: usize = 512;
/// How long one may take: a handshake is two small messages.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// How soon a connection that could not be accepted is tried again.
const RETRY: Duration = Duration::from_millis(100);
/// Refused connections are told of this often, and counted between.
const COMPLAIN_EVERY: Duration = Duration::from_secs(1);

/// What is spoken on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC: whoever connects under TLS shows a certificate.
    Grpc,
    /// HTTP/1.1: who shows no certificate is [`Caller::Anonymous`].
    Http,
}

/// A connection was not taken.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("TLS handshake: {0}")]
    Handshake(#[source] io::Error),
    #[error("TLS handshake took longer than {HANDSHAKE_MAX:?}")]
    Slow,
    #[error("its certificate: {0}")]
    Certificate(#[from] CertificateError),
    #[error("nothing is served under this identity")]
    NoServer,
}

/// Takes connections whose other end has proven who it is.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    security: Security,
    protocol: Protocol,
    handshakes: JoinSet<(SocketAddr, Result<Connection, Refused>)>,
    complaints: Complaints,
}

impl Acceptor {
    /// Takes connections from `listener`.
    #[must_use]
    pub fn new(listener: TcpListener, security: Security, protocol: Protocol) -> Self {
        Self {
            listener,
            security,
            protocol,
            handshakes: JoinSet::new(),
            complaints: Complaints::default(),
        }
    }

    /// Returns how its connections are protected.
    #[must_use]
    pub const fn security(&self) -> &Security {
        &self.security
    }

    /// Returns where it listens.
    ///
    /// # Errors
    ///
    /// Fails where the kernel does not say.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns the next connection. One whose handshake takes its time holds up no other.
    pub async fn accept(&mut self) -> Connection {
        loop {
            tokio::select! {
                accepted = self.listener.accept(), if self.handshakes.len() < HANDSHAKES_MAX => {
                    match (accepted, &self.security) {
                        (Ok((stream, address)), Security::PlainText) => {
                            tune(&stream);
                            return Connection::plain(stream, address);
                        }
                        (Ok((stream, address)), Security::Tls(live)) => {
                            tune(&stream);
                            let (live, protocol) = (live.clone(), self.protocol);
                            self.handshakes.spawn(async move {
                                (address, shake_hands(stream, address, &live, protocol).await)
                            });
                        }
                        (Err(error), _) => {
                            tracing::debug!(%error, "a connection was not accepted");
                            sleep(RETRY).await;
                        }
                    }
                }
                Some(ended) = self.handshakes.join_next() => match ended {
                    Ok((_, Ok(connection))) => return connection,
                    Ok((address, Err(refused))) => self.complaints.complain(address, &refused),
                    Err(error) => tracing::debug!(%error, "a handshake did not end"),
                }
            }
        }
    }

    /// Turns it into the stream that tonic serves.
    pub fn into_stream(self) -> impl tokio_stream::Stream<Item = io::Result<Connection>> + Send {
        Accepted(Box::pin(next(self)))
    }
}

type Next = std::pin::Pin<Box<dyn Future<Output = (Connection, Acceptor)> + Send>>;

async fn next(mut acceptor: Acceptor) -> (Connection, Acceptor) {
    (acceptor.accept().await, acceptor)
}

/// The stream of an acceptor's connections.
struct Accepted(Next);

impl tokio_stream::Stream for Accepted {
    type Item = io::Result<Connection>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let (connection, acceptor) = std::task::ready!(self.0.as_mut().poll(cx));
        self.0 = Box::pin(next(acceptor));
        std::task::Poll::Ready(Some(Ok(connection)))
    }
}

async fn shake_hands(
    stream: TcpStream,
    address: SocketAddr,
    live: &Arc<Live>,
    protocol: Protocol,
) -> Result<Connection, Refused> {
    let mut proof = Proof::begin(live);
    let loaded = live.current();
    let config = match protocol {
        Protocol::Grpc => loaded.grpc_config(),
        Protocol::Http => loaded.http_config(),
    };
    let acceptor = TlsAcceptor::from(config.ok_or(Refused::NoServer)?);
    let stream = timeout(HANDSHAKE_MAX, acceptor.accept(stream))
        .await
        .map_err(|_elapsed| Refused::Slow)?
        .map_err(Refused::Handshake)?;
    let caller = match proof.read(stream.get_ref().1.peer_certificates())? {
        Some(identity) => Caller::Known(identity),
        None => Caller::Anonymous,
    };
    Ok(Connection::tls(Guarded::new(stream, proof), address, caller))
}

/// A reply is small and must not wait for the one before it to be acknowledged (40 ms); a peer that
/// lost its power is gone after two minutes, not never.
pub(crate) fn tune(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps its delay");
    }
    let alive = tokio_keep_alive(stream);
    if let Err(error) = alive {
        tracing::debug!(%error, "a connection is not kept alive");
    }
}

fn tokio_keep_alive(stream: &TcpStream) -> nix::Result<()> {
    use nix::sys::socket::{setsockopt, sockopt};
    setsockopt(stream, sockopt::TcpKeepIdle, &60)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &15)?;
    setsockopt(stream, sockopt::TcpKeepCount, &4)?;
    setsockopt(stream, sockopt::KeepAlive, &true)
}

/// Tells of refused connections without letting strangers fill the log.
#[derive(Debug, Default)]
struct Complaints {
    told: Mutex<(Option<Instant>, u64)>,
}

impl Complaints {
    fn complain(&self, address: SocketAddr, refused: &Refused) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.0.is_some_and(|at| at.elapsed() < COMPLAIN_EVERY) {
            told.1 += 1;
            return;
        }
        let untold = told.1;
        *told = (Some(Instant::now()), 0);
        drop(told);
        tracing::warn!(peer = %address, untold, error = %refused, "connection refused");
    }
}
