//! A guest that goes before its memory, and the channel between its halves.

use vmferry_planner_core::evidence::TransferState;
use vmferry_proto::v1;
use vmferry_types::VmId;

use super::learn::Judged;
use super::{Agent, Refusal};
use crate::channel;
use crate::fence::Word;
use crate::journal::{Order, Part, Record};
use crate::world::{Place, PointKind};

impl Agent {
    /// Stops the guest, durably, and lets it go before its memory.
    pub(super) async fn start_postcopy(
        &self,
        vm: VmId,
        word: &Word,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let (_, pid) = self.running(vm)?;
        self.responsive(pid)?;
        let sent = self.record(vm).and_then(|record| record.outgoing().cloned());
        let transfer = self.world.with(|state| state.qemu(&self.host, pid).map(|it| it.transfer));
        match (sent.map(|sent| sent.order), transfer) {
            (None, _) => return Err(Refusal::new("wrong_state", "nothing is sent")),
            (Some(Order::GaveUp(cause) | Order::TakenBack(cause)), _) => {
                return Err(Refusal::new("gave_up", cause));
            }
            (Some(Order::Handed), _) | (Some(Order::Open), Some(TransferState::PreSwitchover)) => {
                return Ok(v1::ExecuteReply::default());
            }
            (Some(Order::Open), Some(TransferState::Setup | TransferState::Active)) => {}
            (Some(Order::Open), _) => {
                return Err(Refusal::new("wrong_state", "no memory crosses"));
            }
        }
        self.write(vm, |record| {
            if let Part::Running { held, .. } = &mut record.part {
                *held = Some(word.migration);
            }
        });
        self.step().await;
        let told = self.world.with(|state| {
            if let Some(mishap) = state.point(PointKind::QemuStep, "part") {
                state.strike(mishap);
            }
            let pages = state.dice.qemu.between(1, 12);
            let Some(qemu) = state.qemu_mut(&self.host, pid) else {
                return Err(Refusal::new("wrong_state", "its QEMU is gone"));
            };
            let told = qemu.part(pages).map_err(|error| Refusal::new("internal", error));
            if told.is_ok() {
                let run = vmferry_planner_core::evidence::RunState::Paused;
                state.stop_vcpus(&self.host, pid, run);
            }
            told
        });
        told?;
        self.step().await;
        Ok(v1::ExecuteReply::default())
    }

    /// Makes the half that is here wait for the other to come back.
    pub(super) async fn recover(&self, vm: VmId, word: &Word) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let process = record.process().filter(|process| process.admission == word.migration);
        let pid = match process.and_then(|process| self.judge(process)) {
            Some(Judged::Alive(pid)) => pid,
            Some(Judged::Gone { proof, .. }) => {
                return Err(Refusal::new("receiver_gone", proof.ended));
            }
            None => return Err(Refusal::new("wrong_state", "no half of the guest is here")),
        };
        if !self.is_divided(pid) {
            return Err(Refusal::new("wrong_state", "no guest is here whose memory follows"));
        }
        self.step().await;
        let port = self.world.with(|state| {
            state.force_pause(&self.host, pid);
            let port = state.hosts.get_mut(&self.host).map_or(0, crate::host::Host::fresh_port);
            match state.qemu_mut(&self.host, pid) {
                Some(qemu) => {
                    qemu.wait(port).map_err(|error| Refusal::new("internal", error))?;
                    Ok(port)
                }
                None => Err(Refusal::new("receiver_gone", "it ended")),
            }
        })?;
        self.step().await;
        let listener = v1::Listener {
            address: self.host.to_string(),
            port: port.into(),
            postcopy: true,
            ..v1::Listener::default()
        };
        Ok(v1::ExecuteReply { listener: Some(listener), ..v1::ExecuteReply::default() })
    }

    /// Lets the source go on serving.
    pub(super) async fn resume_transfer(
        &self,
        vm: VmId,
        resume: &v1::ResumeTransfer,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let (_, pid) = self.running(vm)?;
        self.responsive(pid)?;
        let handed = self
            .record(vm)
            .is_some_and(|record| record.outgoing().is_some_and(|it| it.order == Order::Handed));
        let Some(listener) = resume.listener.as_ref().filter(|_| handed) else {
            return Err(Refusal::new("wrong_state", "nothing was handed over"));
        };
        if !self.is_divided(pid) {
            return Err(Refusal::new("wrong_state", "no guest left here whose memory follows"));
        }
        let there = channel::host(&listener.address);
        let way = self.world.with(|state| {
            let here = Place::Host(self.host.clone());
            state.connected(&here, &Place::Host(there.clone()))
        });
        if !way {
            return Err(Refusal::new("wrong_state", "there is no way to the other half"));
        }
        self.step().await;
        self.world.with(|state| {
            state.force_pause(&self.host, pid);
            match state.qemu_mut(&self.host, pid) {
                Some(qemu) => qemu.resume().map_err(|error| Refusal::new("internal", error)),
                None => Err(Refusal::new("wrong_state", "its QEMU is gone")),
            }
        })?;
        let port = u16::try_from(listener.port).unwrap_or(0);
        self.world.send((self.host.clone(), pid), there, port);
        self.step().await;
        Ok(v1::ExecuteReply::default())
    }

    pub(super) fn is_divided(&self, pid: u32) -> bool {
        self.world.with(|state| {
            state.qemu(&self.host, pid).is_some_and(|qemu| qemu.transfer.is_divided())
        })
    }

    /// Whether a guest that is to go first would go to nobody: QEMU does not say so by itself.
    pub(super) fn parts_from_nobody(&self, pid: u32) -> bool {
        self.world.with(|state| {
            let Some(qemu) = state.qemu(&self.host, pid) else { return false };
            let channel = qemu.channel.and_then(|id| state.channels.get(&id));
            qemu.parts && channel.is_none_or(|channel| channel.broken.is_some())
        })
    }

    /// Whether the guest here waits for memory that nobody brings.
    pub(super) fn is_paused_half(&self, record: &Record) -> bool {
        let Some(Judged::Alive(pid)) = record.process().and_then(|process| self.judge(process))
        else {
            return false;
        };
        self.world.with(|state| {
            state
                .qemu(&self.host, pid)
                .is_some_and(|qemu| qemu.transfer == TransferState::PostcopyPaused)
        })
    }
}
