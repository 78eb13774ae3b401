//! Where the planner is and who asks: the flags, else the environment, else the config file, else
//! this machine.

use serde::Deserialize;
use std::io;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Where the config file is unless `--config` says otherwise.
pub(crate) const DEFAULT_PATH: &str = "/etc/vmferry/ctl.toml";

/// Names the directory of the caller's certificate.
const TLS_DIR_VARIABLE: &str = "VMFERRY_TLS_DIR";

/// The planner's gRPC port on this machine, without a certificate and with one.
const DEFAULT_PLANNER: &str = "http://127.0.0.1:9096";
const DEFAULT_PLANNER_TLS: &str = "https://127.0.0.1:9096";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    planner: Option<String>,
    tls_dir: Option<PathBuf>,
}

/// What the command line says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Given {
    pub(crate) planner: Option<String>,
    pub(crate) tls_dir: Option<PathBuf>,
}

/// Whom to ask, and as whom.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The planner's address.
    pub(crate) planner: String,
    /// Where the caller's certificate is.
    pub(crate) tls_dir: Option<PathBuf>,
}

/// Returns what counts.
///
/// # Errors
///
/// Fails where the config file is there and cannot be read. An absent one is an empty one.
pub(crate) fn settings(given: Given, path: &Path) -> Result<Settings, Failure> {
    let environment = std::env::var_os(TLS_DIR_VARIABLE).filter(|dir| !dir.is_empty());
    read(given, environment.map(PathBuf::from), path)
}

fn read(given: Given, environment: Option<PathBuf>, path: &Path) -> Result<Settings, Failure> {
    let file = if given.planner.is_some() && given.tls_dir.is_some() {
        Config::default()
    } else {
        load(path)?
    };
    let tls_dir = given.tls_dir.or(environment).or(file.tls_dir);
    let default = if tls_dir.is_some() { DEFAULT_PLANNER_TLS } else { DEFAULT_PLANNER };
    let planner = given.planner.or(file.planner).unwrap_or_else(|| default.to_owned());
    Ok(Settings { planner, tls_dir })
}

fn load(path: &Path) -> Result<Config, Failure> {
    let operation = || format!("read the config file {}", path.display());
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Config::default()),
        Err(error) => {
            return Err(Failure::Usage { operation: operation(), problem: error.to_string() });
        }
    };
    toml::from_str(&text)
        .map_err(|error| Failure::Usage { operation: operation(), problem: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        flags: [Option<&str>; 2],
        environment: Option<&str>,
        file: Option<&str>,
        wanted: (&str, Option<&str>),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl.toml");
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        let [planner, tls_dir] = flags;
        let given =
            Given { planner: planner.map(str::to_owned), tls_dir: tls_dir.map(PathBuf::from) };
        let found = read(given, environment.map(PathBuf::from), &path).unwrap();
        assert_eq!(
            (found.planner.as_str(), found.tls_dir.as_deref()),
            (wanted.0, wanted.1.map(Path::new))
        );
    }

    #[test]
    fn the_flag_wins_over_the_file_over_the_default() {
        check([None, None], None, None, (DEFAULT_PLANNER, None));
        let file = Some("planner = \"http://10.0.0.9:9096\"");
        check([None, None], None, file, ("http://10.0.0.9:9096", None));
        check([Some("http://x:1"), None], None, file, ("http://x:1", None));
    }

    #[test]
    fn who_has_a_certificate_asks_over_tls() {
        let file = Some("tls_dir = \"/file\"");
        check([None, None], None, file, (DEFAULT_PLANNER_TLS, Some("/file")));
        check(
            [None, None],
            Some("/environment"),
            file,
            (DEFAULT_PLANNER_TLS, Some("/environment")),
        );
        check(
            [None, Some("/flag")],
            Some("/environment"),
            file,
            (DEFAULT_PLANNER_TLS, Some("/flag")),
        );
    }

    #[test]
    fn an_unknown_field_is_a_usage_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl.toml");
        std::fs::write(&path, "planer = \"http://x\"").unwrap();
        let failure = read(Given::default(), None, &path).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.report().contains("planer"), "{}", failure.report());
    }
}
