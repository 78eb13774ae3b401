//! An observation: the journal's word and what is seen, in the words of the wire.

use vmferry_agent_core::journal::{Arrival, GoneKind, Order, Part, VmRecord};
use vmferry_agent_core::outgoing::{self, Sending};
use vmferry_agent_core::tuning::Throttle;
use vmferry_proto::v1;
use vmferry_qmp::{MigrateInfo, MigrationStatus, RunState};
use vmferry_types::{Millis, Role, VmId};

use crate::agent::Agent;
use crate::clock;
use crate::live::{Disks, Knowledge, Shared, Sight};
use crate::wire;

/// Returns what is observed of a VM.
pub(crate) fn observation(agent: &Agent, shared: &Shared) -> v1::VmObservation {
    // Else one that was read before could be numbered after.
    let _one_at_a_time = agent.reading();
    let record = shared.record.borrow().clone();
    let sight = shared.sight.borrow().clone();
    v1::VmObservation { waits_at: shared.waits_at(), ..of(agent, &record, &sight) }
}

/// Returns what is observed of a VM that nothing is known of.
pub(crate) fn unknown(agent: &Agent, vm: VmId) -> v1::VmObservation {
    let stranger = agent.stranger_of(vm);
    let proves = agent.journal_proves() && stranger.is_none();
    let knowledge = if proves { v1::Knowledge::UnknownVm } else { v1::Knowledge::Unreadable };
    v1::VmObservation {
        host_id: agent.config.host_id.to_string(),
        vm_id: vm.to_string(),
        trouble: stranger.as_deref().map(unnamed).unwrap_or_default(),
        boot_id: agent.boot_id.clone(),
        sequence: agent.next_sequence(),
        observed_at_ms: clock::wall_ms(),
        knowledge: knowledge.into(),
        role: Role::Absent.label().to_owned(),
        ..v1::VmObservation::default()
    }
}

/// Returns how well a VM is known, and what is in the way of more.
///
/// A record without a process says nothing while a QEMU of the VM runs that no record names: it is
/// of another time.
pub(crate) fn known(agent: &Agent, record: &VmRecord, sight: &Sight) -> (v1::Knowledge, String) {
    let stranger = match (&record.part, sight.knowledge) {
        (Part::Absent | Part::Stopped { .. }, Knowledge::Known) => agent.stranger_of(record.vm),
        (
            Part::Absent | Part::Stopped { .. } | Part::Running { .. } | Part::Receiver { .. },
            Knowledge::Known
            | Knowledge::Learning
            | Knowledge::Unresponsive
            | Knowledge::Unreadable,
        ) => None,
    };
    match stranger {
        Some(stranger) => (v1::Knowledge::Unreadable, unnamed(&stranger)),
        None => (knowledge(sight.knowledge), sight.trouble.clone()),
    }
}

fn unnamed(stranger: &str) -> String {
    format!("a QEMU of this VM runs here that the journal does not know: {stranger}")
}

const fn knowledge(knowledge: Knowledge) -> v1::Knowledge {
    match knowledge {
        Knowledge::Learning => v1::Knowledge::Learning,
        Knowledge::Known => v1::Knowledge::Known,
        Knowledge::Unresponsive => v1::Knowledge::Unresponsive,
        Knowledge::Unreadable => v1::Knowledge::Unreadable,
    }
}

pub(crate) fn of(agent: &Agent, record: &VmRecord, sight: &Sight) -> v1::VmObservation {
    let host = &agent.config.host_id;
    let role = role(record, sight);
    let ended = record.ended.as_ref().filter(|ended| ended.migration == record.fence.migration);
    let gone = match (record.process(), role) {
        (Some(_), Role::Running | Role::Held | Role::Receiver) => sight.gone.as_ref(),
        (Some(_), Role::Absent | Role::Stopped) => None,
        (None, _) => ended.map(|ended| &ended.gone),
    };
    let (handed, gave_up, gave_up_cause) = order(record);
    let (knowledge, trouble) = known(agent, record, sight);
    v1::VmObservation {
        host_id: host.to_string(),
        vm_id: record.vm.to_string(),
        vm_name: record.name.clone(),
        boot_id: agent.boot_id.clone(),
        sequence: agent.next_sequence(),
        observed_at_ms: clock::wall_ms(),
        knowledge: knowledge.into(),
        role: role.label().to_owned(),
        generation: record.fence.generation.value(),
        claim: record.fence.claim.value(),
        step: record.fence.step.value(),
        migration_id: record.fence.migration.map(|id| id.to_string()).unwrap_or_default(),
        qemu: qemu(record, sight),
        gone: gone.map(|gone| wire::gone_to_wire(gone, host)),
        run_state: run_state(sight),
        handed,
        gave_up,
        gave_up_cause,
        ever_continued: record.ever_continued(),
        transfer: transfer(record, sight),
        trouble,
        stopped_at_us: sight.stopped_at_us,
        resumed_at_us: sight.resumed_at_us,
        still_ms: still_ms(record, sight),
        disks_active: sight.disks == Disks::Active && sight.running(),
        switched_off: switched_off(record),
        waits_at: None,
        shutdown_asked: shutdown_asked(record),
        ready: ready(record),
    }
}

/// Returns what this host has of a VM.
///
/// A launch that the agent did not live to see is no process that was lost: nobody was told of it,
/// and the command that began it is carried out again.
pub(crate) fn role(record: &VmRecord, sight: &Sight) -> Role {
    let never = sight.gone.as_ref().is_some_and(|gone| gone.kind == GoneKind::NeverStarted);
    match &record.part {
        Part::Receiver { incoming, .. } if sight.gone.is_some() && !incoming.told() => Role::Absent,
        Part::Running { .. } if never => Role::Stopped,
        // QEMU let it go on by itself after the order: it does not stand still.
        Part::Running { .. } if sight.running() => Role::Running,
        Part::Absent | Part::Stopped { .. } | Part::Running { .. } | Part::Receiver { .. } => {
            record.role()
        }
    }
}

/// Says whether the guest was asked to turn itself off for the admission that is open.
fn shutdown_asked(record: &VmRecord) -> bool {
    let Part::Running { leaving, .. } = &record.part else { return false };
    leaving.is_some() && *leaving == record.fence.migration
}

/// Says whether what is to start here, or to be here stopped, needs nothing more.
fn ready(record: &VmRecord) -> bool {
    match &record.part {
        Part::Receiver { incoming, .. } => incoming.arrives == Arrival::Stands,
        Part::Stopped { brought_by, .. } => {
            brought_by.is_some() && *brought_by == record.fence.migration
        }
        Part::Absent | Part::Running { .. } => false,
    }
}

/// Names what the guest's hold switched off.
fn switched_off(record: &VmRecord) -> Vec<String> {
    let held = record.hold().map(|hold| hold.switched_off.as_slice()).unwrap_or_default();
    held.iter().map(|switched| switched.label().to_owned()).collect()
}

/// Returns how long the guest has stood still for its move.
fn still_ms(record: &VmRecord, sight: &Sight) -> u64 {
    if sight.running() {
        return 0;
    }
    let moves = record.outgoing().is_some() || record.hold().is_some();
    let stands = moves && sight.gone.is_none();
    if stands && sight.stopped_at_us != 0 {
        clock::monotonic_us().saturating_sub(sight.stopped_at_us) / 1000
    } else {
        sight.still.value()
    }
}

/// Returns QEMU's run state. Of one that is gone, only that its guest had turned itself off: that
/// tells an end that was wanted from a loss.
fn run_state(sight: &Sight) -> String {
    match (&sight.gone, &sight.run_state) {
        (None, Some(state)) | (Some(_), Some(state @ RunState::Shutdown)) => {
            state.label().to_owned()
        }
        (Some(_), Some(_)) | (None | Some(_), None) => String::new(),
    }
}

pub(crate) fn order(record: &VmRecord) -> (bool, bool, String) {
    let sent = record.outgoing().or_else(|| record.unsettled_order());
    match sent.map(|sent| &sent.order) {
        None | Some(Order::Open) => (false, false, String::new()),
        Some(Order::Handed) => (true, false, String::new()),
        Some(Order::GaveUp { cause }) => (false, true, cause.clone()),
        Some(Order::TakenBack { cause }) => (true, true, cause.clone()),
    }
}

fn qemu(record: &VmRecord, sight: &Sight) -> Option<v1::QemuProcess> {
    let process = record.process()?;
    let identity = sight.identity.as_ref().or(process.identity.as_ref())?;
    Some(v1::QemuProcess {
        pid: identity.pid,
        start_time: identity.start_time,
        boot_id: identity.boot_id.clone(),
        alive: sight.gone.is_none(),
    })
}

/// Returns the transfer of the current admission, never of an earlier one.
fn transfer(record: &VmRecord, sight: &Sight) -> Option<v1::TransferStatus> {
    let migration = record.fence.migration?;
    let alive = sight.gone.is_none();
    let (info, complete) = match &record.part {
        Part::Absent | Part::Stopped { .. } => return None,
        Part::Running { process, .. } => match record.outgoing() {
            Some(sent) => {
                let run = sight.run_state.clone().unwrap_or(RunState::Unknown(String::new()));
                let sending = outgoing::classify(Some(sent), &run, &sight.migrate);
                let info = outgoing::of_this_attempt(Some(sent), &sight.migrate);
                (info, alive && sending == Sending::Complete)
            }
            // It came by this very migration.
            None if process.admission == migration && sight.migrate.status.is_some() => {
                (Some(&sight.migrate), alive && completed(&sight.migrate))
            }
            None => return None,
        },
        Part::Receiver { incoming, .. } if incoming.migration == migration => {
            (Some(&sight.migrate), alive && completed(&sight.migrate))
        }
        Part::Receiver { .. } => return None,
    };
    let mut status = v1::TransferStatus {
        migration_id: migration.to_string(),
        complete,
        ..v1::TransferStatus::default()
    };
    if let Some(info) = info {
        fill(&mut status, info);
        status.bytes_per_second = sight.rate;
    }
    if let (Part::Running { .. }, Some(sent)) = (&record.part, record.outgoing()) {
        status.limits = Some(v1::TransferLimits {
            max_bandwidth: sent.tuned.max_bandwidth,
            downtime_limit_ms: sent.downtime_ms,
            throttle: sent.tuned.throttle == Throttle::On,
        });
        let judged = &sight.judged;
        if judged.by == (sent.downtime_ms, sent.tuned) {
            status.diverges.clone_from(&judged.diverges);
            status.forecast.clone_from(&judged.forecast);
            status.eta_ms = judged.eta.map_or(0, Millis::value);
        }
    }
    Some(status)
}

fn completed(info: &MigrateInfo) -> bool {
    info.status == Some(MigrationStatus::Completed)
}

fn fill(status: &mut v1::TransferStatus, info: &MigrateInfo) {
    let ram = info.ram.clone().unwrap_or_default();
    status.status =
        info.status.as_ref().map(|status| status.label().to_owned()).unwrap_or_default();
    status.bytes_transferred = ram.transferred.unwrap_or(0);
    status.bytes_remaining = ram.remaining.unwrap_or(0);
    status.bytes_total = ram.total.unwrap_or(0);
    status.dirty_bytes_per_second =
        ram.dirty_pages_rate.unwrap_or(0).saturating_mul(ram.page_size.unwrap_or(4096));
    status.passes = ram.dirty_sync_count.unwrap_or(0);
    status.expected_downtime_ms = info.expected_downtime.unwrap_or(0);
    status.downtime_ms = info.downtime.unwrap_or(0);
    status.setup_ms = info.setup_time.unwrap_or(0);
    status.total_ms = info.total_time.unwrap_or(0);
    status.throttle_percent =
        info.cpu_throttle_percentage.and_then(|percent| u32::try_from(percent).ok()).unwrap_or(0);
    status.error = info.error_desc.clone().unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use vmferry_agent_core::journal::{Continued, Defined, Gone, Incoming, Process};
    use vmferry_types::{Generation, MigrationId};

    use super::*;

    fn receiver(port: Option<u16>) -> VmRecord {
        let mut record = VmRecord::new(VmId::from_u128(1));
        record.part = Part::Receiver {
            defined: Defined { text: String::new(), resolved_machine: String::new() },
            process: Process {
                dir: "/run/vmferry/x".to_owned(),
                boot_id: "b".to_owned(),
                identity: None,
                taps: Vec::new(),
                generation: Generation::from_stored(0),
                admission: MigrationId::from_u128(1),
                announced_ms: 0,
            },
            incoming: Incoming {
                migration: MigrationId::from_u128(1),
                port,
                carries: vmferry_agent_core::capabilities::Carries::Whole,
                arrives: Arrival::Streamed,
                cont: Continued::Never,
            },
        };
        record
    }

    fn gone(kind: GoneKind) -> Sight {
        let gone = Gone {
            kind,
            identity: None,
            boot_id: String::new(),
            ended: String::new(),
            at_ms: 0,
            stderr_tail: String::new(),
        };
        Sight { gone: Some(gone), ..Sight::nothing(Knowledge::Known) }
    }

    #[test]
    fn a_guest_that_turned_itself_off_is_told_from_one_that_was_lost() {
        let ended = |state| Sight { run_state: Some(state), ..gone(GoneKind::ExitRecord) };
        assert_eq!(run_state(&ended(RunState::Shutdown)), "shutdown");
        assert_eq!(run_state(&ended(RunState::Running)), "");
    }

    #[test]
    fn a_receiver_that_was_lost_before_anybody_was_told_of_it_was_never_there() {
        assert_eq!(role(&receiver(None), &gone(GoneKind::NeverStarted)), Role::Absent);
        assert_eq!(role(&receiver(None), &Sight::nothing(Knowledge::Known)), Role::Receiver);
        assert_eq!(role(&receiver(Some(1)), &gone(GoneKind::ExitRecord)), Role::Receiver);
    }
}
