//! Effects as commands.

use vmferry_planner_core::migration::{
    AutoConverge, Effect, Guest, Listener, Migration, NotConverging, Serves, Side, Takes,
};
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{Claim, HostId, Method, Step};

use crate::seen::gone_message;

/// A command on its way to one agent.
#[derive(Clone, Debug)]
pub struct Command {
    /// Which end.
    pub side: Side,
    /// Its host.
    pub host: HostId,
    /// What is said.
    pub request: v1::ExecuteRequest,
}

/// Returns the host that an effect is for. `None` if it is for the planner itself.
#[must_use]
pub fn host_of(migration: &Migration, side: Side) -> Option<HostId> {
    match side {
        Side::Source => Some(migration.source.clone()),
        Side::Destination => migration.destination().cloned(),
    }
}

/// Writes an effect as the command with the given step; `None` if no agent carries it out.
#[must_use]
pub fn command(
    (migration, claim): (&Migration, Claim),
    effect: &Effect,
    source: Option<v1::SourceDescription>,
    step: Step,
) -> Option<Command> {
    let side = effect.side()?;
    let host = host_of(migration, side)?;
    let action = match effect {
        Effect::TryAdmit | Effect::Commit => return None,
        Effect::ArmReceiver => {
            Action::ArmReceiver(v1::ArmReceiver { source, policy: Some(policy(migration)) })
        }
        Effect::HoldGuest => Action::HoldGuest(v1::HoldGuest {}),
        Effect::StartTransfer { listener } => Action::StartTransfer(v1::StartTransfer {
            listener: Some(listener_message(listener)),
            policy: Some(policy(migration)),
            receiver_host: host_of(migration, Side::Destination)
                .map(|host| host.to_string())
                .unwrap_or_default(),
        }),
        Effect::SetLimits { tuning } => Action::SetLimits(v1::SetLimits {
            limits: Some(v1::TransferLimits {
                max_bandwidth: tuning.max_bandwidth.value(),
                downtime_limit_ms: tuning.downtime_limit.value(),
                throttle: tuning.throttle == AutoConverge::On,
            }),
        }),
        Effect::OrderSwitchover => Action::OrderSwitchover(v1::OrderSwitchover {}),
        Effect::KillSource { cause } => Action::KillSource(v1::KillSource { cause: cause.clone() }),
        Effect::ContinueDestination => Action::ContinueDestination(v1::ContinueDestination {}),
        Effect::ShutDownGuest => Action::ShutDownGuest(v1::ShutDownGuest {}),
        Effect::StartReceiver => start_receiver(migration, source.unwrap_or_default()),
        Effect::RestartSource { .. } => start_again(source.unwrap_or_default()),
        Effect::StartPostcopy => Action::StartPostcopy(v1::StartPostcopy {}),
        Effect::RecoverReceiver => Action::RecoverReceiver(v1::RecoverReceiver {}),
        Effect::ResumeTransfer { listener } => Action::ResumeTransfer(v1::ResumeTransfer {
            listener: Some(listener_message(listener)),
        }),
        Effect::ReleaseSource { serves } => Action::ReleaseSource(v1::ReleaseSource {
            serves_no_more: match serves {
                Serves::NoMore => true,
                Serves::Never => false,
            },
        }),
        Effect::CancelTransfer { cause } => {
            Action::CancelTransfer(v1::CancelTransfer { cause: cause.clone() })
        }
        Effect::DestroyReceiver { cause, source_gone } => {
            Action::DestroyReceiver(v1::DestroyReceiver {
                cause: cause.clone(),
                source_gone: source_gone.as_ref().map(gone_message),
            })
        }
        Effect::ResumeSource { proof } => {
            Action::ResumeSource(v1::ResumeSource { receiver_gone: Some(gone_message(proof)) })
        }
    };
    let fence = fence(migration, claim, step);
    Some(Command {
        side,
        host,
        request: v1::ExecuteRequest { fence: Some(fence), action: Some(action) },
    })
}

fn start_receiver(migration: &Migration, known: v1::SourceDescription) -> Action {
    Action::StartReceiver(v1::StartReceiver {
        definition: known.definition,
        resolved_machine: known.resolved_machine,
        stays_off: migration.found == Guest::PoweredOff,
    })
}

fn start_again(known: v1::SourceDescription) -> Action {
    Action::StartVm(v1::StartVm {
        definition: known.definition,
        resolved_machine: known.resolved_machine,
    })
}

fn fence(migration: &Migration, claim: Claim, step: Step) -> v1::Fence {
    v1::Fence {
        vm_id: migration.vm.to_string(),
        migration_id: migration.id.to_string(),
        generation: migration.books().generation.value(),
        claim: claim.value(),
        step: step.value(),
    }
}

/// Writes the limits of a transfer for its agents.
fn policy(migration: &Migration) -> v1::TransferPolicy {
    let terms = &migration.terms;
    v1::TransferPolicy {
        max_bandwidth: terms.max_bandwidth.value(),
        downtime_limit_ms: terms.downtime_limit.value(),
        // A guest that is held dirties nothing.
        auto_converge: migration.tuning().throttle == AutoConverge::On,
        may_throttle: match migration.method {
            Method::Precopy => terms.not_converging == NotConverging::AutoConverge,
            Method::Postcopy | Method::Snapshot | Method::Cold | Method::DiskCopy => false,
        },
        timeout_ms: terms.transfer_timeout.value(),
        stall_ms: terms.stall_limit.value(),
        switchover_ms: terms.switchover_limit.value(),
        postcopy: postcopy(migration).into(),
    }
}

/// Says whether the ends are to be set up for a guest that goes before its memory.
fn postcopy(migration: &Migration) -> v1::Postcopy {
    match (migration.method, migration.terms.not_converging) {
        (Method::Postcopy, _) => v1::Postcopy::Required,
        (Method::Precopy, NotConverging::Postcopy) => v1::Postcopy::Allowed,
        (
            Method::Precopy,
            NotConverging::Abort
            | NotConverging::Wait
            | NotConverging::AutoConverge
            | NotConverging::Pause,
        )
        | (Method::Snapshot | Method::Cold | Method::DiskCopy, _) => v1::Postcopy::Off,
    }
}

fn listener_message(listener: &Listener) -> v1::Listener {
    v1::Listener {
        address: listener.address.clone(),
        port: u32::from(listener.port),
        postcopy: listener.takes != Takes::Precopy,
        preempt: listener.takes == Takes::Preempt,
        doorbell: u32::from(listener.doorbell),
    }
}

/// Reads where a receiver listens; `None` if it says nothing that can be reached.
#[must_use]
pub fn listener(message: &v1::Listener) -> Option<Listener> {
    let port = u16::try_from(message.port).ok().filter(|port| *port != 0)?;
    let takes = match (message.postcopy, message.preempt) {
        (false, _) => Takes::Precopy,
        (true, false) => Takes::Postcopy,
        (true, true) => Takes::Preempt,
    };
    let doorbell = u16::try_from(message.doorbell).unwrap_or(0);
    let address = message.address.clone();
    (!address.is_empty()).then_some(Listener { address, port, takes, doorbell })
}
