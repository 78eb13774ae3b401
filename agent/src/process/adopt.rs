//! Finds a process again.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::QemuProcess;
use super::identity::ProcessIdentity;
use super::judge::{JudgeError, Judgement, judge, judge_settled};
use super::oob::OutOfBand;
use super::proof::GoneProof;
use super::record::ProcessDir;
use crate::error::chain;
use crate::monitor::{CONNECT_DEADLINE, Monitor, MonitorError};
use crate::shim::ShimClient;

/// How long an exit that is just being recorded is waited for.
const RECORD_DEADLINE: Duration = Duration::from_millis(500);

/// How long the second monitor is waited for when the shim is gone.
const OOB_DEADLINE: Duration = Duration::from_secs(1);

/// What became of a process.
#[derive(Debug)]
pub enum Adopted {
    /// It lives and its monitor answers.
    Alive(QemuProcess),
    /// It is gone.
    Gone(GoneProof),
    /// It lives, but its monitor does not answer. The VM stays fenced.
    Unresponsive(Unresponsive),
    /// Nothing could be learnt. That proves nothing; the VM stays fenced.
    Unknown(AdoptError),
}

/// A process that lives and does not answer.
#[derive(Debug)]
pub struct Unresponsive {
    /// Who it is.
    pub identity: ProcessIdentity,
    /// What its monitor did instead of answering.
    pub cause: MonitorError,
    /// The way in that may still be open.
    pub oob: OutOfBand,
}

/// A process could not be judged.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// Its records or `/proc` could not be read.
    #[error("judge the process of {dir}", dir = dir.display())]
    Judge {
        /// The directory.
        dir: std::path::PathBuf,
        /// Why.
        source: JudgeError,
    },
    /// A shim was starting it all the while. Ask again.
    #[error("the process of {dir} is just being started", dir = dir.display())]
    Starting {
        /// The directory.
        dir: std::path::PathBuf,
    },
}

/// Finds the process of `dir` again and connects to it.
///
/// Changes nothing about the guest. An exit that was recorded is
/// acknowledged to the shim, which then goes.
pub async fn adopt(dir: &ProcessDir) -> Adopted {
    adopt_within(dir, CONNECT_DEADLINE).await
}

/// As [`adopt()`], with a bound of one's own for the monitor's greeting.
pub async fn adopt_within(dir: &ProcessDir, deadline: Duration) -> Adopted {
    let identity = match judge_settled(dir, Instant::now() + deadline).await {
        Ok(Judgement::Alive(identity)) => identity,
        Ok(Judgement::Gone(proof)) => return Adopted::Gone(settle(dir, proof).await),
        Ok(Judgement::Starting) => {
            return Adopted::Unknown(AdoptError::Starting { dir: dir.path().to_owned() });
        }
        Err(source) => {
            return Adopted::Unknown(AdoptError::Judge { dir: dir.path().to_owned(), source });
        }
    };
    let connected = Monitor::connect(&dir.qmp_socket(), deadline).await;
    let oob = OutOfBand::new(dir.clone());
    match connected {
        Ok(monitor) => {
            if let Err(error) = oob.prepare(OOB_DEADLINE).await {
                tracing::warn!(%identity, error = %chain(&error), "no way in out of band");
            }
            Adopted::Alive(QemuProcess { dir: dir.clone(), identity, monitor, oob })
        }
        Err(cause) => match judge(dir) {
            // It may just have ended, which is why nobody answered.
            Ok(Judgement::Gone(proof)) => Adopted::Gone(settle(dir, proof).await),
            Ok(Judgement::Alive(_) | Judgement::Starting) | Err(_) => {
                Adopted::Unresponsive(Unresponsive { identity, cause, oob })
            }
        },
    }
}

/// Exchanges a bare absence for the shim's record where it is just being
/// written, and lets the shim go.
pub(super) async fn settle(dir: &ProcessDir, proof: GoneProof) -> GoneProof {
    let shim = ShimClient::new(dir);
    let proof = match proof.exit_record() {
        Some(_) => proof,
        None => match timeout(RECORD_DEADLINE, shim.wait()).await {
            Ok(Ok(record)) => GoneProof::recorded(record),
            Ok(Err(_)) | Err(_) => proof,
        },
    };
    if let Err(error) = shim.bye(RECORD_DEADLINE).await {
        // Usual: it has gone already.
        tracing::debug!(dir = %dir.path().display(), error = %chain(&error), "no shim to let go");
    }
    proof
}
