//! The two logs: QEMU's, which must stay bounded, and the shim's own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::read;

use crate::process::ProcessDir;
use crate::process::pidfd::watch_readable;
use crate::process::record::now_ms;

/// How much QEMU's log may occupy before its beginning is freed, in bytes.
///
/// A healthy QEMU writes a few lines in its life. A guest that provokes a
/// warning per request could otherwise fill the host's `/run`.
const QEMU_LOG_BYTES_MAX: u64 = 1 << 20;

/// How much of it is kept then, in bytes.
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

/// Frees the log's beginning if the log occupies too much.
///
/// A hole is punched rather than the file rewritten: QEMU writes on without
/// us, and not a line of it may be lost, least of all the last one. What is
/// left is a file whose beginning reads as zeros and occupies nothing.
fn cut(dir: &ProcessDir) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(dir.qemu_log())?;
    let metadata = file.metadata()?;
    if metadata.blocks().saturating_mul(512) <= QEMU_LOG_BYTES_MAX {
        return Ok(());
    }
    let freed = metadata.len().saturating_sub(QEMU_LOG_BYTES_KEPT);
    let freed = libc::off_t::try_from(freed).unwrap_or(libc::off_t::MAX);
    if freed > 0 {
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&file, hole, 0, freed)?;
    }
    Ok(())
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
        text.extend_from_slice(b" the reason\n");
        fs::write(dir.qemu_log(), &text).unwrap();
        cut(&dir).unwrap();
        let metadata = fs::metadata(dir.qemu_log()).unwrap();
        assert!(metadata.blocks() * 512 < QEMU_LOG_BYTES_MAX / 2, "{} blocks", metadata.blocks());
        assert!(fs::read(dir.qemu_log()).unwrap().ends_with(b"xxx the reason\n"));
    }
}
