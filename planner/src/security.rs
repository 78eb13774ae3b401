//! This planner's certificates.

use std::path::PathBuf;

use vmferry_tls::{Identity, Live, LoadError, Role, Security, Use};

use crate::config::{RestSecurity, Tls};

/// The certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    /// Their files cannot.
    #[error("load the certificates of this planner")]
    Load(#[from] LoadError),
    /// They are somebody else's.
    #[error(
        "the certificates in {path} are of {found}, and this is a planner: make them with `vmferry pki issue planner NAME`",
        path = dir.display()
    )]
    NoPlanner {
        /// Where they are.
        dir: PathBuf,
        /// Whose they are.
        found: Identity,
    },
}

/// Loads the certificates, and returns how gRPC and REST are protected.
///
/// # Errors
///
/// Fails where there are to be certificates and they cannot be used, or are no planner's.
pub fn open(tls: Option<&Tls>) -> Result<(Security, Security), SecurityError> {
    let Some(tls) = tls else { return Ok((Security::PlainText, Security::PlainText)) };
    let live = Live::open(&tls.dir, Use::Daemon)?;
    let found = live.identity();
    if found.role() != Role::Planner {
        return Err(SecurityError::NoPlanner { dir: tls.dir.clone(), found });
    }
    let rest = match tls.rest {
        RestSecurity::Tls => Security::Tls(live.clone()),
        RestSecurity::PlainOnLoopback => Security::PlainText,
    };
    Ok((Security::Tls(live), rest))
}
