//! The fork that becomes QEMU.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use super::server::listen;
use crate::process::{LaunchRecord, ProcessDir, ProcessIdentity};

/// Starts what `launch` says, as a child that has written down who it is.
///
/// Must be called while this process has one thread: the child allocates and
/// writes files between fork and exec.
pub(super) fn spawn(dir: &ProcessDir, launch: &LaunchRecord) -> io::Result<Child> {
    let Some((program, arguments)) = launch.argv.split_first() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the command line is empty"));
    };
    // A file and no pipe: QEMU must be able to write after we were killed.
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.qemu_log())?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let listeners = open_monitors(&mut command, launch)?;
    let dir = dir.clone();
    let prepare = move || {
        listeners.iter().try_for_each(hand_over)?;
        record_itself(&dir)
    };
    #[expect(unsafe_code, reason = "single-threaded until here, so the child may allocate")]
    unsafe {
        command.pre_exec(prepare);
    }
    // With `command` our own copies of the listeners close: once QEMU is
    // gone, a connect must be refused.
    command.spawn()
}

/// Opens the monitors' sockets and adds their arguments.
///
/// QEMU is given open sockets rather than paths, for the sake of one flag:
/// they do not block. A monitor with out-of-band execution moves its listener
/// from the main loop to a thread of its own, and a client that comes in that
/// moment wakes both. One of the two then waits in accept for a client that
/// never comes, and if that is the main loop, QEMU hangs from its first
/// moment on (QEMU 10.0.2, some launches in a thousand). A socket that does
/// not block sends it back to its work. And a client need not wait for QEMU
/// to open it.
fn open_monitors(command: &mut Command, launch: &LaunchRecord) -> io::Result<Vec<UnixListener>> {
    let mut listeners = Vec::new();
    for monitor in &launch.monitors {
        let listener = listen(&monitor.socket)?;
        let (id, fd) = (&monitor.id, listener.as_raw_fd());
        command.arg("-chardev").arg(format!("socket,id={id},fd={fd},server=on,wait=off"));
        command.arg("-mon").arg(format!("chardev={id},mode=control"));
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Lets a descriptor outlive the exec, under the number it has.
fn hand_over(listener: &UnixListener) -> io::Result<()> {
    let fd: BorrowedFd<'_> = std::os::fd::AsFd::as_fd(listener);
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(())
}

/// Writes down who this process is. Neither pid nor start time changes when
/// it becomes QEMU.
fn record_itself(dir: &ProcessDir) -> io::Result<()> {
    let identity = ProcessIdentity::read(std::process::id()).map_err(io::Error::other)?;
    let identity = identity.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    dir.write_process(&identity).map_err(io::Error::other)
}
