//! Which hosts have the most room by what they report, in order: the best for a VM are found without
//! a look at the rest.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use vmferry_planner_core::fleet::Policy;
use vmferry_planner_core::placement::Standing;
use vmferry_types::HostId;

use super::{Entry, Inventory};

/// All hosts that can be read, best first, as one policy keeps reserves.
#[derive(Debug)]
pub(super) struct Standings {
    policy: Policy,
    in_order: BTreeSet<Standing>,
}

impl Standings {
    pub(super) const fn new(policy: Policy) -> Self {
        Self { policy, in_order: BTreeSet::new() }
    }

    /// Returns the hosts, best first, if they are in the order that a policy puts them in.
    pub(super) fn by(&self, policy: &Policy) -> Option<impl Iterator<Item = &HostId>> {
        let Policy { reserve_memory, reserve_cpu, cpu_overcommit_percent, .. } = self.policy;
        let same = reserve_memory == policy.reserve_memory
            && reserve_cpu == policy.reserve_cpu
            && cpu_overcommit_percent == policy.cpu_overcommit_percent;
        same.then(|| self.in_order.iter().map(Standing::host))
    }
}

impl Inventory {
    /// Puts a host where it stands by what it last said.
    pub(super) fn stands(&self, host: &HostId, entry: &mut Entry) {
        let mut standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
        let heard = entry.heard.as_ref();
        let now = heard.and_then(|heard| {
            Some(Standing::of(host, (&heard.read, heard.promised?), &standings.policy))
        });
        if entry.standing == now {
            return;
        }
        if let Some(before) = entry.standing.take() {
            standings.in_order.remove(&before);
        }
        standings.in_order.extend(now.clone());
        entry.standing = now;
    }

    /// Takes a host out that is forgotten.
    pub(super) fn stands_no_more(&self, entry: &Entry) {
        if let Some(before) = &entry.standing {
            let mut standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
            standings.in_order.remove(before);
        }
    }
}
