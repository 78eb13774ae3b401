//! One schedule: a seed, a world, and what came of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmferry_planner::clock::simulated;
use vmferry_types::{Bytes, HostId, MigrationId, VmId};

use crate::bugs::Bug;
use crate::channel::host as host_named;
use crate::cluster::Cluster;
use crate::dice::Dice;
use crate::host::Host;
use crate::operator::{HOSTS, Request};
use crate::populate::Begins;
use crate::trace::Detail;
use crate::weather::Weather;
use crate::world::{Counts, EPOCH_US, Mishap, PointKind, Script, State, Violation, World};

pub use crate::operator::Asked;

/// Once it is calm, all has to have ended within this.
const CALM: Duration = Duration::from_mins(20);
/// How often the world looks whether all has ended.
const LOOK: Duration = Duration::from_secs(5);
/// When a queued move gets its room, after it was asked for.
const ROOM_AFTER: Duration = Duration::from_secs(3);
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
    /// The one thing that is asked for, if not what the weather says.
    pub asked: Option<Asked>,
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
    /// What was done at each point of each kind, in order.
    pub points: BTreeMap<PointKind, Vec<&'static str>>,
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
            asked: None,
            bug: None,
            detail: Detail::Nothing,
        }
    }

    /// One move, start or stop of one VM in fair weather, with mishaps at exact points.
    #[must_use]
    pub fn directed(seed: u64, asked: Asked, mishaps: &[(PointKind, u64, Mishap)]) -> Self {
        let (vms, room) = if asked == Asked::MoveQueued { (2, 1) } else { (1, 3) };
        Self {
            weather: Weather { vms, room, ..Weather::fair() },
            mishaps: mishaps.to_vec(),
            asked: Some(asked),
            ..Self::drawn(seed)
        }
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
            let mut state = State::new(self.seed, self.weather.clone(), self.detail, self.bug);
            state.tables.mistake = [Bug::StoreOverbooks, Bug::StoreForgetsCordons]
                .into_iter()
                .find(|bug| state.bugged(*bug));
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
        world.spawn(cluster.clone().declare_the_dead(Dice::new(self.seed, "deaths")));
        world.spawn(cluster.clone().keep_gates(Dice::new(self.seed, "gates")));
        if self.weather.emptyings > 0 {
            world.spawn(cluster.clone().empty_hosts(Dice::new(self.seed, "hosts")));
        }
        if !self.mishaps.is_empty() {
            world.spawn(cluster.clone().cancel_when_told());
            world.spawn(cluster.clone().boot_what_crashed(hosts.clone()));
        }
        // In fair weather all know each other before anything is asked for.
        let fair = self.weather.calm_at_ms == 0;
        let wait = if fair { 6_000 } else { Dice::new(self.seed, "beginning").between(50, 2_000) };
        tokio::time::sleep(Duration::from_millis(wait)).await;
        if fair {
            world.with(|state| state.script.done.clear());
        }
        match self.asked {
            None => cluster.ask(self.seed, &self.weather).await,
            Some(asked) => self.ask_once(&cluster, asked).await,
        }
        self.wait(&cluster).await;
        // What is still on its way may arrive now.
        tokio::time::sleep(Duration::from_secs(15)).await;
        let trouble = trouble(&cluster).await;
        world.with(|state| {
            state.check_end(&trouble);
            state.check_emptied();
            state.check_taps();
            Outcome {
                violations: std::mem::take(&mut state.violations),
                trace: state.trace.take(),
                counts: state.counts.clone(),
                points: std::mem::take(&mut state.script.done),
                lasted_ms: state.at_ms(),
            }
        })
    }

    /// Asks for the one thing that a directed test is about.
    async fn ask_once(&self, cluster: &Cluster, asked: Asked) {
        let host = if asked == Asked::Start { "b" } else { "" };
        let Some(running) = cluster.running().into_iter().next() else { return };
        let request = Request { asked, vm: 0, host, cancel: None };
        cluster.world.spawn_ask(cluster.clone().asks(running, request));
        if asked == Asked::MoveQueued {
            tokio::time::sleep(ROOM_AFTER).await;
            let Some(running) = cluster.running().into_iter().next() else { return };
            let request = Request { asked: Asked::Quit, vm: 1, host: "", cancel: None };
            cluster.world.spawn_ask(cluster.clone().asks(running, request));
        }
    }

    /// Makes hosts and VMs.
    fn populate(&self, world: &World) -> Vec<HostId> {
        let count = usize::try_from(self.weather.hosts).unwrap_or(2);
        let hosts: Vec<HostId> = HOSTS.iter().take(count).map(|name| host_named(name)).collect();
        world.with(|state| {
            state.script = Script { at: self.mishaps.clone(), ..Script::default() };
            let mut dice = Dice::new(self.seed, "populate");
            let most = i64::try_from(self.weather.skew_max * 1000).unwrap_or(0);
            let mut skew = || {
                i64::try_from(dice.below(2 * self.weather.skew_max * 1000 + 1)).unwrap_or(0) - most
            };
            for number in 0..self.weather.planners {
                state.machine(number).set_skew(skew());
            }
            for host in &hosts {
                let mut there = Host::new(Bytes(self.weather.room * GIB));
                there.skew_us = skew();
                state.hosts.insert(host.clone(), there);
            }
            for number in 0..self.weather.vms {
                let at = usize::try_from(number).unwrap_or(0) % hosts.len();
                let begins = match self.asked {
                    Some(Asked::Start) => Begins::Stopped,
                    Some(_) => Begins::Running,
                    None if self.weather.powers == 0 => Begins::Running,
                    None => *dice
                        .pick(&[
                            Begins::Running,
                            Begins::Running,
                            Begins::Stopped,
                            Begins::Undefined,
                        ])
                        .unwrap_or(&Begins::Running),
                };
                state.place_vm(number, &hosts[at], begins);
            }
            state.script.done.clear();
        });
        hosts
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
            let asked = world.is_asked();
            let (at, open) = world.with(|state| {
                let open = asked
                    || state.tables.migrations.values().any(|row| row.ended_us.is_none())
                    || !state.tables.open_power().is_empty()
                    || !state.emptyings_open().is_empty();
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

    /// Boots hosts that a mishap has crashed, and starts agents that lost their journal.
    async fn boot_what_crashed(self, hosts: Vec<HostId>) {
        loop {
            tokio::time::sleep(Duration::from_secs(3)).await;
            for host in &hosts {
                let lame = |host: &Host| !host.up || host.agent.is_none();
                if self.world.with(|state| state.host(host).is_some_and(lame)) {
                    self.world.with(|state| state.boot_host(host));
                    self.world.start_agent(host);
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
    let powers = cluster.world.with(|state| state.tables.open_power());
    let mut trouble = BTreeMap::new();
    for running in cluster.running() {
        for action in &powers {
            if let Some((text, _)) = running.planner.live.seen(action.id).trouble {
                trouble.insert(action.vm, text);
            }
        }
        for (id, vm) in &open {
            let told = running.planner.get_migration(&id.to_string()).await;
            if let Some(stuck) = told.ok().and_then(|told| told.stuck) {
                trouble.insert(*vm, format!("{}: waits for {}", stuck.cause, stuck.waits_for));
            }
        }
    }
    trouble
}
