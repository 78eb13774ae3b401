//! Ending the source's process after the guest went on elsewhere.

use vmferry_agent_core::journal::{Order, Part};
use vmferry_proto::v1;
use vmferry_types::Fence;

use super::{Outcome, end};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    release: v1::ReleaseSource,
) -> Result<Outcome, CommandError> {
    match &lane.record.part {
        Part::Absent => return end::never_started(lane).await.map(Outcome::gone),
        // The VM is another host's, and off: its definition goes.
        Part::Stopped { .. } => {
            let gone = end::never_started(lane).await?;
            end::note_end(lane, &gone, Part::Absent);
            return Ok(Outcome::gone(gone));
        }
        Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("this is a receiver, not a source"));
        }
        Part::Running { process, .. } if fence.generation <= process.generation => {
            return Err(CommandError::wrong_state(format!(
                "the guest runs here under generation {}: only a newer one releases it",
                process.generation
            )));
        }
        Part::Running { .. } => {}
    }
    // It is the page server until whoever commands says that the last page has arrived.
    let serves = sending_of(lane.record.sent(), &lane.shared.sight.borrow()).divided();
    if serves && !release.serves_no_more {
        return Err(CommandError::wrong_state(
            "the guest's memory has not all arrived: this QEMU serves it",
        ));
    }
    let handed = lane.record.outgoing().is_some_and(|sent| sent.order == Order::Handed);
    let gone = lane.shared.sight.borrow().gone.is_some();
    // It came back after its VM was started elsewhere: a planner says so, not this command alone.
    let superseded = lane
        .record
        .process()
        .is_some_and(|process| lane.agent.superseded(lane.shared.id, process.generation));
    if !handed && !gone && !superseded {
        return Err(CommandError::wrong_state(
            "this guest was never handed over by this migration",
        ));
    }
    lane.persist().await?;
    let gone = end::end_process(lane).await?;
    end::note_end(lane, &gone, Part::Absent);
    Ok(Outcome::gone(gone))
}
