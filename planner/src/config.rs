//! The planner's configuration: one TOML file, parsed and validated once.
//!
//! After [`Config::load`] there are no invalid values. Unknown fields are refused, so that a
//! misspelt limit is never silently the default.

mod store_url;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use vmferry_planner_core::migration::{Downgrade, NotConverging};
use vmferry_planner_core::queue::slot::{Caps, Limits};
use vmferry_planner_core::queue::{Priority, Ranking};
use vmferry_types::{HostId, Percent};

use crate::fence::{Fence, RawFence};

/// Says why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("read the configuration {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is not TOML of the expected shape.
    #[error("parse the configuration {path}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A field holds a value that cannot be used.
    #[error("configuration field `{field}`: {problem}")]
    Invalid {
        /// The field, with its table.
        field: String,
        /// What is wrong and what to write instead.
        problem: String,
    },
}

/// Everything that the planner is told from outside, valid.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where durable state lies.
    pub state_dir: PathBuf,
    /// Where agents and clients reach the planner over gRPC.
    pub grpc: SocketAddr,
    /// Where people and programs reach it over REST.
    pub rest: SocketAddr,
    /// Where this planner's certificates are, and what REST speaks. `None`: plain text is spoken, where
    /// the configuration says that nobody else listens.
    pub tls: Option<Tls>,
    /// Where the store is.
    pub store: StoreUrl,
    /// How the fleet is used.
    pub policy: Policy,
    /// What a migration gets that does not ask for something else.
    pub migration: MigrationDefaults,
    /// What operators say of hosts.
    pub hosts: BTreeMap<HostId, HostSettings>,
    /// What powers a host off from outside, if there is such a command.
    pub fence: Option<Fence>,
    /// Where the fault points of a test build look for their files.
    pub fault_points: Option<PathBuf>,
}

pub use store_url::{PostgresUrl, StoreUrl};

/// How this planner proves who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Where its certificates are.
    pub dir: PathBuf,
    /// What is spoken on the port of REST.
    pub rest: RestSecurity,
}

/// What is spoken on the port of REST beside a gRPC that speaks TLS.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum RestSecurity {
    /// HTTPS; operators show their certificates.
    #[default]
    Tls,
    /// HTTP, on this machine only; whoever is on it may do anything.
    PlainOnLoopback,
}

/// How the fleet is used.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Share of each host's memory that no VM may take.
    pub reserve_memory: Percent,
    /// Share of each host's CPU that no VM may take.
    pub reserve_cpu: Percent,
    /// How much of a host's CPU may be promised: 100 is no overcommit.
    pub cpu_overcommit_percent: u32,
    /// A host whose last report is older takes no placements.
    pub report_max_age: Duration,
    /// How long a driver owns its migration without a sign of life.
    pub lease: Duration,
    /// How often a queued migration is tried again, if nothing wakes it earlier.
    pub queue_retry: Duration,
    /// How long a migration waits for room.
    pub queue_deadline: Duration,
    /// How many migrations one destination receives at once, those included whose receiver waits.
    pub inbound_max: u32,
    /// How many transfers leave one host at once: a prepared receiver waits while its link is busy.
    pub outbound_max: u32,
    /// How many transfers run in the whole fleet at once.
    pub transfers_max: u32,
    /// Who is served first in the queue.
    pub ranking: Ranking,
}

impl Policy {
    /// Returns how many transfers there may be, and where, with what hosts say themselves of those
    /// that leave them. How many are prepared for one destination is decided when they are admitted.
    #[must_use]
    pub const fn links(&self, own_outbound: BTreeMap<HostId, u32>) -> Limits {
        Limits {
            preparing: Caps::NONE,
            transferring: Caps {
                fleet: self.transfers_max,
                per_source: self.outbound_max,
                per_destination: self.inbound_max,
            },
            own_outbound,
        }
    }
}

/// What a migration gets that does not ask for something else.
#[derive(Clone, Copy, Debug)]
pub struct MigrationDefaults {
    /// How long QEMU may plan to stand still.
    pub downtime_limit: Duration,
    /// How long a guest may stand still, not ordered, while no driver is heard.
    pub hold_limit: Duration,
    /// How long one that is done step by step waits for its operator at each gate.
    pub gate_deadline: Duration,
    /// Past it a transfer that has not reached the switchover is cancelled.
    pub transfer_timeout: Duration,
    /// A transfer that moves no byte for this long is cancelled.
    pub stall_limit: Duration,
    /// Past it, after the order, an unfinished switchover is in doubt.
    pub switchover_limit: Duration,
    /// How long a guest that is to be shut down for its move has to turn itself off.
    pub shutdown_limit: Duration,
    /// Whether QEMU may slow the guest down so that it converges.
    pub auto_converge: bool,
    /// What may be done if the live transfer is refused.
    pub downgrade: Downgrade,
    /// What is done if a precopy does not converge.
    pub not_converging: NotConverging,
}

/// What operators say of one host; its agent cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSettings {
    /// The group of hosts that it belongs to.
    pub cluster: String,
    /// Labels that VMs may require.
    pub labels: BTreeMap<String, String>,
}

impl Default for HostSettings {
    fn default() -> Self {
        Self { cluster: "default".to_owned(), labels: BTreeMap::new() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    state_dir: PathBuf,
    listen: RawListen,
    #[serde(default)]
    store: RawStore,
    #[serde(default)]
    policy: RawPolicy,
    #[serde(default)]
    migration: RawMigration,
    #[serde(default)]
    host: Vec<RawHost>,
    fence: Option<RawFence>,
    tls: Option<RawTls>,
    security: Option<RawSecurity>,
    #[cfg(feature = "fault-points")]
    fault_points: Option<RawFaultPoints>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawListen {
    grpc: SocketAddr,
    rest: SocketAddr,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStore {
    url: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawPolicy {
    reserve_memory_percent: u8,
    reserve_cpu_percent: u8,
    cpu_overcommit_percent: u32,
    report_max_age: String,
    lease: String,
    queue_retry: String,
    queue_deadline: String,
    inbound_max: u32,
    outbound_max: u32,
    transfers_max: u32,
    priority: [String; 3],
}

impl Default for RawPolicy {
    fn default() -> Self {
        Self {
            // Covers a kernel, an agent and what QEMU takes beside the guest's memory.
            reserve_memory_percent: 10,
            reserve_cpu_percent: 0,
            cpu_overcommit_percent: 100,
            // Six reports of 5 s.
            report_max_age: "30s".to_owned(),
            lease: "10s".to_owned(),
            queue_retry: "10s".to_owned(),
            queue_deadline: "2h".to_owned(),
            // Two streams fill a link; more only make each of them slower.
            inbound_max: 2,
            outbound_max: 2,
            transfers_max: u32::MAX,
            priority: ["maintenance", "drain", "operator"].map(str::to_owned),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawMigration {
    downtime_limit: String,
    hold_limit: String,
    gate_deadline: String,
    transfer_timeout: String,
    stall_limit: String,
    switchover_limit: String,
    shutdown_limit: String,
    auto_converge: bool,
    downgrade: String,
    not_converging: String,
}

impl Default for RawMigration {
    fn default() -> Self {
        Self {
            downtime_limit: "100ms".to_owned(),
            hold_limit: "10s".to_owned(),
            gate_deadline: "10m".to_owned(),
            transfer_timeout: "1h".to_owned(),
            stall_limit: "30s".to_owned(),
            switchover_limit: "30s".to_owned(),
            shutdown_limit: "2m".to_owned(),
            auto_converge: false,
            downgrade: Downgrade::Never.label().to_owned(),
            not_converging: NotConverging::Abort.label().to_owned(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHost {
    id: String,
    cluster: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    dir: PathBuf,
    #[serde(default)]
    rest: RestSecurity,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSecurity {
    plain_text: PlainText,
}

/// Where traffic without encryption is acceptable.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum PlainText {
    Loopback,
    Namespace,
}

#[cfg(feature = "fault-points")]
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFaultPoints {
    dir: PathBuf,
}

impl Config {
    /// Reads and validates the configuration.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, has an unknown field, or holds a value that cannot be used.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let raw: RawConfig = toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        Self::from_raw(raw, in_own_network_namespace)
    }

    fn from_raw(
        raw: RawConfig,
        isolated: impl Fn() -> std::io::Result<bool>,
    ) -> Result<Self, ConfigError> {
        let tls = raw.tls.map(|tls| Tls { dir: tls.dir, rest: tls.rest });
        let plain_text = match (&tls, &raw.security) {
            (Some(_), Some(_)) => {
                return Err(invalid(
                    "security.plain_text",
                    "there is [tls] as well; remove one of them",
                ));
            }
            (Some(tls), None) => check_tls(tls, &raw.listen)?,
            (None, security) => check_security(security.as_ref(), &raw.listen, isolated)?,
        };
        let store = match raw.store.url {
            Some(url) => StoreUrl::parse(&url, plain_text)?,
            None => StoreUrl::Sqlite(raw.state_dir.join("planner.db")),
        };
        #[cfg(feature = "fault-points")]
        let fault_points = raw.fault_points.map(|points| points.dir);
        #[cfg(not(feature = "fault-points"))]
        let fault_points = None;
        Ok(Self {
            store,
            grpc: raw.listen.grpc,
            rest: raw.listen.rest,
            tls,
            policy: raw.policy.validated()?,
            migration: raw.migration.validated()?,
            hosts: validated_hosts(raw.host)?,
            fence: raw
                .fence
                .map(Fence::read)
                .transpose()
                .map_err(|(field, why)| invalid(field, why))?,
            state_dir: raw.state_dir,
            fault_points,
        })
    }
}

impl RawPolicy {
    fn validated(self) -> Result<Policy, ConfigError> {
        let percent = |field: &str, value: u8| {
            Percent::new(value).ok_or_else(|| invalid(field, format!("{value} is above 100")))
        };
        if self.inbound_max == 0 {
            return Err(invalid(
                "policy.inbound_max",
                "0 would refuse every migration; write 1 or more",
            ));
        }
        for (field, max) in [
            ("policy.outbound_max", self.outbound_max),
            ("policy.transfers_max", self.transfers_max),
        ] {
            if max == 0 {
                return Err(invalid(field, "0 would let no memory cross; write 1 or more"));
            }
        }
        if self.cpu_overcommit_percent < 100 {
            return Err(invalid(
                "policy.cpu_overcommit_percent",
                "below 100 hides CPU that hosts have; write 100 or more, and use reserve_cpu_percent to keep some back",
            ));
        }
        Ok(Policy {
            reserve_memory: percent("policy.reserve_memory_percent", self.reserve_memory_percent)?,
            reserve_cpu: percent("policy.reserve_cpu_percent", self.reserve_cpu_percent)?,
            cpu_overcommit_percent: self.cpu_overcommit_percent,
            report_max_age: duration("policy.report_max_age", &self.report_max_age)?,
            lease: duration("policy.lease", &self.lease)?,
            queue_retry: duration("policy.queue_retry", &self.queue_retry)?,
            queue_deadline: duration("policy.queue_deadline", &self.queue_deadline)?,
            inbound_max: self.inbound_max,
            outbound_max: self.outbound_max,
            transfers_max: self.transfers_max,
            ranking: ranking(&self.priority)?,
        })
    }
}

/// Reads who is served first.
fn ranking(labels: &[String; 3]) -> Result<Ranking, ConfigError> {
    const FIELD: &str = "policy.priority";
    let mut order = [Priority::Operator; 3];
    for (place, label) in order.iter_mut().zip(labels) {
        *place = Priority::from_label(label).ok_or_else(|| {
            invalid(FIELD, format!("`{label}` is none of maintenance, drain, operator"))
        })?;
    }
    Ranking::new(order).map_err(|error| invalid(FIELD, error.to_string()))
}

impl RawMigration {
    fn validated(self) -> Result<MigrationDefaults, ConfigError> {
        Ok(MigrationDefaults {
            downtime_limit: duration("migration.downtime_limit", &self.downtime_limit)?,
            hold_limit: duration("migration.hold_limit", &self.hold_limit)?,
            gate_deadline: duration("migration.gate_deadline", &self.gate_deadline)?,
            transfer_timeout: duration("migration.transfer_timeout", &self.transfer_timeout)?,
            stall_limit: duration("migration.stall_limit", &self.stall_limit)?,
            switchover_limit: duration("migration.switchover_limit", &self.switchover_limit)?,
            shutdown_limit: duration("migration.shutdown_limit", &self.shutdown_limit)?,
            auto_converge: self.auto_converge,
            downgrade: Downgrade::from_label(&self.downgrade)
                .filter(|of| of.may_be_default())
                .ok_or_else(|| {
                    let problem = format!("`{}` is none of never, snapshot", self.downgrade);
                    invalid("migration.downgrade", problem)
                })?,
            not_converging: NotConverging::from_label(&self.not_converging).ok_or_else(|| {
                let problem =
                    format!("`{}` is none of {}", self.not_converging, NotConverging::LABELS);
                invalid("migration.not_converging", problem)
            })?,
        })
    }
}

fn validated_hosts(raw: Vec<RawHost>) -> Result<BTreeMap<HostId, HostSettings>, ConfigError> {
    let mut hosts = BTreeMap::new();
    for host in raw {
        let id: HostId = host
            .id
            .parse()
            .map_err(|_| invalid("host.id", format!("`{}` is not a host id", host.id)))?;
        let settings = HostSettings {
            cluster: host.cluster.unwrap_or_else(|| HostSettings::default().cluster),
            labels: host.labels,
        };
        if hosts.insert(id, settings).is_some() {
            return Err(invalid("host.id", format!("`{}` is named twice", host.id)));
        }
    }
    Ok(hosts)
}

fn duration(field: &str, text: &str) -> Result<Duration, ConfigError> {
    let value = humantime::parse_duration(text)
        .map_err(|error| invalid(field, format!("`{text}`: {error}; write for example \"30s\"")))?;
    if value.is_zero() {
        return Err(invalid(field, "must be longer than nothing"));
    }
    Ok(value)
}

fn invalid(field: &str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Invalid { field: field.to_owned(), problem: problem.into() }
}

/// Refuses certificates that cannot be found, and HTTP where others could listen in; returns which
/// traffic to a database may be unencrypted all the same.
fn check_tls(tls: &Tls, listen: &RawListen) -> Result<PlainText, ConfigError> {
    if !tls.dir.is_absolute() {
        return Err(invalid("tls.dir", "must be an absolute path"));
    }
    if tls.rest == RestSecurity::PlainOnLoopback && !is_loopback(listen.rest.ip()) {
        let problem = format!(
            "{} is not a loopback address, and tls.rest = \"plain_on_loopback\" allows no other: listen on 127.0.0.1, or speak TLS",
            listen.rest
        );
        return Err(invalid("listen.rest", problem));
    }
    Ok(PlainText::Loopback)
}

/// Refuses to listen unencrypted where others could listen in; returns where none can.
fn check_security(
    security: Option<&RawSecurity>,
    listen: &RawListen,
    isolated: impl Fn() -> std::io::Result<bool>,
) -> Result<PlainText, ConfigError> {
    let Some(security) = security else {
        return Err(invalid(
            "security",
            "say how this planner is protected: `[tls] dir = \"/etc/vmferry/tls\"`, with what `vmferry pki issue planner NAME` makes; or, where nobody else listens, [security] plain_text = \"loopback\" or \"namespace\"",
        ));
    };
    match security.plain_text {
        PlainText::Loopback => {
            for (field, address) in [("listen.grpc", listen.grpc), ("listen.rest", listen.rest)] {
                if !is_loopback(address.ip()) {
                    return Err(invalid(
                        field,
                        format!(
                            "{address} is not a loopback address, and security.plain_text = \"loopback\" allows no other: listen on 127.0.0.1"
                        ),
                    ));
                }
            }
            Ok(PlainText::Loopback)
        }
        PlainText::Namespace => match isolated() {
            Ok(true) => Ok(PlainText::Namespace),
            Ok(false) => Err(invalid(
                "security.plain_text",
                "\"namespace\" is meant for a network namespace of its own, and this process is in that of PID 1: start it with `ip netns exec NAME`",
            )),
            Err(error) => Err(invalid(
                "security.plain_text",
                format!(
                    "cannot tell whether this process has a network namespace of its own: {error}"
                ),
            )),
        },
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Says whether this process's network is another than that of PID 1 or, where PID 1 may not be
/// looked at, one that `ip netns` has a name for.
fn in_own_network_namespace() -> std::io::Result<bool> {
    let identity =
        |path: &Path| std::fs::metadata(path).map(|namespace| (namespace.dev(), namespace.ino()));
    let own = identity(Path::new("/proc/self/ns/net"))?;
    match identity(Path::new("/proc/1/ns/net")) {
        Ok(first) => Ok(own != first),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let named = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
            Ok(named.filter_map(|entry| identity(&entry.path()).ok()).any(|name| name == own))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"
        state_dir = "/var/lib/vmferry-planner"
        [listen]
        grpc = "127.0.0.1:9096"
        rest = "127.0.0.1:9095"
        [security]
        plain_text = "loopback"
    "#;

    fn read(text: &str) -> Result<Config, String> {
        let raw: RawConfig = toml::from_str(text).map_err(|error| error.to_string())?;
        Config::from_raw(raw, || Ok(false)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_minimal_file_gets_the_defaults() {
        let config = read(MINIMAL).unwrap();
        assert_eq!(
            config.store,
            StoreUrl::Sqlite(PathBuf::from("/var/lib/vmferry-planner/planner.db"))
        );
        assert_eq!(config.policy.report_max_age, Duration::from_secs(30));
        assert_eq!(config.migration.hold_limit, Duration::from_secs(10));
    }

    #[test]
    fn the_example_shows_every_default() {
        let example = include_str!("../planner.example.toml");
        let figures = |config: &Config| format!("{:?} {:?}", config.policy, config.migration);
        assert_eq!(figures(&read(example).unwrap()), figures(&read(MINIMAL).unwrap()));
        let shown: Vec<&str> = example
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(rest) if rest.starts_with('[') || rest.contains(" = ") => rest,
                Some(_) | None => line,
            })
            .collect();
        let shown = read(&shown.join("\n")).unwrap();
        assert_eq!(figures(&shown), figures(&read(MINIMAL).unwrap()));
        assert!(matches!(shown.store, StoreUrl::Postgres(_)));
        assert!(shown.fence.is_some() && shown.hosts.len() == 1);
    }

    #[test]
    fn without_a_word_on_security_the_planner_does_not_start() {
        let text = MINIMAL.replace("[security]", "").replace("plain_text = \"loopback\"", "");
        assert!(read(&text).unwrap_err().contains("security"));
    }

    #[test]
    fn with_certificates_any_address_will_do() {
        let text = MINIMAL
            .replace("127.0.0.1", "10.0.0.1")
            .replace("[security]", "[tls]")
            .replace("plain_text = \"loopback\"", "dir = \"/etc/vmferry/tls\"");
        let tls = read(&text).unwrap().tls.unwrap();
        assert_eq!((tls.dir.to_str(), tls.rest), (Some("/etc/vmferry/tls"), RestSecurity::Tls));
        let plain = format!("{text}\nrest = \"plain_on_loopback\"");
        assert!(read(&plain).unwrap_err().contains("listen.rest"));
        assert!(read(&plain.replace("10.0.0.1:9095", "127.0.0.1:9095")).is_ok());
        assert!(read(&text.replace("/etc", "etc")).unwrap_err().contains("tls.dir"));
        let both = format!("{text}\n[security]\nplain_text = \"loopback\"");
        assert!(read(&both).unwrap_err().contains("remove one"));
    }

    #[test]
    fn plain_text_over_loopback_means_loopback() {
        let text = MINIMAL.replace("127.0.0.1:9095", "10.0.0.1:9095");
        assert!(read(&text).unwrap_err().contains("listen.rest"));
        assert!(read(&MINIMAL.replace("127.0.0.1:9095", "[::1]:9095")).is_ok());
    }

    #[test]
    fn plain_text_in_a_namespace_needs_one() {
        let text =
            MINIMAL.replace("loopback", "namespace").replace("127.0.0.1:9095", "10.0.0.1:9095");
        assert!(read(&text).unwrap_err().contains("PID 1"));
        let raw: RawConfig = toml::from_str(&text).unwrap();
        assert!(Config::from_raw(raw, || Ok(true)).is_ok());
    }

    #[test]
    fn bad_values_are_refused_by_the_name_of_their_field() {
        for (addition, name) in [
            ("[policy]\nreserve_memory_percent = 101", "policy.reserve_memory_percent"),
            ("[policy]\ninbound_max = 0", "policy.inbound_max"),
            ("[policy]\nlease = \"soon\"", "policy.lease"),
            ("[policy]\nlease = \"0s\"", "policy.lease"),
            ("[policy]\ncpu_overcommit_percent = 99", "policy.cpu_overcommit_percent"),
            ("[migration]\nhold_limit = \"x\"", "migration.hold_limit"),
            ("[migration]\ndowngrade = \"cold\"", "migration.downgrade"),
            ("[store]\nurl = \"mysql:x\"", "store.url"),
            ("[[host]]\nid = \"A B\"", "host.id"),
            ("[[host]]\nid = \"a\"\n[[host]]\nid = \"a\"", "named twice"),
            ("[policy]\nreserve_memory = 1", "reserve_memory"),
        ] {
            let error = read(&format!("{MINIMAL}\n{addition}")).unwrap_err();
            assert!(error.contains(name), "{addition}: {error}");
        }
    }

    #[test]
    fn operators_name_clusters_and_labels() {
        let config = read(&format!(
            "{MINIMAL}\n[[host]]\nid = \"a\"\ncluster = \"east\"\nlabels = {{ rack = \"1\" }}"
        ))
        .unwrap();
        let host = &config.hosts[&"a".parse::<HostId>().unwrap()];
        assert_eq!(host.cluster, "east");
        assert_eq!(host.labels["rack"], "1");
    }
}
