//! Ending the source's process because the decision is forward.

use vmferry_agent_core::journal::{Order, Part};
use vmferry_proto::v1;
use vmferry_types::Fence;

use super::{Outcome, end};
use crate::error::CommandError;
use crate::lane::Lane;

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    kill: &v1::KillSource,
) -> Result<Outcome, CommandError> {
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => {
            return end::never_started(lane).await.map(Outcome::gone);
        }
        Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("this is a receiver, not a source"));
        }
        Part::Running { .. } => {}
    }
    let handed = lane
        .record
        .outgoing()
        .is_some_and(|sent| sent.migration == fence.migration && sent.order == Order::Handed);
    let gone = lane.shared.sight.borrow().gone.is_some();
    if !handed && !gone {
        return Err(CommandError::wrong_state(
            "the switchover was not ordered: the guest is this host's, and nobody may take it",
        ));
    }
    tracing::warn!(cause = kill.cause, "source is ended");
    lane.persist().await?;
    let gone = end::end_process(lane).await?;
    end::note_end(lane, &gone, Part::Absent);
    Ok(Outcome::gone(gone))
}
