//! The way into a QEMU whose main loop is stuck.

use std::time::Duration;

use serde::Deserialize as _;
use serde_json::Value;
use tokio::sync::Mutex;
use vmferry_qmp::Command;

use super::record::ProcessDir;
use crate::monitor::{Monitor, MonitorError};
use crate::shim::{ShimClient, ShimError};

/// An out-of-band command failed on every way there is.
#[derive(Debug, thiserror::Error)]
pub enum OobError {
    /// The shim is there, and says why not.
    #[error("execute `{command}` out of band over the shim")]
    Shim {
        /// The command.
        command: String,
        /// Why not.
        source: ShimError,
    },
    /// The shim is gone, and the second monitor did not serve us either.
    #[error("execute `{command}` out of band without the shim")]
    Direct {
        /// The command.
        command: String,
        /// Why not.
        source: MonitorError,
    },
    /// The answer is not what we expect.
    #[error("the answer to `{command}` was not understood: {reply}")]
    Decode {
        /// The command.
        command: String,
        /// The answer's beginning.
        reply: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// Executes out of band, over the shim while there is one.
///
/// The shim holds the second monitor. If it was killed the monitor is free
/// again, so it is taken from here and then kept: the next hang may not
/// greet anybody any more.
#[derive(Debug)]
pub struct OutOfBand {
    dir: ProcessDir,
    direct: Mutex<Option<Monitor>>,
}

impl OutOfBand {
    /// Returns the way into the QEMU of `dir`; nothing is connected yet.
    #[must_use]
    pub fn of(dir: ProcessDir) -> Self {
        Self::new(dir)
    }

    pub(super) fn new(dir: ProcessDir) -> Self {
        Self { dir, direct: Mutex::new(None) }
    }

    /// Takes the second monitor if no shim is there to hold it.
    pub(super) async fn prepare(&self, deadline: Duration) -> Result<(), MonitorError> {
        // Whoever holds the lock is a shim, and the monitor is its own.
        if matches!(self.dir.try_lock(), Ok(Some(_))) {
            self.connect(&mut *self.direct.lock().await, deadline).await?;
        }
        Ok(())
    }

    /// Executes a command.
    ///
    /// # Errors
    ///
    /// See [`OobError`].
    pub async fn execute<C: Command>(
        &self,
        command: C,
        deadline: Duration,
    ) -> Result<C::Ok, OobError> {
        let decode_error = |source, reply: String| OobError::Decode {
            command: C::NAME.to_owned(),
            reply: reply.chars().take(200).collect(),
            source,
        };
        let arguments =
            serde_json::to_value(&command).map_err(|error| decode_error(error, String::new()))?;
        let reply = self.execute_raw(C::NAME, arguments, deadline).await?;
        C::Ok::deserialize(&reply).map_err(|error| decode_error(error, reply.to_string()))
    }

    /// Executes a command by name.
    ///
    /// # Errors
    ///
    /// See [`OobError`].
    pub async fn execute_raw(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, OobError> {
        let shim = ShimClient::new(&self.dir);
        match shim.oob(command, arguments.clone(), deadline).await {
            Ok(value) => Ok(value),
            // No shim, or one that was just killed. All four commands may come
            // twice, and while a shim lives the other way is not greeted.
            Err(ShimError::Connect { .. } | ShimError::Broken { .. }) => {
                self.execute_directly(command, arguments, deadline).await
            }
            Err(source) => Err(OobError::Shim { command: command.to_owned(), source }),
        }
    }

    async fn execute_directly(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, OobError> {
        let failed = |source| OobError::Direct { command: command.to_owned(), source };
        let monitor = {
            let mut direct = self.direct.lock().await;
            self.connect(&mut direct, deadline).await.map_err(failed)?
        };
        monitor.execute_raw_oob(command, arguments, deadline).await.map_err(failed)
    }

    async fn connect(
        &self,
        direct: &mut Option<Monitor>,
        deadline: Duration,
    ) -> Result<Monitor, MonitorError> {
        if let Some(monitor) = direct.as_ref()
            && monitor.close_cause().is_none()
        {
            return Ok(monitor.clone());
        }
        let monitor = Monitor::connect(&self.dir.oob_socket(), deadline).await?;
        Ok(direct.insert(monitor).clone())
    }
}
