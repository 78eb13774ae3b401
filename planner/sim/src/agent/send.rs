//! The source's commands.

use std::time::Duration;

use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_proto::v1;
use vmferry_types::VmId;

use super::act::goes;
use super::learn::Judged;
use super::{Agent, Refusal};
use crate::bugs::Bug;
use crate::channel;
use crate::fence::Word;
use crate::host::{Why, short};
use crate::journal::{Cont, Issue, Order, Outgoing, Part, Process};
use crate::world::Invariant;

impl Agent {
    /// The process that runs the guest here, or is about to give it away.
    pub(super) fn running(&self, vm: VmId) -> Result<(Process, u32), Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let Part::Running { process, .. } = &record.part else {
            return Err(Refusal::new("wrong_state", "the VM does not run here"));
        };
        match self.judge(process) {
            Some(Judged::Alive(pid)) => Ok((process.clone(), pid)),
            Some(Judged::Gone { .. }) => Err(Refusal::new("wrong_state", "its QEMU is gone")),
            None => Err(Refusal::new("internal", "the host is gone")),
        }
    }

    pub(super) fn responsive(&self, pid: u32) -> Result<(), Refusal> {
        let silent =
            self.world.with(|state| state.qemu(&self.host, pid).is_some_and(|qemu| qemu.silent));
        if silent { Err(Refusal::new("unresponsive", "its QEMU does not answer")) } else { Ok(()) }
    }

    /// Refuses while an order of another migration is not settled.
    fn settled(&self, vm: VmId, word: &Word) -> Result<(), Refusal> {
        let other = self.record(vm).and_then(|record| record.unsettled());
        if other.is_some_and(|other| other != word.migration) {
            return Err(Refusal::new(
                "wrong_state",
                "the guest was handed over by another migration",
            ));
        }
        Ok(())
    }

    /// Begins to send, once.
    pub(super) async fn start_transfer(
        &self,
        vm: VmId,
        word: &Word,
        start: &v1::StartTransfer,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let (_, pid) = self.running(vm)?;
        self.responsive(pid)?;
        self.settled(vm, word)?;
        let sent = self.record(vm).and_then(|record| record.outgoing().cloned());
        let snapshot =
            self.world.with(|state| state.qemu(&self.host, pid).map(crate::qemu::Qemu::snapshot));
        if let Some(sent) = &sent {
            if let Order::GaveUp(cause) | Order::TakenBack(cause) = &sent.order {
                return Err(Refusal::new("gave_up", cause.clone()));
            }
            match sent.issue {
                Issue::Accepted => return Ok(v1::ExecuteReply::default()),
                // Died between the note and QEMU's answer: what has changed since is this attempt.
                Issue::Intended if snapshot != Some(sent.before) => {
                    self.issued(vm, Issue::Accepted);
                    return Ok(v1::ExecuteReply::default());
                }
                Issue::Intended | Issue::Refused => {}
            }
        }
        let (Some(before), Some(listener)) = (snapshot, &start.listener) else {
            return Err(Refusal::new("invalid", "no listener"));
        };
        let policy = start.policy.unwrap_or_default();
        self.write(vm, |record| {
            if let Part::Running { outgoing, .. } = &mut record.part {
                *outgoing = Some(Outgoing {
                    migration: word.migration,
                    before,
                    issue: Issue::Intended,
                    order: Order::Open,
                    timeout_ms: policy.timeout_ms,
                    stall_ms: policy.stall_ms,
                });
            }
        });
        // Of a guest that is held it is known since when it stands still.
        let held = self.record(vm).is_some_and(|record| record.held().is_some());
        self.world.with(|state| {
            state.saw(&self.host, vm, |sight| {
                if !held {
                    *sight = super::Sight::default();
                }
            });
        });
        self.step().await;
        let told = self.world.with(|state| match state.qemu_mut(&self.host, pid) {
            Some(qemu) => qemu.migrate().map_err(|error| Refusal::new("internal", error)),
            None => Err(Refusal::new("wrong_state", "its QEMU is gone")),
        });
        if let Err(refusal) = told {
            self.issued(vm, Issue::Refused);
            return Err(refusal);
        }
        let port = u16::try_from(listener.port).unwrap_or(0);
        self.world.send((self.host.clone(), pid), channel::host(&listener.address), port);
        self.step().await;
        self.issued(vm, Issue::Accepted);
        Ok(v1::ExecuteReply::default())
    }

    fn issued(&self, vm: VmId, issue: Issue) {
        self.write(vm, |record| {
            if let Some(sent) = record.outgoing_mut() {
                sent.issue = issue;
            }
        });
    }

    /// Writes down what was decided about the end of the attempt.
    fn decided(&self, vm: VmId, order: &Order) {
        self.write(vm, |record| {
            if let Some(sent) = record.outgoing_mut() {
                sent.order = order.clone();
            }
        });
    }

    /// Orders the switchover: noted first, then said.
    pub(super) async fn order(&self, vm: VmId) -> Result<v1::ExecuteReply, Refusal> {
        let (_, pid) = self.running(vm)?;
        self.responsive(pid)?;
        let sent = self.record(vm).and_then(|record| record.outgoing().cloned());
        let stands = self.world.with(|state| {
            let qemu = state.qemu(&self.host, pid);
            qemu.is_some_and(|qemu| qemu.transfer == TransferState::PreSwitchover)
        });
        match sent.map(|sent| sent.order) {
            None => return Err(Refusal::new("wrong_state", "nothing is sent")),
            Some(Order::GaveUp(cause) | Order::TakenBack(cause)) => {
                return Err(Refusal::new("gave_up", cause));
            }
            Some(Order::Handed) if !stands => return Ok(v1::ExecuteReply::default()),
            Some(Order::Handed) => {}
            Some(Order::Open) if !stands => {
                return Err(Refusal::new("wrong_state", "the guest does not stand still"));
            }
            Some(Order::Open) if self.parts_from_nobody(pid) => {
                self.decided(vm, &Order::GaveUp("nobody is at the other end".to_owned()));
                self.step().await;
                self.call_back(vm, pid).await?;
                return Err(Refusal::new("gave_up", "nobody is at the other end"));
            }
            Some(Order::Open) => {
                let forgets = self.world.with(|state| state.bugged(Bug::AgentForgetsOrder));
                if !forgets {
                    self.decided(vm, &Order::Handed);
                }
            }
        }
        self.step().await;
        self.world.with(|state| match state.qemu_mut(&self.host, pid) {
            Some(qemu) => qemu.order().map_err(|error| Refusal::new("internal", error)),
            None => Err(Refusal::new("wrong_state", "its QEMU is gone")),
        })?;
        self.step().await;
        Ok(v1::ExecuteReply::default())
    }

    /// Takes an unordered transfer back.
    pub(super) async fn cancel(
        &self,
        vm: VmId,
        word: &Word,
        cause: &str,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let (_, pid) = self.running(vm)?;
        self.settled(vm, word)?;
        let sent = self.record(vm).and_then(|record| record.outgoing().cloned());
        match sent.map(|sent| sent.order) {
            Some(Order::Handed | Order::TakenBack(_)) => {
                return Err(Refusal::new("wrong_state", "the switchover was ordered"));
            }
            None | Some(Order::GaveUp(_) | Order::Open) => {
                self.gives_up(vm, word.migration, cause.to_owned());
            }
        }
        self.step().await;
        self.call_back(vm, pid).await
    }

    /// Calls QEMU's transfer back, lets go on what is held, and waits until the guest runs.
    pub(super) async fn call_back(&self, vm: VmId, pid: u32) -> Result<v1::ExecuteReply, Refusal> {
        self.responsive(pid)?;
        self.world.with(|state| state.cancel_transfer(&self.host, pid));
        self.let_go(vm, pid).await?;
        self.wait_for_run(pid).await
    }

    async fn wait_for_run(&self, pid: u32) -> Result<v1::ExecuteReply, Refusal> {
        for _ in 0..100 {
            let run = self.world.with(|state| state.qemu(&self.host, pid).map(|qemu| qemu.run));
            match run {
                Some(run) if goes(run) => return Ok(v1::ExecuteReply::default()),
                Some(_) => {}
                None => return Err(Refusal::new("wrong_state", "its QEMU is gone")),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(Refusal::new("internal", "the guest does not go on"))
    }

    /// Lets the guest go on here, given that the receiver is gone.
    pub(super) async fn resume(
        &self,
        vm: VmId,
        word: &Word,
        proof: Option<v1::GoneProof>,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let proof = proof.unwrap_or_default();
        if proof.kind() == v1::ProofKind::Unspecified || proof.host_id == self.host.as_str() {
            return Err(Refusal::new("invalid", "no proof that the receiver is gone"));
        }
        let (_, pid) = self.running(vm)?;
        self.responsive(pid)?;
        if self.is_divided(pid) {
            return Err(Refusal::new("wrong_state", "postcopy has no way back"));
        }
        self.decided(vm, &Order::TakenBack(proof.ended));
        self.write(vm, |record| {
            if let Some(process) = record.process_mut() {
                process.generation = word.generation;
            }
        });
        self.step().await;
        let (run, busy) = self.world.with(|state| {
            state
                .qemu(&self.host, pid)
                .map_or((RunState::Unknown, false), |qemu| (qemu.run, qemu.busy()))
        });
        if busy {
            return self.call_back(vm, pid).await;
        }
        if !goes(run) {
            self.world.with(|state| state.cont(&self.host, pid, Why::Resumed))?;
        }
        self.let_go(vm, pid).await?;
        self.wait_for_run(pid).await
    }

    /// Ends the process whose guest goes on elsewhere.
    pub(super) async fn release(
        &self,
        vm: VmId,
        word: &Word,
        release: v1::ReleaseSource,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let proof = match &record.part {
            Part::Running { process, .. } => {
                if process.generation >= word.generation {
                    return Err(Refusal::new("wrong_state", "the VM is owned here"));
                }
                let handed = record.outgoing().is_some_and(|sent| sent.order == Order::Handed);
                let judged = self.judge(process);
                let alive = matches!(judged, Some(Judged::Alive(_)));
                if alive && !handed {
                    return Err(Refusal::new("wrong_state", "this guest was never handed over"));
                }
                if let Some(Judged::Alive(pid)) = judged
                    && self.is_divided(pid)
                    && !release.serves_no_more
                {
                    return Err(Refusal::new("wrong_state", "it serves the guest's memory"));
                }
                self.check_release(vm, process);
                let proof = self.kill(process).await?;
                self.tombstone(vm, &proof, Cont::Ordered);
                proof
            }
            Part::Receiver { .. } => {
                return Err(Refusal::new("wrong_state", "a receiver is here"));
            }
            Part::Absent | Part::Stopped => self.never_armed(vm, &record, word)?,
        };
        Ok(v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() })
    }

    /// R7: whoever is released has been overtaken by its guest elsewhere, or may have been.
    fn check_release(&self, vm: VmId, process: &Process) {
        self.world.with(|state| {
            let head = state.guests.get(&vm).map(|guest| guest.head);
            let there = state.host(&self.host).and_then(|host| host.by_launch(process.launch));
            let given_up = state.guests.get(&vm).is_some_and(|guest| guest.lost.is_some());
            let newest = !given_up && there.is_some_and(|qemu| Some(qemu.image) == head);
            let told = state.hosts.values().any(|host| {
                host.journal.records.get(&vm).is_some_and(|record| {
                    let other = record.process().is_none_or(|other| other.launch != process.launch);
                    other && record.continued() == Cont::Ordered
                })
            });
            if newest && !told {
                let what = format!("{} is released, and was never let go on elsewhere", short(vm));
                state.violated(Invariant::CommitThenAct, what);
                if let Some(guest) = state.guests.get_mut(&vm) {
                    guest.released_early = Some(self.host.clone());
                }
            }
        });
    }

    /// Ends an ordered source that was decided against.
    pub(super) async fn kill_source(&self, vm: VmId) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let handed = record.outgoing().is_some_and(|sent| sent.order == Order::Handed);
        let proof = match &record.part {
            Part::Running { process, .. } if handed => {
                let proof = self.kill(process).await?;
                self.tombstone(vm, &proof, Cont::Ordered);
                proof
            }
            Part::Absent | Part::Stopped if record.ended.is_some() => {
                record.ended.map(|ended| ended.proof).unwrap_or_default()
            }
            Part::Running { .. } | Part::Receiver { .. } | Part::Absent | Part::Stopped => {
                return Err(Refusal::new("wrong_state", "it was not ordered"));
            }
        };
        Ok(v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() })
    }
}
