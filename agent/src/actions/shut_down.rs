//! Asking a guest to turn itself off for its move, under the grant that its owner gave (rule R8).

use vmferry_agent_core::journal::Part;
use vmferry_qmp::command::SystemPowerdown;
use vmferry_types::Fence;

use super::{Outcome, end, hold, transfer};
use crate::error::CommandError;
use crate::lane::Lane;

/// Answered once QEMU has pressed the button: whether the guest heeds it, and when, is observed. Asked
/// again, the button is pressed again, which one that is on its way ignores.
pub(super) async fn run(lane: &mut Lane, fence: &Fence) -> Result<Outcome, CommandError> {
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => return is_off(lane).await,
        Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("this is a receiver, not a source"));
        }
        Part::Running { .. } => {}
    }
    transfer::check_owner(lane, fence)?;
    if lane.record.unsettled_order().is_some() {
        return Err(CommandError::wrong_state(
            "the switchover was ordered: the guest may be elsewhere",
        ));
    }
    if lane.record.hold().is_some() || lane.shared.sight.borrow().busy() {
        return Err(CommandError::wrong_state("the guest is being moved; call that back first"));
    }
    let migration = Some(fence.migration);
    let asked = matches!(&lane.record.part, Part::Running { leaving, .. } if *leaving == migration);
    if lane.shared.sight.borrow().gone.is_some() {
        // Asked or not, it is gone: the journal says which.
        return Ok(Outcome::default());
    }
    let process = lane.process()?;
    if !asked {
        hold::check_runs(&process).await?;
    }
    if let Part::Running { leaving, outgoing, .. } = &mut lane.record.part {
        *leaving = migration;
        *outgoing = None;
    }
    // A guest that ends from here on was asked to: it is started again wherever its move ends.
    lane.persist().await?;
    process
        .monitor()
        .execute(SystemPowerdown {})
        .await
        .map_err(|error| CommandError::failed("ask the guest to power off", &error))?;
    Ok(Outcome::default())
}

/// Proves that nothing of the VM runs here, and keeps that, so that whoever looks is told too.
async fn is_off(lane: &mut Lane) -> Result<Outcome, CommandError> {
    let gone = end::never_started(lane).await?;
    let left = lane.record.part.clone();
    end::note_end(lane, &gone, left);
    lane.persist().await?;
    Ok(Outcome::gone(gone))
}
