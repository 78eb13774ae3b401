//! Two agents on one machine, real QEMU, and a driver that speaks gRPC.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tonic::transport::Channel;
use tonic::{Code, Status};
use vmferry_agent::agent::{self, Agent};
use vmferry_agent::config::Config;
use vmferry_agent::process::{Launcher, LauncherKind};
use vmferry_agent::shutdown::Shutdown;
use vmferry_proto::v1;
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_proto::v1::execute_request::Action;
use vmferry_tls::{Expected, Identity, Security};

use crate::planner::Planner;
use crate::{leftovers, rom};

/// The longest that anything is waited for.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

/// One host: its agent may go and come back, its directories stay.
pub(crate) struct Host {
    pub(crate) id: String,
    dir: TempDir,
    config: PathBuf,
    running: Option<(Arc<Agent>, Shutdown)>,
    driver: Security,
    pub(crate) address: String,
    pub(crate) client: AgentClient<Channel>,
}

impl Host {
    pub(crate) async fn new(id: &str, ports: u16) -> Self {
        Self::with(id, ports, "").await
    }

    /// Makes a host whose configuration says `more`.
    pub(crate) async fn with(id: &str, ports: u16, more: &str) -> Self {
        let more = format!("[security]\nplain_text = 'loopback'\n{more}");
        Self::secured(id, ports, &more, Security::PlainText).await
    }

    /// Makes a host whose configuration says `more`, of its security as well, and whose agent is
    /// called as `driver`.
    pub(crate) async fn secured(id: &str, ports: u16, more: &str, driver: Security) -> Self {
        let dir = tempfile::Builder::new().prefix("vf").tempdir().unwrap();
        let config = dir.path().join("agent.toml");
        let (state, run) = (dir.path().join("state"), dir.path().join("run"));
        let text = format!(
            "host_id = '{id}'\nstate_dir = '{}'\nrun_dir = '{}'\n\
             [listen]\ngrpc = '127.0.0.1:0'\nmetrics = '127.0.0.1:0'\n\
             [migration]\naddress = '127.0.0.1'\nports = '{ports}-{}'\n{more}",
            state.display(),
            run.display(),
            ports + 7
        );
        std::fs::write(&config, text).unwrap();
        let (running, address, client) = start(&config, id, &driver).await;
        Self { id: id.to_owned(), dir, config, running: Some(running), driver, address, client }
    }

    /// Ends the agent and starts a new one over the same directories.
    pub(crate) async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// Starts the agent again over the same directories.
    pub(crate) async fn start(&mut self) {
        let (running, address, client) = start(&self.config, &self.id, &self.driver).await;
        self.running = Some(running);
        self.address = address;
        self.client = client;
    }

    /// Changes the configuration, for the next start.
    pub(crate) fn reconfigure(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&self.config, text.replace(from, to)).unwrap();
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) async fn report(&mut self) -> v1::HostReport {
        self.client.get_report(v1::GetReportRequest {}).await.unwrap().into_inner()
    }

    pub(crate) async fn stop(&mut self) {
        if let Some((agent, shutdown)) = self.running.take() {
            shutdown.finish().await;
            drop(agent);
        }
    }

    /// Returns how many launches have left a directory.
    pub(crate) fn launches(&self) -> usize {
        let entries = std::fs::read_dir(self.dir.path().join("run")).unwrap();
        entries.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
    }

    /// Says whether certificates lie in the runtime directory.
    pub(crate) fn holds_certificates(&self) -> bool {
        let launches = std::fs::read_dir(self.run_dir()).unwrap();
        launches.into_iter().any(|launch| launch.unwrap().path().join("tls").exists())
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        leftovers::end(self.dir.path());
    }
}

async fn start(
    config: &Path,
    id: &str,
    driver: &Security,
) -> ((Arc<Agent>, Shutdown), String, AgentClient<Channel>) {
    let shutdown = Shutdown::default();
    let launcher = Launcher::new(LauncherKind::Detached, env!("CARGO_BIN_EXE_vmferry-agent"));
    let config = Config::load(config).unwrap();
    let agent = Agent::start(config, launcher, shutdown.clone()).await.unwrap();
    let address = agent::serve(&agent).await.unwrap();
    let address = format!("https://{address}");
    let (endpoint, _) = vmferry_tls::endpoint(&address).unwrap();
    let expected = Expected::Exactly(Identity::host(id.parse().unwrap()));
    let client = AgentClient::new(vmferry_tls::channel(&endpoint, driver, expected));
    ((agent, shutdown), address, client)
}

/// One VM, the driver's place in its claim, and both hosts.
pub(crate) struct World {
    pub(crate) a: Host,
    pub(crate) b: Host,
    pub(crate) vm: String,
    pub(crate) migration: String,
    pub(crate) generation: u64,
    pub(crate) claim: u64,
    pub(crate) step: u64,
    pub(crate) definition: String,
    /// How long a guest may stand still while nobody is heard.
    pub(crate) hold_limit_ms: u64,
}

/// Which host is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    A,
    B,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with("").await
    }

    /// Makes a world in which host a reports to planners.
    pub(crate) async fn with_planners(planners: &[&Planner]) -> Self {
        let addresses: Vec<_> =
            planners.iter().map(|planner| format!("'http://{}'", planner.address)).collect();
        let addresses = addresses.join(", ");
        Self::with(&format!("[planner]\naddresses = [{addresses}]\nreport_interval = '1s'\n")).await
    }

    async fn with(more: &str) -> Self {
        let ports = 20_000 + u16::try_from(std::process::id() % 1500).unwrap() * 16;
        let (a, b) = tokio::join!(Host::with("a", ports, more), Host::new("b", ports + 8));
        Self::of(a, b)
    }

    /// Makes a world of two hosts that are there.
    pub(crate) fn of(a: Host, b: Host) -> Self {
        let rom = a.dir.path().join("idle.bin");
        std::fs::write(&rom, rom::idle()).unwrap();
        let vm = uuid::Uuid::new_v4().to_string();
        let definition = format!(
            "name = 'idle'\nuuid = '{vm}'\nmachine = 'pc'\naccel = 'tcg'\nmemory = '64MiB'\nfirmware = '{}'\n",
            rom.display()
        );
        let migration = uuid::Uuid::new_v4().to_string();
        let hold_limit_ms = 60_000;
        Self { a, b, vm, migration, generation: 1, claim: 1, step: 0, definition, hold_limit_ms }
    }

    pub(crate) fn host(&mut self, side: Side) -> &mut Host {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    /// Gives the guest another ROM, and QEMU more arguments.
    pub(crate) fn with_rom(mut self, rom: &[u8], extra_args: &[&str]) -> Self {
        std::fs::write(self.a.dir.path().join("idle.bin"), rom).unwrap();
        self.definition += &format!("extra_args = {extra_args:?}\n");
        self
    }

    /// Asks for reports until one satisfies `wanted`.
    pub(crate) async fn report_when(
        &mut self,
        side: Side,
        what: &str,
        wanted: impl Fn(&v1::HostReport) -> bool,
    ) -> v1::HostReport {
        let host = self.host(side);
        let mut last = None;
        // A report counts for half a second.
        let mut ticks = tokio::time::interval(Duration::from_millis(50));
        let found = tokio::time::timeout(BOUND, async {
            loop {
                ticks.tick().await;
                let report = host.report().await;
                if wanted(&report) {
                    return report;
                }
                last = Some(report);
            }
        });
        match found.await {
            Ok(report) => report,
            Err(_) => panic!("waited in vain for {what} on {side:?}; last reported: {last:#?}"),
        }
    }

    /// Adds a disk that both hosts see.
    pub(crate) fn with_disk(mut self) -> Self {
        let disk = self.a.dir.path().join("disk.raw");
        std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        self.definition += &format!("[[disk]]\npath = '{}'\nshared = true\n", disk.display());
        self
    }

    /// Begins a new admission: the next claim at the hosts named.
    pub(crate) async fn admit(&mut self, sides: &[Side]) {
        self.migration = uuid::Uuid::new_v4().to_string();
        self.claim += 1;
        self.step = 0;
        for side in sides {
            self.claim(*side).await.unwrap();
        }
    }

    pub(crate) async fn claim(&mut self, side: Side) -> Result<v1::VmObservation, Status> {
        let request = v1::ClaimRequest {
            vm_id: self.vm.clone(),
            migration_id: self.migration.clone(),
            generation: self.generation,
            claim: self.claim,
            hold_limit_ms: self.hold_limit_ms,
        };
        Ok(self.host(side).client.claim(request).await?.into_inner())
    }

    /// Says who owns the VM, in a planner's words.
    pub(crate) fn owned(&self, host: &str, generation: u64) -> v1::VmGeneration {
        v1::VmGeneration {
            vm_id: self.vm.clone(),
            generation,
            claim: self.claim,
            host_id: host.to_owned(),
        }
    }

    pub(crate) async fn next_claim(
        &mut self,
        side: Side,
        migration: &str,
    ) -> Result<v1::VmObservation, Status> {
        let request =
            v1::NextClaimRequest { vm_id: self.vm.clone(), migration_id: migration.to_owned() };
        Ok(self.host(side).client.next_claim(request).await?.into_inner())
    }

    pub(crate) fn request(&mut self, action: Action) -> v1::ExecuteRequest {
        self.step += 1;
        v1::ExecuteRequest {
            fence: Some(v1::Fence {
                vm_id: self.vm.clone(),
                migration_id: self.migration.clone(),
                generation: self.generation,
                claim: self.claim,
                step: self.step,
            }),
            action: Some(action),
        }
    }

    pub(crate) async fn send(
        &mut self,
        side: Side,
        request: v1::ExecuteRequest,
    ) -> Result<v1::ExecuteReply, Status> {
        Ok(self.host(side).client.execute(request).await?.into_inner())
    }

    pub(crate) async fn execute(
        &mut self,
        side: Side,
        action: Action,
    ) -> Result<v1::ExecuteReply, Status> {
        let request = self.request(action);
        self.send(side, request).await
    }

    pub(crate) async fn observe(&mut self, side: Side) -> v1::VmObservation {
        let request = v1::ObserveRequest { vm_id: self.vm.clone(), claim: self.claim };
        self.host(side).client.observe(request).await.unwrap().into_inner()
    }

    /// Watches a VM until an observation satisfies `wanted`.
    pub(crate) async fn wait(
        &mut self,
        side: Side,
        what: &str,
        mut wanted: impl FnMut(&v1::VmObservation) -> bool,
    ) -> v1::VmObservation {
        let request = v1::ObserveRequest { vm_id: self.vm.clone(), claim: self.claim };
        let mut stream = self.host(side).client.watch(request).await.unwrap().into_inner();
        let mut last = None;
        let found = tokio::time::timeout(BOUND, async {
            loop {
                let observation = stream.message().await.unwrap().expect("the stream goes on");
                if wanted(&observation) {
                    return observation;
                }
                last = Some(observation);
            }
        });
        match found.await {
            Ok(observation) => observation,
            Err(_) => panic!("waited in vain for {what} on {side:?}; last seen: {last:#?}"),
        }
    }

    pub(crate) async fn start(&mut self) -> v1::ExecuteReply {
        self.claim(Side::A).await.unwrap();
        let start =
            v1::StartVm { definition: self.definition.clone(), resolved_machine: String::new() };
        let reply = self.execute(Side::A, Action::StartVm(start)).await.unwrap();
        assert_eq!(reply.observation.as_ref().unwrap().run_state, "running");
        reply
    }

    pub(crate) async fn describe(&mut self) -> v1::SourceDescription {
        let request = v1::DescribeSourceRequest { vm_id: self.vm.clone() };
        self.a.client.describe_source(request).await.unwrap().into_inner()
    }

    pub(crate) async fn arm(&mut self) -> v1::Listener {
        let source = Some(self.describe().await);
        let arm = v1::ArmReceiver { source, policy: None };
        let reply = self.execute(Side::B, Action::ArmReceiver(arm)).await.unwrap();
        reply.listener.expect("a receiver listens")
    }

    pub(crate) async fn transfer(
        &mut self,
        listener: v1::Listener,
    ) -> Result<v1::ExecuteReply, Status> {
        let receiver_host = self.b.id.clone();
        let transfer = v1::StartTransfer { listener: Some(listener), policy: None, receiver_host };
        self.execute(Side::A, Action::StartTransfer(transfer)).await
    }

    pub(crate) async fn wait_standing(&mut self) -> v1::VmObservation {
        self.wait(Side::A, "the switchover", |seen| {
            seen.transfer.as_ref().is_some_and(|transfer| transfer.status == "pre-switchover")
        })
        .await
    }

    /// Starts, claims, arms and sends until the guest stands still for the order.
    pub(crate) async fn up_to_the_switchover(&mut self) {
        self.start().await;
        self.admit(&[Side::A, Side::B]).await;
        let listener = self.arm().await;
        self.transfer(listener).await.unwrap();
        self.wait_standing().await;
    }

    pub(crate) async fn order(&mut self) -> Result<v1::ExecuteReply, Status> {
        self.execute(Side::A, Action::OrderSwitchover(v1::OrderSwitchover {})).await
    }

    pub(crate) async fn wait_complete(&mut self) {
        let complete = |seen: &v1::VmObservation| {
            seen.transfer.as_ref().is_some_and(|transfer| transfer.complete)
        };
        self.wait(Side::A, "the source's end", |seen| {
            complete(seen) && seen.run_state == "postmigrate"
        })
        .await;
        self.wait(Side::B, "the destination's end", |seen| {
            complete(seen) && seen.run_state == "paused"
        })
        .await;
    }

    /// Lets the hosts change roles: the guest is on what was the destination.
    pub(crate) fn swap(&mut self) {
        std::mem::swap(&mut self.a, &mut self.b);
    }

    /// Ends what the test left running.
    pub(crate) async fn end(mut self) {
        for side in [Side::A, Side::B] {
            if let Some(pid) =
                self.observe(side).await.qemu.filter(|qemu| qemu.alive).map(|qemu| qemu.pid)
            {
                end_if_there(pid);
                // Its shim writes the end into the test's directory, and then goes.
                self.wait(side, "the end", |seen| seen.gone.is_some()).await;
            }
            self.host(side).stop().await;
        }
    }
}

/// Kills what may have ended by itself since it was last seen.
fn end_if_there(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    match nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
        Err(error) => panic!("QEMU {pid} cannot be killed: {error}"),
    }
}

pub(crate) fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}

/// Waits until something is so.
pub(crate) async fn until(so: impl Fn() -> bool) {
    let mut ticks = tokio::time::interval(Duration::from_millis(2));
    let waiting = async {
        while !so() {
            ticks.tick().await;
        }
    };
    assert!(tokio::time::timeout(BOUND, waiting).await.is_ok(), "it never became so");
}

/// Makes a process hang, as one does whose storage is gone.
pub(crate) fn freeze(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
}

/// Returns the stable code of an error.
pub(crate) fn code(status: &Status) -> (Code, String) {
    let detail: v1::ErrorDetail = prost::Message::decode(status.details()).unwrap();
    (status.code(), detail.code)
}
