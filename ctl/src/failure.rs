//! Why a command did not end well, and the exit code that says so.

use serde::Serialize;
use vmferry_proto::v1::{Blocker, ErrorDetail};

/// What kept a command from ending well.
///
/// Each says what was being done, and what to do where someone can do something.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The command line, or a file or name that it gives, is wrong.
    #[error("{operation}: {problem}")]
    Usage { operation: String, problem: String },
    /// No answer came.
    #[error("{operation}: no answer from the planner at {planner}: {problem}")]
    Unreachable { operation: String, planner: String, problem: String, advice: String },
    /// The planner answered with an error.
    #[error("{operation}: {message}")]
    Refused { operation: String, refusal: Refusal, message: String, detail: Box<ErrorDetail> },
    /// Nothing was begun, or it ended before anything was touched.
    #[error("{operation}: {problem}")]
    Blocked { operation: String, problem: String },
    /// The wait is over, the work is not.
    #[error("{operation}: not ended within {waited}; it goes on: {standing}")]
    WaitTimedOut { operation: String, waited: String, standing: String, advice: String },
    /// The guest is where it was.
    #[error("{operation}: rolled back: {cause}")]
    RolledBack { operation: String, cause: String },
    /// Neither way is safe, or a guest is lost.
    #[error("{operation}: needs a human: {cause}")]
    NeedsHuman { operation: String, cause: String, advice: String },
    /// The work itself failed and says why.
    #[error("{operation}: {cause}")]
    Failed { operation: String, cause: String },
}

/// What kind of answer a planner's error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// What was asked for makes no sense, or names what is not there.
    Wrong,
    /// It makes sense and cannot be done now.
    Blocked,
    /// The planner failed.
    Broken,
}

/// The JSON form of a failure, one line on standard error.
#[derive(Debug, Serialize)]
struct Report<'a> {
    code: &'a str,
    message: String,
    field: &'a str,
    blockers: &'a [Blocker],
    advice: &'a str,
    exit_code: u8,
}

impl Failure {
    /// Returns the process's exit code.
    pub(crate) const fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Failed { .. } => 1,
            Self::Refused { refusal: Refusal::Broken, .. } => 1,
            Self::Usage { .. } | Self::Refused { refusal: Refusal::Wrong, .. } => 2,
            Self::Blocked { .. } | Self::Refused { refusal: Refusal::Blocked, .. } => 3,
            Self::WaitTimedOut { .. } => 4,
            Self::RolledBack { .. } => 5,
            Self::NeedsHuman { .. } => 6,
        }
    }

    /// Returns the text for people: what failed, every reason, what to do.
    pub(crate) fn report(&self) -> String {
        let mut text = format!("error: {self}");
        let mut line = |line: String| {
            text.push('\n');
            text.push_str(&line);
        };
        for blocker in self.blockers() {
            let on = match blocker.host_id.as_str() {
                "" => String::new(),
                host if blocker.message.contains(&format!("host {host}")) => String::new(),
                host => format!(" (host {host})"),
            };
            line(format!("  {}{on}: {}", blocker.code, blocker.message));
        }
        if !self.advice().is_empty() {
            line(format!("hint: {}", self.advice()));
        }
        text
    }

    /// Returns the JSON form.
    pub(crate) fn report_json(&self) -> String {
        let report = Report {
            code: self.code(),
            message: self.to_string(),
            field: self.detail().map_or("", |detail| &detail.field),
            blockers: self.blockers(),
            advice: self.advice(),
            exit_code: self.exit_code(),
        };
        serde_json::to_string(&report).unwrap_or_else(|_| self.to_string())
    }

    fn detail(&self) -> Option<&ErrorDetail> {
        if let Self::Refused { detail, .. } = self { Some(detail) } else { None }
    }

    fn blockers(&self) -> &[Blocker] {
        self.detail().map_or(&[], |detail| &detail.blockers)
    }

    fn code(&self) -> &str {
        match self {
            Self::Usage { .. } => "usage",
            Self::Unreachable { .. } => "unreachable",
            Self::Refused { detail, .. } if !detail.code.is_empty() => &detail.code,
            Self::Refused { refusal, .. } => match refusal {
                Refusal::Wrong => "invalid",
                Refusal::Blocked => "blocked",
                Refusal::Broken => "internal",
            },
            Self::Blocked { .. } => "blocked",
            Self::WaitTimedOut { .. } => "wait_timed_out",
            Self::RolledBack { .. } => "rolled_back",
            Self::NeedsHuman { .. } => "needs_human",
            Self::Failed { .. } => "failed",
        }
    }

    fn advice(&self) -> &str {
        match self {
            Self::Unreachable { advice, .. }
            | Self::WaitTimedOut { advice, .. }
            | Self::NeedsHuman { advice, .. } => advice,
            Self::Refused { detail, .. } if !detail.blockers.is_empty() => {
                "mend what is listed and give the command again; nothing was changed"
            }
            Self::Refused { .. }
            | Self::Usage { .. }
            | Self::Blocked { .. }
            | Self::RolledBack { .. }
            | Self::Failed { .. } => "",
        }
    }
}
