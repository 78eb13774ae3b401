//! What is under way when somebody dies.

mod held;
mod silent;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::unistd::Pid;
use prost::Message as _;
use serde_json::json;
use tokio::task::JoinSet;
use tonic::Status;
use vmferry_proto::v1::{
    ErrorDetail, GetVmRequest, MigrateVmRequest, Migration, StartVmRequest, StopVmRequest,
};

use super::{Cell, Point};
use crate::cases::cancel::start_endless;
use crate::cases::death::kill_qemu;
use crate::cases::{POINT_BOUND, request};
use crate::client::{Clients, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::monitor::Monitors;
use crate::serial::now_us;
use crate::wait::{Holds, Level, wait_for};

/// How long a call may wait for a start or a stop: as long as a death and a boot take.
const WAIT_MS: u64 = 20_000;

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// A VM moves from host a to host b.
    Move,
    /// It is called back while its memory crosses.
    Cancel,
    /// Its transfer ends after the order, behind the agent's back: the source's guest goes on.
    Undo,
    /// Its receiver dies when both sides have said that all has arrived.
    LostReceiver,
    /// Its QEMU on the source dies while the guest stands still.
    LostSource,
    /// Its guest is held still while its memory crosses, as it was asked for.
    Held,
    /// That is called back while memory crosses.
    HeldCancel,
    /// It cannot converge, and goes on with its guest held.
    Downgrade,
    /// That is called back when the live attempt is being cleared away.
    DowngradeCancel,
    /// Its source falls silent when the destination has everything: it is decided forward.
    Forward,
    /// Its guest turns itself off while memory crosses.
    PowerOff,
    /// It waits for room, which comes.
    Queue,
    /// It waits for room and is called back.
    QueueCancel,
    /// A VM is started on host a.
    Start,
    /// A VM is stopped on host a.
    Stop,
}

impl Scenario {
    /// Each of them.
    pub const EACH: [Self; 15] = [
        Self::Move,
        Self::Cancel,
        Self::Undo,
        Self::LostReceiver,
        Self::LostSource,
        Self::Held,
        Self::HeldCancel,
        Self::Downgrade,
        Self::DowngradeCancel,
        Self::Forward,
        Self::PowerOff,
        Self::Queue,
        Self::QueueCancel,
        Self::Start,
        Self::Stop,
    ];

    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Move => "move",
            Self::Cancel => "cancel",
            Self::Undo => "undo",
            Self::LostReceiver => "lost-receiver",
            Self::LostSource => "lost-source",
            Self::Held => "held",
            Self::HeldCancel => "held-cancel",
            Self::Downgrade => "downgrade",
            Self::DowngradeCancel => "downgrade-cancel",
            Self::Forward => "forward",
            Self::PowerOff => "power-off",
            Self::Queue => "queue",
            Self::QueueCancel => "queue-cancel",
            Self::Start => "start",
            Self::Stop => "stop",
        }
    }

    /// Says in a sentence what is under way.
    #[must_use]
    pub const fn explanation(self) -> &'static str {
        match self {
            Self::Move => "A running VM moves from the source to the destination.",
            Self::Cancel => "A move is called back while memory crosses.",
            Self::Undo => {
                "The transfer ends after the switchover was ordered, behind the agent's back, so \
                 that the guest goes on at the source: the move is taken back."
            }
            Self::LostReceiver => {
                "The receiver dies when both sides have said that all has arrived; that is \
                 committed, and the move is taken back under the next generation."
            }
            Self::LostSource => "The source's QEMU dies at the switchover: the guest is lost.",
            Self::Held => {
                "A VM moves by the method `snapshot`: its guest is held still while memory crosses."
            }
            Self::HeldCancel => "A move whose guest is held is called back while memory crosses.",
            Self::Downgrade => {
                "A live move that cannot converge is taken back, and goes on in place with its guest \
                 held."
            }
            Self::DowngradeCancel => {
                "A live move that cannot converge is called back when its first receiver is to go."
            }
            Self::Forward => {
                "The source sends its last while its agent is dead, and then its QEMU says nothing \
                 any more: with the destination complete it is decided forward. A QEMU process of the \
                 source answers again where the receiver dies."
            }
            Self::PowerOff => "The guest turns itself off on the source while memory crosses.",
            Self::Queue => "A move waits for room on the destination; then a VM there is stopped.",
            Self::QueueCancel => "A move that waits for room is called back.",
            Self::Start => "A VM is started on a host (the source's columns are that host's).",
            Self::Stop => "A VM is stopped on a host (the source's columns are that host's).",
        }
    }
}

/// What the planner was asked, so that whoever got no answer can ask again.
#[derive(Clone, Debug)]
pub(super) enum Asked {
    Migrate(MigrateVmRequest),
    Cancel(String),
    Start(StartVmRequest),
    Stop(StopVmRequest),
}

impl Asked {
    /// Asks once. Returns the migration that it is about, if it is about one.
    pub(super) async fn once(&self, clients: &Clients) -> Result<Option<String>, Status> {
        let of = |migration: Migration| Some(migration.id);
        match self {
            Self::Migrate(request) => clients.migrate(request).await.map(of),
            Self::Cancel(id) => clients.cancel(id).await.map(of),
            Self::Start(request) => clients.planner().start_vm(request.clone()).await.map(|_| None),
            Self::Stop(request) => clients.planner().stop_vm(request.clone()).await.map(|_| None),
        }
    }

    /// Asks until somebody answers, with yes or no: that a host does not answer yet is neither.
    pub(super) async fn until_answered(
        &self,
        clients: &Clients,
    ) -> Result<Result<Option<String>, Status>> {
        wait_for("a planner to answer", Duration::from_secs(45), || async {
            match self.once(clients).await {
                Err(status) if clients.is_away(&status) || waits_for_a_host(&status) => {
                    Ok(Level::NotYet(status.message().to_owned()))
                }
                answer => Ok(Level::Reached(answer)),
            }
        })
        .await
    }
}

/// Says whether a refusal is also for a host that is on its way back.
fn waits_for_a_host(status: &Status) -> bool {
    let Ok(detail) = ErrorDetail::decode(status.details()) else { return false };
    let passing = |code: &str| matches!(code, "not_connected" | "learning" | "unreadable");
    detail.blockers.iter().any(|blocker| passing(&blocker.code))
}

/// A scenario on its way to the point.
pub(super) struct Stage {
    /// The VM that it is about.
    pub(super) vm: Arc<GuestVm>,
    /// The VM that takes the room on the destination.
    pub(super) ballast: Option<Arc<GuestVm>>,
    /// The VM's generation before. None if the VM is new.
    pub(super) generation: u64,
    /// What leads to the point.
    pub(super) asked: Asked,
    /// The call that was made, which may be waiting at the point.
    pub(super) call: JoinSet<Result<Option<String>, Status>>,
    /// When it was made, on the host's monotonic clock.
    pub(super) since_us: u64,
    /// The source's QEMU process, where it is there and says nothing.
    pub(super) frozen: Option<Pid>,
    // Kept open: QEMU processes connect to it.
    _monitors: Option<Monitors>,
}

impl Stage {
    /// Waits for the answer to the call.
    pub(super) async fn answer(&mut self) -> Result<Result<Option<String>, Status>> {
        let answer = self.call.join_next().await.context("the call was not made")?;
        answer.context("make the call")
    }
}

/// Brings a scenario about, up to the call that leads to the cell's point, where whoever comes is held.
pub(super) async fn begin(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    match cell.scenario {
        Scenario::Move => {
            let vm = start(cluster, &guest(cluster)).await?;
            hold(cluster, cell.point)?;
            let asked = Asked::Migrate(move_to(&vm, "b"));
            stage(cluster, vm, asked, None).await
        }
        Scenario::Cancel => {
            let vm = start(cluster, &guest(cluster)).await?;
            let migration = start_endless(cluster, &vm).await?;
            hold(cluster, cell.point)?;
            stage(cluster, vm, Asked::Cancel(migration.id), None).await
        }
        Scenario::Undo => undo(cluster, cell).await,
        Scenario::LostReceiver => die_at(cluster, cell, "before_commit.restored", "b").await,
        Scenario::LostSource => die_at(cluster, cell, "before_commit.ordered", "a").await,
        Scenario::Held => held::moves(cluster, cell).await,
        Scenario::HeldCancel => held::cancelled(cluster, cell).await,
        Scenario::Downgrade => held::downgraded(cluster, cell).await,
        Scenario::DowngradeCancel => held::downgrade_cancelled(cluster, cell).await,
        Scenario::Forward => silent::forward(cluster, cell).await,
        Scenario::PowerOff => silent::powers_off(cluster, cell).await,
        Scenario::Queue => queue(cluster, cell).await,
        Scenario::QueueCancel => {
            let (ballast, vm, anywhere) = without_room(cluster).await?;
            let migration = request(cluster, &anywhere).await?;
            wait_queued(cluster, &migration.id).await?;
            hold(cluster, cell.point)?;
            let stage = stage(cluster, vm, Asked::Cancel(migration.id), None).await?;
            Ok(Stage { ballast: Some(ballast), ..stage })
        }
        Scenario::Start => {
            // Without a disk: it may die before it has written anything.
            let (vm, wanted) = cluster.define_vm(&GuestSpec::rom("mortal"), "a")?;
            hold(cluster, cell.point)?;
            let wanted = StartVmRequest { wait_ms: WAIT_MS, ..wanted };
            stage(cluster, vm, Asked::Start(wanted), None).await
        }
        Scenario::Stop => {
            let vm = start(cluster, &guest(cluster)).await?;
            hold(cluster, cell.point)?;
            let asked = Asked::Stop(stop(&vm));
            stage(cluster, vm, asked, None).await
        }
    }
}

/// A guest with a disk: what it wrote tells of a second runner as well as what it printed.
fn guest(cluster: &Cluster<'_>) -> GuestSpec {
    GuestSpec::rom("mortal").with_disk(&cluster.disk_path("mortal.raw"), "raw")
}

/// Starts a guest on the source, and waits until it has written to its disk.
async fn start(cluster: &mut Cluster<'_>, spec: &GuestSpec) -> Result<Arc<GuestVm>> {
    let vm = cluster.start_vm(spec, "a").await?;
    wait_for("the guest to write to its disk", Duration::from_secs(10), || async {
        let written = vm.serial.history().ticks.last().map_or(0, |tick| tick.disk_seq);
        Ok(Level::from_condition(Holds::from(written > 0), || "nothing written".to_owned()))
    })
    .await?;
    Ok(vm)
}

/// Returns a request to pull a VM's plug.
pub(crate) fn stop(vm: &GuestVm) -> StopVmRequest {
    StopVmRequest {
        vm: vm.uuid.to_string(),
        how: "quit".into(),
        deadline_ms: 5_000,
        wait_ms: WAIT_MS,
    }
}

/// Makes whoever comes to the point wait there.
fn hold(cluster: &mut Cluster<'_>, point: Point) -> Result<()> {
    match point {
        Point::Planner { .. } => hold_planners(cluster, &point.fault()),
        Point::Agent { host, .. } => cluster.host(host)?.faults.hold(&point.fault()),
    }
}

/// Makes whichever planner comes to a fault point wait there.
fn hold_planners(cluster: &mut Cluster<'_>, fault: &str) -> Result<()> {
    cluster.planners().try_for_each(|planner| planner.faults.hold(fault))
}

/// Waits until one of the planners waits at a fault point, and returns its number.
pub(super) async fn wait_planner(cluster: &mut Cluster<'_>, fault: &str) -> Result<usize> {
    let faults: Vec<_> = cluster.planners().map(|planner| planner.faults.clone()).collect();
    wait_for(format_args!("a planner to come to {fault}"), POINT_BOUND, || async {
        let reached = faults.iter().position(|faults| faults.is_reached(fault));
        Ok(Level::from_option(reached, || "none there".to_owned()))
    })
    .await
}

/// Lets every planner go on.
fn release_planners(cluster: &mut Cluster<'_>, fault: &str) -> Result<()> {
    cluster.planners().try_for_each(|planner| planner.faults.release(fault))
}

/// Makes the call that leads to the point.
async fn stage(
    cluster: &Cluster<'_>,
    vm: Arc<GuestVm>,
    asked: Asked,
    monitors: Option<Monitors>,
) -> Result<Stage> {
    let generation = generation(cluster, &vm).await?;
    let since_us = now_us();
    let mut call = JoinSet::new();
    call.spawn({
        let (clients, asked) = (cluster.clients.clone(), asked.clone());
        async move { asked.once(&clients).await }
    });
    let (ballast, frozen) = (None, None);
    Ok(Stage { vm, ballast, generation, asked, call, since_us, frozen, _monitors: monitors })
}

/// Makes a move that is held nowhere yet, and waits until its memory crosses while the guest runs.
async fn under_way(
    cluster: &Cluster<'_>,
    vm: Arc<GuestVm>,
    wanted: MigrateVmRequest,
    monitors: Option<Monitors>,
) -> Result<Stage> {
    let mut stage = stage(cluster, vm, Asked::Migrate(wanted), monitors).await?;
    let answer = stage.answer().await?.context("begin to move")?;
    let id = answer.clone().context("a move is a migration")?;
    cluster.clients.wait_crossing(&id, POINT_BOUND).await?;
    stage.call.spawn(async { Ok(answer) });
    Ok(stage)
}

/// Returns a VM's generation; 0 for one that nobody knows yet.
pub(super) async fn generation(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<u64> {
    let request = GetVmRequest { vm: vm.uuid.to_string() };
    match cluster.clients.planner().get_vm(request).await {
        Ok(reply) => Ok(reply.into_inner().generation),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(0),
        Err(status) => Err(status).context("ask for the VM"),
    }
}

/// Ends a transfer that is ordered, before the agent has passed the order on: its guest goes on.
async fn undo(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    const ORDERED: &str = "after_journal.order_switchover";
    let monitors = Monitors::listen(&cluster.dir().join("m"))?;
    let mut spec = guest(cluster);
    spec.extra_args.extend(monitors.qemu_arguments());
    let vm = start(cluster, &spec).await?;
    let mut source = monitors.next().await?;
    let faults = cluster.host("a")?.faults.clone();
    faults.hold(ORDERED)?;
    hold(cluster, cell.point)?;
    let asked = Asked::Migrate(move_to(&vm, "b"));
    let stage = stage(cluster, vm, asked, Some(monitors)).await?;
    faults.wait_reached(ORDERED, POINT_BOUND).await?;
    source.execute("migrate_cancel", json!({})).await.context("end the transfer")?;
    faults.release(ORDERED)?;
    Ok(stage)
}

/// Kills the VM's QEMU on a host while the planner waits at a point, which leads to the cell's.
///
/// Of two planners the other one is away until then: one that waits does not renew its lease, and
/// would be taken over from before it comes to the cell's point.
async fn die_at(cluster: &mut Cluster<'_>, cell: &Cell, fault: &str, host: &str) -> Result<Stage> {
    let vm = start(cluster, &guest(cluster)).await?;
    if let Some(second) = &mut cluster.second {
        second.daemon.stop().await?;
    }
    hold_planners(cluster, fault)?;
    let asked = Asked::Migrate(move_to(&vm, "b"));
    let stage = stage(cluster, vm, asked, None).await?;
    wait_planner(cluster, fault).await?;
    hold(cluster, cell.point)?;
    kill_qemu(cluster, &stage.vm, host).await?;
    release_planners(cluster, fault)?;
    Ok(stage)
}

/// Queues a move; to be admitted, it is given room.
async fn queue(cluster: &mut Cluster<'_>, cell: &Cell) -> Result<Stage> {
    let (ballast, vm, anywhere) = without_room(cluster).await?;
    let asked = Asked::Migrate(anywhere);
    let at_queueing = matches!(cell.point, Point::Planner { commit: "queued", .. });
    if at_queueing {
        hold(cluster, cell.point)?;
        let stage = stage(cluster, vm, asked, None).await?;
        return Ok(Stage { ballast: Some(ballast), ..stage });
    }
    let mut stage = stage(cluster, vm, asked, None).await?;
    let queued = stage.answer().await?.context("queue the move")?;
    hold(cluster, cell.point)?;
    make_room(cluster, &ballast).await?;
    stage.call.spawn(async { Ok(queued) });
    Ok(Stage { ballast: Some(ballast), ..stage })
}

/// Fills the other host, and prepares a request that has to wait for room there.
async fn without_room(
    cluster: &mut Cluster<'_>,
) -> Result<(Arc<GuestVm>, Arc<GuestVm>, MigrateVmRequest)> {
    let large = |name: &str| GuestSpec { memory_mib: 1100, ..GuestSpec::rom(name) };
    let ballast = cluster.start_vm(&large("ballast"), "b").await?;
    let patient = large("mortal").with_disk(&cluster.disk_path("mortal.raw"), "raw");
    let vm = start(cluster, &patient).await?;
    // Any host: one that was asked for by name and has no room is refused.
    let anywhere = MigrateVmRequest { target_host: String::new(), ..move_to(&vm, "") };
    Ok((ballast, vm, anywhere))
}

/// Stops the VM that takes the room.
pub(super) async fn make_room(cluster: &Cluster<'_>, ballast: &GuestVm) -> Result<()> {
    let asked = Asked::Stop(stop(ballast));
    let answer = asked.until_answered(&cluster.clients).await?;
    answer.map(|_| ()).context("make room")
}

/// Waits until a move waits for room.
pub(super) async fn wait_queued(cluster: &Cluster<'_>, id: &str) -> Result<()> {
    let waits = |m: &Migration| m.phase == "queued";
    cluster.clients.wait_migration(id, "to wait for room", POINT_BOUND, waits).await?;
    Ok(())
}
