//! Ending the source's process because the decision is forward.

use vmferry_agent_core::journal::{Order, Part};
use vmferry_proto::v1;
use vmferry_types::Fence;

use super::{Outcome, end};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::Sight;

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
    if runs_again(&lane.shared.sight.borrow()) {
        return Err(CommandError::wrong_state(
            "QEMU resumed the guest here by itself: the destination's copy is older, the only way is back",
        ));
    }
    tracing::warn!(cause = kill.cause, "source is ended");
    lane.persist().await?;
    let gone = end::end_process(lane).await?;
    end::note_end(lane, &gone, Part::Absent);
    Ok(Outcome::gone(gone))
}

/// Says whether the guest was seen to run here since it last stood still (rule R4).
fn runs_again(sight: &Sight) -> bool {
    sight.running() && sight.resumed_at_us >= sight.stopped_at_us
}

#[cfg(test)]
mod tests {
    use vmferry_qmp::RunState;

    use super::*;
    use crate::live::Knowledge;

    #[test]
    fn a_guest_that_qemu_resumed_by_itself_runs_again() {
        let mut sight = Sight::nothing(Knowledge::Known);
        assert!(!runs_again(&sight));
        sight.run_state = Some(RunState::Running);
        sight.stopped_at_us = 20;
        sight.resumed_at_us = 10;
        assert!(!runs_again(&sight), "read before it stopped");
        sight.resumed_at_us = 30;
        assert!(runs_again(&sight));
    }
}
