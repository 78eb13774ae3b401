//! Holding a guest still on purpose, and letting it go on (rule R4).

use vmferry_planner_core::evidence::RunState;
use vmferry_proto::v1;
use vmferry_types::{MigrationId, VmId};

use super::{Agent, Refusal};
use crate::fence::Word;
use crate::host::Why;
use crate::journal::{Issue, Order, Outgoing, Part};
use crate::world::PointKind;

impl Agent {
    /// Stops the guest, durably: noted first, then said.
    pub(super) async fn hold(&self, vm: VmId, word: &Word) -> Result<v1::ExecuteReply, Refusal> {
        let (_, pid) = self.running(vm)?;
        self.responsive(pid)?;
        let record = self.record(vm).unwrap_or_default();
        if record.outgoing().is_some_and(|sent| sent.order == Order::Handed) {
            return Err(Refusal::new("wrong_state", "the guest was handed over"));
        }
        let (run, busy) = self.world.with(|state| {
            let qemu = state.qemu(&self.host, pid);
            qemu.map_or((RunState::Unknown, false), |qemu| (qemu.run, qemu.busy()))
        });
        if busy {
            return Err(Refusal::new("wrong_state", "the VM is being migrated"));
        }
        if record.held() != Some(word.migration) {
            if run != RunState::Running {
                return Err(Refusal::new("wrong_state", "the guest does not run"));
            }
            self.write(vm, |record| {
                if let Part::Running { outgoing, held, .. } = &mut record.part {
                    *outgoing = None;
                    *held = Some(word.migration);
                }
            });
            self.world
                .with(|state| state.saw(&self.host, vm, |sight| *sight = super::Sight::default()));
        }
        self.step().await;
        self.world.with(|state| {
            if let Some(mishap) = state.point(PointKind::QemuStep, "stop") {
                state.strike(mishap);
            }
            state.stop_vcpus(&self.host, pid, RunState::Paused);
        });
        self.step().await;
        Ok(v1::ExecuteReply::default())
    }

    /// Notes that an unordered transfer, or a hold before one, is given up.
    pub(super) fn gives_up(&self, vm: VmId, migration: MigrationId, cause: String) {
        self.write(vm, |record| {
            let Part::Running { outgoing, .. } = &mut record.part else { return };
            if let Some(sent) = outgoing.as_mut().filter(|sent| sent.migration == migration) {
                if sent.order == Order::Open {
                    sent.order = Order::GaveUp(cause);
                }
            } else {
                *outgoing = Some(Outgoing {
                    migration,
                    before: crate::qemu::Snapshot::default(),
                    issue: Issue::Refused,
                    order: Order::GaveUp(cause),
                    timeout_ms: 0,
                    stall_ms: 0,
                });
            }
        });
    }

    /// Lets a guest that is held go on, once: noted when it runs.
    pub(super) async fn let_go(&self, vm: VmId, pid: u32) -> Result<(), Refusal> {
        if self.record(vm).is_none_or(|record| record.held().is_none()) {
            return Ok(());
        }
        self.step().await;
        let run = self.world.with(|state| state.qemu(&self.host, pid).map(|qemu| qemu.run));
        if run == Some(RunState::Paused) {
            self.world.with(|state| state.cont(&self.host, pid, Why::LetGo))?;
        }
        self.step().await;
        self.write(vm, |record| {
            if let Part::Running { held, .. } = &mut record.part {
                *held = None;
            }
        });
        Ok(())
    }
}
