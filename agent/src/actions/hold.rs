//! Stopping a guest on purpose and durably.

use vmferry_types::Fence;

use super::Outcome;
use crate::error::CommandError;
use crate::lane::Lane;

pub(super) async fn run(_lane: &mut Lane, _fence: &Fence) -> Result<Outcome, CommandError> {
    Err(CommandError::wrong_state("guests are not held yet"))
}
