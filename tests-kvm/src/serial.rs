//! The serial port of one guest, as an outsider sees it.
//!
//! Every QEMU process of a VM connects its serial port to one socket of the
//! lane, so what the guest prints arrives here in order, whichever host it is on,
//! and a second guest that runs at the same time cannot hide. A thread of its own
//! stamps each chunk with the host's clock as it arrives.

use std::fs;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

use crate::ticks::{Chunk, History};
use crate::wait::{Holds, Level, wait_for};

/// How often the thread looks whether it should end.
const STOP_POLL_MS: u16 = 100;

#[derive(Debug, Default)]
struct Received {
    chunks: Vec<Chunk>,
    // The process behind each connection, by the kernel's word.
    processes: Vec<i32>,
    // Connections before this one were of another boot of the guest.
    since: u32,
}

impl Received {
    fn connections(&self) -> u32 {
        u32::try_from(self.processes.len()).unwrap_or(u32::MAX)
    }
}

/// Listens for the serial ports of one guest.
#[derive(Debug)]
pub struct Serial {
    path: PathBuf,
    received: Arc<Mutex<Received>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Serial {
    /// Listens on `path`.
    ///
    /// # Errors
    ///
    /// Fails if the socket cannot be made.
    pub fn listen(path: &Path) -> Result<Self> {
        let listener =
            UnixListener::bind(path).with_context(|| format!("listen on {}", path.display()))?;
        let received = Arc::new(Mutex::new(Received::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new()
            .name("serial".to_owned())
            .spawn({
                let (received, stop) = (Arc::clone(&received), Arc::clone(&stop));
                move || receive(&listener, &received, &stop)
            })
            .context("start the serial thread")?;
        Ok(Self { path: path.to_owned(), received, stop, thread: Some(thread) })
    }

    /// Returns the QEMU arguments that connect a guest's first serial port here.
    #[must_use]
    pub fn qemu_arguments(&self) -> Vec<String> {
        let chardev = format!("socket,id=vfserial,path={}", self.path.display());
        ["-chardev".to_owned(), chardev, "-serial".to_owned(), "chardev:vfserial".to_owned()].into()
    }

    /// Returns what the guest has printed so far.
    #[must_use]
    pub fn history(&self) -> History {
        let received = self.locked();
        let of_this_boot = |chunk: &&Chunk| chunk.connection >= received.since;
        let chunks: Vec<_> = received.chunks.iter().filter(of_this_boot).cloned().collect();
        History::read(&chunks)
    }

    /// Forgets what was printed so far: every process that printed it was ended on purpose, and the
    /// guest may be booted anew.
    pub fn forget(&self) {
        let mut received = self.locked();
        received.since = received.connections();
    }

    /// Returns how many QEMU processes have connected so far.
    #[must_use]
    pub fn connections(&self) -> u32 {
        self.locked().connections()
    }

    /// Returns the process that printed the guest's last line, if one has printed any: only a QEMU
    /// whose vCPUs run prints.
    #[must_use]
    pub fn last_process(&self) -> Option<i32> {
        let last = self.history().ticks.last()?.connection;
        self.locked().processes.get(usize::try_from(last).ok()?).copied()
    }

    /// Waits until the guest has printed `count` more lines than now.
    ///
    /// # Errors
    ///
    /// Fails if it does not within the bound: it stands still.
    pub async fn wait_ticks(&self, count: usize, bound: Duration) -> Result<()> {
        let before = self.history().ticks.len();
        wait_for(format_args!("{count} more lines from the guest"), bound, || async {
            let now = self.history().ticks.len();
            Ok(Level::from_condition(Holds::from(now >= before + count), || {
                format!("{} more ({before} before)", now - before)
            }))
        })
        .await
    }

    /// Waits until the guest has printed `text` on a line that is no heartbeat.
    ///
    /// # Errors
    ///
    /// Fails if it does not within the bound.
    pub async fn wait_text(&self, text: &str, bound: Duration) -> Result<()> {
        wait_for(format_args!("the guest to print {text:?}"), bound, || async {
            let other = self.history().other;
            let found = other.iter().any(|line| line.contains(text));
            Ok(Level::from_condition(Holds::from(found), || format!("{other:?}")))
        })
        .await
    }

    /// Waits until the guest has been silent for `silence`: it stands still.
    ///
    /// # Errors
    ///
    /// Fails if it goes on printing.
    pub async fn wait_still(&self, silence: Duration, bound: Duration) -> Result<()> {
        wait_for("the guest to stand still", bound, || async {
            let last = self.history().ticks.last().map_or(0, |tick| tick.at_us);
            let silent_us = now_us().saturating_sub(last);
            let still = u128::from(silent_us) >= silence.as_micros();
            Ok(Level::from_condition(Holds::from(still), || format!("silent for {silent_us} us")))
        })
        .await
    }

    fn locked(&self) -> MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Serial {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        fs::remove_file(&self.path).ok();
    }
}

/// Returns the host's monotonic clock.
#[must_use]
pub fn now_us() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .ok()
        .and_then(|now| u64::try_from(Duration::from(now).as_micros()).ok())
        .unwrap_or_default()
}

fn receive(listener: &UnixListener, received: &Mutex<Received>, stop: &AtomicBool) {
    let mut connections: Vec<(u32, UnixStream)> = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    while !stop.load(Ordering::Relaxed) {
        // The listener first, then the connections in the order in which they came: what the
        // source still had to say is read before what the destination says.
        let mut polled = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        polled.extend(connections.iter().map(|(_, c)| PollFd::new(c.as_fd(), PollFlags::POLLIN)));
        if poll(&mut polled, PollTimeout::from(STOP_POLL_MS)).is_err() {
            continue;
        }
        let ready: Vec<bool> =
            polled.iter().map(|p| p.revents().is_some_and(|events| !events.is_empty())).collect();
        let at_us = now_us();
        let mut ended = Vec::new();
        for ((number, connection), _) in
            connections.iter_mut().zip(&ready[1..]).filter(|(_, r)| **r)
        {
            match connection.read(&mut buffer) {
                Ok(0) | Err(_) => ended.push(*number),
                Ok(length) => {
                    let bytes = buffer[..length].to_vec();
                    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
                    received.chunks.push(Chunk { at_us, connection: *number, bytes });
                }
            }
        }
        connections.retain(|(number, _)| !ended.contains(number));
        if ready[0]
            && let Ok((connection, _)) = listener.accept()
        {
            let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
            let process = getsockopt(&connection, PeerCredentials).map_or(0, |peer| peer.pid());
            connections.push((received.connections(), connection));
            received.processes.push(process);
        }
    }
}
