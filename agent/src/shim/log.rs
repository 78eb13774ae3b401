//! The two logs: QEMU's, which must stay bounded, and the shim's own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::read;

use crate::process::ProcessDir;
use crate::process::pidfd::watch_readable;
use crate::process::record::now_ms;

/// How large QEMU's log may grow before it is cut, in bytes.
///
/// A healthy QEMU writes a few lines in its life. A guest that provokes a
/// warning per request could otherwise fill the host's `/run`.
const QEMU_LOG_BYTES_MAX: u64 = 1 << 20;

/// How much of it is left when it is cut, in bytes.
const QEMU_LOG_BYTES_KEPT: u64 = 256 << 10;

/// How large the shim's own log may grow, in bytes.
const SHIM_LOG_BYTES_MAX: u64 = 64 << 10;

/// Keeps QEMU's log bounded, woken by each write to it.
///
/// # Errors
///
/// If the log cannot be watched or cut any more.
pub(super) async fn bound(dir: &ProcessDir) -> io::Result<()> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    inotify.add_watch(&dir.qemu_log(), AddWatchFlags::IN_MODIFY)?;
    let inotify = watch_readable(inotify.into())?;
    // What the events say is known: the one file that is watched was written.
    let mut events = [0; 4096];
    loop {
        cut(dir)?;
        let mut ready = inotify.readable().await?;
        match read(inotify.get_ref(), &mut events) {
            Ok(_) => {}
            Err(nix::errno::Errno::EAGAIN) => ready.clear_ready(),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Cuts the log to its end if it has grown too large.
///
/// QEMU appends, so after the cut it goes on behind what is kept. A line that
/// is written between reading and cutting is lost; that is what a bound costs.
fn cut(dir: &ProcessDir) -> io::Result<()> {
    let path = dir.qemu_log();
    if fs::metadata(&path)?.len() <= QEMU_LOG_BYTES_MAX {
        return Ok(());
    }
    let tail = dir.stderr_tail(QEMU_LOG_BYTES_KEPT).map_err(io::Error::other)?;
    // Not opened for appending: the end is moving.
    let file = OpenOptions::new().write(true).open(&path)?;
    file.set_len(0)?;
    let mut file = OpenOptions::new().append(true).open(&path)?;
    file.write_all(b"[cut]\n")?;
    file.write_all(tail.as_bytes())
}

/// Adds a line to the shim's own log.
///
/// A shim has no other place to tell anything, and no reader to fail for: a
/// line that cannot be written is lost.
pub(super) fn note(dir: &ProcessDir, text: &str) {
    let path = dir.shim_log();
    let full = fs::metadata(&path).is_ok_and(|metadata| metadata.len() > SHIM_LOG_BYTES_MAX);
    if full {
        return;
    }
    let append = |mut file: File| writeln!(file, "{} {text}", now_ms());
    let open = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    drop(open.and_then(append));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_grew_too_large_keeps_its_end() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = ProcessDir::new(temporary.path());
        let mut text = vec![b'x'; usize::try_from(QEMU_LOG_BYTES_MAX).unwrap()];
        text.extend_from_slice(b"the reason\n");
        fs::write(dir.qemu_log(), &text).unwrap();
        cut(&dir).unwrap();
        let kept = fs::read(dir.qemu_log()).unwrap();
        assert!(kept.len() < text.len() / 2);
        assert!(kept.ends_with(b"the reason\n"));
    }
}
