//! Who wrote what: no planner lands a write on a migration that another one has taken over.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::database::Database;

/// One write of a migration's row, as the database's own trigger noted it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) at_ms: i64,
    /// The start of a planner that made it; empty where nobody has to be told apart.
    pub(crate) writer: String,
    pub(crate) migration: String,
    pub(crate) phase_before: String,
    pub(crate) claim: (i64, i64),
    pub(crate) seq: (i64, i64),
    pub(crate) owner: (String, String),
    pub(crate) until_before: i64,
    /// The event behind a change of the seq.
    pub(crate) event: String,
}

/// How much the clocks of a planner and of the database may differ on one machine.
const CLOCK_SLACK_MS: i64 = 100;

/// Looks at every write that was made.
pub(super) async fn check(database: &Database) -> Result<Vec<String>> {
    Ok(wrong(&read(database).await?))
}

async fn read(database: &Database) -> Result<Vec<Write>> {
    let rows = database
        .rows(
            "SELECT CAST(w.at_ms AS TEXT), w.writer, w.migration, w.phase_before, \
             CAST(w.claim_before AS TEXT), CAST(w.claim AS TEXT), CAST(w.seq_before AS TEXT), \
             CAST(w.seq AS TEXT), w.owner_before, w.owner, CAST(w.until_before AS TEXT), \
             coalesce((SELECT l.event FROM migration_log l WHERE l.migration_id = w.migration \
                       AND l.seq = w.seq_before + 1 AND w.seq > w.seq_before), '') \
             FROM load_writes w ORDER BY w.number",
        )
        .await?;
    let number = |text: &String| text.parse::<i64>().unwrap_or(-1);
    let write = |row: &Vec<String>| match row.as_slice() {
        [
            at,
            writer,
            migration,
            phase,
            claim_before,
            claim,
            seq_before,
            seq,
            owner_before,
            owner,
            until,
            event,
        ] => Some(Write {
            at_ms: number(at),
            writer: writer.clone(),
            migration: migration.clone(),
            phase_before: phase.clone(),
            claim: (number(claim_before), number(claim)),
            seq: (number(seq_before), number(seq)),
            owner: (owner_before.clone(), owner.clone()),
            until_before: number(until),
            event: event.clone(),
        }),
        _ => None,
    };
    Ok(rows.iter().filter_map(write).collect())
}

/// Returns how often a migration went from one owner to another.
pub(crate) async fn take_overs(database: &Database) -> Result<usize> {
    let taken = |write: &&Write| {
        let (before, after) = &write.owner;
        write.claim.1 > write.claim.0 && !before.is_empty() && before != after
    };
    Ok(read(database).await?.iter().filter(taken).count())
}

/// Returns every write that should not have landed.
fn wrong(writes: &[Write]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut complain = |write: &Write, why: &str| wrong.push(format!("{why}: {write:?}"));
    // Which start of a planner goes by which owner's name.
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    for write in writes {
        let (before, after) = (write.owner.0.as_str(), write.owner.1.as_str());
        if write.claim.1 < write.claim.0 || write.seq.1 < write.seq.0 {
            complain(write, "a row went back");
        }
        if write.claim.1 > write.claim.0 {
            let known = names.entry(after).or_insert(&write.writer);
            if *known != write.writer {
                complain(write, "somebody takes over in the name of another");
            }
            let held = !before.is_empty() && before != after;
            if held && write.at_ms + CLOCK_SLACK_MS < write.until_before {
                complain(write, "a lease was taken over before it ended");
            }
        } else if write.seq.1 > write.seq.0 {
            // An operator's cancel and what becomes of the queue are anybody's to write.
            let anybody = write.event == "cancel_requested" || write.phase_before == "queued";
            let driver = names.get(before).copied();
            if !anybody && driver != Some(write.writer.as_str()) {
                complain(write, "a planner wrote a row that another one drives");
            }
        } else if before == after && names.get(before).is_some_and(|driver| *driver != write.writer)
        {
            complain(write, "a planner kept the lease of another");
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(writer: &str) -> Write {
        Write {
            at_ms: 10_000,
            writer: writer.to_owned(),
            migration: "m".to_owned(),
            phase_before: "admitted".to_owned(),
            claim: (1, 1),
            seq: (1, 1),
            owner: ("a".to_owned(), "a".to_owned()),
            until_before: 9_000,
            event: String::new(),
        }
    }

    fn take(writer: &str, owner: &str) -> Write {
        Write { claim: (1, 2), owner: ("a".to_owned(), owner.to_owned()), ..write(writer) }
    }

    fn step(writer: &str, owner: &str) -> Write {
        let owner = (owner.to_owned(), owner.to_owned());
        Write { seq: (1, 2), event: "source_stopped".to_owned(), owner, ..write(writer) }
    }

    #[test]
    fn a_driver_writes_what_it_took_over() {
        assert_eq!(wrong(&[take("two", "b"), step("two", "b")]), Vec::<String>::new());
    }

    #[test]
    fn a_write_of_who_lost_its_lease_is_found() {
        let found = wrong(&[take("one", "a"), take("two", "b"), step("one", "b")]);
        assert!(found[0].contains("another one drives"), "{found:?}");
        let cancel = Write { event: "cancel_requested".to_owned(), ..step("one", "b") };
        assert_eq!(wrong(&[take("two", "b"), cancel]), Vec::<String>::new());
    }

    #[test]
    fn a_lease_taken_over_too_early_is_found() {
        let early = Write { until_before: 10_500, ..take("two", "b") };
        assert!(wrong(&[early])[0].contains("before it ended"));
        let own = Write { until_before: 10_500, ..take("one", "a") };
        assert_eq!(wrong(&[own]), Vec::<String>::new());
    }
}
