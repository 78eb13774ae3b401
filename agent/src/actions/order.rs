//! Ordering the switchover.

use vmferry_agent_core::journal::Order;
use vmferry_agent_core::outgoing::Sending;
use vmferry_qmp::command::{ContinueFrom, MigrateContinue};

use super::Outcome;
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;

pub(super) async fn run(lane: &mut Lane) -> Result<Outcome, CommandError> {
    let process = lane.process()?;
    let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
    let Some(sent) = lane.record.outgoing_mut() else {
        return Err(CommandError::wrong_state("nothing is being sent for this migration"));
    };
    match (&sent.order, sending) {
        (Order::GaveUp { cause } | Order::TakenBack { cause }, _) => {
            return Err(CommandError::GaveUp(cause.clone()));
        }
        (Order::Open, Sending::Standing) => {
            sent.order = Order::Handed;
            // From here on the source refuses to go on without proof; QEMU hears the order after.
            lane.persist().await?;
        }
        (Order::Open, _) => {
            return Err(CommandError::wrong_state("the guest does not stand at the switchover"));
        }
        // The agent died between its note and the order.
        (Order::Handed, Sending::Standing) => {}
        // Done before: what came of it is observed.
        (Order::Handed, _) => return Ok(Outcome::default()),
    }
    let order = MigrateContinue { state: ContinueFrom::PreSwitchover };
    if let Err(error) = process.monitor().execute(order).await {
        // Ordered all the same: only proof undoes that. What QEMU does is observed.
        tracing::warn!(%error, "the order was not taken");
    }
    Ok(Outcome::default())
}
