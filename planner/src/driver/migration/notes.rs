//! Figures that are kept beside the phase.

use vmferry_proto::v1::VmObservation;

use crate::store::{MigrationRow, Notes};

/// Returns the notes to keep with the next commit: the newest figures of both ends.
pub(super) fn after(
    row: &MigrationRow,
    source: Option<&VmObservation>,
    destination: Option<&VmObservation>,
) -> Notes {
    let mut notes = row.notes.clone();
    let id = row.migration.id.to_string();
    if let Some(seen) = source.filter(|seen| seen.migration_id == id) {
        notes.source_status = status(seen);
    }
    if let Some(seen) = destination.filter(|seen| seen.migration_id == id) {
        notes.destination_status = status(seen);
    }
    if let Some(seen) = source.filter(|seen| seen.migration_id == id) {
        if let Some(transfer) = seen.transfer.as_ref().filter(|of| of.migration_id == id) {
            notes.transfer = transfer.clone();
        }
        if seen.stopped_at_us != 0 {
            notes.stopped_at_us = seen.stopped_at_us;
            notes.source_boot.clone_from(&seen.boot_id);
        }
    }
    if let Some(seen) = destination.filter(|seen| seen.migration_id == id)
        && let Some(pause) = pause_us(&notes, seen)
    {
        notes.pause_us = pause;
    }
    notes
}

/// Says in a line what a QEMU said last, or how it ended: what somebody who looks at a failed
/// migration wants to know first.
fn status(seen: &VmObservation) -> String {
    let mut parts = vec![seen.role.clone()];
    let mut say = |what: &str, said: &str| {
        let said = said.trim();
        if !said.is_empty() {
            parts.push(format!("{what} {said}"));
        }
    };
    if let Some(gone) = &seen.gone {
        say("QEMU gone:", if gone.ended.is_empty() { "proven" } else { &gone.ended });
        say("its last words:", &gone.stderr_tail);
    } else {
        say("run state", &seen.run_state);
    }
    if let Some(transfer) = &seen.transfer {
        say("migration", &transfer.status);
        say("QEMU's error:", &transfer.error);
    }
    say("gave up:", &seen.gave_up_cause);
    say("agent's trouble:", &seen.trouble);
    parts.join(", ")
}

/// Returns how long the guest stood still, if one machine's clock saw both ends of it.
pub(super) fn pause_us(notes: &Notes, destination: &VmObservation) -> Option<u64> {
    let one_clock = !notes.source_boot.is_empty() && notes.source_boot == destination.boot_id;
    let both = notes.stopped_at_us != 0 && destination.resumed_at_us != 0;
    (one_clock && both).then(|| destination.resumed_at_us.saturating_sub(notes.stopped_at_us))
}

#[cfg(test)]
mod tests {
    use vmferry_proto::v1::{GoneProof, TransferStatus};

    use super::*;

    #[test]
    fn what_a_qemu_said_last_is_told_in_a_line() {
        let failed = VmObservation {
            role: "running".to_owned(),
            run_state: "finish-migrate".to_owned(),
            transfer: Some(TransferStatus {
                status: "failed".to_owned(),
                error: " broken pipe\n".to_owned(),
                ..TransferStatus::default()
            }),
            gave_up_cause: "stalled".to_owned(),
            ..VmObservation::default()
        };
        assert_eq!(
            status(&failed),
            "running, run state finish-migrate, migration failed, QEMU's error: broken pipe, gave up: stalled"
        );
        // Of one that is gone its end is told, not the state that it had before.
        let gone = GoneProof {
            ended: "signal 9".to_owned(),
            stderr_tail: "no space left\n".to_owned(),
            ..GoneProof::default()
        };
        let lost = VmObservation {
            role: "receiver".to_owned(),
            run_state: "inmigrate".to_owned(),
            gone: Some(gone),
            trouble: "its shim is silent".to_owned(),
            ..VmObservation::default()
        };
        assert_eq!(
            status(&lost),
            "receiver, QEMU gone: signal 9, its last words: no space left, agent's trouble: its shim is silent"
        );
        let unsaid = VmObservation { gone: Some(GoneProof::default()), ..VmObservation::default() };
        assert_eq!(status(&unsaid), ", QEMU gone: proven");
    }

    #[test]
    fn two_machines_clocks_are_not_compared() {
        let notes =
            Notes { stopped_at_us: 1_000, source_boot: "one".to_owned(), ..Notes::default() };
        let destination = |boot: &str| VmObservation {
            boot_id: boot.to_owned(),
            resumed_at_us: 4_500,
            ..VmObservation::default()
        };
        assert_eq!(pause_us(&notes, &destination("one")), Some(3_500));
        assert_eq!(pause_us(&notes, &destination("two")), None);
        assert_eq!(pause_us(&Notes::default(), &destination("")), None);
    }
}
