//! Stopping a guest on purpose and durably, and letting it go on (rule R4).

use std::time::Duration;

use vmferry_agent_core::hold::SwitchedOff;
use vmferry_agent_core::journal::Part;
use vmferry_proto::v1;
use vmferry_qmp::RunState;
use vmferry_qmp::command::{Cont, QueryStatus, Stop};
use vmferry_types::Fence;

use super::{Outcome, transfer};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::Sight;
use crate::process::QemuProcess;

/// How long QEMU may take to stop the guest, or to let it run. It flushes its disks at a stop.
const SETTLES: Duration = Duration::from_secs(10);

pub(super) async fn run(lane: &mut Lane, fence: &Fence) -> Result<Outcome, CommandError> {
    transfer::check_owner(lane, fence)?;
    if lane.record.unsettled_order().is_some() {
        return Err(CommandError::wrong_state(
            "the switchover was ordered: the guest may be elsewhere",
        ));
    }
    if lane.shared.sight.borrow().busy() {
        return Err(CommandError::wrong_state("the guest is being sent; call that back first"));
    }
    let process = lane.process()?;
    let mine = lane.record.hold().is_some_and(|hold| hold.migration == fence.migration);
    if !mine {
        check_runs(&process).await?;
        lane.shared.begin_attempt();
    }
    lane.record.begin_hold(fence.migration);
    // From here on the guest stays still over any restart of this agent; QEMU hears it after.
    lane.persist().await?;
    process
        .monitor()
        .execute(Stop {})
        .await
        .map_err(|error| CommandError::failed("stop the guest", &error))?;
    let still = |sight: &Sight| sight.gone.is_some() || sight.run_state == Some(RunState::Paused);
    let seen = lane.shared.wait(SETTLES, still).await.map_err(|sight| {
        CommandError::Unresponsive(format!("the guest does not stand still: {:?}", sight.run_state))
    })?;
    match seen.gone {
        None => Ok(Outcome::default()),
        Some(gone) => Err(CommandError::wrong_state(format!(
            "the QEMU of this VM is gone: {} {}",
            gone.ended, gone.stderr_tail
        ))),
    }
}

/// Refuses a guest that somebody else has stopped: to let that one go on would not be ours.
pub(super) async fn check_runs(process: &QemuProcess) -> Result<(), CommandError> {
    let status = run_state(process).await?;
    if status == RunState::Running {
        return Ok(());
    }
    Err(CommandError::Blocked(vec![v1::Blocker {
        code: "guest_paused".to_owned(),
        message: format!("the guest does not run: it is {status}"),
        host_id: String::new(),
    }]))
}

async fn run_state(process: &QemuProcess) -> Result<RunState, CommandError> {
    let status = process.monitor().execute(QueryStatus {}).await;
    status
        .map(|status| status.status)
        .map_err(|error| CommandError::failed("read what the guest does", &error))
}

/// Re-arms what a hold had switched off, if there is one that was decided to end, and notes that it
/// is over. What is on again already is left alone: a guest that stopped for reasons of its own
/// meanwhile stays so.
pub(crate) async fn let_go(lane: &mut Lane) -> Result<(), CommandError> {
    let Some(hold) = lane.record.hold().cloned() else { return Ok(()) };
    for switched in hold.switched_off {
        match switched {
            SwitchedOff::Vcpus => rearm_vcpus(lane).await?,
        }
        tracing::info!(what = switched.label(), "is on again after the hold");
    }
    lane.record.end_hold();
    debug_assert!(matches!(lane.record.part, Part::Running { .. }), "only what runs here is held");
    lane.persist().await
}

async fn rearm_vcpus(lane: &Lane) -> Result<(), CommandError> {
    let process = lane.process()?;
    let ran = {
        let sight = lane.shared.sight.borrow();
        sight.resumed_at_us > sight.stopped_at_us
    };
    if ran || run_state(&process).await? != RunState::Paused {
        return Ok(());
    }
    process
        .monitor()
        .execute(Cont {})
        .await
        .map_err(|error| CommandError::failed("let the guest go on", &error))?;
    let runs = |sight: &Sight| sight.gone.is_some() || sight.running();
    lane.shared.wait(SETTLES, runs).await.map(drop).map_err(|sight| {
        CommandError::Unresponsive(format!("the guest does not run yet: {:?}", sight.run_state))
    })
}
