//! Where the planner is: the flag, else the config file, else this machine.

use serde::Deserialize;
use std::io;
use std::path::Path;

use crate::failure::Failure;

/// Where the config file is unless `--config` says otherwise.
pub(crate) const DEFAULT_PATH: &str = "/etc/vmferry/ctl.toml";

/// The planner's gRPC port on this machine.
const DEFAULT_PLANNER: &str = "http://127.0.0.1:9096";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    planner: Option<String>,
}

/// Returns the planner's address.
///
/// # Errors
///
/// Fails where the config file is there and cannot be read. An absent one is an empty one.
pub(crate) fn planner_address(flag: Option<&str>, path: &Path) -> Result<String, Failure> {
    if let Some(address) = flag {
        return Ok(address.to_owned());
    }
    Ok(load(path)?.planner.unwrap_or_else(|| DEFAULT_PLANNER.to_owned()))
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

    fn check(flag: Option<&str>, file: Option<&str>, expected: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl.toml");
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        assert_eq!(planner_address(flag, &path).unwrap(), expected);
    }

    #[test]
    fn the_flag_wins_over_the_file_over_the_default() {
        check(None, None, DEFAULT_PLANNER);
        check(None, Some("planner = \"http://10.0.0.9:9096\""), "http://10.0.0.9:9096");
        check(Some("http://x:1"), Some("planner = \"http://10.0.0.9:9096\""), "http://x:1");
    }

    #[test]
    fn an_unknown_field_is_a_usage_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl.toml");
        std::fs::write(&path, "planer = \"http://x\"").unwrap();
        let failure = planner_address(None, &path).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.report().contains("planer"), "{}", failure.report());
    }
}
