//! What both sides prove during a migration whose memory is streamed: precopy, or snapshot, where
//! the guest is held while it crosses.
//!
//! One function a phase. Each asks first for what is proven gone, since that outranks all that a
//! side said before it went.

use vmferry_types::{Generation, Method, Millis, Role};

use super::{
    Continued, Ended, Handed, Heard, Held, Knowledge, RunState, Seen, Sides, Times, TransferState,
};
use crate::migration::{
    Back, Cleanup, Event, GoneProof, Guest, Handover, Migration, NotConverging, Phase, ProofKind,
    Ran, Receiver, SourceWord, Stage, Stood, Switchover, Word,
};

/// How much longer than its own limit the planner lets a transfer go on.
///
/// The source's agent keeps the limit and knows more; this is for one that cannot be reached.
const TRANSFER_GRACE: Millis = Millis(60_000);

pub(super) fn read(migration: &Migration, sides: &Sides, times: Times) -> Option<Event> {
    let reading = Reading { migration, sides, times };
    match &migration.phase {
        Phase::Queued { deadline, .. } => (times.now >= *deadline).then_some(Event::QueueExpired),
        Phase::Admitted { stage: Stage::Arming, .. } => reading.arming(),
        Phase::Admitted { stage: Stage::Waiting { .. }, .. } => {
            reading.waiting().or_else(|| reading.gate_expired())
        }
        Phase::Admitted { stage: Stage::Transferring { .. }, .. } => {
            reading.transferring().or_else(|| reading.postcopy_due()).or_else(|| reading.diverges())
        }
        Phase::Admitted { stage: Stage::Parting { .. }, .. } => reading.transferring(),
        Phase::Admitted { stage: Stage::Recalling { .. }, .. } => reading.recalling(),
        Phase::Admitted { stage: Stage::Clearing { .. }, .. } => {
            reading.source_lost().or_else(|| reading.receiver_cleared())
        }
        Phase::Admitted { stage: Stage::Holding { .. }, .. } => reading.holding(),
        // Nothing is sent by such a method.
        Phase::Admitted { stage: Stage::ShuttingDown, .. }
        | Phase::Captured { switchover: Switchover::Down { .. }, .. } => None,
        Phase::Captured { switchover: Switchover::Held { .. }, .. } => reading.held(),
        Phase::Captured { switchover: Switchover::Withheld, .. } => {
            let waits = || reading.runs_though_held().or_else(|| reading.gate_expired());
            reading.withheld().or_else(waits)
        }
        Phase::Captured { switchover: Switchover::Ordered, .. }
            if migration.method == Method::Postcopy =>
        {
            reading.dividing().or_else(|| reading.channel())
        }
        Phase::Captured { switchover: Switchover::Ordered, .. } => {
            reading.switching().or_else(|| reading.overdue())
        }
        Phase::Captured { switchover: Switchover::Forward, .. } => reading.switching(),
        Phase::Restored { proof, .. } => {
            let waits = || reading.channel().or_else(|| reading.gate_expired());
            reading.restored(&proof.source).or_else(waits)
        }
        Phase::Committed { generation, .. } => reading
            .halved()
            .or_else(|| reading.committed(*generation))
            .or_else(|| reading.channel()),
        Phase::Attached { guest, .. } => {
            reading.halved().or_else(|| reading.attached(*guest)).or_else(|| reading.channel())
        }
        Phase::RollingBack { back, generation, .. } => match back {
            Back::Cancelling => reading.cancelling(),
            Back::Clearing => reading.source_lost().or_else(|| reading.receiver_cleared()),
            Back::Undoing => reading.source_gone().or_else(|| reading.receiver_gone()),
            Back::Resuming { .. } => reading.resuming(*generation),
            Back::PoweredOff => reading.receiver_cleared(),
        },
        Phase::Failed { cleanup: Cleanup::Receiver, .. } => reading.receiver_cleared(),
        Phase::Failed { cleanup: Cleanup::Source, .. } => reading.source_released(),
        Phase::Failed { cleanup: Cleanup::Half, .. } => reading.half_cleared(),
        Phase::Failed { cleanup: Cleanup::Nothing | Cleanup::Undecided, .. }
        | Phase::Done { .. }
        | Phase::Aborted { .. } => None,
    }
}

#[derive(Clone, Copy)]
pub(super) struct Reading<'a> {
    pub(super) migration: &'a Migration,
    pub(super) sides: &'a Sides,
    pub(super) times: Times,
}

/// Reading single facts.
impl<'a> Reading<'a> {
    /// The source's answer to this driver.
    pub(super) fn source(self) -> Option<&'a Seen> {
        self.sides.source.as_ref().filter(|seen| seen.claim == self.sides.claim)
    }

    /// The destination's answer to this driver.
    pub(super) fn destination(self) -> Option<&'a Seen> {
        self.sides.destination.as_ref().filter(|seen| seen.claim == self.sides.claim)
    }

    /// A side whose QEMU answers, and whose journal speaks of this migration.
    pub(super) fn speaking(self, seen: Option<&'a Seen>) -> Option<&'a Seen> {
        seen.filter(|seen| {
            seen.knowledge == Knowledge::Known
                && seen.gone.is_none()
                && seen.migration == Some(self.migration.id)
        })
    }

    /// That the source's QEMU is gone. Silence never shows it.
    pub(super) fn source_proof(self) -> Option<(&'a Seen, &'a GoneProof)> {
        proven_gone(self.source()?).filter(|(_, proof)| proof.host == self.migration.source)
    }

    /// That there is no QEMU of this migration at the destination, of whichever attempt.
    pub(super) fn nothing_there(self) -> Option<(&'a Seen, &'a GoneProof)> {
        proven_gone(self.destination()?)
            .filter(|(_, proof)| Some(&proof.host) == self.migration.destination())
    }

    /// That the destination's QEMU of this attempt is gone.
    pub(super) fn destination_proof(self) -> Option<(&'a Seen, &'a GoneProof)> {
        self.nothing_there().filter(|(_, proof)| !self.migration.is_of_the_attempt_before(proof))
    }

    /// The receiver has everything, stands still and was never continued.
    fn complete(self) -> Option<Word> {
        let seen = self.speaking(self.destination())?;
        let complete = seen.transfer == TransferState::Completed
            && seen.run_state == RunState::Paused
            && seen.continued == Continued::No;
        let word = if complete { word(seen) } else { None };
        word.filter(|word| !self.migration.was_receiver_before(&word.process))
    }

    /// The receiver said that it will never have everything.
    pub(super) fn receiver_failed(self) -> bool {
        self.speaking(self.destination()).is_some_and(|seen| seen.transfer == TransferState::Failed)
    }

    pub(super) fn elapsed(self) -> Millis {
        self.times.now.since(self.times.entered)
    }

    pub(super) fn switchover_overdue(self) -> bool {
        self.elapsed() > self.migration.terms.switchover_limit
    }
}

/// Reading facts that hold in several phases.
impl Reading<'_> {
    /// The source is gone before it was ordered, so no receiver can have everything.
    fn source_lost(self) -> Option<Event> {
        let (seen, proof) = self.source_proof()?;
        Some(match seen.ended {
            Ended::ByGuest => Event::GuestPoweredOff { proof: proof.clone() },
            Ended::Unsaid => {
                Event::SourceGone { proof: proof.clone(), receiver: Receiver::Incomplete }
            }
        })
    }

    /// The source is gone after it was ordered: all depends on the receiver, which has to say so.
    pub(super) fn source_gone(self) -> Option<Event> {
        let (seen, proof) = self.source_proof()?;
        // A guest that went on here after the transfer is past what the receiver has: to continue
        // that would undo what the guest has written since.
        if seen.ran_again() {
            return self.source_lost();
        }
        let receiver = match self.complete() {
            Some(destination) => Receiver::Complete(Handover {
                source: SourceWord::Gone(proof.clone()),
                destination,
            }),
            None => self.hopeless()?,
        };
        Some(Event::SourceGone { proof: proof.clone(), receiver })
    }

    /// Whether a receiver whose source is gone will never have everything. It may still be loading
    /// what had arrived, and one whose network was cut says `active` for ever: so it is given the
    /// time of a switchover.
    fn hopeless(self) -> Option<Receiver> {
        if self.destination_proof().is_some() || self.receiver_failed() {
            return Some(Receiver::Incomplete);
        }
        // What it said before it fell silent may be from before the last of it arrived.
        let seen = self.speaking(self.destination()).filter(|seen| seen.heard == Heard::Now)?;
        let waiting = match seen.transfer {
            // Its channel ended with what had arrived, and nobody opens another one.
            TransferState::PostcopyPaused => return Some(Receiver::Incomplete),
            TransferState::None | TransferState::Setup | TransferState::Active => true,
            TransferState::PreSwitchover
            | TransferState::Device
            | TransferState::Cancelling
            | TransferState::Cancelled
            | TransferState::Completed
            | TransferState::Failed
            | TransferState::WaitUnplug
            | TransferState::PostcopyActive
            | TransferState::PostcopyRecoverSetup
            | TransferState::PostcopyRecover
            | TransferState::Unknown => false,
        };
        (waiting && self.switchover_overdue()).then_some(Receiver::Incomplete)
    }

    /// The receiver is gone before ownership moved: it was never to run.
    pub(super) fn receiver_gone(self) -> Option<Event> {
        self.destination_proof().map(|(seen, proof)| gone_before_commit(seen, proof))
    }

    /// The receiver is gone, and its agent's journal says so too: nothing of it is left.
    pub(super) fn receiver_cleared(self) -> Option<Event> {
        let (seen, proof) = self.nothing_there()?;
        let nothing_left = cleared(proof) || seen.role != Role::Receiver;
        nothing_left.then(|| gone_before_commit(seen, proof))
    }

    /// QEMU gave the transfer up, on either side. The reason is mostly the destination's to tell.
    pub(super) fn transfer_failed(self) -> Option<Event> {
        let source = self.speaking(self.source());
        let destination = self.speaking(self.destination());
        let ended = source.is_some_and(|seen| {
            seen.transfer == TransferState::Failed || seen.transfer == TransferState::Cancelled
        });
        if !ended && !self.receiver_failed() {
            return None;
        }
        let told = |who: &str, seen: Option<&Seen>| {
            seen.map(|seen| seen.transfer_error.trim())
                .filter(|error| !error.is_empty())
                .map(|error| format!("{who}: {error}"))
        };
        let errors: Vec<String> = [told("source", source), told("destination", destination)]
            .into_iter()
            .flatten()
            .collect();
        let error =
            if errors.is_empty() { "QEMU gave no reason".into() } else { errors.join("; ") };
        Some(Event::TransferFailed { error, stood: self.stood() })
    }

    /// Whether the guest stood still for this transfer.
    fn stood(self) -> Stood {
        let ran = self.speaking(self.source()).is_some_and(|seen| seen.stopped_at_us == 0);
        if ran { Stood::No } else { Stood::Yes }
    }

    /// The source took it back before the order reached it.
    pub(super) fn gave_up(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let error = seen.gave_up.clone().filter(|_| seen.handed == Handed::No)?;
        Some(Event::SourceGaveUp { error, stood: self.stood() })
    }

    /// The guest runs, or ran, on the source although it is held there: it was let go on by someone
    /// who may not (rule R4).
    fn runs_though_held(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let runs =
            seen.held == Held::Yes && (seen.run_state == RunState::Running || seen.ran_again());
        let error = || "the guest runs although it is held".to_owned();
        runs.then(|| Event::SourceRunsAgain { error: error() })
    }
}

/// Reading phase by phase.
impl Reading<'_> {
    fn arming(self) -> Option<Event> {
        if let Some(event) = self.source_lost() {
            return Some(event);
        }
        // What is absent here may only be not there yet: only a receiver of ours counts.
        let armed = self.destination().is_some_and(|seen| {
            seen.role == Role::Receiver && seen.migration == Some(self.migration.id)
        });
        let dead = self.destination_proof().is_some_and(|(_, proof)| cleared(proof));
        (armed || dead).then(|| self.receiver_gone()).flatten().or_else(|| self.timed_out())
    }

    pub(super) fn timed_out(self) -> Option<Event> {
        let limit = self.migration.terms.transfer_timeout.plus(TRANSFER_GRACE);
        (self.elapsed() > limit).then_some(Event::TransferTimedOut)
    }

    /// What ends a receiver that waits for its source: the source has heard of nothing.
    fn waiting(self) -> Option<Event> {
        self.source_lost().or_else(|| self.receiver_gone())
    }

    fn gate_expired(self) -> Option<Event> {
        let waits = self.migration.waits_at().is_some();
        (waits && self.elapsed() > self.migration.terms.gate_deadline).then_some(Event::GateExpired)
    }

    fn transferring(self) -> Option<Event> {
        self.withheld().or_else(|| self.stopped()).or_else(|| self.timed_out())
    }

    /// The source's agent says that it will not converge, of the transfer as it is tuned now.
    fn diverges(self) -> Option<Event> {
        let migration = self.migration;
        let seen = self.speaking(self.source())?;
        let judged = migration.method == Method::Precopy
            && seen.transfer == TransferState::Active
            && !seen.diverges.is_empty();
        // What was said before it heard of its limits, or slowed the guest down, is about another time.
        let current = match seen.tuning {
            Some(told) => told == migration.tuning(),
            None => migration.answered.is_none(),
        };
        let acts = match migration.answer() {
            NotConverging::Abort | NotConverging::AutoConverge | NotConverging::Pause => true,
            NotConverging::Wait | NotConverging::Postcopy => false,
        };
        (judged && current && acts).then(|| Event::Diverges { verdict: seen.diverges.clone() })
    }

    /// What ends a transfer that was not ordered.
    fn withheld(self) -> Option<Event> {
        self.source_lost()
            .or_else(|| self.receiver_gone())
            .or_else(|| self.gave_up())
            .or_else(|| self.transfer_failed().filter(|_| !self.source_will_tell()))
    }

    /// The receiver of a source that still sends says that it failed: mostly since that source is
    /// taking its transfer back, and is about to say why. Its agent's stall rule bounds the wait.
    ///
    /// A source that has not answered this driver yet may have said why to the one before. Nothing
    /// is lost by asking it first: there is no way back without it either.
    fn source_will_tell(self) -> bool {
        let Some(source) = self.source().filter(|seen| seen.knowledge != Knowledge::Learning)
        else {
            return true;
        };
        self.speaking(Some(source)).is_some_and(|seen| match seen.transfer {
            TransferState::Setup | TransferState::Active => true,
            TransferState::None
            | TransferState::PreSwitchover
            | TransferState::Device
            | TransferState::Cancelling
            | TransferState::Cancelled
            | TransferState::Completed
            | TransferState::Failed
            | TransferState::WaitUnplug
            | TransferState::PostcopyActive
            | TransferState::PostcopyPaused
            | TransferState::PostcopyRecoverSetup
            | TransferState::PostcopyRecover
            | TransferState::Unknown => false,
        })
    }

    /// Nobody has ended the receiver yet, so one that is gone was lost.
    fn recalling(self) -> Option<Event> {
        self.source_lost().or_else(|| self.receiver_gone()).or_else(|| self.source_kept())
    }

    /// What the source says of a transfer is about the attempt before, until the guest is held.
    fn holding(self) -> Option<Event> {
        self.source_lost()
            .or_else(|| self.receiver_gone())
            .or_else(|| self.source_held())
            .or_else(|| self.held_in_vain())
            .or_else(|| self.timed_out())
    }

    /// The guest stands still, and its agent's journal says that this is on purpose.
    fn source_held(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let held = seen.held == Held::Yes
            && seen.run_state == RunState::Paused
            && seen.gave_up.is_none()
            && !seen.ran_again();
        held.then_some(Event::SourceHeld)
    }

    fn held(self) -> Option<Event> {
        self.withheld()
            .or_else(|| self.runs_though_held())
            .or_else(|| self.stopped())
            .or_else(|| self.held_in_vain())
            .or_else(|| self.timed_out())
    }

    /// The guest is held and nothing crosses: its agent is there, and cannot do what it is told. It
    /// hears its driver, so its own limit never lets the guest go on; this one does.
    ///
    /// One that learns, or whose QEMU is silent, may not say what crosses: then the receiver has to
    /// say that nothing came.
    fn held_in_vain(self) -> Option<Event> {
        let source = self.source().filter(|seen| seen.gone.is_none())?;
        let waits = source.held == Held::Yes && source.transfer == TransferState::None;
        let nothing_came = |seen: &Seen| {
            seen.transfer == TransferState::None || seen.transfer == TransferState::Setup
        };
        let idle = source.knowledge == Knowledge::Known
            || self.speaking(self.destination()).is_some_and(nothing_came);
        let overdue = self.elapsed() > self.migration.terms.stall_limit;
        (waits && idle && overdue).then_some(Event::TransferTimedOut)
    }

    fn stopped(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let stands = seen.transfer == TransferState::PreSwitchover
            && seen.handed == Handed::No
            && seen.gave_up.is_none();
        stands.then_some(Event::SourceStopped)
    }

    fn switching(self) -> Option<Event> {
        self.source_gone()
            .or_else(|| self.receiver_gone().filter(|_| self.source_proof().is_none()))
            .or_else(|| self.gave_up())
            .or_else(|| self.runs_again())
            .or_else(|| self.transfer_failed().filter(|_| self.source_proof().is_none()))
            .or_else(|| self.both_complete())
    }

    /// The source resumed by itself: the channel broke before it had everything acknowledged.
    pub(super) fn runs_again(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        // Not handed, it may merely be an answer from before it stopped.
        let runs = seen.handed == Handed::Yes && (seen.run_state.has_run() || seen.ran_again());
        let error = match seen.transfer_error.trim() {
            "" => format!("run state {}", seen.run_state.word()),
            error => error.to_owned(),
        };
        runs.then_some(Event::SourceRunsAgain { error })
    }

    pub(super) fn both_complete(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let sent = seen.transfer == TransferState::Completed
            && seen.run_state == RunState::PostMigrate
            && seen.handed == Handed::Yes
            && !seen.ran_again();
        let source = if sent { SourceWord::Completed(word(seen)?) } else { return None };
        let destination = self.complete()?;
        Some(Event::BothComplete { proof: Handover { source, destination } })
    }

    /// Decides a switchover that takes too long (rule R10). Both sides have to answer now: one that
    /// did so before may have died since, and then the other is the only whole one.
    fn overdue(self) -> Option<Event> {
        if !self.switchover_overdue() {
            return None;
        }
        let answers = |seen: &&Seen| seen.heard == Heard::Now;
        let source = self.source().filter(answers)?;
        self.destination().filter(answers)?;
        match source.knowledge {
            // Its QEMU answers, so it can go on.
            Knowledge::Known => {
                let alive = self.speaking(Some(source))?;
                let waits_for_destination =
                    alive.transfer == TransferState::Completed && self.complete().is_some();
                (alive.process.is_some() && !waits_for_destination).then_some(Event::DecidedBack)
            }
            // Its QEMU is there and silent: it cannot be let go on, and the receiver needs nothing more.
            Knowledge::Unresponsive => self.complete().map(|_| Event::DecidedForward),
            Knowledge::Learning | Knowledge::Unreadable | Knowledge::UnknownVm => None,
        }
    }

    fn restored(self, source: &SourceWord) -> Option<Event> {
        match source {
            SourceWord::Completed(_) => self
                .source_gone()
                .or_else(|| self.receiver_gone().filter(|_| self.source_proof().is_none()))
                .or_else(|| self.runs_again()),
            SourceWord::Gone(_) => self.receiver_gone(),
            SourceWord::Serves(_) => self.restored_divided(),
            // Nothing is sent by this method.
            SourceWord::ShutDown(_) => None,
        }
    }

    pub(super) fn committed(self, generation: Generation) -> Option<Event> {
        if let Some((seen, proof)) = self.destination_proof() {
            let ran = ran_owned(seen, proof);
            return match seen.ended {
                Ended::ByGuest => Some(Event::GuestPoweredOff { proof: proof.clone() }),
                Ended::Unsaid if self.may_be_severed(ran) => None,
                Ended::Unsaid => Some(Event::ReceiverGone { proof: proof.clone(), ran }),
            };
        }
        let seen = self.speaking(self.destination())?;
        // One that its agent still calls a receiver runs, but died with its agent's note that it
        // does: until the command is given again its journal would say so for good.
        let runs = seen.generation >= generation
            && seen.continued == Continued::Yes
            && seen.role == Role::Running
            && seen.run_state.has_run();
        runs.then_some(Event::DestinationRuns)
    }

    fn attached(self, guest: Guest) -> Option<Event> {
        match (guest, self.destination_proof()) {
            (Guest::Present, Some((seen, proof))) => Some(match seen.ended {
                Ended::ByGuest => Event::GuestPoweredOff { proof: proof.clone() },
                Ended::Unsaid => Event::ReceiverGone { proof: proof.clone(), ran: Ran::Maybe },
            }),
            (Guest::Present, None) | (Guest::PoweredOff, Some(_) | None) => self.source_released(),
        }
    }

    /// That the source is gone is not enough: its agent acknowledges the release, or its journal
    /// would go on saying that the VM is there.
    pub(super) fn source_released(self) -> Option<Event> {
        let (seen, proof) = self.source_proof()?;
        let kept = matches!(seen.role, Role::Running | Role::Held);
        let acknowledged = cleared(proof) || !kept;
        acknowledged.then(|| Event::SourceReleased { proof: proof.clone() })
    }

    fn cancelling(self) -> Option<Event> {
        self.source_lost().or_else(|| self.source_kept())
    }

    /// The source took its transfer back, if there was one, and its guest goes on.
    pub(super) fn source_kept(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let as_before = goes_on(seen) || stopped_by_others(seen);
        let kept = seen.handed == Handed::No && seen.transfer.is_over() && as_before;
        kept.then_some(Event::SourceContinued)
    }

    fn resuming(self, generation: Generation) -> Option<Event> {
        if let Some(event) = self.source_lost() {
            return Some(event);
        }
        let seen = self.speaking(self.source())?;
        // QEMU may have let it go on by itself. Its agent has to know that this is right too, or
        // it would go on holding the guest for one that was handed over.
        let settled =
            seen.generation >= generation && (seen.handed == Handed::No || seen.gave_up.is_some());
        (settled && goes_on(seen)).then_some(Event::SourceContinued)
    }
}

/// Whether a source's guest runs, or is as itself decided, and is not held any more: until the hold
/// is over in the journal too, an agent that restarts would take it up again.
pub(super) fn goes_on(seen: &Seen) -> bool {
    seen.run_state.has_run() && seen.held == Held::No
}

/// Whether a source's guest stands still though nothing of this migration stops it any more: the
/// giving up is journalled and no hold is left, so whoever uses the guest has paused it. It stays as
/// that user wants it, and nobody waits for it to run.
fn stopped_by_others(seen: &Seen) -> bool {
    seen.run_state == RunState::Paused && seen.held == Held::No && seen.gave_up.is_some()
}

/// Says what a receiver that is gone means before ownership moved.
fn gone_before_commit(seen: &Seen, proof: &GoneProof) -> Event {
    let ran = match seen.continued {
        Continued::No | Continued::Unknown => Ran::Never,
        Continued::Yes => Ran::Maybe,
    };
    Event::ReceiverGone { proof: proof.clone(), ran }
}

/// Returns a side's proof that its QEMU is gone, if its journal can be believed.
fn proven_gone(seen: &Seen) -> Option<(&Seen, &GoneProof)> {
    match seen.knowledge {
        Knowledge::Known | Knowledge::UnknownVm => seen.gone.as_ref().map(|proof| (seen, proof)),
        Knowledge::Learning | Knowledge::Unresponsive | Knowledge::Unreadable => None,
    }
}

/// Says whether no agent is left that could acknowledge, or say anything else.
pub(super) const fn cleared(proof: &GoneProof) -> bool {
    match proof.kind {
        ProofKind::HostDeclaredDead => true,
        ProofKind::ExitRecord
        | ProofKind::ProcessAbsent
        | ProofKind::NewBoot
        | ProofKind::NeverStarted => false,
    }
}

/// Whether a destination that owned the VM may have run it. Only its whole journal can say no.
fn ran_owned(seen: &Seen, proof: &GoneProof) -> Ran {
    match (seen.knowledge, seen.continued, proof.kind) {
        (
            Knowledge::Known,
            Continued::No,
            ProofKind::ExitRecord
            | ProofKind::ProcessAbsent
            | ProofKind::NewBoot
            | ProofKind::NeverStarted,
        ) => Ran::Never,
        (
            Knowledge::Known
            | Knowledge::Learning
            | Knowledge::Unresponsive
            | Knowledge::Unreadable
            | Knowledge::UnknownVm,
            Continued::No | Continued::Yes | Continued::Unknown,
            ProofKind::ExitRecord
            | ProofKind::ProcessAbsent
            | ProofKind::NewBoot
            | ProofKind::NeverStarted
            | ProofKind::HostDeclaredDead,
        ) => Ran::Maybe,
    }
}

/// Returns what a side says as it is kept in a proof.
pub(super) fn word(seen: &Seen) -> Option<Word> {
    let process = seen.process.clone()?;
    Some(Word { process, transfer: seen.transfer, run_state: seen.run_state, at: seen.at })
}
