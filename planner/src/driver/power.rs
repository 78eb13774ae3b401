//! Drives one start or stop.
//!
//! The same fence as a migration's: the next claim in the store, the claim at the host's agent,
//! then one command. It ends only on that agent's word: that the VM's QEMU runs, that it is proven
//! gone, or that the command was refused and the VM is as before.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{Instrument as _, debug, error, info, info_span, warn};
use vmferry_planner_core::evidence::RunState;
use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{
    ClaimRequest, ExecuteReply, ExecuteRequest, Fence, GoneProof, Knowledge, StartVm, StopHow,
    StopVm, VmObservation,
};
use vmferry_types::{Claim, MigrationId, PowerState, Role, Step};

use super::Backoff;
use super::seen::{gone_message, heed_death};
use super::side::{Side, SideView};
use crate::admission;
use crate::agents::{AgentError, Answer};
use crate::clock;
use crate::inventory::{proof_of_death, words_of_death};
use crate::planner::Planner;
use crate::store::{
    Commit, Declaration, Ends, PowerAction, PowerKind, PowerPhase, StoreError, TakePower,
};
use crate::telemetry::Chain;

/// What the agent says is looked at again this often while nothing changes.
const TICK: Duration = Duration::from_millis(500);

/// Drives a start or stop until it has ended.
pub async fn drive(planner: &Arc<Planner>, id: MigrationId) {
    let mut backoff = Backoff::new();
    loop {
        let action = match take_over(planner, id).await {
            Ok(TakePower::Taken(action)) => *action,
            Ok(TakePower::Busy) => {
                debug!(migration_id = %id, "another driver has it");
                return;
            }
            Ok(TakePower::Ended) => return,
            Err(error) => {
                error!(migration_id = %id, error = %Chain(&error), "start or stop could not be claimed");
                planner.live.keeps_from_going_on(id, &error);
                return;
            }
        };
        let span = info_span!(parent: None, "power", migration_id = %id, vm_id = %action.vm,
            host_id = %action.host, kind = action.kind.label(), claim = %action.claim);
        match under_one_lease(planner, &action).instrument(span).await {
            Ok(Outcome::Ended) => {
                planner.live.end(id);
                planner.power_changed();
                planner.wake.notify_one();
                return;
            }
            Ok(Outcome::Superseded) => return,
            Ok(Outcome::ClaimAnew) => {}
            Err(error) => {
                error!(migration_id = %id, error = %Chain(&error), "driver stopped; the row stays as it is");
                planner.live.keeps_from_going_on(id, &error);
                return;
            }
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

async fn take_over(planner: &Planner, id: MigrationId) -> Result<TakePower, StoreError> {
    let (now, until) = planner.lease().await?;
    planner.store().take_over_power(id, &planner.owner, until, now).await
}

enum Outcome {
    Ended,
    ClaimAnew,
    /// Another driver has the row.
    Superseded,
}

/// Keeps the lease of an action; ends once it is another driver's, or cannot be kept.
async fn lease_lost(planner: &Planner, action: &PowerAction) -> Result<Outcome, StoreError> {
    loop {
        tokio::time::sleep(planner.lease_renewal()).await;
        let (_, until) = planner.lease().await?;
        if !planner.store().renew_power_lease(action, &planner.owner, until).await? {
            return Ok(Outcome::Superseded);
        }
    }
}

/// Drives under one claim as long as its lease can be kept.
async fn under_one_lease(
    planner: &Arc<Planner>,
    action: &PowerAction,
) -> Result<Outcome, StoreError> {
    tokio::select! {
        biased;
        outcome = under_one_claim(planner, action) => outcome,
        lost = lease_lost(planner, action) => lost,
    }
}

async fn under_one_claim(
    planner: &Arc<Planner>,
    action: &PowerAction,
) -> Result<Outcome, StoreError> {
    let claim = ClaimRequest {
        vm_id: action.vm.to_string(),
        migration_id: action.id.to_string(),
        generation: action.generation.value(),
        claim: action.claim.value(),
        hold_limit_ms: 0,
    };
    let side = Side::open(Arc::clone(&planner.parts.agents), action.host.clone(), claim);
    let mut view = side.subscribe();
    let mut step = Step::from_stored(0);
    let mut backoff = Backoff::new();
    loop {
        let seen = view.borrow_and_update().clone();
        note_trouble(planner, action, &seen);
        if let Some(declaration) = heed_death(planner, (&action.host, action.vm), &seen).await? {
            return finish(planner, action, died(action, &declaration)).await;
        }
        if let Some(error) = seen.fenced.as_ref().or(seen.behind.as_ref()) {
            raise(planner, action, error).await?;
            if let Some(text) = behind(action, error)
                && let Some(end) = as_before(planner, action, text).await
            {
                return finish(planner, action, end).await;
            }
            return Ok(Outcome::ClaimAnew);
        }
        let Some(observation) = seen.observation.filter(|_| seen.claimed) else {
            changed(&mut view).await;
            continue;
        };
        if let Some(mut end) = settled(action, &observation) {
            if end.power == PowerState::Running {
                end.resolved_machine = resolved_machine(planner, action).await;
            }
            return finish(planner, action, end).await;
        }
        if !ready(&observation) {
            changed(&mut view).await;
            continue;
        }
        step = step.next();
        let Some(request) = request(planner, action, step).await? else {
            return finish(planner, action, gone_from_store(action)).await;
        };
        match planner.parts.agents.execute(&action.host, request).await {
            Ok(reply) => {
                if let Some(end) = accomplished(action, &reply) {
                    return finish(planner, action, end).await;
                }
            }
            answer @ Err(_) => match refused(planner, action, answer).await? {
                Refused::ClaimAnew => return Ok(Outcome::ClaimAnew),
                Refused::Later => {}
                Refused::For(text) => {
                    if let Some(end) = as_before(planner, action, text).await {
                        return finish(planner, action, end).await;
                    }
                }
            },
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

async fn changed(view: &mut watch::Receiver<SideView>) {
    tokio::select! {
        _ = view.changed() => {}
        () = tokio::time::sleep(TICK) => {}
    }
}

fn note_trouble(planner: &Planner, action: &PowerAction, seen: &SideView) {
    let silent = seen.trouble.as_ref().map(|error| Chain(error).to_string());
    let unready = seen.observation.as_ref().and_then(|observation| {
        let waits_for = match observation.knowledge() {
            Knowledge::Learning | Knowledge::Unspecified => "to learn what became of the VM",
            Knowledge::Unreadable => "to have its journal seeded again",
            Knowledge::Known | Knowledge::UnknownVm | Knowledge::Unresponsive => return None,
        };
        Some(format!("the agent of host {} has {waits_for}", action.host))
    });
    let trouble = silent.or(unready);
    planner.live.update(action.id, |live| live.set_trouble(trouble, clock::now()));
}

/// Says whether the agent may be commanded.
fn ready(observation: &VmObservation) -> bool {
    match observation.knowledge() {
        Knowledge::Known | Knowledge::UnknownVm | Knowledge::Unresponsive => true,
        Knowledge::Unspecified | Knowledge::Learning | Knowledge::Unreadable => false,
    }
}

/// Says whether the agent's word alone ends the action: a driver before this one got through.
fn settled(action: &PowerAction, observation: &VmObservation) -> Option<Ends> {
    match action.kind {
        PowerKind::Start if runs(observation) => Some(Ends {
            phase: PowerPhase::Done,
            power: PowerState::Running,
            error: String::new(),
            gone: None,
            resolved_machine: String::new(),
        }),
        // That its agent does not know the VM is no proof: a journal that was lost knows nothing
        // either. The agent is told to stop it, and then looks whether anything of it runs.
        //
        // Nor is it one that the VM is gone from a host that knows a newer owner than the action: it
        // runs elsewhere by then.
        PowerKind::Stop if observation.generation > action.generation.value() => None,
        PowerKind::Stop => stopped(observation).map(|gone| Ends {
            phase: PowerPhase::Done,
            power: PowerState::Stopped,
            error: String::new(),
            gone: Some(gone),
            resolved_machine: String::new(),
        }),
        PowerKind::Start => None,
    }
}

fn runs(observation: &VmObservation) -> bool {
    observation.knowledge() == Knowledge::Known
        && Role::from_label(&observation.role) == Some(Role::Running)
        && observation.qemu.as_ref().is_some_and(|qemu| qemu.alive)
        && observation.gone.is_none()
        // One whose disk failed or whose kernel gave up at once was started all the same.
        && RunState::from_qemu(&observation.run_state).has_run()
}

/// Returns how a QEMU that was just started ended again.
fn ended_at_once(observation: &VmObservation) -> Option<Ends> {
    let ours = observation.knowledge() == Knowledge::Known
        && Role::from_label(&observation.role) == Some(Role::Running);
    let gone = observation.gone.clone().filter(|_| ours)?;
    let error = format!("QEMU ended at once ({}): {}", gone.ended, gone.stderr_tail.trim());
    Some(Ends {
        phase: PowerPhase::Failed,
        power: PowerState::Stopped,
        error: error.trim_end_matches([' ', ':']).to_owned(),
        gone: Some(gone),
        resolved_machine: String::new(),
    })
}

/// Returns the proof that the VM has no QEMU process here.
fn stopped(observation: &VmObservation) -> Option<GoneProof> {
    let known = matches!(observation.knowledge(), Knowledge::Known | Knowledge::UnknownVm);
    observation.gone.clone().filter(|_| known)
}

/// Says whether the agent's word is that nothing of the VM runs here.
fn nothing_runs(observation: &VmObservation) -> bool {
    match observation.knowledge() {
        Knowledge::UnknownVm => true,
        Knowledge::Known => match Role::from_label(&observation.role) {
            Some(Role::Stopped | Role::Absent) => true,
            Some(Role::Running | Role::Held | Role::Receiver) => observation.gone.is_some(),
            None => observation.role.is_empty(),
        },
        Knowledge::Unspecified
        | Knowledge::Learning
        | Knowledge::Unresponsive
        | Knowledge::Unreadable => false,
    }
}

/// Asks for the machine type of a VM whose start was answered to a driver before this one.
async fn resolved_machine(planner: &Planner, action: &PowerAction) -> String {
    let described = planner.parts.agents.describe_source(&action.host, action.vm).await;
    described.map(|description| description.resolved_machine).unwrap_or_default()
}

async fn request(
    planner: &Planner,
    action: &PowerAction,
    step: Step,
) -> Result<Option<ExecuteRequest>, StoreError> {
    let fence = Fence {
        vm_id: action.vm.to_string(),
        migration_id: action.id.to_string(),
        generation: action.generation.value(),
        claim: action.claim.value(),
        step: step.value(),
    };
    let action = match action.kind {
        PowerKind::Start => {
            let Some(vm) = planner.store().vm(action.vm).await? else { return Ok(None) };
            Action::StartVm(StartVm {
                definition: vm.definition,
                resolved_machine: vm.resolved_machine,
            })
        }
        PowerKind::Stop => {
            let how = if action.record.how == "quit" { StopHow::Quit } else { StopHow::Powerdown };
            Action::StopVm(StopVm { how: how.into(), deadline_ms: action.record.deadline_ms })
        }
    };
    Ok(Some(ExecuteRequest { fence: Some(fence), action: Some(action) }))
}

/// Reads from an answer that the command did what it was for.
fn accomplished(action: &PowerAction, reply: &ExecuteReply) -> Option<Ends> {
    match action.kind {
        PowerKind::Start => match reply.observation.as_ref() {
            Some(seen) if runs(seen) => Some(Ends {
                phase: PowerPhase::Done,
                power: PowerState::Running,
                error: String::new(),
                gone: None,
                resolved_machine: reply.resolved_machine.clone(),
            }),
            Some(seen) => ended_at_once(seen),
            None => None,
        },
        PowerKind::Stop => {
            let seen = || reply.observation.as_ref().and_then(stopped);
            reply.gone.clone().or_else(seen).map(|gone| Ends {
                phase: PowerPhase::Done,
                power: PowerState::Stopped,
                error: String::new(),
                gone: Some(gone),
                resolved_machine: String::new(),
            })
        }
    }
}

enum Refused {
    /// The command may have arrived, or the claim is behind.
    ClaimAnew,
    /// The agent is not ready.
    Later,
    /// The agent says no, and why.
    For(String),
}

async fn refused(
    planner: &Planner,
    action: &PowerAction,
    answer: Answer<ExecuteReply>,
) -> Result<Refused, StoreError> {
    let Err(error) = answer else { return Ok(Refused::Later) };
    planner.live.update(action.id, |live| {
        live.set_trouble(Some(Chain(&error).to_string()), clock::now());
    });
    let AgentError::Refused { message, detail, .. } = &error else {
        debug!(error = %Chain(&error), "command went unanswered");
        return Ok(Refused::ClaimAnew);
    };
    Ok(match detail.code.as_str() {
        "stale_claim" | "stale_generation" => {
            raise(planner, action, &error).await?;
            behind(action, &error).map_or(Refused::ClaimAnew, Refused::For)
        }
        "step_reused" => Refused::ClaimAnew,
        "learning" | "unresponsive" | "unreadable" => Refused::Later,
        _ => Refused::For(reasons(message, detail)),
    })
}

/// Says that an agent knows a newer owner than the action names. No later claim mends that: the
/// action ends, and what was learnt is held against the next one that is asked for.
fn behind(action: &PowerAction, error: &AgentError) -> Option<String> {
    let AgentError::Refused { detail, .. } = error else { return None };
    (detail.code == "stale_generation").then(|| {
        format!(
            "host {} knows generation {} of the VM, and this planner only {}: its store is older than what happened (was it restored from a backup?). It looks at every host when the start is asked for again: `vmferry doctor` says what it waits for",
            action.host, detail.known_generation, action.generation
        )
    })
}

/// Says how an action ends whose host was declared dead.
fn died(action: &PowerAction, declaration: &Declaration) -> Ends {
    let gone = Some(gone_message(&proof_of_death(&action.host, declaration)));
    let resolved_machine = String::new();
    match action.kind {
        PowerKind::Start => {
            let words = words_of_death(declaration);
            let error = format!("host {}, where it was being started, was {words}", action.host);
            let (phase, power) = (PowerPhase::Failed, PowerState::Lost);
            Ends { phase, power, error, gone, resolved_machine }
        }
        PowerKind::Stop => {
            let (phase, power) = (PowerPhase::Done, PowerState::Stopped);
            Ends { phase, power, error: String::new(), gone, resolved_machine }
        }
    }
}

/// Returns an agent's no in its own words, with all reasons.
fn reasons(message: &str, detail: &vmferry_proto::v1::ErrorDetail) -> String {
    let all: Vec<&str> = detail.blockers.iter().map(|blocker| blocker.message.as_str()).collect();
    if all.is_empty() { message.to_owned() } else { all.join("; ") }
}

async fn raise(
    planner: &Planner,
    action: &PowerAction,
    error: &AgentError,
) -> Result<(), StoreError> {
    warn!(error = %Chain(error), "the agent knows a newer claim");
    if let AgentError::Refused { detail, .. } = error {
        let known = Claim::from_stored(detail.known_claim);
        planner.store().raise_claim(action.vm, known, clock::now()).await?;
    }
    Ok(())
}

/// After a refusal: how the action ends if the VM is as it was before; `None` if that is not known.
async fn as_before(planner: &Planner, action: &PowerAction, text: String) -> Option<Ends> {
    let look = vmferry_proto::v1::ObserveRequest {
        vm_id: action.vm.to_string(),
        claim: action.claim.value(),
    };
    let seen = planner.parts.agents.observe(&action.host, look).await.ok()?;
    if let Some(end) = settled(action, &seen) {
        return Some(end);
    }
    let failed = |power| Ends {
        phase: PowerPhase::Failed,
        power,
        error: text.clone(),
        gone: seen.gone.clone(),
        resolved_machine: String::new(),
    };
    match action.kind {
        PowerKind::Start if nothing_runs(&seen) => Some(failed(PowerState::Stopped)),
        PowerKind::Stop if seen.qemu.as_ref().is_some_and(|qemu| qemu.alive) => {
            Some(failed(PowerState::Running))
        }
        // The agent has nothing of the VM, and still will not say that nothing of it runs.
        PowerKind::Stop if nothing_runs(&seen) => Some(failed(PowerState::Running)),
        PowerKind::Start | PowerKind::Stop => None,
    }
}

fn gone_from_store(action: &PowerAction) -> Ends {
    Ends {
        phase: PowerPhase::Failed,
        power: PowerState::from_label(&action.record.power_before).unwrap_or(PowerState::Stopped),
        error: "the VM is not in the store any more".to_owned(),
        gone: None,
        resolved_machine: String::new(),
    }
}

async fn finish(planner: &Planner, action: &PowerAction, end: Ends) -> Result<Outcome, StoreError> {
    if end.power == PowerState::Running
        && let Some(vm) = planner.store().vm(action.vm).await?
    {
        let demand = admission::demand_on(planner, &vm);
        planner.parts.inventory.note_arrival(&action.host, action.vm, demand);
    }
    let point = match action.kind {
        PowerKind::Start => "started",
        PowerKind::Stop => "stopped",
    };
    planner.parts.faults.pass("before_commit", point).await;
    match planner.store().end_power(action, &end, clock::now_us()).await? {
        Commit::Done(()) => {
            planner.parts.faults.pass("after_commit", point).await;
            info!(
                power = end.power.label(),
                state = end.phase.label(),
                error = end.error,
                "start or stop ended"
            );
            Ok(Outcome::Ended)
        }
        Commit::Raced => Ok(Outcome::ClaimAnew),
    }
}

#[cfg(test)]
mod tests {
    use vmferry_proto::v1::{ProofKind, QemuProcess};

    use super::*;

    fn running(run_state: &str) -> VmObservation {
        VmObservation {
            knowledge: Knowledge::Known.into(),
            role: "running".to_owned(),
            run_state: run_state.to_owned(),
            qemu: Some(QemuProcess { alive: true, ..QemuProcess::default() }),
            ..VmObservation::default()
        }
    }

    #[test]
    fn a_guest_that_fails_by_itself_was_started_all_the_same() {
        for run_state in ["running", "io-error", "guest-panicked"] {
            assert!(runs(&running(run_state)), "{run_state}");
        }
        for run_state in ["", "prelaunch", "inmigrate", "paused"] {
            assert!(!runs(&running(run_state)), "{run_state}");
        }
    }

    #[test]
    fn a_qemu_that_ends_at_once_is_told_of_and_not_started_again() {
        let gone = GoneProof {
            kind: ProofKind::ExitRecord.into(),
            ended: "exited with code 1".to_owned(),
            stderr_tail: "no bootable device\n".to_owned(),
            ..GoneProof::default()
        };
        let seen = VmObservation { gone: Some(gone), qemu: None, ..running("") };
        let end = ended_at_once(&seen).unwrap();
        assert_eq!((end.phase, end.power), (PowerPhase::Failed, PowerState::Stopped));
        assert_eq!(end.error, "QEMU ended at once (exited with code 1): no bootable device");
        assert!(ended_at_once(&running("running")).is_none());
    }
}
