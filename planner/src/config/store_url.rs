//! Where the store is, and what of that may be shown.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use sqlx::postgres::{PgConnectOptions, PgSslMode};

use super::{ConfigError, PlainText, invalid, is_loopback};

/// Names the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUrl {
    /// One SQLite file, used by this planner alone.
    Sqlite(PathBuf),
    /// A PostgreSQL database, which several planners may share.
    Postgres(PostgresUrl),
}

/// Names a PostgreSQL database. It may hold a password, so it is never printed as it is.
#[derive(Clone, PartialEq, Eq)]
pub struct PostgresUrl {
    secret: String,
    shown: String,
}

impl PostgresUrl {
    /// Returns the URL, with the password if there is one.
    pub(crate) fn secret(&self) -> &str {
        &self.secret
    }
}

impl fmt::Debug for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgresUrl({})", self.shown)
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "{}", path.display()),
            Self::Postgres(url) => f.write_str(&url.shown),
        }
    }
}

impl StoreUrl {
    /// Reads a URL of a PostgreSQL database that nobody else listens in on.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it, without showing it.
    pub fn postgres(url: &str) -> Result<Self, ConfigError> {
        postgres(url, PlainText::Loopback)
    }

    pub(super) fn parse(url: &str, plain_text: PlainText) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        match scheme {
            "sqlite" if !rest.is_empty() => {
                Ok(Self::Sqlite(PathBuf::from(rest.strip_prefix("//").unwrap_or(rest))))
            }
            "postgres" | "postgresql" => postgres(url, plain_text),
            _ => Err(invalid(
                "store.url",
                "is not a store; write \"sqlite:/path/planner.db\" or \"postgres://user@host/database\"",
            )),
        }
    }
}

fn postgres(url: &str, plain_text: PlainText) -> Result<StoreUrl, ConfigError> {
    let options: PgConnectOptions = url.parse().map_err(|error: sqlx::Error| {
        invalid("store.url", format!("is no URL of a PostgreSQL database: {error}"))
    })?;
    let Some(database) = options.get_database() else {
        return Err(invalid(
            "store.url",
            "names no database; write \"postgres://user@host/database\"",
        ));
    };
    let place = match options.get_socket() {
        Some(directory) => directory.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    let verified = match options.get_ssl_mode() {
        PgSslMode::VerifyFull => true,
        // Whoever has any certificate of the same authority could stand in between.
        PgSslMode::VerifyCa
        | PgSslMode::Disable
        | PgSslMode::Allow
        | PgSslMode::Prefer
        | PgSslMode::Require => false,
    };
    let on_this_machine = options.get_socket().is_some() || is_this_machine(options.get_host());
    if plain_text == PlainText::Loopback && !on_this_machine && !verified {
        return Err(invalid(
            "store.url",
            format!(
                "{place} is another machine, and traffic to it may not be unencrypted: add sslmode=verify-full, and sslrootcert=/path if the server's authority is your own"
            ),
        ));
    }
    let shown = format!("PostgreSQL database {database} at {place}");
    Ok(StoreUrl::Postgres(PostgresUrl { secret: url.to_owned(), shown }))
}

fn is_this_machine(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    // A directory stands for the socket in it.
    host == "localhost" || host.starts_with('/') || address.is_ok_and(is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str) -> String {
        StoreUrl::parse(url, PlainText::Loopback).unwrap_err().to_string()
    }

    #[test]
    fn a_password_is_never_shown() {
        let url = "postgres://ferry:hunter2@127.0.0.1:5433/fleet";
        let store = StoreUrl::parse(url, PlainText::Loopback).unwrap();
        let shown = format!("{store} {store:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("PostgreSQL database fleet at 127.0.0.1:5433"), "{shown}");
        for wrong in ["postgres://a:hunter2@h:x/fleet", "mysql://a:hunter2@h/x", "hunter2"] {
            let error = refused(wrong);
            assert!(error.contains("store.url") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_socket_is_a_place() {
        let url = "postgres:///vmferry?host=/run/postgresql&user=vmferry";
        let store = StoreUrl::parse(url, PlainText::Loopback).unwrap();
        assert_eq!(store.to_string(), "PostgreSQL database vmferry at /run/postgresql");
    }

    #[test]
    fn another_machine_is_reached_encrypted_or_not_at_all() {
        let url = "postgres://ferry@10.0.0.9/fleet";
        assert!(refused(url).contains("sslmode=verify-full"));
        assert!(StoreUrl::parse(url, PlainText::Namespace).is_ok());
        for half in ["require", "verify-ca"] {
            assert!(refused(&format!("{url}?sslmode={half}")).contains("sslmode=verify-full"));
        }
        let verified = format!("{url}?sslmode=verify-full");
        assert!(StoreUrl::parse(&verified, PlainText::Loopback).is_ok());
        assert!(StoreUrl::parse("postgres://f@[::1]/fleet", PlainText::Loopback).is_ok());
    }

    #[test]
    fn a_database_has_a_name() {
        assert!(refused("postgres://ferry@localhost").contains("names no database"));
    }
}
