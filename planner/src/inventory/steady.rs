//! Reports that say nothing new.
//!
//! Ten thousand hosts report every few seconds, and hardly ever is anything different but figures.
//! Once all that a host says of its VMs agrees with the store, the same words need not be held
//! against it again, as long as none of its VMs was written since, by whichever planner: a host that
//! was away is never answered from memory that it owns what has moved.

use vmferry_proto::v1::{HostReport, Knowledge, VmGeneration, VmReport};
use vmferry_types::{HostId, Millis, PowerState, Role, Timestamp};

use crate::store::{Mark, VmRow};

/// For so long what was found counts for a host that says the same, and up to as long again: hosts
/// that were first heard together are not all looked at together ever after.
const SETTLED_FOR: Millis = Millis(300_000);

/// What was found to be true of a host's VMs, all of which agree with it.
#[derive(Debug)]
pub(super) struct Settled {
    /// What the host is answered.
    pub(super) generations: Vec<VmGeneration>,
    /// The mark of the host's VMs before that was read.
    pub(super) mark: Mark,
    /// When that was.
    pub(super) at: Timestamp,
}

impl Settled {
    pub(super) fn counts(&self, host: &HostId, now: Timestamp) -> bool {
        let least = SETTLED_FOR.value();
        let spread = host.as_str().bytes().fold(0_u64, |spread, byte| {
            spread.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(u64::from(byte))
        });
        now.since(self.at).value() < least + (spread >> 32) % least
    }
}

/// Says whether a report can be believed as a whole: then nothing in it waits to be looked at.
pub(super) fn is_whole(report: &HostReport) -> bool {
    !report.learning && !report.journal_unreadable
}

/// Says whether a host and the store agree on a VM, so that the same word changes nothing.
pub(super) fn agree(host: &HostId, vm: &VmReport, row: &VmRow) -> bool {
    let here = row.host.as_ref() == Some(host);
    let known = vm.knowledge() == Knowledge::Known && vm.gone.is_none() && row.admission.is_none();
    let same = row.generation.value() == vm.generation && row.claim.value() >= vm.claim;
    let newer = row.generation.value() > vm.generation;
    known
        && match Role::from_label(&vm.role) {
            Some(Role::Running) => {
                let order = vm.handed && !vm.gave_up;
                here && same && row.power == PowerState::Running && !order
            }
            Some(Role::Stopped) => here && same && row.power == PowerState::Stopped,
            Some(Role::Absent) => !here && newer,
            Some(Role::Held | Role::Receiver) | None => false,
        }
}

/// Says whether a report is the one before, but for its number and time.
pub(super) fn repeats(before: &HostReport, now: &HostReport) -> bool {
    let HostReport {
        host_id,
        name,
        boot_id,
        agent_instance,
        agent_version,
        agent_address,
        sequence: _,
        sent_at_ms: _,
        learning,
        journal_unreadable,
        capacity,
        capabilities,
        vms,
        strangers,
        orphans,
    } = before;
    *host_id == now.host_id
        && *name == now.name
        && *boot_id == now.boot_id
        && *agent_instance == now.agent_instance
        && *agent_version == now.agent_version
        && *agent_address == now.agent_address
        && *learning == now.learning
        && *journal_unreadable == now.journal_unreadable
        && *capacity == now.capacity
        && *vms == now.vms
        && *strangers == now.strangers
        && *orphans == now.orphans
        && *capabilities == now.capabilities
}

/// Says whether a report says the same of who and whose everything is; figures may differ.
pub(super) fn same_but_for_figures(before: &HostReport, now: &HostReport) -> bool {
    before.boot_id == now.boot_id
        && before.agent_instance == now.agent_instance
        && before.learning == now.learning
        && before.journal_unreadable == now.journal_unreadable
        && before.vms.len() == now.vms.len()
        && before.vms.iter().zip(&now.vms).all(|(before, now)| same_vm(before, now))
}

fn same_vm(before: &VmReport, now: &VmReport) -> bool {
    let VmReport {
        vm_id,
        vm_name,
        role,
        generation,
        claim,
        knowledge,
        configured_memory_bytes: _,
        observed_memory_bytes: _,
        cpu_milli: _,
        run_state,
        migration_id,
        definition,
        resolved_machine,
        gone,
        guest_end,
        handed,
        gave_up,
        ever_continued,
        overhead_memory_bytes: _,
        overhead_measured_bytes: _,
    } = before;
    *vm_id == now.vm_id
        && *vm_name == now.vm_name
        && *role == now.role
        && *generation == now.generation
        && *claim == now.claim
        && *knowledge == now.knowledge
        && *run_state == now.run_state
        && *migration_id == now.migration_id
        && *definition == now.definition
        && *resolved_machine == now.resolved_machine
        && *gone == now.gone
        && *guest_end == now.guest_end
        && *handed == now.handed
        && *gave_up == now.gave_up
        && *ever_continued == now.ever_continued
}

#[cfg(test)]
mod tests {
    use vmferry_proto::v1::{Capacity, GoneProof};
    use vmferry_types::{Bytes, Claim, Generation, MilliCpu, VmId};

    use super::*;

    fn said() -> VmReport {
        VmReport {
            vm_id: VmId::from_u128(1).to_string(),
            role: "running".into(),
            generation: 2,
            claim: 3,
            knowledge: Knowledge::Known.into(),
            ..VmReport::default()
        }
    }

    fn row(power: PowerState, generation: u64, claim: u64) -> VmRow {
        VmRow {
            id: VmId::from_u128(1),
            name: "web1".into(),
            host: "a".parse().ok(),
            power,
            generation: Generation::from_stored(generation),
            claim: Claim::from_stored(claim),
            admission: None,
            error: String::new(),
            definition: String::new(),
            resolved_machine: String::new(),
            memory: Bytes::ZERO,
            cpu: MilliCpu::ZERO,
        }
    }

    #[test]
    fn what_could_change_a_row_is_no_agreement() {
        let (a, b): (HostId, HostId) = ("a".parse().unwrap(), "b".parse().unwrap());
        let running = || row(PowerState::Running, 2, 3);
        assert!(agree(&a, &said(), &running()));
        assert!(agree(&a, &said(), &row(PowerState::Running, 2, 4)), "a claim that never came");
        for (vm, row) in [
            (said(), row(PowerState::Running, 1, 3)),
            (said(), row(PowerState::Running, 3, 3)),
            (said(), row(PowerState::Running, 2, 2)),
            (said(), row(PowerState::Lost, 2, 3)),
            (said(), row(PowerState::Stopped, 2, 3)),
            (VmReport { gone: Some(GoneProof::default()), ..said() }, running()),
            (VmReport { handed: true, ..said() }, running()),
            (VmReport { role: "held".into(), ..said() }, running()),
            (VmReport { role: "stopped".into(), ..said() }, running()),
            (VmReport { knowledge: Knowledge::Unresponsive.into(), ..said() }, running()),
            (
                said(),
                VmRow { admission: Some(vmferry_types::MigrationId::from_u128(1)), ..running() },
            ),
        ] {
            assert!(!agree(&a, &vm, &row), "{vm:?} {row:?}");
        }
        assert!(!agree(&b, &said(), &running()));
        let left = VmReport { role: "absent".into(), generation: 1, ..said() };
        assert!(agree(&b, &left, &running()));
        assert!(!agree(&a, &left, &running()));
    }

    #[test]
    fn figures_alone_are_nothing_new() {
        let before = HostReport { vms: vec![said()], sequence: 1, ..HostReport::default() };
        let next = HostReport { sequence: 2, sent_at_ms: 5, ..before.clone() };
        assert!(repeats(&before, &next) && same_but_for_figures(&before, &next));
        let mut figures = next.clone();
        figures.vms[0].observed_memory_bytes = 7;
        figures.capacity = Some(Capacity::default());
        assert!(!repeats(&before, &figures) && same_but_for_figures(&before, &figures));
        let mut claimed = next;
        claimed.vms[0].claim = 4;
        assert!(!same_but_for_figures(&before, &claimed));
    }
}
