//! What an agent is told at its start: one TOML file.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use vmferry_agent_core::ports::PortRange;
use vmferry_types::{Bytes, HostId};

use self::security::PlainText;

mod security;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// This host.
    pub host_id: HostId,
    /// What people call it.
    pub name: String,
    /// Journals: on a disk that survives a boot.
    pub state_dir: PathBuf,
    /// Sockets and launches: gone after a boot.
    pub run_dir: PathBuf,
    /// The QEMU binary.
    pub qemu: PathBuf,
    /// Where gRPC is served.
    pub grpc: SocketAddr,
    /// Where metrics and health are served.
    pub metrics: SocketAddr,
    /// Where others reach the gRPC service.
    pub advertise: String,
    /// The planners. `None`: this host works without one.
    pub planners: Option<Planners>,
    /// The only address that receivers bind.
    pub migration_address: std::net::IpAddr,
    /// The ports that receivers may bind.
    pub migration_ports: PortRange,
    /// How many migrations may leave at once. `None`: the planner's policy alone counts.
    pub outbound_max: Option<u32>,
    /// Folders that hold the same on every host that names them. `None`: nothing is said.
    pub shared_paths: Option<Vec<String>>,
    /// Where this host's certificates are. `None`: plain text is spoken, where the configuration says
    /// that nobody else listens.
    pub tls: Option<PathBuf>,
    /// The share of the machine's memory that counts as this host.
    pub memory: Option<Bytes>,
    /// The share of the machine's CPUs that counts as this host.
    pub cpus: Option<u32>,
    /// Where a test holds or kills the agent.
    #[cfg(feature = "fault-points")]
    pub fault_points: Option<PathBuf>,
}

/// Where the planners are, which all work on one store.
#[derive(Clone, Debug)]
pub struct Planners {
    /// The gRPC service of each, at least one. Each is told how this host is.
    pub addresses: Vec<String>,
    /// How often they are told.
    pub report_interval: Duration,
}

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read the configuration {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no such TOML.
    #[error("understand the configuration {path}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: toml::de::Error,
    },
    /// Its values cannot be.
    #[error("the configuration {path} has {} error(s): {}", .errors.len(), .errors.join("; "), path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Each names its field.
        errors: Vec<String>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    host_id: String,
    name: Option<String>,
    #[serde(default = "default_state_dir")]
    state_dir: PathBuf,
    #[serde(default = "default_run_dir")]
    run_dir: PathBuf,
    #[serde(default = "default_qemu")]
    qemu: PathBuf,
    listen: RawListen,
    planner: Option<RawPlanner>,
    migration: RawMigration,
    #[serde(default)]
    capacity: RawCapacity,
    #[serde(default)]
    storage: RawStorage,
    tls: Option<RawTls>,
    security: Option<RawSecurity>,
    #[cfg(feature = "fault-points")]
    fault_points: Option<RawFaultPoints>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawListen {
    grpc: SocketAddr,
    metrics: SocketAddr,
    advertise: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPlanner {
    address: Option<String>,
    addresses: Option<Vec<String>>,
    report_interval: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMigration {
    address: std::net::IpAddr,
    #[serde(default = "default_ports")]
    ports: String,
    outbound_max: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStorage {
    shared_paths: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCapacity {
    memory: Option<String>,
    cpus: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    dir: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSecurity {
    plain_text: PlainText,
}

#[cfg(feature = "fault-points")]
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFaultPoints {
    dir: PathBuf,
}

fn default_state_dir() -> PathBuf {
    "/var/lib/vmferry".into()
}

fn default_run_dir() -> PathBuf {
    "/run/vmferry".into()
}

fn default_qemu() -> PathBuf {
    "/usr/bin/qemu-system-x86_64".into()
}

/// What IANA leaves to private use begins here.
fn default_ports() -> String {
    "49152-49215".to_owned()
}

/// How often the planner is told how this host is, where nothing else is said.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// More planners than this share no store.
const PLANNERS_MAX: usize = 16;

/// Two sockets and a name of 17 bytes must fit into the 107 bytes of a socket's path.
const RUN_DIR_BYTES_MAX: usize = 70;

impl Config {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    ///
    /// Returns every value that cannot be, each with its field and what to do.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let raw: Raw = toml::from_str(&text)
            .map_err(|source| ConfigError::Parse { path: path.to_owned(), source })?;
        check(raw).map_err(|errors| ConfigError::Invalid { path: path.to_owned(), errors })
    }
}

fn check(raw: Raw) -> Result<Config, Vec<String>> {
    let mut errors = Vec::new();
    let host_id = raw.host_id.parse::<HostId>();
    if let Err(error) = &host_id {
        errors.push(format!("host_id: {error}"));
    }
    for (field, dir) in
        [("state_dir", &raw.state_dir), ("run_dir", &raw.run_dir), ("qemu", &raw.qemu)]
    {
        if !dir.is_absolute() {
            errors.push(format!("{field}: must be an absolute path"));
        }
    }
    if raw.run_dir.as_os_str().len() > RUN_DIR_BYTES_MAX {
        errors.push(format!("run_dir: at most {RUN_DIR_BYTES_MAX} bytes, since it holds sockets"));
    }
    let ports = PortRange::parse(&raw.migration.ports);
    if ports.is_none() {
        errors.push("migration.ports: must be a range like \"49152-49215\"".to_owned());
    }
    if raw.migration.address.is_unspecified() {
        errors.push(
            "migration.address: must be one address: whoever reaches a receiver's port can end it"
                .to_owned(),
        );
    }
    let memory = read_memory(raw.capacity.memory.as_deref(), &mut errors);
    check_share(&raw, &mut errors);
    let planners = raw.planner.and_then(|planner| read_planners(planner, &mut errors));
    let addresses = [
        ("listen.grpc", raw.listen.grpc.ip()),
        ("listen.metrics", raw.listen.metrics.ip()),
        ("migration.address", raw.migration.address),
    ];
    let plain_text = raw.security.map(|security| security.plain_text);
    let tls = raw.tls.map(|tls| tls.dir);
    errors.extend(security::check(plain_text, tls.as_ref(), &addresses, planners.as_ref()));
    let (Ok(host_id), Some(migration_ports), true) = (host_id, ports, errors.is_empty()) else {
        return Err(errors);
    };
    Ok(Config {
        name: raw.name.unwrap_or_else(|| host_id.to_string()),
        host_id,
        state_dir: raw.state_dir,
        run_dir: raw.run_dir,
        qemu: raw.qemu,
        grpc: raw.listen.grpc,
        metrics: raw.listen.metrics,
        advertise: raw.listen.advertise.unwrap_or_else(|| raw.listen.grpc.to_string()),
        planners,
        migration_address: raw.migration.address,
        migration_ports,
        outbound_max: raw.migration.outbound_max,
        shared_paths: raw.storage.shared_paths,
        tls,
        memory,
        cpus: raw.capacity.cpus,
        #[cfg(feature = "fault-points")]
        fault_points: raw.fault_points.map(|points| points.dir),
    })
}

fn read_memory(text: Option<&str>, errors: &mut Vec<String>) -> Option<Bytes> {
    match text?.parse::<bytesize::ByteSize>() {
        Ok(size) => Some(Bytes(size.as_u64())),
        Err(error) => {
            errors.push(format!("capacity.memory: {error}"));
            None
        }
    }
}

/// Checks what this host gives to guests beside memory, and what it shares with other hosts.
fn check_share(raw: &Raw, errors: &mut Vec<String>) {
    if raw.capacity.cpus == Some(0) {
        errors.push("capacity.cpus: must be at least 1".to_owned());
    }
    if raw.migration.outbound_max == Some(0) {
        errors.push("migration.outbound_max: 0 would keep every VM here; at least 1".to_owned());
    }
    for path in raw.storage.shared_paths.iter().flatten() {
        if !Path::new(path).is_absolute() {
            errors.push(format!("storage.shared_paths: `{path}` must be an absolute path"));
        }
    }
}

fn read_planners(raw: RawPlanner, errors: &mut Vec<String>) -> Option<Planners> {
    let (field, addresses) = match (raw.address, raw.addresses) {
        (Some(address), None) => ("planner.address", vec![address]),
        (None, Some(addresses)) => ("planner.addresses", addresses),
        (Some(_), Some(_)) => {
            errors.push("planner.address: give either this or planner.addresses".to_owned());
            return None;
        }
        (None, None) => {
            errors.push("planner.addresses: is missing: name every planner".to_owned());
            return None;
        }
    };
    let mut known = BTreeSet::new();
    for address in &addresses {
        if let Err(error) = vmferry_tls::endpoint(address) {
            errors.push(format!("{field}: {error}"));
        }
        if !known.insert(address) {
            errors.push(format!("{field}: `{address}` is named twice"));
        }
    }
    if addresses.is_empty() || addresses.len() > PLANNERS_MAX {
        errors.push(format!("{field}: must name 1 to {PLANNERS_MAX} planners"));
    }
    let report_interval = match raw.report_interval.as_deref().map(humantime::parse_duration) {
        None => REPORT_INTERVAL,
        Some(Ok(interval)) if !interval.is_zero() => interval,
        Some(Ok(_) | Err(_)) => {
            errors.push("planner.report_interval: must be a duration like \"5s\"".to_owned());
            REPORT_INTERVAL
        }
    };
    Some(Planners { addresses, report_interval })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
host_id = "a"
[listen]
grpc = "127.0.0.1:9097"
metrics = "127.0.0.1:9098"
[planner]
address = "http://127.0.0.1:9096"
report_interval = "2s"
[migration]
address = "127.0.0.1"
ports = "49152-49153"
[capacity]
memory = "4GiB"
[security]
plain_text = "loopback"
"#;

    fn errors(text: &str) -> Vec<String> {
        match toml::from_str::<Raw>(text).map(check) {
            Ok(Ok(_)) => Vec::new(),
            Ok(Err(errors)) => errors,
            Err(error) => vec![error.to_string()],
        }
    }

    #[test]
    fn a_whole_configuration_is_read() {
        let config = check(toml::from_str(WHOLE).unwrap()).unwrap();
        assert_eq!((config.name.as_str(), config.advertise.as_str()), ("a", "127.0.0.1:9097"));
        assert_eq!(config.memory, Some(Bytes(4 << 30)));
        let planners = config.planners.unwrap();
        assert_eq!(planners.addresses, ["http://127.0.0.1:9096"]);
        assert_eq!(planners.report_interval, Duration::from_secs(2));
    }

    #[test]
    fn what_a_host_shares_and_how_much_leaves_it_is_said_by_its_operator() {
        let silent = check(toml::from_str(WHOLE).unwrap()).unwrap();
        assert_eq!((silent.shared_paths, silent.outbound_max), (None, None));
        let with = |lines: &str, max: &str| {
            let ports = "ports = \"49152-49153\"";
            format!("{}[storage]\n{lines}\n", WHOLE.replace(ports, &format!("{ports}\n{max}")))
        };
        let text = with("shared_paths = [\"/shared\"]", "outbound_max = 1");
        let config = check(toml::from_str(&text).unwrap()).unwrap();
        assert_eq!(config.shared_paths.unwrap(), ["/shared"]);
        assert_eq!(config.outbound_max, Some(1));
        let found = errors(&with("shared_paths = [\"here\"]", "outbound_max = 0"));
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn several_planners_are_named_in_one_list() {
        let one = "address = \"http://127.0.0.1:9096\"";
        let with = |line: &str| WHOLE.replace(one, line);
        let two = with(r#"addresses = ["http://127.0.0.1:9096", "http://127.0.0.1:9196"]"#);
        let config = check(toml::from_str(&two).unwrap()).unwrap();
        assert_eq!(config.planners.unwrap().addresses.len(), 2);
        for (line, word) in [
            (format!("{one}\naddresses = [\"http://127.0.0.1:9196\"]"), "either"),
            (String::new(), "missing"),
            ("addresses = []".to_owned(), "1 to 16"),
            (r#"addresses = ["http://127.0.0.1:1", "http://127.0.0.1:1"]"#.to_owned(), "twice"),
            (r#"addresses = ["http://127.0.0.1:1", "127.0.0.1:2"]"#.to_owned(), "http://"),
            (r#"addresses = ["http://127.0.0.1:1", "http://10.0.0.1:2"]"#.to_owned(), "loopback"),
        ] {
            let found = errors(&with(&line));
            assert!(found.iter().any(|error| error.contains(word)), "{line}: {found:?}");
        }
    }

    #[test]
    fn the_example_is_a_whole_configuration() {
        let example = include_str!("../agent.example.toml");
        let config = check(toml::from_str(example).unwrap()).unwrap();
        assert_eq!(config.planners.unwrap().addresses.len(), 2);
    }

    #[test]
    fn without_a_word_on_security_nothing_is_served() {
        let text = WHOLE.replace("[security]\nplain_text = \"loopback\"\n", "");
        assert!(errors(&text).iter().any(|error| error.contains("security.plain_text")));
    }

    #[test]
    fn plain_text_on_loopback_takes_loopback_addresses_only() {
        let found = errors(&WHOLE.replace("grpc = \"127.0.0.1", "grpc = \"10.0.0.1"));
        assert!(found[0].contains("listen.grpc"), "{found:?}");
        let found = errors(&WHOLE.replace("http://127.0.0.1", "http://planner"));
        assert!(found[0].contains("planner.addresses"), "{found:?}");
    }

    #[test]
    fn with_certificates_any_address_will_do_and_planners_speak_tls() {
        let tls = WHOLE
            .replace(
                "[security]\nplain_text = \"loopback\"\n",
                "[tls]\ndir = \"/etc/vmferry/tls\"\n",
            )
            .replace("127.0.0.1", "10.0.0.1");
        let found = errors(&tls);
        assert!(found.len() == 1 && found[0].contains("https://"), "{found:?}");
        let tls = tls.replace("http://", "https://");
        assert_eq!(errors(&tls), Vec::<String>::new());
        let config = check(toml::from_str(&tls).unwrap()).unwrap();
        assert_eq!(config.tls.unwrap(), Path::new("/etc/vmferry/tls"));
        let both = format!("{tls}[security]\nplain_text = \"loopback\"\n");
        assert!(errors(&both)[0].contains("remove one"), "{:?}", errors(&both));
        let relative = tls.replace("/etc/vmferry/tls", "tls");
        assert!(errors(&relative)[0].contains("tls.dir"), "{:?}", errors(&relative));
    }

    #[test]
    fn every_error_is_named_at_once() {
        let text =
            WHOLE.replace("\"a\"", "\"A\"").replace("49153\"", "1\"").replace("4GiB", "much");
        assert_eq!(errors(&text).len(), 3);
    }

    #[test]
    fn unknown_fields_are_refused() {
        assert!(errors(&WHOLE.replace("[capacity]", "[capacity]\nturbo = 1"))[0].contains("turbo"));
    }
}
