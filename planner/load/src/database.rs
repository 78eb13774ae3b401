//! The planners' store, looked at from beside: what its tables say, and who wrote what when.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Row as _};
use uuid::Uuid;

/// The variable that names a PostgreSQL server, for tests.
pub const SERVER: &str = "VMFERRY_TEST_POSTGRES";

/// Which store the planners use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file, one planner.
    Sqlite,
    /// A database of its own on the server that the environment names, several planners.
    Postgres,
}

impl Kind {
    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }
}

/// The store of one trial.
#[derive(Debug)]
pub struct Database {
    url: String,
    server: Server,
}

#[derive(Debug)]
enum Server {
    Sqlite(PathBuf),
    Postgres { admin: PgPool, name: String, pool: PgPool },
}

/// Rows of text.
pub type Rows = Vec<Vec<String>>;

impl Database {
    /// Makes an empty store.
    ///
    /// # Errors
    ///
    /// Fails if there is no server.
    pub async fn create(kind: Kind, dir: &Path) -> Result<Self> {
        match kind {
            Kind::Sqlite => {
                let path = dir.join("planner.db");
                Ok(Self { url: format!("sqlite:{}", path.display()), server: Server::Sqlite(path) })
            }
            Kind::Postgres => Self::create_on_server().await,
        }
    }

    async fn create_on_server() -> Result<Self> {
        let server = std::env::var(SERVER).with_context(|| {
            format!("{SERVER} names no PostgreSQL server; run this below scripts/with-postgres")
        })?;
        let options: PgConnectOptions =
            server.parse().with_context(|| format!("read {SERVER} ({server})"))?;
        let options = options.application_name("vmferry-load");
        let name = format!("vmferry_load_{}", Uuid::new_v4().simple());
        let few = || PgPoolOptions::new().max_connections(2);
        let admin = few().connect_with(options.clone()).await.context("reach PostgreSQL")?;
        run(&admin, &format!("CREATE DATABASE {name}")).await?;
        let own = options.database(&name);
        // Planners have names of their own, from their environment.
        let url = own.to_url_lossy();
        let pairs: Vec<(String, String)> = url
            .query_pairs()
            .filter(|(key, _)| key != "application_name")
            .map(|(key, value)| (key.into_owned(), value.into_owned()))
            .collect();
        let mut bare = url.clone();
        bare.query_pairs_mut().clear().extend_pairs(pairs);
        let pool = few().connect_lazy_with(own);
        Ok(Self { url: bare.to_string(), server: Server::Postgres { admin, name, pool } })
    }

    /// Returns what planners are told.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Reads rows; every column has to be text.
    ///
    /// # Errors
    ///
    /// Fails if the database does.
    pub async fn rows(&self, query: &str) -> Result<Rows> {
        match &self.server {
            Server::Sqlite(path) => {
                let pool = sqlite(path).await?;
                let rows = sqlx::query(AssertSqlSafe(query)).fetch_all(&pool).await;
                pool.close().await;
                let rows = rows.with_context(|| query.to_owned())?;
                let text = |row: &sqlx::sqlite::SqliteRow| {
                    (0..row.len()).map(|at| row.try_get::<String, _>(at)).collect()
                };
                rows.iter().map(text).collect::<Result<_, _>>().with_context(|| query.to_owned())
            }
            Server::Postgres { pool, .. } => {
                let rows = sqlx::query(AssertSqlSafe(query)).fetch_all(pool).await;
                let rows = rows.with_context(|| query.to_owned())?;
                let text = |row: &sqlx::postgres::PgRow| {
                    (0..row.len()).map(|at| row.try_get::<String, _>(at)).collect()
                };
                rows.iter().map(text).collect::<Result<_, _>>().with_context(|| query.to_owned())
            }
        }
    }

    /// Makes the database note who writes a migration, by triggers that no planner knows of.
    ///
    /// # Errors
    ///
    /// Fails if the tables are not there yet.
    pub async fn watch_writes(&self) -> Result<()> {
        match &self.server {
            Server::Sqlite(path) => {
                let pool = sqlite(path).await?;
                let done = sqlx::raw_sql(include_str!("database/sqlite.sql")).execute(&pool).await;
                pool.close().await;
                done.context("watch the tables")?;
            }
            Server::Postgres { pool, .. } => {
                sqlx::raw_sql(include_str!("database/postgres.sql"))
                    .execute(pool)
                    .await
                    .context("watch the tables")?;
            }
        }
        Ok(())
    }

    /// Writes VMs that run, so many on each of the hosts `host-00000` and on.
    ///
    /// # Errors
    ///
    /// Fails if the tables are not there yet.
    pub async fn fill_vms(&self, hosts: u32, vms_per_host: u32) -> Result<()> {
        let last = u64::from(hosts) * u64::from(vms_per_host);
        let columns = "INSERT INTO vms (id, name, host, power, generation, claim, error, definition, \
                       resolved_machine, memory_bytes, cpu_milli, updated_ms)";
        let values = "'running', 1, 1, '', 'as reported', 'pc-q35-10.0', 4294967296, 2000, 0";
        match &self.server {
            Server::Sqlite(path) => {
                let pool = sqlite(path).await?;
                let done = sqlx::raw_sql(AssertSqlSafe(format!(
                    "{columns} WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE \
                     i + 1 < {last}) SELECT '00000000-0000-4000-8000-' || printf('%012x', i), \
                     'vm-' || i, 'host-' || printf('%05d', i / {vms_per_host}), {values} FROM n"
                )))
                .execute(&pool)
                .await;
                pool.close().await;
                done.context("write VMs")?;
            }
            Server::Postgres { pool, .. } => {
                let text = format!(
                    "{columns} SELECT '00000000-0000-4000-8000-' || lpad(to_hex(i), 12, '0'), \
                     'vm-' || i, 'host-' || lpad((i / {vms_per_host})::text, 5, '0'), {values} \
                     FROM generate_series(0, {last} - 1) i; ANALYZE vms"
                );
                run(pool, &text).await?;
            }
        }
        Ok(())
    }

    /// Removes the store.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be removed.
    pub async fn remove(self) -> Result<()> {
        match self.server {
            Server::Sqlite(_) => Ok(()),
            Server::Postgres { admin, name, pool } => {
                pool.close().await;
                let dropped = run(&admin, &format!("DROP DATABASE {name} WITH (FORCE)")).await;
                admin.close().await;
                dropped
            }
        }
    }
}

async fn run(pool: &PgPool, statement: &str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(statement))
        .execute(pool)
        .await
        .map(drop)
        .with_context(|| statement.to_owned())
}

async fn sqlite(path: &Path) -> Result<SqlitePool> {
    if !path.exists() {
        bail!("{} is not there yet", path.display());
    }
    let options = SqliteConnectOptions::new().filename(path);
    let options = options.busy_timeout(std::time::Duration::from_secs(10));
    SqlitePoolOptions::new()
        .max_connections(1)
        .connect_with(options)
        .await
        .context("open the store")
}
