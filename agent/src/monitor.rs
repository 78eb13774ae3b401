//! One monitor connection: a [`Session`](vmferry_qmp::Session) over a socket.
//!
//! A [`Monitor`] is a cheap handle; one task owns the socket. Every call has
//! a deadline, and every call may be dropped at any point: a command that was
//! not sent yet is then never sent, and one that was keeps its place in
//! QEMU's queue until QEMU answers.
//!
//! What QEMU makes necessary here:
//!
//! - A monitor serves one client. A second one connects and is not greeted,
//!   and neither is anybody while QEMU's main loop is stuck, so the deadline
//!   of [`Monitor::connect`] covers the greeting ([`MonitorError::NotGreeted`]).
//! - With eight in-band commands queued QEMU stops reading, and out-of-band
//!   ones no longer get through. At most [`IN_BAND_MAX`] are in flight, and a
//!   place is free again when QEMU *replies*, not when the caller gives up.
//! - A silent monitor is a state, not the end: the call ends with
//!   [`MonitorError::Silent`], the connection stays, and a late reply is
//!   dropped. Silence never means that the process is gone.
//! - Events between two connections are lost. After each connect, and after
//!   [`Heard::Lagged`], the caller reads the state anew.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize as _;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use vmferry_qmp::{Band, Command, Event, Greeting, Refused, SessionError};

use self::driver::{Driver, Outgoing, Ready};
use self::ticket::Ticket;

mod driver;
mod ticket;

/// How many in-band commands one monitor may have unanswered.
///
/// QEMU 10.0 queues eight and then stops reading (tried: with seven queued
/// `exec-oob` answers, with eight it does not). Half of that leaves room for
/// whoever uses the monitor by hand.
pub const IN_BAND_MAX: usize = 4;

/// How long a connect waits for the greeting where nothing else is said.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long a command waits for its reply where nothing else is said.
///
/// QEMU answers in well under a millisecond while its main loop turns; disk
/// commands may wait for the storage.
pub const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

/// How many events a slow subscriber may fall behind before it lags.
const EVENTS_KEPT: usize = 256;

/// Whether a failed command may have reached QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Not a byte of it left: it is safe to try again.
    Unsent,
    /// It was sent, so it may have been, or may still be, executed.
    Sent,
}

/// Why a connection ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CloseCause {
    /// The other side closed it, or spoke something that is not QMP.
    #[error("the conversation ended")]
    Session(#[source] Arc<SessionError>),
    /// The socket failed.
    #[error("the monitor's socket failed")]
    Socket(#[source] Arc<io::Error>),
    /// Every handle was dropped.
    #[error("the monitor was let go")]
    LetGo,
}

/// A monitor could not be used, or QEMU refused.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The socket refused the connection.
    #[error("connect to the monitor at {path}", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Connected, but not greeted in time: another client is attached, or
    /// QEMU's main loop is stuck.
    #[error(
        "the monitor at {path} did not greet within {waited:?}: another client is attached, or QEMU is stuck",
        path = path.display()
    )]
    NotGreeted {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection ended; see [`Delivery`] for the command.
    #[error("the monitor's connection ended before `{command}` was answered")]
    Closed {
        /// The command, or `greeting`.
        command: String,
        /// Whether it may have been executed.
        delivery: Delivery,
        /// Why the connection ended.
        source: CloseCause,
    },
    /// No reply in time. The connection stays; see [`Delivery`].
    #[error("QEMU said nothing for {waited:?} after `{command}`")]
    Silent {
        /// The command.
        command: String,
        /// How long was waited.
        waited: Duration,
        /// Whether it may have been, or may still be, executed.
        delivery: Delivery,
    },
    /// QEMU refused the command.
    #[error("QEMU refused `{command}`")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's words.
        source: Refused,
    },
    /// QEMU executed the command, but its answer is not what we expect.
    #[error("QEMU's answer to `{command}` was not understood: {reply}")]
    Decode {
        /// The command.
        command: String,
        /// The answer's beginning.
        reply: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The command could not be written as JSON.
    #[error("write `{command}` as JSON")]
    Encode {
        /// The command.
        command: String,
        /// Why not.
        source: serde_json::Error,
    },
    /// Out-of-band execution is not possible for this command here.
    #[error("`{command}` cannot be executed out of band on this monitor")]
    OutOfBandNotOffered {
        /// The command.
        command: String,
    },
}

impl MonitorError {
    /// Tells whether the command may have reached QEMU.
    #[must_use]
    pub fn delivery(&self) -> Delivery {
        match self {
            Self::Connect { .. }
            | Self::NotGreeted { .. }
            | Self::Encode { .. }
            | Self::OutOfBandNotOffered { .. } => Delivery::Unsent,
            Self::Closed { delivery, .. } | Self::Silent { delivery, .. } => *delivery,
            Self::Refused { .. } | Self::Decode { .. } => Delivery::Sent,
        }
    }

    /// Returns QEMU's refusal, if that is what it is.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        match self {
            Self::Refused { source, .. } => Some(source),
            Self::Connect { .. }
            | Self::NotGreeted { .. }
            | Self::Closed { .. }
            | Self::Silent { .. }
            | Self::Decode { .. }
            | Self::Encode { .. }
            | Self::OutOfBandNotOffered { .. } => None,
        }
    }
}

/// What a subscriber hears.
#[derive(Clone, Debug)]
pub enum Heard {
    /// An event.
    Event(Arc<Event>),
    /// This many events were lost, since the subscriber was too slow. It
    /// must read the state anew.
    Lagged(u64),
}

/// A subscription to a monitor's events, from the moment it was made.
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Arc<Event>>);

impl Events {
    /// Returns what is heard next, or `None` once the connection has ended.
    ///
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Heard> {
        match self.0.recv().await {
            Ok(event) => Some(Heard::Event(event)),
            Err(broadcast::error::RecvError::Lagged(lost)) => Some(Heard::Lagged(lost)),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

/// A handle on one monitor connection.
///
/// Clones share the connection; it closes when the last one is dropped.
#[derive(Clone, Debug)]
pub struct Monitor {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    ready: Ready,
    requests: mpsc::Sender<Outgoing>,
    in_band: Arc<Semaphore>,
    /// Weak, so that subscribers hear the end when the driver is gone.
    events: broadcast::WeakSender<Arc<Event>>,
    closed: watch::Receiver<Option<CloseCause>>,
    _driver: AbortOnDropHandle<()>,
}

impl Monitor {
    /// Connects to the monitor at `path`, waits for its greeting and
    /// negotiates, all within `deadline`.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Connect`] if nobody listens,
    /// [`MonitorError::NotGreeted`] if somebody does but says nothing, and
    /// [`MonitorError::Closed`] if the conversation broke.
    pub async fn connect(path: &Path, deadline: Duration) -> Result<Self, MonitorError> {
        let negotiated = async {
            let stream = UnixStream::connect(path)
                .await
                .map_err(|source| MonitorError::Connect { path: path.to_owned(), source })?;
            Self::negotiate(stream, path).await
        };
        timeout(deadline, negotiated).await.unwrap_or_else(|_| {
            Err(MonitorError::NotGreeted { path: path.to_owned(), waited: deadline })
        })
    }

    async fn negotiate(stream: UnixStream, path: &Path) -> Result<Self, MonitorError> {
        let (requests, incoming) = mpsc::channel(IN_BAND_MAX);
        let (ready_tx, ready) = oneshot::channel();
        let (closed_tx, closed) = watch::channel(None);
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let weak_events = events.downgrade();
        let driver = Driver::new(stream, path.to_owned(), events, ready_tx);
        // The tracker is only a door to the runtime: the handle ends the task.
        let driver = TaskTracker::new().spawn(driver.run(incoming, closed_tx));
        let driver = AbortOnDropHandle::new(driver);
        let Ok(ready) = ready.await else {
            return Err(MonitorError::Closed {
                command: "greeting".to_owned(),
                delivery: Delivery::Unsent,
                source: cause(&closed).await,
            });
        };
        let shared = Shared {
            path: path.to_owned(),
            ready,
            requests,
            in_band: Arc::new(Semaphore::new(IN_BAND_MAX)),
            events: weak_events,
            closed,
            _driver: driver,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Returns what QEMU said of itself.
    #[must_use]
    pub fn greeting(&self) -> &Greeting {
        &self.shared.ready.greeting
    }

    /// Tells whether this connection can execute out of band.
    #[must_use]
    pub fn oob(&self) -> bool {
        self.shared.ready.oob
    }

    /// Subscribes to the events from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        // Without a driver there is nothing to hear: a closed subscription.
        let receiver = self
            .shared
            .events
            .upgrade()
            .map_or_else(|| broadcast::channel(1).1, |sender| sender.subscribe());
        Events(receiver)
    }

    /// Waits for the connection to end and returns why.
    pub async fn closed(&self) -> CloseCause {
        cause(&self.shared.closed).await
    }

    /// Returns why the connection ended, or `None` while it stands.
    #[must_use]
    pub fn close_cause(&self) -> Option<CloseCause> {
        self.shared.closed.borrow().clone()
    }

    /// Executes a command within [`COMMAND_DEADLINE`].
    ///
    /// # Errors
    ///
    /// See [`MonitorError`]; [`MonitorError::delivery`] tells whether it is
    /// safe to try again.
    pub async fn execute<C: Command>(&self, command: C) -> Result<C::Ok, MonitorError> {
        self.execute_within(command, COMMAND_DEADLINE).await
    }

    /// Executes a command within `deadline`.
    ///
    /// # Errors
    ///
    /// As [`Monitor::execute`].
    pub async fn execute_within<C: Command>(
        &self,
        command: C,
        deadline: Duration,
    ) -> Result<C::Ok, MonitorError> {
        let arguments = encode(&command)?;
        decode::<C>(&self.call(Call::new(Band::In, C::NAME, arguments), deadline).await?)
    }

    /// Executes a command out of band, even while the main loop is stuck.
    ///
    /// # Errors
    ///
    /// As [`Monitor::execute`], and [`MonitorError::OutOfBandNotOffered`].
    pub async fn execute_oob<C: Command>(
        &self,
        command: C,
        deadline: Duration,
    ) -> Result<C::Ok, MonitorError> {
        let arguments = encode(&command)?;
        decode::<C>(&self.execute_raw_oob(C::NAME, arguments, deadline).await?)
    }

    /// Executes a command by name, out of band.
    ///
    /// # Errors
    ///
    /// As [`Monitor::execute_oob`].
    pub async fn execute_raw_oob(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, MonitorError> {
        let allowed = vmferry_qmp::command::OUT_OF_BAND.contains(&command);
        if !allowed || !self.oob() {
            return Err(MonitorError::OutOfBandNotOffered { command: command.to_owned() });
        }
        self.call(Call::new(Band::OutOf, command, arguments), deadline).await
    }

    /// Executes a command by name and returns QEMU's answer as it is.
    ///
    /// # Errors
    ///
    /// As [`Monitor::execute`].
    pub async fn execute_raw(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, MonitorError> {
        self.call(Call::new(Band::In, command, arguments), deadline).await
    }

    /// Executes a command that brings file descriptors along, as `getfd` does.
    ///
    /// # Errors
    ///
    /// As [`Monitor::execute`].
    pub async fn execute_with_fds<C: Command>(
        &self,
        command: C,
        fds: Vec<OwnedFd>,
        deadline: Duration,
    ) -> Result<C::Ok, MonitorError> {
        let arguments = encode(&command)?;
        decode::<C>(
            &self.call(Call { fds, ..Call::new(Band::In, C::NAME, arguments) }, deadline).await?,
        )
    }

    async fn call(&self, call: Call<'_>, deadline: Duration) -> Result<Value, MonitorError> {
        let Call { band, command, arguments, fds } = call;
        // Dropped with this future: then, too, what is unsent stays unsent.
        let ticket = Ticket::new();
        let (reply_tx, reply) = oneshot::channel();
        let work = async {
            let permit = match band {
                Band::In => self.shared.in_band.clone().acquire_owned().await.ok(),
                Band::OutOf => None,
            };
            let outgoing = Outgoing {
                band,
                command: command.to_owned(),
                arguments,
                fds,
                stub: ticket.stub(),
                reply: reply_tx,
                permit,
            };
            // If the driver is gone, so is the other end of `reply`.
            drop(self.shared.requests.send(outgoing).await);
            reply.await
        };
        match timeout(deadline, work).await {
            Ok(Ok(answer)) => answer
                .map_err(|source| MonitorError::Refused { command: command.to_owned(), source }),
            Ok(Err(_)) => Err(MonitorError::Closed {
                command: command.to_owned(),
                delivery: ticket.give_up(),
                source: self.closed().await,
            }),
            Err(_) => Err(MonitorError::Silent {
                command: command.to_owned(),
                waited: deadline,
                delivery: ticket.give_up(),
            }),
        }
    }
}

/// One command, as it is to be sent.
#[derive(Debug)]
struct Call<'a> {
    band: Band,
    command: &'a str,
    arguments: Value,
    fds: Vec<OwnedFd>,
}

impl<'a> Call<'a> {
    fn new(band: Band, command: &'a str, arguments: Value) -> Self {
        Self { band, command, arguments, fds: Vec::new() }
    }
}

async fn cause(closed: &watch::Receiver<Option<CloseCause>>) -> CloseCause {
    let mut closed = closed.clone();
    let seen = closed.wait_for(Option::is_some).await;
    seen.ok().and_then(|cause| cause.clone()).unwrap_or(CloseCause::LetGo)
}

fn encode<C: Command>(command: &C) -> Result<Value, MonitorError> {
    serde_json::to_value(command)
        .map_err(|source| MonitorError::Encode { command: C::NAME.to_owned(), source })
}

fn decode<C: Command>(reply: &Value) -> Result<C::Ok, MonitorError> {
    C::Ok::deserialize(reply).map_err(|source| MonitorError::Decode {
        command: C::NAME.to_owned(),
        reply: reply.to_string().chars().take(200).collect(),
        source,
    })
}
