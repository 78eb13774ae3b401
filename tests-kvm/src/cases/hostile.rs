//! What planner and agents do with requests that no honest program sends, and where they listen.

use std::process::Output;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use futures::future::try_join_all;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tonic::{Code, Status};
use vmferry_proto::v1::{
    ClaimRequest, ErrorDetail, GetMigrationRequest, ObserveRequest, StartVmRequest, StopVmRequest,
};

use super::{Case, MOVE_BOUND, Note, POINT_BOUND, Tier, move_vm, request, settle};
use crate::client::{End, move_to};
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::hostile::footprint::Footprint;
use crate::hostile::half_open::HalfOpen;
use crate::hostile::{self, Port, Prey, definition};
use crate::lab::{PLANNER_ADDRESS, host_address};
use crate::proof::{self, QemuProcess};
use crate::rest;

mod usurper;

/// How many hostile requests each port gets.
const REQUESTS: usize = 1000;

/// How many connections each port has that do not go on.
const HALF_OPEN: usize = 50;

/// How long all of it may take, so that a slow answer is seen as what it is.
const STORM_BOUND: Duration = Duration::from_secs(60);

/// The ports that the cluster's receivers may use.
const MIGRATION_PORTS: std::ops::RangeInclusive<u16> = 49152..=49215;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("hostile-requests-change-nothing", Tier::Subset, |cluster| {
            Box::pin(storm(cluster, 1))
        }),
        Case::new("hostile-requests-of-another-seed-change-nothing", Tier::All, |cluster| {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let seed = now.map_or(2, |now| u64::from(now.subsec_nanos()));
            Box::pin(storm(cluster, seed))
        }),
        Case::new("receiver-listens-on-the-migration-address-only", Tier::Subset, |cluster| {
            Box::pin(receiver(cluster))
        }),
        Case::new("usurper-leaves-the-guest-running", Tier::Subset, |cluster| {
            Box::pin(usurper::commands(cluster))
        }),
        Case::new("plain-text-is-spoken-where-it-is-allowed-only", Tier::Subset, |cluster| {
            Box::pin(plain_text(cluster))
        }),
    ]
}

/// Everybody is sent what nobody should send. Then all is as it was.
async fn storm(cluster: &mut Cluster<'_>, seed: u64) -> Result<Note> {
    let seed = match std::env::var("SEED") {
        Ok(text) => text.parse().context("read SEED")?,
        Err(_) => seed,
    };
    storm_of(cluster, seed).await.with_context(|| format!("SEED={seed}"))
}

async fn storm_of(cluster: &mut Cluster<'_>, seed: u64) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("calm"), "a").await?;
    // There and connected is everybody that an honest planner is connected to.
    move_vm(cluster, &vm, "b").await?;
    let prey = Prey {
        planner: PLANNER_ADDRESS.to_owned(),
        agent: host_address("b"),
        vm: vm.uuid.to_string(),
        name: vm.name.clone(),
        host: "b".to_owned(),
        nobody: uuid::Uuid::new_v4().to_string(),
    };
    let nobody = ClaimRequest {
        vm_id: prey.nobody.clone(),
        migration_id: prey.vm.clone(),
        generation: 1,
        claim: 1,
        hold_limit_ms: 0,
    };
    cluster.clients.agent("b")?.claim(nobody).await.context("claim a VM that is nowhere")?;
    let before = Seen::of(cluster, &vm, &prey).await?;
    let storm = try_join_all(Port::ALL.map(|port| {
        let requests = hostile::requests(port, &prey, seed, REQUESTS);
        hostile::send(port, &prey, requests)
    }));
    let started = Instant::now();
    let tallies = tokio::time::timeout(STORM_BOUND, storm)
        .await
        .with_context(|| format!("the requests took longer than {STORM_BOUND:?}"))??;
    let took = (Instant::now() - started).as_secs_f64();
    let half_open = HalfOpen::open(&prey, HALF_OPEN).await?;
    for port in Port::ALL {
        hostile::expect_answers(port, &prey).await?;
    }
    for (port, pid) in [
        (Port::PlannerGrpc, cluster.planner.daemon.pid()),
        (Port::PlannerRest, cluster.planner.daemon.pid()),
        (Port::AgentGrpc, cluster.host("b")?.agent.pid()),
        (Port::AgentMetrics, cluster.host("b")?.agent.pid()),
    ] {
        half_open.expect_asked_after(pid.context("the daemon does not run")?, port)?;
    }
    let held = half_open.count();
    drop(half_open);
    refusals_tell(cluster, &vm).await?;
    let after = before.expect_again(cluster, &vm).await?;
    cluster.expect_running(&vm, "b").await?;
    move_vm(cluster, &vm, "a").await?;
    let counts: Vec<_> = Port::ALL
        .iter()
        .zip(&tallies)
        .map(|(port, tally)| format!("{}: {tally}", port.label()))
        .collect();
    let counts = counts.join("; ");
    Ok(format!("SEED={seed}; {counts}; {took:.1} s; {held} half-open; {after}"))
}

/// What must be the same before and after.
struct Seen {
    planner: Footprint,
    agent: Footprint,
    qemu: Vec<QemuProcess>,
    fence: (u64, u64, u64),
    connections: u32,
}

impl Seen {
    async fn of(cluster: &mut Cluster<'_>, vm: &GuestVm, prey: &Prey) -> Result<Self> {
        let planner =
            Footprint::of(&cluster.planner.daemon, &prey.address(Port::PlannerRest)).await?;
        let metrics = prey.address(Port::AgentMetrics);
        let agent = Footprint::of(&cluster.host(&prey.host)?.agent, &metrics).await?;
        let names = cluster.host_names();
        Ok(Self {
            planner,
            agent,
            qemu: proof::qemu_processes(cluster.lab, names)?,
            fence: fence(cluster, vm, &prey.host).await?,
            connections: vm.serial.connections(),
        })
    }

    async fn expect_again(&self, cluster: &mut Cluster<'_>, vm: &GuestVm) -> Result<String> {
        let planner = self.planner.expect_again(&cluster.planner.daemon).await?;
        let agent = self.agent.expect_again(&cluster.host("b")?.agent).await?;
        proof::expect_no_panic(cluster.planner.daemon.log())?;
        proof::expect_no_panic(cluster.host("b")?.agent.log())?;
        let qemu = proof::qemu_processes(cluster.lab, cluster.host_names())?;
        if qemu != self.qemu {
            bail!("QEMU processes were {:?} and are {qemu:?}", self.qemu);
        }
        let fence = fence(cluster, vm, "b").await?;
        if fence != self.fence {
            bail!("generation, claim and step were {:?} and are {fence:?}", self.fence);
        }
        if vm.serial.connections() != self.connections {
            bail!("another QEMU process of the VM was started");
        }
        Ok(format!(
            "planner {planner} (before: {}), agent {agent} (before: {})",
            self.planner, self.agent
        ))
    }
}

async fn fence(cluster: &Cluster<'_>, vm: &GuestVm, host: &str) -> Result<(u64, u64, u64)> {
    let seen = cluster.clients.wait_observation(host, vm, MOVE_BOUND, |_| true).await?;
    Ok((seen.generation, seen.claim, seen.step))
}

/// Looks closely at a few refusals: the code, the field, and what it says.
async fn refusals_tell(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<()> {
    let mut agent = cluster.clients.agent("b")?;
    let claim = ClaimRequest {
        vm_id: vm.uuid.to_string(),
        migration_id: uuid::Uuid::new_v4().to_string(),
        generation: 2,
        claim: u64::MAX,
        hold_limit_ms: 0,
    };
    let highest = agent.claim(claim.clone()).await.err();
    expect_told(highest, Code::InvalidArgument, "claim", "than anybody counts")?;
    let nameless = agent.claim(ClaimRequest { vm_id: "../x".to_owned(), ..claim }).await.err();
    expect_told(nameless, Code::InvalidArgument, "vm_id", "UUID")?;
    let mut planner = cluster.clients.planner();
    let stop = StopVmRequest {
        vm: vm.name.clone(),
        how: "by magic".to_owned(),
        ..StopVmRequest::default()
    };
    expect_told(planner.stop_vm(stop).await.err(), Code::InvalidArgument, "how", "by magic")?;
    // Too long for anybody, and short enough to come to the agent.
    for (count, code, field, says) in [
        (10_000, Code::InvalidArgument, "definition", "longer than"),
        (1000, Code::FailedPrecondition, "", "disks"),
    ] {
        let start = StartVmRequest {
            definition: definition::of_many_disks(&uuid::Uuid::new_v4().to_string(), count),
            host: "b".to_owned(),
            wait_ms: 5000,
            ..StartVmRequest::default()
        };
        expect_told(planner.start_vm(start).await.err(), code, field, says)?;
    }
    let address = format!("{PLANNER_ADDRESS}:9095");
    for (method, path, status, code) in [
        ("GET", "/api/vms/%ff", 400, "invalid"),
        ("GET", "/api/vms/..%2f..%2fetc", 404, "not_found"),
        ("DELETE", "/api/vms", 405, "method_not_allowed"),
    ] {
        let answer = rest::request(&address, method, path, None).await?;
        if answer.status != status || answer.body["code"] != code {
            bail!("{method} {path} was answered with {}: {}", answer.status, answer.body);
        }
    }
    Ok(())
}

fn expect_told(status: Option<Status>, code: Code, field: &str, says: &str) -> Result<()> {
    let status = status.with_context(|| format!("what should be refused for {says:?} was not"))?;
    let detail = ErrorDetail::decode(status.details()).context("read the refusal's details")?;
    let told = status.code() == code && detail.field == field && status.message().contains(says);
    if !told {
        bail!("expected {code:?} of {field:?} with {says:?}: {status}, {detail:?}");
    }
    Ok(())
}

/// A receiver that waits: nobody reaches it but over the network of migrations.
async fn receiver(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("awaited"), "a").await?;
    let armed = "before_answer.arm_receiver";
    let faults = cluster.host("b")?.faults.clone();
    faults.hold(armed)?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    faults.wait_reached(armed, POINT_BOUND).await?;
    let metrics = format!("{PLANNER_ADDRESS}:9095");
    let before = Footprint::of(&cluster.planner.daemon, &metrics).await?;
    let qemus = proof::qemu_processes(cluster.lab, ["a", "b"])?;
    let mut listening = Vec::new();
    for qemu in &qemus {
        let sockets = proof::listening_sockets(qemu.pid)?;
        listening.extend(sockets.into_iter().map(|socket| (qemu.host.clone(), socket)));
    }
    let [(host, socket)] = listening.as_slice() else {
        bail!("one socket should be listening, of the receiver: {listening:?}");
    };
    let right = socket.ip().to_string() == host_address("b")
        && MIGRATION_PORTS.contains(&socket.port())
        && host == "b";
    if !right {
        bail!("the receiver listens on {socket} of host {host}");
    }
    come_and_go(cluster, &migration.id, &vm).await?;
    before.expect_again(&cluster.planner.daemon).await?;
    faults.release(armed)?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(format!("it listened on {socket}"))
}

/// Watches a migration many times over, and goes in the middle of it.
async fn come_and_go(cluster: &Cluster<'_>, migration: &str, vm: &GuestVm) -> Result<()> {
    const TIMES: usize = 20;
    let (mut planner, mut agent) = (cluster.clients.planner(), cluster.clients.agent("b")?);
    let look = ObserveRequest { vm_id: vm.uuid.to_string(), claim: 0 };
    let mut events = Vec::new();
    let (mut watches, mut observations) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let mut stream = TcpStream::connect((PLANNER_ADDRESS, Port::PlannerRest.number()))
            .await
            .context("connect")?;
        let ask = format!("GET /api/migrations/{migration}/events HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(ask.as_bytes()).await.context("ask for events")?;
        let mut first = [0; 15];
        stream.read_exact(&mut first).await.context("read the first event")?;
        if &first != b"HTTP/1.1 200 OK" {
            bail!("the events were answered with {}", String::from_utf8_lossy(&first));
        }
        events.push(stream);
        let request = GetMigrationRequest { id: migration.to_owned() };
        watches.push(planner.watch_migration(request).await.context("watch the migration")?);
        observations.push(agent.watch(look.clone()).await.context("watch the VM")?);
    }
    Ok(())
}

/// Daemons that would speak where others can listen do not start, and say what to do.
async fn plain_text(cluster: &mut Cluster<'_>) -> Result<Note> {
    const EVERYWHERE: &str = "10.77.0.1";
    let loopback = "[security]\nplain_text = \"loopback\"\n";
    let namespace = "[security]\nplain_text = \"namespace\"\n";
    for (security, address, place, says) in [
        (loopback, EVERYWHERE, Place::Host, ["listen.grpc", "127.0.0.1"]),
        (loopback, "0.0.0.0", Place::Host, ["listen.grpc", "127.0.0.1"]),
        ("", "127.0.0.1", Place::Host, ["security", "\"loopback\""]),
        (namespace, "127.0.0.1", Place::Machine, ["security.plain_text", "ip netns exec"]),
    ] {
        for daemon in ["vmferry-agent", "vmferry-planner"] {
            let output = start(cluster, daemon, (security, address), place).await?;
            let told = String::from_utf8_lossy(&output.stderr);
            let what = format!("{daemon} with {security:?} on {address}");
            if output.status.success() {
                bail!("{what} ended well");
            }
            if let Some(missing) = says.iter().find(|says| !told.contains(**says)) {
                bail!("{what} does not say {missing}: {told}");
            }
        }
    }
    Ok(Note::new())
}

/// Where a daemon is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the namespace of a host of the lane.
    Host,
    /// In the network of the machine itself.
    Machine,
}

/// Starts a daemon that should end at once.
async fn start(
    cluster: &Cluster<'_>,
    daemon: &str,
    (security, address): (&str, &str),
    place: Place,
) -> Result<Output> {
    let dir = cluster.dir().join("refused");
    std::fs::create_dir_all(&dir).context("create a directory")?;
    let own = dir.display();
    let config = if daemon == "vmferry-agent" {
        format!(
            "host_id = \"x\"\nstate_dir = \"{own}/s\"\nrun_dir = \"{own}/r\"\n\
             [listen]\ngrpc = \"{address}:9197\"\nmetrics = \"127.0.0.1:9198\"\n\
             [migration]\naddress = \"127.0.0.1\"\n{security}"
        )
    } else {
        format!(
            "state_dir = \"{own}/s\"\n\
             [listen]\ngrpc = \"{address}:9196\"\nrest = \"127.0.0.1:9195\"\n{security}"
        )
    };
    let path = dir.join("refused.toml");
    std::fs::write(&path, config).context("write the configuration")?;
    let mut command = match place {
        Place::Host => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &cluster.lab.namespace("c")]);
            command
        }
        Place::Machine => {
            // Whoever started the lane is not in one of its namespaces.
            let network = format!("--net=/proc/{}/ns/net", std::os::unix::process::parent_id());
            let mut command = Command::new("nsenter");
            command.arg(network);
            command
        }
    };
    command.arg(cluster.artifacts.binaries.join(daemon)).arg("--config").arg(&path);
    // It is killed if it starts all the same.
    command.kill_on_drop(true);
    tokio::time::timeout(Duration::from_secs(5), command.output())
        .await
        .with_context(|| format!("{daemon} started and should have refused to"))?
        .with_context(|| format!("run {daemon}"))
}
