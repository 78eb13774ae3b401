//! The transition table: each phase answers each event. No pair is left to a wildcard, so a new
//! event does not compile until every phase has answered it.
//!
//! The table as a reviewer reads it is printed by the test `the_table_is_as_reviewed`.

mod back;
mod cold;
mod converge;
mod divided;
mod end;
mod forward;
mod gates;
mod held;
mod recall;

use vmferry_types::HostId;

use super::{Back, Event, Migration, Phase, Refusal, SourceWord, Stage, Switchover};

/// Returns the phase after `event`.
pub(super) fn next(migration: &Migration, event: &Event) -> Result<Phase, Refusal> {
    let at = At { migration, event };
    if let Event::Overtaken { host, known } = event {
        return end::overtaken(at, host, *known);
    }
    if let Some(next) = divided::next(at).or_else(|| gates::next(at)).or_else(|| converge::next(at))
    {
        return next;
    }
    if let Some(next) = cold::next(at) {
        return next;
    }
    match &migration.phase {
        Phase::Queued { blocked, deadline } => forward::queued(at, blocked.as_ref(), *deadline),
        Phase::Admitted { destination, stage: Stage::Arming } => forward::arming(at, destination),
        Phase::Admitted { destination, stage: Stage::Waiting { .. } } => {
            forward::waiting(at, destination)
        }
        Phase::Admitted {
            destination,
            stage: Stage::Transferring { .. } | Stage::Parting { .. },
        } => forward::transferring(at, destination),
        Phase::Admitted { destination, stage: Stage::Recalling { cause } } => {
            recall::recalling(at, destination, cause)
        }
        Phase::Admitted { destination, stage: Stage::Clearing { .. } } => {
            recall::clearing(at, destination)
        }
        Phase::Admitted { destination, stage: Stage::Holding { listener } } => {
            held::holding(at, destination, listener)
        }
        Phase::Admitted { destination, stage: Stage::ShuttingDown } => {
            cold::shutting_down(at, destination)
        }
        Phase::Captured { destination, switchover } => captured(at, destination, switchover),
        Phase::Restored { destination, proof } => match &proof.source {
            SourceWord::Completed(_) => forward::restored(at, destination, proof),
            SourceWord::Gone(_) => forward::restored_alone(at, destination, proof),
            SourceWord::Serves(_) => divided::restored(at, destination, proof),
            SourceWord::ShutDown(_) => cold::restored(at, destination, proof),
        },
        Phase::Committed { destination, proof, generation } => {
            end::committed(at, destination, proof, *generation)
        }
        Phase::Attached { destination, proof, generation, guest } => {
            let owned = end::Owned { destination, proof, generation: *generation, guest: *guest };
            end::attached(at, owned)
        }
        Phase::RollingBack { destination, generation, cause, back } => {
            let going = back::Going { destination, generation: *generation, cause };
            match back {
                Back::Cancelling => back::cancelling(at, going),
                Back::Clearing => back::clearing(at, going),
                Back::Undoing => back::undoing(at, going),
                Back::Resuming { .. } => back::resuming(at, going),
                Back::PoweredOff => back::powered_off(at, going),
            }
        }
        Phase::Done { .. } => end::done(event),
        Phase::Aborted { .. } => end::aborted(event),
        Phase::Failed { cleanup, .. } => end::failed(at, *cleanup),
    }
}

fn captured(at: At<'_>, destination: &HostId, switchover: &Switchover) -> Result<Phase, Refusal> {
    match switchover {
        Switchover::Down { .. } => cold::down(at, destination),
        Switchover::Held { .. } => held::held(at, destination),
        Switchover::Withheld => forward::withheld(at, destination),
        Switchover::Ordered => forward::ordered(at, destination),
        Switchover::Forward => forward::decided_forward(at, destination),
    }
}

/// The row and what happened to it.
#[derive(Clone, Copy)]
struct At<'a> {
    migration: &'a Migration,
    event: &'a Event,
}
