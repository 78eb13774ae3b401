//! Talks to a shim.
//!
//! Each request has a connection of its own, so a client has no state that
//! could go stale, and a dropped request leaves nothing behind.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::protocol::{
    Answer, Envelope, Failure, LINE_BYTES_MAX, Outcome, Request, Response, ShimStatus,
};
use crate::process::{ExitRecord, ProcessDir};

/// How much longer than the command itself a shim may take to answer.
const ANSWER_MARGIN: Duration = Duration::from_secs(1);

/// A shim could not be asked, or could not do it.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// Nobody serves the socket: the shim is gone, or not there yet.
    #[error("connect to the shim at {path}", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke before the answer.
    #[error("the shim's connection broke before it answered `{request}`")]
    Broken {
        /// What was asked.
        request: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No answer in time.
    #[error("the shim said nothing for {waited:?} after `{request}`")]
    Silent {
        /// What was asked.
        request: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// The answer makes no sense.
    #[error("the shim's answer to `{request}` was not understood: {answer}")]
    Answer {
        /// What was asked.
        request: &'static str,
        /// The answer's beginning.
        answer: String,
    },
    /// The shim says that it could not.
    #[error("the shim could not do `{request}`: {failure}")]
    Failed {
        /// What was asked.
        request: &'static str,
        /// Why not.
        failure: Failure,
    },
}

/// Asks one shim.
#[derive(Clone, Debug)]
pub struct ShimClient {
    path: PathBuf,
}

impl ShimClient {
    /// Returns a client for the shim of `dir`; nothing is connected yet.
    #[must_use]
    pub fn new(dir: &ProcessDir) -> Self {
        Self { path: dir.shim_socket() }
    }

    /// Asks who the process is and what was seen of it.
    ///
    /// # Errors
    ///
    /// See [`ShimError`]; so for all that follow.
    pub async fn status(&self, deadline: Duration) -> Result<ShimStatus, ShimError> {
        let answer = self.ask(Request::Status, deadline).await?;
        let Answer::Status(status) = answer else {
            return Err(unexpected("status", &answer));
        };
        Ok(status)
    }

    /// Executes an out-of-band command.
    ///
    /// # Errors
    ///
    /// As [`ShimClient::status`].
    pub async fn oob(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, ShimError> {
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let request = Request::Oob { command: command.to_owned(), arguments, deadline_ms };
        let answer = self.ask(request, deadline.saturating_add(ANSWER_MARGIN)).await?;
        let Answer::Returned(value) = answer else {
            return Err(unexpected("oob", &answer));
        };
        Ok(value)
    }

    /// Kills the process and returns its exit, once that is on the disk.
    ///
    /// # Errors
    ///
    /// As [`ShimClient::status`].
    pub async fn kill(&self, deadline: Duration) -> Result<ExitRecord, ShimError> {
        let answer = self.ask(Request::Kill, deadline).await?;
        let Answer::Exit(record) = answer else {
            return Err(unexpected("kill", &answer));
        };
        Ok(record)
    }

    /// Waits for the exit, as long as it takes.
    ///
    /// # Errors
    ///
    /// As [`ShimClient::status`], above all [`ShimError::Broken`] when the
    /// shim itself goes. That says nothing about the process.
    pub async fn wait(&self) -> Result<ExitRecord, ShimError> {
        let answer = self.converse(Request::Wait).await?;
        let Answer::Exit(record) = answer else {
            return Err(unexpected("wait", &answer));
        };
        Ok(record)
    }

    /// Returns the last `bytes` of what the process said on stderr.
    ///
    /// # Errors
    ///
    /// As [`ShimClient::status`].
    pub async fn stderr_tail(&self, bytes: u64, deadline: Duration) -> Result<String, ShimError> {
        let answer = self.ask(Request::StderrTail { bytes }, deadline).await?;
        let Answer::StderrTail(text) = answer else {
            return Err(unexpected("stderr_tail", &answer));
        };
        Ok(text)
    }

    /// Lets the shim go: its exit record was read. Refused while QEMU lives.
    ///
    /// # Errors
    ///
    /// As [`ShimClient::status`].
    pub async fn bye(&self, deadline: Duration) -> Result<(), ShimError> {
        let answer = self.ask(Request::Bye, deadline).await?;
        let Answer::Bye = answer else {
            return Err(unexpected("bye", &answer));
        };
        Ok(())
    }

    async fn ask(&self, request: Request, deadline: Duration) -> Result<Answer, ShimError> {
        let label = request.label();
        timeout(deadline, self.converse(request))
            .await
            .unwrap_or(Err(ShimError::Silent { request: label, waited: deadline }))
    }

    async fn converse(&self, request: Request) -> Result<Answer, ShimError> {
        let label = request.label();
        let broken = |source| ShimError::Broken { request: label, source };
        let mut stream = UnixStream::connect(&self.path)
            .await
            .map_err(|source| ShimError::Connect { path: self.path.clone(), source })?;
        let mut line = serde_json::to_vec(&Envelope { id: 1, request })
            .map_err(|error| broken(io::Error::other(error)))?;
        line.push(b'\n');
        stream.write_all(&line).await.map_err(broken)?;
        let mut answer = Vec::new();
        let mut reader = BufReader::new(stream).take(LINE_BYTES_MAX as u64);
        reader.read_until(b'\n', &mut answer).await.map_err(broken)?;
        if answer.last() != Some(&b'\n') {
            return Err(broken(io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        let response: Response =
            serde_json::from_slice(&answer).map_err(|_| ShimError::Answer {
                request: label,
                answer: String::from_utf8_lossy(&answer).chars().take(200).collect(),
            })?;
        match response.outcome {
            Outcome::Ok(answer) => Ok(answer),
            Outcome::Error(failure) => Err(ShimError::Failed { request: label, failure }),
        }
    }
}

impl Request {
    fn label(&self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Oob { .. } => "oob",
            Self::Kill => "kill",
            Self::Wait => "wait",
            Self::StderrTail { .. } => "stderr_tail",
            Self::Bye => "bye",
        }
    }
}

fn unexpected(request: &'static str, answer: &Answer) -> ShimError {
    ShimError::Answer { request, answer: format!("{answer:?}").chars().take(200).collect() }
}
