//! Starting and stopping.

use vmferry_planner_core::evidence::RunState;
use vmferry_proto::v1;
use vmferry_types::VmId;

use super::learn::Judged;
use super::{Agent, Refusal};
use crate::bugs::Bug;
use crate::fence::Word;
use crate::host::Killer;
use crate::journal::{Cont, Order, Part, Process};

impl Agent {
    /// Boots a guest, or finds the one that this very command booted.
    pub(super) async fn start(&self, vm: VmId, word: &Word) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        match &record.part {
            Part::Absent | Part::Stopped => {}
            Part::Running { process, .. } => match self.judge(process) {
                Some(Judged::Gone { .. }) => self.forget_tap(process),
                Some(Judged::Alive(_))
                    if process.admission == word.migration && !self.boots_twice(process) =>
                {
                    return Ok(v1::ExecuteReply::default());
                }
                Some(Judged::Alive(_)) if self.boots_twice(process) => {}
                Some(Judged::Alive(_)) => {
                    return Err(Refusal::new("wrong_state", "the VM runs here already"));
                }
                None => return Err(Refusal::new("internal", "the host is gone")),
            },
            Part::Receiver { .. } => {
                return Err(Refusal::new("wrong_state", "a receiver of this VM is here"));
            }
        }
        self.alone(vm)?;
        let blocked = self.world.with(|state| {
            let odds = state.weather.blocked;
            state.dice.agent.chance(odds)
        });
        if blocked {
            return Err(Refusal::new("blocked", "the bridge br9 is missing"));
        }
        let process = self.plan(vm, word);
        self.write(vm, |record| {
            record.ended = None;
            record.part = Part::Running { process: process.clone(), outgoing: None, held: None };
        });
        self.step().await;
        self.boot(vm, &process).await
    }

    /// The deliberate mistake: what was not noted was not booted.
    fn boots_twice(&self, process: &Process) -> bool {
        process.identity.is_none() && self.world.with(|state| state.bugged(Bug::AgentBootsTwice))
    }

    /// Launches the process that the journal names, whose guest boots at once.
    async fn boot(&self, vm: VmId, process: &Process) -> Result<v1::ExecuteReply, Refusal> {
        let started = self.world.with(|state| {
            let pid = state.start_process(&self.host, vm, process.launch, RunState::Prelaunch)?;
            state.boot_guest(&self.host, pid);
            Some((pid, state.qemu(&self.host, pid)?.start_time))
        });
        let Some(identity) = started else {
            return Err(Refusal::new("internal", "QEMU could not be started"));
        };
        self.step().await;
        self.write(vm, |record| {
            if let Some(process) = record.process_mut() {
                process.identity = Some(identity);
            }
        });
        self.world.with(|state| {
            if let Some(agent) = state.agent_mut(&self.host) {
                agent.launching.remove(&vm);
            }
        });
        self.step().await;
        Ok(v1::ExecuteReply::default())
    }

    /// Lets a guest turn itself off, or pulls its plug.
    pub(super) async fn stop(
        &self,
        vm: VmId,
        word: &Word,
        how: v1::StopHow,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let process = match &record.part {
            Part::Absent | Part::Stopped => {
                let proof = self.never_armed(vm, &record, word)?;
                return Ok(v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() });
            }
            Part::Receiver { .. } => {
                return Err(Refusal::new("wrong_state", "this is a receiver, not a running VM"));
            }
            Part::Running { process, outgoing, .. } => {
                let pid = match self.judge(process) {
                    Some(Judged::Alive(pid)) => Some(pid),
                    Some(Judged::Gone { .. }) => None,
                    None => return Err(Refusal::new("internal", "the host is gone")),
                };
                let handed = outgoing.as_ref().is_some_and(|sent| sent.order == Order::Handed);
                if pid.is_some() && handed {
                    return Err(Refusal::new("wrong_state", "the guest may be elsewhere"));
                }
                let busy = self.world.with(|state| {
                    pid.and_then(|pid| state.qemu(&self.host, pid)).is_some_and(|qemu| qemu.busy())
                });
                if busy {
                    return Err(Refusal::new("wrong_state", "the VM is being migrated"));
                }
                if let Some(pid) = pid
                    && how == v1::StopHow::Powerdown
                {
                    self.power_down(pid).await?;
                }
                process
            }
        };
        let proof = self.end(process, Killer::Stop).await?;
        self.step().await;
        self.note_end(vm, &proof, Cont::Ordered, Part::Stopped);
        Ok(v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() })
    }

    /// Asks the guest, which may not listen.
    async fn power_down(&self, pid: u32) -> Result<(), Refusal> {
        self.responsive(pid)?;
        let deaf = self.world.with(|state| {
            let odds = state.weather.deaf;
            state.dice.agent.chance(odds)
        });
        self.step().await;
        if deaf {
            return Err(Refusal::new("wrong_state", "the guest did not power off"));
        }
        self.world.with(|state| state.end_process(&self.host, pid, "exit 0", Killer::Guest));
        Ok(())
    }

    /// Forgets what was defined.
    pub(super) fn forget(&self, vm: VmId) -> Result<v1::ExecuteReply, Refusal> {
        match self.record(vm).unwrap_or_default().part {
            Part::Absent => {}
            Part::Stopped => self.write(vm, |record| record.part = Part::Absent),
            Part::Running { .. } | Part::Receiver { .. } => {
                return Err(Refusal::new("wrong_state", "a process of this VM is here"));
            }
        }
        Ok(v1::ExecuteReply::default())
    }
}
