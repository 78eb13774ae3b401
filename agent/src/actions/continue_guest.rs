//! Letting the guest go on at the destination.

use std::time::Duration;

use vmferry_agent_core::incoming::{self, Receiving};
use vmferry_agent_core::journal::{Arrival, Continued, Part};
use vmferry_qmp::RunState;
use vmferry_qmp::command::{AnnounceSelf, Cont};
use vmferry_types::Fence;

use super::Outcome;
use crate::clock;
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::{Disks, Sight};

/// How long QEMU may take to say that the guest runs. It takes milliseconds.
const RUNNING: Duration = Duration::from_secs(5);
/// How long it may take to say that it announces the guest: nothing else waits for that.
const ANNOUNCED: Duration = Duration::from_secs(1);

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
    let stands = lane.record.incoming().is_some_and(|of| of.arrives == Arrival::Stands);
    let receiving =
        if stands { incoming::from_disks(&run) } else { incoming::classify(&run, &sight.migrate) };
    match receiving {
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
    let now = lane.shared.sight.borrow().clone();
    let announced_ms = if divided(&now) { 0 } else { announce(&process).await };
    arrive(lane, fence, announced_ms);
    Ok(Outcome::default())
}

/// Tells the switches that the guest is here, and returns when; 0 if that failed.
///
/// QEMU does so by itself when all has arrived, for a second and a half. A guest that was let go on
/// later than that would be found where it was before, for as long as the switches remember.
async fn announce(process: &crate::process::QemuProcess) -> u64 {
    let again = AnnounceSelf { initial: 50, max: 550, rounds: 5, step: 100 };
    match tokio::time::timeout(ANNOUNCED, process.monitor().execute(again)).await {
        Ok(Ok(_)) => clock::wall_ms(),
        Ok(Err(error)) => {
            tracing::warn!(error = %crate::error::chain(&error), "the guest was not announced");
            0
        }
        Err(_) => {
            tracing::warn!("QEMU did not say in time that it announces its guest");
            0
        }
    }
}

/// Says whether the guest went on here under this generation already.
fn arrived(lane: &mut Lane, fence: &Fence) -> Result<bool, CommandError> {
    match &mut lane.record.part {
        // It is off, and this host's from here on; on the disk with the answer.
        Part::Stopped { brought_by, .. } if *brought_by == Some(fence.migration) => {
            *brought_by = None;
            Ok(true)
        }
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
fn arrive(lane: &mut Lane, fence: &Fence, announced_ms: u64) {
    let Part::Receiver { defined, process, incoming } = &lane.record.part else { return };
    if let Some(port) = incoming.port {
        lane.agent.give_port_back(port);
    }
    let mut process = process.clone();
    process.generation = fence.generation;
    process.announced_ms = announced_ms;
    lane.record.part = Part::Running {
        defined: defined.clone(),
        process,
        outgoing: None,
        held: None,
        leaving: None,
    };
}
