//! Whether another process holds a disk.
//!
//! QEMU guards its images with locks on single bytes of the file: byte 101 while it may write,
//! byte 201 while nobody else may. They are asked for here before a start, so that the refusal
//! names the disk and its holder; QEMU's own lock decides.

use std::fs::File;
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use procfs::process::FDTarget;
use vmferry_agent_core::definition::{Access, Definition};

use crate::error::CommandError;

/// QEMU's bytes for "writes" and "lets nobody else write".
const LOCK_BYTES: [libc::off_t; 2] = [101, 201];

/// Returns the refusal if another process holds a disk that the guest would write.
pub(crate) async fn held(vm: &Definition) -> Option<CommandError> {
    let paths: Vec<PathBuf> = vm
        .disks
        .iter()
        .filter(|disk| disk.access == Access::ReadWrite)
        .map(|disk| PathBuf::from(&disk.path))
        .collect();
    if paths.is_empty() {
        return None;
    }
    let look = move || {
        let path = paths.into_iter().find(|path| is_locked(path))?;
        let holder =
            holder(&path).unwrap_or_else(|| "on another host, or not to be seen".to_owned());
        Some(CommandError::DiskInUse { path: path.display().to_string(), holder })
    };
    // A look that fails finds nothing: QEMU's own lock decides.
    tokio::task::spawn_blocking(look).await.ok().flatten()
}

fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    LOCK_BYTES.into_iter().any(|byte| {
        let mut lock = lock_of(libc::F_WRLCK, byte);
        let asked = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock));
        asked.is_ok() && libc::c_int::from(lock.l_type) != libc::F_UNLCK
    })
}

/// Describes a lock of one byte, for the kernel.
fn lock_of(kind: libc::c_int, byte: libc::off_t) -> libc::flock {
    // The kernel's own numbers fit, or the header would not have this type.
    let short = |number| libc::c_short::try_from(number).unwrap_or(0);
    libc::flock {
        l_type: short(kind),
        l_whence: short(libc::SEEK_SET),
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

/// Finds a process on this machine that has the file open.
fn holder(path: &Path) -> Option<String> {
    let wanted = std::fs::canonicalize(path).ok()?;
    let own = std::process::id();
    for process in procfs::process::all_processes().ok()?.flatten() {
        if u32::try_from(process.pid()).is_ok_and(|pid| pid == own) {
            continue;
        }
        let Ok(fds) = process.fd() else { continue };
        let has =
            fds.flatten().any(|fd| matches!(fd.target, FDTarget::Path(target) if target == wanted));
        if has {
            let name = process.stat().map_or_else(|_| "?".to_owned(), |stat| stat.comm);
            return Some(format!("pid {} {name}", process.pid()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn definition(path: &Path) -> Definition {
        Definition::parse(&format!(
            "name = 'x'\nuuid = '01234567-89ab-cdef-0123-456789abcdef'\nmachine = 'pc'\nmemory = '64MiB'\n\
             [[disk]]\npath = '{}'\n",
            path.display()
        ))
        .unwrap()
    }

    #[tokio::test]
    async fn a_disk_that_another_open_file_locks_is_named() {
        let mut disk = tempfile::NamedTempFile::new().unwrap();
        disk.write_all(&[0; 512]).unwrap();
        assert!(held(&definition(disk.path())).await.is_none());
        let other = File::open(disk.path()).unwrap();
        fcntl(&other, FcntlArg::F_OFD_SETLK(&lock_of(libc::F_RDLCK, 101))).unwrap();
        let error = held(&definition(disk.path())).await.unwrap();
        assert_eq!(error.label(), "disk_in_use");
        drop(other);
        assert!(held(&definition(disk.path())).await.is_none());
    }
}
