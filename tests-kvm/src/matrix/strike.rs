//! Carrying out one cell: up to the point, the death, what comes of it, and what that proves.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use tonic::Status;
use vmferry_proto::v1::{ListMigrationsRequest, Migration, Vm};

use super::evidence::{self, Evidence};
use super::scenario::{Asked, Scenario, Stage, begin, make_room, wait_planner};
use super::{Cell, End, Place, Point, Victim};
use crate::cases::death::kill_qemu;
use crate::cases::{POINT_BOUND, move_vm};
use crate::client::describe;
use crate::cluster::{Cluster, GuestVm};
use crate::planners::Store;
use crate::proof::qemu_processes;
use crate::wait::{Holds, Level, wait_for};

/// How long a move may take after the death: leases end, hosts boot, agents learn.
const END_BOUND: Duration = Duration::from_secs(60);

/// Long enough to tell that a guest stands still: it prints a line every 10 ms.
const SILENCE: Duration = Duration::from_millis(300);

/// Carries out a cell.
///
/// # Errors
///
/// Says in what it does not end as the design says.
pub async fn carry_out(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Evidence> {
    let stage = begin(cluster, cell).await?;
    let reached = reach(cluster, cell.point).await?;
    for planner in cluster.planners().filter(|planner| planner.daemon.pid().is_none()) {
        planner.daemon.start()?;
    }
    let dead_planner = strike(cluster, cell, &stage, reached).await?;
    let (vm, ballast) = (stage.vm.clone(), stage.ballast.clone());
    let (generation, since_us) = (stage.generation, stage.since_us);
    let mut stage = stage;
    let answer = hear(cluster, cell, &mut stage, dead_planner).await?;
    let migration = match &answer {
        Ok(Some(id)) => Some(id.clone()),
        Ok(None) | Err(_) => only_migration(cluster, &vm).await?.map(|migration| migration.id),
    };
    if cell.scenario == Scenario::Queue
        && let Some(ballast) = &ballast
        && ballast_runs(cluster, ballast)?
    {
        make_room(cluster, ballast).await?;
    }
    let asked = (migration.as_deref(), &answer);
    let (end, migration) = conclude(cluster, cell, (&vm, generation), asked).await?;
    expect_place(cluster, &vm, end.place).await?;
    cluster.clients.expect_nothing_open(END_BOUND).await?;
    let alone = match end.place {
        Place::Source => Some("a"),
        Place::Destination => Some("b"),
        Place::Lost | Place::Stopped => None,
    };
    cluster.clients.expect_well(&vm, alone).await?;
    let after = expect_generation(cluster, &vm, generation + end.generations).await?;
    if let Some(planner) = dead_planner
        && cell.store == Store::Postgres
    {
        come_back(cluster, planner, migration.as_ref()).await?;
    }
    let goes_again = cell.scenario != Scenario::QueueCancel
        && end.phase == Some("aborted")
        && end.place == Place::Source;
    let seen = evidence::Seen {
        end,
        generation: after.generation,
        error: migration.map_or(after.error, |migration| migration.error),
        since_us,
    };
    let evidence = evidence::gather(cluster, &vm, seen).await?;
    if goes_again {
        // A guest that stayed can be moved as if nothing had been.
        cluster.wait_heard().await?;
        move_vm(cluster, &vm, "b").await.context("the move after")?;
    }
    Ok(evidence)
}

/// Waits until somebody waits at the point; returns which planner, if it is one.
async fn reach(cluster: &mut Cluster<'_>, point: Point) -> Result<Option<usize>> {
    match point {
        Point::Planner { .. } => wait_planner(cluster, &point.fault()).await.map(Some),
        Point::Agent { host, .. } => {
            cluster.host(host)?.faults.wait_reached(&point.fault(), POINT_BOUND).await?;
            Ok(None)
        }
    }
}

/// Kills the victim, starts what can be started again, and lets everyone go on. Returns the planner
/// that died.
async fn strike(
    cluster: &mut Cluster<'_>,
    cell: &Cell,
    stage: &Stage,
    reached: Option<usize>,
) -> Result<Option<usize>> {
    // Of two planners the one that drives dies with whoever else does: the other one has to find
    // out what happened to both.
    let dies = cell.victim == Victim::Planner || cell.store == Store::Postgres;
    let driver = match reached {
        Some(reached) => reached,
        None => driver_of(cluster),
    };
    let dead_planner = dies.then_some(driver);
    if let Some(number) = dead_planner {
        planner(cluster, number)?.daemon.kill().await?;
    }
    let Casualties { agents, machine, qemu } = Casualties::of(cell.victim);
    for host in agents {
        cluster.host(host)?.agent.kill().await?;
    }
    if let Some(host) = qemu {
        kill_qemu(cluster, &stage.vm, host).await?;
    }
    let lab = cluster.lab;
    if let Some(host) = machine {
        cluster.host(host)?.crash(lab).await?;
    }
    let died = machine.is_some() || cell.victim == Victim::SourceQemu;
    if died && cell.scenario == Scenario::Start {
        // A start that nobody has seen to end goes on, or begins again.
        stage.vm.serial.forget();
    }
    for host in cluster.host_names() {
        cluster.host(host)?.faults.disarm()?;
    }
    for host in agents {
        cluster.host(host)?.agent.start()?;
    }
    if let Some(host) = machine {
        cluster.host(host)?.boot()?;
    }
    if let Some(frozen) = stage.frozen
        && matches!(cell.victim, Victim::ReceiverQemu | Victim::DestinationHost)
    {
        // Without the receiver only this process has the guest: it would be waited for. By now it
        // may have been ended.
        match kill(frozen, Signal::SIGCONT) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error).with_context(|| format!("let {frozen} go on")),
        }
    }
    if let Some(number) = dead_planner
        && cell.store == Store::Sqlite
    {
        cluster.disarm_planners()?;
        planner(cluster, number)?.daemon.start()?;
    }
    cluster.disarm_planners()?;
    Ok(dead_planner)
}

/// Who dies beside a planner, by host.
struct Casualties {
    agents: &'static [&'static str],
    machine: Option<&'static str>,
    qemu: Option<&'static str>,
}

impl Casualties {
    const fn of(victim: Victim) -> Self {
        let none = Self { agents: &[], machine: None, qemu: None };
        match victim {
            Victim::Planner => none,
            Victim::SourceAgent => Self { agents: &["a"], ..none },
            Victim::DestinationAgent => Self { agents: &["b"], ..none },
            Victim::BothAgents => Self { agents: &["a", "b"], ..none },
            Victim::SourceQemu => Self { qemu: Some("a"), ..none },
            Victim::ReceiverQemu => Self { qemu: Some("b"), ..none },
            Victim::SourceHost => Self { machine: Some("a"), ..none },
            Victim::DestinationHost => Self { machine: Some("b"), ..none },
        }
    }
}

/// Returns the planner that drives what the cell is about: the one that was asked.
fn driver_of(cluster: &Cluster<'_>) -> usize {
    cluster.clients.asked_planner()
}

fn planner<'c>(
    cluster: &'c mut Cluster<'_>,
    number: usize,
) -> Result<&'c mut crate::planners::Planner> {
    cluster.planners().nth(number).context("the case has no such planner")
}

/// Takes the answer to the call; whoever got none because the planner died asks again.
async fn hear(
    cluster: &Cluster<'_>,
    cell: &Cell,
    stage: &mut Stage,
    dead_planner: Option<usize>,
) -> Result<Result<Option<String>, Status>> {
    let status = match stage.answer().await? {
        Ok(id) => return Ok(Ok(id)),
        Err(status) => status,
    };
    if !cluster.clients.is_away(&status) {
        return Ok(Err(status));
    }
    if dead_planner.is_none() {
        bail!("a call was not answered although its planner lives: {status}");
    }
    // A cancel that was written holds without being asked for again.
    let written = matches!(cell.point, Point::Planner { side: "after_commit", .. });
    if written && let Asked::Cancel(id) = &stage.asked {
        return Ok(Ok(Some(id.clone())));
    }
    // Asked before it has heard of the hosts that came back, it says so.
    cluster.wait_heard().await?;
    stage.asked.until_answered(&cluster.clients).await
}

/// Returns the only migration of a VM, or none; fails if there are more.
async fn only_migration(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<Option<Migration>> {
    let clients = &cluster.clients;
    let mut found = wait_for("a planner to list migrations", Duration::from_secs(15), || async {
        let all = ListMigrationsRequest { vm: vm.uuid.to_string(), ..Default::default() };
        match clients.planner().list_migrations(all).await {
            Ok(reply) => Ok(Level::Reached(reply.into_inner().migrations)),
            Err(status) if clients.is_away(&status) => Ok(Level::NotYet(status.to_string())),
            Err(status) => Err(status.into()),
        }
    })
    .await?;
    if found.len() > 1 {
        let found: Vec<_> = found.iter().map(describe).collect();
        bail!("one request made {} migrations: {found:?}", found.len());
    }
    Ok(found.pop())
}

fn ballast_runs(cluster: &Cluster<'_>, ballast: &GuestVm) -> Result<bool> {
    let uuid = ballast.uuid.to_string();
    let found = qemu_processes(cluster.lab, cluster.host_names())?;
    Ok(found.iter().any(|process| process.uuid == uuid))
}

/// Waits for the end, and compares it with what the design says.
async fn conclude(
    cluster: &Cluster<'_>,
    cell: &Cell,
    (vm, generation): (&GuestVm, u64),
    (id, answer): (Option<&str>, &Result<Option<String>, Status>),
) -> Result<(End, Option<Migration>)> {
    let (phase, migration) = match id {
        Some(id) => {
            let over = |m: &Migration| matches!(m.phase.as_str(), "done" | "aborted" | "failed");
            let clients = &cluster.clients;
            let migration = clients.wait_migration(id, "to end", END_BOUND, over).await?;
            if only_migration(cluster, vm).await?.is_none_or(|only| only.id != id) {
                bail!("one request made more than {id}");
            }
            if migration.phase != "done" && migration.error.is_empty() {
                bail!("the migration ended without a cause: {}", describe(&migration));
            }
            (migration.phase.clone(), Some(migration))
        }
        None => {
            let refused = matches!(cell.scenario, Scenario::Start | Scenario::Stop);
            let phase = match answer {
                Ok(_) if refused => "",
                Err(_) if refused => "",
                Ok(_) => bail!("a request was answered and made no migration"),
                Err(_) => "refused",
            };
            (phase.to_owned(), None)
        }
    };
    let ends = cell.outcome.ends();
    let mut fitting = ends.clone();
    fitting.retain(|end| end.phase.unwrap_or_default() == phase);
    if fitting.len() > 1 {
        // The same phase, the guest elsewhere: what the planner comes to say of the VM decides which.
        let fits = |end: &End, vm: &Vm| {
            power(end.place) == vm.power && vm.generation == generation + end.generations
        };
        let of_one = |vm: &Vm| fitting.iter().any(|end| fits(end, vm));
        let seen = cluster.clients.wait_vm(vm, END_BOUND, of_one).await?;
        fitting.retain(|end| fits(end, &seen));
    }
    match (fitting.first(), &migration) {
        (Some(end), _) => Ok((*end, migration)),
        (None, Some(migration)) => {
            bail!("should end as {ends:?}: {}", describe(migration))
        }
        (None, None) => bail!("should end as {ends:?}, ended as {phase:?}: {answer:?}"),
    }
}

/// Returns what the planner says of a VM whose guest is there.
const fn power(place: Place) -> &'static str {
    match place {
        Place::Source | Place::Destination => "running",
        Place::Lost => "lost",
        Place::Stopped => "stopped",
    }
}

fn is_settled(vm: &Vm) -> bool {
    matches!(vm.power.as_str(), "running" | "stopped" | "lost")
}

/// Proves that the guest is where it should be, and nowhere else.
async fn expect_place(cluster: &Cluster<'_>, vm: &GuestVm, place: Place) -> Result<()> {
    match place {
        Place::Source => return cluster.expect_running(vm, "a").await,
        Place::Destination => return cluster.expect_running(vm, "b").await,
        Place::Lost | Place::Stopped => {}
    }
    let seen = cluster.clients.wait_vm(vm, END_BOUND, |seen| seen.power == power(place)).await?;
    if place == Place::Lost && seen.error.is_empty() {
        bail!("{} is lost without a cause", vm.name);
    }
    let uuid = vm.uuid.to_string();
    wait_for("no QEMU process of the VM", Duration::from_secs(10), || async {
        let found = qemu_processes(cluster.lab, cluster.host_names())?;
        let left: Vec<_> = found.into_iter().filter(|process| process.uuid == uuid).collect();
        Ok(Level::from_condition(Holds::from(left.is_empty()), || format!("{left:?}")))
    })
    .await?;
    vm.serial.wait_still(SILENCE, Duration::from_secs(5)).await?;
    cluster.expect_one_guest(vm)
}

async fn expect_generation(cluster: &Cluster<'_>, vm: &GuestVm, expected: u64) -> Result<Vm> {
    let seen = cluster.clients.wait_vm(vm, Duration::from_secs(10), is_settled).await?;
    if seen.generation != expected {
        bail!("{} is at generation {} instead of {expected}", vm.name, seen.generation);
    }
    Ok(seen)
}

/// Starts the planner again that died while the other one went on, and asks it.
async fn come_back(
    cluster: &mut Cluster<'_>,
    number: usize,
    migration: Option<&Migration>,
) -> Result<()> {
    planner(cluster, number)?.daemon.start()?;
    cluster.wait_ready().await.context("both planners, after the dead one came back")?;
    let Some(before) = migration else { return Ok(()) };
    cluster.clients.ask_planner(number);
    let same = |m: &Migration| m.phase == before.phase;
    cluster
        .clients
        .wait_migration(&before.id, "to be as the other planner left it", POINT_BOUND, same)
        .await?;
    Ok(())
}
