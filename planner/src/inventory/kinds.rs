//! What the QEMUs of hosts can carry: most hosts of a fleet say the same of it, so it is kept once.

use std::sync::{Arc, Mutex, PoisonError};

use vmferry_planner_core::fleet::Capabilities;
use vmferry_proto::v1::HostReport;

use super::{KnownHost, fleet};

/// A fleet has a few kinds of hosts; one of many more shares no more than these.
const KINDS_MAX: usize = 64;

/// What kinds of hosts can carry, each once.
#[derive(Debug, Default)]
pub(super) struct Kinds(Mutex<Vec<Arc<Capabilities>>>);

impl Kinds {
    /// Reads what a host can carry. It says the same each time.
    pub(super) fn read(&self, before: Option<&KnownHost>, now: &HostReport) -> Arc<Capabilities> {
        let same = before.filter(|before| before.report.capabilities == now.capabilities);
        if let Some(before) = same {
            return Arc::clone(&before.read.capabilities);
        }
        let said = fleet::capabilities(now);
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kinds.iter().find(|known| ***known == said) {
            return Arc::clone(known);
        }
        let said = Arc::new(said);
        if kinds.len() == KINDS_MAX {
            // One that nobody has any more makes room; else this one is not shared.
            match kinds.iter().position(|known| Arc::strong_count(known) == 1) {
                Some(at) => drop(kinds.swap_remove(at)),
                None => return said,
            }
        }
        kinds.push(Arc::clone(&said));
        said
    }
}
