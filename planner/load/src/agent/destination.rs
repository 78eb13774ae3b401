//! The destination's commands.

use vmferry_proto::v1;
use vmferry_types::{Fence, VmId};

use super::{Agent, Answer, Refusal};
use crate::journal::{Cont, Part, Process};
use crate::qemu::{Qemu, Run, Transfer};

impl Agent {
    /// Starts the receiver, or finds the one already there.
    pub(super) async fn arm(&self, fence: &Fence) -> Answer<v1::ExecuteReply> {
        match self.record(fence.vm).part {
            Part::Running { .. } => return Err(Refusal::wrong_state("the VM runs here")),
            Part::Receiver { process, port, .. } => {
                return if process.admission == Some(fence.migration) {
                    Ok(self.listening(port))
                } else {
                    Err(Refusal::wrong_state("another receiver of the VM is here"))
                };
            }
            Part::Absent => {}
        }
        self.moment().await;
        let port = self.fleet.with(|state| {
            let start_time = state.now_us() / 10_000;
            let there = state.hosts.get_mut(&self.host)?;
            let (pid, port) = (there.fresh_pid(), there.fresh_port());
            there.qemus.insert(pid, Qemu::receiver(fence.vm, pid, start_time, port));
            state.write(&self.host, fence.vm, |record| {
                let process =
                    Process { pid, generation: fence.generation, admission: Some(fence.migration) };
                record.ended = None;
                record.part = Part::Receiver { process, port, cont: Cont::Never };
            });
            state.check_memory(&self.host, fence.vm);
            Some(port)
        });
        port.map(|port| self.listening(port))
            .ok_or_else(|| Refusal::new("internal", "the host is gone"))
    }

    /// Receivers are reached by the name of their host.
    fn listening(&self, port: u16) -> v1::ExecuteReply {
        let listener = v1::Listener {
            address: self.host.to_string(),
            port: port.into(),
            ..v1::Listener::default()
        };
        v1::ExecuteReply { listener: Some(listener), ..v1::ExecuteReply::default() }
    }

    /// Lets the guest go on here, under the newer generation.
    pub(super) async fn go_on(&self, fence: &Fence) -> Answer<v1::ExecuteReply> {
        let vm = fence.vm;
        let (process, cont) = match self.record(vm).part {
            Part::Receiver { process, cont, .. } if process.admission == Some(fence.migration) => {
                (process, cont)
            }
            Part::Running { process, .. }
                if process.admission == Some(fence.migration)
                    && process.generation == fence.generation =>
            {
                return Ok(v1::ExecuteReply::default());
            }
            Part::Running { .. } => return Err(Refusal::wrong_state("the VM runs here")),
            Part::Receiver { .. } | Part::Absent => return Err(self.no_receiver(vm, fence)),
        };
        if cont == Cont::Never && fence.generation <= process.generation {
            return Err(Refusal::wrong_state(
                "the guest goes on here under a newer generation only",
            ));
        }
        let place = (self.host.clone(), process.pid);
        let complete = self.fleet.with(|state| {
            state.qemu(&place).is_some_and(|qemu| {
                qemu.transfer == Transfer::Completed
                    && (qemu.run == Run::Paused || qemu.run == Run::Running)
            })
        });
        if !complete {
            return Err(Refusal::wrong_state("the guest has not arrived whole"));
        }
        self.fleet.with(|state| {
            state.write(&self.host, vm, |record| {
                if let Part::Receiver { process, cont, .. } = &mut record.part {
                    process.generation = fence.generation;
                    *cont = Cont::Ordered;
                }
            });
            state.own(vm, fence.generation);
        });
        self.moment().await;
        self.fleet.with(|state| state.run_vcpus(&place, "continued"));
        self.moment().await;
        self.write(vm, |record| {
            if let Part::Receiver { process, .. } = &record.part {
                let process = process.clone();
                record.part = Part::Running { process, outgoing: None, held: None };
            }
        });
        Ok(v1::ExecuteReply::default())
    }

    fn no_receiver(&self, vm: VmId, fence: &Fence) -> Refusal {
        match self.record(vm).ended {
            Some(ended) if ended.migration == Some(fence.migration) => {
                Refusal::new("receiver_gone", ended.proof.ended)
            }
            Some(_) | None => Refusal::wrong_state("there is no receiver of this migration"),
        }
    }

    /// Ends the receiver, proven.
    pub(super) async fn destroy(&self, fence: &Fence) -> Answer<v1::ExecuteReply> {
        match self.record(fence.vm).part {
            Part::Absent => return Ok(self.never_started(fence)),
            Part::Running { .. } => return Err(Refusal::wrong_state("the guest runs here")),
            Part::Receiver { process, .. } if process.admission != Some(fence.migration) => {
                return Err(Refusal::wrong_state("the receiver here is of another migration"));
            }
            Part::Receiver { cont: Cont::Ordered, .. } => {
                return Err(Refusal::wrong_state("the guest may run here"));
            }
            Part::Receiver { cont: Cont::Never, .. } => {}
        }
        self.moment().await;
        Ok(self.end(fence))
    }
}
