//! Letting the guest go on at the destination.

use std::time::Duration;

use vmferry_agent_core::incoming::{self, Receiving};
use vmferry_agent_core::journal::{Continued, Part};
use vmferry_qmp::RunState;
use vmferry_qmp::command::Cont;
use vmferry_types::Fence;

use super::Outcome;
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::{Disks, Sight};

/// How long QEMU may take to say that the guest runs. It takes milliseconds.
const RUNNING: Duration = Duration::from_secs(5);

pub(super) async fn run(lane: &mut Lane, fence: &Fence) -> Result<Outcome, CommandError> {
    if arrived(lane, fence)? {
        return Ok(Outcome::default());
    }
    let sight = lane.shared.sight.borrow().clone();
    if let Some(gone) = sight.gone {
        return Err(CommandError::ReceiverGone(format!("{} {}", gone.ended, gone.stderr_tail)));
    }
    let process = lane.process()?;
    let run = sight.run_state.clone().unwrap_or(RunState::Unknown(String::new()));
    match incoming::classify(&run, &sight.migrate) {
        Receiving::Complete | Receiving::Divided => {
            if let Part::Receiver { process, incoming, .. } = &mut lane.record.part {
                incoming.cont = Continued::Ordered;
                process.generation = fence.generation;
            }
            // From here on this host may run the guest, and nobody may say that it never did.
            lane.persist().await?;
            if let Err(error) = process.monitor().execute(Cont {}).await {
                return Err(refused(lane, &error).await);
            }
        }
        // It was let go on before, and the answer was lost.
        Receiving::Running => {}
        Receiving::Waiting | Receiving::Moving => {
            return Err(CommandError::wrong_state("the guest has not arrived whole"));
        }
        Receiving::Failed => {
            let cause = sight.migrate.error_desc.unwrap_or_default();
            return Err(CommandError::wrong_state(format!("the guest did not arrive: {cause}")));
        }
        Receiving::Other => {
            return Err(CommandError::wrong_state(format!("the guest cannot go on from {run}")));
        }
    }
    // QEMU takes the disks before it lets a guest run. One whose memory follows may keep QEMU from
    // saying so: it waits for a page.
    let divided = |sight: &Sight| {
        sight.migrate.status.as_ref().is_some_and(vmferry_qmp::MigrationStatus::postcopy)
    };
    let runs = |sight: &Sight| {
        let disks = sight.disks == Disks::Active || divided(sight);
        sight.gone.is_some() || (sight.running() && disks)
    };
    if lane.shared.wait(RUNNING, runs).await.is_err() {
        return Err(CommandError::Unresponsive(
            "the guest was let go on and is not seen to run".to_owned(),
        ));
    }
    arrive(lane, fence);
    Ok(Outcome::default())
}

/// Says whether the guest went on here under this generation already.
fn arrived(lane: &Lane, fence: &Fence) -> Result<bool, CommandError> {
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => match &lane.record.ended {
            Some(ended) if ended.migration == Some(fence.migration) => {
                Err(CommandError::ReceiverGone(ended.gone.ended.clone()))
            }
            Some(_) | None => Err(CommandError::wrong_state("there is no receiver here")),
        },
        Part::Running { process, .. }
            if process.admission == fence.migration && process.generation == fence.generation =>
        {
            Ok(true)
        }
        Part::Running { .. } => {
            Err(CommandError::wrong_state("the VM runs here, it is not to arrive"))
        }
        Part::Receiver { incoming, .. } if incoming.migration != fence.migration => {
            Err(CommandError::wrong_state("the receiver here is of another migration"))
        }
        Part::Receiver { process, incoming, .. } => {
            let armed = incoming.cont == Continued::Never;
            if armed && fence.generation <= process.generation {
                return Err(CommandError::wrong_state(format!(
                    "the receiver was armed under generation {}: the guest goes on here under a newer one only",
                    process.generation
                )));
            }
            Ok(false)
        }
    }
}

/// Takes back that the guest may have run, if QEMU itself says that it did not.
async fn refused(lane: &mut Lane, error: &crate::monitor::MonitorError) -> CommandError {
    let still = lane.shared.sight.borrow().run_state == Some(RunState::Paused);
    if error.refused().is_some()
        && still
        && let Part::Receiver { incoming, .. } = &mut lane.record.part
    {
        // Refused is not run. The generation stays: it is the newest that anybody knows.
        incoming.cont = Continued::Never;
        if let Err(error) = lane.persist().await {
            return error;
        }
    }
    CommandError::failed("let the guest go on", error)
}

/// Turns the receiver into a running VM; on the disk with the answer.
fn arrive(lane: &mut Lane, fence: &Fence) {
    let Part::Receiver { defined, process, incoming } = &lane.record.part else { return };
    if let Some(port) = incoming.port {
        lane.agent.give_port_back(port);
    }
    let mut process = process.clone();
    process.generation = fence.generation;
    lane.record.part =
        Part::Running { defined: defined.clone(), process, outgoing: None, held: None };
}
