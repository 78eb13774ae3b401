//! Taking up what a planner answers to a report: a lost journal is seeded anew (rule R3).

use std::collections::BTreeMap;

use vmferry_proto::v1::VmGeneration;
use vmferry_types::{Claim, Generation, HostId, Step, VmId};

use super::Agent;
use crate::bugs::Bug;

/// What a planner says of a VM to an agent's process.
#[derive(Clone, Debug)]
pub(crate) struct Owned {
    generation: Generation,
    claim: Claim,
    /// Whose it is. `None` if nobody's yet.
    owner: Option<HostId>,
}

/// Whether a report said that its journal proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Journal {
    Proves,
    Unreadable,
}

impl Agent {
    /// Takes up a planner's answer, unless the process dies meanwhile.
    pub(crate) async fn take_up(&self, journal: Journal, generations: Vec<VmGeneration>) {
        let token = self.world.with(|state| {
            let agent = state.agent(&self.host)?;
            (agent.incarnation == self.incarnation).then(|| agent.token.clone())
        });
        let Some(token) = token else { return };
        let named: BTreeMap<VmId, Owned> = generations
            .iter()
            .filter_map(|row| Some((row.vm_id.parse().ok()?, owned(row))))
            .collect();
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = self.seed(journal, named) => {}
        }
    }

    async fn seed(&self, journal: Journal, named: BTreeMap<VmId, Owned>) {
        self.hear_owners(&named);
        let unproven = self.world.with(|state| {
            let trusts = state.bugged(Bug::AgentTrustsLostJournal);
            !trusts && state.host(&self.host).is_some_and(|host| host.journal.lost)
        });
        // Only who was told that the journal proves nothing names all that it has to know again.
        if !unproven || journal == Journal::Proves {
            return;
        }
        for (vm, owned) in &named {
            let _lane = self.lock(*vm).await;
            self.write(*vm, |record| {
                let fence = &mut record.fence;
                fence.generation = fence.generation.max(owned.generation);
                if owned.claim > fence.claim {
                    fence.claim = owned.claim;
                    fence.migration = None;
                    fence.step = Step::from_stored(0);
                    fence.last = None;
                    fence.last_refused = false;
                }
            });
            self.step().await;
        }
        self.world.with(|state| {
            if let Some(host) = state.hosts.get_mut(&self.host) {
                host.journal.lost = false;
            }
            state.counts.journals_seeded += 1;
            state.note(|| format!("host {}: the journal is seeded", self.host));
        });
    }

    /// Remembers who owns what; of several planners, the one that knows the newest is believed.
    fn hear_owners(&self, named: &BTreeMap<VmId, Owned>) {
        self.world.with(|state| {
            let known: Vec<VmId> = state
                .host(&self.host)
                .map(|host| host.journal.records.keys().copied().collect())
                .unwrap_or_default();
            let Some(agent) = state.agent_mut(&self.host) else { return };
            for (vm, owned) in named {
                let before = agent.owners.get(vm);
                let newer = before.is_none_or(|before| {
                    (owned.generation, owned.claim) >= (before.generation, before.claim)
                });
                if newer {
                    agent.owners.insert(*vm, owned.clone());
                }
            }
            agent.owners.retain(|vm, _| known.contains(vm));
        });
    }

    /// Says whether a planner has said that another host owns the VM by a newer generation.
    pub(super) fn is_elsewhere(&self, vm: VmId, generation: Generation) -> bool {
        self.world.with(|state| {
            let owned = state.agent(&self.host).and_then(|agent| agent.owners.get(&vm));
            owned.is_some_and(|owned| {
                let elsewhere = owned.owner.as_ref().is_some_and(|owner| *owner != self.host);
                elsewhere && owned.generation > generation
            })
        })
    }
}

fn owned(row: &VmGeneration) -> Owned {
    Owned {
        generation: Generation::from_stored(row.generation),
        claim: Claim::from_stored(row.claim),
        owner: row.host_id.parse().ok(),
    }
}
