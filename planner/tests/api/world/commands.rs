//! What each command does to a fake QEMU.

use vmferry_proto::v1::{ArmReceiver, ResumeSource, StartReceiver, StartVm};

use super::*;

impl State {
    pub(super) fn carry_out(
        &mut self,
        host: &HostId,
        fence: &Fence,
        action: &Action,
    ) -> Answer<ExecuteReply> {
        let (now, pace) = (self.clock_us, self.pace);
        self.pids += 1;
        let pid = self.pids;
        let stranger = self.hosts[host].strangers.contains(&fence.vm_id);
        let vm = self.hosts.get_mut(host).unwrap().vms.get_mut(&fence.vm_id).unwrap();
        vm.generation = fence.generation;
        let mut reply = ExecuteReply::default();
        match action {
            Action::StopVm(_) if stranger => {
                let why = "a QEMU of this VM runs here that the journal does not know";
                return Err(refused(host, "wrong_state", why));
            }
            Action::StartVm(start) => {
                start_vm(vm, start, pid);
                reply.resolved_machine = "pc-q35-10.0".to_owned();
            }
            Action::StopVm(_) => end(vm, "stopped"),
            Action::ArmReceiver(arm) => {
                arm_receiver(vm, arm, pid);
                reply.listener = Some(Listener {
                    address: "10.0.0.1".to_owned(),
                    port: 49_152,
                    ..Listener::default()
                });
            }
            Action::StartTransfer(start) => {
                transfer(vm, now, pace);
                let policy = start.policy.unwrap_or_default();
                vm.limits = Some(TransferLimits {
                    max_bandwidth: policy.max_bandwidth,
                    downtime_limit_ms: policy.downtime_limit_ms,
                    throttle: policy.auto_converge,
                });
            }
            Action::OrderSwitchover(_) => order(vm, host)?,
            Action::CancelTransfer(_) => cancel(vm, host, now)?,
            Action::ResumeSource(resume) => resume_source(vm, host, resume, now)?,
            Action::ContinueDestination(_) => continue_destination(vm, host, now)?,
            Action::DestroyReceiver(_) | Action::ReleaseSource(_) | Action::KillSource(_) => {
                end(vm, "absent");
            }
            Action::ForgetVm(_) => {
                vm.definition.clear();
                vm.role = "absent".to_owned();
            }
            Action::HoldGuest(_) => hold(vm, now),
            Action::SetLimits(set) => vm.limits = set.limits,
            Action::ShutDownGuest(_) => press(vm, pace),
            Action::StartReceiver(start) => start_receiver(vm, start, pid),
            Action::StartPostcopy(_) | Action::RecoverReceiver(_) | Action::ResumeTransfer(_) => {
                return Err(refused(
                    host,
                    "postcopy_refused",
                    "no guest goes before its memory here",
                ));
            }
        }
        if vm.gone {
            reply.gone = Some(proof(host, vm.pid));
        }
        vm.step = fence.step;
        if matches!(action, Action::OrderSwitchover(_)) {
            self.arrive(host, &fence.vm_id);
        }
        reply.observation = Some(self.observation(host, &fence.vm_id));
        let vm = self.hosts.get_mut(host).unwrap().vms.get_mut(&fence.vm_id).unwrap();
        vm.answer = Some(ExecuteReply { replayed: true, ..reply.clone() });
        Ok(reply)
    }
}

fn start_vm(vm: &mut FakeVm, start: &StartVm, pid: u32) {
    if !vm.alive {
        begin(vm, "running", "running", pid);
    }
    vm.definition.clone_from(&start.definition);
    let outline = vmferry_planner::definition::Outline::read(&start.definition);
    vm.name = outline.unwrap().name;
}

/// The guest's power button is pressed.
fn press(vm: &mut FakeVm, pace: Pace) {
    if !vm.alive {
        vm.gone = true;
        return;
    }
    vm.shutdown_asked = true;
    if pace != Pace::Endless {
        shut_down(vm);
    }
}

/// The guest turns itself off.
pub(super) fn shut_down(vm: &mut FakeVm) {
    (vm.alive, vm.gone) = (false, true);
    "shutdown".clone_into(&mut vm.run_state);
}

fn start_receiver(vm: &mut FakeVm, start: &StartReceiver, pid: u32) {
    let outline = vmferry_planner::definition::Outline::read(&start.definition);
    vm.name = outline.unwrap().name;
    vm.definition.clone_from(&start.definition);
    if start.stays_off {
        end(vm, "stopped");
    } else if !vm.ready {
        begin(vm, "receiver", "prelaunch", pid);
    }
    vm.ready = true;
}

fn arm_receiver(vm: &mut FakeVm, arm: &ArmReceiver, pid: u32) {
    if vm.role != "receiver" || !vm.alive {
        begin(vm, "receiver", "inmigrate", pid);
    }
    let source = arm.source.clone().unwrap_or_default();
    (vm.name, vm.definition) = (source.vm_name, source.definition);
}

fn transfer(vm: &mut FakeVm, now: u64, pace: Pace) {
    match pace {
        Pace::Quick => stand(vm, now),
        Pace::Hopeless if vm.role != "held" => vm.transfer = "failed".to_owned(),
        Pace::Hopeless => stand(vm, now),
        Pace::Endless => vm.transfer = "active".to_owned(),
    }
}

fn order(vm: &mut FakeVm, host: &HostId) -> Answer<()> {
    if vm.gave_up {
        return Err(refused(host, "gave_up", "it was taken back"));
    }
    vm.handed = true;
    vm.transfer = "completed".to_owned();
    vm.run_state = "postmigrate".to_owned();
    Ok(())
}

fn cancel(vm: &mut FakeVm, host: &HostId, now: u64) -> Answer<()> {
    if vm.handed {
        return Err(refused(host, "wrong_state", "it was ordered"));
    }
    if !vm.transfer.is_empty() {
        vm.transfer = "cancelled".to_owned();
    }
    vm.gave_up = true;
    go_on(vm, now);
    Ok(())
}

fn resume_source(vm: &mut FakeVm, host: &HostId, resume: &ResumeSource, now: u64) -> Answer<()> {
    if resume.receiver_gone.is_none() {
        return Err(refused(host, "wrong_state", "there is no proof"));
    }
    vm.gave_up = true;
    go_on(vm, now);
    Ok(())
}

fn continue_destination(vm: &mut FakeVm, host: &HostId, now: u64) -> Answer<()> {
    let ready = std::mem::take(&mut vm.ready);
    if vm.role == "stopped" && ready {
        return Ok(());
    }
    if !vm.alive {
        return Err(refused(host, "receiver_gone", "the receiver is gone"));
    }
    vm.ever_continued = true;
    go_on(vm, now);
    Ok(())
}

/// The guest goes on where it is.
fn go_on(vm: &mut FakeVm, now: u64) {
    "running".clone_into(&mut vm.role);
    "running".clone_into(&mut vm.run_state);
    vm.resumed_at_us = now;
}

fn begin(vm: &mut FakeVm, role: &str, run_state: &str, pid: u32) {
    vm.role = role.to_owned();
    vm.run_state = run_state.to_owned();
    (vm.alive, vm.gone, vm.pid) = (true, false, pid);
    (vm.handed, vm.gave_up) = (false, false);
    (vm.shutdown_asked, vm.ready) = (false, false);
    vm.ever_continued = role == "running";
    vm.transfer.clear();
    (vm.stopped_at_us, vm.resumed_at_us) = (0, 0);
}

/// The guest stands still for the order.
pub(super) fn stand(vm: &mut FakeVm, now: u64) {
    "pre-switchover".clone_into(&mut vm.transfer);
    "finish-migrate".clone_into(&mut vm.run_state);
    if vm.role != "held" {
        vm.stopped_at_us = now;
    }
}

/// The guest stands still on purpose, and what was given up before is forgotten.
fn hold(vm: &mut FakeVm, now: u64) {
    "held".clone_into(&mut vm.role);
    "paused".clone_into(&mut vm.run_state);
    vm.gave_up = false;
    vm.transfer.clear();
    (vm.stopped_at_us, vm.resumed_at_us) = (now, 0);
}

fn end(vm: &mut FakeVm, role: &str) {
    vm.role = role.to_owned();
    vm.run_state.clear();
    (vm.alive, vm.gone) = (false, true);
}
