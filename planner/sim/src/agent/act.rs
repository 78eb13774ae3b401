//! Commands, dispatched.

use vmferry_planner_core::evidence::RunState;
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{HostId, VmId};

use super::learn::Judged;
use super::{Agent, Refusal};
use crate::fence::Word;
use crate::host::{Killer, Why, short};
use crate::journal::{Cont, Ended, Part, Process};
use crate::qemu::Resumes;
use crate::world::{Invariant, PointKind, State};

impl Agent {
    pub(super) async fn act(
        &self,
        vm: VmId,
        word: &Word,
        action: Option<Action>,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let Some(action) = action else { return Err(Refusal::new("invalid", "no action")) };
        let name = label(&action);
        self.world.with(|state| {
            *state.counts.commands.entry(name).or_default() += 1;
            state.note(|| {
                format!(
                    "host {}: {name} of {} (claim {}, step {}, generation {})",
                    self.host,
                    short(vm),
                    word.claim,
                    word.step,
                    word.generation
                )
            });
        });
        if self.fails() {
            return Err(Refusal::new("internal", "something here failed"));
        }
        self.land(vm, word, name);
        let outcome = match action {
            Action::ArmReceiver(_) => self.arm(vm, word).await,
            Action::StartTransfer(start) => self.start_transfer(vm, word, &start).await,
            Action::OrderSwitchover(_) => self.order(vm).await,
            Action::CancelTransfer(cancel) => self.cancel(vm, word, &cancel.cause).await,
            Action::ResumeSource(resume) => self.resume(vm, word, resume.receiver_gone).await,
            Action::ContinueDestination(_) => self.go_on(vm, word).await,
            Action::DestroyReceiver(destroy) => {
                self.destroy(vm, word, destroy.source_gone.as_ref()).await
            }
            Action::ReleaseSource(release) => self.release(vm, word, release).await,
            Action::StartPostcopy(_) => self.start_postcopy(vm, word).await,
            Action::RecoverReceiver(_) => self.recover(vm, word).await,
            Action::ResumeTransfer(resume) => self.resume_transfer(vm, &resume).await,
            Action::KillSource(_) => self.kill_source(vm).await,
            Action::StartVm(_) => self.start(vm, word).await,
            Action::StopVm(stop) => self.stop(vm, word, stop.how()).await,
            Action::ForgetVm(_) => self.forget(vm),
            Action::HoldGuest(_) => self.hold(vm, word).await,
            // Its transfers have no limits that anybody could tell.
            Action::SetLimits(_) => Err(Refusal::new("wrong_state", "nothing crosses")),
            Action::ShutDownGuest(_) | Action::StartReceiver(_) => {
                Err(Refusal::new("invalid", "is not simulated"))
            }
        };
        if let Err(refusal) = &outcome {
            self.world.note(|| {
                format!(
                    "host {}: refuses {name}: {} {}",
                    self.host, refusal.detail.code, refusal.message
                )
            });
        }
        outcome
    }

    /// Whether the agent fails by chance, having done nothing.
    fn fails(&self) -> bool {
        self.world.with(|state| {
            let storm = state.at_ms() < state.weather.calm_at_ms;
            let odds = state.weather.fails;
            storm && state.dice.agent.chance(odds)
        })
    }

    /// I2: no effect lands under an older generation than any commit gave out, nor after a newer
    /// word was heard here.
    fn land(&self, vm: VmId, word: &Word, name: &'static str) {
        self.world.with(|state| {
            state.check_owed(vm, word.migration, name);
            let heard = state.words.entry((self.host.clone(), vm)).or_insert((word.claim, word.step));
            let newest = *heard;
            *heard = newest.max((word.claim, word.step));
            if (word.claim, word.step) < newest {
                state.violated(
                    Invariant::Generations,
                    format!("{name} of {} lands on {} by claim {}, step {}, after {newest:?} was heard",
                        short(vm), self.host, word.claim, word.step),
                );
            }
            // What was moved by hand is known at its old host once that is told to let go.
            let newest = state.ledger.get(&vm).copied().filter(|_| !state.by_hand.contains(&vm));
            if let Some(newest) = newest.filter(|newest| word.generation < *newest) {
                state.violated(
                    Invariant::Generations,
                    format!("{name} of {} lands on {} under generation {}, after {newest} was given out",
                        short(vm), self.host, word.generation),
                );
            }
        });
    }

    /// Returns what became of a process.
    pub(super) fn judge(&self, process: &Process) -> Option<Judged> {
        self.world.with(|state| state.judge(&self.host, process))
    }

    /// Kills a process and says that it is gone; its tap goes with it.
    pub(super) async fn kill(&self, process: &Process) -> Result<v1::GoneProof, Refusal> {
        self.end(process, Killer::Command).await
    }

    /// The same, for a reason of its own.
    pub(super) async fn end(
        &self,
        process: &Process,
        killer: Killer,
    ) -> Result<v1::GoneProof, Refusal> {
        let proof = match self.judge(process) {
            Some(Judged::Gone { proof, .. }) => proof,
            Some(Judged::Alive(pid)) => {
                let lies =
                    self.world.with(|state| state.bugged(crate::bugs::Bug::AgentLiesAboutGone));
                if lies {
                    let (pid, start_time) = process.identity.unwrap_or_default();
                    return Ok(v1::GoneProof {
                        kind: v1::ProofKind::ExitRecord.into(),
                        host_id: self.host.to_string(),
                        pid,
                        start_time,
                        ..v1::GoneProof::default()
                    });
                }
                self.world.with(|state| state.end_process(&self.host, pid, "signal 9", killer));
                self.step().await;
                match self.judge(process) {
                    Some(Judged::Gone { proof, .. }) => proof,
                    Some(Judged::Alive(_)) | None => {
                        return Err(Refusal::new("internal", "it does not end"));
                    }
                }
            }
            None => return Err(Refusal::new("internal", "the host is gone")),
        };
        self.world.with(|state| {
            let leaks = state.bugged(crate::bugs::Bug::AgentLeaksTap);
            if let Some(host) = state.hosts.get_mut(&self.host).filter(|_| !leaks) {
                host.taps.remove(&process.launch);
            }
        });
        Ok(proof)
    }

    /// Notes that the process is gone; only who commanded is remembered of the VM.
    pub(super) fn tombstone(&self, vm: VmId, proof: &v1::GoneProof, cont: Cont) {
        self.note_end(vm, proof, cont, Part::Absent);
    }

    /// Notes that the process is gone, and what is left of the VM here.
    pub(super) fn note_end(&self, vm: VmId, proof: &v1::GoneProof, cont: Cont, left: Part) {
        self.write(vm, |record| {
            record.part = left;
            record.ended =
                Some(Ended { migration: record.fence.migration, proof: proof.clone(), cont });
        });
    }
}

impl State {
    /// `cont`, with what QEMU makes of it.
    pub(crate) fn cont(&mut self, host: &HostId, pid: u32, why: Why) -> Result<(), Refusal> {
        if let Some(mishap) = self.point(PointKind::QemuStep, "cont") {
            self.strike(mishap);
        }
        let Some(qemu) = self.qemu_mut(host, pid) else {
            return Err(Refusal::new("internal", "its QEMU is gone"));
        };
        if qemu.silent {
            return Err(Refusal::new("unresponsive", "its QEMU does not answer"));
        }
        match qemu.cont() {
            Ok(Resumes::Yes) => self.run_vcpus(host, pid, why),
            Ok(Resumes::No) => {}
            Err(error) => return Err(Refusal::new("internal", error)),
        }
        Ok(())
    }
}

/// Returns the name of a command.
pub(crate) const fn label(action: &Action) -> &'static str {
    match action {
        Action::StartVm(_) => "start_vm",
        Action::StopVm(_) => "stop_vm",
        Action::ArmReceiver(_) => "arm_receiver",
        Action::StartTransfer(_) => "start_transfer",
        Action::OrderSwitchover(_) => "order_switchover",
        Action::CancelTransfer(_) => "cancel_transfer",
        Action::ResumeSource(_) => "resume_source",
        Action::ContinueDestination(_) => "continue_destination",
        Action::DestroyReceiver(_) => "destroy_receiver",
        Action::ReleaseSource(_) => "release_source",
        Action::KillSource(_) => "kill_source",
        Action::ForgetVm(_) => "forget_vm",
        Action::HoldGuest(_) => "hold_guest",
        Action::ShutDownGuest(_) => "shut_down_guest",
        Action::StartReceiver(_) => "start_receiver",
        Action::StartPostcopy(_) => "start_postcopy",
        Action::RecoverReceiver(_) => "recover_receiver",
        Action::ResumeTransfer(_) => "resume_transfer",
        Action::SetLimits(_) => "set_limits",
    }
}

/// Says whether a guest may run by this command that did not before.
pub(super) const fn lets_run(action: &Action) -> bool {
    match action {
        Action::StartVm(_)
        | Action::ShutDownGuest(_)
        | Action::StartReceiver(_)
        | Action::ArmReceiver(_)
        | Action::StartTransfer(_)
        | Action::OrderSwitchover(_)
        | Action::CancelTransfer(_)
        | Action::ResumeSource(_)
        | Action::StartPostcopy(_)
        | Action::RecoverReceiver(_)
        | Action::ResumeTransfer(_)
        | Action::ContinueDestination(_) => true,
        Action::StopVm(_)
        | Action::HoldGuest(_)
        | Action::DestroyReceiver(_)
        | Action::ReleaseSource(_)
        | Action::KillSource(_)
        | Action::SetLimits(_)
        | Action::ForgetVm(_) => false,
    }
}

/// Whether a guest that is there runs, or is as itself decided.
pub(super) const fn goes(run: RunState) -> bool {
    run.has_run()
}
