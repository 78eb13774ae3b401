//! What was seen, read into a drain's events, and what may be done now.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_types::{MigrationId, Millis, Timestamp, VmId};

use super::{Drain, Effect, Event, Phase, Resident, State};
use crate::lifecycle::emptiness::{HostFacts, Presence, empty};
use crate::lifecycle::{Ended, Unplaced};
use crate::maintenance::Plan;

/// How old a blocker's figures may grow before they are written down again. Free memory changes
/// with every report; a row that did would be written all the time.
const NOTE_MAX_AGE: Millis = Millis(60_000);

/// What was seen of a drain's host and VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The host. Its residents are all that have to leave, those of the agent's report included.
    pub host: HostFacts,
    /// Those of the drain's migrations that are over, all cleared away, and how.
    pub ended: BTreeMap<MigrationId, Ended>,
    /// VMs that something else carries or starts or stops: they are waited for.
    pub in_flight: BTreeSet<VmId>,
    /// Where the residents of [`Drain::to_plan`] would go now. `None` if nothing was planned.
    pub plan: Option<Plan>,
}

/// What follows from what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The row after it.
    pub after: Drain,
    /// What happened, for the log. If any, the row is committed before anything is done.
    pub events: Vec<Event>,
    /// What is to be done now, within the drain's limit. `Replan` is due at the next tick.
    pub effects: Vec<Effect>,
    /// What is waited for, by name.
    pub waits_for: Vec<String>,
}

/// Reads what was seen until nothing new follows from it.
#[must_use]
pub fn step(drain: &Drain, facts: &Facts, now: Timestamp) -> Step {
    let mut after = drain.clone();
    let mut events = Vec::new();
    while let Some(event) = read(&after, facts, now) {
        let Ok(next) = after.apply(&event) else { break };
        after = next;
        events.push(event);
    }
    let (effects, waits_for) = due(&after, facts, now);
    Step { after, events, effects, waits_for }
}

/// Returns the next event that follows from what was seen.
#[must_use]
pub fn read(drain: &Drain, facts: &Facts, now: Timestamp) -> Option<Event> {
    let ended = drain.open_migrations().find_map(|(_, id)| Some((id, facts.ended.get(&id)?)));
    if let Some((migration, how)) = ended {
        return Some(Event::MigrationEnded { migration, how: how.clone(), at: now });
    }
    if let Presence::Dead { how } = &facts.host.presence {
        let event = Event::HostDied { how: how.clone(), at: now };
        return drain.apply(&event).is_ok().then_some(event);
    }
    match drain.phase {
        Phase::Emptying => {
            residents(drain, facts, now).or_else(|| planned(drain, facts, now)).or_else(|| {
                let proof = empty(&facts.host, drain.last).ok()?;
                let event = Event::FoundEmpty { proof, at: now };
                drain.apply(&event).is_ok().then_some(event)
            })
        }
        Phase::Empty { proof, .. } => residents(drain, facts, now).or_else(|| {
            // A host that is silent, or not asked again, is as empty as it was: a report from before
            // still names the guests that have left.
            let inside = facts.host.inside.as_ref();
            let inside = inside.filter(|inside| inside.composed_after > proof.composed_after);
            let named = inside.is_some_and(|inside| {
                !inside.guests.is_empty()
                    || !inside.receivers.is_empty()
                    || !inside.strangers.is_empty()
            });
            let comes = !facts.host.reserved.is_empty();
            (named || comes).then_some(Event::FoundNotEmpty { at: now })
        }),
        Phase::Granted { .. } | Phase::Cancelled { .. } | Phase::Died { .. } => None,
    }
}

/// Says who came, and who left without being moved.
fn residents(drain: &Drain, facts: &Facts, now: Timestamp) -> Option<Event> {
    let there: BTreeSet<VmId> = facts.host.residents.iter().copied().collect();
    let known: BTreeSet<VmId> = drain.residents.iter().map(|one| one.vm).collect();
    if let Some(vm) = there.difference(&known).next() {
        return Some(Event::Appeared { vm: *vm, at: now });
    }
    let mut gone = drain.residents.iter().filter(|one| {
        one.state.open().is_none() && !there.contains(&one.vm) && !facts.in_flight.contains(&one.vm)
    });
    gone.next().map(|one| Event::Left { vm: one.vm, at: now })
}

/// Says who has no place, and who has one again.
fn planned(drain: &Drain, facts: &Facts, now: Timestamp) -> Option<Event> {
    let plan = facts.plan.as_ref()?;
    let find = |vm: VmId| drain.residents.iter().find(|one| one.vm == vm);
    for blocked in &plan.blocked {
        let Some(resident) = find(blocked.vm) else { continue };
        let why = Unplaced::of(blocked);
        let news = match &resident.state {
            State::Blocked { why: known, noted, .. } => {
                *known != why && (!known.means(&why) || now.since(*noted) >= NOTE_MAX_AGE)
            }
            State::Waiting => true,
            State::Resting { until, .. } => *until <= now,
            State::Begun { .. } | State::Cancelling { .. } => false,
        };
        if news {
            return Some(Event::Blocked { why, at: now });
        }
    }
    let placed = plan.assignments.iter().filter_map(|assignment| find(assignment.vm));
    let mut freed = placed.filter(|one| matches!(one.state, State::Blocked { .. }));
    freed.next().map(|one| Event::Unblocked { vm: one.vm })
}

/// Returns what may be done now, and by name what is waited for.
fn due(drain: &Drain, facts: &Facts, now: Timestamp) -> (Vec<Effect>, Vec<String>) {
    let (mut effects, mut waits) = (Vec::new(), Vec::new());
    for effect in drain.outstanding() {
        match effect {
            Effect::Replan => {
                effects.extend(begin(drain, facts, now));
                effects.push(Effect::Replan);
                waits.extend(drain.residents.iter().filter_map(|one| told(one, facts)));
                if facts.host.presence != Presence::Heard {
                    waits.push(format!("the agent of host {} to answer", drain.host));
                }
            }
            Effect::AskWhetherEmpty => {
                let missing = empty(&facts.host, drain.last).err().unwrap_or_default();
                waits.extend(missing.iter().map(ToString::to_string));
                effects.push(Effect::AskWhetherEmpty);
            }
            Effect::Begin { .. } | Effect::Cancel { .. } => effects.push(effect),
        }
    }
    (effects, waits)
}

/// Begins what has a place, in the order of the plan, within the limit.
fn begin(drain: &Drain, facts: &Facts, now: Timestamp) -> Vec<Effect> {
    let Some(plan) = facts.plan.as_ref().filter(|_| facts.host.presence == Presence::Heard) else {
        return Vec::new();
    };
    let limit = usize::try_from(drain.policy.max_parallel.get()).unwrap_or(usize::MAX);
    let slots = limit.saturating_sub(drain.open_migrations().count());
    let free = drain.to_plan(now);
    plan.assignments
        .iter()
        .filter(|one| free.contains(&one.vm) && !facts.in_flight.contains(&one.vm))
        .take(slots)
        .map(|one| Effect::Begin { vm: one.vm, planned: one.destination.clone(), mode: one.mode })
        .collect()
}

/// Says what one resident waits for. `None` if only for its turn.
fn told(resident: &Resident, facts: &Facts) -> Option<String> {
    let vm = resident.vm;
    match &resident.state {
        State::Waiting if facts.in_flight.contains(&vm) => {
            Some(format!("what is under way with VM {vm} to end"))
        }
        State::Waiting => None,
        State::Blocked { why, .. } => Some(format!("a place for VM {vm}: {}", why.code)),
        State::Begun { migration } | State::Cancelling { migration } => {
            Some(format!("migration {migration} of VM {vm} to end"))
        }
        State::Resting { error, .. } => {
            Some(format!("another try with VM {vm}, whose last migration failed: {error}"))
        }
    }
}
