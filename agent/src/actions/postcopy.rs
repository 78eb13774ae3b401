//! Letting a guest go before its memory.

use vmferry_agent_core::capabilities::Carries;
use vmferry_agent_core::journal::{Order, Parting};
use vmferry_agent_core::outgoing::Sending;
use vmferry_proto::v1;
use vmferry_qmp::command::{MigrateStartPostcopy, Stop};
use vmferry_types::Fence;

use super::{Outcome, hold, transfer};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;

/// Stops the guest, durably, and turns its transfer to postcopy.
///
/// A transfer that fails between the order and the last page lets a guest go on that ran before it.
/// One that was stopped first stays so, whatever QEMU makes of the transfer.
pub(super) async fn run(lane: &mut Lane, fence: &Fence) -> Result<Outcome, CommandError> {
    transfer::check_owner(lane, fence)?;
    let process = lane.process()?;
    let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
    let Some(sent) = lane.record.outgoing() else {
        return Err(CommandError::wrong_state("nothing is being sent for this migration"));
    };
    match (&sent.order, sending) {
        (Order::GaveUp { cause } | Order::TakenBack { cause }, _) => {
            return Err(CommandError::GaveUp(cause.clone()));
        }
        // It got there meanwhile, by this or without it.
        (Order::Handed, _) | (Order::Open, Sending::Standing) => return Ok(Outcome::default()),
        (Order::Open, Sending::Connecting | Sending::Moving) => {}
        (
            Order::Open,
            Sending::Idle
            | Sending::Switching
            | Sending::Serving
            | Sending::Broken
            | Sending::Mending
            | Sending::Complete
            | Sending::CallingBack
            | Sending::Cancelled
            | Sending::Failed
            | Sending::TakenBack
            | Sending::Other,
        ) => return Err(CommandError::wrong_state("no memory of the guest crosses now")),
    }
    if sent.carries == Carries::Whole {
        return Err(refused("postcopy_unavailable", "the ends were not set up for postcopy"));
    }
    if sent.parting == Parting::No {
        hold::check_runs(&process).await?;
        lane.record.begin_parting(fence.migration);
        // From here on the guest stays still until it is let go on; QEMU hears it after.
        lane.persist().await?;
    }
    let monitor = process.monitor();
    monitor
        .execute(Stop {})
        .await
        .map_err(|error| CommandError::failed("stop the guest", &error))?;
    monitor
        .execute(MigrateStartPostcopy {})
        .await
        .map_err(|error| CommandError::failed("turn the transfer to postcopy", &error))?;
    Ok(Outcome::default())
}

/// Refuses postcopy by name.
pub(super) fn refused(code: &str, message: impl Into<String>) -> CommandError {
    CommandError::Blocked(vec![v1::Blocker {
        code: code.to_owned(),
        message: message.into(),
        host_id: String::new(),
    }])
}
