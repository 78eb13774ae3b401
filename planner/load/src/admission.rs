//! How fast a planner admits while a large fleet reports to it.
//!
//! A built planner, and hosts that are only what they say: each reports over a connection of its own
//! every few seconds, unchanged but for its number and time, and does what it is told to a VM that
//! was placed on it. The VMs are in the store before, as they would be after years. New VMs are asked
//! for at a fixed pace whatever becomes of those before, and the time of each counts from when it
//! was due, so a planner that stalls is not spared the wait.

mod agents;
mod hosts;
mod usage;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use vmferry_proto::v1;
use vmferry_proto::v1::planner_client::PlannerClient;

use crate::console::say;
use crate::database::{Database, Kind};
use crate::process::{PlannerProcess, Settings};
use hosts::Hosts;
use usage::Usage;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The built planner.
    pub planner: PathBuf,
    /// Its store.
    pub store: Kind,
    /// How many hosts report.
    pub hosts: u32,
    /// How many VMs each has.
    pub vms_per_host: u32,
    /// How often each reports.
    pub interval: Duration,
    /// How many VMs are asked for in a second.
    pub per_second: u32,
    /// For how long.
    pub seconds: u32,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    store: Kind,
    hosts: u32,
    p50: Duration,
    p99: Duration,
    worst: Duration,
    planner_rss_mib: u64,
    planner_cores: f64,
    generator_cores: f64,
    reports_per_second: f64,
    admitted: usize,
    late: usize,
}

impl Figures {
    /// Says it for people.
    #[must_use]
    pub fn told(&self) -> String {
        format!(
            "{} with {} hosts: admission p50 {:.1} ms, p99 {:.1} ms, worst {:.1} ms of {}; planner \
             {} MiB, {:.2} cores; {:.0} reports/s taken ({} late); generator {:.2} cores",
            self.store.label(),
            self.hosts,
            ms(self.p50),
            ms(self.p99),
            ms(self.worst),
            self.admitted,
            self.planner_rss_mib,
            self.planner_cores,
            self.reports_per_second,
            self.late,
            self.generator_cores
        )
    }

    /// Writes it for programs.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        let tenth = |value: f64| (value * 10.0).round() / 10.0;
        let hundredth = |value: f64| (value * 100.0).round() / 100.0;
        serde_json::json!({
            "store": self.store.label(),
            "hosts": self.hosts,
            "p50_ms": tenth(ms(self.p50)),
            "p99_ms": tenth(ms(self.p99)),
            "planner_rss_mib": self.planner_rss_mib,
            "planner_cores": hundredth(self.planner_cores),
        })
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

/// How long the planner may take to be there.
const START_MAX: Duration = Duration::from_secs(30);
/// How long it may take to hear of every host once.
const HEARD_MAX: Duration = Duration::from_secs(180);

/// Measures.
///
/// # Errors
///
/// Fails if the planner does not come up, or refuses what it is asked.
pub async fn run(plan: &Plan) -> Result<Figures> {
    let dir = tempfile::Builder::new().prefix("vmferry-admission").tempdir()?;
    let database = Database::create(plan.store, dir.path()).await?;
    let (grpc, rest) = (free_address()?, free_address()?);
    let mut planner = PlannerProcess::new(Settings {
        name: "planner".to_owned(),
        binary: plan.planner.clone(),
        dir: dir.path().to_owned(),
        grpc,
        rest,
        store: database.url().to_owned(),
        lease: "10s".to_owned(),
        inbound_max: 2,
    })?;
    planner.start()?;
    let client = connected(&mut planner).await?;
    let measured = measured(plan, &mut planner, client, &database).await;
    if let Err(error) = &measured {
        let log = std::fs::read_to_string(planner.log()).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(20).collect();
        say(&format!("admission: {error:#}; the planner's last words, newest first:"));
        tail.iter().for_each(|line| say(line));
    }
    planner.kill().await?;
    database.remove().await?;
    measured
}

async fn measured(
    plan: &Plan,
    planner: &mut PlannerProcess,
    client: PlannerClient<Channel>,
    database: &Database,
) -> Result<Figures> {
    database.fill_vms(plan.hosts, plan.vms_per_host).await.context("write the VMs")?;
    let agents = free_address()?.port();
    let hosts = Arc::new(Hosts::new(plan.hosts, plan.vms_per_host, agents));
    let mut tasks = JoinSet::new();
    agents::serve(&hosts, agents, &mut tasks).await?;
    let begun = Instant::now();
    hosts::report_all(&hosts, planner.grpc(), plan.interval, &mut tasks)?;
    hosts.all_heard(HEARD_MAX).await?;
    say(&format!("admission: every host was heard after {:.1} s", begun.elapsed().as_secs_f64()));
    // From now on nothing is new.
    tokio::time::sleep(plan.interval * 2).await;
    let pid = planner.pid().context("the planner's process id")?;
    let (before, own) = (Usage::of(pid)?, Usage::of(std::process::id())?);
    let (reports, begun) = (hosts.taken(), Instant::now());
    let mut times = ask(plan, &client).await?;
    let wall = begun.elapsed();
    times.sort_unstable();
    let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied();
    let (after, own_after) = (Usage::of(pid)?, Usage::of(std::process::id())?);
    planner.check()?;
    let taken = hosts.taken().saturating_sub(reports);
    Ok(Figures {
        store: plan.store,
        hosts: plan.hosts,
        p50: at(50).unwrap_or_default(),
        p99: at(99).unwrap_or_default(),
        worst: at(100).unwrap_or_default(),
        planner_rss_mib: after.rss_mib,
        planner_cores: after.cores_since(&before, wall),
        generator_cores: own_after.cores_since(&own, wall),
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        reports_per_second: taken as f64 / wall.as_secs_f64(),
        admitted: times.len(),
        late: hosts.late(),
    })
}

/// Asks for VMs at a fixed pace; returns how long each took to be admitted, from when it was due.
async fn ask(plan: &Plan, client: &PlannerClient<Channel>) -> Result<Vec<Duration>> {
    let gap = Duration::from_secs(1) / plan.per_second.max(1);
    let mut asked = JoinSet::new();
    let first = Instant::now();
    for number in 0..plan.per_second * plan.seconds {
        let due = first + gap * number;
        tokio::time::sleep_until(due).await;
        let mut client = client.clone();
        asked.spawn(async move {
            let definition = hosts::definition(&format!("new-{number}"), 4);
            let request = v1::StartVmRequest { definition, ..v1::StartVmRequest::default() };
            let vm = client.start_vm(request).await.context("ask for a VM")?.into_inner();
            if !matches!(vm.power.as_str(), "starting" | "running") {
                bail!("VM {} is {}: {}", vm.name, vm.power, vm.error);
            }
            Ok(due.elapsed())
        });
    }
    let mut times = Vec::new();
    while let Some(ended) = asked.join_next().await {
        times.push(ended.context("a request")??);
    }
    Ok(times)
}

fn free_address() -> Result<SocketAddr> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a port")?;
    listener.local_addr().context("find a port")
}

async fn connected(planner: &mut PlannerProcess) -> Result<PlannerClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", planner.grpc()))?.tcp_nodelay(true);
    let begun = Instant::now();
    loop {
        planner.check()?;
        match endpoint.connect().await {
            Ok(channel) => return Ok(PlannerClient::new(channel)),
            Err(error) if begun.elapsed() > START_MAX => {
                return Err(error).context("reach the planner");
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
