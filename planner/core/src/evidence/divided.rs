//! What both sides prove while a guest goes before its memory.
//!
//! QEMU's own words decide: a source that says `failed` has its guest whole and stands still, since
//! its agent stopped it; one in postcopy can neither go on nor be taken back, whatever became of the
//! other half.

use vmferry_types::Role;

use super::precopy::{Reading, cleared, word};
use super::{Continued, Handed, Heard, Knowledge, RunState, Seen, TransferState};
use crate::migration::{
    Channel, Event, Handover, NotConverging, Phase, Ran, Receiver, SourceWord, Stage, Takes,
};

/// How often memory is gone over before the guest goes first: what it does not touch has crossed by
/// then, and only what it writes to is fetched later.
const PASSES_BEFORE: u64 = 2;

impl<'a> Reading<'a> {
    /// The guest is to go first: memory was gone over once, or it does not converge.
    pub(super) fn postcopy_due(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let Phase::Admitted { stage: Stage::Transferring { listener }, .. } = &self.migration.phase
        else {
            return None;
        };
        if seen.transfer != TransferState::Active || listener.takes == Takes::Precopy {
            return None;
        }
        let asked = self.migration.method == vmferry_types::Method::Postcopy;
        if asked {
            return (seen.passes >= PASSES_BEFORE).then_some(Event::PostcopyDue { verdict: None });
        }
        let may = self.migration.method == vmferry_types::Method::Precopy
            && self.migration.terms.not_converging == NotConverging::Postcopy;
        let verdict = seen.diverges.clone();
        (may && !verdict.is_empty()).then_some(Event::PostcopyDue { verdict: Some(verdict) })
    }

    /// After the order, until both halves are known to stand where they should.
    pub(super) fn dividing(self) -> Option<Event> {
        self.source_gone()
            .or_else(|| self.receiver_gone_harmlessly())
            .or_else(|| self.gave_up())
            .or_else(|| self.runs_again())
            .or_else(|| self.source_failed())
            .or_else(|| self.severed())
            .or_else(|| self.both_complete())
            .or_else(|| self.both_divided())
    }

    /// The same, once they do; ownership has not moved.
    pub(super) fn restored_divided(self) -> Option<Event> {
        self.source_gone()
            .or_else(|| self.receiver_gone_harmlessly())
            .or_else(|| self.source_failed())
            .or_else(|| self.severed())
    }

    /// Ownership has moved, and what the source still had is lost to the destination, or the
    /// destination was lost with what it had.
    pub(super) fn halved(self) -> Option<Event> {
        if !self.migration.is_served() {
            return None;
        }
        if let Some((_, proof)) = self.destination_proof() {
            let never = self.destination().is_some_and(|seen| seen.continued == Continued::No);
            let committed = matches!(self.migration.phase, Phase::Committed { .. });
            // Its own word, not its silence: it may be whole.
            let alone = self.half(self.source()).is_some_and(|source| source.transfer.is_divided());
            return (committed && never && alone)
                .then(|| Event::Severed { error: proof.to_string() });
        }
        let (_, proof) = self.source_proof()?;
        let seen = self.half(self.destination()).filter(|seen| seen.heard == Heard::Now)?;
        let lacks = seen.transfer == TransferState::PostcopyPaused;
        lacks.then(|| Event::SourceGone { proof: proof.clone(), receiver: Receiver::Incomplete })
    }

    /// The destination's QEMU is gone, from its agent's journal too.
    pub(super) fn half_cleared(self) -> Option<Event> {
        let (seen, proof) = self.nothing_there()?;
        let forgotten = matches!(seen.role, Role::Absent | Role::Stopped);
        (cleared(proof) || forgotten)
            .then(|| Event::ReceiverGone { proof: proof.clone(), ran: Ran::Maybe })
    }

    /// What both say of the channel between them.
    pub(super) fn channel(self) -> Option<Event> {
        if !self.migration.may_be_divided() {
            return None;
        }
        let source = self.half(self.source())?.transfer;
        let destination = self.half(self.destination())?.transfer;
        let paused = |state| state == TransferState::PostcopyPaused;
        let flows =
            |state| matches!(state, TransferState::PostcopyActive | TransferState::Completed);
        match self.migration.channel {
            Channel::Whole => {
                (paused(source) && paused(destination)).then_some(Event::ChannelBroke)
            }
            Channel::Broken => {
                (flows(source) && flows(destination)).then_some(Event::ChannelMended)
            }
        }
    }

    /// A side that has a QEMU of this migration, even if its main loop waits for a page: what came
    /// of its transfer is told by events all the same.
    pub(super) fn half(self, seen: Option<&'a Seen>) -> Option<&'a Seen> {
        seen.filter(|seen| {
            matches!(seen.knowledge, Knowledge::Known | Knowledge::Unresponsive)
                && seen.gone.is_none()
                && seen.migration == Some(self.migration.id)
        })
    }

    /// The receiver is gone, and the source's guest is whole: it was not told to part, or says that
    /// it failed to, or has its last page acknowledged and was followed by nobody.
    fn receiver_gone_harmlessly(self) -> Option<Event> {
        if self.source_proof().is_some() {
            return None;
        }
        let event = self.receiver_gone()?;
        let decided = matches!(event, Event::ReceiverGone { ran: Ran::Maybe, .. });
        (decided || self.source_whole()).then_some(event)
    }

    /// The destination never ran, and what the source has of the guest is not known yet.
    pub(super) fn may_be_severed(self, ran: Ran) -> bool {
        let settled = self.source_whole() || self.source_proof().is_some();
        self.migration.is_served() && ran == Ran::Never && !settled
    }

    fn source_whole(self) -> bool {
        self.speaking(self.source()).is_some_and(|seen| {
            seen.handed == Handed::No
                || matches!(
                    seen.transfer,
                    TransferState::Failed | TransferState::Cancelled | TransferState::Completed
                )
        })
    }

    /// The source's own QEMU says that it sends no more.
    fn source_failed(self) -> Option<Event> {
        let seen = self.speaking(self.source())?;
        let over = matches!(seen.transfer, TransferState::Failed | TransferState::Cancelled)
            && seen.handed == Handed::Yes;
        over.then(|| self.transfer_failed()).flatten()
    }

    /// The source was told to part and cannot go on; its receiver is gone, or will never load.
    fn severed(self) -> Option<Event> {
        let source = self.speaking(self.source()).filter(|seen| seen.handed == Handed::Yes)?;
        let error = match self.destination_proof() {
            Some((_, proof)) => proof.to_string(),
            None if self.receiver_failed() => {
                let error = self.destination().map_or("", |seen| seen.transfer_error.trim());
                format!("the destination did not load the guest: {error}")
            }
            None => return None,
        };
        // One that has not parted yet will say that it failed, in its own time: nobody else can tell.
        source.transfer.is_divided().then_some(Event::Severed { error })
    }

    /// The guest stands still at the destination, whole but for its memory, and the source serves
    /// that. A channel that is broken by then changes nothing: it is mended on either side of the
    /// commit.
    fn both_divided(self) -> Option<Event> {
        let source = self.speaking(self.source())?;
        let serves = source.transfer.is_divided()
            && source.handed == Handed::Yes
            && !source.run_state.has_run()
            && !source.ran_again();
        let destination = self.speaking(self.destination())?;
        // Its run state says that all of its devices are loaded.
        let arrived = (destination.transfer.is_divided()
            || destination.transfer == TransferState::Completed)
            && destination.run_state == RunState::Paused
            && destination.continued == Continued::No;
        if !serves || !arrived {
            return None;
        }
        let destination =
            word(destination).filter(|word| !self.migration.was_receiver_before(&word.process))?;
        let source = SourceWord::Serves(word(source)?);
        Some(Event::BothComplete { proof: Handover { source, destination } })
    }
}
