//! A simulated agent: what it answers, and what it writes down first.
//!
//! Requests may be lost, late, doubled, or answered to nobody. One that is late arrives all the
//! same, whoever sent it may be dead by then: that is what the fence is for, and the fence is the
//! real agent's own.

mod destination;
mod hold;
mod limits;
mod observe;
mod report;
mod service;
mod source;

use vmferry_agent_core::fence::{ClaimDecision, Decision, digest};
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{Claim, Fence, FenceRefusal, Generation, HostId, MigrationId, Step, VmId};

use crate::fleet::{Fencing, Fleet};
use crate::journal::Record;

pub use service::serve;

/// The agent of one host.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub(crate) fleet: Fleet,
    pub(crate) host: HostId,
}

/// An agent's no.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) message: String,
    pub(crate) detail: v1::ErrorDetail,
}

impl Refusal {
    pub(crate) fn new(code: &str, message: impl Into<String>) -> Self {
        let detail = v1::ErrorDetail { code: code.to_owned(), ..v1::ErrorDetail::default() };
        Self { message: message.into(), detail }
    }

    fn wrong_state(message: &str) -> Self {
        Self::new("wrong_state", message)
    }

    fn fence(refusal: FenceRefusal) -> Self {
        let mut told = match refusal {
            FenceRefusal::StaleGeneration { .. } => {
                Self::new("stale_generation", "the VM is owned under a newer generation")
            }
            FenceRefusal::StaleClaim { .. } => Self::new("stale_claim", "a newer command is known"),
            FenceRefusal::StepReused { .. } => {
                Self::new("step_reused", "the step was another command")
            }
            FenceRefusal::Leap { .. } => Self::new("leap", "is further than anybody counts"),
        };
        let detail = &mut told.detail;
        match refusal {
            FenceRefusal::StaleGeneration { known } => detail.known_generation = known.value(),
            FenceRefusal::StaleClaim { known, step } => {
                detail.known_claim = known.value();
                detail.known_step = step.value();
            }
            FenceRefusal::StepReused { step } => detail.known_step = step.value(),
            FenceRefusal::Leap { field, generation, claim, step } => {
                field.clone_into(&mut detail.field);
                detail.known_generation = generation.value();
                detail.known_claim = claim.value();
                detail.known_step = step.value();
            }
        }
        told
    }
}

type Answer<T> = Result<T, Refusal>;

fn vm_id(text: &str) -> Answer<VmId> {
    text.parse().map_err(|_| Refusal::new("invalid", format!("no VM id: {text}")))
}

fn migration_id(text: &str) -> Answer<MigrationId> {
    text.parse().map_err(|_| Refusal::new("invalid", format!("no migration id: {text}")))
}

impl Agent {
    pub(crate) const fn new(fleet: Fleet, host: HostId) -> Self {
        Self { fleet, host }
    }

    fn keeps_fence(&self) -> bool {
        self.fleet.with(|state| state.weather.fence == Fencing::Kept)
    }

    fn record(&self, vm: VmId) -> Record {
        self.fleet.with(|state| state.record(&self.host, vm))
    }

    fn write(&self, vm: VmId, change: impl FnOnce(&mut Record)) {
        self.fleet.with(|state| state.write(&self.host, vm, change));
    }

    /// What takes a moment in a real agent: a write to the disk, a word with QEMU.
    async fn moment(&self) {
        let pause = self.fleet.with(|state| state.dice.millis(0, 4));
        tokio::time::sleep(pause).await;
    }

    /// Notes that a driver was heard, if its claim is the one that is held.
    fn hear(&self, vm: VmId, claim: Claim) {
        self.fleet.with(|state| {
            let now = state.now_us();
            let held = state.record(&self.host, vm).fence.claim == claim;
            if let Some(host) = state.hosts.get_mut(&self.host).filter(|_| held) {
                host.sight(vm).heard_us = now;
            }
        });
    }

    pub(crate) async fn claim(&self, request: v1::ClaimRequest) -> Answer<v1::VmObservation> {
        let vm = vm_id(&request.vm_id)?;
        let migration = migration_id(&request.migration_id)?;
        let generation = Generation::from_stored(request.generation);
        let claim = Claim::from_stored(request.claim);
        let _lane = self.fleet.lane(&self.host, vm).await;
        self.moment().await;
        let record = self.record(vm);
        match record.fence.decide_claim(migration, generation, claim) {
            ClaimDecision::Refuse(refusal) => return Err(Refusal::fence(refusal)),
            ClaimDecision::Take | ClaimDecision::Held => {}
        }
        self.fleet.with(|state| {
            let word = (generation, claim, Step::from_stored(0));
            if claim > record.fence.claim {
                state.check_word(&self.host, vm, "claim", word);
                state.counts.claims += 1;
                state.note(vm, || format!("{}: claim {claim} of {migration}", self.host));
            }
            state.write(&self.host, vm, |record| {
                record.fence.claim(migration, generation, claim);
                if request.hold_limit_ms != 0 {
                    record.hold_limit_ms = request.hold_limit_ms;
                }
            });
        });
        self.hear(vm, claim);
        Ok(self.observe(vm))
    }

    pub(crate) async fn execute(&self, request: v1::ExecuteRequest) -> Answer<v1::ExecuteReply> {
        let fence = fence(request.fence.as_ref())?;
        let vm = fence.vm;
        let mark = digest(&prost::Message::encode_to_vec(&request));
        let action = request.action.ok_or_else(|| Refusal::new("invalid", "no action"))?;
        let _lane = self.fleet.lane(&self.host, vm).await;
        self.moment().await;
        match self.record(vm).fence.decide(&fence, &mark) {
            Decision::Refuse(refusal) if self.keeps_fence() => return Err(Refusal::fence(refusal)),
            Decision::Refuse(_) => {}
            Decision::Replay { answer } => return self.replay(&answer),
            Decision::Execute | Decision::Resume => {}
        }
        let name = label(&action);
        self.fleet.with(|state| {
            *state.counts.commands.entry(name).or_default() += 1;
            let word = (fence.generation, fence.claim, fence.step);
            state.check_word(&self.host, vm, name, word);
            state.note(vm, || {
                let Fence { generation, claim, step, .. } = fence;
                format!(
                    "{}: {name} (generation {generation}, claim {claim}, step {step})",
                    self.host
                )
            });
            state.write(&self.host, vm, |record| record.fence.note(&fence, mark));
        });
        self.hear(vm, fence.claim);
        self.moment().await;
        let outcome = self.act(&fence, action).await;
        let mut reply = match outcome {
            Ok(reply) => reply,
            Err(refusal) => {
                self.fleet.with(|state| {
                    state
                        .note(vm, || format!("{}: refuses {name}: {}", self.host, refusal.message));
                });
                return Err(refusal);
            }
        };
        reply.observation = Some(self.observe(vm));
        let answer = hex(&prost::Message::encode_to_vec(&reply));
        self.write(vm, |record| record.fence.answer(answer));
        Ok(reply)
    }

    fn replay(&self, answer: &str) -> Answer<v1::ExecuteReply> {
        self.fleet.with(|state| state.counts.replays += 1);
        let reply: v1::ExecuteReply = unhex(answer)
            .and_then(|bytes| prost::Message::decode(bytes.as_slice()).ok())
            .ok_or_else(|| Refusal::new("internal", "the first answer cannot be read"))?;
        Ok(v1::ExecuteReply { replayed: true, ..reply })
    }

    async fn act(&self, fence: &Fence, action: Action) -> Answer<v1::ExecuteReply> {
        match action {
            Action::HoldGuest(_) => self.hold(fence).await,
            Action::ArmReceiver(_) => self.arm(fence).await,
            Action::StartTransfer(start) => self.start_transfer(fence, &start).await,
            Action::OrderSwitchover(_) => self.order(fence.vm).await,
            Action::CancelTransfer(cancel) => self.cancel(fence.vm, &cancel.cause).await,
            Action::ResumeSource(resume) => self.resume(fence, resume.receiver_gone).await,
            Action::ContinueDestination(_) => self.go_on(fence).await,
            Action::DestroyReceiver(_) => self.destroy(fence).await,
            Action::ReleaseSource(_) => self.release(fence).await,
            Action::KillSource(_) => self.kill_source(fence).await,
            Action::StartVm(_)
            | Action::StopVm(_)
            | Action::ForgetVm(_)
            | Action::ShutDownGuest(_)
            | Action::StartReceiver(_)
            | Action::StartPostcopy(_)
            | Action::RecoverReceiver(_)
            | Action::ResumeTransfer(_)
            | Action::SetLimits(_) => Err(Refusal::new("invalid", "is not simulated")),
        }
    }
}

fn fence(message: Option<&v1::Fence>) -> Answer<Fence> {
    let message = message.ok_or_else(|| Refusal::new("invalid", "fence is missing"))?;
    Ok(Fence {
        vm: vm_id(&message.vm_id)?,
        migration: migration_id(&message.migration_id)?,
        generation: Generation::from_stored(message.generation),
        claim: Claim::from_stored(message.claim),
        step: Step::from_stored(message.step),
    })
}

/// Returns the name of a command.
const fn label(action: &Action) -> &'static str {
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

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let pairs = (0..text.len()).step_by(2);
    pairs.map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok()).collect()
}
