//! What an agent's no means for its driver.

use vmferry_planner_core::migration::Blocker;
use vmferry_proto::v1::ErrorDetail;
use vmferry_types::HostId;

/// Says whether a refusal passes by itself: the agent is not ready.
#[must_use]
pub fn passes(detail: &ErrorDetail) -> bool {
    matches!(detail.code.as_str(), "learning" | "unresponsive" | "unreadable")
}

/// Says whether a refusal proves that the command did nothing. One that failed half-way may still
/// land on top of what is concluded next, unless a newer claim is persisted behind it first.
#[must_use]
pub fn had_no_effect(detail: &ErrorDetail) -> bool {
    let refused_before = matches!(
        detail.code.as_str(),
        "unknown_vm"
            | "invalid"
            | "blocked"
            | "wrong_state"
            | "disk_in_use"
            | "gave_up"
            | "receiver_gone"
    );
    refused_before || passes(detail)
}

/// Returns an agent's no as reasons: all that it named, or else its message.
#[must_use]
pub fn blockers(host: Option<HostId>, message: &str, detail: &ErrorDetail) -> Vec<Blocker> {
    if detail.blockers.is_empty() {
        let code = if detail.code.is_empty() { "refused" } else { &detail.code };
        return vec![Blocker { code: code.to_owned(), message: message.to_owned(), host }];
    }
    detail
        .blockers
        .iter()
        .map(|blocker| Blocker {
            code: blocker.code.clone(),
            message: blocker.message.clone(),
            host: blocker.host_id.parse().ok().or_else(|| host.clone()),
        })
        .collect()
}
