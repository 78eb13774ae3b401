//! What no step of a migration may do, whatever happened. For stores, simulations and tests.

use vmferry_types::{Method, PhaseLabel};

use super::{Cleanup, Event, Flight, Migration, Phase, Refusal};

/// A step that breaks an invariant: a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// Something that never changes did.
    #[error("the migration became another one")]
    Identity,
    /// The VM's generation went back (invariant I2).
    #[error("the generation went back")]
    GenerationBack,
    /// The owner changed without a new generation, or a generation was taken without a new owner.
    #[error("ownership moved without its generation")]
    Ownership,
    /// The guest is carried another way, without what makes that safe.
    #[error("the method changed without its proof")]
    Method,
    /// A migration that had ended went on.
    #[error("an ended migration went on")]
    Resurrected,
    /// Something is reserved, or the VM is held, though nothing is owed and nobody has to decide.
    #[error("an ended migration kept what it held")]
    Leak,
}

/// Returns every invariant that the step from `before` to `after` breaks.
#[must_use]
pub fn check_step(before: &Migration, after: &Migration) -> Vec<Breach> {
    let mut breaches = Vec::new();
    let (old, new) = (before.books(), after.books());
    let same = before.id == after.id
        && before.vm == after.vm
        && before.source == after.source
        && before.generation == after.generation;
    if !same {
        breaches.push(Breach::Identity);
    }
    if new.generation < old.generation {
        breaches.push(Breach::GenerationBack);
    }
    if (old.host != new.host) != (new.generation > old.generation) {
        breaches.push(Breach::Ownership);
    }
    let judged = before.method == Method::Precopy && after.diverged.is_some();
    let kept = before.method == after.method
        && before.downgraded == after.downgraded
        && before.barred == after.barred
        && (before.diverged == after.diverged || judged);
    let parted = before.method == Method::Precopy
        && after.method == Method::Postcopy
        && before.diverged.is_none()
        && after.diverged.is_some()
        && before.downgraded == after.downgraded;
    let turned = before.downgraded.is_none()
        && after.downgraded.as_ref().is_some_and(|of| of.from == before.method)
        && after.method == Method::Snapshot;
    if !kept && !turned && !parted {
        breaches.push(Breach::Method);
    }
    // Where a human has to say how it ends, it has not ended.
    let undecided = matches!(before.phase, Phase::Failed { cleanup: Cleanup::Undecided, .. });
    if before.label().is_terminal() && !undecided && after.label() != before.label() {
        breaches.push(Breach::Resurrected);
    }
    let kept = new.flight == Flight::Held || !new.reserved.is_empty();
    let ended = matches!(after.label(), PhaseLabel::Done | PhaseLabel::Aborted);
    if kept && ended {
        breaches.push(Breach::Leak);
    }
    breaches
}

/// Applies a log to the row that it began with: what comes out is the row (invariant I8).
///
/// # Errors
///
/// Returns how many events were applied before one was refused, and how.
pub fn replay<'a>(
    first: &Migration,
    events: impl IntoIterator<Item = &'a Event>,
) -> Result<Migration, (usize, Refusal)> {
    let mut row = first.clone();
    for (at, event) in events.into_iter().enumerate() {
        row = row.apply(event).map_err(|refusal| (at, refusal))?;
    }
    Ok(row)
}
