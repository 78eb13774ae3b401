//! QEMU processes: started, found again, judged, and ended with proof.
//!
//! [`launch()`] starts a shim, which starts QEMU. [`adopt()`] finds both again
//! after a restart of the agent. [`kill_and_prove_gone`] ends a process and
//! says how that is known. All three work on a [`ProcessDir`], which belongs
//! to one process for ever.
//!
//! Unknown is not gone. A [`GoneProof`] is only made here, and only from
//! evidence that R1 allows: the shim's record of the exit, a pid with its
//! start time absent under the same boot, or a new boot. A silent monitor, a
//! dead shim or an unreadable file is none of these.
//!
//! ```text
//! let launcher = Launcher::detect(shim_binary);
//! let qemu = launch(&dir, &argv, &launcher, LAUNCH_DEADLINE).await?;
//! qemu.monitor().execute(QueryStatus {}).await?;
//! …the agent restarts…
//! match adopt(&dir).await {
//!     Adopted::Alive(qemu) => …,
//!     Adopted::Gone(proof) => …,
//!     Adopted::Unresponsive(silent) => …fence this VM only…,
//!     Adopted::Unknown(error) => …prove nothing…,
//! }
//! ```

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::monitor::{Events, Monitor, MonitorError};
use crate::shim::{ShimClient, ShimError, ShimStatus};

pub use self::adopt::{AdoptError, Adopted, Unresponsive, adopt, adopt_within};
pub use self::end::{KillError, kill_and_prove_gone};
pub use self::guest::{GuestEnd, GuestRecord};
pub use self::identity::{IdentityError, Presence, ProcessIdentity};
pub use self::judge::{JudgeError, Judgement, judge};
pub use self::launch::{LaunchError, Launcher, LauncherKind, launch};
pub use self::oob::{OobError, OutOfBand};
pub use self::proof::{Evidence, GoneProof};
pub use self::record::{Exit, ExitRecord, LaunchRecord, MonitorRecord, ProcessDir, RecordError};
pub use self::scan::{QemuFound, Scan, ScanError, ShimFound, scan};

mod adopt;
mod end;
mod guest;
pub(crate) mod identity;
mod judge;
mod launch;
mod oob;
pub(crate) mod pidfd;
mod proof;
pub(crate) mod record;
mod scan;

/// How long a launch waits for QEMU's monitor where nothing else is said.
///
/// QEMU answers some 70 ms after exec; preallocated memory of a large guest
/// takes seconds more.
pub const LAUNCH_DEADLINE: Duration = Duration::from_secs(60);

/// A QEMU process whose monitor answers.
///
/// Dropping it lets the monitor go and touches nothing else: the process and
/// its shim live on and can be adopted again.
#[derive(Debug)]
pub struct QemuProcess {
    dir: ProcessDir,
    identity: ProcessIdentity,
    monitor: Monitor,
    oob: OutOfBand,
}

impl QemuProcess {
    /// Returns its directory.
    #[must_use]
    pub fn dir(&self) -> &ProcessDir {
        &self.dir
    }

    /// Returns its directory's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns who it is.
    #[must_use]
    pub fn identity(&self) -> &ProcessIdentity {
        &self.identity
    }

    /// Returns its monitor. Once that is [`Monitor::closed`] the process is
    /// either gone or silent: [`adopt()`] it again to know.
    #[must_use]
    pub fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    /// Subscribes to its events from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        self.monitor.events()
    }

    /// Executes an out-of-band command over the shim, or over the second
    /// monitor directly if the shim is gone.
    ///
    /// # Errors
    ///
    /// See [`OobError`].
    pub async fn oob<C: vmferry_qmp::Command>(
        &self,
        command: C,
        deadline: Duration,
    ) -> Result<C::Ok, OobError> {
        self.oob.execute(command, deadline).await
    }

    /// As [`QemuProcess::oob`], by name and as JSON.
    ///
    /// # Errors
    ///
    /// See [`OobError`].
    pub async fn oob_raw(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, OobError> {
        self.oob.execute_raw(command, arguments, deadline).await
    }

    /// Asks the shim what it has seen.
    ///
    /// # Errors
    ///
    /// See [`ShimError`].
    pub async fn shim_status(&self, deadline: Duration) -> Result<ShimStatus, ShimError> {
        ShimClient::new(&self.dir).status(deadline).await
    }

    /// Returns the last `bytes_max` of what it said on stdout and stderr.
    ///
    /// # Errors
    ///
    /// If the log cannot be read.
    pub fn stderr_tail(&self, bytes_max: u64) -> Result<String, RecordError> {
        self.dir.stderr_tail(bytes_max)
    }

    /// Opens another monitor connection in place of one that has ended.
    ///
    /// # Errors
    ///
    /// As [`Monitor::connect`].
    pub async fn reconnect(&mut self, deadline: Duration) -> Result<(), MonitorError> {
        self.monitor = Monitor::connect(&self.dir.qmp_socket(), deadline).await?;
        Ok(())
    }

    /// Waits for the process to end and returns the proof.
    ///
    /// # Errors
    ///
    /// If the end cannot be watched or judged; it proves nothing.
    pub async fn exited(&self) -> Result<GoneProof, KillError> {
        end::wait_gone(&self.dir, &self.identity).await
    }

    /// Kills the process and returns the proof that it is gone.
    ///
    /// # Errors
    ///
    /// See [`KillError`]. Whatever it is, the process may live on.
    pub async fn kill_and_prove_gone(&self, deadline: Duration) -> Result<GoneProof, KillError> {
        kill_and_prove_gone(&self.dir, deadline).await
    }
}
