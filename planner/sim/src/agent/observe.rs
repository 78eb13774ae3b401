//! What a simulated agent says of a VM.

use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_proto::v1;
use vmferry_types::{HostId, Role, VmId};

use super::learn::Judged;
use super::{Agent, Refusal};
use crate::bugs::Bug;
use crate::journal::{Cont, Issue, Order, Part, Record};
use crate::qemu::Qemu;
use crate::world::{State, id_text, millis};

impl Agent {
    pub(super) fn observe(&self, vm: VmId) -> v1::VmObservation {
        self.world.with(|state| state.observe(&self.host, vm))
    }

    pub(super) fn describe(&self, vm: VmId) -> Result<v1::SourceDescription, Refusal> {
        self.ready(vm)?;
        self.world.with(|state| {
            let record = state.host(&self.host).and_then(|host| host.journal.records.get(&vm));
            let process = record.and_then(Record::process);
            let judged = process.and_then(|process| state.judge(&self.host, process));
            match judged {
                Some(Judged::Alive(_)) => Ok(v1::SourceDescription {
                    vm_id: vm.to_string(),
                    vm_name: crate::host::short(vm),
                    ..v1::SourceDescription::default()
                }),
                Some(Judged::Gone { .. }) => {
                    Err(Refusal::new("wrong_state", "its QEMU is not there any more"))
                }
                None => Err(Refusal::new("unknown_vm", "this host knows no such VM")),
            }
        })
    }
}

impl State {
    /// Returns what the agent of a host sees of a VM; with a number of its own.
    pub(crate) fn observe(&mut self, host: &HostId, vm: VmId) -> v1::VmObservation {
        let sequence = self.agent_mut(host).map_or(0, |agent| {
            agent.sequence += 1;
            agent.sequence
        });
        let at_ms = self.wall_ms(host);
        let Some(there) = self.host(host) else { return v1::VmObservation::default() };
        let trusts = self.bugged(Bug::AgentTrustsLostJournal);
        let lost = there.journal.lost && !trusts;
        let mut seen = v1::VmObservation {
            host_id: host.to_string(),
            vm_id: vm.to_string(),
            vm_name: crate::host::short(vm),
            boot_id: there.boot_id(host),
            sequence,
            observed_at_ms: at_ms,
            role: "absent".to_owned(),
            ..v1::VmObservation::default()
        };
        let Some(record) = there.journal.records.get(&vm) else {
            let unproven = lost || there.has_stranger(vm) && !trusts;
            let knowledge =
                if unproven { v1::Knowledge::Unreadable } else { v1::Knowledge::UnknownVm };
            seen.knowledge = knowledge.into();
            return seen;
        };
        let agent = there.agent.as_ref();
        let learned = agent.is_some_and(|agent| agent.learned.contains(&vm));
        let launching = agent.is_some_and(|agent| agent.launching.contains(&vm));
        let judged = record
            .process()
            .and_then(|process| self.judge(host, process))
            .filter(|_| learned && !launching);
        let qemu = match judged {
            Some(Judged::Alive(pid)) => self.qemu(host, pid),
            Some(Judged::Gone { .. }) | None => None,
        };
        let stranger = record.process().is_none() && there.has_stranger(vm) && !trusts;
        let knowledge = match (lost || stranger, learned, qemu.is_some_and(|qemu| qemu.silent)) {
            (true, _, _) => v1::Knowledge::Unreadable,
            (false, false, _) => v1::Knowledge::Learning,
            (false, true, true) => v1::Knowledge::Unresponsive,
            (false, true, false) => v1::Knowledge::Known,
        };
        seen.knowledge = knowledge.into();
        fill_record(&mut seen, record);
        role(record, judged.as_ref()).label().clone_into(&mut seen.role);
        seen.ever_continued &= !self.bugged(Bug::AgentForgetsCont);
        fill_gone(&mut seen, record, judged.as_ref());
        if let Some(qemu) = qemu {
            fill_qemu(&mut seen, record, qemu);
            let old = self.bugged(Bug::AgentTellsOldCompletion);
            if old && qemu.sent && qemu.transfer == TransferState::Device {
                tell_old_completion(&mut seen);
            }
        }
        if let Some(sight) = agent.and_then(|agent| agent.sights.get(&vm)) {
            seen.stopped_at_us = sight.stopped_at_us;
            seen.resumed_at_us = sight.resumed_at_us;
        }
        let still = agent
            .and_then(|agent| agent.lanes.get(&vm)?.still_since)
            .map_or(0, |since| millis(super::learn::age(since)));
        seen.still_ms = still;
        seen
    }
}

/// The deliberate mistake: the attempt before this one had been completed.
fn tell_old_completion(seen: &mut v1::VmObservation) {
    RunState::PostMigrate.word().clone_into(&mut seen.run_state);
    if let Some(transfer) = &mut seen.transfer {
        TransferState::Completed.word().clone_into(&mut transfer.status);
        transfer.complete = true;
    }
}

fn fill_record(seen: &mut v1::VmObservation, record: &Record) {
    seen.generation = record.fence.generation.value();
    seen.claim = record.fence.claim.value();
    seen.step = record.fence.step.value();
    seen.migration_id = id_text(record.fence.migration);
    seen.ever_continued = record.continued() == Cont::Ordered;
    if record.held().is_some() {
        seen.switched_off.push("vcpus".to_owned());
    }
    match record.outgoing().map(|sent| &sent.order) {
        None | Some(Order::Open) => {}
        Some(Order::Handed) => seen.handed = true,
        Some(Order::GaveUp(cause)) => {
            seen.gave_up = true;
            seen.gave_up_cause.clone_from(cause);
        }
        Some(Order::TakenBack(cause)) => {
            seen.handed = true;
            seen.gave_up = true;
            seen.gave_up_cause.clone_from(cause);
        }
    }
}

/// Returns what this host has of a VM. A launch that the agent did not live to see is no process
/// that was lost: nobody was told of it, and the command that began it is carried out again.
fn role(record: &Record, judged: Option<&Judged>) -> Role {
    let gone = match judged {
        Some(Judged::Gone { proof, .. }) => Some(proof.kind()),
        Some(Judged::Alive(_)) | None => None,
    };
    match &record.part {
        Part::Receiver { port: None, .. } if gone.is_some() => Role::Absent,
        Part::Running { .. } if gone == Some(v1::ProofKind::NeverStarted) => Role::Stopped,
        Part::Absent | Part::Stopped | Part::Running { .. } | Part::Receiver { .. } => {
            record.role()
        }
    }
}

fn fill_gone(seen: &mut v1::VmObservation, record: &Record, judged: Option<&Judged>) {
    let there = match role(record, judged) {
        Role::Running | Role::Held | Role::Receiver => true,
        Role::Absent | Role::Stopped => false,
    };
    match (record.process(), judged) {
        (Some(_), _) if !there => {}
        (Some(_), Some(Judged::Gone { proof, by_guest })) => {
            seen.gone = Some(proof.clone());
            if *by_guest {
                // A guest that turned itself off leaves its last run state behind.
                RunState::Shutdown.word().clone_into(&mut seen.run_state);
            }
        }
        (Some(_), Some(Judged::Alive(_)) | None) => {}
        (None, _) => {
            seen.gone = record
                .ended
                .as_ref()
                .filter(|ended| ended.migration == record.fence.migration)
                .map(|ended| ended.proof.clone());
        }
    }
}

fn fill_qemu(seen: &mut v1::VmObservation, record: &Record, qemu: &Qemu) {
    seen.qemu = Some(v1::QemuProcess {
        pid: qemu.pid,
        start_time: qemu.start_time,
        boot_id: seen.boot_id.clone(),
        alive: true,
    });
    if qemu.silent {
        return;
    }
    qemu.run.word().clone_into(&mut seen.run_state);
    seen.disks_active = qemu.run.has_run();
    if let Some(port) = qemu.port.filter(|_| qemu.transfer == TransferState::PostcopyPaused) {
        seen.waits_at = Some(v1::Listener {
            address: seen.host_id.clone(),
            port: port.into(),
            postcopy: true,
            ..v1::Listener::default()
        });
    }
    let Some(migration) = record.fence.migration else { return };
    let status = match &record.part {
        Part::Absent | Part::Stopped => None,
        Part::Running { process, .. } => match record.outgoing() {
            Some(sent) => match sent.issue {
                Issue::Accepted => Some(qemu.transfer),
                Issue::Refused => Some(TransferState::None),
                Issue::Intended if qemu.snapshot() == sent.before => Some(TransferState::None),
                Issue::Intended => Some(qemu.transfer),
            },
            None if process.admission == migration => Some(qemu.transfer),
            None => None,
        },
        Part::Receiver { migration: of, .. } => (*of == migration).then_some(qemu.transfer),
    };
    if let Some(status) = status {
        let word = if status == TransferState::None { "" } else { status.word() };
        seen.transfer = Some(v1::TransferStatus {
            migration_id: migration.to_string(),
            status: word.to_owned(),
            complete: status == TransferState::Completed,
            bytes_transferred: qemu.bytes,
            passes: (qemu.bytes >> 20) + 1,
            diverges: diverges(qemu),
            error: qemu.error.clone(),
            ..v1::TransferStatus::default()
        });
    }
}

/// What an agent makes of a transfer that goes over memory again and again.
fn diverges(qemu: &Qemu) -> String {
    let endless = qemu.transfer == TransferState::Active && qemu.bytes >= 3 << 20;
    if endless { "will not converge".to_owned() } else { String::new() }
}
