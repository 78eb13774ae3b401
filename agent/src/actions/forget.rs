//! Forgetting the definition of a stopped VM.

use vmferry_agent_core::journal::Part;

use super::Outcome;
use crate::error::CommandError;
use crate::lane::Lane;

pub(super) fn run(lane: &mut Lane) -> Result<Outcome, CommandError> {
    match &lane.record.part {
        Part::Absent => {}
        Part::Stopped { .. } => lane.record.part = Part::Absent,
        Part::Running { .. } | Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("a process of this VM is here; stop it first"));
        }
    }
    Ok(Outcome::default())
}
