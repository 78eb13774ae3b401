//! A listener whose connections are few and do not last: nobody may take up the agent's memory by
//! connecting to its metrics and saying nothing.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// How many may be connected; more wait.
const CONNECTIONS_MAX: usize = 32;
/// How long whoever connects may take to ask.
const ASKING: Duration = Duration::from_secs(5);
/// How long one that was answered may stay, or take to read the answer.
const ANSWERED: Duration = Duration::from_secs(60);
/// How soon a connection that could not be accepted is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// Such a listener.
#[derive(Debug)]
pub(super) struct Bounded {
    listener: TcpListener,
    room: Arc<Semaphore>,
}

impl Bounded {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, room: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let Ok(permit) = self.room.clone().acquire_owned().await else {
                // Nobody closes the semaphore.
                sleep(RETRY).await;
                continue;
            };
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    keep_alive(&stream);
                    let ends = Box::pin(sleep(ASKING));
                    return (Connection { stream, ends, _permit: permit }, peer);
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection was not accepted");
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Lets the kernel ask a silent peer whether it is still there.
fn keep_alive(stream: &TcpStream) {
    let set = setsockopt(stream, sockopt::TcpKeepIdle, &60)
        .and_then(|()| setsockopt(stream, sockopt::TcpKeepInterval, &15))
        .and_then(|()| setsockopt(stream, sockopt::TcpKeepCount, &4))
        .and_then(|()| setsockopt(stream, sockopt::KeepAlive, &true));
    if let Err(error) = set {
        tracing::debug!(%error, "a connection is not kept alive");
    }
}

/// A connection that ends unless it asks and reads.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    ends: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        // The poll sees to it that whoever waits is woken at the end.
        let over = self.ends.as_mut().poll(cx).is_ready();
        if over || Instant::now() >= self.ends.deadline() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.in_time(cx)?;
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.ends.as_mut().reset(Instant::now() + ANSWERED);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    async fn pair(listener: &mut Bounded) -> (TcpStream, Connection) {
        let address = listener.local_addr().unwrap();
        let (client, (connection, _)) =
            tokio::join!(TcpStream::connect(address), listener.accept());
        (client.unwrap(), connection)
    }

    async fn listener() -> Bounded {
        Bounded::new(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    #[tokio::test]
    async fn whoever_asks_slowly_is_let_go() {
        let mut listener = listener().await;
        let (mut client, mut connection) = pair(&mut listener).await;
        client.write_all(b"GET /met").await.unwrap();
        let mut asked = [0; 8];
        connection.read_exact(&mut asked).await.unwrap();
        connection.ends.as_mut().reset(Instant::now());
        client.write_all(b"r").await.unwrap();
        let error = connection.read(&mut asked).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn whoever_was_answered_may_stay_for_a_while() {
        let mut listener = listener().await;
        let (_client, mut connection) = pair(&mut listener).await;
        connection.write_all(b"ok").await.unwrap();
        assert!(connection.ends.deadline() > Instant::now() + ASKING);
    }

    #[tokio::test]
    async fn more_than_a_few_wait_until_one_goes() {
        let mut listener = listener().await;
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            connections.push(pair(&mut listener).await);
        }
        assert_eq!(listener.room.available_permits(), 0);
        let address = listener.local_addr().unwrap();
        let _late = TcpStream::connect(address).await.unwrap();
        let accepted = futures::poll!(std::pin::pin!(listener.accept()));
        assert!(accepted.is_pending());
        connections.pop();
        listener.accept().await;
    }
}
