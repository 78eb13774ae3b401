//! Where plain text may be spoken.
//!
//! There is no TLS yet, and a guest's memory and the right to command hosts are on the wire. So an
//! agent serves only where nobody else listens, and only if it was told so.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

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

/// Returns what keeps plain text from being spoken at these addresses.
pub(super) fn check(
    plain_text: Option<PlainText>,
    addresses: &[(&str, IpAddr)],
    planners: Option<&Planners>,
) -> Vec<String> {
    match plain_text {
        None => vec![
            "security.plain_text: is missing. TLS has not landed, so an agent speaks plain text and must be told \
             where that is safe: \"loopback\" (all addresses on this machine) or \"namespace\" (a network namespace \
             of its own)"
                .to_owned(),
        ],
        Some(PlainText::Loopback) => not_loopback(addresses, planners),
        Some(PlainText::Namespace) => not_in_a_namespace(),
    }
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
