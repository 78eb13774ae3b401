//! `vmferry plan`.

use std::path::Path;

use crate::failure::Failure;
use crate::output::Output;
use crate::plan;

/// Plans by a file, without a planner.
pub(crate) fn run(file: &Path, output: &Output) -> Result<(), Failure> {
    let operation = format!("plan {}", file.display());
    let answer = plan::plan(file).map_err(|error| Failure::Usage {
        operation: operation.clone(),
        problem: error.to_string(),
    })?;
    output.answer(&answer, plan::text);
    if answer.is_planned() {
        return Ok(());
    }
    let (blocked, all) = (answer.blockers.len(), answer.blockers.len() + answer.assignments.len());
    Err(Failure::Blocked { operation, problem: format!("{blocked} of {all} VMs have no place") })
}
