//! Holding a guest still on purpose, and letting it go on (rule R4).

use vmferry_proto::v1;
use vmferry_types::{Fence, VmId};

use super::{Agent, Answer, Refusal};
use crate::journal::{Order, Part};
use crate::qemu::{Place, Run};

impl Agent {
    /// Stops the guest, durably: noted first, then said.
    pub(super) async fn hold(&self, fence: &Fence) -> Answer<v1::ExecuteReply> {
        let vm = fence.vm;
        let place = self.running(vm)?;
        let record = self.record(vm);
        if record.process().is_none_or(|of| of.generation != fence.generation) {
            return Err(Refusal::wrong_state("the guest runs here under another generation"));
        }
        if record.sent().is_some_and(|sent| sent.order == Order::Handed) {
            return Err(Refusal::wrong_state("the switchover was ordered"));
        }
        let (run, busy) = self.fleet.with(|state| {
            let qemu = state.qemu(&place).map(|qemu| (qemu.run, qemu.transfer.busy()));
            qemu.ok_or_else(|| Refusal::wrong_state("its QEMU is gone"))
        })?;
        if busy {
            return Err(Refusal::wrong_state("the guest is being sent"));
        }
        if record.held() != Some(fence.migration) {
            if run != Run::Running {
                return Err(Refusal::new("blocked", "the guest does not run"));
            }
            self.fleet.with(|state| {
                state.write(&self.host, vm, |record| {
                    if let Part::Running { outgoing, held, .. } = &mut record.part {
                        *outgoing = None;
                        *held = Some(fence.migration);
                    }
                });
                if let Some(qemu) = state.qemu_mut(&place) {
                    (qemu.stopped_at_us, qemu.resumed_at_us) = (0, 0);
                }
            });
        }
        self.moment().await;
        self.fleet.with(|state| {
            let runs = state.qemu(&place).is_some_and(|qemu| qemu.run == Run::Running);
            if runs {
                state.stop_vcpus(&place, Run::Paused);
                state.note(vm, || format!("{}: is held still", self.host));
            }
        });
        Ok(v1::ExecuteReply::default())
    }

    /// Lets a guest that is held go on, once: noted when it runs.
    pub(super) async fn let_go(&self, vm: VmId, place: &Place) {
        if self.record(vm).held().is_none() {
            return;
        }
        self.moment().await;
        self.fleet.with(|state| {
            if state.qemu(place).is_some_and(|qemu| qemu.run == Run::Paused) {
                state.run_vcpus(place, "let go on");
            }
        });
        self.moment().await;
        self.write(vm, |record| {
            if let Part::Running { held, .. } = &mut record.part {
                *held = None;
            }
        });
    }
}
