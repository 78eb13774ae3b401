//! Starting a VM.

use std::time::Duration;

use vmferry_agent_core::argv::Purpose;
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::journal::{Defined, Part};
use vmferry_proto::v1;
use vmferry_types::Fence;

use super::{Outcome, end, launch};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::{check, disks};

/// How long a QEMU that answers may take to say that its guest runs.
const RUNNING: Duration = Duration::from_secs(5);

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    start: v1::StartVm,
) -> Result<Outcome, CommandError> {
    let vm = parse(&start.definition, fence)?;
    if let Some(resolved_machine) = already_started(lane, fence)? {
        return Ok(Outcome { resolved_machine, ..Outcome::default() });
    }
    lane.check_journal()?;
    check::alone(&lane.agent, fence.vm).await?;
    let blockers = check::startable(&lane.agent, &vm, &start.resolved_machine).await;
    if !blockers.is_empty() {
        return Err(CommandError::Blocked(blockers));
    }
    if let Some(held) = disks::held(&vm).await {
        return Err(held);
    }
    let resolved_machine = if start.resolved_machine.is_empty() {
        lane.agent.probe.resolve_machine(&vm.machine)
    } else {
        start.resolved_machine
    };
    if lane.record.process().is_some() {
        // It is proven gone, or `already_started` would have refused.
        let left = lane.record.defined().cloned();
        let left = left.map_or(Part::Absent, |defined| Part::Stopped { defined, brought_by: None });
        let gone = end::end_process(lane).await?;
        end::note_end(lane, &gone, left);
    }
    let before = lane.record.part.clone();
    let defined = Defined { text: start.definition, resolved_machine: resolved_machine.clone() };
    lane.record.name.clone_from(&vm.name);
    lane.record.part = Part::Running {
        defined,
        process: launch::plan(lane, fence, &vm),
        outgoing: None,
        held: None,
        leaving: None,
    };
    // The launch must be on the disk first: a QEMU that no record names could never be found.
    lane.persist().await?;
    match launch::launch(lane, &vm, Purpose::Boot).await {
        Ok(process) => {
            note_identity(lane, &process);
            lane.observe(Some(process));
        }
        Err(Ok(failed)) => {
            end::note_end(lane, &failed.gone, before);
            lane.persist().await?;
            return Err(failed.error);
        }
        Err(Err(unproven)) => {
            // It may live: the observer finds out.
            lane.observe(None);
            return Err(unproven);
        }
    }
    // Whatever the guest does after this is observed, not waited for.
    let _seen = lane.shared.wait(RUNNING, |sight| sight.running() || sight.gone.is_some()).await;
    Ok(Outcome { resolved_machine, ..Outcome::default() })
}

pub(super) fn note_identity(lane: &mut Lane, process: &crate::process::QemuProcess) {
    let identity = crate::wire::identity(process.identity());
    if let Some(written) = lane.record.process_mut() {
        written.identity = Some(identity);
    }
}

pub(super) fn parse(text: &str, fence: &Fence) -> Result<Definition, CommandError> {
    let vm = Definition::parse(text).map_err(|errors| {
        let field = errors.0.first().map(|error| error.field.clone()).unwrap_or_default();
        CommandError::invalid(format!("definition.{field}"), errors.to_string())
    })?;
    if vm.uuid == fence.vm {
        Ok(vm)
    } else {
        Err(CommandError::invalid("definition.uuid", "is not the VM id of the fence"))
    }
}

/// Returns the machine type if this very start was done before.
fn already_started(lane: &Lane, fence: &Fence) -> Result<Option<String>, CommandError> {
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => Ok(None),
        Part::Running { defined, process, .. } => {
            if lane.shared.sight.borrow().gone.is_some() {
                Ok(None)
            } else if process.admission == fence.migration {
                Ok(Some(defined.resolved_machine.clone()))
            } else {
                Err(CommandError::wrong_state("the VM runs here already"))
            }
        }
        Part::Receiver { .. } => {
            Err(CommandError::wrong_state("a receiver of this VM is here; destroy it first"))
        }
    }
}
