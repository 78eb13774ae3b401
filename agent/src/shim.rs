//! QEMU's parent: a small process that outlives the agent.
//!
//! `vmferry-agent shim --dir DIR` starts what `DIR/launch.json` says and
//! stays until it has ended and somebody has read how. It keeps the second
//! monitor with out-of-band execution negotiated from the start: once QEMU's
//! main loop is stuck, a new connection is not greeted any more. It keeps
//! QEMU's stderr, bounded, and it writes down when the guest stopped, went on
//! or ended by itself, and the exit, which is the proof that the process is
//! gone.
//!
//! What it withstands:
//!
//! - The agent's death: it has a session of its own and needs nobody.
//! - SIGTERM, SIGINT and SIGHUP: they are noted, and followed only once QEMU
//!   has ended. Whoever wants the guest gone says so to QEMU, or asks for
//!   `kill`. (A scope that systemd stops sends the signal to QEMU as well.)
//! - Its own death: QEMU writes to its log by itself and goes on. The agent
//!   then judges by pid, start time and boot id.
//! - Coming twice, or late: a directory is locked and used once.
//!
//! The process writes down who it is *before* it becomes QEMU, so there is
//! no moment in which a QEMU runs that no record names.
//!
//! After the exit is recorded the shim goes when a client says `bye`, when a
//! signal asks for it, or after [`GRACE`]; the record on the disk is what
//! counts.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

pub use self::client::{ShimClient, ShimError};
pub use self::protocol::{Failure, MigrationSeen, OobState, ShimStatus};

mod child;
mod client;
mod exit;
mod log;
mod oob;
mod protocol;
mod server;
mod state;

/// How long a shim stays for readers after the exit was recorded.
pub const GRACE: Duration = Duration::from_secs(60);

/// How much of QEMU's stderr an exit record holds, in bytes.
const STDERR_TAIL_BYTES: u64 = 8 << 10;

/// What the command line says.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct ShimArgs {
    /// The process's directory, with its launch.json
    #[arg(long)]
    pub dir: PathBuf,
}

/// Runs a shim to its end.
///
/// To be called from a plain `main`, before there is a runtime or a second
/// thread: it forks, and makes its own runtime afterwards.
#[must_use]
pub fn run(args: &ShimArgs) -> ExitCode {
    server::run(&crate::process::ProcessDir::new(&args.dir))
}
