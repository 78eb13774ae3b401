//! The planners of one case: one with a store of its own, or two that share a PostgreSQL.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cluster::Artifacts;
use crate::daemon::Daemon;
use crate::faults::Faults;
use crate::lab::{Lab, PLANNER_ADDRESSES};
use crate::pki::Pki;

/// Names the URL of a superuser of the server on which each case makes a database of its own.
const SERVER_VARIABLE: &str = "VMFERRY_TEST_POSTGRES";

/// Where the planners keep what they hold to be true, and thereby how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// One planner, in a file of its own.
    Sqlite,
    /// Two planners, in one database.
    Postgres,
}

impl Store {
    /// Each of them.
    pub const EACH: [Self; 2] = [Self::Sqlite, Self::Postgres];

    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }

    /// Returns the addresses of its planners.
    #[must_use]
    pub fn addresses(self) -> &'static [&'static str] {
        match self {
            Self::Sqlite => &PLANNER_ADDRESSES[..1],
            Self::Postgres => &PLANNER_ADDRESSES,
        }
    }
}

/// One planner process.
#[derive(Debug)]
pub struct Planner {
    /// The process.
    pub daemon: Daemon,
    /// Its fault points.
    pub faults: Faults,
    config: PathBuf,
}

impl Planner {
    /// Writes the configuration of the planner with this number.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be written.
    pub fn new(
        lab: &Lab,
        artifacts: &Artifacts,
        dir: &Path,
        (number, address): (usize, &str),
        (database, pki): (Option<&Database>, Option<&Pki>),
    ) -> Result<Self> {
        let own = if number == 0 { dir.join("pl") } else { dir.join(format!("pl{number}")) };
        let store = database
            .map(|database| format!("[store]\nurl = {:?}\n", database.url))
            .unwrap_or_default();
        let security = match pki {
            None => "[security]\nplain_text = \"namespace\"\n".to_owned(),
            Some(pki) => {
                let identity = pki.issue("planner", &format!("pl{number}"))?;
                format!("[tls]\ndir = {identity:?}\n")
            }
        };
        // A short lease and a short report interval: a case must not wait for them.
        let config = format!(
            "state_dir = \"{own}/s\"\n\
             [listen]\ngrpc = \"{address}:9096\"\nrest = \"{address}:9095\"\n\
             {store}\
             [policy]\nlease = \"2s\"\nqueue_retry = \"1s\"\nreport_max_age = \"10s\"\n\
             {security}{}",
            artifacts.fault_points.toml(&own.join("f")),
            own = own.display()
        );
        fs::create_dir_all(own.join("s")).context("create the planner's state directory")?;
        let faults = Faults::new(&own.join("f"))?;
        let path = own.join("planner.toml");
        fs::write(&path, config).with_context(|| format!("write {}", path.display()))?;
        let binary = artifacts.binaries.join("vmferry-planner");
        let name = if number == 0 { "planner".to_owned() } else { format!("planner-{number}") };
        let daemon = Daemon::new(&name, &lab.namespace("pl"), &binary, &path, &dir.join("log"));
        Ok(Self { daemon, faults, config: path })
    }

    /// Adds a table to its configuration, for its next start.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be written.
    pub fn configure(&self, table: &str) -> Result<()> {
        let mut file = File::options().append(true).open(&self.config).context("open its file")?;
        write!(file, "\n{table}").with_context(|| format!("write {}", self.config.display()))
    }
}

/// A database of one case's own. Dropping it removes it from the server.
#[derive(Debug)]
pub struct Database {
    server: String,
    name: String,
    url: String,
}

impl Database {
    /// Makes an empty one on the server that the environment names.
    ///
    /// # Errors
    ///
    /// Fails without a server, and says how to have one.
    pub fn create(dir: &Path) -> Result<Self> {
        let Ok(server) = std::env::var(SERVER_VARIABLE) else {
            bail!(
                "no PostgreSQL: run this with scripts/with-postgres, which sets {SERVER_VARIABLE}"
            );
        };
        // The directory's name is unique while the run lasts.
        let unique = dir.display().to_string().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let name = format!("e2e{unique}");
        let url = with_database(&server, &name)?;
        psql(&server, &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))?;
        psql(&server, &format!("CREATE DATABASE {name}"))?;
        Ok(Self { server, name, url })
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // A server that is gone has nothing left to remove.
        psql(&self.server, &format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name)).ok();
    }
}

/// Returns the URL of another database on the same server.
fn with_database(url: &str, name: &str) -> Result<String> {
    let (head, query) = match url.split_once('?') {
        Some((head, query)) => (head, format!("?{query}")),
        None => (url, String::new()),
    };
    let Some((scheme, rest)) = head.split_once("://") else {
        bail!("{SERVER_VARIABLE} is no URL: {url}");
    };
    let authority = rest.split('/').next().unwrap_or_default();
    Ok(format!("{scheme}://{authority}/{name}{query}"))
}

fn psql(server: &str, statement: &str) -> Result<()> {
    let output = Command::new("psql")
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server, "-c", statement])
        .output()
        .context("run psql (of postgresql-client)")?;
    if !output.status.success() {
        bail!("{statement}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_database_has_the_same_server() {
        let socket = with_database("postgres:///postgres?host=/tmp/x&user=postgres", "one");
        assert_eq!(socket.unwrap(), "postgres:///one?host=/tmp/x&user=postgres");
        let plain = with_database("postgres://me@localhost:5433", "one");
        assert_eq!(plain.unwrap(), "postgres://me@localhost:5433/one");
        assert!(with_database("nonsense", "one").is_err());
    }
}
