//! A store that an older planner wrote opens, loses nothing, and strands no open row.

use std::collections::BTreeSet;

use sqlx::migrate::Migrator;
use sqlx::{AnyPool, Executor as _};
use tempfile::TempDir;
use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_planner_core::maintenance::PinsToSource;
use vmferry_planner_core::migration::{
    Event, GoneProof, Handover, Listener, Migration, Process, ProofKind, Ran, Receiver, SourceWord,
    Stood, Word,
};
use vmferry_types::{PhaseLabel, PowerState, Timestamp};

use crate::config::StoreUrl;
use crate::store::sql::SqlStore;
use crate::store::sql::open::{SCHEMA, schema};
use crate::store::{
    Commit, DeclarationKind, Ends, Filter, Grant, Granted, MigrationRow, OnlyOpen, PowerPhase,
    Room, Store, TakeOver, TakePower,
};

const ROWS: &str = include_str!("schema_0001.sql");
const NOW: Timestamp = Timestamp(5_000);
const NOW_US: u64 = 5_000_000;

/// Writes what schema 1 left behind into an empty database, as planners of the schemas after it, up to
/// the `version`th, found it and left it.
async fn written(url: &str, version: usize) {
    sqlx::any::install_default_drivers();
    let pool = AnyPool::connect(url).await.unwrap();
    Migrator::with_migrations(schema(&SCHEMA[..1])).run(&pool).await.unwrap();
    pool.execute(ROWS).await.unwrap();
    Migrator::with_migrations(schema(&SCHEMA[..version])).run(&pool).await.unwrap();
    pool.close().await;
}

/// Every schema before the one of this planner.
fn older() -> std::ops::Range<usize> {
    1..SCHEMA.len()
}

#[tokio::test]
async fn a_file_of_every_older_schema_is_driven_on() {
    for version in older() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("planner.db");
        written(&format!("sqlite://{}?mode=rwc", path.display()), version).await;
        let store = SqlStore::open(&StoreUrl::Sqlite(path)).await.unwrap();
        is_driven_on(&store).await;
    }
}

#[tokio::test]
async fn a_database_of_every_older_schema_is_driven_on() {
    for version in older() {
        let url = super::postgres::database().await;
        let StoreUrl::Postgres(postgres) = &url else { panic!("{url}") };
        written(postgres.secret(), version).await;
        let store = SqlStore::open(&url).await.unwrap();
        is_driven_on(&store).await;
    }
}

async fn is_driven_on(store: &dyn Store) {
    everything_is_there(store).await;
    for row in open(store).await {
        let TakeOver::Taken(taken) =
            store.take_over(row.migration.id, "me", NOW, NOW).await.unwrap()
        else {
            panic!("{row:#?}");
        };
        assert!(taken.claim > row.claim);
        // Nothing but an operator's word ends one that nobody can decide.
        if row.vm_name == "failed-undecided" {
            assert_eq!(taken.migration.label(), PhaseLabel::Failed);
            continue;
        }
        let ended = driven_to_its_end(store, *taken).await;
        let vm = store.vm(ended.migration.vm).await.unwrap().unwrap();
        assert_eq!(vm.admission, None, "{ended:#?}");
    }
    for action in store.open_power().await.unwrap() {
        let TakePower::Taken(taken) =
            store.take_over_power(action.id, "me", NOW, NOW).await.unwrap()
        else {
            panic!("{action:#?}");
        };
        let end = Ends {
            phase: PowerPhase::Done,
            power: PowerState::Stopped,
            error: String::new(),
            gone: None,
            resolved_machine: String::new(),
        };
        assert_eq!(store.end_power(&taken, &end, NOW_US).await.unwrap(), Commit::Done(()));
    }
    let undecided: BTreeSet<_> =
        open(store).await.into_iter().map(|row| row.migration.id).collect();
    assert_eq!(undecided.len(), 1);
    let held = store.reservations().await.unwrap();
    assert!(held.iter().all(|of| undecided.contains(&of.admission)), "{held:#?}");
}

async fn open(store: &dyn Store) -> Vec<MigrationRow> {
    store.migrations(&Filter { open: OnlyOpen::Open, ..Filter::default() }).await.unwrap()
}

async fn everything_is_there(store: &dyn Store) {
    let hosts = store.hosts().await.unwrap();
    assert_eq!(hosts.len(), 3);
    let dead = hosts[2].declared_dead.as_ref().unwrap();
    assert_eq!((dead.at, dead.kind), (Timestamp(8), DeclarationKind::Operator));
    assert!(dead.proves_gone("gone"));
    assert!(hosts[..2].iter().all(|host| host.declared_dead.is_none()));
    assert_eq!(store.cordons(NOW).await.unwrap().len(), 1);
    assert_eq!(store.vms().await.unwrap().len(), 22);
    let rows = store.migrations(&Filter::default()).await.unwrap();
    assert_eq!((rows.len(), open(store).await.len()), (20, 17));
    for row in &rows {
        assert_eq!(row.notes.pause_us, 7);
        assert_eq!(row.request, Some(format!("request-{}", row.vm_name)));
        let log = store.log(row.migration.id).await.unwrap();
        let [opened] = log.as_slice() else { panic!("{log:#?}") };
        // What replay begins from.
        let opened: Migration = serde_json::from_str(&opened.body).unwrap();
        let known = &row.migration;
        assert_eq!((opened.id, opened.vm, &opened.source), (known.id, known.vm, &known.source));
        assert_eq!((opened.label(), &opened.terms), (PhaseLabel::Queued, &known.terms));
    }
    let phases: BTreeSet<_> = rows.iter().map(|row| row.migration.label().label()).collect();
    assert_eq!(phases.len(), PhaseLabel::ALL.len());
    assert_eq!(store.open_power().await.unwrap().len(), 2);
    assert_eq!(store.reservations().await.unwrap().len(), 32);
}

fn proof(host: &str) -> GoneProof {
    GoneProof {
        kind: ProofKind::ExitRecord,
        host: host.parse().unwrap(),
        boot_id: "boot".to_owned(),
        pid: 100,
        start_time: 5,
        ended: "exit 0".to_owned(),
        at: NOW,
        stderr_tail: String::new(),
    }
}

/// What may happen next, in the order in which it does.
fn events() -> Vec<Event> {
    let word = |run_state| Word {
        process: Process { pid: 100, start_time: 5, boot_id: "boot".to_owned() },
        transfer: TransferState::Completed,
        run_state,
        at: NOW,
    };
    let handover = Handover {
        source: SourceWord::Completed(word(RunState::PostMigrate)),
        destination: word(RunState::Paused),
    };
    vec![
        Event::ReceiverArmed { listener: Listener::new("10.0.0.2".to_owned(), 49_152) },
        Event::SourceStopped,
        Event::SwitchoverAllowed,
        Event::BothComplete { proof: handover.clone() },
        Event::CommitAllowed,
        Event::DestinationRuns,
        Event::SourceReleased { proof: proof("a") },
        Event::SourceContinued,
        Event::SourceGaveUp { error: "cancelled".to_owned(), stood: Stood::No },
        Event::ReceiverGone { proof: proof("b"), ran: Ran::Never },
        Event::SourceGone { proof: proof("a"), receiver: Receiver::Complete(handover) },
    ]
}

async fn driven_to_its_end(store: &dyn Store, mut row: MigrationRow) -> MigrationRow {
    if row.migration.label() == PhaseLabel::Queued {
        let grant = Grant {
            destination: "b".parse().unwrap(),
            room: Room::new(|_| Ok(())),
            inbound_max: 99,
            pins: PinsToSource::Hold,
        };
        let Granted::Done(granted) = store.grant(&row, &grant, NOW_US).await.unwrap() else {
            panic!("{row:#?}");
        };
        row = *granted;
    }
    while row.ended_us.is_none() {
        let next = events().into_iter().find(|event| row.migration.apply(event).is_ok());
        let Some(next) = next else { panic!("stranded: {row:#?}") };
        let entries = row.migration.advance(next).unwrap();
        let Commit::Done(after) = store.commit(&row, &entries, &row.notes, NOW_US).await.unwrap()
        else {
            panic!("raced: {row:#?}");
        };
        row = *after;
    }
    row
}
