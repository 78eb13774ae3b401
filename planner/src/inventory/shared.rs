//! What other planners are told of the hosts that this one hears.

use tokio::sync::futures::Notified;
use vmferry_types::{HostId, Millis, Timestamp};

use super::Inventory;

/// A host that was not heard for so long is news to the others.
const SILENT: Millis = Millis(30_000);

/// What other planners were told of one host.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// When they were last told that it is heard.
    last: Option<Timestamp>,
    /// Whether it was heard since.
    heard_since: bool,
}

impl Shared {
    /// Notes that the host was heard; says whether the others are to hear of it at once.
    pub(super) fn heard(&mut self, before: Option<Timestamp>, now: Timestamp) -> Urgency {
        self.heard_since = true;
        let silent = before.is_none_or(|before| now.since(before) >= SILENT);
        if self.last.is_none() || silent { Urgency::AtOnce } else { Urgency::InTime }
    }
}

/// When the others are to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    AtOnce,
    InTime,
}

impl Inventory {
    /// Waits for a host that others are to hear of at once.
    pub fn newly_heard(&self) -> Notified<'_> {
        self.newly_heard.notified()
    }

    /// Returns the hosts that were heard since the others were told of them, and of which they were
    /// last told `every` ago or never.
    #[must_use]
    pub fn to_be_shared(&self, now: Timestamp, every: Millis) -> Vec<HostId> {
        let due = |last: Option<Timestamp>| {
            last.is_none_or(|last| now < last || now.since(last) >= every)
        };
        let mut hosts = Vec::new();
        for (id, entry) in self.locked().iter_mut() {
            let shared = &mut entry.shared;
            if shared.heard_since && due(shared.last) {
                // If they cannot be told now, the next report is the next occasion.
                shared.heard_since = false;
                hosts.push(id.clone());
            }
        }
        hosts
    }

    /// Notes that the others were told of hosts.
    pub fn note_shared(&self, hosts: &[HostId], now: Timestamp) {
        let mut entries = self.locked();
        for host in hosts {
            if let Some(entry) = entries.get_mut(host) {
                entry.shared.last = Some(now);
            }
        }
    }
}
