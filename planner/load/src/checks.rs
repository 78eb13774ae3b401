//! What has to be true at the end, of the store and of what planners show.

mod writes;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use vmferry_planner_core::migration::{Event, Migration};

use crate::caller::{Door, list};
use crate::database::Database;
use crate::fleet::Fleet;

pub(crate) use writes::take_overs;

/// Holds everything against everything; returns what is wrong.
///
/// # Errors
///
/// Fails if the store or a planner does not answer.
pub async fn all(
    fleet: &Fleet,
    database: &Database,
    doors: &[Door],
    ids: &[String],
) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    wrong.extend(ends(database, ids).await?);
    wrong.extend(reservations(database).await?);
    wrong.extend(owners(fleet, database).await?);
    wrong.extend(logs(database).await?);
    wrong.extend(writes::check(database).await?);
    for row in database.rows("SELECT what FROM load_backwards").await? {
        wrong.push(format!("a counter went back: {}", row.join("")));
    }
    for door in doors {
        match shown(fleet, *door).await {
            Ok(found) => wrong.extend(found),
            Err(error) => wrong.push(format!("{} does not answer: {error:#}", door.rest)),
        }
    }
    Ok(wrong)
}

/// Every migration has ended, each one that was accepted is there, and none failed: no QEMU died.
async fn ends(database: &Database, ids: &[String]) -> Result<Vec<String>> {
    let rows = database
        .rows(
            "SELECT id, vm_name, phase, CASE WHEN ended_us IS NULL THEN 'open' ELSE '' END, record \
             FROM migrations",
        )
        .await?;
    let mut wrong = Vec::new();
    let mut known = BTreeSet::new();
    for row in &rows {
        let [id, vm, phase, open, record] = row.as_slice() else { continue };
        known.insert(id.as_str());
        if !open.is_empty() {
            wrong.push(format!("migration {id} of {vm} has not ended: {record}"));
        } else if phase == "failed" {
            wrong.push(format!("migration {id} of {vm} failed, and no QEMU died: {record}"));
        }
    }
    for id in ids.iter().filter(|id| !known.contains(id.as_str())) {
        wrong.push(format!("migration {id} was accepted and is not in the store"));
    }
    Ok(wrong)
}

/// No reservation is open, and no VM is given to an admission.
async fn reservations(database: &Database) -> Result<Vec<String>> {
    let open = database
        .rows("SELECT admission, host, vm_id FROM reservations WHERE closed_ms IS NULL")
        .await?;
    let given =
        database.rows("SELECT name, admission, power FROM vms WHERE admission IS NOT NULL").await?;
    let open = open.iter().map(|row| format!("a reservation is open: {}", row.join(" ")));
    let given = given.iter().map(|row| format!("a VM is still given away: {}", row.join(" ")));
    Ok(open.chain(given).collect())
}

/// Each VM runs, once, on the host and under the generation that the store says.
async fn owners(fleet: &Fleet, database: &Database) -> Result<Vec<String>> {
    let rows = database
        .rows("SELECT id, name, coalesce(host, ''), power, CAST(generation AS TEXT) FROM vms")
        .await?;
    let (running, generations) = (fleet.running(), fleet.generations());
    let mut stored: BTreeMap<&str, &[String]> = BTreeMap::new();
    for row in &rows {
        if let Some((id, rest)) = row.split_first() {
            stored.insert(id, rest);
        }
    }
    let mut wrong = Vec::new();
    for (vm, name) in fleet.vms() {
        let Some([_, host, power, generation]) = stored.get(vm.to_string().as_str()) else {
            wrong.push(format!("{name} is not in the store"));
            continue;
        };
        let runs = running.get(&vm).map(ToString::to_string).unwrap_or_default();
        let known = generations.get(&vm).map(ToString::to_string).unwrap_or_default();
        if *host != runs || power != "running" || *generation != known {
            wrong.push(format!(
                "the store has {name} {power} on `{host}` under generation {generation}; it runs on `{runs}` under {known}\n{}",
                fleet.history(vm)
            ));
        }
    }
    Ok(wrong)
}

/// The log of each migration has no gap and replays to the row.
async fn logs(database: &Database) -> Result<Vec<String>> {
    let rows = database.rows("SELECT id, CAST(seq AS TEXT), phase, record FROM migrations").await?;
    let entries = database
        .rows(
            "SELECT migration_id, CAST(seq AS TEXT), event, phase, body FROM migration_log \
             ORDER BY migration_log.migration_id, migration_log.seq",
        )
        .await?;
    let mut logs: BTreeMap<&str, Vec<&[String]>> = BTreeMap::new();
    for entry in &entries {
        if let Some((id, rest)) = entry.split_first() {
            logs.entry(id).or_default().push(rest);
        }
    }
    let mut wrong = Vec::new();
    for row in &rows {
        let [id, seq, _, record] = row.as_slice() else { continue };
        let log = logs.get(id.as_str()).map(Vec::as_slice).unwrap_or_default();
        if let Err(why) = replays(log, seq, record) {
            wrong.push(format!("the log of migration {id} does not lead to its row: {why}"));
        }
    }
    Ok(wrong)
}

#[derive(serde::Deserialize)]
struct Record {
    migration: Migration,
}

fn replays(log: &[&[String]], seq: &str, record: &str) -> Result<(), String> {
    let row: Record = serde_json::from_str(record).map_err(|error| error.to_string())?;
    let mut migration: Option<Migration> = None;
    for (at, entry) in log.iter().enumerate() {
        let [number, event, phase, body] = entry else { return Err("a column is missing".into()) };
        if *number != (at + 1).to_string() {
            return Err(format!("entry {} has seq {number}", at + 1));
        }
        let unreadable = |error: serde_json::Error| format!("{event}: {error}");
        let next = match &migration {
            None => serde_json::from_str::<Migration>(body).map_err(unreadable)?,
            Some(before) => {
                let happened: Event = serde_json::from_str(body).map_err(unreadable)?;
                before.apply(&happened).map_err(|error| format!("{event}: {error}"))?
            }
        };
        if next.label().label() != phase {
            return Err(format!("{event} leads to {}, not {phase}", next.label().label()));
        }
        migration = Some(next);
    }
    if log.len().to_string() != seq {
        return Err(format!("the row has seq {seq}, the log {} entries", log.len()));
    }
    if migration.as_ref() == Some(&row.migration) {
        Ok(())
    } else {
        Err("it ends elsewhere".into())
    }
}

/// Returns what one planner shows that is not so.
///
/// # Errors
///
/// Fails if it does not answer.
pub async fn shown(fleet: &Fleet, door: Door) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let open = list(door, "/api/migrations?open=true", "migrations").await?;
    if !open.is_empty() {
        wrong.push(format!("{} shows {} open migrations", door.rest, open.len()));
    }
    for host in list(door, "/api/hosts", "hosts").await? {
        let reserved = host["reserved_memory_bytes"].as_u64();
        if reserved != Some(0) || host["status"] != "connected" {
            wrong.push(format!(
                "{} shows host {} {} with {reserved:?} bytes reserved",
                door.rest, host["id"], host["status"]
            ));
        }
    }
    let running = fleet.running();
    let mut shown: BTreeMap<String, String> = BTreeMap::new();
    for vm in list(door, "/api/vms", "vms").await? {
        let text = |field: &str| vm[field].as_str().unwrap_or_default().to_owned();
        shown.insert(text("id"), text("host"));
    }
    for (vm, name) in fleet.vms() {
        let host = running.get(&vm).map(ToString::to_string);
        if host.as_ref() != shown.get(&vm.to_string()) {
            wrong.push(format!(
                "{} shows {name} on {:?}, it runs on {host:?}",
                door.rest,
                shown.get(&vm.to_string())
            ));
        }
    }
    Ok(wrong)
}
