//! Puts a shim together and serves its socket.

use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::process::{Child, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Mutex;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use super::log::note;
use super::protocol::{Answer, Envelope, Failure, LINE_BYTES_MAX, Outcome, Request, Response};
use super::state::State;
use super::{GRACE, child, exit, log, oob};
use crate::process::pidfd::PidFd;
use crate::process::{Exit, LaunchRecord, ProcessDir, ProcessIdentity, RecordError};

/// A shim could not begin. Nothing was started then.
#[derive(Debug, thiserror::Error)]
enum BeginError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("another shim serves this directory")]
    Locked,
    #[error("this directory was used before")]
    UsedBefore,
    #[error("there is nothing to launch here")]
    NoLaunch,
    #[error("serve the shim's socket")]
    Listen(#[source] io::Error),
    #[error("make a runtime")]
    Runtime(#[source] io::Error),
}

/// Runs a shim to its end.
pub(super) fn run(dir: &ProcessDir) -> ExitCode {
    if let Err(error) = nix::unistd::setsid() {
        // Refused only where this leads a session already: just as well.
        note(dir, &format!("no session of its own: {error}"));
    }
    match begin(dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(dir, &format!("nothing was started: {error:?}"));
            ExitCode::FAILURE
        }
    }
}

fn begin(dir: &ProcessDir) -> Result<(), BeginError> {
    // Held to the end: whoever gets it knows that no shim is here.
    let _lock = dir.try_lock()?.ok_or(BeginError::Locked)?;
    if dir.read_exit()?.is_some() || dir.read_process()?.is_some() {
        return Err(BeginError::UsedBefore);
    }
    let launch = dir.read_launch()?.ok_or(BeginError::NoLaunch)?;
    let listener = listen(&dir.shim_socket()).map_err(BeginError::Listen)?;
    // From here on something may have been started: no more early return
    // without a record.
    let started = start(dir, &launch);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(serve(dir, listener, started)),
        Err(error) => {
            // QEMU goes on without us, as if we had been killed.
            note(dir, &format!("no runtime, QEMU is left alone: {error}"));
            return Err(BeginError::Runtime(error));
        }
    }
    Ok(())
}

/// Opens a socket that never blocks in accept.
pub(super) fn listen(path: &Path) -> io::Result<StdListener> {
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = StdListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// What came of the start.
#[derive(Debug)]
enum Started {
    Running { child: Child, identity: Option<ProcessIdentity>, process: Option<PidFd> },
    Failed { error: io::Error },
}

fn start(dir: &ProcessDir, launch: &LaunchRecord) -> Started {
    match child::spawn(dir, launch) {
        Ok(child) => {
            let unreadable = |error: &dyn std::fmt::Display| note(dir, &format!("{error}"));
            let identity = dir.read_process().inspect_err(|error| unreadable(error));
            // Ours until we wait for it, so the pid cannot be another's.
            let process = PidFd::open(child.id()).inspect_err(|error| unreadable(error));
            let identity = identity.ok().flatten();
            Started::Running { child, identity, process: process.ok() }
        }
        Err(error) => Started::Failed { error },
    }
}

async fn serve(dir: &ProcessDir, listener: StdListener, started: Started) {
    let tasks = TaskTracker::new();
    let state = match started {
        Started::Running { child, identity, process } => {
            let state = Arc::new(State::new(dir.clone(), identity, process));
            let watched = Arc::clone(&state);
            tasks.spawn(async move { exit::watch(&watched, child).await });
            let kept = Arc::clone(&state);
            tasks.spawn(async move {
                tokio::select! {
                    () = oob::keep(&kept) => {}
                    _ = kept.exited() => {}
                }
            });
            let bounded = dir.clone();
            tasks.spawn(async move {
                if let Err(error) = log::bound(&bounded).await {
                    note(&bounded, &format!("QEMU's log is not bounded any more: {error}"));
                }
            });
            state
        }
        Started::Failed { error } => {
            let state = Arc::new(State::new(dir.clone(), None, None));
            let failed = Exit::ExecFailed { error: error.to_string() };
            let recorded = Arc::clone(&state);
            tasks.spawn(async move { exit::record(&recorded, failed).await });
            state
        }
    };
    let asked = Arc::clone(&state);
    tasks.spawn(async move { withstand_signals(&asked).await });
    let accepting = Arc::clone(&state);
    tasks.spawn(async move {
        if let Err(error) = accept(&accepting, listener).await {
            note(&accepting.dir, &format!("the socket is not served any more: {error}"));
        }
    });
    state.exited().await;
    tokio::select! {
        () = state.bye.notified() => {}
        () = state.asked_to_end.notified() => {}
        () = sleep(GRACE) => {}
    }
}

/// Notes the signals that would end us, and does not follow them while QEMU
/// lives. Afterwards nothing holds up the host's shutdown.
///
/// They are caught rather than ignored: an ignored signal stays ignored over
/// exec, and QEMU could not be asked to end by SIGTERM any more.
async fn withstand_signals(state: &State) {
    let caught = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
        signal(SignalKind::hangup()),
    );
    let (Ok(mut terminate), Ok(mut interrupt), Ok(mut hangup)) = caught else {
        note(&state.dir, "signals cannot be caught");
        return;
    };
    loop {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            _ = hangup.recv() => "SIGHUP",
        };
        note(&state.dir, &format!("{name} came and is followed only once QEMU has ended"));
        state.asked_to_end.notify_one();
    }
}

async fn accept(state: &Arc<State>, listener: StdListener) -> io::Result<()> {
    let listener = UnixListener::from_std(listener)?;
    let clients = TaskTracker::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let state = Arc::clone(state);
                clients.spawn(async move { converse(&state, stream).await });
            }
            // Out of descriptors, most likely; that passes.
            Err(error) => {
                note(&state.dir, &format!("cannot accept a client: {error}"));
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Serves one client until it goes.
async fn converse(state: &Arc<State>, stream: UnixStream) {
    let (reader, writer) = stream.into_split();
    let writer = Arc::new(Mutex::new(writer));
    let mut reader = BufReader::new(reader);
    let requests = TaskTracker::new();
    loop {
        let mut line = Vec::new();
        let bounded = (&mut reader).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line).await;
        if bounded.is_err() || line.last() != Some(&b'\n') {
            return;
        }
        let (state, writer) = (Arc::clone(state), Arc::clone(&writer));
        // One that waits for the exit must not keep the others waiting.
        requests.spawn(async move {
            let response = respond(&state, &line).await;
            let bye = matches!(response.outcome, Outcome::Ok(Answer::Bye));
            // A client that has gone needs no answer.
            drop(send(&writer, &response).await);
            if bye {
                state.bye.notify_one();
            }
        });
    }
}

async fn send(writer: &Mutex<OwnedWriteHalf>, response: &Response) -> io::Result<()> {
    let mut line = serde_json::to_vec(response)?;
    line.push(b'\n');
    writer.lock().await.write_all(&line).await
}

async fn respond(state: &State, line: &[u8]) -> Response {
    match serde_json::from_slice::<Envelope>(line) {
        Ok(Envelope { id, request }) => {
            let outcome = match answer(state, request).await {
                Ok(answer) => Outcome::Ok(answer),
                Err(failure) => Outcome::Error(failure),
            };
            Response { id, outcome }
        }
        Err(error) => {
            let failure = Failure::BadRequest { reason: error.to_string() };
            Response { id: 0, outcome: Outcome::Error(failure) }
        }
    }
}

async fn answer(state: &State, request: Request) -> Result<Answer, Failure> {
    match request {
        Request::Status => Ok(Answer::Status(state.status())),
        Request::Oob { command, arguments, deadline_ms } => {
            let deadline = Duration::from_millis(deadline_ms);
            oob::execute(state, &command, arguments, deadline).await.map(Answer::Returned)
        }
        Request::Kill => {
            kill(state)?;
            wait(state).await
        }
        Request::Wait => wait(state).await,
        Request::StderrTail { bytes } => state
            .dir
            .stderr_tail(bytes.min(LINE_BYTES_MAX as u64 / 8))
            .map(Answer::StderrTail)
            .map_err(|error| system("read QEMU's log", &error)),
        Request::Bye if state.exit.borrow().is_some() => Ok(Answer::Bye),
        Request::Bye => Err(Failure::StillRunning),
    }
}

fn kill(state: &State) -> Result<(), Failure> {
    match &state.process {
        Some(process) => process.kill().map_err(|error| system("kill QEMU", &error)),
        // Never started, and recorded as such.
        None if state.identity.is_none() => Ok(()),
        None => Err(system("kill QEMU", &"it has no descriptor")),
    }
}

async fn wait(state: &State) -> Result<Answer, Failure> {
    match state.exited().await {
        Some(record) => Ok(Answer::Exit(record)),
        None => Err(system("wait for QEMU", &"nobody watches it")),
    }
}

fn system(operation: &str, reason: &dyn std::fmt::Display) -> Failure {
    Failure::System { operation: operation.to_owned(), reason: reason.to_string() }
}
