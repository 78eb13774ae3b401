//! The few hosts among which a VM's place is, as they are now.

use std::sync::PoisonError;
use vmferry_planner_core::fleet::{Availability, Fleet, Policy};
use vmferry_planner_core::placement::{Candidate, Ranking, Request, Shortlist};

use vmferry_types::{HostId, Timestamp};

use super::fleet::{Stored, availability};
use super::{Entry, Inventory};
use crate::config::HostSettings;
use crate::store::{Store, StoreError};

/// As many hosts are looked at in full. What is reserved and cordoned is known of those only, and of
/// so many some have room.
const HOSTS_MAX: usize = 64;

/// Takes a snapshot of the hosts that matter for a request: the best, the one that was asked for, its
/// source, and all that speak of its VM.
///
/// # Errors
///
/// Fails if the store does.
pub async fn shortlist(
    inventory: &Inventory,
    store: &dyn Store,
    (policy, request): (Policy, &Request),
    now: Timestamp,
) -> Result<(Fleet, Shortlist), StoreError> {
    // First, as for a snapshot of all: what is held no more is counted by its host already.
    let stored = Stored::read(store, now).await?;
    Ok(inventory.shortlist(stored, (policy, request), now))
}

impl Inventory {
    fn shortlist(
        &self,
        mut stored: Stored,
        (policy, request): (Policy, &Request),
        now: Timestamp,
    ) -> (Fleet, Shortlist) {
        let entries = self.locked();
        let list = if let Some(asked) = &request.destination {
            Shortlist::only(asked.clone(), request.demand)
        } else {
            let mut ranking = Ranking::new(request, &policy, now);
            let standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
            match standings.by(&policy) {
                Some(best_first) => {
                    for host in best_first {
                        let found = entries.get_key_value(host);
                        let found =
                            found.and_then(|found| self.candidate(found, &stored, (&policy, now)));
                        found.into_iter().for_each(|candidate| ranking.offer(candidate));
                        if ranking.found() > HOSTS_MAX {
                            break;
                        }
                    }
                }
                // A plan keeps reserves of its own: its order is another one.
                None => entries
                    .iter()
                    .filter_map(|found| self.candidate(found, &stored, (&policy, now)))
                    .for_each(|candidate| ranking.offer(candidate)),
            }
            ranking.best(HOSTS_MAX)
        };
        let speakers = self.speakers_of(request.vm);
        let hosts = list.hosts().iter().chain(&request.source).chain(&speakers).filter_map(|id| {
            let (id, entry) = entries.get_key_value(id)?;
            entry.row.as_ref()?;
            Some((id, entry.heard.as_ref()))
        });
        let hosts: std::collections::BTreeMap<_, _> = hosts.collect();
        let hosts = hosts.into_iter().map(|(id, heard)| {
            let settings = self.settings.get(id).cloned().unwrap_or_default();
            (id.clone(), stored.host(id, settings, heard, (&policy, now)))
        });
        let hosts = hosts.collect();
        (Fleet { now, policy, hosts }, list)
    }

    /// Returns what is known of a host without the store's word on its VMs; `None` if it takes none now.
    fn candidate<'a>(
        &'a self,
        (host, entry): (&'a HostId, &'a Entry),
        stored: &Stored,
        (policy, now): (&Policy, Timestamp),
    ) -> Option<Candidate<'a>> {
        entry.row.as_ref()?;
        let heard = entry.heard.as_ref()?;
        let promised = heard.promised?;
        let connected = availability(Some(heard), policy, now) == Availability::Connected;
        if !connected || stored.closes(host, policy) {
            return None;
        }
        let HostSettings { cluster, labels } = self.settings.get(host).unwrap_or(&self.unsaid);
        Some(Candidate { host, cluster, labels, report: &heard.read, promised })
    }
}
