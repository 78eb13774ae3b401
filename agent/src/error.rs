//! Why a command was not carried out, in the words of the wire.

use std::error::Error;

use tonic::{Code, Status};
use vmferry_proto::v1::{Blocker, ErrorDetail};
use vmferry_types::{FenceRefusal, MigrationId};

/// Why a command was not carried out.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The fence (rule R2).
    #[error("{}", refusal(*.0))]
    Fence(FenceRefusal),
    /// The agent has not found out yet what runs here.
    #[error("the agent is still learning what runs of this VM; ask again in a moment")]
    Learning,
    /// The process is there and does not answer.
    #[error("the QEMU of this VM does not answer: {0}")]
    Unresponsive(String),
    /// The journal proves nothing.
    #[error("the journal cannot say anything of this VM: {0}")]
    Unreadable(String),
    /// Nothing is known of it.
    #[error("this host knows no such VM")]
    UnknownVm,
    /// A field of the request is wrong.
    #[error("{field}: {message}")]
    Invalid { field: String, message: String },
    /// It cannot be done here, for all of these reasons.
    #[error("cannot be done here: {}", .0.iter().map(|blocker| blocker.message.as_str()).collect::<Vec<_>>().join("; "))]
    Blocked(Vec<Blocker>),
    /// It does not fit to what is.
    #[error("{0}")]
    WrongState(String),
    /// Somebody else uses the disk.
    #[error(
        "the disk {path} is in use by another process ({holder}): stop the QEMU that holds it first"
    )]
    DiskInUse { path: String, holder: String },
    /// Another admission has not ended by the journal's word.
    #[error(
        "migration {0} of this VM is open here: let whoever began it end it, or go on with it under its id"
    )]
    MigrationOpen(MigrationId),
    /// There is no room for one more VM that nothing was ever done to.
    #[error(
        "{0} VMs were claimed here and never used, all of them lately: end whoever claims them, or wait"
    )]
    TooManyVms(usize),
    /// The source gave the transfer up.
    #[error("the source gave this transfer up: {0}")]
    GaveUp(String),
    /// The receiver has ended.
    #[error("the receiver is gone: {0}")]
    ReceiverGone(String),
    /// Something here failed.
    #[error("{operation}: {cause}")]
    Failed { operation: &'static str, cause: String },
}

impl CommandError {
    pub(crate) fn failed(operation: &'static str, error: &(dyn Error + 'static)) -> Self {
        Self::Failed { operation, cause: chain(error) }
    }

    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), message: message.into() }
    }

    pub(crate) fn wrong_state(message: impl Into<String>) -> Self {
        Self::WrongState(message.into())
    }

    const fn code(&self) -> (&'static str, Code) {
        match self {
            Self::Fence(FenceRefusal::StaleGeneration { .. }) => {
                ("stale_generation", Code::Aborted)
            }
            Self::Fence(FenceRefusal::StaleClaim { .. }) => ("stale_claim", Code::Aborted),
            Self::Fence(FenceRefusal::StepReused { .. }) => ("step_reused", Code::Aborted),
            Self::Fence(FenceRefusal::Leap { .. }) => ("leap", Code::InvalidArgument),
            Self::Learning => ("learning", Code::Unavailable),
            Self::Unresponsive(_) => ("unresponsive", Code::Unavailable),
            Self::Unreadable(_) => ("unreadable", Code::Unavailable),
            Self::UnknownVm => ("unknown_vm", Code::NotFound),
            Self::Invalid { .. } => ("invalid", Code::InvalidArgument),
            Self::Blocked(_) => ("blocked", Code::FailedPrecondition),
            Self::WrongState(_) => ("wrong_state", Code::FailedPrecondition),
            Self::DiskInUse { .. } => ("disk_in_use", Code::FailedPrecondition),
            Self::MigrationOpen(_) => ("migration_open", Code::FailedPrecondition),
            Self::TooManyVms(_) => ("too_many_vms", Code::ResourceExhausted),
            Self::GaveUp(_) => ("gave_up", Code::FailedPrecondition),
            Self::ReceiverGone(_) => ("receiver_gone", Code::FailedPrecondition),
            Self::Failed { .. } => ("internal", Code::Internal),
        }
    }

    /// Returns the stable code.
    pub(crate) const fn label(&self) -> &'static str {
        self.code().0
    }
}

fn refusal(refusal: FenceRefusal) -> String {
    match refusal {
        FenceRefusal::StaleGeneration { known } => {
            format!("the VM is owned under generation {known} already")
        }
        FenceRefusal::StaleClaim { known, step } => {
            format!("a newer command is known: claim {known}, step {step}")
        }
        FenceRefusal::StepReused { step } => {
            format!("step {step} was another command")
        }
        FenceRefusal::Leap { field, generation, claim, step } => {
            format!(
                "{field}: is further than anybody counts above what is known: generation {generation}, claim {claim}, step {step}"
            )
        }
    }
}

/// Writes an error with all its causes.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        // Some errors print their cause themselves.
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

impl From<CommandError> for Status {
    fn from(error: CommandError) -> Self {
        let (label, code) = error.code();
        let message = error.to_string();
        let mut detail = ErrorDetail { code: label.to_owned(), ..ErrorDetail::default() };
        match error {
            CommandError::Fence(FenceRefusal::StaleGeneration { known }) => {
                detail.known_generation = known.value();
            }
            CommandError::Fence(FenceRefusal::StaleClaim { known, step }) => {
                detail.known_claim = known.value();
                detail.known_step = step.value();
            }
            CommandError::Fence(FenceRefusal::StepReused { step }) => {
                detail.known_step = step.value();
            }
            CommandError::Fence(FenceRefusal::Leap { field, generation, claim, step }) => {
                field.clone_into(&mut detail.field);
                detail.known_generation = generation.value();
                detail.known_claim = claim.value();
                detail.known_step = step.value();
            }
            CommandError::Invalid { field, .. } => detail.field = field,
            CommandError::Blocked(blockers) => detail.blockers = blockers,
            CommandError::Learning
            | CommandError::Unresponsive(_)
            | CommandError::Unreadable(_)
            | CommandError::UnknownVm
            | CommandError::WrongState(_)
            | CommandError::DiskInUse { .. }
            | CommandError::MigrationOpen(_)
            | CommandError::TooManyVms(_)
            | CommandError::GaveUp(_)
            | CommandError::ReceiverGone(_)
            | CommandError::Failed { .. } => {}
        }
        vmferry_proto::refusal::status(code, &message, detail)
    }
}
