//! What a host says of a VM, held against what the store says.

use tracing::{info, warn};
use vmferry_proto::v1::{GoneProof, HostReport, Knowledge, VmReport};
use vmferry_types::{
    Bytes, Claim, Generation, HostId, MilliCpu, PowerState, Role, Timestamp, VmId,
};

use crate::store::{Adopted, Followed, Lost, Store, StoreError, VmRow};

/// QEMU's run state of a guest whose kernel panicked.
const PANICKED: &str = "guest-panicked";

/// Holds one reported VM against `known`, its row in the store, and returns the row that is true afterwards.
pub(super) async fn compare(
    store: &dyn Store,
    host: &HostId,
    report: &HostReport,
    (id, vm, known): (VmId, &VmReport, Option<VmRow>),
    now: Timestamp,
) -> Result<Option<VmRow>, StoreError> {
    // What an agent has not learnt, or cannot read, proves nothing.
    let believed = !report.learning
        && !report.journal_unreadable
        && matches!(vm.knowledge(), Knowledge::Known | Knowledge::Unresponsive);
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
    let runs = matches!(role, Role::Running | Role::Held);
    // An end is looked at again before it is believed. And a guest that was handed over is another
    // host's, though the agent that let it go knows its newest generation.
    if runs && (vm.gone.is_some() || (vm.handed && !vm.gave_up)) {
        return Ok(Some(row));
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

/// What an agent says of a guest that ended by its own word.
const TURNED_OFF: &str = "shutdown";

/// Whose doing the end of a QEMU was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndedBy {
    /// Nobody's: the VM is lost.
    Itself,
    /// Its guest's, which turned itself off.
    Guest,
}

/// An end that a host told of, to be looked at again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubted {
    /// What is lost by it, if it is.
    pub lost: Lost,
    /// The process that ended: its id, and when it started.
    pub process: (u32, u64),
    /// Whose doing it was.
    pub by: EndedBy,
}

/// Returns the end that a host tells of.
///
/// The report may be an old one, sent before the VM was started again, even under the claim of that
/// start. And the newest claim may belong to an admission that ended before this host heard of it;
/// then no report will ever carry it. Only a fresh look can tell, made after the row was read.
pub(super) fn doubted(
    host: &HostId,
    report: &HostReport,
    (vm, row): (&VmReport, &VmRow),
) -> Option<Doubted> {
    let believed = !report.learning
        && !report.journal_unreadable
        && matches!(vm.knowledge(), Knowledge::Known | Knowledge::Unresponsive);
    let runs = matches!(Role::from_label(&vm.role), Some(Role::Running | Role::Held));
    let gone = vm.gone.as_ref().filter(|_| believed && runs)?;
    let open = row.admission.is_some() || row.power != PowerState::Running;
    let same = row.host.as_ref() == Some(host) && row.generation.value() == vm.generation;
    let lost = || Lost {
        vm: row.id,
        host: host.clone(),
        generation: row.generation,
        claim: row.claim,
        cause: loss(host, vm, gone),
    };
    let by = if vm.guest_end == TURNED_OFF { EndedBy::Guest } else { EndedBy::Itself };
    (same && !open && Claim::from_stored(vm.claim) <= row.claim).then(|| Doubted {
        lost: lost(),
        process: (gone.pid, gone.start_time),
        by,
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
