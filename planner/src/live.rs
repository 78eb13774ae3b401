//! What is seen of migrations under way, and is not worth a write: the last figures, what each
//! waits for, and a bell for those who watch.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;
use vmferry_proto::v1::VmObservation;
use vmferry_types::{MigrationId, Timestamp};

use crate::clock;
use crate::telemetry::Chain;

/// What was last seen of one migration.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The source's last answer.
    pub source: Option<VmObservation>,
    /// The destination's last answer.
    pub destination: Option<VmObservation>,
    /// What keeps it from going on: the real text, and since when in milliseconds since 1970.
    pub trouble: Option<(String, u64)>,
    /// The link that it waits for.
    pub waits_for_link: Option<String>,
}

impl Seen {
    /// Notes what keeps it from going on; the time is kept as long as there is any trouble.
    pub fn set_trouble(&mut self, text: Option<String>, now: Timestamp) {
        self.trouble = text.map(|text| {
            let since = self.trouble.as_ref().map_or_else(|| now.value(), |(_, since)| *since);
            (text, since)
        });
    }
}

#[derive(Debug)]
struct Entry {
    seen: Seen,
    bell: watch::Sender<u64>,
}

/// What is seen of all migrations under way.
#[derive(Debug, Default)]
pub struct Live {
    entries: Mutex<BTreeMap<MigrationId, Entry>>,
}

impl Live {
    fn with<T>(&self, id: MigrationId, act: impl FnOnce(&mut Entry) -> T) -> T {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries
            .entry(id)
            .or_insert_with(|| Entry { seen: Seen::default(), bell: watch::channel(0).0 });
        act(entry)
    }

    /// Changes what is seen and rings.
    pub fn update(&self, id: MigrationId, change: impl FnOnce(&mut Seen)) {
        self.with(id, |entry| {
            change(&mut entry.seen);
            entry.bell.send_modify(|count| *count = count.wrapping_add(1));
        });
    }

    /// Notes that this planner itself cannot take something further, its store for example: a log
    /// line alone would leave those who wait without a word. The next driver replaces it.
    pub fn keeps_from_going_on(&self, id: MigrationId, error: &dyn std::error::Error) {
        let text = Chain(error).to_string();
        self.update(id, |seen| seen.set_trouble(Some(text), clock::now()));
    }

    /// Forgets what was seen here of something that another planner drives by now: its row says
    /// what that one sees, and what was seen before it would hide that.
    pub fn driven_elsewhere(&self, id: MigrationId) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = entries.get_mut(&id) else { return };
        let seen = std::mem::take(&mut entry.seen);
        let Seen { source, destination, trouble, waits_for_link } = seen;
        if source.is_some()
            || destination.is_some()
            || trouble.is_some()
            || waits_for_link.is_some()
        {
            entry.bell.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    /// Rings: the row has changed.
    pub fn ring(&self, id: MigrationId) {
        self.update(id, |_| {});
    }

    /// Returns what is seen.
    #[must_use]
    pub fn seen(&self, id: MigrationId) -> Seen {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(&id).map(|entry| entry.seen.clone()).unwrap_or_default()
    }

    /// Subscribes to the bell.
    #[must_use]
    pub fn subscribe(&self, id: MigrationId) -> watch::Receiver<u64> {
        self.with(id, |entry| entry.bell.subscribe())
    }

    /// Forgets what is neither open nor watched.
    pub fn sweep(&self, open: impl Fn(MigrationId) -> bool) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|id, entry| open(*id) || entry.bell.receiver_count() > 0);
    }

    /// Forgets a migration that has ended and that nobody watches; rings a last time.
    pub fn end(&self, id: MigrationId) {
        self.ring(id);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.get(&id).is_some_and(|entry| entry.bell.receiver_count() == 0) {
            entries.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_a_planner_itself_from_going_on_is_seen() {
        let (live, id) = (Live::default(), MigrationId::from_u128(1));
        live.keeps_from_going_on(id, &std::io::Error::other("no space left on device"));
        let (text, _) = live.seen(id).trouble.unwrap();
        assert_eq!(text, "no space left on device");
        live.driven_elsewhere(id);
        assert_eq!(live.seen(id).trouble, None);
    }
}
