//! What mends the channel between the halves of a divided guest (rule R6).
//!
//! It is a function of what both sides say now, not of the row: for as long as both halves live a
//! broken channel is mended, however often it breaks and whoever drives.

use super::{Handed, Heard, Knowledge, Seen, Sides, TransferState};
use crate::migration::{Effect, Migration};

/// Returns what is to be done next about a channel that is broken, if it is.
///
/// First the destination's half waits at a new port, forced to see the break if need be; then the
/// source's half connects to it. Both commands may come again.
#[must_use]
pub fn mend(migration: &Migration, sides: &Sides) -> Option<Effect> {
    if !migration.may_be_divided() {
        return None;
    }
    let heard = |seen: &Option<Seen>| {
        seen.clone().filter(|seen| {
            seen.claim == sides.claim
                && seen.heard == Heard::Now
                && matches!(seen.knowledge, Knowledge::Known | Knowledge::Unresponsive)
                && seen.migration == Some(migration.id)
        })
    };
    let source = heard(&sides.source).filter(|seen| seen.handed == Handed::Yes)?;
    let destination = heard(&sides.destination).filter(|seen| seen.gone.is_none())?;
    if !destination.transfer.is_divided() {
        return None;
    }
    // With its source gone it is made to say so: a peer that lost power closes nothing.
    if source.gone.is_some() {
        let unaware = destination.transfer != TransferState::PostcopyPaused;
        return unaware.then_some(Effect::RecoverReceiver);
    }
    let broken = |seen: &Seen| seen.transfer == TransferState::PostcopyPaused;
    if !source.transfer.is_divided() || !(broken(&source) || broken(&destination)) {
        return None;
    }
    match (&destination.waits_at, source.transfer) {
        // It is connecting.
        (Some(_), TransferState::PostcopyRecoverSetup | TransferState::PostcopyRecover) => None,
        (Some(listener), _) if broken(&destination) => {
            Some(Effect::ResumeTransfer { listener: listener.clone() })
        }
        (Some(_) | None, _) => Some(Effect::RecoverReceiver),
    }
}
