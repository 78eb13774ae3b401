//! The task that owns a monitor's socket.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, broadcast, mpsc, oneshot, watch};
use tracing::{debug, trace, warn};
use vmferry_qmp::{Band, Event, Greeting, Output, Refused, RequestId, Session};

use super::CloseCause;
use super::ticket::Stub;

/// How much is read at once, in bytes.
const READ_BYTES: usize = 16 << 10;

/// One command on its way.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) band: Band,
    pub(super) command: String,
    pub(super) arguments: Value,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) stub: Stub,
    pub(super) reply: oneshot::Sender<Result<Value, Refused>>,
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// What the negotiation brought.
#[derive(Clone, Debug)]
pub(super) struct Ready {
    pub(super) greeting: Greeting,
    pub(super) oob: bool,
}

/// A command that QEMU has in its queue.
#[derive(Debug)]
struct Unanswered {
    command: String,
    reply: oneshot::Sender<Result<Value, Refused>>,
    /// Held until QEMU replies: until then the command takes a place there.
    _permit: Option<OwnedSemaphorePermit>,
}

/// A line that is being written.
#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    written: usize,
    fds: Vec<OwnedFd>,
}

#[derive(Debug)]
pub(super) struct Driver {
    stream: UnixStream,
    path: PathBuf,
    session: Session,
    events: broadcast::Sender<Arc<Event>>,
    ready: Option<oneshot::Sender<Ready>>,
    unanswered: BTreeMap<RequestId, Unanswered>,
    line: Option<Line>,
}

impl Driver {
    pub(super) fn new(
        stream: UnixStream,
        path: PathBuf,
        events: broadcast::Sender<Arc<Event>>,
        ready: oneshot::Sender<Ready>,
    ) -> Self {
        Self {
            stream,
            path,
            session: Session::new(),
            events,
            ready: Some(ready),
            unanswered: BTreeMap::new(),
            line: None,
        }
    }

    pub(super) async fn run(
        mut self,
        mut requests: mpsc::Receiver<Outgoing>,
        closed: watch::Sender<Option<CloseCause>>,
    ) {
        let cause = self.serve(&mut requests).await;
        debug!(monitor = %self.path.display(), ?cause, "monitor connection ended");
        // Said before the waiting callers wake, since they ask for the cause.
        closed.send_replace(Some(cause));
    }

    async fn serve(&mut self, requests: &mut mpsc::Receiver<Outgoing>) -> CloseCause {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let writing = self.line.is_some();
            // Each branch may be dropped at its await without losing anything.
            let step = tokio::select! {
                ready = self.stream.readable() => match ready {
                    Ok(()) => self.read(&mut buffer),
                    Err(error) => Err(socket(error)),
                },
                ready = self.stream.writable(), if writing => match ready {
                    Ok(()) => self.write(),
                    Err(error) => Err(socket(error)),
                },
                // A line at a time: what waits here can still be given up.
                request = requests.recv(), if !writing => match request {
                    Some(outgoing) => self.handle_request(outgoing),
                    None => Err(CloseCause::LetGo),
                },
            };
            if let Err(cause) = step {
                return cause;
            }
            self.next_line();
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), CloseCause> {
        let read = match self.stream.try_read(buffer) {
            Ok(read) => read,
            Err(error) if retry(&error) => return Ok(()),
            Err(error) => return Err(socket(error)),
        };
        let taken = match buffer.get(..read) {
            Some([]) | None => Err(self.session.handle_eof()),
            Some(bytes) => self.session.handle_bytes(bytes),
        };
        // What was said before the end still counts.
        while let Some(output) = self.session.poll_output() {
            self.handle_output(output);
        }
        taken.map_err(|error| CloseCause::Session(Arc::new(error)))
    }

    fn handle_output(&mut self, output: Output) {
        match output {
            Output::Ready(greeting) => {
                let ready = Ready { greeting, oob: self.session.oob() };
                if let Some(waiting) = self.ready.take() {
                    // Nobody waits any more if the connect ran out of time.
                    drop(waiting.send(ready));
                }
            }
            Output::Event(event) => {
                trace!(monitor = %self.path.display(), event = event.name, "event");
                // Without subscribers there is nobody to tell.
                drop(self.events.send(Arc::new(event)));
            }
            Output::Reply { id, result } => self.handle_reply(id, result),
            Output::Stray(stray) => {
                warn!(monitor = %self.path.display(), ?stray, "message that fits nowhere");
            }
        }
    }

    fn handle_reply(&mut self, id: RequestId, result: Result<Value, Refused>) {
        let Some(unanswered) = self.unanswered.remove(&id) else {
            warn!(monitor = %self.path.display(), id = id.number(), "reply to an unknown id");
            return;
        };
        if unanswered.reply.send(result).is_err() {
            let command = unanswered.command.as_str();
            debug!(monitor = %self.path.display(), command, "reply after its caller gave up");
        }
    }

    fn handle_request(&mut self, outgoing: Outgoing) -> Result<(), CloseCause> {
        let Outgoing { band, command, arguments, fds, stub, reply, permit } = outgoing;
        if !stub.take() {
            return Ok(());
        }
        let id = self
            .session
            .request(band, &command, &arguments)
            .map_err(|error| CloseCause::Session(Arc::new(error)))?;
        self.unanswered.insert(id, Unanswered { command, reply, _permit: permit });
        self.next_line();
        if let Some(line) = self.line.as_mut() {
            line.fds = fds;
        }
        Ok(())
    }

    fn next_line(&mut self) {
        if self.line.is_none()
            && let Some(transmit) = self.session.poll_transmit()
        {
            self.line = Some(Line { bytes: transmit.line, written: 0, fds: Vec::new() });
        }
    }

    fn write(&mut self) -> Result<(), CloseCause> {
        let Some(line) = self.line.as_mut() else {
            return Ok(());
        };
        let stream = &self.stream;
        match stream.try_io(Interest::WRITABLE, || send(stream, line)) {
            Ok(written) => {
                line.written += written;
                // They belong to the first byte, and went with it.
                line.fds.clear();
                if line.written >= line.bytes.len() {
                    self.line = None;
                }
                Ok(())
            }
            Err(error) if retry(&error) => Ok(()),
            Err(error) => Err(socket(error)),
        }
    }
}

fn send(stream: &UnixStream, line: &Line) -> io::Result<usize> {
    let rest = line.bytes.get(line.written..).unwrap_or_default();
    let fds: Vec<_> = line.fds.iter().map(OwnedFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL;
    let sent = sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(rest)], control, flags, None)?;
    Ok(sent)
}

fn retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn socket(error: io::Error) -> CloseCause {
    CloseCause::Socket(Arc::new(error))
}
