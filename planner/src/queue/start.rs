//! Starts that wait for room.

use std::sync::Arc;

use tracing::info;
use vmferry_planner_core::migration::Blocker;

use super::passes;
use crate::admission::{self, Found};
use crate::api::ApiError;
use crate::clock;
use crate::definition::Outline;
use crate::planner::{Drives, Planner};
use crate::store::{AdmitPower, FromQueue, NewPower, PowerKind, QueuedStart, StoreError, VmRow};

/// Tries once to find room for a VM that is to be started.
pub(super) async fn try_start(
    planner: &Arc<Planner>,
    start: &QueuedStart,
) -> Result<(), StoreError> {
    if clock::now() >= start.deadline {
        let outcome = format!("capacity_wait_expired: no room until the deadline: {}", start.note);
        return end(planner, start, &outcome).await;
    }
    let Some(vm) = planner.store().vm(start.vm).await? else {
        return end(planner, start, "the VM was deleted").await;
    };
    let outline = match Outline::read(&vm.definition) {
        Ok(outline) => outline,
        Err(error) => return end(planner, start, &error.to_string()).await,
    };
    match admission::start_host(planner, &vm, &outline, start.asked_host.as_ref()).await? {
        Found::Destination(grant) => {
            // Single flight is its own by now; what may run of it is looked for as at any start.
            let free = VmRow { admission: None, ..vm.clone() };
            match planner.nothing_runs(&free, &grant.destination).await {
                Ok(()) => {}
                Err(ApiError::Store(error)) => return Err(error),
                Err(ApiError::Blocked { blockers }) => {
                    return note(planner, start, &words(&blockers)).await;
                }
                Err(error) => return note(planner, start, &error.to_string()).await,
            }
            let known = planner.store().vm(start.vm).await?;
            if known.is_none_or(|known| known.claim != vm.claim) {
                // A host knew of more than the store: with that learnt it is looked at again.
                return Ok(());
            }
            let new = NewPower {
                id: start.id,
                request: start.request.clone(),
                vm: vm.id,
                host: grant.destination,
                kind: PowerKind::Start,
                how: String::new(),
                deadline_ms: 0,
                memory: outline.memory,
                cpu: outline.cpu,
                room: grant.room,
                from_queue: FromQueue::Yes,
            };
            admit(planner, start, &new).await
        }
        Found::Wait { note: text, .. } => note(planner, start, &text).await,
        Found::Never { blockers } if blockers.iter().any(|of| passes(&of.code)) => Ok(()),
        Found::Never { blockers } => end(planner, start, &words(&blockers)).await,
    }
}

async fn admit(
    planner: &Arc<Planner>,
    start: &QueuedStart,
    new: &NewPower,
) -> Result<(), StoreError> {
    match planner.admit_power(new, "starting").await? {
        AdmitPower::Admitted(action) | AdmitPower::Known(action) => {
            info!(migration_id = %start.id, vm_id = %start.vm, host_id = %new.host,
                "a start that waited has room");
            planner.drive(Drives::Power(action.id));
        }
        AdmitPower::Refused(refused) if refused.is_transient() => {
            note(planner, start, &refused.to_string()).await?;
        }
        // It is seen as it is the next time.
        AdmitPower::Refused(_) => {}
    }
    Ok(())
}

async fn note(planner: &Planner, start: &QueuedStart, text: &str) -> Result<(), StoreError> {
    if start.note != text {
        planner.store().note_queued_start(start.id, start.seq, text).await?;
    }
    Ok(())
}

async fn end(planner: &Planner, start: &QueuedStart, outcome: &str) -> Result<(), StoreError> {
    let store = planner.store();
    if store.end_queued_start(start.id, start.seq, outcome, clock::now_us()).await? {
        info!(migration_id = %start.id, vm_id = %start.vm, outcome, "a start waits no more");
        planner.power_changed();
    }
    Ok(())
}

fn words(blockers: &[Blocker]) -> String {
    let texts: Vec<&str> = blockers.iter().map(|of| of.message.as_str()).collect();
    texts.join("; ")
}
