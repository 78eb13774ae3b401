//! Proof that a process is gone.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::identity::ProcessIdentity;
use super::record::ExitRecord;

/// Proof that a process is gone and never comes back.
///
/// There is no way to make one but to find [`Evidence`]. Functions that need
/// the proof take it as an argument, so that nobody decides without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct GoneProof(Evidence);

/// What a [`GoneProof`] rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "evidence", rename_all = "snake_case")]
pub enum Evidence {
    /// The shim, its parent, recorded the exit.
    Recorded(ExitRecord),
    /// Its pid and start time are absent under the boot it was started in.
    Absent {
        /// Who is absent.
        identity: ProcessIdentity,
    },
    /// The host was booted since.
    NewBoot {
        /// Who was there before.
        identity: ProcessIdentity,
        /// The boot id of now.
        boot_id: String,
    },
}

impl GoneProof {
    pub(super) fn recorded(record: ExitRecord) -> Self {
        Self(Evidence::Recorded(record))
    }

    pub(super) fn absent(identity: ProcessIdentity) -> Self {
        Self(Evidence::Absent { identity })
    }

    pub(super) fn new_boot(identity: ProcessIdentity, boot_id: String) -> Self {
        Self(Evidence::NewBoot { identity, boot_id })
    }

    /// Returns what it rests on.
    #[must_use]
    pub fn evidence(&self) -> &Evidence {
        &self.0
    }

    /// Returns how the process ended, if that is known.
    #[must_use]
    pub fn exit_record(&self) -> Option<&ExitRecord> {
        match &self.0 {
            Evidence::Recorded(record) => Some(record),
            Evidence::Absent { .. } | Evidence::NewBoot { .. } => None,
        }
    }
}

impl fmt::Display for GoneProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Evidence::Recorded(record) => match &record.identity {
                Some(identity) => write!(f, "{identity} {}", record.exit),
                None => write!(f, "the process {}", record.exit),
            },
            Evidence::Absent { identity } => write!(f, "{identity} is absent"),
            Evidence::NewBoot { identity, .. } => {
                write!(f, "{identity} was there before the host was booted")
            }
        }
    }
}
