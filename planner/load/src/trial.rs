//! The trial: planners on one store, many migrations, and no peace.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;
use tokio::time::Instant;
use uuid::Uuid;

use crate::agent;
use crate::caller::{Caller, Door, Wishes, list};
use crate::checks;
use crate::console::{complain, say};
use crate::database::{Database, Kind};
use crate::dice::Dice;
use crate::disturbance::{Disturb, Disturbance};
use crate::fleet::{Fleet, Shape, Weather};
use crate::process::{PlannerProcess, Settings};
use crate::summary::Summary;

/// How long planners may take to know all hosts and VMs.
const READY_BOUND: Duration = Duration::from_secs(60);
/// How long all may take to be quiet after the last migration has ended.
const QUIET_BOUND: Duration = Duration::from_secs(30);
/// How often levels are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// How often progress is told.
const TELL: Duration = Duration::from_secs(2);
/// How many callers ask at once.
const AT_ONCE: usize = 16;

/// What is tried.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where the built planner is.
    pub planner: PathBuf,
    /// The store.
    pub store: Kind,
    /// How many planners share it.
    pub planners: usize,
    /// How many migrations are asked for.
    pub migrations: usize,
    /// The hosts and VMs.
    pub shape: Shape,
    /// What goes wrong between planners and agents.
    pub weather: Weather,
    /// What is done to planners.
    pub disturb: Disturb,
    /// The time between two disturbances, from and to.
    pub every: (Duration, Duration),
    /// How long a lease holds, as the configuration says it.
    pub lease: String,
    /// How many migrations one host receives at once.
    pub inbound_max: u32,
    /// Past it the trial has failed.
    pub bound: Duration,
    /// Where chance comes from.
    pub seed: u64,
    /// Where the planners' logs are kept if it fails.
    pub logs: PathBuf,
    /// What becomes of the store and of the logs of a trial that went well.
    pub afterwards: Afterwards,
}

/// What becomes of what a trial has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Afterwards {
    /// It is removed.
    Remove,
    /// It is kept for a look.
    Keep,
}

/// All that a trial is made of.
struct Trial<'a> {
    plan: &'a Plan,
    fleet: Fleet,
    database: Database,
    disturbance: Arc<Disturbance>,
    caller: Arc<Caller>,
    doors: Vec<Door>,
    began: Instant,
}

/// Runs a trial.
///
/// # Errors
///
/// Fails if it could not be run; what was found wrong is in the summary.
pub async fn run(plan: &Plan) -> Result<Summary> {
    let dir = TempDir::with_prefix("vmferry-load-").context("make a directory")?;
    let database = Database::create(plan.store, dir.path()).await?;
    let subnet = Subnet::pick();
    let fleet = Fleet::new(plan.shape, plan.weather, plan.seed, |number| subnet.agent(number));
    let outcome = in_place(plan, &fleet, database, subnet, dir.path()).await;
    fleet.finish().await;
    let failed = outcome.as_ref().map_or(true, |summary| !summary.failures.is_empty());
    if failed || plan.afterwards == Afterwards::Keep {
        keep_logs(dir.path(), &plan.logs);
    }
    outcome
}

async fn in_place(
    plan: &Plan,
    fleet: &Fleet,
    database: Database,
    subnet: Subnet,
    dir: &Path,
) -> Result<Summary> {
    let mut planners = Vec::new();
    for number in 0..plan.planners {
        let name = format!("planner-{number}");
        let own = dir.join(&name);
        std::fs::create_dir_all(&own).with_context(|| format!("make {}", own.display()))?;
        let (grpc, rest) = subnet.planner(number);
        planners.push(PlannerProcess::new(Settings {
            name,
            binary: plan.planner.clone(),
            dir: own,
            grpc,
            rest,
            store: database.url().to_owned(),
            lease: plan.lease.clone(),
            inbound_max: plan.inbound_max,
        })?);
    }
    let doors: Vec<Door> =
        planners.iter().map(|of| Door { grpc: of.grpc(), rest: of.rest() }).collect();
    let urls: Vec<String> = doors.iter().map(|door| format!("http://{}", door.grpc)).collect();
    agent::serve(fleet, &urls).await?;
    for planner in &mut planners {
        planner.start()?;
    }
    let trial = Trial {
        plan,
        fleet: fleet.clone(),
        database,
        disturbance: Arc::new(Disturbance::new(planners)),
        caller: Caller::new(doors.clone(), plan.seed),
        doors,
        began: Instant::now(),
    };
    let summary = trial.carry_out().await;
    // They would go on asking a store that is not there.
    trial.disturbance.end().await?;
    match plan.afterwards {
        Afterwards::Remove => trial.database.remove().await?,
        Afterwards::Keep => say(&format!("load: the store is kept: {}", trial.database.url())),
    }
    summary
}

impl Trial<'_> {
    async fn carry_out(&self) -> Result<Summary> {
        self.wait_until_known().await?;
        self.database.watch_writes().await?;
        let wishes = self.wishes();
        say(&format!(
            "load: {} planners know {} hosts and {} VMs; seed {}",
            self.plan.planners,
            self.plan.shape.hosts,
            wishes.vms.len(),
            self.plan.seed
        ));
        let began = Instant::now();
        let mut failures = Vec::new();
        let ids = tokio::select! {
            ids = self.move_all(&wishes) => ids,
            failure = self.watch_over() => Err(failure),
        };
        let took = Instant::now().saturating_duration_since(began);
        let ids = match ids {
            Ok(ids) => ids,
            Err(error) => {
                failures.push(format!("{error:#}"));
                Vec::new()
            }
        };
        self.disturbance.let_go_on().await?;
        if failures.is_empty()
            && let Err(error) = self.wait_until_quiet().await
        {
            failures.push(format!("{error:#}"));
        }
        failures.extend(self.fleet.violations());
        let found = checks::all(&self.fleet, &self.database, &self.doors, &ids).await?;
        failures.extend(found);
        failures.extend(self.disturbance.panics().await);
        let counts = self.disturbance.counts().await;
        let parts = (&self.fleet, self.caller.as_ref());
        Summary::of(self.plan, &self.database, parts, (counts, took), failures).await
    }

    /// One migration for each VM, and again from the first when all have had theirs.
    fn wishes(&self) -> Wishes {
        let mut vms: Vec<String> = self.fleet.vms().into_iter().map(|(_, name)| name).collect();
        let mut dice = Dice::new(self.plan.seed, "wishes");
        for at in (1..vms.len()).rev() {
            vms.swap(at, dice.index(at + 1));
        }
        let vms = vms.iter().cycle().take(self.plan.migrations).cloned().collect();
        let hosts = self.fleet.addresses().into_iter().map(|(id, _)| id.to_string()).collect();
        Wishes { vms, hosts }
    }

    /// Waits until every planner has heard of every host and VM.
    async fn wait_until_known(&self) -> Result<()> {
        let end = Instant::now() + READY_BOUND;
        loop {
            let mut missing = String::new();
            for door in &self.doors {
                match self.unknown_to(*door).await {
                    Ok(None) => {}
                    Ok(Some(what)) => missing = what,
                    Err(error) => missing = format!("{error:#}"),
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            self.disturbance.check().await?;
            if Instant::now() >= end {
                bail!("waited {READY_BOUND:?} for the planners to know all hosts: {missing}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn unknown_to(&self, door: Door) -> Result<Option<String>> {
        let hosts = list(door, "/api/hosts", "hosts").await?;
        let connected = hosts.iter().filter(|host| host["status"] == "connected").count();
        let vms = list(door, "/api/vms", "vms").await?.len();
        let all = (self.plan.shape.hosts, self.fleet.vms().len());
        Ok(((connected, vms) != all).then(|| {
            format!("{} knows {connected} of {} hosts, {vms} of {} VMs", door.rest, all.0, all.1)
        }))
    }

    /// Asks for all migrations, disturbs, and waits until each has ended.
    async fn move_all(&self, wishes: &Wishes) -> Result<Vec<String>> {
        let moved = async {
            let ids = self.caller.ask_for(wishes, AT_ONCE).await?;
            while self.open().await? > 0 {
                tokio::time::sleep(LOOK).await;
            }
            Ok(ids)
        };
        let disturbed = self.disturbance.keep_disturbing(
            self.plan.disturb,
            self.plan.every,
            Dice::new(self.plan.seed, "disturbance"),
        );
        tokio::select! {
            moved = tokio::time::timeout(self.plan.bound, moved) => match moved {
                Ok(ids) => ids,
                Err(_) => bail!(
                    "not all had ended after {:?}; last refusal: {}",
                    self.plan.bound,
                    self.caller.last_refusal().await
                ),
            },
            error = disturbed => Err(error),
        }
    }

    async fn open(&self) -> Result<usize> {
        let rows = self.database.rows("SELECT id FROM migrations WHERE ended_us IS NULL").await?;
        Ok(rows.len())
    }

    /// Tells how far it is; returns when it need not go on: something is wrong.
    async fn watch_over(&self) -> anyhow::Error {
        let mut broken = self.fleet.broken();
        let mut tick = tokio::time::interval(TELL);
        loop {
            tokio::select! {
                _ = broken.changed() => {
                    return anyhow::anyhow!("an invariant is broken, see above");
                }
                _ = tick.tick() => {
                    // The database may be busy: the next look tells.
                    if let Ok(line) = self.progress().await {
                        say(&line);
                    }
                }
            }
        }
    }

    async fn progress(&self) -> Result<String> {
        let rows = self
            .database
            .rows("SELECT phase, CAST(count(*) AS TEXT) FROM migrations GROUP BY phase ORDER BY phase")
            .await?;
        let phases: Vec<String> = rows.iter().map(|row| row.join(" ")).collect();
        let counts = self.disturbance.counts().await;
        let since = Instant::now().saturating_duration_since(self.began).as_secs_f64();
        Ok(format!(
            "load: {since:6.1} s  asked {}, {}; {} kills, {} freezes",
            self.caller.asked.accepted.load(Ordering::Relaxed),
            phases.join(", "),
            counts.kills,
            counts.freezes
        ))
    }

    /// Waits until all planners show what is so: nothing open, nothing reserved, each VM where it is.
    async fn wait_until_quiet(&self) -> Result<()> {
        let end = Instant::now() + QUIET_BOUND;
        loop {
            let mut wrong = self.fleet.leftovers();
            for door in &self.doors {
                match checks::shown(&self.fleet, *door).await {
                    Ok(found) => wrong.extend(found),
                    Err(error) => wrong.push(format!("{error:#}")),
                }
            }
            if wrong.is_empty() {
                return Ok(());
            }
            if Instant::now() >= end {
                wrong.truncate(10);
                bail!("{QUIET_BOUND:?} after the last end: {}", wrong.join("\n"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Addresses of one trial on loopback, below the ports that the kernel gives out.
#[derive(Clone, Copy, Debug)]
struct Subnet(u8, u8);

impl Subnet {
    fn pick() -> Self {
        let [a, b, ..] = *Uuid::new_v4().as_bytes();
        // 127.0 is everybody's.
        Self(a.max(1), b)
    }

    fn address(self, last: u8, port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, self.0, self.1, last)), port)
    }

    fn planner(self, number: usize) -> (SocketAddr, SocketAddr) {
        let last = u8::try_from(number + 1).unwrap_or(u8::MAX);
        (self.address(last, 9096), self.address(last, 9095))
    }

    fn agent(self, number: usize) -> SocketAddr {
        self.address(250, u16::try_from(10_000 + number).unwrap_or(u16::MAX))
    }
}

fn keep_logs(dir: &Path, kept: &Path) {
    let copy = || -> std::io::Result<()> {
        std::fs::create_dir_all(kept)?;
        for entry in std::fs::read_dir(dir)?.flatten() {
            let from = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let log = from.join(format!("{name}.log"));
            if log.exists() {
                std::fs::copy(&log, kept.join(format!("{name}.log")))?;
            }
        }
        Ok(())
    };
    match copy() {
        Ok(()) => complain(&format!("load: the planners' logs are kept in {}", kept.display())),
        Err(error) => complain(&format!("load: the logs could not be kept: {error}")),
    }
}
