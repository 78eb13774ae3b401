//! The authority of a fleet and the identities that it signs, as files.
//!
//! Everything here works on files of this machine and asks nobody. What is written lies as agents,
//! planners, this command line and QEMU look for it; see [`vmferry_tls`].

mod show;

use std::path::{Path, PathBuf};

use serde::Serialize;
use vmferry_tls::issue::{
    Authority, CA_KEY_FILE, IssueError, Names, Validity, files_of, write_authority, write_identity,
};
use vmferry_tls::{CA_FILE, Certificate, Identity, QemuEnd, file_name, read_pem};

use crate::failure::Failure;

pub(crate) use self::show::{Shown, show};

/// What was made, or made anew.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Made {
    /// Whose it is; empty for an authority.
    pub(crate) identity: String,
    /// Where its files are.
    pub(crate) dir: PathBuf,
    /// RFC 3339, UTC.
    pub(crate) not_after: String,
    /// What was there before and is no more.
    pub(crate) replaced: Vec<String>,
    /// What is to be done next, or has to be known.
    pub(crate) notes: Vec<String>,
}

/// Whether files that are there may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// They stay, and the command fails.
    Keep,
    /// They go, and that is said.
    Replace,
}

/// Makes the authority of a fleet.
pub(crate) fn init(
    dir: &Path,
    name: &str,
    validity: Validity,
    existing: Existing,
) -> Result<Made, Failure> {
    let operation = format!("make an authority in {}", dir.display());
    let found = present(dir, &[CA_FILE, CA_KEY_FILE]);
    if !found.is_empty() && existing == Existing::Keep {
        return Err(usage(
            &operation,
            format!(
                "{} is there already, and every certificate of the fleet hangs on it; --replace makes \
                 a new one beside which the old one is still trusted",
                found.join(" and ")
            ),
        ));
    }
    let made = Authority::make(name, validity).map_err(|error| failed(&operation, &error))?;
    let says = made.says().map_err(|error| failed(&operation, &error))?;
    let mut notes = vec![format!(
        "keep {} where certificates are made; hosts and planners never need it",
        dir.join(CA_KEY_FILE).display()
    )];
    let mut written = made;
    if !found.is_empty() {
        // Whoever has a certificate of the old one is to be believed until it has a new one.
        let old = read_text(&operation, &dir.join(CA_FILE)).unwrap_or_default();
        written.certificate_pem.push_str(&old);
        notes.push(format!(
            "the old authority is still in {CA_FILE}: run `vmferry pki renew DIR --trust-only` for every \
             identity, then `vmferry pki renew DIR`; then remove the old one from the end of {CA_FILE} and \
             run `--trust-only` once more"
        ));
    }
    write_authority(dir, &written).map_err(|error| failed(&operation, &error))?;
    Ok(Made {
        identity: String::new(),
        dir: dir.to_owned(),
        not_after: rfc3339(says.not_after),
        replaced: found,
        notes,
    })
}

/// An identity that is to be made.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    /// Where the authority is.
    pub(crate) pki: &'a Path,
    /// Whose it is.
    pub(crate) identity: &'a Identity,
    /// Where else it is found.
    pub(crate) names: &'a Names,
    /// Where it is put.
    pub(crate) out: &'a Path,
    /// How long it counts.
    pub(crate) validity: Validity,
}

/// Makes an identity.
pub(crate) fn issue(order: &Order<'_>, existing: Existing) -> Result<Made, Failure> {
    let Order { identity, out, .. } = *order;
    let operation = format!("issue {identity}");
    check_names(&operation, order.names)?;
    let files = files_of(identity.role());
    let found = present(out, &files.iter().map(String::as_str).collect::<Vec<_>>());
    if !found.is_empty() && existing == Existing::Keep {
        return Err(usage(
            &operation,
            format!(
                "{} has {} already; `vmferry pki renew {}` makes a new certificate for the same \
                 identity, --replace for this one",
                out.display(),
                found.join(", "),
                out.display()
            ),
        ));
    }
    put(&operation, order, found)
}

/// Makes a new key and certificate for an identity that is there.
pub(crate) fn renew(pki: &Path, dir: &Path, now: u64, days: Option<u32>) -> Result<Made, Failure> {
    const DAY: u64 = 86_400;
    let operation = format!("renew {}", dir.display());
    let (identity, says) = own_certificate(&operation, dir)?;
    let names = Names {
        dns: says.dns_names.iter().filter(|name| **name != identity.dns_name()).cloned().collect(),
        addresses: says.addresses.clone(),
    };
    // As long as it was.
    let span = says.not_after.saturating_sub(says.not_before) / DAY;
    let days = days.or_else(|| u32::try_from(span).ok()).unwrap_or(1).max(1);
    let files = files_of(identity.role());
    let found = present(dir, &files.iter().map(String::as_str).collect::<Vec<_>>());
    let validity = Validity { now, days };
    put(&operation, &Order { pki, identity: &identity, names: &names, out: dir, validity }, found)
}

/// Gives an identity the authorities that are trusted now, and nothing else.
pub(crate) fn trust(pki: &Path, dir: &Path) -> Result<Made, Failure> {
    let operation = format!("give {} the authorities of {}", dir.display(), pki.display());
    let (identity, says) = own_certificate(&operation, dir)?;
    let authority = read_authority(&operation, pki)?;
    vmferry_tls::issue::write_trust(dir, &authority.certificate_pem)
        .map_err(|error| failed(&operation, &error))?;
    Ok(Made {
        identity: identity.to_string(),
        dir: dir.to_owned(),
        not_after: rfc3339(says.not_after),
        replaced: vec![CA_FILE.to_owned()],
        notes: Vec::new(),
    })
}

fn put(operation: &str, order: &Order<'_>, replaced: Vec<String>) -> Result<Made, Failure> {
    let Order { identity, names, out: dir, validity, .. } = *order;
    let authority = read_authority(operation, order.pki)?;
    let issued =
        authority.issue(identity, names, validity).map_err(|error| failed(operation, &error))?;
    write_identity(dir, &authority.certificate_pem, &issued)
        .map_err(|error| failed(operation, &error))?;
    let wanted = validity.now.saturating_add(u64::from(validity.days).saturating_mul(86_400));
    let mut notes = Vec::new();
    if issued.not_after < wanted {
        notes.push("it ends with its authority, earlier than asked for".to_owned());
    }
    Ok(Made {
        identity: identity.to_string(),
        dir: dir.to_owned(),
        not_after: rfc3339(issued.not_after),
        replaced,
        notes,
    })
}

fn own_certificate(operation: &str, dir: &Path) -> Result<(Identity, Certificate), Failure> {
    let path = dir.join(file_name(QemuEnd::Client));
    let text = read_text(operation, &path)?;
    let unusable = |problem: String| usage(operation, format!("{}: {problem}", path.display()));
    let found = read_pem(text.as_bytes()).map_err(|error| unusable(error.to_string()))?;
    let first = found.first().ok_or_else(|| unusable("it is empty".to_owned()))?;
    let says = Certificate::read(first).map_err(|error| unusable(error.to_string()))?;
    match says.identity.clone() {
        Some(identity) => Ok((identity, says)),
        None => Err(unusable("it names no identity; make one with `vmferry pki issue`".to_owned())),
    }
}

fn read_authority(operation: &str, pki: &Path) -> Result<Authority, Failure> {
    Ok(Authority {
        certificate_pem: read_text(operation, &pki.join(CA_FILE))?,
        key_pem: read_text(operation, &pki.join(CA_KEY_FILE))?,
    })
}

fn read_text(operation: &str, path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| {
        usage(
            operation,
            format!(
                "read {}: {error}; --pki names the authority's directory, which `vmferry pki init` makes",
                path.display()
            ),
        )
    })
}

fn present(dir: &Path, files: &[&str]) -> Vec<String> {
    let there = |file: &&&str| dir.join(file).symlink_metadata().is_ok();
    files.iter().filter(there).map(|file| (*file).to_owned()).collect()
}

/// Refuses names that no certificate can carry, by the option that gave them.
fn check_names(operation: &str, names: &Names) -> Result<(), Failure> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'*');
    for name in &names.dns {
        if name.is_empty() || name.len() > 253 || !name.bytes().all(legal) {
            return Err(usage(operation, format!("--dns: `{name}` is no DNS name")));
        }
        // By these QEMU tells one host from another.
        if name.to_ascii_lowercase().ends_with(".vmferry") {
            let problem = format!("--dns: `{name}`: names below .vmferry are those of identities");
            return Err(usage(operation, problem));
        }
    }
    Ok(())
}

fn usage(operation: &str, problem: String) -> Failure {
    Failure::Usage { operation: operation.to_owned(), problem }
}

fn failed(operation: &str, error: &IssueError) -> Failure {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    usage(operation, text)
}

pub(crate) fn rfc3339(seconds: u64) -> String {
    // Past the year 9999 there is no RFC 3339.
    const LAST: u64 = 253_402_300_799;
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds.min(LAST));
    humantime::format_rfc3339_seconds(at).to_string()
}

#[cfg(test)]
mod tests;
