//! Ends a process, and knows that it has ended.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::adopt::settle;
use super::identity::{IdentityError, ProcessIdentity};
use super::judge::{JudgeError, Judgement, judge, judge_settled};
use super::proof::GoneProof;
use super::record::ProcessDir;
use crate::error::chain;
use crate::shim::ShimClient;

/// The longest the shim is given before the kill is done without it.
const SHIM_DEADLINE: Duration = Duration::from_secs(2);

/// It is not proven that the process is gone. It may live on.
#[derive(Debug, thiserror::Error)]
pub enum KillError {
    /// Its records or `/proc` could not be read.
    #[error("judge the process of {dir}", dir = dir.display())]
    Judge {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: JudgeError,
    },
    /// `/proc` or its descriptor could not be read.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A shim was starting it all the while. Ask again.
    #[error("the process of {dir} is just being started", dir = dir.display())]
    Starting {
        /// The directory.
        dir: PathBuf,
    },
    /// The kernel refused the signal or the watch.
    #[error("{operation} {identity}")]
    System {
        /// What was being done.
        operation: &'static str,
        /// To whom.
        identity: ProcessIdentity,
        /// Why.
        source: io::Error,
    },
    /// It was sent SIGKILL and is still there: something in the kernel, most
    /// often its storage, does not let go of it.
    #[error("{identity} is still there {waited:?} after SIGKILL: check the storage it uses")]
    StillThere {
        /// Who.
        identity: ProcessIdentity,
        /// How long was waited.
        waited: Duration,
    },
}

/// Kills the process of `dir` and returns the proof that it is gone.
///
/// Over the shim if that answers, else with a signal to a descriptor that was
/// checked against the start time, so never to a stranger. May be repeated.
///
/// # Errors
///
/// See [`KillError`].
pub async fn kill_and_prove_gone(
    dir: &ProcessDir,
    deadline: Duration,
) -> Result<GoneProof, KillError> {
    let until = Instant::now() + deadline;
    let identity = match judge_settled(dir, until).await.map_err(judge_failed(dir))? {
        Judgement::Alive(identity) => identity,
        Judgement::Gone(proof) => return Ok(settle(dir, proof).await),
        Judgement::Starting => {
            return Err(KillError::Starting { dir: dir.path().to_owned() });
        }
    };
    let shim = ShimClient::new(dir);
    match shim.kill(SHIM_DEADLINE.min(deadline)).await {
        Ok(record) => return Ok(settle(dir, GoneProof::recorded(record)).await),
        Err(error) => {
            tracing::debug!(%identity, error = %chain(&error), "killing without the shim");
        }
    }
    let Some(fd) = identity.open()? else {
        return Ok(settle(dir, GoneProof::absent(identity)).await);
    };
    let failed = |operation| {
        let identity = identity.clone();
        move |source| KillError::System { operation, identity, source }
    };
    fd.kill().map_err(failed("kill"))?;
    match timeout_at(until, fd.wait()).await {
        Ok(Ok(())) => Ok(settle(dir, GoneProof::absent(identity)).await),
        Ok(Err(source)) => Err(failed("wait for")(source)),
        Err(_) => Err(KillError::StillThere { identity, waited: deadline }),
    }
}

/// Waits for a process to end by itself.
pub(super) async fn wait_gone(
    dir: &ProcessDir,
    identity: &ProcessIdentity,
) -> Result<GoneProof, KillError> {
    if let Some(fd) = identity.open()? {
        fd.wait().await.map_err(|source| KillError::System {
            operation: "wait for",
            identity: identity.clone(),
            source,
        })?;
    }
    let proof = match judge(dir).map_err(judge_failed(dir))? {
        Judgement::Gone(proof) => proof,
        // Its descriptor just said that it ended.
        Judgement::Alive(_) | Judgement::Starting => GoneProof::absent(identity.clone()),
    };
    Ok(settle(dir, proof).await)
}

fn judge_failed(dir: &ProcessDir) -> impl FnOnce(JudgeError) -> KillError {
    let dir = dir.path().to_owned();
    move |source| KillError::Judge { dir, source }
}
