//! Ordering the switchover.

use vmferry_agent_core::journal::{Order, Parting};
use vmferry_agent_core::outgoing::Sending;
use vmferry_qmp::command::{ContinueFrom, MigrateContinue, QueryMigrate};

use super::{Outcome, cancel};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;
use crate::process::QemuProcess;

pub(super) async fn run(lane: &mut Lane) -> Result<Outcome, CommandError> {
    let process = lane.process()?;
    if parts_from_nobody(lane, &process).await? {
        let migration = lane.record.fence.migration;
        let cause = "the destination is not at the other end any more".to_owned();
        if let Some(migration) = migration {
            lane.record.give_up(migration, cause.clone());
            lane.persist().await?;
            cancel::go_on(lane).await?;
        }
        return Err(CommandError::GaveUp(cause));
    }
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

/// Says whether a guest that is to go before its memory would go to nobody.
///
/// A broken channel is no event at the switchover, and QEMU 10.0 that is ordered to go over one
/// hangs for good: it neither fails nor takes anything back.
async fn parts_from_nobody(lane: &Lane, process: &QemuProcess) -> Result<bool, CommandError> {
    let parts = lane
        .record
        .outgoing()
        .is_some_and(|sent| sent.parting == Parting::Told && sent.order == Order::Open);
    if !parts {
        return Ok(false);
    }
    let seen = process
        .monitor()
        .execute(QueryMigrate {})
        .await
        .map_err(|error| CommandError::failed("look at the channel", &error))?;
    Ok(seen.error_desc.is_some_and(|error| !error.is_empty()))
}
