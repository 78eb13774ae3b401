//! The hosts and the planner of one case: fresh state, the built binaries, and
//! what a case does with them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::process::Command;
use tonic::transport::Channel;
use uuid::Uuid;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_proto::v1::{ListHostsRequest, StartVmRequest, StopVmRequest, VmObservation};

use crate::accel::Accelerator;
use crate::client::Clients;
use crate::guest::{GuestKind, GuestSpec};
use crate::host::Host;
use crate::lab::{Lab, PLANNER_ADDRESS};
use crate::pki::{Pki, Wire};
use crate::planners::{Database, Planner, Store};
use crate::proof;
use crate::serial::Serial;
use crate::wait::{Holds, Level, wait_for};

/// How long a daemon may take until it answers.
const READY_BOUND: Duration = Duration::from_secs(45);

/// How long a guest may take to say its first words, by far enough.
const BOOT_BOUND: Duration = Duration::from_secs(30);

/// Where the built programs and guests are, and how guests are run.
#[derive(Clone, Debug)]
pub struct Artifacts {
    /// Holds `vmferry-agent`, `vmferry-planner` and `vmferry`.
    pub binaries: PathBuf,
    /// Holds what `scripts/guest-image` built.
    pub guests: PathBuf,
    /// Whether these programs know fault points.
    pub fault_points: FaultPoints,
    /// The accelerator of each kind of guest that was tried.
    pub accelerators: BTreeMap<GuestKind, Accelerator>,
}

/// Whether agent and planner were built with the feature `fault-points`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoints {
    /// For the cases.
    Compiled,
    /// For what is shown or measured: nothing is in there that is not shipped.
    Absent,
}

impl FaultPoints {
    /// Returns the lines of a daemon's configuration that name their directory.
    #[must_use]
    pub fn toml(self, dir: &Path) -> String {
        match self {
            Self::Compiled => format!("[fault_points]\ndir = {:?}\n", dir.display().to_string()),
            Self::Absent => String::new(),
        }
    }
}

/// A VM of a case.
#[derive(Debug)]
pub struct GuestVm {
    /// Its name.
    pub name: String,
    /// Its id.
    pub uuid: Uuid,
    /// What it was made of.
    pub spec: GuestSpec,
    /// What its guest printed.
    pub serial: Serial,
}

/// Hosts, planner and VMs of one case.
#[derive(Debug)]
pub struct Cluster<'l> {
    /// The machines.
    pub lab: &'l Lab,
    /// Programs and guests.
    pub artifacts: &'l Artifacts,
    /// Clients of planner and agents.
    pub clients: Clients,
    /// The planner, or the first of two.
    pub planner: Planner,
    /// The second planner, where two share a store.
    pub second: Option<Planner>,
    /// Where the planners keep what they hold to be true.
    pub store: Store,
    pki: Option<Pki>,
    hosts: BTreeMap<&'static str, Host>,
    vms: Vec<Arc<GuestVm>>,
    dir: PathBuf,
    // Dropped last, after the planners that use it.
    _database: Option<Database>,
}

impl<'l> Cluster<'l> {
    /// Writes the configurations below `dir` and starts planner and agents; returns when the planner
    /// would place a VM on each host.
    ///
    /// # Errors
    ///
    /// Fails if a daemon does not come up.
    pub async fn start(
        lab: &'l Lab,
        artifacts: &'l Artifacts,
        dir: &Path,
        hosts: &[&'static str],
        (store, wire): (Store, Wire),
    ) -> Result<Self> {
        for sub in ["log", "disk"] {
            fs::create_dir_all(dir.join(sub))
                .with_context(|| format!("create {}/{sub}", dir.display()))?;
        }
        let database = match store {
            Store::Sqlite => None,
            Store::Postgres => Some(Database::create(dir)?),
        };
        let pki = match wire {
            Wire::PlainText => None,
            Wire::Tls => Some(Pki::create(&artifacts.binaries, dir)?),
        };
        let mut planners = Vec::new();
        for (number, address) in store.addresses().iter().enumerate() {
            let at = (number, *address);
            planners.push(Planner::new(
                lab,
                artifacts,
                dir,
                at,
                (database.as_ref(), pki.as_ref()),
            )?);
        }
        let mut planners = planners.into_iter();
        let planner = planners.next().context("a case has a planner")?;
        let mut made = BTreeMap::new();
        for host in hosts {
            made.insert(*host, Host::new(lab, artifacts, dir, host, (store, pki.as_ref()))?);
        }
        let mut cluster = Self {
            lab,
            artifacts,
            clients: Clients::new(hosts, store.addresses(), pki.as_ref())?,
            planner,
            second: planners.next(),
            store,
            pki,
            hosts: made,
            vms: Vec::new(),
            dir: dir.to_owned(),
            _database: database,
        };
        for planner in cluster.planners() {
            planner.daemon.start()?;
        }
        for host in cluster.hosts.values_mut() {
            host.agent.start()?;
        }
        cluster.wait_ready().await?;
        Ok(cluster)
    }

    /// Returns the planners.
    pub fn planners(&mut self) -> impl Iterator<Item = &mut Planner> {
        [&mut self.planner].into_iter().chain(self.second.as_mut())
    }

    /// Disarms the fault points of every planner.
    ///
    /// # Errors
    ///
    /// Fails if a directory cannot be emptied.
    pub fn disarm_planners(&mut self) -> Result<()> {
        self.planners().try_for_each(|planner| planner.faults.disarm())
    }

    /// Returns a host.
    ///
    /// # Errors
    ///
    /// Fails if the case has no such host.
    pub fn host(&mut self, name: &str) -> Result<&mut Host> {
        self.hosts.get_mut(name).with_context(|| format!("the case has no host {name}"))
    }

    /// Returns the names of the hosts.
    #[must_use]
    pub fn host_names(&self) -> Vec<&'static str> {
        self.hosts.keys().copied().collect()
    }

    /// Returns the directory of the case.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns where a shared disk of this name lies.
    #[must_use]
    pub fn disk_path(&self, name: &str) -> PathBuf {
        self.dir.join("disk").join(name)
    }

    /// Returns the VMs started so far.
    #[must_use]
    pub fn vms(&self) -> &[Arc<GuestVm>] {
        &self.vms
    }

    /// Waits until the planner answers and would place a VM on every host.
    ///
    /// # Errors
    ///
    /// Fails if it does not, or if a daemon ended.
    pub async fn wait_ready(&mut self) -> Result<()> {
        let names = self.host_names();
        let clients = self.clients.clone();
        let ready = async {
            for planner in clients.planners() {
                wait_placeable(&clients, &names, || planner.clone()).await?;
            }
            clients.ask_planner(0);
            Ok(())
        };
        let agents = self.hosts.values_mut().map(|host| &mut host.agent);
        let planners = [&mut self.planner].into_iter().chain(self.second.as_mut());
        let daemons = agents.chain(planners.map(|planner| &mut planner.daemon));
        // One that a case has killed is not missed.
        let deaths = daemons.map(|daemon| Box::pin(daemon.ended()));
        tokio::select! {
            result = ready => result,
            (death, ..) = futures::future::select_all(deaths) => Err(death),
        }
    }

    /// Waits until whichever planner is there would place a VM on every host.
    ///
    /// # Errors
    ///
    /// Fails if none would.
    pub async fn wait_heard(&self) -> Result<()> {
        let clients = &self.clients;
        wait_placeable(clients, &self.host_names(), || clients.planner()).await
    }

    /// Starts a VM on a host and waits until its guest runs.
    ///
    /// # Errors
    ///
    /// Fails if it is refused or its guest says nothing.
    pub async fn start_vm(&mut self, spec: &GuestSpec, host: &str) -> Result<Arc<GuestVm>> {
        let accelerator =
            self.artifacts.accelerators.get(&spec.kind).copied().unwrap_or(Accelerator::Tcg);
        self.start_vm_with(spec, host, accelerator).await
    }

    /// Starts a VM with a certain accelerator.
    ///
    /// # Errors
    ///
    /// Fails if it is refused or its guest says nothing.
    pub async fn start_vm_with(
        &mut self,
        spec: &GuestSpec,
        host: &str,
        accelerator: Accelerator,
    ) -> Result<Arc<GuestVm>> {
        let (vm, request) = self.define_vm_with(spec, host, accelerator)?;
        let started =
            self.clients.planner().start_vm(request).await.context("start the VM")?.into_inner();
        if started.power != "running" {
            bail!("{} is {} after its start: {}", spec.name, started.power, started.error);
        }
        vm.serial.wait_ticks(3, BOOT_BOUND).await?;
        if vm.spec.kind == GuestKind::Linux && vm.spec.load != crate::guest::Load::Idle {
            vm.serial.wait_text("FILLED", BOOT_BOUND).await?;
        }
        Ok(vm)
    }

    /// Prepares a VM and the request to define and start it on a host, for a case that asks by itself.
    ///
    /// # Errors
    ///
    /// Fails if its guest or its disk is not there.
    pub fn define_vm(
        &mut self,
        spec: &GuestSpec,
        host: &str,
    ) -> Result<(Arc<GuestVm>, StartVmRequest)> {
        let accelerator =
            self.artifacts.accelerators.get(&spec.kind).copied().unwrap_or(Accelerator::Tcg);
        self.define_vm_with(spec, host, accelerator)
    }

    fn define_vm_with(
        &mut self,
        spec: &GuestSpec,
        host: &str,
        accelerator: Accelerator,
    ) -> Result<(Arc<GuestVm>, StartVmRequest)> {
        let uuid = Uuid::new_v4();
        let serial = Serial::listen(&self.dir.join(format!("{}.s", spec.name)))?;
        let mut spec = spec.clone();
        spec.extra_args.extend(serial.qemu_arguments());
        if let Some(disk) = &spec.disk
            && !disk.path.exists()
        {
            crate::disk::create(&disk.path, disk.format)?;
        }
        let definition = spec.definition(uuid, accelerator, &self.artifacts.guests, &self.dir)?;
        let request = StartVmRequest {
            definition,
            host: host.to_owned(),
            request_id: Uuid::new_v4().to_string(),
            wait_ms: 10_000,
            ..StartVmRequest::default()
        };
        let vm = Arc::new(GuestVm { name: spec.name.clone(), uuid, spec, serial });
        self.vms.push(Arc::clone(&vm));
        Ok((vm, request))
    }

    /// Runs the command line against the planner.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be run; its exit status is the caller's to judge.
    pub async fn cli(&self, arguments: &[&str]) -> Result<std::process::Output> {
        self.cli_at(PLANNER_ADDRESS, arguments).await
    }

    /// Runs the command line against the planner at an address.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be run; its exit status is the caller's to judge.
    pub async fn cli_at(&self, address: &str, arguments: &[&str]) -> Result<std::process::Output> {
        Command::new(self.artifacts.binaries.join("vmferry"))
            .args(self.cli_options(address))
            .args(arguments)
            .output()
            .await
            .context("run vmferry")
    }

    /// Prepares the command line, which is ended with its handle.
    #[must_use]
    pub fn cli_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.artifacts.binaries.join("vmferry"));
        command.args(self.cli_options(PLANNER_ADDRESS)).args(arguments).kill_on_drop(true);
        command
    }

    /// Runs the command line against the planner under the identity in `dir`.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be run; its exit status is the caller's to judge.
    pub async fn cli_as(&self, dir: &str, arguments: &[&str]) -> Result<std::process::Output> {
        Command::new(self.artifacts.binaries.join("vmferry"))
            .args(["--planner", &format!("https://{PLANNER_ADDRESS}:9096"), "--tls-dir", dir])
            .args(arguments)
            .output()
            .await
            .context("run vmferry")
    }

    /// Returns what tells the command line where the planner is, and who asks.
    #[must_use]
    pub fn cli_options(&self, address: &str) -> Vec<String> {
        let scheme = if self.pki.is_some() { "https" } else { "http" };
        let mut options = vec!["--planner".to_owned(), format!("{scheme}://{address}:9096")];
        if let Some(pki) = &self.pki {
            let operator = pki.identity("operator", "e2e").display().to_string();
            options.extend(["--tls-dir".to_owned(), operator]);
        }
        options
    }

    /// Returns the certificates of the case.
    ///
    /// # Errors
    ///
    /// Fails if it has none.
    pub fn pki(&self) -> Result<&Pki> {
        self.pki.as_ref().context("the case has no certificates")
    }

    /// Proves that a VM runs on `host` and nowhere else, as one guest that never stopped being one:
    /// planner, agents, kernel and the guest's own lines agree.
    ///
    /// # Errors
    ///
    /// Says what disagrees.
    pub async fn expect_running(&self, vm: &GuestVm, host: &str) -> Result<()> {
        let bound = Duration::from_secs(10);
        self.clients
            .wait_vm(vm, bound, |seen| seen.host == host && seen.power == "running")
            .await?;
        self.clients
            .wait_observation(host, vm, bound, |seen| {
                seen.role == "running" && seen.run_state == "running"
            })
            .await?;
        for other in self.host_names().into_iter().filter(|other| *other != host) {
            // Of a process that is proven gone a journal may still tell.
            let idle = |seen: &VmObservation| {
                matches!(seen.role.as_str(), "" | "absent" | "stopped") || seen.gone.is_some()
            };
            self.clients.wait_observation(other, vm, bound, idle).await?;
        }
        // A lost page shows when the guest comes round to it: one whole check, and some.
        vm.serial.wait_ticks(vm.spec.ticks_per_check() + 5, Duration::from_secs(20)).await?;
        self.expect_one_guest(vm)
    }

    /// Checks that the guest's lines are those of one guest.
    ///
    /// # Errors
    ///
    /// Says what is wrong with them.
    pub fn expect_one_guest(&self, vm: &GuestVm) -> Result<()> {
        vm.serial.history().check().with_context(|| format!("the guest of {}", vm.name))
    }

    /// Checks the invariants that hold after every case, stops everything, and checks that nothing is left.
    ///
    /// # Errors
    ///
    /// Says which invariant does not hold, or what was left.
    pub async fn finish(&mut self) -> Result<()> {
        self.disarm_planners()?;
        for host in self.hosts.values() {
            host.faults.disarm()?;
        }
        self.clients.expect_nothing_open(Duration::from_secs(10)).await?;
        let vms = self.clients.vms().await?;
        let running: Vec<_> = vms.iter().filter(|vm| vm.power == "running").collect();
        let expected: Vec<_> = running.iter().map(|vm| (vm.id.clone(), vm.host.clone())).collect();
        proof::expect_processes(self.lab, &self.host_names(), &expected).await?;
        for vm in &self.vms {
            self.expect_one_guest(vm)?;
        }
        for vm in running {
            let request = StopVmRequest {
                vm: vm.id.clone(),
                how: "quit".into(),
                deadline_ms: 5_000,
                wait_ms: 10_000,
            };
            let stopped =
                self.clients.planner().stop_vm(request).await.context("stop the VM")?.into_inner();
            if stopped.power != "stopped" {
                bail!("{} is {} after its stop: {}", vm.name, stopped.power, stopped.error);
            }
        }
        self.check_disks()?;
        self.stop_daemons().await?;
        let names: Vec<_> = self.vms.iter().map(|vm| vm.uuid.to_string()).collect();
        for (name, host) in &self.hosts {
            proof::expect_nothing_left(self.lab, name).await?;
            proof::expect_no_trace(&host.run_dir, &names)?;
            proof::expect_no_panic(host.agent.log())?;
        }
        proof::expect_nothing_left(self.lab, "pl").await?;
        self.planners().try_for_each(|planner| proof::expect_no_panic(planner.daemon.log()))?;
        match proof::logged(&self.dir, "ERROR")?.first() {
            Some(line) => bail!("a daemon logged an error: {line}"),
            None => Ok(()),
        }
    }

    fn check_disks(&self) -> Result<()> {
        for vm in &self.vms {
            let history = vm.serial.history();
            if let (Some(disk), Some(boot_id)) = (&vm.spec.disk, history.boot_id()) {
                let seq = crate::disk::check(disk, boot_id)?;
                let printed = history.ticks.last().map_or(0, |tick| tick.disk_seq);
                if seq < printed {
                    bail!(
                        "{}: the disk ends at turn {seq}, the guest had written {printed}",
                        vm.name
                    );
                }
            }
        }
        Ok(())
    }

    async fn stop_daemons(&mut self) -> Result<()> {
        for host in self.hosts.values_mut() {
            host.agent.stop().await?;
        }
        for planner in self.planners() {
            planner.daemon.stop().await?;
        }
        Ok(())
    }
}

/// Waits until a planner would place a VM on each of these hosts; `planner` is asked for at each look.
async fn wait_placeable(
    clients: &Clients,
    names: &[&'static str],
    planner: impl Fn() -> PlannerClient<Channel>,
) -> Result<()> {
    wait_for("every host to take placements", READY_BOUND, || async {
        let hosts = match planner().list_hosts(ListHostsRequest {}).await {
            Ok(reply) => reply.into_inner().hosts,
            Err(status) if clients.is_away(&status) => {
                return Ok(Level::NotYet(status.to_string()));
            }
            Err(status) => return Err(status.into()),
        };
        let fit = |name: &&str| {
            hosts.iter().any(|h| h.id == **name && h.status == "connected" && h.blockers.is_empty())
        };
        let seen =
            || hosts.iter().map(|h| format!("{} {} {:?}; ", h.id, h.status, h.blockers)).collect();
        Ok(Level::from_condition(Holds::from(names.iter().all(fit)), seen))
    })
    .await
}
