//! What a simulated agent says of a VM.

use vmferry_proto::v1;
use vmferry_types::{Claim, HostId, VmId};

use super::{Agent, Answer, Refusal};
use crate::fleet::{State, wall_ms};
use crate::journal::{Cont, Order, Part, Record};
use crate::qemu::{Qemu, Run, Transfer};

/// What every host of the fleet has.
pub(super) const MACHINE: &str = "pc-q35-10.0";
pub(super) const ACCELERATOR: &str = "tcg";

impl Agent {
    pub(super) fn observe(&self, vm: VmId) -> v1::VmObservation {
        self.fleet.with(|state| state.observe(&self.host, vm))
    }

    /// Looks for a driver, who counts as heard if its claim is the one that is held.
    pub(super) fn look(&self, request: &v1::ObserveRequest) -> Answer<v1::VmObservation> {
        let vm = super::vm_id(&request.vm_id)?;
        if request.claim != 0 {
            self.hear(vm, Claim::from_stored(request.claim));
        }
        Ok(self.observe(vm))
    }

    pub(super) fn describe(&self, vm: VmId) -> Answer<v1::SourceDescription> {
        let place = self.running(vm)?;
        self.fleet.with(|state| {
            let run = state.qemu(&place).map(|qemu| qemu.run);
            let run = run.ok_or_else(|| Refusal::wrong_state("its QEMU is gone"))?;
            let guest = state.guests.get(&vm);
            Ok(v1::SourceDescription {
                vm_id: vm.to_string(),
                vm_name: guest.map(|guest| guest.name.clone()).unwrap_or_default(),
                definition: guest.map(|guest| guest.definition.clone()).unwrap_or_default(),
                resolved_machine: MACHINE.to_owned(),
                accelerator: ACCELERATOR.to_owned(),
                vcpus: 1,
                memory_bytes: crate::fleet::VM_MEMORY,
                run_state: run.label().to_owned(),
                ..v1::SourceDescription::default()
            })
        })
    }
}

impl State {
    fn observe(&mut self, host: &HostId, vm: VmId) -> v1::VmObservation {
        let now = self.now_us();
        let Some(there) = self.hosts.get_mut(host) else { return v1::VmObservation::default() };
        let sequence = there.fresh_sequence();
        let known = there.records.contains_key(&vm);
        let knowledge = if known { v1::Knowledge::Known } else { v1::Knowledge::UnknownVm };
        let mut seen = v1::VmObservation {
            host_id: host.to_string(),
            vm_id: vm.to_string(),
            boot_id: there.boot_id.clone(),
            sequence,
            observed_at_ms: wall_ms(),
            knowledge: knowledge.into(),
            role: "absent".to_owned(),
            ..v1::VmObservation::default()
        };
        let Some(record) = there.records.get(&vm) else { return seen };
        let qemu = record.process().and_then(|process| there.qemus.get(&process.pid));
        fill_record(&mut seen, record);
        record.role(qemu.map(|qemu| qemu.run)).label().clone_into(&mut seen.role);
        if let Some(qemu) = qemu {
            fill_qemu(&mut seen, record, qemu);
            let moves = record.outgoing().is_some() || record.held().is_some();
            let stands = moves && qemu.run != Run::Running;
            if stands && qemu.stopped_at_us != 0 {
                seen.still_ms = now.saturating_sub(qemu.stopped_at_us) / 1000;
            }
        }
        seen.vm_name = self.guests.get(&vm).map(|guest| guest.name.clone()).unwrap_or_default();
        seen
    }
}

fn fill_record(seen: &mut v1::VmObservation, record: &Record) {
    seen.generation = record.fence.generation.value();
    seen.claim = record.fence.claim.value();
    seen.step = record.fence.step.value();
    seen.migration_id = record.fence.migration.map(|id| id.to_string()).unwrap_or_default();
    seen.ever_continued = record.continued() == Cont::Ordered;
    if record.held().is_some() {
        seen.switched_off.push("vcpus".to_owned());
    }
    // An order that is not settled is told to whoever commands now.
    let unsettled = || record.sent().filter(|sent| sent.order == Order::Handed);
    match record.outgoing().or_else(unsettled).map(|sent| &sent.order) {
        None | Some(Order::Open) => {}
        Some(Order::Handed) => seen.handed = true,
        Some(Order::GaveUp(cause)) => {
            seen.gave_up = true;
            seen.gave_up_cause.clone_from(cause);
        }
        Some(Order::TakenBack(cause)) => {
            (seen.handed, seen.gave_up) = (true, true);
            seen.gave_up_cause.clone_from(cause);
        }
    }
    if record.process().is_none() {
        let ended = record.ended.as_ref();
        let of_this = ended.filter(|ended| ended.migration == record.fence.migration);
        seen.gone = of_this.map(|ended| ended.proof.clone());
    }
}

fn fill_qemu(seen: &mut v1::VmObservation, record: &Record, qemu: &Qemu) {
    seen.qemu = Some(v1::QemuProcess {
        pid: qemu.pid,
        start_time: qemu.start_time,
        boot_id: seen.boot_id.clone(),
        alive: true,
    });
    qemu.run.label().clone_into(&mut seen.run_state);
    seen.disks_active = qemu.run == Run::Running;
    seen.stopped_at_us = qemu.stopped_at_us;
    seen.resumed_at_us = qemu.resumed_at_us;
    let Some(migration) = record.fence.migration else { return };
    let of_this = match &record.part {
        Part::Absent => false,
        Part::Running { process, .. } => {
            record.outgoing().is_some() || process.admission == Some(migration)
        }
        Part::Receiver { process, .. } => process.admission == Some(migration),
    };
    if of_this {
        seen.transfer = Some(v1::TransferStatus {
            migration_id: migration.to_string(),
            status: qemu.transfer.label().to_owned(),
            complete: qemu.transfer == Transfer::Completed,
            bytes_transferred: qemu.bytes,
            bytes_total: crate::fleet::VM_MEMORY,
            error: qemu.error.clone(),
            ..v1::TransferStatus::default()
        });
    }
}
