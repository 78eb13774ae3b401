//! Launching a QEMU process that the journal already names, with its taps.

use std::time::Duration;

use vmferry_agent_core::argv::{self, Purpose};
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::journal::{Gone, Process};
use vmferry_types::Fence;

use super::end;
use crate::error::{CommandError, chain};
use crate::lane::Lane;
use crate::process::{self, LAUNCH_DEADLINE, LaunchError, ProcessDir, QemuProcess};
use crate::{disks, network};

/// How long the end of a launch that failed may take.
const CLEAN_UP: Duration = Duration::from_secs(10);

/// A launch that failed; nothing of it is left.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: CommandError,
    pub(super) gone: Gone,
}

/// Names a launch that has not begun.
pub(super) fn plan(lane: &Lane, fence: &Fence, vm: &Definition) -> Process {
    let vm_part = format!("{:08x}", fence.vm.as_u128() >> 96);
    let launch_part = format!("{:08x}", uuid::Uuid::new_v4().as_u128() >> 96);
    let dir = lane.agent.config.run_dir.join(format!("{vm_part}-{launch_part}"));
    let dir = dir.to_string_lossy().into_owned();
    let taps = vm.nics.iter().map(|nic| network::tap_name(&dir, &nic.id)).collect();
    Process {
        dir,
        boot_id: lane.agent.boot_id.clone(),
        identity: None,
        taps,
        generation: fence.generation,
        admission: fence.migration,
        announced_ms: 0,
    }
}

/// Launches the process that the record names.
///
/// On failure everything is undone and proven gone; if even that fails the process stays in the
/// record, and the error says so.
pub(super) async fn launch(
    lane: &mut Lane,
    vm: &Definition,
    purpose: Purpose,
) -> Result<QemuProcess, Result<Failed, CommandError>> {
    let internal = || {
        Err(CommandError::Failed {
            operation: "launch QEMU",
            cause: "the record names no process".to_owned(),
        })
    };
    let written = lane.record.process().cloned().ok_or_else(internal)?;
    let machine = lane.record.defined().map(|defined| defined.resolved_machine.clone());
    let machine = machine.unwrap_or_default();
    let dir = ProcessDir::new(&written.dir);
    let taps: Vec<_> = vm.nics.iter().zip(written.taps.iter().map(String::as_str)).collect();
    if let Err(error) = network::create(&taps).await {
        let error = CommandError::failed("set up the guest's network", &error);
        return Err(undo(lane, &written, error).await);
    }
    let mut args = vec![lane.agent.config.qemu.to_string_lossy().into_owned()];
    args.extend(argv::argv(vm, &machine, purpose, &written.taps));
    match process::launch(&dir, &args, &lane.agent.launcher, LAUNCH_DEADLINE).await {
        Ok(process) => {
            tracing::info!(qemu = %process.identity(), dir = %written.dir, "QEMU launched");
            Ok(process)
        }
        Err(error) => {
            let error = explain(vm, purpose, &error).await;
            Err(undo(lane, &written, error).await)
        }
    }
}

/// Says why QEMU did not come up. Its own words are shown; whether a disk is held is asked of the
/// kernel, not read from them.
async fn explain(vm: &Definition, purpose: Purpose, error: &LaunchError) -> CommandError {
    let held = match purpose {
        Purpose::Boot | Purpose::Stand => disks::held(vm).await,
        Purpose::Receive => None,
    };
    held.unwrap_or_else(|| CommandError::Failed { operation: "launch QEMU", cause: chain(error) })
}

async fn undo(
    lane: &mut Lane,
    written: &Process,
    error: CommandError,
) -> Result<Failed, CommandError> {
    match end::prove_gone(lane, written, CLEAN_UP).await {
        Ok(gone) => Ok(Failed { error: with_last_words(error, &gone), gone }),
        Err(unproven) => Err(CommandError::Failed {
            operation: "undo a launch that failed",
            cause: format!("{error}; and then: {unproven}"),
        }),
    }
}

/// Adds what QEMU said at its end, where its launch failed before that could be read.
fn with_last_words(error: CommandError, gone: &Gone) -> CommandError {
    let tail = gone.stderr_tail.trim();
    if let CommandError::Failed { operation, cause } = &error
        && !tail.is_empty()
        && !cause.contains(tail)
    {
        let cause = format!("{cause}: QEMU {}: {tail}", gone.ended);
        return CommandError::Failed { operation, cause };
    }
    error
}
