//! How an agent is protected: by TLS, or by speaking where nobody else listens.
//!
//! A guest's memory and the right to command hosts are on the wire. So there is TLS, or an operator
//! has said where plain text is safe; there is nothing in between, and no default that is open.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Planners;

/// Where plain text is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PlainText {
    /// On this machine only.
    Loopback,
    /// In a network namespace that is not the machine's own: a test bed.
    Namespace,
}

/// Returns what keeps an agent from being protected so.
pub(super) fn check(
    plain_text: Option<PlainText>,
    tls: Option<&PathBuf>,
    addresses: &[(&str, IpAddr)],
    planners: Option<&Planners>,
) -> Vec<String> {
    let mut errors = match (plain_text, tls) {
        (None, None) => vec![
            "security: say how this agent is protected: `[tls] dir = \"/etc/vmferry/tls\"`, with what `vmferry pki \
             issue host ID` makes; or, where nobody else listens, security.plain_text = \"loopback\" (all addresses \
             on this machine) or \"namespace\" (a network namespace of its own)"
                .to_owned(),
        ],
        (Some(_), Some(_)) => {
            vec!["security.plain_text: there is [tls] as well; remove one of them".to_owned()]
        }
        (None, Some(dir)) if !dir.is_absolute() => {
            vec!["tls.dir: must be an absolute path".to_owned()]
        }
        (None, Some(_)) => Vec::new(),
        (Some(PlainText::Loopback), None) => not_loopback(addresses, planners),
        (Some(PlainText::Namespace), None) => not_in_a_namespace(),
    };
    let (wanted, why) = match tls {
        Some(_) => ("https://", "this agent speaks TLS"),
        None => ("http://", "this agent speaks plain text"),
    };
    let planners = planners.iter().flat_map(|planners| &planners.addresses);
    errors.extend(planners.filter(|address| !address.starts_with(wanted)).map(|address| {
        format!("planner.addresses: `{address}` must begin with {wanted}, since {why}")
    }));
    errors
}

fn not_loopback(addresses: &[(&str, IpAddr)], planners: Option<&Planners>) -> Vec<String> {
    let mut errors: Vec<String> = addresses
        .iter()
        .filter(|(_, address)| !address.is_loopback())
        .map(|(field, address)| {
            format!("{field}: {address} is not on loopback, as security.plain_text demands; use 127.0.0.1")
        })
        .collect();
    let planners = planners.iter().flat_map(|planners| &planners.addresses);
    errors.extend(planners.filter(|address| !on_loopback(address)).map(|address| {
        format!("planner.addresses: {address} is not on loopback, as security.plain_text demands; use http://127.0.0.1:PORT")
    }));
    errors
}

fn on_loopback(address: &str) -> bool {
    let rest = address.strip_prefix("http://").unwrap_or(address);
    let host = rest.split('/').next().unwrap_or(rest);
    host.parse::<std::net::SocketAddr>().map_or_else(
        |_| host == "localhost" || host.starts_with("localhost:"),
        |address| address.ip().is_loopback(),
    )
}

fn not_in_a_namespace() -> Vec<String> {
    match in_own_network_namespace() {
        Ok(true) => Vec::new(),
        Ok(false) => vec![
            "security.plain_text: \"namespace\" demands a network namespace of its own; start the agent with \
             `ip netns exec NAME`"
                .to_owned(),
        ],
        Err(error) => vec![format!(
            "security.plain_text: cannot tell whether this is a network namespace of its own: {error}"
        )],
    }
}

/// Says whether this process's network is another than that of PID 1 or, where PID 1 may not be
/// looked at, one that `ip netns` has a name for.
fn in_own_network_namespace() -> std::io::Result<bool> {
    let identity =
        |path: &Path| std::fs::metadata(path).map(|namespace| (namespace.dev(), namespace.ino()));
    let own = identity(Path::new("/proc/self/ns/net"))?;
    match identity(Path::new("/proc/1/ns/net")) {
        Ok(first) => Ok(own != first),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let named = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
            Ok(named.filter_map(|entry| identity(&entry.path()).ok()).any(|name| name == own))
        }
        Err(error) => Err(error),
    }
}
