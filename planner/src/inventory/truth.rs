//! What a host says of a VM, held against what the store says.

use tracing::{info, warn};
use vmferry_proto::v1::{GoneProof, HostReport, Knowledge, VmReport};
use vmferry_types::{
    Bytes, Claim, Generation, HostId, MilliCpu, PowerState, Role, Timestamp, VmId,
};

use crate::store::{Adopted, Followed, Lost, Store, StoreError, VmRow};

/// What an agent says of a guest that ended by its own word.
const TURNED_OFF: &str = "shutdown";
/// QEMU's run state of a guest whose kernel panicked.
const PANICKED: &str = "guest-panicked";

/// Holds one reported VM against the store, and returns the row that is true afterwards.
pub(super) async fn compare(
    store: &dyn Store,
    host: &HostId,
    report: &HostReport,
    (id, vm): (VmId, &VmReport),
    now: Timestamp,
) -> Result<Option<VmRow>, StoreError> {
    // What an agent has not learnt, or cannot read, proves nothing.
    let believed = !report.learning
        && !report.journal_unreadable
        && matches!(vm.knowledge(), Knowledge::Known | Knowledge::Unresponsive);
    let known = store.vm(id).await?;
    let believed = believed && counted(known.as_ref(), host, vm);
    let Some(role) = Role::from_label(&vm.role).filter(|_| believed) else {
        return Ok(known);
    };
    // That nothing runs is said by journal and process together, or not at all.
    if role == Role::Stopped && vm.knowledge() != Knowledge::Known {
        return Ok(known);
    }
    match known {
        None => adopt(store, host, (id, vm), role, now).await,
        Some(row) => follow(store, &Told { host, vm, role }, row, now).await,
    }
}

/// What a host says of a VM that can be believed.
struct Told<'a> {
    host: &'a HostId,
    vm: &'a VmReport,
    role: Role,
}

/// Says whether a VM's counters are within reach of what is known: no agent takes one that is not
/// in one go, and believing it would leave no number for the next admission.
fn counted(known: Option<&VmRow>, host: &HostId, vm: &VmReport) -> bool {
    let Some(row) = known else { return true };
    let counted = Generation::from_stored(vm.generation).is_within_reach_of(row.generation)
        && Claim::from_stored(vm.claim).is_within_reach_of(row.claim);
    if !counted {
        warn!(vm_id = vm.vm_id, host_id = %host, generation = vm.generation, claim = vm.claim,
            "report of a VM is not believed: nobody counts that far");
    }
    counted
}

/// Takes a VM into the store that only its host knew (rule R13).
async fn adopt(
    store: &dyn Store,
    host: &HostId,
    (id, vm): (VmId, &VmReport),
    role: Role,
    now: Timestamp,
) -> Result<Option<VmRow>, StoreError> {
    let power = match role {
        Role::Running | Role::Held => PowerState::Running,
        Role::Stopped => PowerState::Stopped,
        // A receiver is half of a migration; the other half says whose the VM is.
        Role::Receiver | Role::Absent => return Ok(None),
    };
    let row = VmRow {
        id,
        name: vm.vm_name.clone(),
        host: Some(host.clone()),
        power,
        generation: Generation::from_stored(vm.generation),
        claim: Claim::from_stored(vm.claim),
        admission: None,
        error: String::new(),
        definition: vm.definition.clone(),
        resolved_machine: vm.resolved_machine.clone(),
        memory: Bytes(vm.configured_memory_bytes),
        cpu: MilliCpu(vm.cpu_milli),
    };
    match store.adopt_vm(&row, now).await? {
        Adopted::New => {
            info!(vm_id = %id, host_id = %host, role = role.label(), "VM adopted from a report");
            Ok(Some(row))
        }
        Adopted::Known(row) => Ok(Some(row)),
        Adopted::Deleted(_) => Ok(None),
    }
}

/// Lets a known VM follow what was done to it without the planner, and notes its loss.
async fn follow(
    store: &dyn Store,
    told: &Told<'_>,
    mut row: VmRow,
    now: Timestamp,
) -> Result<Option<VmRow>, StoreError> {
    let Told { host, vm, role } = *told;
    let claim = Claim::from_stored(vm.claim);
    let generation = Generation::from_stored(vm.generation);
    if claim > row.claim && row.admission.is_some() {
        // The next claim has to be above every claim that an agent has seen.
        store.raise_claim(row.id, claim, now).await?;
        row.claim = claim;
        return Ok(Some(row));
    }
    if row.admission.is_some() {
        return Ok(Some(row));
    }
    // A newer generation is never this planner's own word: it counts, however many claims this
    // planner has given out since.
    let older = generation == row.generation && claim < row.claim;
    if older || generation < row.generation {
        return Ok(Some(row));
    }
    if let (Role::Running | Role::Held, Some(gone)) = (role, &vm.gone) {
        return if vm.guest_end == TURNED_OFF {
            stop(store, told, row, now).await.map(Some)
        } else {
            lose(store, told, gone, row, now).await.map(Some)
        };
    }
    let power = match role {
        Role::Running | Role::Held => PowerState::Running,
        Role::Stopped => PowerState::Stopped,
        Role::Receiver | Role::Absent => return Ok(Some(row)),
    };
    // The same claim was this planner's own word; only a newer one is someone else's.
    let newer = generation > row.generation || claim > row.claim;
    let here = row.host.as_ref() == Some(host);
    if !newer || (power == PowerState::Stopped && !here) {
        return Ok(Some(row));
    }
    let claim = claim.max(row.claim);
    let followed = Followed { vm: row.id, host: host.clone(), power, generation, claim };
    if store.follow_vm(&followed, now).await? {
        info!(vm_id = %row.id, host_id = %host, power = power.label(), %generation, %claim,
            "VM was changed without the planner");
    }
    store.vm(row.id).await
}

/// Notes that a guest turned itself off: its VM is stopped, as if it had been asked to.
async fn stop(
    store: &dyn Store,
    told: &Told<'_>,
    row: VmRow,
    now: Timestamp,
) -> Result<VmRow, StoreError> {
    let Told { host, vm, .. } = *told;
    if row.host.as_ref() != Some(host) || row.power != PowerState::Running {
        return Ok(row);
    }
    let (generation, claim) =
        (Generation::from_stored(vm.generation), Claim::from_stored(vm.claim));
    let power = PowerState::Stopped;
    let followed = Followed { vm: row.id, host: host.clone(), power, generation, claim };
    if !store.follow_vm(&followed, now).await? {
        return Ok(row);
    }
    info!(vm_id = %row.id, host_id = %host, "VM is stopped: its guest turned itself off");
    Ok(VmRow { power, generation, claim, error: String::new(), ..row })
}

async fn lose(
    store: &dyn Store,
    told: &Told<'_>,
    gone: &GoneProof,
    row: VmRow,
    now: Timestamp,
) -> Result<VmRow, StoreError> {
    let Told { host, vm, .. } = *told;
    let lost = Lost {
        vm: row.id,
        host: host.clone(),
        generation: Generation::from_stored(vm.generation),
        claim: Claim::from_stored(vm.claim),
        cause: loss(host, vm, gone),
    };
    if !store.mark_lost(&lost, now).await? {
        return Ok(row);
    }
    warn!(vm_id = %lost.vm, host_id = %host, cause = lost.cause, "VM is lost: its QEMU ended by itself");
    Ok(VmRow { power: PowerState::Lost, error: lost.cause, ..row })
}

/// Returns the loss that a host tells of under an older claim than the store has given out.
///
/// It may be an old report, sent before the VM was started again. It may as well be that the newer
/// claim belongs to an admission that ended before this host heard of it, and then no report will
/// ever carry it: only a fresh look can tell.
pub(super) fn doubted(
    host: &HostId,
    report: &HostReport,
    (vm, row): (&VmReport, &VmRow),
) -> Option<Lost> {
    let believed = !report.learning
        && !report.journal_unreadable
        && matches!(vm.knowledge(), Knowledge::Known | Knowledge::Unresponsive);
    let runs = matches!(Role::from_label(&vm.role), Some(Role::Running | Role::Held));
    let gone = vm.gone.as_ref().filter(|_| believed && runs)?;
    let open = row.admission.is_some() || row.power != PowerState::Running;
    let same = row.host.as_ref() == Some(host) && row.generation.value() == vm.generation;
    (same && !open && Claim::from_stored(vm.claim) < row.claim).then(|| Lost {
        vm: row.id,
        host: host.clone(),
        generation: row.generation,
        claim: row.claim,
        cause: loss(host, vm, gone),
    })
}

/// Says how a QEMU ended, in its own words where it left any.
fn loss(host: &HostId, vm: &VmReport, gone: &GoneProof) -> String {
    let mut text = if vm.run_state == PANICKED {
        format!("the guest's kernel panicked, and QEMU on host {host} ended")
    } else {
        format!("QEMU on host {host} ended")
    };
    if !gone.ended.is_empty() {
        text.push_str(&format!(" ({})", gone.ended));
    }
    let tail = gone.stderr_tail.trim();
    if !tail.is_empty() {
        text.push_str(": ");
        text.push_str(tail);
    }
    text
}
