//! Hosts, their agents and their QEMUs, as far as a planner can tell them from real ones.
//!
//! The fake agents keep to the fence, journal what they are told before they answer, and do at once
//! what QEMU takes a while for. After every change the world asserts that no VM runs twice.

mod agents;
mod commands;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::watch;
use vmferry_planner::agents::{AgentError, Agents, Answer};
use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{
    Blocker, CheckReply, ClaimRequest, ErrorDetail, ExecuteReply, ExecuteRequest, Fence, GoneProof,
    HostReport, Knowledge, Listener, ObserveRequest, ProofKind, QemuProcess, SourceDescription,
    TransferLimits, TransferStatus, VmObservation, VmPorts, VmReport,
};
use vmferry_types::{HostId, VmId};

/// When a command makes its agent fall silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// Before it is carried out.
    Before,
    /// After it was carried out, before it is answered.
    After,
    /// Not at all: it is carried out, and answered with a failure.
    Failing,
}

/// How far a transfer goes by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// To the switchover, at once.
    Quick,
    /// It stays active until told otherwise.
    Endless,
    /// It fails at once, unless its guest is held.
    Hopeless,
}

#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "what a journal holds, as the wire has it")]
struct FakeVm {
    name: String,
    definition: String,
    role: String,
    generation: u64,
    claim: u64,
    step: u64,
    answer: Option<ExecuteReply>,
    migration: String,
    alive: bool,
    gone: bool,
    run_state: String,
    handed: bool,
    gave_up: bool,
    ever_continued: bool,
    transfer: String,
    limits: Option<TransferLimits>,
    diverges: String,
    stopped_at_us: u64,
    resumed_at_us: u64,
    pid: u32,
    shutdown_asked: bool,
    ready: bool,
}

#[derive(Debug)]
struct FakeHost {
    vms: BTreeMap<String, FakeVm>,
    /// VMs whose QEMU runs here and that the journal does not know any more.
    strangers: BTreeSet<String>,
    blockers: Vec<Blocker>,
    silent: bool,
    memory: u64,
    outbound_max: Option<u32>,
}

#[derive(Debug)]
struct State {
    hosts: BTreeMap<HostId, FakeHost>,
    pace: Pace,
    clock_us: u64,
    sequence: u64,
    pids: u32,
    source_blockers: Vec<Blocker>,
    commands: Vec<(HostId, &'static str)>,
    fall_silent_at: Option<(usize, Silence)>,
    refusals: BTreeMap<&'static str, &'static str>,
}

/// All hosts. Cheap to clone; survives the planners that come and go.
#[derive(Clone, Debug)]
pub(crate) struct World {
    state: Arc<Mutex<State>>,
    bell: Arc<watch::Sender<u64>>,
}

fn host_id(name: &str) -> HostId {
    name.parse().unwrap()
}

impl World {
    /// Makes hosts of 4 GiB and 8 CPUs each.
    pub(crate) fn new(names: &[&str]) -> Self {
        let host = || FakeHost {
            vms: BTreeMap::new(),
            strangers: BTreeSet::new(),
            blockers: Vec::new(),
            silent: false,
            memory: 4 << 30,
            outbound_max: None,
        };
        let state = State {
            hosts: names.iter().map(|name| (host_id(name), host())).collect(),
            pace: Pace::Quick,
            clock_us: 1,
            sequence: 0,
            pids: 100,
            source_blockers: Vec::new(),
            commands: Vec::new(),
            fall_silent_at: None,
            refusals: BTreeMap::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), bell: Arc::new(watch::channel(0).0) }
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.clock_us += 1_000;
        let out = act(&mut state);
        state.assert_nothing_runs_twice();
        drop(state);
        self.bell.send_modify(|count| *count += 1);
        out
    }

    pub(crate) fn pace(&self, pace: Pace) {
        self.with(|state| state.pace = pace);
    }

    /// Lets every transfer that stays active come to its switchover.
    pub(crate) fn let_through(&self) {
        self.with(|state| {
            let now = state.clock_us;
            let all = state.hosts.values_mut().flat_map(|host| host.vms.values_mut());
            all.filter(|vm| vm.transfer == "active").for_each(|vm| commands::stand(vm, now));
        });
    }

    /// Whatever a host sends does not converge from now on.
    pub(crate) fn diverges(&self, host: &str, verdict: &str) {
        let mut state = self.state.lock().unwrap();
        let known = state.hosts.get_mut(&host_id(host)).unwrap();
        known.vms.values_mut().for_each(|vm| verdict.clone_into(&mut vm.diverges));
    }

    /// What limits whatever a host sends.
    pub(crate) fn limits(&self, host: &str) -> Option<TransferLimits> {
        let state = self.state.lock().unwrap();
        state.hosts[&host_id(host)].vms.values().find_map(|vm| vm.limits)
    }

    pub(crate) fn silence(&self, host: &str) {
        self.with(|state| state.host(host).silent = true);
    }

    pub(crate) fn block(&self, host: &str, code: &str, message: &str) {
        let blocker = Blocker {
            code: code.to_owned(),
            message: message.to_owned(),
            host_id: host.to_owned(),
        };
        self.with(|state| state.host(host).blockers.push(blocker));
    }

    /// Takes away what kept a host from receiving.
    pub(crate) fn unblock(&self, host: &str) {
        self.with(|state| state.host(host).blockers.clear());
    }

    /// Keeps every VM from moving live.
    pub(crate) fn block_source(&self, code: &str, message: &str) {
        let (code, message) = (code.to_owned(), message.to_owned());
        let blocker = Blocker { code, message, host_id: String::new() };
        self.with(|state| state.source_blockers.push(blocker));
    }

    /// Lets a host say itself how many VMs may leave it at once.
    pub(crate) fn outbound_max(&self, host: &str, max: u32) {
        self.with(|state| state.host(host).outbound_max = Some(max));
    }

    pub(crate) fn memory(&self, host: &str, bytes: u64) {
        self.with(|state| state.host(host).memory = bytes);
    }

    /// Switches a host off: everything there ends, and nobody is left to say so.
    pub(crate) fn power_off(&self, host: &str) {
        self.with(|state| {
            let host = state.host(host);
            host.silent = true;
            for vm in host.vms.values_mut() {
                (vm.alive, vm.gone) = (false, vm.alive || vm.gone);
                vm.run_state.clear();
            }
        });
    }

    /// Lets an agent know of a newer owner of a VM than any planner does.
    pub(crate) fn knows(&self, host: &str, vm: &str, generation: u64) {
        self.with(|state| {
            let entry = state.host(host).vms.entry(vm.to_owned()).or_default();
            if entry.role.is_empty() {
                entry.role = "absent".to_owned();
            }
            entry.generation = generation;
        });
    }

    /// Makes the agent that gets the `nth` command from now on (counted from zero) fall silent.
    pub(crate) fn fall_silent_at(&self, nth: usize, silence: Silence) {
        self.with(|state| state.fall_silent_at = Some((state.commands.len() + nth, silence)));
    }

    /// Says whether the agent that was to fall silent has done so. A host that is switched off before
    /// gets no command any more, and another one would be struck in its place.
    pub(crate) fn fell_silent(&self) -> bool {
        self.with(|state| state.fall_silent_at.is_none())
    }

    /// Makes every agent refuse a command, with the code given, as often as it comes.
    pub(crate) fn refuse(&self, command: &'static str, code: &'static str) {
        self.with(|state| state.refusals.insert(command, code));
    }

    /// Lets every command be carried out again.
    pub(crate) fn refuse_nothing(&self) {
        self.with(|state| state.refusals.clear());
    }

    /// Lets every agent answer again.
    pub(crate) fn all_answer(&self) {
        self.with(|state| {
            state.fall_silent_at = None;
            state.hosts.values_mut().for_each(|host| host.silent = false);
        });
    }

    /// Ends a VM's QEMU as a signal does.
    pub(crate) fn kill(&self, host: &str, vm: &str) {
        self.with(|state| {
            let vm = state.host(host).vms.get_mut(vm).unwrap();
            (vm.alive, vm.gone) = (false, true);
            vm.run_state.clear();
        });
    }

    /// Lets a guest turn itself off.
    pub(crate) fn shut_down(&self, host: &str, vm: &str) {
        self.with(|state| commands::shut_down(state.host(host).vms.get_mut(vm).unwrap()));
    }

    /// Lets an agent lose its journal while the VM's QEMU runs on.
    pub(crate) fn lose_journal(&self, host: &str, vm: &str) {
        self.with(|state| {
            let host = state.host(host);
            host.vms.remove(vm);
            host.strangers.insert(vm.to_owned());
        });
    }

    /// Lets somebody run a QEMU on a host that no journal names.
    #[cfg(feature = "fault-points")]
    pub(crate) fn stranger(&self, host: &str, vm: &str) {
        self.with(|state| state.host(host).strangers.insert(vm.to_owned()));
    }

    /// Ends a QEMU that no journal names.
    pub(crate) fn end_stranger(&self, host: &str, vm: &str) {
        self.with(|state| state.host(host).strangers.remove(vm));
    }

    /// Lets a host be without all that it had of a VM, as one that was installed anew.
    pub(crate) fn forget(&self, host: &str, vm: &str) {
        self.with(|state| state.host(host).vms.remove(vm));
    }

    /// Returns the commands that came, in order.
    pub(crate) fn commands(&self) -> Vec<String> {
        self.with(|state| {
            state.commands.iter().map(|(host, name)| format!("{name}@{host}")).collect()
        })
    }

    /// Returns the hosts where a VM's guest runs.
    pub(crate) fn running(&self, vm: &str) -> Vec<String> {
        self.with(|state| state.running(vm))
    }

    /// Returns what a host reports now.
    pub(crate) fn report(&self, host: &str) -> HostReport {
        self.with(|state| state.report(host))
    }
}

impl State {
    fn host(&mut self, name: &str) -> &mut FakeHost {
        self.hosts.get_mut(&host_id(name)).unwrap()
    }

    fn running(&self, vm: &str) -> Vec<String> {
        let runs = |host: &FakeHost| {
            host.strangers.contains(vm)
                || host.vms.get(vm).is_some_and(|vm| vm.alive && vm.run_state == "running")
        };
        self.hosts.iter().filter(|(_, host)| runs(host)).map(|(id, _)| id.to_string()).collect()
    }

    fn assert_nothing_runs_twice(&self) {
        let vms: Vec<&String> = self.hosts.values().flat_map(|host| host.vms.keys()).collect();
        for vm in vms {
            let running = self.running(vm);
            assert!(running.len() <= 1, "VM {vm} runs on {running:?}");
        }
    }

    fn observation(&mut self, host: &HostId, vm: &str) -> VmObservation {
        self.sequence += 1;
        let mut seen = VmObservation {
            host_id: host.to_string(),
            vm_id: vm.to_owned(),
            boot_id: "one-machine".to_owned(),
            sequence: self.sequence,
            observed_at_ms: self.clock_us / 1000,
            knowledge: Knowledge::UnknownVm.into(),
            role: "absent".to_owned(),
            ..VmObservation::default()
        };
        let Some(known) = self.hosts[host].vms.get(vm) else { return seen };
        seen.knowledge = Knowledge::Known.into();
        seen.role.clone_from(&known.role);
        seen.vm_name.clone_from(&known.name);
        (seen.generation, seen.claim, seen.step) = (known.generation, known.claim, known.step);
        seen.migration_id.clone_from(&known.migration);
        seen.run_state.clone_from(&known.run_state);
        seen.handed = known.handed;
        seen.gave_up = known.gave_up;
        seen.ever_continued = known.ever_continued;
        seen.stopped_at_us = known.stopped_at_us;
        seen.resumed_at_us = known.resumed_at_us;
        (seen.shutdown_asked, seen.ready) = (known.shutdown_asked, known.ready);
        seen.disks_active = known.run_state == "running";
        if known.role == "held" {
            seen.switched_off.push("vcpus".to_owned());
        }
        seen.qemu = known.alive.then(|| QemuProcess {
            pid: known.pid,
            start_time: 1,
            boot_id: "one-machine".to_owned(),
            alive: true,
        });
        seen.gone = known.gone.then(|| proof(host, known.pid));
        seen.transfer = Some(TransferStatus {
            migration_id: known.migration.clone(),
            status: known.transfer.clone(),
            complete: known.transfer == "completed",
            bytes_total: 1 << 20,
            bytes_transferred: if known.transfer == "active" { 1 << 19 } else { 0 },
            bytes_per_second: if known.transfer == "active" { 1 << 18 } else { 0 },
            downtime_ms: 7,
            limits: known.limits,
            diverges: known.diverges.clone(),
            ..TransferStatus::default()
        });
        seen
    }

    fn report(&mut self, host: &str) -> HostReport {
        self.sequence += 1;
        let (sequence, sent_at_ms) = (self.sequence, self.clock_us / 1000);
        let id = host_id(host);
        let known = &self.hosts[&id];
        let vms: Vec<VmReport> = known
            .vms
            .iter()
            .map(|(vm, of)| VmReport {
                vm_id: vm.clone(),
                vm_name: of.name.clone(),
                role: of.role.clone(),
                generation: of.generation,
                claim: of.claim,
                knowledge: Knowledge::Known.into(),
                configured_memory_bytes: 1 << 30,
                cpu_milli: 1000,
                run_state: of.run_state.clone(),
                definition: of.definition.clone(),
                resolved_machine: "pc-q35-10.0".to_owned(),
                gone: (of.gone && ["running", "receiver"].contains(&of.role.as_str()))
                    .then(|| proof(&id, of.pid)),
                migration_id: of.migration.clone(),
                handed: of.handed,
                gave_up: of.gave_up,
                ever_continued: of.ever_continued,
                ..VmReport::default()
            })
            .collect();
        let used: u64 = known.vms.values().filter(|vm| vm.alive).map(|_| 1_u64 << 30).sum();
        HostReport {
            host_id: host.to_owned(),
            name: format!("host-{host}"),
            boot_id: "one-machine".to_owned(),
            agent_instance: format!("agent-{host}"),
            agent_address: format!("{host}:9097"),
            sequence,
            sent_at_ms,
            capacity: Some(vmferry_proto::v1::Capacity {
                total_memory_bytes: known.memory,
                available_memory_bytes: known.memory.saturating_sub(used),
                cpu_total_milli: 8000,
                ..vmferry_proto::v1::Capacity::default()
            }),
            capabilities: Some(vmferry_proto::v1::HostCapabilities {
                accelerators: vec!["kvm".to_owned(), "tcg".to_owned()],
                machine_types: vec!["pc-q35-10.0".to_owned()],
                outbound_max: known.outbound_max,
                ..vmferry_proto::v1::HostCapabilities::default()
            }),
            strangers: known.strangers.iter().map(|vm| format!("pid 7 a-vm {vm}")).collect(),
            vms,
            ..HostReport::default()
        }
    }

    /// Refuses what the fence refuses; a repeat is answered as it was.
    fn fenced(&self, host: &HostId, fence: &Fence) -> Result<Option<ExecuteReply>, ErrorDetail> {
        let Some(vm) = self.hosts[host].vms.get(&fence.vm_id) else {
            return Err(ErrorDetail { code: "unknown_vm".to_owned(), ..ErrorDetail::default() });
        };
        let detail = |code: &str| ErrorDetail {
            code: code.to_owned(),
            known_claim: vm.claim,
            known_generation: vm.generation,
            known_step: vm.step,
            ..ErrorDetail::default()
        };
        if fence.generation < vm.generation {
            return Err(detail("stale_generation"));
        }
        if fence.claim != vm.claim || fence.step < vm.step {
            return Err(detail("stale_claim"));
        }
        Ok(if fence.step == vm.step { vm.answer.clone() } else { None })
    }

    /// Lets the receiver have everything, wherever it is.
    fn arrive(&mut self, source: &HostId, vm: &str) {
        for (host, of) in &mut self.hosts {
            if let Some(receiver) =
                of.vms.get_mut(vm).filter(|of| of.role == "receiver" && of.alive)
                && host != source
            {
                receiver.transfer = "completed".to_owned();
                receiver.run_state = "paused".to_owned();
            }
        }
    }
}

fn proof(host: &HostId, pid: u32) -> GoneProof {
    GoneProof {
        kind: ProofKind::ExitRecord.into(),
        host_id: host.to_string(),
        boot_id: "one-machine".to_owned(),
        pid,
        start_time: 1,
        ended: "signal 9".to_owned(),
        at_ms: 1,
        stderr_tail: String::new(),
    }
}

fn name(action: &Action) -> &'static str {
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

fn refused(host: &HostId, code: &str, message: &str) -> AgentError {
    let detail = ErrorDetail { code: code.to_owned(), ..ErrorDetail::default() };
    refused_with(host, message, detail)
}

fn refused_with(host: &HostId, message: &str, detail: ErrorDetail) -> AgentError {
    AgentError::Refused {
        host: host.clone(),
        operation: "fake",
        message: message.to_owned(),
        detail: Box::new(detail),
    }
}

fn unreachable(host: &HostId) -> AgentError {
    AgentError::Unreachable { host: host.clone(), operation: "fake", reason: "silent".to_owned() }
}

impl World {
    fn reach(&self, host: &HostId) -> Answer<()> {
        let silent = self.with(|state| state.hosts.get(host).is_none_or(|host| host.silent));
        if silent { Err(unreachable(host)) } else { Ok(()) }
    }

    fn run(&self, host: &HostId, request: &ExecuteRequest) -> Answer<ExecuteReply> {
        self.reach(host)?;
        let (Some(fence), Some(action)) = (&request.fence, &request.action) else {
            return Err(refused(host, "invalid", "no fence or no action"));
        };
        self.with(|state| {
            match state.fenced(host, fence) {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                Err(detail) => return Err(refused_with(host, "fenced", detail)),
            }
            let silence = state
                .fall_silent_at
                .filter(|(nth, _)| *nth == state.commands.len())
                .map(|(_, silence)| silence);
            if silence.is_some() {
                state.fall_silent_at = None;
            }
            state.commands.push((host.clone(), name(action)));
            if silence == Some(Silence::Before) {
                state.hosts.get_mut(host).unwrap().silent = true;
                return Err(unreachable(host));
            }
            if let Some(code) = state.refusals.get(name(action)) {
                return Err(refused(host, code, "not now"));
            }
            let reply = state.carry_out(host, fence, action);
            match silence {
                Some(Silence::After) => {
                    state.hosts.get_mut(host).unwrap().silent = true;
                    Err(unreachable(host))
                }
                Some(Silence::Failing) => Err(refused(host, "internal", "the monitor was silent")),
                Some(Silence::Before) | None => reply,
            }
        })
    }
}

impl World {
    /// Looks without ringing the bell that watchers wait for.
    fn look_quietly(&self, host: &HostId, vm: &str) -> VmObservation {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.observation(host, vm)
    }

    fn reach_quietly(&self, host: &HostId) -> Answer<()> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let silent = state.hosts.get(host).is_none_or(|host| host.silent);
        if silent { Err(unreachable(host)) } else { Ok(()) }
    }
}
