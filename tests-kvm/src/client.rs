//! Asking planner and agents, from the management network.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tonic::transport::Channel;
use tonic::{Code, Status};
use uuid::Uuid;
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_proto::v1::{
    CancelMigrationRequest, DoctorRequest, GetMigrationRequest, GetVmRequest, Host,
    ListHostsRequest, ListMigrationsRequest, ListVmsRequest, MigrateVmRequest, Migration,
    ObserveRequest, Vm, VmObservation,
};

use vmferry_tls::{Expected, Identity, Role, Security};

use crate::cluster::GuestVm;
use crate::lab::host_address;
use crate::pki::Pki;
use crate::wait::{Holds, Level, wait_for};

/// How a migration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest is on the destination.
    Done,
    /// The guest stayed.
    Aborted,
    /// The guest is lost.
    Failed,
}

impl End {
    /// Returns the phase that says so.
    #[must_use]
    pub const fn phase(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Aborted => "aborted",
            Self::Failed => "failed",
        }
    }
}

/// Clients of the planner and of each agent. They connect when used, and again after a restart.
#[derive(Clone, Debug)]
pub struct Clients {
    planners: Vec<PlannerClient<Channel>>,
    // Whom to ask, shared by all clones: whoever finds a planner away turns to the other.
    asked: Arc<AtomicUsize>,
    agents: BTreeMap<String, AgentClient<Channel>>,
}

impl Clients {
    /// Prepares clients; nothing is connected yet.
    ///
    /// # Errors
    ///
    /// Fails if an address is none.
    pub fn new(hosts: &[&'static str], planners: &[&str], pki: Option<&Pki>) -> Result<Self> {
        let security = pki.map_or(Security::PlainText, |pki| pki.operator().clone());
        let channel = |address: String, expected: Expected| -> Result<Channel> {
            let (endpoint, _) = vmferry_tls::endpoint(&address).context("read the address")?;
            let endpoint =
                endpoint.connect_timeout(Duration::from_secs(1)).timeout(Duration::from_secs(30));
            Ok(vmferry_tls::channel(&endpoint, &security, expected))
        };
        let mut agents = BTreeMap::new();
        for host in hosts {
            let expected = Expected::Exactly(Identity::new(Role::Host, host)?);
            let agent = channel(format!("http://{}:9097", host_address(host)), expected)?;
            agents.insert((*host).to_owned(), AgentClient::new(agent));
        }
        let planners = planners
            .iter()
            .map(|address| {
                let expected = Expected::Any(Role::Planner);
                Ok(PlannerClient::new(channel(format!("http://{address}:9096"), expected)?))
            })
            .collect::<Result<Vec<_>>>()?;
        if planners.is_empty() {
            bail!("a case has a planner");
        }
        Ok(Self { planners, agents, asked: Arc::default() })
    }

    /// Returns a client of the planner that is asked: the first, until it was found away.
    #[must_use]
    pub fn planner(&self) -> PlannerClient<Channel> {
        self.planners[self.asked_planner()].clone()
    }

    /// Returns a client of each planner.
    #[must_use]
    pub fn planners(&self) -> Vec<PlannerClient<Channel>> {
        self.planners.clone()
    }

    /// Returns the number of the planner that is asked.
    #[must_use]
    pub fn asked_planner(&self) -> usize {
        self.asked.load(Ordering::Relaxed) % self.planners.len()
    }

    /// Asks the planner with this number from now on.
    pub fn ask_planner(&self, number: usize) {
        self.asked.store(number, Ordering::Relaxed);
    }

    /// Says whether a call failed because its planner is away; the next call goes to another one.
    pub fn is_away(&self, status: &Status) -> bool {
        let away = is_away(status);
        if away {
            self.asked.fetch_add(1, Ordering::Relaxed);
        }
        away
    }

    /// Returns a client of a host's agent.
    ///
    /// # Errors
    ///
    /// Fails if the case has no such host.
    pub fn agent(&self, host: &str) -> Result<AgentClient<Channel>> {
        self.agents.get(host).cloned().with_context(|| format!("the case has no host {host}"))
    }

    /// Lists the hosts.
    ///
    /// # Errors
    ///
    /// Fails if the planner does not answer.
    pub async fn hosts(&self) -> Result<Vec<Host>> {
        Ok(self
            .planner()
            .list_hosts(ListHostsRequest {})
            .await
            .context("list hosts")?
            .into_inner()
            .hosts)
    }

    /// Lists the VMs.
    ///
    /// # Errors
    ///
    /// Fails if the planner does not answer.
    pub async fn vms(&self) -> Result<Vec<Vm>> {
        let request = ListVmsRequest { host: String::new() };
        Ok(self.planner().list_vms(request).await.context("list VMs")?.into_inner().vms)
    }

    /// Asks for a migration.
    ///
    /// # Errors
    ///
    /// Returns the planner's refusal.
    pub async fn migrate(&self, request: &MigrateVmRequest) -> Result<Migration, Status> {
        Ok(self.planner().migrate_vm(request.clone()).await?.into_inner())
    }

    /// Asks for a migration until the planner answers: it may be killed and started again meanwhile.
    ///
    /// # Errors
    ///
    /// Fails with its refusal, or if it never answers.
    pub async fn migrate_until_answered(&self, request: &MigrateVmRequest) -> Result<Migration> {
        wait_for("the planner to take the migration", Duration::from_secs(15), || async {
            match self.migrate(request).await {
                Ok(migration) => Ok(Level::Reached(migration)),
                Err(status) if self.is_away(&status) => Ok(Level::NotYet(status.to_string())),
                Err(status) => Err(status.into()),
            }
        })
        .await
    }

    /// Asks for a migration to be called back.
    ///
    /// # Errors
    ///
    /// Returns the planner's refusal.
    pub async fn cancel(&self, id: &str) -> Result<Migration, Status> {
        Ok(self
            .planner()
            .cancel_migration(CancelMigrationRequest { id: id.to_owned() })
            .await?
            .into_inner())
    }

    /// Waits until a migration is as `wanted`. A planner that is away is waited for.
    ///
    /// # Errors
    ///
    /// Fails with the migration as it was last seen.
    pub async fn wait_migration(
        &self,
        id: &str,
        what: &str,
        bound: Duration,
        wanted: impl Fn(&Migration) -> bool,
    ) -> Result<Migration> {
        wait_for(format_args!("migration {id} {what}"), bound, || async {
            match self.planner().get_migration(GetMigrationRequest { id: id.to_owned() }).await {
                Ok(reply) => {
                    let migration = reply.into_inner();
                    let found = wanted(&migration).then(|| migration.clone());
                    Ok(Level::from_option(found, || describe(&migration)))
                }
                Err(status) if self.is_away(&status) => Ok(Level::NotYet(status.to_string())),
                Err(status) => Err(status.into()),
            }
        })
        .await
    }

    /// Waits until memory crosses while the guest runs. Of several planners only the one that drives
    /// sees how much, and it need not be the one that was asked to move.
    ///
    /// # Errors
    ///
    /// Fails with the migration as it was last seen.
    pub async fn wait_crossing(&self, id: &str, bound: Duration) -> Result<()> {
        let crosses = |m: &Migration| m.phase == "admitted" && m.bytes_transferred > 0;
        wait_for(format_args!("migration {id} to copy"), bound, || async {
            let mut seen = Vec::new();
            for mut planner in self.planners() {
                match planner.get_migration(GetMigrationRequest { id: id.to_owned() }).await {
                    Ok(reply) if crosses(reply.get_ref()) => return Ok(Level::Reached(())),
                    Ok(reply) => seen.push(describe(reply.get_ref())),
                    Err(status) if is_away(&status) => seen.push(status.to_string()),
                    Err(status) => return Err(status.into()),
                }
            }
            Ok(Level::NotYet(seen.join("; ")))
        })
        .await
    }

    /// Waits until a migration is over and fails unless it ended so.
    ///
    /// # Errors
    ///
    /// Fails with how it ended instead, or where it stands.
    pub async fn expect_end(&self, id: &str, end: End, bound: Duration) -> Result<Migration> {
        let over = |m: &Migration| matches!(m.phase.as_str(), "done" | "aborted" | "failed");
        let migration = self.wait_migration(id, "to end", bound, over).await?;
        if migration.phase != end.phase() {
            bail!("the migration should end as {}: {}", end.phase(), describe(&migration));
        }
        if end != End::Done && migration.error.is_empty() {
            bail!("the migration ended without a cause: {}", describe(&migration));
        }
        Ok(migration)
    }

    /// Waits until the planner sees a VM as `wanted`.
    ///
    /// # Errors
    ///
    /// Fails with how it was last seen.
    pub async fn wait_vm(
        &self,
        vm: &GuestVm,
        bound: Duration,
        wanted: impl Fn(&Vm) -> bool,
    ) -> Result<Vm> {
        wait_for(format_args!("the planner to see {} as expected", vm.name), bound, || async {
            match self.planner().get_vm(GetVmRequest { vm: vm.uuid.to_string() }).await {
                Ok(reply) => {
                    let seen = reply.into_inner();
                    let found = wanted(&seen).then(|| seen.clone());
                    Ok(Level::from_option(found, || {
                        format!(
                            "{} on {:?}, generation {}, {:?}",
                            seen.power, seen.host, seen.generation, seen.error
                        )
                    }))
                }
                Err(status) if self.is_away(&status) => Ok(Level::NotYet(status.to_string())),
                Err(status) => Err(status.into()),
            }
        })
        .await
    }

    /// Waits until an agent observes a VM as `wanted`.
    ///
    /// # Errors
    ///
    /// Fails with how it was last observed.
    pub async fn wait_observation(
        &self,
        host: &str,
        vm: &GuestVm,
        bound: Duration,
        wanted: impl Fn(&VmObservation) -> bool,
    ) -> Result<VmObservation> {
        let agent = self.agent(host)?;
        wait_for(format_args!("agent {host} to see {} as expected", vm.name), bound, || async {
            let request = ObserveRequest { vm_id: vm.uuid.to_string(), claim: 0 };
            match agent.clone().observe(request).await {
                Ok(reply) => {
                    let seen = reply.into_inner();
                    let found = wanted(&seen).then(|| seen.clone());
                    Ok(Level::from_option(found, || {
                        format!(
                            "role {:?}, run state {:?}, trouble {:?}",
                            seen.role, seen.run_state, seen.trouble
                        )
                    }))
                }
                // A host that never saw the VM has nothing of it.
                Err(status) if status.code() == Code::NotFound => {
                    let nothing =
                        VmObservation { role: "absent".to_owned(), ..VmObservation::default() };
                    let found = wanted(&nothing).then(|| nothing.clone());
                    Ok(Level::from_option(found, || status.to_string()))
                }
                Err(status) if is_away(&status) => Ok(Level::NotYet(status.to_string())),
                Err(status) => Err(status.into()),
            }
        })
        .await
    }

    /// Waits until the planner's doctor finds that a VM runs on `host` alone, or nowhere, and that
    /// nothing else needs a human but VMs that are lost.
    ///
    /// # Errors
    ///
    /// Fails with what it finds.
    pub async fn expect_well(&self, vm: &GuestVm, host: Option<&str>) -> Result<()> {
        wait_for("the doctor to be content", Duration::from_secs(45), || async {
            let found = match self.planner().doctor(DoctorRequest { vm: String::new() }).await {
                Ok(reply) => reply.into_inner(),
                Err(status) if self.is_away(&status) => {
                    return Ok(Level::NotYet(status.to_string()));
                }
                Err(status) => return Err(status.into()),
            };
            let id = vm.uuid.to_string();
            let runners = if host.is_some() { "one" } else { "none" };
            let seen = found.vms.iter().find(|seen| seen.id == id);
            let right = seen.is_some_and(|seen| {
                seen.runners == runners && seen.runs_on == host.unwrap_or_default()
            });
            let grave: Vec<_> = found
                .findings
                .iter()
                .filter(|finding| finding.severity == "error" && finding.code != "lost")
                .map(|finding| &finding.message)
                .collect();
            let well = right && grave.is_empty();
            Ok(Level::from_condition(Holds::from(well), || format!("{seen:?}, {grave:?}")))
        })
        .await
    }

    /// Waits until no migration is open and nothing is reserved.
    ///
    /// # Errors
    ///
    /// Fails with what is.
    pub async fn expect_nothing_open(&self, bound: Duration) -> Result<()> {
        wait_for("no open migration and no reservation", bound, || async {
            let request = ListMigrationsRequest { open: true, ..ListMigrationsRequest::default() };
            let open = match self.planner().list_migrations(request).await {
                Ok(reply) => reply.into_inner().migrations,
                Err(status) if self.is_away(&status) => {
                    return Ok(Level::NotYet(status.to_string()));
                }
                Err(status) => return Err(status.into()),
            };
            let hosts = self.hosts().await?;
            let reserved: Vec<_> =
                hosts.iter().filter(|h| h.reserved_memory_bytes > 0).map(|h| &h.id).collect();
            let clean = open.is_empty() && reserved.is_empty();
            Ok(Level::from_condition(Holds::from(clean), || {
                let open: Vec<_> = open.iter().map(describe).collect();
                format!("open {open:?}, reservations on {reserved:?}")
            }))
        })
        .await
    }
}

/// Prepares a request to move a VM to a host.
///
/// The machine that runs the cases may be busy, and its links slow for a while: a case that is not
/// about that says nothing of it, and its move goes on until its guest fits.
#[must_use]
pub fn move_to(vm: &GuestVm, host: &str) -> MigrateVmRequest {
    MigrateVmRequest {
        vm_name: vm.name.clone(),
        target_host: host.to_owned(),
        migration_type: "live".to_owned(),
        not_converging: "wait".to_owned(),
        request_id: Uuid::new_v4().to_string(),
        ..MigrateVmRequest::default()
    }
}

/// Says whether a call failed because its daemon is away or only coming up.
fn is_away(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Unknown => true,
        Code::Ok
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => false,
    }
}

/// Says in one line where a migration stands.
#[must_use]
pub fn describe(migration: &Migration) -> String {
    let log: Vec<_> =
        migration.log.iter().map(|entry| format!("{}>{}", entry.event, entry.phase)).collect();
    let stuck = migration
        .stuck
        .as_ref()
        .map(|s| format!("; stuck: {}, waits for {}", s.cause, s.waits_for));
    format!(
        "{} ({}) {} → {}, error {:?}{}, log {log:?}",
        migration.phase,
        migration.state,
        migration.source_host,
        migration.target_host,
        migration.error,
        stuck.unwrap_or_default()
    )
}
