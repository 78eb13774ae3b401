//! What certificates say, and for how long.

use std::path::{Path, PathBuf};

use serde::Serialize;
use vmferry_tls::{CA_FILE, Certificate, Loaded, QemuEnd, Use, file_name, key_name, read_pem};

use super::{read_text, rfc3339, usage};
use crate::failure::Failure;

/// Fewer days than these are few.
const SOON_DAYS: i64 = 14;

/// The certificates of a file or directory.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    pub(crate) path: PathBuf,
    /// Why an agent or planner could not use this directory; empty if one could.
    pub(crate) problem: String,
    pub(crate) certificates: Vec<Row>,
}

/// One certificate.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    pub(crate) file: String,
    /// host, planner, operator or authority.
    pub(crate) role: String,
    /// Its URI; empty for an authority.
    pub(crate) identity: String,
    pub(crate) subject: String,
    pub(crate) issuer: String,
    pub(crate) serial: String,
    /// SHA-256, in hexadecimal.
    pub(crate) fingerprint: String,
    pub(crate) not_before: String,
    pub(crate) not_after: String,
    pub(crate) days_left: i64,
    /// valid, ends_soon, ended.
    pub(crate) state: String,
    /// Where else it is found.
    pub(crate) names: Vec<String>,
}

/// Reads the certificates of a file or directory.
pub(crate) fn show(path: &Path, now: u64) -> Result<Shown, Failure> {
    let operation = format!("show {}", path.display());
    let files = if path.is_dir() { files_in(path) } else { vec![path.to_owned()] };
    if files.is_empty() {
        let problem = format!(
            "there is no certificate in it; `vmferry pki issue` puts one there, as {CA_FILE} and others"
        );
        return Err(usage(&operation, problem));
    }
    let mut certificates = Vec::new();
    for file in &files {
        let text = read_text(&operation, file)?;
        let unusable = |error: &dyn std::fmt::Display| {
            usage(&operation, format!("{}: {error}", file.display()))
        };
        for der in read_pem(text.as_bytes()).map_err(|error| unusable(&error))? {
            let says = Certificate::read(&der).map_err(|error| unusable(&error))?;
            certificates.push(row(file, &says, now));
        }
    }
    Ok(Shown { problem: problem(path, now), path: path.to_owned(), certificates })
}

/// The files that have certificates in them; what is a link to another one is shown once.
fn files_in(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for name in [CA_FILE.to_owned(), file_name(QemuEnd::Server), file_name(QemuEnd::Client)] {
        let path = dir.join(name);
        let Ok(real) = path.canonicalize() else { continue };
        if !found.iter().any(|known| known.canonicalize().is_ok_and(|known| known == real)) {
            found.push(path);
        }
    }
    found
}

fn problem(dir: &Path, now: u64) -> String {
    let serves = dir.join(key_name(QemuEnd::Server)).exists();
    if !dir.join(key_name(QemuEnd::Client)).exists() {
        return String::new();
    }
    let usage = if serves { Use::Daemon } else { Use::Client };
    match Loaded::read(dir, usage, now) {
        Ok(_) => String::new(),
        Err(error) => std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}")),
    }
}

fn row(file: &Path, says: &Certificate, now: u64) -> Row {
    let days_left = says.days_left(now);
    let role = match &says.identity {
        Some(identity) => identity.role().label(),
        None if says.is_authority => "authority",
        None => "",
    };
    let state = if now > says.not_after {
        "ended"
    } else if days_left < SOON_DAYS {
        "ends_soon"
    } else {
        "valid"
    };
    let addresses = says.addresses.iter().map(ToString::to_string);
    Row {
        file: file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        role: role.to_owned(),
        identity: says.identity.as_ref().map(ToString::to_string).unwrap_or_default(),
        subject: says.subject.clone(),
        issuer: says.issuer.clone(),
        serial: says.serial.clone(),
        fingerprint: says.fingerprint.clone(),
        not_before: rfc3339(says.not_before),
        not_after: rfc3339(says.not_after),
        days_left,
        state: state.to_owned(),
        names: says.dns_names.iter().cloned().chain(addresses).collect(),
    }
}
