//! Between the wire's messages and the words of this code: the only mapping.

use vmferry_agent_core::journal::{Gone, GoneKind, Identity};
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{Claim, Fence, Generation, HostId, MigrationId, Step, VmId};

use crate::error::CommandError;
use crate::process::{Evidence, Exit, GoneProof, ProcessIdentity};

pub(crate) fn vm_id(text: &str, field: &str) -> Result<VmId, CommandError> {
    text.parse()
        .map_err(|error: vmferry_types::InvalidId| CommandError::invalid(field, error.to_string()))
}

pub(crate) fn migration_id(text: &str, field: &str) -> Result<MigrationId, CommandError> {
    text.parse()
        .map_err(|error: vmferry_types::InvalidId| CommandError::invalid(field, error.to_string()))
}

/// Reads a fence. Zeros stand for "none yet" and command nothing.
pub(crate) fn fence(fence: Option<&v1::Fence>) -> Result<Fence, CommandError> {
    let Some(fence) = fence else {
        return Err(CommandError::invalid("fence", "is missing"));
    };
    for (field, value) in [
        ("fence.generation", fence.generation),
        ("fence.claim", fence.claim),
        ("fence.step", fence.step),
    ] {
        if value == 0 {
            return Err(CommandError::invalid(field, "must be at least 1"));
        }
    }
    Ok(Fence {
        vm: vm_id(&fence.vm_id, "fence.vm_id")?,
        migration: migration_id(&fence.migration_id, "fence.migration_id")?,
        generation: Generation::from_stored(fence.generation),
        claim: Claim::from_stored(fence.claim),
        step: Step::from_stored(fence.step),
    })
}

/// The longest that QEMU may be told to let a guest stand still: 2000 s.
const DOWNTIME_LIMIT_MS_MAX: u64 = 2_000_000;

/// Refuses a command whose numbers QEMU cannot take.
pub(crate) fn check(action: &Action) -> Result<(), CommandError> {
    let policy = |policy: &Option<v1::TransferPolicy>| {
        let policy = policy.unwrap_or_default();
        (policy.max_bandwidth, policy.downtime_limit_ms)
    };
    let (name, (max_bandwidth, downtime_limit_ms)) = match action {
        Action::ArmReceiver(arm) => ("arm_receiver.policy", policy(&arm.policy)),
        Action::StartTransfer(transfer) => ("start_transfer.policy", policy(&transfer.policy)),
        Action::SetLimits(set) => {
            let limits = set.limits.unwrap_or_default();
            ("set_limits.limits", (limits.max_bandwidth, limits.downtime_limit_ms))
        }
        Action::StartVm(_)
        | Action::StopVm(_)
        | Action::OrderSwitchover(_)
        | Action::CancelTransfer(_)
        | Action::ResumeSource(_)
        | Action::ContinueDestination(_)
        | Action::DestroyReceiver(_)
        | Action::ReleaseSource(_)
        | Action::KillSource(_)
        | Action::ForgetVm(_)
        | Action::StartPostcopy(_)
        | Action::RecoverReceiver(_)
        | Action::ResumeTransfer(_)
        | Action::ShutDownGuest(_)
        | Action::StartReceiver(_)
        | Action::HoldGuest(_) => return Ok(()),
    };
    for (field, value, max) in [
        ("downtime_limit_ms", downtime_limit_ms, DOWNTIME_LIMIT_MS_MAX),
        ("max_bandwidth", max_bandwidth, i64::MAX.cast_unsigned()),
    ] {
        if value > max {
            let field = format!("{name}.{field}");
            return Err(CommandError::invalid(field, format!("must be at most {max}")));
        }
    }
    Ok(())
}

pub(crate) fn identity(identity: &ProcessIdentity) -> Identity {
    Identity {
        pid: identity.pid,
        start_time: identity.start_time,
        boot_id: identity.boot_id.clone(),
    }
}

/// Turns a proof into what is written down of it.
pub(crate) fn gone(proof: &GoneProof, boot_id: &str, at_ms: u64) -> Gone {
    let (kind, who, boot, ended, at_ms, stderr_tail) = match proof.evidence() {
        Evidence::Recorded(record) => {
            let kind = match record.exit {
                Exit::NeverStarted | Exit::ExecFailed { .. } => GoneKind::NeverStarted,
                Exit::Code { .. } | Exit::Signal { .. } => GoneKind::ExitRecord,
            };
            let tail = record.stderr_tail.clone();
            (kind, record.identity.as_ref(), boot_id, record.exit.to_string(), record.at_ms, tail)
        }
        Evidence::Absent { identity } => {
            let ended = "is not there any more".to_owned();
            (GoneKind::ProcessAbsent, Some(identity), boot_id, ended, at_ms, String::new())
        }
        Evidence::NewBoot { identity, boot_id } => {
            let ended = "was there before the host was booted".to_owned();
            (GoneKind::NewBoot, Some(identity), boot_id.as_str(), ended, at_ms, String::new())
        }
    };
    let boot_id = boot.to_owned();
    Gone { kind, identity: who.map(identity), boot_id, ended, at_ms, stderr_tail }
}

pub(crate) fn gone_to_wire(gone: &Gone, host: &HostId) -> v1::GoneProof {
    let kind = match gone.kind {
        GoneKind::ExitRecord => v1::ProofKind::ExitRecord,
        GoneKind::ProcessAbsent => v1::ProofKind::ProcessAbsent,
        GoneKind::NewBoot => v1::ProofKind::NewBoot,
        GoneKind::NeverStarted => v1::ProofKind::NeverStarted,
    };
    v1::GoneProof {
        kind: kind.into(),
        host_id: host.to_string(),
        boot_id: gone.boot_id.clone(),
        pid: gone.identity.as_ref().map_or(0, |identity| identity.pid),
        start_time: gone.identity.as_ref().map_or(0, |identity| identity.start_time),
        ended: gone.ended.clone(),
        at_ms: gone.at_ms,
        stderr_tail: gone.stderr_tail.clone(),
    }
}
