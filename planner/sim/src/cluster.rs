//! Planners over one store: started, killed, and started again.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vmferry_planner::agents::rpc::Directory;
use vmferry_planner::clock::simulated;
use vmferry_planner::config::{Config, MigrationDefaults, Policy, StoreUrl};
use vmferry_planner::faults::FaultPoints;
use vmferry_planner::inventory::Inventory;
use vmferry_planner::planner::{Parts, Planner};
use vmferry_planner::reconciler;
use vmferry_planner_core::migration::{Downgrade, NotConverging};
use vmferry_planner_core::queue::Ranking;
use vmferry_proto::v1;
use vmferry_types::{HostId, Percent, VmId};

use crate::agent::{self, Agent, Judged};
use crate::bugs::Bug;
use crate::journal::Record;
use crate::life::Life;
use crate::network::SimAgents;
use crate::store::SimStore;
use crate::world::{Place, State, World, id_text};

/// How often a host reports.
const REPORT: Duration = Duration::from_secs(5);

/// The planners of a world.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) world: World,
    slots: Arc<Mutex<BTreeMap<u32, Running>>>,
}

/// One running planner.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) life: Arc<Life>,
    pub(crate) planner: Arc<Planner>,
}

impl Cluster {
    pub(crate) fn new(world: World) -> Self {
        Self { world, slots: Arc::default() }
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Running>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the planners that run.
    pub(crate) fn running(&self) -> Vec<Running> {
        self.slots().values().filter(|running| !running.life.is_over()).cloned().collect()
    }

    /// Keeps one planner running, life after life.
    pub(crate) fn keep(&self, number: u32, hosts: &[HostId]) {
        let cluster = self.clone();
        let hosts = hosts.to_vec();
        self.world.spawn(async move {
            loop {
                let life = Life::new(cluster.world.clone(), number);
                let token = life.token.clone();
                let machine = Arc::clone(&life.machine);
                let lives = cluster.live(Arc::clone(&life), &hosts);
                tokio::select! {
                    biased;
                    () = token.cancelled() => {}
                    () = simulated::on(Some(machine), lives) => {}
                }
                let wait = cluster.world.with(|state| {
                    let back = state.weather.planner_back;
                    state.dice.planner.millis(10, back)
                });
                tokio::time::sleep(wait).await;
            }
        });
    }

    /// One life: starts, and waits to be ended.
    async fn live(&self, life: Arc<Life>, hosts: &[HostId]) {
        let config = config();
        let store = Arc::new(SimStore { life: Arc::clone(&life) });
        let directory = Arc::new(Directory::default());
        let Ok(inventory) = Inventory::load(&config, directory, store.as_ref()).await else {
            return;
        };
        let planner = Planner::new(Parts {
            config,
            store,
            agents: Arc::new(SimAgents { life: Arc::clone(&life) }),
            inventory,
            faults: FaultPoints::new(None),
            shutdown: life.shutdown.clone(),
        });
        let number = life.number;
        self.world.note(|| format!("planner {number} starts"));
        life.shutdown.spawn(reconciler::run(Arc::clone(&planner)));
        self.slots().insert(number, Running { life, planner: Arc::clone(&planner) });
        let reports = hosts.iter().map(|host| self.reports(number, host.clone(), &planner));
        futures::future::join_all(reports).await;
    }

    /// Lets a host report to a planner for as long as it lives.
    async fn reports(&self, number: u32, host: HostId, planner: &Arc<Planner>) {
        let (from, there) = (Place::Planner(number), Place::Host(host.clone()));
        loop {
            let report = self.world.with(|state| {
                if !state.reaches(&there, &from) {
                    return None;
                }
                let incarnation = state.agent(&host)?.incarnation;
                Some((state.report(&host)?, incarnation))
            });
            if let Some((report, incarnation)) = report {
                let journal = if report.journal_unreadable {
                    agent::Journal::Unreadable
                } else {
                    agent::Journal::Proves
                };
                let delay = self.world.with(|state| {
                    let max = state.weather.delay_max;
                    state.dice.network.millis(0, max)
                });
                tokio::time::sleep(delay).await;
                match planner.report(report).await {
                    Ok(reply) if self.world.with(|state| state.reaches(&from, &there)) => {
                        let (world, host) = (self.world.clone(), host.clone());
                        let agent = Agent { world, host, incarnation };
                        // What the agent makes of it does not end with the planner.
                        self.world.spawn(async move {
                            agent.take_up(journal, reply.generations).await;
                        });
                    }
                    // Nobody hears the answer.
                    Ok(_) => {}
                    Err(error) => {
                        self.world.note(|| format!("planner {number}: report of {host}: {error}"));
                    }
                }
            }
            tokio::time::sleep(REPORT).await;
        }
    }
}

impl State {
    /// Returns what a host says of itself, if it has an agent to say so.
    pub(crate) fn report(&mut self, host: &HostId) -> Option<v1::HostReport> {
        let vms: Vec<VmId> = self.host(host)?.journal.records.keys().copied().collect();
        let reports: Vec<v1::VmReport> =
            vms.into_iter().filter_map(|vm| self.vm_report(host, vm)).collect();
        let agent = self.agent_mut(host)?;
        agent.sequence += 1;
        let (sequence, incarnation) = (agent.sequence, agent.incarnation);
        let there = self.host(host)?;
        let used = there.qemus.values().fold(0, |sum, qemu| {
            sum + self.guests.get(&qemu.vm).map_or(0, |guest| guest.memory.value())
        });
        let learning = there.agent.as_ref().is_some_and(|agent| {
            !there.journal.records.keys().all(|vm| agent.learned.contains(vm))
        });
        Some(v1::HostReport {
            host_id: host.to_string(),
            name: host.to_string(),
            boot_id: there.boot_id(host),
            agent_instance: format!("{host}-{incarnation}"),
            agent_address: format!("{host}:9097"),
            sequence,
            learning,
            journal_unreadable: there.journal.lost && !self.bugged(Bug::AgentTrustsLostJournal),
            sent_at_ms: self.wall_ms(host),
            capabilities: Some(v1::HostCapabilities {
                accelerators: vec!["kvm".to_owned()],
                ..v1::HostCapabilities::default()
            }),
            capacity: Some(v1::Capacity {
                total_memory_bytes: there.memory.value(),
                available_memory_bytes: there.memory.value().saturating_sub(used),
                cpu_total_milli: 64_000,
                ..v1::Capacity::default()
            }),
            vms: reports,
            ..v1::HostReport::default()
        })
    }

    fn vm_report(&mut self, host: &HostId, vm: VmId) -> Option<v1::VmReport> {
        let seen = self.observe(host, vm);
        let there = self.host(host)?;
        let record = there.journal.records.get(&vm)?;
        let memory = self.guests.get(&vm).map_or(0, |guest| guest.memory.value());
        let alive = record
            .process()
            .is_some_and(|process| matches!(self.judge(host, process), Some(Judged::Alive(_))));
        Some(v1::VmReport {
            vm_id: seen.vm_id,
            vm_name: seen.vm_name,
            role: seen.role,
            generation: seen.generation,
            claim: seen.claim,
            knowledge: seen.knowledge,
            configured_memory_bytes: memory,
            observed_memory_bytes: if alive { memory } else { 0 },
            cpu_milli: 1_000,
            run_state: seen.run_state,
            handed: seen.handed,
            gave_up: seen.gave_up,
            ever_continued: seen.ever_continued,
            migration_id: id_text(record.fence.migration),
            gone: seen.gone.filter(|_| Record::process(record).is_some()),
            ..v1::VmReport::default()
        })
    }
}

/// A planner's configuration: short limits, so that what is waited for comes.
fn config() -> Config {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let none = Percent::default();
    Config {
        state_dir: PathBuf::new(),
        grpc: any,
        rest: any,
        tls: None,
        store: StoreUrl::Sqlite(PathBuf::new()),
        policy: Policy {
            reserve_memory: none,
            reserve_cpu: none,
            cpu_overcommit_percent: 100,
            report_max_age: Duration::from_secs(30),
            lease: Duration::from_secs(10),
            queue_retry: Duration::from_secs(10),
            queue_deadline: Duration::from_mins(5),
            inbound_max: 2,
            outbound_max: 2,
            transfers_max: 8,
            ranking: Ranking::default(),
        },
        migration: MigrationDefaults {
            downtime_limit: Duration::from_millis(100),
            gate_deadline: Duration::from_secs(20),
            hold_limit: Duration::from_secs(10),
            transfer_timeout: Duration::from_mins(1),
            stall_limit: Duration::from_secs(20),
            switchover_limit: Duration::from_secs(15),
            shutdown_limit: Duration::from_secs(15),
            auto_converge: false,
            downgrade: Downgrade::Never,
            not_converging: NotConverging::Abort,
        },
        hosts: BTreeMap::new(),
        fence: None,
        fault_points: None,
    }
}
