//! What both sides prove of a guest that is shut down under a grant and started anew.

use vmferry_types::{Generation, Millis, Role};

use super::precopy::{Reading, cleared, goes_on};
use super::{Continued, Ended, Heard, Knowledge, Ready, RunState, Seen, Shutdown, Sides, Times};
use crate::migration::{
    Back, Cause, Cleanup, Event, Guest, Handover, Migration, Phase, Process, ProofKind, Ran,
    Receiver, SourceWord, Stage, Switchover, Word,
};

/// What an agent said counts as its word of now for less than this. A guest that turned itself off
/// within its time is known to have by then.
const STALE: Millis = Millis(4_000);

pub(super) fn read(migration: &Migration, sides: &Sides, times: Times) -> Option<Event> {
    let reading = Reading { migration, sides, times };
    match &migration.phase {
        Phase::Queued { deadline, .. } => (times.now >= *deadline).then_some(Event::QueueExpired),
        Phase::Admitted { stage: Stage::ShuttingDown, .. } => reading.shutting_down(),
        Phase::Captured { switchover: Switchover::Down { source }, .. } => {
            let source = SourceWord::ShutDown(source.clone());
            reading.lost_there().or_else(|| reading.stands(source))
        }
        Phase::Restored { .. } => reading.lost_there(),
        Phase::Committed { generation, .. } => match migration.found {
            Guest::Present => reading.committed(*generation),
            Guest::PoweredOff => reading.taken_over(*generation),
        },
        Phase::Attached { guest, .. } => reading.attached_cold(*guest),
        Phase::RollingBack { cause, back, generation, .. } => match back {
            Back::Cancelling => reading.left_or_lost().or_else(|| reading.kept(cause)),
            Back::Clearing => reading.left_or_lost().or_else(|| reading.receiver_cleared()),
            Back::Undoing => reading.nobody_starts_it().or_else(|| reading.undone_there()),
            Back::Resuming { .. } => reading.restarting(*generation),
            Back::PoweredOff => reading.receiver_cleared(),
        },
        Phase::Failed { cleanup: Cleanup::Receiver | Cleanup::Half, .. } => {
            reading.receiver_cleared()
        }
        Phase::Failed { cleanup: Cleanup::Source, .. } => reading.retired(),
        // No such guest is ever there.
        Phase::Admitted { .. } | Phase::Captured { .. } => None,
        Phase::Failed { cleanup: Cleanup::Nothing | Cleanup::Undecided, .. }
        | Phase::Done { .. }
        | Phase::Aborted { .. } => None,
    }
}

impl Reading<'_> {
    fn shutting_down(self) -> Option<Event> {
        if self.migration.found == Guest::PoweredOff {
            return self.is_off();
        }
        self.left_or_lost().or_else(|| self.refuses())
    }

    /// It was off before, and its host's journal says that nothing of it runs there.
    fn is_off(self) -> Option<Event> {
        let (seen, proof) = self.source_proof()?;
        let off = matches!(seen.role, Role::Stopped | Role::Absent)
            && seen.migration == Some(self.migration.id);
        (off || cleared(proof)).then(|| Event::SourceShutDown { proof: proof.clone() })
    }

    /// The source's QEMU is gone: as it was asked to, by the guest's own will, or lost.
    fn left_or_lost(self) -> Option<Event> {
        let (seen, proof) = self.source_proof()?;
        if !(cleared(proof) || seen.role == Role::Running) {
            return None;
        }
        let proof = proof.clone();
        Some(match (seen.ended, seen.shutdown) {
            (Ended::ByGuest, Shutdown::Asked) => Event::SourceShutDown { proof },
            (Ended::ByGuest, Shutdown::Unasked) => Event::GuestPoweredOff { proof },
            (Ended::Unsaid, Shutdown::Asked | Shutdown::Unasked) => {
                Event::SourceGone { proof, receiver: Receiver::Incomplete }
            }
        })
    }

    /// It was asked, its time is over, and its agent says now that it is there.
    fn refuses(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let overdue = self.elapsed() > self.migration.terms.shutdown_limit;
        (overdue && seen.heard == Heard::Now && seen.process.is_some())
            .then_some(Event::ShutdownRefused)
    }

    /// The receiver is gone, or what was brought of a VM that is off. That nothing was ever there is
    /// no loss.
    fn lost_there(self) -> Option<Event> {
        let (seen, proof) = self.destination_proof()?;
        let lost = match self.migration.found {
            Guest::Present => proof.kind != ProofKind::NeverStarted,
            Guest::PoweredOff => seen.role == Role::Absent,
        };
        (lost || cleared(proof)).then(|| self.receiver_gone()).flatten()
    }

    /// Nothing is left there that was to start the guest. The definition of a VM that is off has no
    /// QEMU that could be gone: its agent has to have forgotten it.
    fn undone_there(self) -> Option<Event> {
        match self.migration.found {
            Guest::Present => self.receiver_gone(),
            Guest::PoweredOff => self.lost_there(),
        }
    }

    /// The destination's QEMU stands still with the disks locked.
    fn stands(self, source: SourceWord) -> Option<Event> {
        Some(Event::BothComplete { proof: self.ready(source)? })
    }

    fn ready(self, source: SourceWord) -> Option<Handover> {
        let seen = self.speaking_or_off(self.destination())?;
        if seen.ready != Ready::Yes || seen.continued == Continued::Yes {
            return None;
        }
        let process = match self.migration.found {
            Guest::Present if seen.run_state == RunState::Prelaunch => seen.process.clone()?,
            Guest::Present => return None,
            Guest::PoweredOff => Process { pid: 0, start_time: 0, boot_id: String::new() },
        };
        let (transfer, run_state, at) = (seen.transfer, seen.run_state, seen.at);
        Some(Handover { source, destination: Word { process, transfer, run_state, at } })
    }

    /// A side that knows the VM for this migration; of one that is off nothing has to run.
    fn speaking_or_off(self, seen: Option<&Seen>) -> Option<&Seen> {
        seen.filter(|seen| {
            let lives = seen.gone.is_none() || self.migration.found == Guest::PoweredOff;
            seen.knowledge == Knowledge::Known && seen.migration == Some(self.migration.id) && lives
        })
    }

    /// The destination has it as its own, and it is off there.
    fn taken_over(self, generation: Generation) -> Option<Event> {
        let seen = self.speaking_or_off(self.destination())?;
        let proof = seen.gone.clone()?;
        let owned = seen.generation >= generation && seen.role == Role::Stopped;
        (owned && seen.ready == Ready::No).then_some(Event::GuestPoweredOff { proof })
    }

    fn attached_cold(self, guest: Guest) -> Option<Event> {
        if let (Guest::Present, Some((seen, proof))) = (guest, self.destination_proof()) {
            return Some(match seen.ended {
                Ended::ByGuest => Event::GuestPoweredOff { proof: proof.clone() },
                Ended::Unsaid => Event::ReceiverGone { proof: proof.clone(), ran: Ran::Maybe },
            });
        }
        self.retired()
    }

    /// The source's definition is retired: its QEMU alone was gone long before.
    fn retired(self) -> Option<Event> {
        let (seen, proof) = self.source_proof()?;
        let retired = cleared(proof) || seen.role == Role::Absent;
        retired.then(|| Event::SourceReleased { proof: proof.clone() })
    }

    /// The guest goes on at the source. One that was asked to turn itself off may yet do so until its
    /// time for that is over.
    fn kept(self, cause: &Cause) -> Option<Event> {
        // What it said before it was told to take this back may be older than the guest's end.
        let seen =
            self.source().filter(|seen| seen.gave_up.is_some() && seen.heard == Heard::Now)?;
        let waited = matches!(cause, Cause::ShutdownRefused { .. })
            || self.elapsed() > self.migration.terms.shutdown_limit.plus(STALE);
        let settled = seen.shutdown == Shutdown::Unasked || waited;
        settled.then(|| self.source_kept()).flatten()
    }

    /// The source's host is dead, so nobody there starts it again, and the other is ready to.
    fn nobody_starts_it(self) -> Option<Event> {
        let (_, proof) = self.source_proof().filter(|(_, proof)| cleared(proof))?;
        let handover = self.ready(SourceWord::Gone(proof.clone()))?;
        Some(Event::SourceGone { proof: proof.clone(), receiver: Receiver::Complete(handover) })
    }

    /// What is gone at the source is the QEMU that was shut down, until it was started again.
    fn restarting(self, generation: Generation) -> Option<Event> {
        if let Some((seen, proof)) = self.source_proof() {
            let new = seen.role == Role::Running && seen.shutdown == Shutdown::Unasked;
            return (new || cleared(proof)).then(|| self.left_or_lost()).flatten();
        }
        let seen = self.speaking(self.source())?;
        (seen.generation >= generation && seen.role == Role::Running && goes_on(seen))
            .then_some(Event::SourceContinued)
    }
}
