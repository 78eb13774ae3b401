//! A descriptor that means one process, whatever becomes of its pid.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A process that cannot be mistaken for another one.
#[derive(Debug)]
pub(crate) struct PidFd(OwnedFd);

impl PidFd {
    /// Opens the process that has `pid` now.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        let pid =
            libc::pid_t::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        #[expect(unsafe_code, reason = "no safe wrapper of pidfd_open; takes and returns integers")]
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = RawFd::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        #[expect(unsafe_code, reason = "the kernel just returned this descriptor to us alone")]
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self(fd))
    }

    /// Sends SIGKILL. A process that has ended already is no error.
    pub(crate) fn kill(&self) -> io::Result<()> {
        let fd = self.0.as_raw_fd();
        #[expect(unsafe_code, reason = "no safe wrapper of pidfd_send_signal; null means no info")]
        let sent = unsafe {
            let none = std::ptr::null::<libc::siginfo_t>();
            libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, none, 0)
        };
        if sent == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
    }

    /// Tells whether the process and all of its threads have ended.
    pub(crate) fn ended(&self) -> io::Result<bool> {
        self.poll(0)
    }

    /// Waits for the end of the process, blocking this thread.
    #[cfg(test)]
    pub(crate) fn wait_blocking(&self) -> io::Result<()> {
        while !self.poll(-1)? {}
        Ok(())
    }

    /// Waits for the end of the process and all of its threads.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        let fd = watch_readable(self.0.try_clone()?)?;
        loop {
            let mut guard = fd.readable().await?;
            if self.ended()? {
                return Ok(());
            }
            guard.clear_ready();
        }
    }

    fn poll(&self, timeout_ms: libc::c_int) -> io::Result<bool> {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        #[expect(
            unsafe_code,
            reason = "poll writes to the one pollfd it is given, which lives here"
        )]
        let ready = unsafe { libc::poll(&raw mut poll, 1, timeout_ms) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            let interrupted = error.kind() == io::ErrorKind::Interrupted;
            return if interrupted { Ok(false) } else { Err(error) };
        }
        Ok(ready > 0 && poll.revents & libc::POLLIN != 0)
    }
}

/// Registers a descriptor to be awaited until it is readable.
pub(crate) fn watch_readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    #[expect(unsafe_code, reason = "an owned descriptor stays the same one until it is dropped")]
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    registered.map_err(Into::into)
}
