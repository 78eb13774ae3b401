//! Opening a store, and bringing its schema up to date.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use sqlx::migrate::{MigrateError, Migration as SchemaMigration, MigrationType, Migrator};
use sqlx::{AnyPool, Connection as _, Executor as _, SqlSafeStr as _};

use super::marks::Marks;
use super::{Engine, SqlStore};
use crate::config::{PostgresUrl, StoreUrl};
use crate::store::StoreError;

/// Readers of a file beside the one writer.
const READERS: u32 = 4;
/// Connections of one planner to PostgreSQL.
const CONNECTIONS: u32 = 10;
/// How long a call waits for a connection.
const ACQUIRE: Duration = Duration::from_secs(5);

/// Of a connection to a file. With one writer only the checkpoint is ever waited for.
const SQLITE_SESSION: &str = "PRAGMA busy_timeout = 5000; PRAGMA foreign_keys = ON;
     PRAGMA synchronous = FULL";
/// Of the connection that writes.
const SQLITE_WRITER: &str = "PRAGMA journal_mode = WAL";
/// Of a connection to PostgreSQL. A planner that was cut off in the middle of a transaction must
/// not hold its rows until the network notices; a commit is on disk when it returns.
const POSTGRES_SESSION: &str = "SET lock_timeout = '5s'; SET statement_timeout = '8s';
     SET idle_in_transaction_session_timeout = '8s';
     SELECT set_config('synchronous_commit', 'on', false)
     WHERE current_setting('synchronous_commit') = 'off'";

/// Schema migrations, numbered and forward only.
pub(super) const SCHEMA: &[(i64, &str, &str)] = &[
    (1, "fleet and migrations", include_str!("../../../migrations/0001_fleet_and_migrations.sql")),
    (
        2,
        "declarations and tombstones",
        include_str!("../../../migrations/0002_declarations_and_tombstones.sql"),
    ),
    (3, "who heard a host", include_str!("../../../migrations/0003_who_heard_a_host.sql")),
    (4, "trouble", include_str!("../../../migrations/0004_trouble.sql")),
    (5, "emptying and queue", include_str!("../../../migrations/0005_emptying_and_queue.sql")),
];

/// A connection that was idle for longer is asked whether it still lives before it is used: the
/// question costs a round trip, and under load each admission would ask it half a dozen times.
const TRUSTED: Duration = Duration::from_secs(1);

impl SqlStore {
    /// Opens the store that a configuration names, creates its tables if there are none, and brings
    /// its schema up to date.
    ///
    /// # Errors
    ///
    /// Fails if another planner holds the file, if a newer planner wrote it, or if it cannot be used.
    pub async fn open(url: &StoreUrl) -> Result<Self, StoreError> {
        sqlx::any::install_default_drivers();
        match url {
            StoreUrl::Sqlite(path) => Self::open_sqlite(url, path).await,
            StoreUrl::Postgres(postgres) => Self::open_postgres(url, postgres).await,
        }
    }

    async fn open_sqlite(url: &StoreUrl, path: &Path) -> Result<Self, StoreError> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|source| failed(url, source))?;
        }
        let lock = lock(url, path)?;
        let pool = |connections, session: &'static [&'static str]| {
            // What is in a file does not go away while it is open.
            AnyPoolOptions::new()
                .max_connections(connections)
                .test_before_acquire(false)
                .after_connect(move |connection, _| {
                    Box::pin(async move {
                        for statement in session {
                            connection.execute(*statement).await?;
                        }
                        Ok(())
                    })
                })
        };
        let writer = pool(1, &[SQLITE_SESSION, SQLITE_WRITER])
            .connect_with(options(url, &sqlite_url(path, "rwc"))?)
            .await
            .map_err(|source| failed(url, source))?;
        migrate(url, &writer).await?;
        let readers = pool(READERS, &[SQLITE_SESSION])
            .connect_with(options(url, &sqlite_url(path, "ro"))?)
            .await
            .map_err(|source| failed(url, source))?;
        Ok(Self {
            engine: Engine::Sqlite,
            writer,
            readers,
            marks: Marks::default(),
            _lock: Some(lock),
        })
    }

    async fn open_postgres(url: &StoreUrl, postgres: &PostgresUrl) -> Result<Self, StoreError> {
        let writer = AnyPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(ACQUIRE)
            .test_before_acquire(false)
            .before_acquire(|connection, used| {
                Box::pin(async move {
                    if used.idle_for > TRUSTED {
                        connection.ping().await?;
                    }
                    Ok(true)
                })
            })
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute(POSTGRES_SESSION).await.map(|_| ()) })
            })
            .connect_with(options(url, postgres.secret())?)
            .await
            .map_err(|source| failed(url, source))?;
        migrate(url, &writer).await?;
        Ok(Self {
            engine: Engine::Postgres,
            readers: writer.clone(),
            writer,
            marks: Marks::default(),
            _lock: None,
        })
    }
}

fn failed(url: &StoreUrl, source: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::Open { store: url.to_string(), source: Box::new(source) }
}

fn options(url: &StoreUrl, text: &str) -> Result<AnyConnectOptions, StoreError> {
    text.parse().map_err(|source: sqlx::Error| failed(url, source))
}

/// Writes a path as a URL, whatever characters are in it.
fn sqlite_url(path: &Path, mode: &str) -> String {
    use std::fmt::Write as _;

    let mut url = "sqlite://".to_owned();
    for byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-".contains(byte) {
            url.push(char::from(*byte));
        } else {
            // Writing to a string does not fail.
            write!(url, "%{byte:02X}").unwrap_or_default();
        }
    }
    url.push_str("?mode=");
    url.push_str(mode);
    url
}

fn lock(url: &StoreUrl, path: &Path) -> Result<File, StoreError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(PathBuf::from(name))
        .map_err(|source| failed(url, source))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => Err(failed(url, source)),
    }
}

/// Returns schema migrations in the form that they are run in.
pub(super) fn schema(migrations: &'static [(i64, &str, &str)]) -> Vec<SchemaMigration> {
    let each = migrations.iter().map(|(version, name, sql)| {
        let (name, sql) = ((*name).into(), (*sql).into_sql_str());
        SchemaMigration::new(*version, name, MigrationType::Simple, sql, false)
    });
    each.collect()
}

/// Brings the schema up to date. On PostgreSQL one planner does at a time, and the others wait.
async fn migrate(url: &StoreUrl, writer: &AnyPool) -> Result<(), StoreError> {
    match Migrator::with_migrations(schema(SCHEMA)).run(writer).await {
        Ok(()) => Ok(()),
        Err(MigrateError::VersionMissing(version)) => Err(StoreError::Newer {
            store: url.to_string(),
            version,
            known: SCHEMA.iter().map(|(version, ..)| *version).max().unwrap_or_default(),
        }),
        Err(source) => Err(StoreError::Schema { store: url.to_string(), source }),
    }
}
