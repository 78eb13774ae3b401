//! The transition table of a drain: each phase answers each event, no pair is left to a wildcard.
//!
//! As a reviewer reads it, it is printed by the test `the_table_is_as_reviewed`.

use vmferry_types::{MigrationId, Timestamp, VmId};

use super::{Drain, Event, Goal, Moved, Phase, Resident, State, rest};
use crate::lifecycle::emptiness::Emptiness;
use crate::lifecycle::{Ended, Refusal, Unplaced};

/// Returns the drain after `event`.
pub(super) fn next(drain: &Drain, event: &Event) -> Result<Drain, Refusal> {
    let mut after = drain.clone();
    match &drain.phase {
        Phase::Emptying => emptying(&mut after, event)?,
        Phase::Empty { .. } => empty(&mut after, event)?,
        Phase::Granted { .. } => granted(&mut after, event)?,
        Phase::Cancelled { .. } => over(&mut after, event, Refusal::Stale)?,
        Phase::Died { .. } => over(&mut after, event, Refusal::Denied)?,
    }
    Ok(after)
}

fn emptying(drain: &mut Drain, event: &Event) -> Result<(), Refusal> {
    match event {
        Event::Appeared { vm, at } => appear(drain, *vm, *at),
        Event::Left { vm, at } => {
            idle(drain, *vm)?;
            leave(drain, *vm, *at);
            Ok(())
        }
        Event::Blocked { why, at } => block(idle(drain, why.vm)?, why, *at),
        Event::Unblocked { vm } => {
            let resident = idle(drain, *vm)?;
            let State::Blocked { .. } = resident.state else { return Err(Refusal::Stale) };
            resident.state = State::Waiting;
            Ok(())
        }
        Event::Begun { vm, migration } => {
            idle(drain, *vm)?.state = State::Begun { migration: *migration };
            Ok(())
        }
        Event::NotBegun { vm, error, at } => {
            let resident = idle(drain, *vm)?;
            fail(resident, error, *at);
            Ok(())
        }
        Event::MigrationEnded { migration, how, at } => ended(drain, *migration, how, *at),
        Event::FoundEmpty { proof, at } => found_empty(drain, *proof, *at),
        Event::CancelRequested { by, at } => {
            cancel(drain, by, *at);
            Ok(())
        }
        Event::HostDied { how, at } => {
            die(drain, how, *at);
            Ok(())
        }
        Event::FoundNotEmpty { .. } => Err(Refusal::Stale),
        Event::CancelAsked { .. } => Err(Refusal::Illegal),
    }
}

fn empty(drain: &mut Drain, event: &Event) -> Result<(), Refusal> {
    match event {
        Event::Appeared { vm, at } => {
            drain.phase = Phase::Emptying;
            appear(drain, *vm, *at)
        }
        Event::FoundNotEmpty { at } => {
            drain.phase = Phase::Emptying;
            drain.last = *at;
            Ok(())
        }
        Event::CancelRequested { by, at } => {
            cancel(drain, by, *at);
            Ok(())
        }
        // It is empty: that is what the operator waited for before switching it off.
        Event::HostDied { .. }
        | Event::Left { .. }
        | Event::Blocked { .. }
        | Event::Unblocked { .. }
        | Event::MigrationEnded { .. }
        | Event::FoundEmpty { .. } => Err(Refusal::Stale),
        Event::Begun { .. } | Event::NotBegun { .. } | Event::CancelAsked { .. } => {
            Err(Refusal::Illegal)
        }
    }
}

fn granted(drain: &mut Drain, event: &Event) -> Result<(), Refusal> {
    match event {
        Event::CancelRequested { by, at } => {
            cancel(drain, by, *at);
            Ok(())
        }
        Event::Appeared { .. }
        | Event::Left { .. }
        | Event::Blocked { .. }
        | Event::Unblocked { .. }
        | Event::MigrationEnded { .. }
        | Event::FoundEmpty { .. }
        | Event::FoundNotEmpty { .. }
        | Event::HostDied { .. } => Err(Refusal::Stale),
        Event::Begun { .. } | Event::NotBegun { .. } | Event::CancelAsked { .. } => {
            Err(Refusal::Illegal)
        }
    }
}

/// A drain that is over sees only what it had begun to its end.
fn over(drain: &mut Drain, event: &Event, cancel: Refusal) -> Result<(), Refusal> {
    match event {
        Event::MigrationEnded { migration, how, at } => ended(drain, *migration, how, *at),
        Event::CancelAsked { vm } => {
            let found = drain.residents.iter_mut().find(|one| one.vm == *vm);
            let resident = found.ok_or(Refusal::Stale)?;
            let State::Begun { migration } = resident.state else { return Err(Refusal::Stale) };
            resident.state = State::Cancelling { migration };
            Ok(())
        }
        Event::CancelRequested { .. } => Err(cancel),
        Event::Appeared { .. }
        | Event::Left { .. }
        | Event::Blocked { .. }
        | Event::Unblocked { .. }
        | Event::NotBegun { .. }
        | Event::FoundEmpty { .. }
        | Event::FoundNotEmpty { .. }
        | Event::HostDied { .. } => Err(Refusal::Stale),
        Event::Begun { .. } => Err(Refusal::Illegal),
    }
}

/// Returns a resident that nothing carries.
fn idle(drain: &mut Drain, vm: VmId) -> Result<&mut Resident, Refusal> {
    let resident = drain.residents.iter_mut().find(|one| one.vm == vm).ok_or(Refusal::Stale)?;
    if resident.state.open().is_some() { Err(Refusal::Stale) } else { Ok(resident) }
}

fn appear(drain: &mut Drain, vm: VmId, at: Timestamp) -> Result<(), Refusal> {
    let Err(place) = drain.residents.binary_search_by_key(&vm, |one| one.vm) else {
        return Err(Refusal::Stale);
    };
    drain.residents.insert(place, Resident { vm, failures: 0, state: State::Waiting });
    drain.last = drain.last.max(at);
    Ok(())
}

fn leave(drain: &mut Drain, vm: VmId, at: Timestamp) {
    drain.residents.retain(|one| one.vm != vm);
    drain.last = drain.last.max(at);
}

fn block(resident: &mut Resident, why: &Unplaced, at: Timestamp) -> Result<(), Refusal> {
    let since = match &resident.state {
        State::Blocked { why: known, .. } if known == why => return Err(Refusal::Stale),
        State::Blocked { since, .. } => *since,
        State::Waiting | State::Resting { .. } => at,
        State::Begun { .. } | State::Cancelling { .. } => return Err(Refusal::Illegal),
    };
    resident.state = State::Blocked { since, noted: at, why: why.clone() };
    Ok(())
}

fn fail(resident: &mut Resident, error: &str, at: Timestamp) {
    resident.failures = resident.failures.saturating_add(1);
    let until = Timestamp(at.value().saturating_add(rest(resident.failures).value()));
    resident.state = State::Resting { until, error: error.to_owned() };
}

fn ended(
    drain: &mut Drain,
    migration: MigrationId,
    how: &Ended,
    at: Timestamp,
) -> Result<(), Refusal> {
    let mut residents = drain.residents.iter_mut();
    let found = residents.find(|one| one.state.open() == Some(migration));
    let resident = found.ok_or(Refusal::Stale)?;
    match how {
        Ended::Moved { destination, .. } => {
            let vm = resident.vm;
            let moved = Moved { vm, destination: destination.clone(), at };
            match drain.moved.binary_search_by_key(&vm, |one| one.vm) {
                Ok(known) => drain.moved[known] = moved,
                Err(place) => drain.moved.insert(place, moved),
            }
            leave(drain, vm, at);
        }
        Ended::Cancelled => fail(resident, "its migration was cancelled", at),
        Ended::Failed { error } => fail(resident, error, at),
    }
    Ok(())
}

/// The agent says that its host is empty: believed once no VM is known there, and only if it looked
/// after the last one had left.
fn found_empty(drain: &mut Drain, proof: Emptiness, at: Timestamp) -> Result<(), Refusal> {
    if !drain.residents.is_empty() || proof.composed_after <= drain.last {
        return Err(Refusal::Stale);
    }
    drain.phase = match drain.goal {
        Goal::Drain => Phase::Empty { since: at, proof },
        Goal::Retire => Phase::Granted { at, proof },
    };
    Ok(())
}

fn cancel(drain: &mut Drain, by: &str, at: Timestamp) {
    drain.phase = Phase::Cancelled { at, by: by.to_owned() };
}

fn die(drain: &mut Drain, how: &str, at: Timestamp) {
    let (host, left) = (&drain.host, drain.residents.len());
    let error = format!("host {host} died while it was emptied, {left} VMs had not left it: {how}");
    drain.phase = Phase::Died { at, error };
}
