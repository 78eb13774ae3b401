//! Ending a process, with proof, and removing what belonged to it.

use std::time::Duration;

use vmferry_agent_core::journal::{Continued, Ended, Gone, GoneKind, Part, Process};
use vmferry_types::MigrationId;

use crate::error::{CommandError, chain};
use crate::lane::Lane;
use crate::process::{ProcessDir, kill_and_prove_gone};
use crate::{clock, learning, network, wire};

/// How long a killed process may take to go.
pub(super) const KILL_DEADLINE: Duration = Duration::from_secs(20);

/// Ends the process that the record names and removes what belonged to it; the record is left to
/// the caller.
pub(super) async fn end_process(lane: &mut Lane) -> Result<Gone, CommandError> {
    let Some(written) = lane.record.process().cloned() else {
        return never_started(lane).await;
    };
    let gone = prove_gone(lane, &written, KILL_DEADLINE).await?;
    lane.forget_process().await;
    Ok(gone)
}

/// Ends `written`, if it lives, and removes its taps; its directory goes after the answer.
pub(super) async fn prove_gone(
    lane: &mut Lane,
    written: &Process,
    deadline: Duration,
) -> Result<Gone, CommandError> {
    let known = lane.shared.sight.borrow().gone.clone();
    let gone = match known {
        Some(gone) => gone,
        None => kill(lane, written, deadline).await?,
    };
    network::remove(&written.taps).await;
    lane.discard_later(&written.dir);
    Ok(gone)
}

async fn kill(lane: &Lane, written: &Process, deadline: Duration) -> Result<Gone, CommandError> {
    let dir = ProcessDir::new(&written.dir);
    match kill_and_prove_gone(&dir, deadline).await {
        Ok(proof) => {
            tracing::info!(%proof, "process is proven gone");
            Ok(wire::gone(&proof, &lane.agent.boot_id, clock::wall_ms()))
        }
        Err(error) => learning::by_journal(lane.shared.id, written, &lane.agent.boot_id)
            .await
            .ok_or_else(|| CommandError::Failed {
                operation: "prove that the process is gone",
                cause: chain(&error),
            }),
    }
}

/// Removes what is left of a receiver that was proven gone without anyone's command. From the note
/// on, whoever asks is answered by the note.
pub(crate) async fn clear(
    lane: &mut Lane,
    migration: MigrationId,
    gone: &Gone,
) -> Result<(), CommandError> {
    let Some(written) = lane.record.process().cloned() else { return Ok(()) };
    let told = lane.record.incoming().is_some_and(vmferry_agent_core::journal::Incoming::told);
    network::remove(&written.taps).await;
    note_end(lane, gone, Part::Absent);
    if !told {
        // Nobody was told of it, so nothing was lost: the command that began it begins it again.
        lane.record.ended = None;
    } else if let Some(ended) = &mut lane.record.ended {
        ended.migration = Some(migration);
    }
    lane.persist().await?;
    lane.discard_later(&written.dir);
    lane.forget_process().await;
    Ok(())
}

/// Writes into the record that its process ended, and what is left of the VM here.
pub(super) fn note_end(lane: &mut Lane, gone: &Gone, left: Part) {
    let cont = if lane.record.ever_continued() { Continued::Ordered } else { Continued::Never };
    if let Some(port) = lane.record.incoming().and_then(|incoming| incoming.port) {
        lane.agent.give_port_back(port);
    }
    let migration = lane.record.fence.migration;
    lane.record.part = left;
    lane.record.ended = Some(Ended { migration, gone: gone.clone(), cont });
}

/// Returns the proof where nothing was ever started: the journal is whole and says so.
///
/// # Errors
///
/// Refuses where the journal proves nothing, or a QEMU of this VM runs here after all.
pub(super) async fn never_started(lane: &Lane) -> Result<Gone, CommandError> {
    let current = lane.record.fence.migration;
    let ended = lane.record.ended.as_ref().filter(|ended| ended.migration == current);
    if let Some(ended) = ended {
        return Ok(ended.gone.clone());
    }
    lane.check_journal()?;
    // What was seen at the last report may be seconds old, and this is a proof.
    crate::report::look_for_strangers(&lane.agent).await;
    if let Some(stranger) = lane.agent.stranger_of(lane.shared.id) {
        return Err(CommandError::wrong_state(format!(
            "a QEMU of this VM runs here that the journal does not know: {stranger}"
        )));
    }
    Ok(Gone {
        kind: GoneKind::NeverStarted,
        identity: None,
        boot_id: lane.agent.boot_id.clone(),
        ended: "was never started".to_owned(),
        at_ms: clock::wall_ms(),
        stderr_tail: String::new(),
    })
}
