//! What an agent says on the wire, in the words of the core.
//!
//! What cannot be read proves nothing: an unknown word becomes the value that proves least.

use vmferry_planner_core::evidence::{
    Continued, Ended, Handed, Heard, Held, Knowledge, Ready, RunState, Seen, Shutdown,
    TransferState,
};
use vmferry_planner_core::migration::{AutoConverge, GoneProof, Process, ProofKind, Tuning};
use vmferry_proto::v1;
use vmferry_types::{BytesPerSec, Claim, Generation, HostId, MigrationId, Millis, Role, Timestamp};

use crate::command::listener;

/// Reads an observation of one migration.
///
/// What the journal holds of another admission says nothing of this one: its order, its giving up
/// and its transfer are left out.
#[must_use]
pub fn seen(host: &HostId, migration: MigrationId, observation: &v1::VmObservation) -> Seen {
    let journalled = observation.migration_id.parse::<MigrationId>().ok();
    let ours = journalled == Some(migration);
    let transfer = observation
        .transfer
        .as_ref()
        .filter(|transfer| transfer.migration_id.parse() == Ok(migration));
    Seen {
        host: host.clone(),
        claim: Claim::from_stored(observation.claim),
        heard: Heard::Now,
        knowledge: knowledge(observation),
        role: Role::from_label(&observation.role).unwrap_or(Role::Absent),
        generation: Generation::from_stored(observation.generation),
        migration: journalled,
        process: observation.qemu.as_ref().filter(|qemu| qemu.alive).map(process),
        gone: observation.gone.as_ref().and_then(|proof| gone(host, proof)),
        ended: ended(observation),
        run_state: run_state(observation),
        transfer: transfer
            .map_or(TransferState::None, |transfer| TransferState::from_agent(&transfer.status)),
        transfer_error: transfer.map(|transfer| transfer.error.clone()).unwrap_or_default(),
        passes: transfer.map_or(0, |transfer| transfer.passes),
        diverges: transfer.map(|transfer| transfer.diverges.clone()).unwrap_or_default(),
        tuning: transfer.and_then(|transfer| transfer.limits.as_ref()).map(tuning),
        waits_at: observation.waits_at.as_ref().filter(|_| ours).and_then(listener),
        handed: if ours && observation.handed { Handed::Yes } else { Handed::No },
        gave_up: (ours && observation.gave_up).then(|| observation.gave_up_cause.clone()),
        held: if ours && !observation.switched_off.is_empty() { Held::Yes } else { Held::No },
        shutdown: if ours && observation.shutdown_asked {
            Shutdown::Asked
        } else {
            Shutdown::Unasked
        },
        ready: if ours && observation.ready { Ready::Yes } else { Ready::No },
        continued: continued(observation),
        stopped_at_us: if ours { observation.stopped_at_us } else { 0 },
        resumed_at_us: if ours { observation.resumed_at_us } else { 0 },
        still: Millis(observation.still_ms),
        trouble: observation.trouble.clone(),
        at: Timestamp(observation.observed_at_ms),
    }
}

/// Reads what limits a transfer, as its source says it was told.
fn tuning(limits: &v1::TransferLimits) -> Tuning {
    Tuning {
        max_bandwidth: BytesPerSec(limits.max_bandwidth),
        downtime_limit: Millis(limits.downtime_limit_ms),
        throttle: if limits.throttle { AutoConverge::On } else { AutoConverge::Off },
    }
}

/// A role that this release does not know makes the whole observation prove nothing.
fn knowledge(observation: &v1::VmObservation) -> Knowledge {
    if Role::from_label(&observation.role).is_none() && !observation.role.is_empty() {
        return Knowledge::Unreadable;
    }
    match observation.knowledge() {
        v1::Knowledge::Unspecified | v1::Knowledge::Unreadable => Knowledge::Unreadable,
        v1::Knowledge::Learning => Knowledge::Learning,
        v1::Knowledge::Known => Knowledge::Known,
        v1::Knowledge::Unresponsive => Knowledge::Unresponsive,
        v1::Knowledge::UnknownVm => Knowledge::UnknownVm,
    }
}

fn continued(observation: &v1::VmObservation) -> Continued {
    match observation.knowledge() {
        v1::Knowledge::Unspecified | v1::Knowledge::Unreadable | v1::Knowledge::Learning => {
            Continued::Unknown
        }
        v1::Knowledge::Known | v1::Knowledge::Unresponsive | v1::Knowledge::UnknownVm => {
            if observation.ever_continued {
                Continued::Yes
            } else {
                Continued::No
            }
        }
    }
}

/// A run state read before the guest's last stop says nothing of it now: the STOP came by event,
/// and the answer to the next question is still on its way.
fn run_state(observation: &v1::VmObservation) -> RunState {
    let read = RunState::from_qemu(&observation.run_state);
    let stopped_since = observation.stopped_at_us > observation.resumed_at_us;
    if read == RunState::Running && stopped_since { RunState::Unknown } else { read }
}

/// A guest that turned itself off leaves its last run state behind.
fn ended(observation: &v1::VmObservation) -> Ended {
    let shut_down = RunState::from_qemu(&observation.run_state) == RunState::Shutdown;
    if observation.gone.is_some() && shut_down { Ended::ByGuest } else { Ended::Unsaid }
}

fn process(qemu: &v1::QemuProcess) -> Process {
    Process { pid: qemu.pid, start_time: qemu.start_time, boot_id: qemu.boot_id.clone() }
}

/// Reads a proof; `None` if its kind is none of ours, for then it proves nothing, or if it is of
/// another host.
#[must_use]
pub fn gone(host: &HostId, proof: &v1::GoneProof) -> Option<GoneProof> {
    if !proof.host_id.is_empty() && proof.host_id != host.as_str() {
        return None;
    }
    let kind = match proof.kind() {
        v1::ProofKind::Unspecified => return None,
        v1::ProofKind::ExitRecord => ProofKind::ExitRecord,
        v1::ProofKind::ProcessAbsent => ProofKind::ProcessAbsent,
        v1::ProofKind::NewBoot => ProofKind::NewBoot,
        v1::ProofKind::NeverStarted => ProofKind::NeverStarted,
        v1::ProofKind::HostDeclaredDead => ProofKind::HostDeclaredDead,
    };
    Some(GoneProof {
        kind,
        host: host.clone(),
        boot_id: proof.boot_id.clone(),
        pid: proof.pid,
        start_time: proof.start_time,
        ended: proof.ended.clone(),
        at: Timestamp(proof.at_ms),
        stderr_tail: proof.stderr_tail.clone(),
    })
}

/// Writes a proof for the wire.
#[must_use]
pub fn gone_message(proof: &GoneProof) -> v1::GoneProof {
    let kind = match proof.kind {
        ProofKind::ExitRecord => v1::ProofKind::ExitRecord,
        ProofKind::ProcessAbsent => v1::ProofKind::ProcessAbsent,
        ProofKind::NewBoot => v1::ProofKind::NewBoot,
        ProofKind::NeverStarted => v1::ProofKind::NeverStarted,
        ProofKind::HostDeclaredDead => v1::ProofKind::HostDeclaredDead,
    };
    v1::GoneProof {
        kind: kind.into(),
        host_id: proof.host.to_string(),
        boot_id: proof.boot_id.clone(),
        pid: proof.pid,
        start_time: proof.start_time,
        ended: proof.ended.clone(),
        at_ms: proof.at.value(),
        stderr_tail: proof.stderr_tail.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observation() -> v1::VmObservation {
        v1::VmObservation {
            knowledge: v1::Knowledge::Known.into(),
            role: "running".to_owned(),
            migration_id: MigrationId::from_u128(1).to_string(),
            handed: true,
            gave_up: true,
            gave_up_cause: "stalled".to_owned(),
            run_state: "running".to_owned(),
            transfer: Some(v1::TransferStatus {
                migration_id: MigrationId::from_u128(1).to_string(),
                status: "completed".to_owned(),
                ..v1::TransferStatus::default()
            }),
            ..v1::VmObservation::default()
        }
    }

    fn host() -> HostId {
        "a".parse().unwrap()
    }

    #[test]
    fn what_is_of_another_admission_says_nothing_of_this_one() {
        let ours = seen(&host(), MigrationId::from_u128(1), &observation());
        assert_eq!(ours.transfer, TransferState::Completed);
        assert_eq!(ours.gave_up.as_deref(), Some("stalled"));
        let other = seen(&host(), MigrationId::from_u128(2), &observation());
        assert_eq!(other.transfer, TransferState::None);
        assert_eq!(other.gave_up, None);
        assert_eq!(other.handed, Handed::No);
        let held = v1::VmObservation { switched_off: vec!["vcpus".to_owned()], ..observation() };
        assert_eq!(seen(&host(), MigrationId::from_u128(1), &held).held, Held::Yes);
        assert_eq!(seen(&host(), MigrationId::from_u128(2), &held).held, Held::No);
    }

    #[test]
    fn a_run_state_from_before_the_stop_is_not_believed() {
        let stopped = v1::VmObservation { stopped_at_us: 5, ..observation() };
        assert_eq!(seen(&host(), MigrationId::from_u128(1), &stopped).run_state, RunState::Unknown);
        let resumed = v1::VmObservation { resumed_at_us: 6, ..stopped };
        assert_eq!(seen(&host(), MigrationId::from_u128(1), &resumed).run_state, RunState::Running);
    }

    #[test]
    fn unknown_words_prove_nothing() {
        let strange = v1::VmObservation { role: "dreaming".to_owned(), ..observation() };
        assert_eq!(
            seen(&host(), MigrationId::from_u128(1), &strange).knowledge,
            Knowledge::Unreadable
        );
        assert_eq!(gone(&host(), &v1::GoneProof::default()), None);
        let foreign = v1::GoneProof {
            kind: v1::ProofKind::ExitRecord.into(),
            host_id: "b".to_owned(),
            ..v1::GoneProof::default()
        };
        assert_eq!(gone(&host(), &foreign), None);
    }
}
