//! Blows that fall while the weather is bad, and what is made good once it is calm.

use std::time::Duration;

use vmferry_planner::clock::simulated;
use vmferry_types::HostId;

use crate::cluster::Cluster;
use crate::dice::Dice;
use crate::host::Killer;
use crate::weather::Blow;
use crate::world::{EPOCH_US, Place};

impl Cluster {
    /// Strikes until it is calm, then makes everything good that is not for good.
    pub(crate) async fn storm(&self, mut dice: Dice, hosts: Vec<HostId>) {
        let (until, every, blows) = self.world.with(|state| {
            (state.weather.calm_at_ms, state.weather.blow_every, state.weather.blows.clone())
        });
        loop {
            let at = self.world.with(|state| state.at_ms());
            let wait = if every == 0 || blows.is_empty() { until } else { dice.between(20, every) };
            if at + wait >= until {
                tokio::time::sleep(Duration::from_millis(until.saturating_sub(at))).await;
                break;
            }
            tokio::time::sleep(Duration::from_millis(wait)).await;
            if let (Some(blow), Some(host)) = (dice.pick(&blows), dice.pick(&hosts)) {
                let (blow, host) = (*blow, host.clone());
                self.blow(blow, &host, &mut dice, &hosts);
            }
        }
        self.calm(&hosts);
    }

    fn blow(&self, blow: Blow, host: &HostId, dice: &mut Dice, hosts: &[HostId]) {
        match blow {
            Blow::Planner => {
                if let Some(running) = dice.pick(&self.running()) {
                    running.life.end();
                }
            }
            Blow::Agent => {
                self.world.with(|state| state.kill_agent(host));
                self.world.restart_agent(host.clone(), dice.millis(5, 15_000));
            }
            Blow::Qemu => self.end_qemu(host, dice, "signal 9", Killer::Fate),
            Blow::PowerOff => self.power_off(host, dice),
            Blow::Host => {
                self.world.with(|state| state.crash_host(host));
                self.boot(host.clone(), dice.millis(500, 20_000));
            }
            Blow::HostForGood => self.for_good(host),
            Blow::HostsApart => {
                if let Some(other) = dice.pick(hosts).filter(|other| *other != host) {
                    self.part(Place::Host(host.clone()), Place::Host(other.clone()), dice);
                }
            }
            Blow::PlannerApart => {
                let planners = u64::from(self.world.with(|state| state.weather.planners));
                let number = u32::try_from(dice.below(planners)).unwrap_or(0);
                self.part(Place::Planner(number), Place::Host(host.clone()), dice);
            }
            Blow::Channel => self.world.with(|state| {
                let ids: Vec<_> = state.channels.keys().copied().collect();
                if let Some(id) = dice.pick(&ids) {
                    state.break_channel(*id, "connection reset");
                }
            }),
            Blow::StoreApart | Blow::Freeze => {
                let planners = u64::from(self.world.with(|state| state.weather.planners));
                let number = u32::try_from(dice.below(planners)).unwrap_or(0);
                let span = dice.millis(200, 25_000);
                if blow == Blow::Freeze {
                    self.freeze(number, span);
                } else {
                    self.take_store(number, span);
                }
            }
            Blow::Silence => self.silence(host, dice),
            Blow::Clock => self.jump(host, dice),
            Blow::Journal => {
                self.world.with(|state| {
                    state.lose_journal(host);
                });
                self.world.restart_agent(host.clone(), dice.millis(5, 3_000));
            }
        }
    }

    fn end_qemu(&self, host: &HostId, dice: &mut Dice, how: &str, killer: Killer) {
        self.world.with(|state| {
            let pids: Vec<u32> = state
                .host(host)
                .map(|host| host.qemus.keys().copied().collect())
                .unwrap_or_default();
            if let Some(pid) = dice.pick(&pids) {
                state.end_process(host, *pid, how, killer);
            }
        });
    }

    /// A guest that runs turns itself off.
    fn power_off(&self, host: &HostId, dice: &mut Dice) {
        self.world.with(|state| {
            let pids: Vec<u32> = state
                .host(host)
                .map(|host| {
                    let runs = host.qemus.values().filter(|qemu| qemu.run.has_run());
                    runs.map(|qemu| qemu.pid).collect()
                })
                .unwrap_or_default();
            if let Some(pid) = dice.pick(&pids) {
                state.end_process(host, *pid, "exit 0", Killer::Guest);
            }
        });
    }

    /// At most one host of a world is lost for good: with all of them nothing is left to see.
    fn for_good(&self, host: &HostId) {
        self.world.with(|state| {
            if state.hosts.values().any(|host| host.for_good) {
                return;
            }
            state.crash_host(host);
            if let Some(host) = state.hosts.get_mut(host) {
                host.for_good = true;
            }
        });
    }

    fn boot(&self, host: HostId, after: Duration) {
        let world = self.world.clone();
        self.world.spawn(async move {
            tokio::time::sleep(after).await;
            world.with(|state| state.boot_host(&host));
            world.start_agent(&host);
        });
    }

    fn part(&self, one: Place, other: Place, dice: &mut Dice) {
        let span = dice.millis(200, 25_000);
        let (there, back) = ((one.clone(), other.clone()), (other, one));
        let mut ways = vec![there, back];
        // A wall may be in one way only.
        if dice.chance(400) {
            let kept = usize::try_from(dice.below(2)).unwrap_or(0);
            ways.remove(kept);
        }
        let world = self.world.clone();
        world.with(|state| {
            for way in &ways {
                state.note(|| format!("nothing gets from {:?} to {:?}", way.0, way.1));
                state.cuts.insert(way.clone());
            }
        });
        self.world.spawn(async move {
            tokio::time::sleep(span).await;
            world.with(|state| {
                for way in ways {
                    if state.cuts.remove(&way) {
                        state.note(|| format!("{:?} reaches {:?} again", way.0, way.1));
                    }
                }
            });
        });
    }

    /// A planner's machine stands still: nothing of it goes on, and nothing is lost.
    fn freeze(&self, number: u32, span: Duration) {
        let machine = self.world.with(|state| {
            state.counts.freezes += 1;
            state.note(|| format!("planner {number} stands still"));
            state.machine(number)
        });
        machine.freeze();
        let world = self.world.clone();
        self.world.spawn(async move {
            tokio::time::sleep(span).await;
            world.note(|| format!("planner {number} goes on"));
            machine.thaw();
        });
    }

    /// A planner's store does not answer.
    fn take_store(&self, number: u32, span: Duration) {
        let world = self.world.clone();
        world.with(|state| {
            state.note(|| format!("planner {number} has no store"));
            state.storeless.insert(number);
        });
        self.world.spawn(async move {
            tokio::time::sleep(span).await;
            world.with(|state| {
                if state.storeless.remove(&number) {
                    state.note(|| format!("planner {number} has its store again"));
                }
            });
        });
    }

    fn silence(&self, host: &HostId, dice: &mut Dice) {
        let span = dice.millis(500, 20_000);
        let silent = self.world.with(|state| {
            let pids: Vec<u32> = state
                .host(host)
                .map(|host| host.qemus.keys().copied().collect())
                .unwrap_or_default();
            let pid = *dice.pick(&pids)?;
            state.qemu_mut(host, pid)?.silent = true;
            state.note(|| format!("host {host}: QEMU {pid} falls silent"));
            Some(pid)
        });
        let Some(pid) = silent else { return };
        let (world, host) = (self.world.clone(), host.clone());
        self.world.spawn(async move {
            tokio::time::sleep(span).await;
            world.with(|state| {
                if let Some(qemu) = state.qemu_mut(&host, pid) {
                    qemu.silent = false;
                    let vm = qemu.vm;
                    state.ring(&host, vm);
                }
            });
        });
    }

    /// A wall clock jumps, forth or back: all at once, a planner's or a host's.
    fn jump(&self, host: &HostId, dice: &mut Dice) {
        let by = dice.between(1, 30_000) * 1000;
        let ahead = dice.chance(500);
        let signed = i64::try_from(by).unwrap_or(0) * if ahead { 1 } else { -1 };
        let which = dice.below(3);
        let number = {
            let planners = u64::from(self.world.with(|state| state.weather.planners));
            u32::try_from(dice.below(planners)).unwrap_or(0)
        };
        self.world.with(|state| match which {
            0 => {
                let now = simulated::true_us().unwrap_or(EPOCH_US);
                let then = if ahead { now + by } else { now.saturating_sub(by).max(EPOCH_US) };
                state.note(|| format!("all clocks jump from {now} to {then}"));
                simulated::set(then);
            }
            1 => {
                let machine = state.machine(number);
                machine.set_skew(machine.skew() + signed);
                state.note(|| format!("the clock of planner {number} jumps by {signed} us"));
            }
            _ => {
                if let Some(there) = state.hosts.get_mut(host) {
                    there.skew_us += signed;
                }
                state.note(|| format!("the clock of host {host} jumps by {signed} us"));
            }
        });
    }

    /// Makes everything good that is not for good.
    fn calm(&self, hosts: &[HostId]) {
        self.world.with(|state| {
            state.note(|| "calm".to_owned());
            state.cuts.clear();
            state.storeless.clear();
            state.machines.values().for_each(|machine| machine.thaw());
            for host in hosts {
                state.boot_host(host);
                let silent: Vec<_> = state
                    .hosts
                    .get_mut(host)
                    .map(|host| {
                        let silent = host.qemus.values_mut().filter(|qemu| qemu.silent);
                        silent
                            .map(|qemu| {
                                qemu.silent = false;
                                qemu.vm
                            })
                            .collect()
                    })
                    .unwrap_or_default();
                for vm in silent {
                    state.ring(host, vm);
                }
            }
        });
        for host in hosts {
            self.world.start_agent(host);
        }
    }
}
