//! Ending a receiver.

use vmferry_agent_core::journal::{Continued, Part};
use vmferry_proto::v1;
use vmferry_qmp::MigrationStatus;
use vmferry_types::Fence;

use super::{Outcome, end};
use crate::error::CommandError;
use crate::lane::Lane;

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    destroy: &v1::DestroyReceiver,
) -> Result<Outcome, CommandError> {
    let gone = lane.shared.sight.borrow().gone.is_some() || lost_its_half(lane, destroy)?;
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => {
            // Written down before it is said that nothing was started: a command to arm that is
            // still under way is older, and will be refused.
            lane.persist().await?;
            let gone = end::never_started(lane).await?;
            // And then kept, so that whoever looks is told too: an answer alone may be overtaken by
            // what was seen before it.
            let left = match &lane.record.part {
                // It was brought here by the move that is undone.
                Part::Stopped { brought_by, .. } if *brought_by == Some(fence.migration) => {
                    Part::Absent
                }
                part @ (Part::Absent
                | Part::Stopped { .. }
                | Part::Running { .. }
                | Part::Receiver { .. }) => part.clone(),
            };
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

/// Says whether a guest that was let go on here waits for memory that is lost with its source, by
/// proof.
fn lost_its_half(lane: &Lane, destroy: &v1::DestroyReceiver) -> Result<bool, CommandError> {
    let Some(proof) = &destroy.source_gone else { return Ok(false) };
    let field = "destroy_receiver.source_gone";
    if proof.kind() == v1::ProofKind::Unspecified {
        return Err(CommandError::invalid(field, "does not say how it is known"));
    }
    if proof.host_id.is_empty() || proof.host_id == lane.agent.config.host_id.to_string() {
        return Err(CommandError::invalid(field, "must be of the source"));
    }
    let status = lane.shared.sight.borrow().migrate.status.clone();
    match status {
        Some(MigrationStatus::PostcopyPaused) => Ok(true),
        Some(status) => Err(CommandError::wrong_state(format!(
            "the guest here does not wait for its memory: its transfer is {status}"
        ))),
        None => Ok(false),
    }
}
