//! The transition table.

use super::{Event, Migration, Phase, Refusal};

pub(super) fn next(_migration: &Migration, _event: &Event) -> Result<Phase, Refusal> {
    Err(Refusal::Illegal)
}
