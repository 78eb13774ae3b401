//! What was seen, read into a job's events, and what may be done now.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_types::{Generation, HostId, MigrationId, Millis, Timestamp, VmId};

use super::{Effect, Event, Job, MoveState, Phase, ReturnState};
use crate::lifecycle::Ended;
use crate::lifecycle::emptiness::{HostFacts, Presence, empty, named};

/// How long an agent may take to call its host empty.
///
/// A guest that nobody planned for has to be seen to by then; a job that waits for ever would be
/// taken for one that works.
pub const VERIFY_LIMIT: Millis = Millis(600_000);

/// What was seen of a job's host and VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The host.
    pub host: HostFacts,
    /// Those of the job's migrations that are over, all cleared away, and how.
    pub ended: BTreeMap<MigrationId, Ended>,
    /// Where the store says that the job's VMs are, and under which generation. Left out are those
    /// that have nothing to leave any more: deleted, or stopped with nothing that is the host's.
    pub owners: BTreeMap<VmId, (Option<HostId>, Generation)>,
    /// VMs that something else carries or starts or stops: they are waited for.
    pub in_flight: BTreeSet<VmId>,
    /// Those of the job's migrations that wait for room. One that has room and waits only for the
    /// job's own limit is none of them: the next turn is its.
    pub waiting: BTreeSet<MigrationId>,
}

/// What follows from what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The row after it.
    pub after: Job,
    /// What happened, for the log. If any, the row is committed before anything is done.
    pub events: Vec<Event>,
    /// What is to be done now, within the job's limit.
    pub effects: Vec<Effect>,
    /// What is waited for, by name.
    pub waits_for: Vec<String>,
}

/// Reads what was seen until nothing new follows from it.
#[must_use]
pub fn step(job: &Job, facts: &Facts, now: Timestamp) -> Step {
    let mut after = job.clone();
    let mut events = Vec::new();
    while let Some(event) = read(&after, facts, now) {
        let Ok(next) = after.apply(&event) else { break };
        after = next;
        events.push(event);
    }
    let (effects, waits_for) = due(&after, facts);
    Step { after, events, effects, waits_for }
}

/// Returns the next event that follows from what was seen.
#[must_use]
pub fn read(job: &Job, facts: &Facts, now: Timestamp) -> Option<Event> {
    let ended = job.open_migrations().find_map(|(_, id)| Some((id, facts.ended.get(&id)?)));
    if let Some((migration, how)) = ended {
        return Some(Event::MigrationEnded { migration, how: how.clone(), at: now });
    }
    if let Presence::Dead { how } = &facts.host.presence {
        let event = Event::HostDied { how: how.clone(), at: now };
        if job.apply(&event).is_ok() {
            return Some(event);
        }
    }
    match &job.phase {
        Phase::Running => {
            let waiting = job.moves.iter().filter(|one| one.state == MoveState::Waiting);
            let left = |vm: &VmId| {
                let owner = facts.owners.get(vm).and_then(|(host, _)| host.as_ref());
                owner != Some(&job.host) && !facts.in_flight.contains(vm)
            };
            let vm = waiting.map(|one| one.vm).find(left)?;
            Some(Event::Left { vm, at: now })
        }
        Phase::Verifying { since } => match empty(&facts.host, *since) {
            Ok(proof) => Some(Event::FoundEmpty { proof, at: now }),
            Err(missing) if now.since(*since) > VERIFY_LIMIT => {
                Some(Event::VerifyExpired { note: named(&missing), at: now })
            }
            Err(_) => None,
        },
        Phase::Completed { back, .. } => {
            let mut waiting = back.iter().filter(|one| one.state == ReturnState::Waiting);
            let moved = waiting.find(|one| {
                let (host, generation) = (Some(one.from.clone()), one.generation);
                let ours = facts.owners.get(&one.vm) == Some(&(host, generation));
                !ours || facts.in_flight.contains(&one.vm)
            })?;
            Some(Event::Left { vm: moved.vm, at: now })
        }
        Phase::Planned
        | Phase::Blocked
        | Phase::Stopping { .. }
        | Phase::Maintenance { .. }
        | Phase::Failed { .. }
        | Phase::Cancelled { .. } => None,
    }
}

/// Returns what may be done now, and by name what is waited for.
fn due(job: &Job, facts: &Facts) -> (Vec<Effect>, Vec<String>) {
    let limit = usize::try_from(job.policy.max_parallel.get()).unwrap_or(usize::MAX);
    // What waits for room moves nothing: it holds up nobody who has some.
    let at_it = job.open_migrations().filter(|(_, id)| !facts.waiting.contains(id));
    let mut slots = limit.saturating_sub(at_it.count());
    let (mut effects, mut waits) = (Vec::new(), Vec::new());
    for effect in job.outstanding() {
        match &effect {
            Effect::Begin { vm, .. } | Effect::BringBack { vm, .. } => {
                if facts.host.presence != Presence::Heard {
                    waits.push(format!("the agent of host {} to answer", job.host));
                    break;
                }
                if facts.in_flight.contains(vm) {
                    waits.push(format!("what is under way with VM {vm} to end"));
                } else if slots > 0 {
                    slots -= 1;
                    effects.push(effect);
                }
            }
            Effect::Cancel { .. } => effects.push(effect),
            Effect::AskWhetherEmpty => {
                if let Phase::Verifying { since } = &job.phase {
                    let missing = empty(&facts.host, *since).err().unwrap_or_default();
                    waits.extend(missing.iter().map(ToString::to_string));
                }
                effects.push(effect);
            }
        }
    }
    waits.extend(job.open_migrations().map(|(vm, id)| {
        if facts.waiting.contains(&id) {
            format!("room for VM {vm}, whose migration {id} is in the queue")
        } else {
            format!("migration {id} of VM {vm} to end")
        }
    }));
    (effects, waits)
}
