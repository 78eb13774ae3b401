//! What stands in for an agent whose host is dead.

use vmferry_planner_core::evidence::{Heard, Seen};
use vmferry_planner_core::migration::Side;
use vmferry_proto::v1;
use vmferry_types::{HostId, Role, VmId};
pub use vmferry_wire::seen::{gone, gone_message, seen};

use super::side::SideView;
use crate::clock;
use crate::inventory::proof_of_death;
use crate::planner::Planner;
use crate::store::{Declaration, MigrationRow, StoreError};

/// What stands for an end of a migration whose host was declared dead.
#[must_use]
pub fn dead(row: &MigrationRow, end: Side, declaration: &Declaration) -> Seen {
    let (host, role) = match (end, row.migration.destination()) {
        (Side::Destination, Some(destination)) => (destination, Role::Receiver),
        (Side::Destination, None) | (Side::Source, _) => (&row.migration.source, Role::Running),
    };
    let generation = row.migration.books().generation;
    Seen::dead(row.claim, generation, role, proof_of_death(host, declaration))
}

/// Takes note of an agent that answers though its host was declared dead; returns the declaration
/// that is proof all the same, read again from the store.
///
/// When it was declared is written by another planner's clock, perhaps, so no time is compared: who
/// answered a moment ago is asked once more. So is, once, who never answered this driver: another
/// planner's way to the host may have been broken, and this one's is not.
///
/// # Errors
///
/// Fails if the store does.
pub async fn heed_death(
    planner: &Planner,
    (host, vm): (&HostId, VmId),
    view: &SideView,
) -> Result<Option<Declaration>, StoreError> {
    let inventory = &planner.parts.inventory;
    if inventory.dead(host).is_none() {
        return Ok(None);
    }
    inventory.reread(planner.store()).await?;
    let Some(declaration) = inventory.dead(host) else { return Ok(None) };
    let answers = match &view.observation {
        Some(_) => view.heard(clock::now()) == Heard::Now,
        None => !inventory.was_asked_after(host, &declaration),
    };
    if answers {
        let look = v1::ObserveRequest { vm_id: vm.to_string(), claim: 0 };
        if let Ok(now) = planner.parts.agents.observe(host, look).await {
            inventory.hear_from(planner.store(), host, &now.boot_id, clock::now()).await?;
            // Whoever answers from another boot lives, and says itself what of the dead one is gone.
            if !declaration.proves_gone(&now.boot_id) {
                return Ok(None);
            }
        }
        inventory.note_asked_after(host, &declaration);
    }
    Ok(inventory.dead(host))
}
