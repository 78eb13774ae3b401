//! What waits for room, as users are shown it.

use std::collections::BTreeMap;

use vmferry_planner_core::queue::told;
use vmferry_proto::v1;
use vmferry_types::MigrationId;

use crate::clock;
use crate::planner::Planner;
use crate::queue::{Queued, Row, queued};
use crate::store::StoreError;

/// Shows all that wait, in the order in which they are tried.
///
/// # Errors
///
/// Fails if the store does.
pub async fn queue(planner: &Planner) -> Result<Vec<v1::QueueEntry>, StoreError> {
    let mut entries = Vec::new();
    for of in queued(planner).await? {
        entries.push(entry(planner, &of).await?);
    }
    Ok(entries)
}

/// The same by id, for those who show what waits among other things.
///
/// # Errors
///
/// Fails if the store does.
pub(super) async fn queue_by_id(
    planner: &Planner,
) -> Result<BTreeMap<MigrationId, v1::QueueEntry>, StoreError> {
    let mut entries = BTreeMap::new();
    for of in queued(planner).await? {
        entries.insert(of.row.id(), entry(planner, &of).await?);
    }
    Ok(entries)
}

async fn entry(planner: &Planner, of: &Queued) -> Result<v1::QueueEntry, StoreError> {
    let (kind, vm, name, source) = match &of.row {
        Row::Migration(row) => {
            ("migration", row.migration.vm, row.vm_name.clone(), row.migration.source.to_string())
        }
        Row::Start(start) => {
            let vm = planner.store().vm(start.vm).await?;
            let name = vm.map(|vm| vm.name).unwrap_or_default();
            ("start", start.vm, name, String::new())
        }
    };
    let waiting = &of.waiting;
    Ok(v1::QueueEntry {
        id: waiting.id.to_string(),
        kind: kind.to_owned(),
        vm_id: vm.to_string(),
        vm_name: name,
        priority: waiting.priority.label().to_owned(),
        position: of.place.position,
        of: of.place.of,
        asked: clock::rfc3339_us(waiting.asked.value()),
        blocked_since: waiting.blocked_since.map(clock::rfc3339).unwrap_or_default(),
        deadline: clock::rfc3339(waiting.deadline),
        note: waiting.note.clone(),
        words: told(waiting, &of.place, clock::now()),
        source_host: source,
    })
}
