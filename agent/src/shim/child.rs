//! The fork that becomes QEMU.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

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
    let dir = dir.clone();
    let record_itself = move || record_itself(&dir);
    #[expect(unsafe_code, reason = "single-threaded until here, so the child may allocate")]
    unsafe {
        command.pre_exec(record_itself);
    }
    command.spawn()
}

/// Writes down who this process is. Neither pid nor start time changes when
/// it becomes QEMU.
fn record_itself(dir: &ProcessDir) -> io::Result<()> {
    let identity = ProcessIdentity::read(std::process::id()).map_err(io::Error::other)?;
    let identity = identity.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    dir.write_process(&identity).map_err(io::Error::other)
}
