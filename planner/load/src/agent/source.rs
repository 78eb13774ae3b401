//! The source's commands.

use std::time::Duration;

use vmferry_proto::v1;
use vmferry_types::{Fence, HostId, VmId};

use super::{Agent, Answer, Refusal};
use crate::fleet::State;
use crate::journal::{Cont, Ended, Order, Outgoing, Part};
use crate::qemu::{Place, Run, Transfer};

/// How often a guest that is to go on is looked at, and how many times.
const LOOK: Duration = Duration::from_millis(20);
const LOOKS: u32 = 250;

impl Agent {
    /// The process that runs the guest here, or is about to give it away.
    pub(super) fn running(&self, vm: VmId) -> Answer<Place> {
        match self.record(vm).part {
            Part::Running { process, .. } => Ok((self.host.clone(), process.pid)),
            Part::Absent | Part::Receiver { .. } => {
                Err(Refusal::wrong_state("the VM does not run here"))
            }
        }
    }

    /// Begins to send, once.
    pub(super) async fn start_transfer(
        &self,
        fence: &Fence,
        start: &v1::StartTransfer,
    ) -> Answer<v1::ExecuteReply> {
        let vm = fence.vm;
        let place = self.running(vm)?;
        let record = self.record(vm);
        let owned = record.process().is_some_and(|of| of.generation == fence.generation);
        if !owned {
            return Err(Refusal::wrong_state("the guest runs here under another generation"));
        }
        if let Some(sent) = record.outgoing() {
            return match &sent.order {
                Order::GaveUp(cause) | Order::TakenBack(cause) => {
                    Err(Refusal::new("gave_up", cause.clone()))
                }
                Order::Open | Order::Handed => Ok(v1::ExecuteReply::default()),
            };
        }
        if record.sent().is_some_and(|sent| sent.order == Order::Handed) {
            return Err(Refusal::wrong_state("an earlier order is not settled"));
        }
        let target = target(start.listener.as_ref())?;
        let policy = start.policy.unwrap_or_default();
        self.write(vm, |record| {
            if let Part::Running { outgoing, .. } = &mut record.part {
                *outgoing = Some(Outgoing {
                    migration: fence.migration,
                    order: Order::Open,
                    timeout_ms: policy.timeout_ms,
                    stall_ms: policy.stall_ms,
                });
            }
        });
        self.moment().await;
        self.fleet.with(|state| {
            let now = state.now_us();
            if let Some(host) = state.hosts.get_mut(&self.host) {
                let sight = host.sight(vm);
                (sight.began_us, sight.progressed_us, sight.bytes) = (now, now, 0);
                sight.still_since_us = None;
            }
            let qemu = state.qemu_mut(&place);
            let qemu = qemu.ok_or_else(|| Refusal::wrong_state("its QEMU is gone"))?;
            qemu.migrate().map_err(|error| Refusal::new("internal", error))
        })?;
        self.fleet.send(place, target);
        Ok(v1::ExecuteReply::default())
    }

    /// Writes down what was decided about the end of the attempt.
    pub(super) fn decided(&self, vm: VmId, order: &Order) {
        self.write(vm, |record| {
            if let Some(sent) = record.outgoing_mut() {
                sent.order = order.clone();
            }
        });
    }

    /// Orders the switchover: noted first, then said.
    pub(super) async fn order(&self, vm: VmId) -> Answer<v1::ExecuteReply> {
        let place = self.running(vm)?;
        let stands = self.fleet.with(|state| {
            state.qemu(&place).is_some_and(|qemu| qemu.transfer == Transfer::PreSwitchover)
        });
        match self.record(vm).outgoing().map(|sent| &sent.order) {
            None => return Err(Refusal::wrong_state("nothing is sent")),
            Some(Order::GaveUp(cause) | Order::TakenBack(cause)) => {
                return Err(Refusal::new("gave_up", cause.clone()));
            }
            Some(Order::Handed) if !stands => return Ok(v1::ExecuteReply::default()),
            Some(Order::Open) if !stands => {
                return Err(Refusal::wrong_state("the guest does not stand still"));
            }
            Some(Order::Handed | Order::Open) => {}
        }
        self.decided(vm, &Order::Handed);
        self.moment().await;
        self.fleet.with(|state| {
            let qemu = state.qemu_mut(&place);
            let qemu = qemu.ok_or_else(|| Refusal::wrong_state("its QEMU is gone"))?;
            qemu.order().map_err(|error| Refusal::new("internal", error))
        })?;
        Ok(v1::ExecuteReply::default())
    }

    /// Takes an unordered transfer back.
    pub(super) async fn cancel(&self, vm: VmId, cause: &str) -> Answer<v1::ExecuteReply> {
        let place = self.running(vm)?;
        match self.record(vm).outgoing().map(|sent| &sent.order) {
            None | Some(Order::Open | Order::GaveUp(_)) => {}
            Some(Order::Handed | Order::TakenBack(_)) => {
                return Err(Refusal::wrong_state("the switchover was ordered"));
            }
        }
        self.write(vm, |record| record.give_up(cause.to_owned()));
        self.moment().await;
        self.fleet.with(|state| state.call_back(&place));
        self.let_go(vm, &place).await;
        self.wait_for_run(&place).await
    }

    async fn wait_for_run(&self, place: &Place) -> Answer<v1::ExecuteReply> {
        for _ in 0..LOOKS {
            match self.fleet.with(|state| state.qemu(place).map(|qemu| qemu.run)) {
                Some(Run::Running) => return Ok(v1::ExecuteReply::default()),
                Some(Run::InMigrate | Run::FinishMigrate | Run::PostMigrate | Run::Paused) => {}
                None => return Err(Refusal::wrong_state("its QEMU is gone")),
            }
            tokio::time::sleep(LOOK).await;
        }
        Err(Refusal::new("unresponsive", "the guest does not go on"))
    }

    /// Lets the guest go on here, given that the receiver is gone.
    pub(super) async fn resume(
        &self,
        fence: &Fence,
        proof: Option<v1::GoneProof>,
    ) -> Answer<v1::ExecuteReply> {
        let vm = fence.vm;
        let place = self.running(vm)?;
        let order = match self.record(vm).outgoing().map(|sent| sent.order.clone()) {
            None => return Err(Refusal::wrong_state("nothing was sent for this migration")),
            Some(Order::Handed) => Order::TakenBack(believed(proof, &self.host)?),
            Some(Order::Open) => Order::GaveUp("resumed by command".to_owned()),
            Some(settled @ (Order::GaveUp(_) | Order::TakenBack(_))) => settled,
        };
        self.fleet.with(|state| {
            state.write(&self.host, vm, |record| {
                if let Some(sent) = record.outgoing_mut() {
                    sent.order = order;
                }
                if let Part::Running { process, .. } = &mut record.part {
                    process.generation = fence.generation;
                }
            });
            state.own(vm, fence.generation);
        });
        self.moment().await;
        self.fleet.with(|state| {
            state.call_back(&place);
            if state.qemu(&place).is_some_and(|qemu| qemu.run == Run::PostMigrate) {
                state.run_vcpus(&place, "resumed by command");
            }
        });
        self.let_go(vm, &place).await;
        self.wait_for_run(&place).await
    }

    /// Ends the process whose guest goes on elsewhere.
    pub(super) async fn release(&self, fence: &Fence) -> Answer<v1::ExecuteReply> {
        let record = self.record(fence.vm);
        match &record.part {
            Part::Absent => return Ok(self.never_started(fence)),
            Part::Receiver { .. } => {
                return Err(Refusal::wrong_state("this is a receiver, not a source"));
            }
            Part::Running { process, .. } if fence.generation <= process.generation => {
                return Err(Refusal::wrong_state("the guest runs here under this generation"));
            }
            Part::Running { .. } => {}
        }
        if record.outgoing().is_none_or(|sent| sent.order != Order::Handed) {
            return Err(Refusal::wrong_state("it was never handed over by this migration"));
        }
        self.moment().await;
        self.fleet.with(|state| state.own(fence.vm, fence.generation));
        Ok(self.end(fence))
    }

    /// Ends an ordered source that was decided against.
    pub(super) async fn kill_source(&self, fence: &Fence) -> Answer<v1::ExecuteReply> {
        let record = self.record(fence.vm);
        match &record.part {
            Part::Absent => return Ok(self.never_started(fence)),
            Part::Receiver { .. } => {
                return Err(Refusal::wrong_state("this is a receiver, not a source"));
            }
            Part::Running { .. } => {}
        }
        if record.outgoing().is_none_or(|sent| sent.order != Order::Handed) {
            return Err(Refusal::wrong_state("the switchover was not ordered"));
        }
        let place = self.running(fence.vm)?;
        let runs =
            self.fleet.with(|state| state.qemu(&place).is_some_and(|q| q.run == Run::Running));
        if runs {
            return Err(Refusal::wrong_state("QEMU resumed the guest here by itself"));
        }
        self.moment().await;
        Ok(self.end(fence))
    }

    /// Ends the process that the journal names, and remembers that it is gone.
    pub(super) fn end(&self, fence: &Fence) -> v1::ExecuteReply {
        let proof = self.fleet.with(|state| state.end_of_record(&self.host, fence));
        v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() }
    }

    /// There is no process: the one there was has its proof, or the whole journal is one.
    pub(super) fn never_started(&self, fence: &Fence) -> v1::ExecuteReply {
        let proof = self.fleet.with(|state| {
            let record = state.record(&self.host, fence.vm);
            let known = record.ended.filter(|ended| ended.migration == Some(fence.migration));
            if let Some(ended) = known {
                return ended.proof;
            }
            let host = state.hosts.get(&self.host);
            let proof = host.map(|there| there.proof(&self.host, None)).unwrap_or_default();
            let noted = proof.clone();
            state.write(&self.host, fence.vm, |record| {
                record.ended = Some(Ended {
                    migration: Some(fence.migration),
                    proof: noted,
                    cont: Cont::Never,
                });
            });
            proof
        });
        v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() }
    }
}

impl State {
    fn end_of_record(&mut self, host: &HostId, fence: &Fence) -> v1::GoneProof {
        let record = self.record(host, fence.vm);
        let place = record.process().map(|process| (host.clone(), process.pid));
        let identity = place.as_ref().and_then(|place| self.qemu(place));
        let identity = identity.map(|qemu| (qemu.pid, qemu.start_time));
        let proof =
            self.hosts.get(host).map(|there| there.proof(host, identity)).unwrap_or_default();
        if let Some(place) = &place {
            self.end_process(place);
        }
        let (noted, cont) = (proof.clone(), record.continued());
        self.write(host, fence.vm, |record| {
            record.part = Part::Absent;
            record.ended = Some(Ended { migration: Some(fence.migration), proof: noted, cont });
        });
        proof
    }
}

/// Reads whom to send to: receivers listen at the address of their host's number.
fn target(listener: Option<&v1::Listener>) -> Answer<(HostId, u16)> {
    let invalid = || Refusal::new("invalid", "start_transfer.listener cannot be used");
    let listener = listener.ok_or_else(invalid)?;
    let host = listener.address.parse().map_err(|_| invalid())?;
    let port = u16::try_from(listener.port).map_err(|_| invalid())?;
    Ok((host, port))
}

/// Says in words what proves that the receiver is gone.
fn believed(proof: Option<v1::GoneProof>, own: &HostId) -> Answer<String> {
    let proof = proof.unwrap_or_default();
    if proof.kind() == v1::ProofKind::Unspecified
        || proof.host_id.is_empty()
        || proof.host_id == own.as_str()
    {
        return Err(Refusal::new("invalid", "no proof that the receiver is gone"));
    }
    Ok(format!("the receiver on {} is gone: {}", proof.host_id, proof.ended))
}
