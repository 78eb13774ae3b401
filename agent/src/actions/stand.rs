//! Starting a guest's QEMU at the destination so that it stands still with the disks locked; or, of a
//! VM that is off, taking its definition.

use std::time::Duration;

use vmferry_agent_core::argv::Purpose;
use vmferry_agent_core::capabilities::Carries;
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::journal::{Arrival, Continued, Defined, Incoming, Part};
use vmferry_proto::v1;
use vmferry_qmp::RunState;
use vmferry_types::Fence;

use super::{Outcome, end, launch, start};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::Sight;
use crate::{check, disks};

/// How long a QEMU that answers may take to say that it stands.
const STANDS: Duration = Duration::from_secs(5);

/// What is already there for this migration.
enum Standing {
    /// All of it.
    Ready,
    /// A QEMU that nobody was told of: the agent died in between.
    Launched,
    /// Nothing.
    Nothing,
}

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    command: v1::StartReceiver,
) -> Result<Outcome, CommandError> {
    let vm = start::parse(&command.definition, fence)?;
    match standing(lane, fence)? {
        Standing::Ready => return Ok(Outcome::default()),
        Standing::Launched => return stands(lane).await,
        Standing::Nothing => {}
    }
    lane.check_journal()?;
    check::alone(&lane.agent, fence.vm).await?;
    let blockers = check::bootable(&lane.agent, &vm, &command.resolved_machine).await;
    if !blockers.is_empty() {
        return Err(CommandError::Blocked(blockers));
    }
    if let Some(held) = disks::held(&vm).await {
        return Err(held);
    }
    if lane.record.process().is_some() {
        let gone = end::end_process(lane).await?;
        end::note_end(lane, &gone, Part::Absent);
    }
    let resolved_machine = if command.resolved_machine.is_empty() {
        lane.agent.probe.resolve_machine(&vm.machine)
    } else {
        command.resolved_machine.clone()
    };
    let defined = Defined { text: command.definition, resolved_machine };
    lane.record.name.clone_from(&vm.name);
    if command.stays_off {
        let gone = end::never_started(lane).await?;
        let brought_by = Some(fence.migration);
        end::note_end(lane, &gone, Part::Stopped { defined, brought_by });
        lane.persist().await?;
        return Ok(Outcome::default());
    }
    launch_from_disks(lane, fence, &vm, defined).await
}

async fn launch_from_disks(
    lane: &mut Lane,
    fence: &Fence,
    vm: &Definition,
    defined: Defined,
) -> Result<Outcome, CommandError> {
    lane.record.part = Part::Receiver {
        defined,
        process: launch::plan(lane, fence, vm),
        incoming: Incoming {
            migration: fence.migration,
            port: None,
            carries: Carries::Whole,
            arrives: Arrival::FromDisks,
            cont: Continued::Never,
        },
    };
    lane.persist().await?;
    match launch::launch(lane, vm, Purpose::Stand).await {
        Ok(process) => {
            start::note_identity(lane, &process);
            lane.observe(Some(process));
            stands(lane).await
        }
        Err(Ok(failed)) => {
            end::note_end(lane, &failed.gone, Part::Absent);
            // Nobody was told of it: what became of it says nothing of what is tried next.
            lane.record.ended = None;
            lane.persist().await?;
            Err(failed.error)
        }
        Err(Err(unproven)) => {
            lane.observe(None);
            Err(unproven)
        }
    }
}

/// Waits until QEMU says that it stands, which it does with its disks locked, and notes it.
async fn stands(lane: &mut Lane) -> Result<Outcome, CommandError> {
    let stands =
        |sight: &Sight| sight.gone.is_some() || sight.run_state == Some(RunState::PreLaunch);
    let sight = lane.shared.wait(STANDS, stands).await.map_err(|sight| {
        CommandError::Unresponsive(format!("QEMU does not stand yet: {:?}", sight.run_state))
    })?;
    if let Some(gone) = sight.gone {
        return Err(CommandError::ReceiverGone(format!("{} {}", gone.ended, gone.stderr_tail)));
    }
    if let Part::Receiver { incoming, .. } = &mut lane.record.part {
        incoming.arrives = Arrival::Stands;
    }
    Ok(Outcome::default())
}

/// Returns what is there for this migration.
fn standing(lane: &Lane, fence: &Fence) -> Result<Standing, CommandError> {
    let migration = fence.migration;
    let gone = lane.shared.sight.borrow().gone.clone();
    match &lane.record.part {
        Part::Stopped { brought_by: Some(by), .. } if *by == migration => Ok(Standing::Ready),
        // Of an earlier life of the VM here.
        Part::Absent | Part::Stopped { .. } => Ok(Standing::Nothing),
        Part::Running { .. } if gone.is_some() => Ok(Standing::Nothing),
        Part::Running { .. } => Err(CommandError::wrong_state("the VM runs here already")),
        Part::Receiver { incoming, .. } if incoming.migration == migration => {
            match (gone, incoming.arrives) {
                (None, Arrival::Stands) => Ok(Standing::Ready),
                (None, Arrival::FromDisks) => Ok(Standing::Launched),
                (None, Arrival::Streamed) => {
                    Err(CommandError::wrong_state("a receiver that waits for a stream is here"))
                }
                (Some(gone), Arrival::Stands) => {
                    Err(CommandError::ReceiverGone(format!("{} {}", gone.ended, gone.stderr_tail)))
                }
                (Some(_), Arrival::FromDisks | Arrival::Streamed) => Ok(Standing::Nothing),
            }
        }
        Part::Receiver { .. } if gone.is_some() => Ok(Standing::Nothing),
        Part::Receiver { incoming, .. } => Err(CommandError::wrong_state(format!(
            "a receiver of migration {} is armed here; destroy it first",
            incoming.migration
        ))),
    }
}
