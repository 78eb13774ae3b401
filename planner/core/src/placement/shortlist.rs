//! The few hosts among which a VM's place is, found without a look at the rest of the fleet in full.
//!
//! What is reserved on a host, and who holds it back, only ever takes room away. So what its report
//! alone leaves is the most that it can have, and hosts can be ranked by that in integers. Placement
//! looks at the best of them, and [`Shortlist::decides`] says whether no other host could have been
//! better; if one could, the whole fleet has to be asked.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmferry_types::{HostId, Timestamp};

use super::{Placement, Rank, Request, Score, eligibility, no_room};
use crate::capacity::free;
use crate::fleet::{Capabilities, Demand, Fleet, Policy, Report};

/// A fleet has a few kinds of hosts: whether each suits is found out once, for so many of them.
const KINDS_MAX: usize = 64;

/// A host as far as it can be judged without the store.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Which.
    pub host: &'a HostId,
    /// The cluster that it belongs to.
    pub cluster: &'a str,
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// What it last said.
    pub report: &'a Report,
    /// What the VMs of that report are promised together.
    pub promised: Demand,
}

/// Hosts that may be the place of one VM, each with the most room that it can have.
#[derive(Debug)]
pub struct Ranking<'a> {
    request: &'a Request,
    policy: &'a Policy,
    now: Timestamp,
    kinds: Vec<(&'a Arc<Capabilities>, Suits)>,
    scores: Vec<Score<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Suits {
    Yes,
    No,
}

/// How good a host is for any VM by its report alone, best first. Who keeps hosts in this order finds
/// the best for a VM at its beginning.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standing {
    rank: Rank,
    host: HostId,
}

impl Standing {
    /// Ranks a host by what it last said, and by what the VMs of that are promised together.
    #[must_use]
    pub fn of(host: &HostId, (report, promised): (&Report, Demand), policy: &Policy) -> Self {
        let rank = Rank::of(free(report, policy, promised), report.available_memory);
        Self { rank, host: host.clone() }
    }

    /// Returns the host.
    #[must_use]
    pub const fn host(&self) -> &HostId {
        &self.host
    }
}

/// The best hosts of a ranking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortlist {
    hosts: Vec<HostId>,
    /// What is asked for.
    demand: Demand,
    /// The best of those that were left out.
    next: Option<Standing>,
}

impl<'a> Ranking<'a> {
    /// Begins a ranking of hosts for `request`.
    #[must_use]
    pub const fn new(request: &'a Request, policy: &'a Policy, now: Timestamp) -> Self {
        Self { request, policy, now, kinds: Vec::new(), scores: Vec::new() }
    }

    /// Ranks a host, unless it cannot take the VM whatever the store says.
    ///
    /// A host that has something of the VM already has more room for it than is counted here: put it
    /// beside the shortlist.
    pub fn offer(&mut self, candidate: Candidate<'a>) {
        let Candidate { host, report, promised, .. } = candidate;
        let request = self.request;
        let fresh = self.now.since(report.at) <= self.policy.report_max_age;
        if request.source.as_ref() == Some(host) || !fresh || !self.wanted(&candidate) {
            return;
        }
        let (memory, cpu) = free(report, self.policy, promised);
        let room = no_room((memory, cpu), request.demand).is_empty();
        if room && self.suits(&report.capabilities) == Suits::Yes {
            self.scores.push(Score::of(host, (memory, cpu), report.available_memory));
        }
    }

    /// Says whether the VM may be on a host by the word of those who run both.
    fn wanted(&self, candidate: &Candidate<'_>) -> bool {
        let needs = &self.request.needs;
        needs.cluster.as_ref().is_none_or(|cluster| *cluster == candidate.cluster)
            && needs.pin.as_ref().is_none_or(|pin| pin == candidate.host)
            && needs
                .required_labels
                .iter()
                .all(|(key, value)| candidate.labels.get(key).is_some_and(|label| label == value))
    }

    /// Says whether hosts of a kind have what the VM needs.
    fn suits(&mut self, kind: &'a Arc<Capabilities>) -> Suits {
        if let Some((_, known)) = self.kinds.iter().find(|(known, _)| Arc::ptr_eq(known, kind)) {
            return *known;
        }
        let lacks = eligibility::lacking(kind, &self.request.needs);
        let suits = if lacks.is_empty() { Suits::Yes } else { Suits::No };
        if self.kinds.len() < KINDS_MAX {
            self.kinds.push((kind, suits));
        }
        suits
    }

    /// Returns how many of the hosts that were offered can take the VM as far as is known. Of hosts
    /// that are offered best first, no more than one past those that are wanted needs to be found.
    #[must_use]
    pub const fn found(&self) -> usize {
        self.scores.len()
    }

    /// Returns the `count` best hosts.
    #[must_use]
    pub fn best(mut self, count: usize) -> Shortlist {
        let owned = |score: &Score<'_>| Standing { rank: score.rank, host: score.host.clone() };
        let next = (count < self.scores.len()).then(|| {
            let (_, next, _) = self.scores.select_nth_unstable(count);
            owned(next)
        });
        self.scores.truncate(count);
        let hosts = self.scores.iter().map(|score| score.host.clone()).collect();
        Shortlist { hosts, demand: self.request.demand, next }
    }
}

impl Shortlist {
    /// Returns a list of the one host that was asked for, and of how much.
    #[must_use]
    pub fn only(host: HostId, demand: Demand) -> Self {
        Self { hosts: vec![host], demand, next: None }
    }

    /// Returns the hosts, in no order.
    #[must_use]
    pub fn hosts(&self) -> &[HostId] {
        &self.hosts
    }

    /// Says whether what was found in `fleet`, the hosts of the list and any others, is what would be
    /// found among all.
    #[must_use]
    pub fn decides(&self, fleet: &Fleet, found: &Placement) -> bool {
        let Some(Standing { rank, host }) = &self.next else { return true };
        let report = fleet.hosts.get(&found.host).and_then(|host| host.report.as_deref());
        let Some(report) = report else { return false };
        let free = (
            found.remaining_memory.plus(self.demand.memory),
            found.remaining_cpu.plus(self.demand.cpu),
        );
        Score::of(&found.host, free, report.available_memory) < Score { rank: *rank, host }
    }
}
