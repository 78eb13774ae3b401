//! Stopping a VM.

use std::time::Duration;

use vmferry_agent_core::journal::{Gone, Part};
use vmferry_proto::v1;
use vmferry_qmp::command::{Quit, SystemPowerdown};

use super::{Outcome, end};
use crate::error::CommandError;
use crate::lane::Lane;

/// How long QEMU may take to end in good order before it is killed: it flushes its disks.
const QUIT: Duration = Duration::from_secs(10);
/// How long a guest may take to power off where nothing else is said.
const POWERDOWN: Duration = Duration::from_secs(60);
/// The longest that a lane is kept busy by a guest that does not power off.
const POWERDOWN_MAX: Duration = Duration::from_secs(600);

pub(super) async fn run(lane: &mut Lane, stop: &v1::StopVm) -> Result<Outcome, CommandError> {
    let defined = match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => {
            return end::never_started(lane).await.map(Outcome::gone);
        }
        Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("this is a receiver, not a running VM"));
        }
        Part::Running { defined, .. } => defined.clone(),
    };
    let lives = lane.shared.sight.borrow().gone.is_none();
    if lives && lane.record.unsettled_order().is_some() {
        return Err(CommandError::wrong_state(
            "the guest was handed over, and that is not settled: it may be elsewhere",
        ));
    }
    if lives && let Some(hold) = lane.record.hold() {
        return Err(CommandError::wrong_state(format!(
            "the guest is held by migration {}; cancel that first",
            hold.migration
        )));
    }
    if lane.shared.sight.borrow().busy() {
        return Err(CommandError::wrong_state("the VM is being migrated; cancel that first"));
    }
    let how = match stop.how() {
        v1::StopHow::Unspecified => {
            return Err(CommandError::invalid("stop_vm.how", "must be powerdown or quit"));
        }
        how @ (v1::StopHow::Powerdown | v1::StopHow::Quit) => how,
    };
    lane.persist().await?;
    if lane.shared.sight.borrow().gone.is_none() {
        match how {
            v1::StopHow::Powerdown => power_down(lane, stop.deadline_ms).await?,
            v1::StopHow::Quit | v1::StopHow::Unspecified => quit(lane).await,
        }
    }
    let gone: Gone = end::end_process(lane).await?;
    end::note_end(lane, &gone, Part::Stopped { defined, brought_by: None });
    Ok(Outcome::gone(gone))
}

/// Asks the guest; if it does not go, it is left running.
async fn power_down(lane: &Lane, deadline_ms: u64) -> Result<(), CommandError> {
    let limit = if deadline_ms == 0 { POWERDOWN } else { Duration::from_millis(deadline_ms) };
    let process = lane.process()?;
    process
        .monitor()
        .execute(SystemPowerdown {})
        .await
        .map_err(|error| CommandError::failed("ask the guest to power off", &error))?;
    let gone = lane.shared.wait(limit.min(POWERDOWN_MAX), |sight| sight.gone.is_some()).await;
    gone.map(drop).map_err(|_| {
        CommandError::wrong_state(format!(
            "the guest did not power off within {limit:?} and runs on; stop it with quit to pull the plug"
        ))
    })
}

/// Ends QEMU in good order; whatever does not go is killed by the caller.
async fn quit(lane: &Lane) {
    let Ok(process) = lane.process() else { return };
    if let Err(error) = process.monitor().execute(Quit {}).await {
        tracing::debug!(%error, "quit was not answered");
    }
    // The proof is made by the caller, whichever way this ends.
    let _gone = lane.shared.wait(QUIT, |sight| sight.gone.is_some()).await;
}
