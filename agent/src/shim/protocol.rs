//! What is said on `shim.sock`: a JSON line each way, matched by id.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::process::{ExitRecord, ProcessIdentity};

/// How long one line may be, in bytes. Requests are small; answers carry at
/// most a piece of QEMU's log.
pub(crate) const LINE_BYTES_MAX: usize = 1 << 20;

/// A request and the id that its answer will carry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Envelope {
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) request: Request,
}

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Who is it, and what was seen of it?
    Status,
    /// Execute this out of band.
    Oob {
        command: String,
        #[serde(default)]
        arguments: Value,
        deadline_ms: u64,
    },
    /// Send SIGKILL and answer once the exit is recorded.
    Kill,
    /// Answer once the exit is recorded.
    Wait,
    /// What did it say on stderr?
    StderrTail { bytes: u64 },
    /// The exit was read and written down elsewhere; the shim may go.
    Bye,
}

/// The answer to the request with the same id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Response {
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// How a request went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Ok(Answer),
    Error(Failure),
}

/// What a client is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Status(ShimStatus),
    Returned(Value),
    Exit(ExitRecord),
    StderrTail(String),
    Bye,
}

/// What the shim knows of its QEMU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShimStatus {
    /// Who it is. `None` if it could not be started.
    pub identity: Option<ProcessIdentity>,
    /// How it ended. `None` while it lives.
    pub exit: Option<ExitRecord>,
    /// Whether the out-of-band monitor stands.
    pub oob: OobState,
    /// The last migration events, oldest first. They are seen even while the
    /// agent is away, and while QEMU's main loop is stuck.
    pub migrations: Vec<MigrationSeen>,
}

/// Whether the shim has its way into QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OobState {
    /// Negotiated and open.
    Connected,
    /// Not yet, or not any more.
    Disconnected,
}

/// One migration event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationSeen {
    /// When, by QEMU's clock, in microseconds since 1970; `None` if it had none.
    pub at_us: Option<u64>,
    /// QEMU's word for the new status.
    pub status: vmferry_qmp::MigrationStatus,
}

/// Why a request could not be met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Failure {
    /// QEMU refused the command.
    #[error("QEMU refused it: {class}: {description}")]
    Refused {
        /// QEMU's error class.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// QEMU said nothing in time; the command may have been executed.
    #[error("QEMU's out-of-band monitor said nothing for {waited_ms} ms")]
    Silent {
        /// How long was waited, in milliseconds.
        waited_ms: u64,
    },
    /// The out-of-band monitor is not connected.
    #[error("the out-of-band monitor is not connected: {reason}")]
    Disconnected {
        /// What is known about why.
        reason: String,
    },
    /// QEMU does not execute this command out of band.
    #[error("`{command}` is not an out-of-band command")]
    NotOutOfBand {
        /// The command.
        command: String,
    },
    /// The shim may not go: its QEMU still lives.
    #[error("QEMU still runs")]
    StillRunning,
    /// The request was not understood.
    #[error("the shim did not understand the request: {reason}")]
    BadRequest {
        /// What was wrong.
        reason: String,
    },
    /// The operating system refused.
    #[error("{operation}: {reason}")]
    System {
        /// What was being done.
        operation: String,
        /// The operating system's text.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_and_answers_are_flat_lines() {
        let envelope = Envelope { id: 3, request: Request::Kill };
        assert_eq!(serde_json::to_value(&envelope).unwrap(), json!({"id": 3, "op": "kill"}));
        let read: Envelope = serde_json::from_value(json!({
            "id": 4, "op": "oob", "command": "query-yank", "deadline_ms": 5
        }))
        .unwrap();
        assert!(matches!(read.request, Request::Oob { deadline_ms: 5, .. }));
        let response = Response { id: 3, outcome: Outcome::Error(Failure::StillRunning) };
        let value = serde_json::to_value(&response).unwrap();
        assert_eq!(value, json!({"id": 3, "error": {"kind": "still_running"}}));
        assert_eq!(serde_json::from_value::<Response>(value).unwrap(), response);
    }
}
