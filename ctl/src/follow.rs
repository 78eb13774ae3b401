//! Follows a migration to its end, over restarts of the planner.

use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::StreamExt as _;
use vmferry_proto::v1::Migration;
use vmferry_types::PhaseLabel;

use crate::client::Client;
use crate::failure::Failure;
use crate::render::quantity::{duration, millis, quoted_or};

/// How long to leave a planner alone that does not answer. It is restarted within seconds.
const RETRY: Duration = Duration::from_millis(500);

/// Where a followed migration stood when following ended.
#[derive(Debug)]
pub(crate) enum Followed {
    /// In a phase that is the last.
    Ended(Box<Migration>),
    /// Still under way when the wait was over.
    TimedOut { last: Option<Box<Migration>>, waited: Duration },
}

/// What a follower is told.
#[derive(Debug)]
pub(crate) enum Update<'a> {
    /// The migration as it is now.
    State(&'a Migration),
    /// The planner does not answer; following goes on.
    Lost(&'a Failure),
}

/// What is followed.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) id: &'a str,
    /// Its state, where the planner has shown it already: it is known to be there then, and a
    /// planner that does not answer is waited for from the start.
    pub(crate) seen: Option<Migration>,
}

/// Calls `show` with each state of a migration until it ends or `wait` is over.
///
/// # Errors
///
/// Fails where the planner refuses to show it, or does not answer and never did.
pub(crate) async fn follow(
    client: &Client,
    subject: Subject<'_>,
    wait: Option<Duration>,
    show: &mut impl FnMut(Update<'_>),
) -> Result<Followed, Failure> {
    let waited = wait.unwrap_or(Duration::MAX);
    let deadline = wait.and_then(|wait| Instant::now().checked_add(wait));
    let mut last = subject.seen.map(Box::new);
    loop {
        let watching = watch(client, subject.id, &mut last, show);
        let ended = match deadline {
            None => watching.await,
            Some(deadline) => match timeout_at(deadline, watching).await {
                Ok(ended) => ended,
                Err(_over) => return Ok(Followed::TimedOut { last, waited }),
            },
        };
        match ended {
            Ok(Some(migration)) => return Ok(Followed::Ended(migration)),
            Ok(None) => {}
            Err(failure @ Failure::Unreachable { .. }) if last.is_some() => {
                show(Update::Lost(&failure));
            }
            Err(failure) => return Err(failure),
        }
        sleep(RETRY).await;
    }
}

/// Reads one stream; `None` if it ended before the migration did.
async fn watch(
    client: &Client,
    id: &str,
    last: &mut Option<Box<Migration>>,
    show: &mut impl FnMut(Update<'_>),
) -> Result<Option<Box<Migration>>, Failure> {
    let mut states = client.watch_migration(id).await?;
    while let Some(state) = states.next().await {
        let state =
            state.map_err(|status| client.failure(&format!("watch migration {id}"), &status))?;
        show(Update::State(&state));
        if is_over(&state) {
            return Ok(Some(Box::new(state)));
        }
        *last = Some(Box::new(state));
    }
    Ok(None)
}

/// Says whether nothing more happens to a migration.
pub(crate) fn is_over(migration: &Migration) -> bool {
    PhaseLabel::from_label(&migration.phase).is_some_and(PhaseLabel::is_terminal)
}

/// Turns how a wait for a migration ended into the command's end.
///
/// # Errors
///
/// Fails unless the guest is on the destination.
pub(crate) fn verdict(operation: &str, followed: &Followed) -> Result<(), Failure> {
    let operation = operation.to_owned();
    match followed {
        Followed::TimedOut { last, waited } => Err(timed_out(operation, last.as_deref(), *waited)),
        Followed::Ended(migration) => {
            let cause = quoted_or(&migration.error, "no cause was recorded");
            match PhaseLabel::from_label(&migration.phase) {
                Some(PhaseLabel::Done) => Ok(()),
                Some(PhaseLabel::Aborted) if never_left_the_queue(migration) => {
                    Err(Failure::Blocked { operation, problem: cause })
                }
                Some(PhaseLabel::Aborted) => Err(Failure::RolledBack { operation, cause }),
                Some(
                    PhaseLabel::Failed
                    | PhaseLabel::Queued
                    | PhaseLabel::Admitted
                    | PhaseLabel::Captured
                    | PhaseLabel::Restored
                    | PhaseLabel::Committed
                    | PhaseLabel::Attached
                    | PhaseLabel::RollingBack,
                )
                | None => {
                    let advice = format!("see `vmferry migration show {}`", migration.id);
                    Err(Failure::NeedsHuman { operation, cause, advice })
                }
            }
        }
    }
}

fn timed_out(operation: String, last: Option<&Migration>, waited: Duration) -> Failure {
    let (standing, advice) = match last {
        None => {
            ("no state of it was seen".to_owned(), "see `vmferry migration list --open`".into())
        }
        Some(migration) => (
            standing(migration),
            format!("follow it with `vmferry migration watch {}`", migration.id),
        ),
    };
    Failure::WaitTimedOut { operation, waited: duration(waited), standing, advice }
}

/// Says in one line where a migration is, and what holds it.
fn standing(migration: &Migration) -> String {
    match &migration.stuck {
        Some(stuck) => format!(
            "{}, stuck for {} with {:?}, waits for {}",
            migration.phase,
            millis(stuck.age_ms),
            stuck.cause,
            stuck.waits_for
        ),
        None if migration.capacity_note.is_empty() => migration.phase.clone(),
        None => format!("{}: {}", migration.phase, migration.capacity_note),
    }
}

/// Says whether a migration ended before anything was reserved or touched.
fn never_left_the_queue(migration: &Migration) -> bool {
    !migration.cancel_requested
        && !migration.phases.is_empty()
        && migration.phases.iter().all(|time| {
            matches!(
                PhaseLabel::from_label(&time.phase),
                Some(PhaseLabel::Queued | PhaseLabel::Aborted)
            )
        })
}
