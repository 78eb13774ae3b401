//! Ending a receiver.

use vmferry_agent_core::journal::{Continued, Part};
use vmferry_proto::v1;
use vmferry_types::Fence;

use super::{Outcome, end};
use crate::error::CommandError;
use crate::lane::Lane;

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    destroy: &v1::DestroyReceiver,
) -> Result<Outcome, CommandError> {
    let gone = lane.shared.sight.borrow().gone.is_some();
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => {
            // Written down before it is said that nothing was started: a command to arm that is
            // still under way is older, and will be refused.
            lane.persist().await?;
            let gone = end::never_started(lane).await?;
            // And then kept, so that whoever looks is told too: an answer alone may be overtaken by
            // what was seen before it.
            let left = lane.record.part.clone();
            end::note_end(lane, &gone, left);
            lane.persist().await?;
            return Ok(Outcome::gone(gone));
        }
        Part::Running { process, .. } if process.admission == fence.migration && gone => {}
        Part::Running { .. } => {
            return Err(CommandError::wrong_state("the VM runs here, this is no receiver"));
        }
        Part::Receiver { incoming, .. } if incoming.migration != fence.migration && !gone => {
            return Err(CommandError::wrong_state("the receiver here is of another migration"));
        }
        Part::Receiver { incoming, .. } if incoming.cont == Continued::Ordered && !gone => {
            return Err(CommandError::wrong_state(
                "the guest may run here: it was let go on, so this is no receiver any more",
            ));
        }
        Part::Receiver { .. } => {}
    }
    tracing::info!(cause = destroy.cause, "receiver is ended");
    lane.persist().await?;
    let gone = end::end_process(lane).await?;
    end::note_end(lane, &gone, Part::Absent);
    Ok(Outcome::gone(gone))
}
