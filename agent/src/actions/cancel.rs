//! Calling a transfer back that was not ordered.

use std::time::Duration;

use vmferry_agent_core::journal::{Order, Part};
use vmferry_agent_core::outgoing::Sending;
use vmferry_proto::v1;
use vmferry_qmp::RunState;
use vmferry_qmp::command::{MigrateCancel, Yank, YankInstance};
use vmferry_types::Fence;

use super::{Outcome, hold, resume};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::Sight;
use crate::observer::sending_of;

/// How long QEMU may take to call a transfer back. It takes milliseconds.
const CANCEL: Duration = Duration::from_secs(10);
/// How long QEMU may take before its connections are broken out of band.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    cancel: v1::CancelTransfer,
) -> Result<Outcome, CommandError> {
    let cause = if cancel.cause.is_empty() { "cancelled".to_owned() } else { cancel.cause };
    let other = lane.record.unsettled_order().map(|sent| sent.migration);
    if other.is_some_and(|other| other != fence.migration) {
        return Err(CommandError::wrong_state(
            "the guest was handed over by an earlier migration, and that is not settled",
        ));
    }
    let Part::Running { outgoing, .. } = &lane.record.part else {
        return Err(CommandError::wrong_state("the VM does not run here"));
    };
    let current = outgoing.as_ref().filter(|sent| sent.migration == fence.migration);
    match current.map(|sent| &sent.order) {
        None | Some(Order::Open | Order::GaveUp { .. }) => {}
        Some(Order::TakenBack { .. }) if lane.record.hold().is_none() => {
            return Ok(Outcome::default());
        }
        Some(Order::TakenBack { .. }) => lane.record.let_go(),
        Some(Order::Handed) => {
            return Err(CommandError::wrong_state(
                "the switchover was ordered; only proof that the receiver is gone lets the guest go on here",
            ));
        }
    }
    lane.record.give_up(fence.migration, cause);
    lane.persist().await?;
    go_on(lane).await?;
    Ok(Outcome::default())
}

/// Calls the transfer back and lets go on what was held for it. A transfer that was taken back
/// after its end has nothing to be called back.
pub(crate) async fn go_on(lane: &mut Lane) -> Result<(), CommandError> {
    let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
    if sending == Sending::Complete {
        resume::cont(lane).await?;
    } else {
        call_back(lane).await?;
    }
    hold::let_go(lane).await
}

/// Makes QEMU call its transfer back and waits until the guest goes on here.
///
/// To be called once it is written down that this transfer is given up, or that its receiver is
/// proven gone.
pub(super) async fn call_back(lane: &Lane) -> Result<(), CommandError> {
    let asked = async {
        let process = lane.process()?;
        process
            .monitor()
            .execute_within(MigrateCancel {}, PATIENCE)
            .await
            .map_err(|error| CommandError::failed("call the transfer back", &error))
    };
    if let Err(error) = asked.await {
        // The main loop may hang in a send to a silent peer: the way in is out of band.
        tracing::warn!(%error, "the transfer is broken out of band");
        yank(lane).await?;
    } else if lane.shared.wait(PATIENCE, back).await.is_err() {
        yank(lane).await?;
    }
    match lane.shared.wait(CANCEL, back).await {
        Ok(sight) => match sight.gone {
            None => Ok(()),
            Some(gone) => Err(CommandError::wrong_state(format!(
                "the QEMU of this VM is gone: {} {}",
                gone.ended, gone.stderr_tail
            ))),
        },
        Err(sight) => Err(CommandError::Unresponsive(format!(
            "the transfer was called back, and QEMU still says {}",
            sight.migrate.status.as_ref().map_or("nothing", |status| status.label())
        ))),
    }
}

/// Breaks the transfer's connections.
async fn yank(lane: &Lane) -> Result<(), CommandError> {
    let Some(process) = lane.shared.process() else {
        return Err(CommandError::Unresponsive("its monitor is not connected".to_owned()));
    };
    let instances = vec![YankInstance::migration()];
    match process.oob(Yank { instances }, PATIENCE).await {
        Ok(_) => Ok(()),
        Err(error) => {
            // It may have settled meanwhile; the caller looks.
            tracing::debug!(%error, "nothing to break");
            Ok(())
        }
    }
}

/// Says whether the transfer is over and the guest is as it was before.
fn back(sight: &Sight) -> bool {
    let settled = sight.migrate.status.as_ref().is_none_or(vmferry_qmp::MigrationStatus::settled);
    let stopped_for_it =
        matches!(sight.run_state, Some(RunState::FinishMigrate | RunState::PostMigrate) | None);
    sight.gone.is_some() || (settled && !stopped_for_it)
}
