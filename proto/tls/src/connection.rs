//! A connection, and who is at its other end.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::Connected;

use crate::certificate::{Certificate, CertificateError};
use crate::identity::Identity;
use crate::live::Live;

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Nobody can say: plain text is spoken here, where the configuration allows it.
    PlainText,
    /// Somebody without a certificate, over TLS.
    Anonymous,
    /// Whoever the certificate names.
    Known(Identity),
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PlainText => f.write_str("somebody over plain text"),
            Self::Anonymous => f.write_str("somebody without a certificate"),
            Self::Known(identity) => write!(f, "{identity}"),
        }
    }
}

/// The other end of a connection that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where it connected from.
    pub address: SocketAddr,
    /// Who it is.
    pub caller: Caller,
}

/// A connection that was taken.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Peer,
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<Guarded<tokio_rustls::server::TlsStream<TcpStream>>>),
}

impl Connection {
    pub(crate) const fn plain(stream: TcpStream, address: SocketAddr) -> Self {
        let peer = Peer { address, caller: Caller::PlainText };
        Self { stream: Stream::Plain(stream), peer }
    }

    pub(crate) fn tls(
        stream: Guarded<tokio_rustls::server::TlsStream<TcpStream>>,
        address: SocketAddr,
        caller: Caller,
    ) -> Self {
        Self { stream: Stream::Tls(Box::new(stream)), peer: Peer { address, caller } }
    }

    /// Returns who is at the other end.
    #[must_use]
    pub const fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

/// What the other end proved, and for how long that counts.
#[derive(Debug)]
pub(crate) struct Proof {
    live: Arc<Live>,
    trust: u64,
    not_after: u64,
}

impl Proof {
    /// Begins a proof before the handshake, by what is trusted then.
    pub(crate) fn begin(live: &Arc<Live>) -> Self {
        Self { trust: live.trust(), live: live.clone(), not_after: u64::MAX }
    }

    /// Reads who the other end has proven to be; `None` if it showed no certificate.
    pub(crate) fn read(
        &mut self,
        shown: Option<&[CertificateDer<'_>]>,
    ) -> Result<Option<Identity>, CertificateError> {
        let Some(own) = shown.and_then(<[_]>::first) else { return Ok(None) };
        let says = Certificate::read(own)?;
        self.not_after = says.not_after;
        match says.identity {
            Some(identity) => Ok(Some(identity)),
            None => Err(CertificateError::Unreadable(format!(
                "`{}` names no identity (a URI like vmferry://host/a)",
                says.subject
            ))),
        }
    }

    /// Says why it counts no more.
    fn over(&self) -> Option<&'static str> {
        if self.live.trust() != self.trust {
            return Some("other authorities are trusted since this connection was made");
        }
        (crate::now() > self.not_after).then_some("the other end's certificate has ended")
    }
}

/// A stream that ends when what the other end proved counts no more.
///
/// Noticed at the next byte, which with HTTP/2's keep-alive is seconds away.
#[derive(Debug)]
pub struct Guarded<S> {
    stream: S,
    proof: Proof,
}

impl<S> Guarded<S> {
    pub(crate) const fn new(stream: S, proof: Proof) -> Self {
        Self { stream, proof }
    }

    fn check(&self) -> io::Result<()> {
        match self.proof.over() {
            None => Ok(()),
            Some(why) => Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(_) => false,
        }
    }
}
