//! One schedule: a seed, a world, and what came of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmferry_planner::clock::simulated;
use vmferry_planner::store::VmRow;
use vmferry_planner_core::evidence::RunState;
use vmferry_proto::v1;
use vmferry_types::{Bytes, Claim, Generation, HostId, MigrationId, MilliCpu, PowerState, VmId};

use crate::bugs::Bug;
use crate::channel::host as host_named;
use crate::cluster::Cluster;
use crate::dice::Dice;
use crate::host::{Host, short};
use crate::journal::{Part, Process, Record};
use crate::trace::Detail;
use crate::weather::Weather;
use crate::world::{Counts, EPOCH_US, Guest, Mishap, PointKind, Script, State, Violation, World};

/// Once it is calm, all has to have ended within this.
const CALM: Duration = Duration::from_mins(20);
/// How often the world looks whether all has ended.
const LOOK: Duration = Duration::from_secs(5);
const GIB: u64 = 1 << 30;

/// What a schedule is made of.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// All chance comes from it.
    pub seed: u64,
    /// What goes wrong by chance.
    pub weather: Weather,
    /// What goes wrong at exact points: at the how many-th of its kind.
    pub mishaps: Vec<(PointKind, u64, Mishap)>,
    /// The mistake that is made on purpose.
    pub bug: Option<Bug>,
    /// How much is kept of what happened.
    pub detail: Detail,
}

/// What came of a schedule.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Invariants that did not hold, in order.
    pub violations: Vec<Violation>,
    /// What happened, if it was to be kept.
    pub trace: Vec<String>,
    /// What it came through.
    pub counts: Counts,
    /// How many points of each kind there were.
    pub points: BTreeMap<PointKind, u64>,
    /// How long it took in its own time, in milliseconds.
    pub lasted_ms: u64,
}

impl Schedule {
    /// Draws a schedule.
    #[must_use]
    pub fn drawn(seed: u64) -> Self {
        Self {
            seed,
            weather: Weather::drawn(seed),
            mishaps: Vec::new(),
            bug: None,
            detail: Detail::Nothing,
        }
    }

    /// One move of one VM in fair weather, with mishaps at exact points.
    #[must_use]
    pub fn directed(seed: u64, mishaps: &[(PointKind, u64, Mishap)]) -> Self {
        Self { weather: Weather::fair(), mishaps: mishaps.to_vec(), ..Self::drawn(seed) }
    }

    /// Runs it to its end.
    ///
    /// # Panics
    ///
    /// If the machine gives no more threads or memory.
    #[must_use]
    pub fn run(&self) -> Outcome {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap_or_else(|error| unreachable!("a runtime without IO needs nothing: {error}"));
        runtime.block_on(async {
            simulated::set(EPOCH_US);
            let state = State::new(self.seed, self.weather.clone(), self.detail, self.bug);
            let world = World::new(state);
            self.play(&world).await
        })
    }

    async fn play(&self, world: &World) -> Outcome {
        let hosts = self.populate(world);
        for host in &hosts {
            world.start_agent(host);
        }
        let cluster = Cluster::new(world.clone());
        for number in 0..self.weather.planners {
            cluster.keep(number, &hosts);
        }
        let storm = {
            let (cluster, hosts) = (cluster.clone(), hosts.clone());
            let dice = Dice::new(self.seed, "storm");
            async move { cluster.storm(dice, hosts).await }
        };
        world.spawn(storm);
        if !self.mishaps.is_empty() {
            world.spawn(cluster.clone().cancel_when_told());
            world.spawn(cluster.clone().boot_what_crashed(hosts.clone()));
        }
        // In fair weather all know each other before anything is asked for.
        let fair = self.weather.calm_at_ms == 0;
        let wait = if fair { 6_000 } else { Dice::new(self.seed, "beginning").between(50, 2_000) };
        tokio::time::sleep(Duration::from_millis(wait)).await;
        if fair {
            world.with(|state| state.script.seen.clear());
        }
        self.ask(&cluster).await;
        self.wait(&cluster).await;
        // What is still on its way may arrive now.
        tokio::time::sleep(Duration::from_secs(15)).await;
        let trouble = trouble(&cluster).await;
        world.with(|state| {
            state.check_end(&trouble);
            state.check_taps();
            Outcome {
                violations: std::mem::take(&mut state.violations),
                trace: state.trace.take(),
                counts: state.counts.clone(),
                points: state.script.seen.clone(),
                lasted_ms: state.at_ms(),
            }
        })
    }

    /// Makes hosts and VMs that run.
    fn populate(&self, world: &World) -> Vec<HostId> {
        let names = ["a", "b", "c", "d"];
        let count = usize::try_from(self.weather.hosts).unwrap_or(2);
        let hosts: Vec<HostId> = names.iter().take(count).map(|name| host_named(name)).collect();
        world.with(|state| {
            state.script = Script { at: self.mishaps.clone(), ..Script::default() };
            for host in &hosts {
                state.hosts.insert(host.clone(), Host::new(Bytes(self.weather.room * GIB)));
            }
            for number in 0..self.weather.vms {
                let at = usize::try_from(number).unwrap_or(0) % hosts.len();
                place_vm(state, number, &hosts[at]);
            }
            state.script.seen.clear();
        });
        hosts
    }

    /// Asks for migrations, and for some of them to be taken back.
    async fn ask(&self, cluster: &Cluster) {
        let mut dice = Dice::new(self.seed, "requests");
        for number in 0..self.weather.migrations {
            if number > 0 {
                let wait = dice.millis(0, self.weather.migration_every);
                tokio::time::sleep(wait).await;
            }
            let vm = dice.below(u64::from(self.weather.vms));
            let running = cluster.running();
            let Some(running) = dice.pick(&running).cloned() else { continue };
            let asked = v1::MigrateVmRequest {
                vm_name: format!("vm{}", vm + 1),
                target_host: if self.weather.hosts == 2 || dice.chance(500) {
                    String::new()
                } else {
                    let names = ["a", "b", "c", "d"];
                    let count = u64::from(self.weather.hosts);
                    let at = usize::try_from(dice.below(count)).unwrap_or(0);
                    names[at].to_owned()
                },
                queue_deadline_ms: 120_000,
                ..v1::MigrateVmRequest::default()
            };
            let cancel = dice.chance(self.weather.cancelled).then(|| dice.millis(0, 4_000));
            let cluster = cluster.clone();
            cluster.world.clone().spawn(async move {
                let name = asked.vm_name.clone();
                let token = running.life.token.clone();
                let opened = tokio::select! {
                    biased;
                    () = token.cancelled() => return,
                    opened = running.planner.migrate_vm(asked) => opened,
                };
                match opened {
                    Ok(migration) => {
                        if let Some(after) = cancel {
                            tokio::time::sleep(after).await;
                            cluster.cancel(&migration.id).await;
                        }
                    }
                    Err(error) => {
                        cluster.world.note(|| format!("{name} is not moved: {}", error.code()));
                    }
                }
            });
        }
    }

    /// Waits until all has ended, or long enough.
    async fn wait(&self, cluster: &Cluster) {
        let mut calm = Duration::from_millis(self.weather.calm_at_ms);
        if self.weather.calm_at_ms > 0 {
            // The last planner that died has to come back, too.
            calm += Duration::from_millis(self.weather.planner_back);
        }
        let world = &cluster.world;
        loop {
            tokio::time::sleep(LOOK).await;
            let (at, open) = world.with(|state| {
                let open = state.tables.migrations.values().any(|row| row.ended_us.is_none());
                (Duration::from_millis(state.at_ms()), open)
            });
            if (at > calm + LOOK && !open) || at > calm + CALM {
                return;
            }
        }
    }
}

impl Cluster {
    /// Asks to take everything back whenever a mishap says so.
    async fn cancel_when_told(self) {
        let bell = self.world.with(|state| Arc::clone(&state.script.cancel));
        loop {
            bell.notified().await;
            let open: Vec<MigrationId> = self.world.with(|state| {
                let open = state.tables.migrations.values().filter(|row| row.ended_us.is_none());
                open.map(|row| row.migration.id).collect()
            });
            for id in open {
                self.cancel(&id.to_string()).await;
            }
        }
    }

    /// Boots hosts that a mishap has crashed.
    async fn boot_what_crashed(self, hosts: Vec<HostId>) {
        loop {
            tokio::time::sleep(Duration::from_secs(3)).await;
            for host in &hosts {
                let down = self.world.with(|state| state.host(host).is_some_and(|host| !host.up));
                if down {
                    self.world.with(|state| state.boot_host(host));
                    self.world.start_agent(host);
                }
            }
        }
    }

    /// Asks any planner to take a migration back.
    pub(crate) async fn cancel(&self, id: &str) {
        let Some(running) = self.running().into_iter().next() else { return };
        let token = running.life.token.clone();
        self.world.note(|| "someone asks to cancel".to_owned());
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            told = running.planner.cancel_migration(id) => {
                if let Err(error) = told {
                    self.world.note(|| format!("not cancelled: {}", error.code()));
                }
            }
        }
    }
}

/// Returns what the open migrations wait for, as the planners say it.
async fn trouble(cluster: &Cluster) -> BTreeMap<VmId, String> {
    let open: Vec<(MigrationId, VmId)> = cluster.world.with(|state| {
        let open = state.tables.migrations.values().filter(|row| row.ended_us.is_none());
        open.map(|row| (row.migration.id, row.migration.vm)).collect()
    });
    let mut trouble = BTreeMap::new();
    for running in cluster.running() {
        for (id, vm) in &open {
            let told = running.planner.get_migration(&id.to_string()).await;
            if let Some(stuck) = told.ok().and_then(|told| told.stuck) {
                trouble.insert(*vm, format!("{}: waits for {}", stuck.cause, stuck.waits_for));
            }
        }
    }
    trouble
}

/// Lets a VM run on a host, known to all.
fn place_vm(state: &mut State, number: u32, host: &HostId) {
    let vm = VmId::from_u128(u128::from(number) + 1);
    let memory = Bytes(GIB);
    let launch = state.fresh();
    let guest = Guest {
        head: 0,
        runs: None,
        lost: None,
        copy_lost_ms: None,
        blindly: false,
        off: false,
        memory,
    };
    state.guests.insert(vm, guest);
    let Some(pid) = state.start_process(host, vm, launch, RunState::Prelaunch) else { return };
    state.run_vcpus(host, pid, "started");
    let identity = state.qemu(host, pid).map(|qemu| (qemu.pid, qemu.start_time));
    let admission = MigrationId::from_u128(u128::from(number) + 1);
    let Some(there) = state.hosts.get_mut(host) else { return };
    let mut record = Record {
        part: Part::Running {
            process: Process {
                launch,
                boot_id: there.boot_id(host),
                identity,
                generation: Generation::FIRST,
                admission,
            },
            outgoing: None,
            held: None,
        },
        ..Record::default()
    };
    record.fence.generation = Generation::FIRST;
    record.fence.claim = Claim::FIRST;
    record.fence.migration = Some(admission);
    there.journal.records.insert(vm, record);
    let row = VmRow {
        id: vm,
        name: short(vm),
        host: Some(host.clone()),
        power: PowerState::Running,
        generation: Generation::FIRST,
        claim: Claim::FIRST,
        admission: None,
        error: String::new(),
        definition: String::new(),
        resolved_machine: String::new(),
        memory,
        cpu: MilliCpu(1_000),
    };
    state.tables.vms.insert(vm, row);
}
