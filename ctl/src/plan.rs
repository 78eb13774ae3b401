//! `vmferry plan`: where a host's VMs would go, by a file and without a planner.
//!
//! The core that decides is the planner's own, so the answer is the one that a planner with this
//! inventory would give. [`input`] is the file, [`inventory`] what the core is asked, [`mod@answer`] the
//! JSON form of what it says, and [`mod@text`] the form for people.

mod answer;
mod input;
mod inventory;
mod text;

use std::path::Path;

use vmferry_planner_core::maintenance::PlanState;

pub(crate) use answer::Answer;
pub(crate) use text::text;

/// Why no plan was made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(#[source] std::io::Error),
    /// The file is no inventory.
    #[error("{0}")]
    Invalid(#[from] input::Invalid),
}

/// Plans by a file; `-` is standard input.
pub(crate) fn plan(file: &Path) -> Result<Answer, PlanError> {
    let text = read(file).map_err(PlanError::Unreadable)?;
    Ok(answer(&text)?)
}

fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read as _;
    if file != Path::new("-") {
        return std::fs::read(file);
    }
    let mut text = Vec::new();
    std::io::stdin().lock().read_to_end(&mut text)?;
    Ok(text)
}

/// Returns the answer to the text of an inventory.
fn answer(text: &[u8]) -> Result<Answer, input::Invalid> {
    let input = input::parse(text)?;
    let asked = inventory::asked(&input);
    let plan =
        vmferry_planner_core::maintenance::plan(&asked.fleet, &asked.order, &asked.workloads);
    Ok(answer::of(&input, &asked, &plan))
}

impl Answer {
    /// Says whether each VM has a place.
    pub(crate) fn is_planned(&self) -> bool {
        self.plan_state == PlanState::Planned.label()
    }
}

#[cfg(test)]
mod tests;
