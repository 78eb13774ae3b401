//! Hosts that are emptied: who asks for it, and what must hold of it.

use std::time::Duration;

use vmferry_planner::store::{EmptyingChange, Reservation};
use vmferry_planner_core::lifecycle::{Emptying, drain, job};
use vmferry_proto::v1;
use vmferry_types::HostId;

use crate::cluster::{Cluster, Running};
use crate::dice::Dice;
use crate::operator::{HOSTS, on};
use crate::store::Open;
use crate::world::{Invariant, State};

/// From one look of the operator to the next, once all is calm.
const TIDIES: Duration = Duration::from_secs(4);

/// What an operator asks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Maintenance,
    Drain,
    Retire,
    Cordon,
    Uncordon,
    Cancel,
    Complete,
    Return,
}

impl Cluster {
    /// Asks for hosts to be emptied, and takes that back, as a weather has it; once it is calm, ends
    /// every drain, which by itself would go on for ever where there is no room.
    pub(crate) async fn empty_hosts(self, mut dice: Dice) {
        let wishes = [
            Wish::Maintenance,
            Wish::Maintenance,
            Wish::Drain,
            Wish::Retire,
            Wish::Cordon,
            Wish::Uncordon,
            Wish::Cancel,
            Wish::Complete,
            Wish::Return,
        ];
        let (count, hosts) = self.world.with(|state| {
            let count = usize::try_from(state.weather.hosts).unwrap_or(2);
            (state.weather.emptyings, HOSTS.iter().take(count).copied().collect::<Vec<_>>())
        });
        for _ in 0..count {
            tokio::time::sleep(dice.millis(0, 9_000)).await;
            let (Some(wish), Some(host)) = (dice.pick(&wishes), dice.pick(&hosts)) else { return };
            if self.world.with(|state| state.at_ms() >= state.weather.calm_at_ms) {
                break;
            }
            let running = self.running();
            let Some(running) = dice.pick(&running).cloned() else { continue };
            let (cluster, wish, host) = (self.clone(), *wish, *host);
            self.world.spawn_ask(async move { cluster.wishes(&running, wish, host).await });
        }
        loop {
            tokio::time::sleep(TIDIES).await;
            let drained = self.world.with(|state| {
                let calm = state.at_ms() >= state.weather.calm_at_ms;
                let rows = state.tables.emptyings.values().filter(|_| calm);
                let drained = rows.filter_map(|row| match &row.emptying {
                    Emptying::Drain(of) if of.hold() == drain::Hold::Draining => {
                        Some(of.host.clone())
                    }
                    Emptying::Drain(_) | Emptying::Job(_) => None,
                });
                drained.collect::<Vec<HostId>>()
            });
            let Some(running) = self.running().into_iter().next() else { continue };
            for host in drained {
                // A host in maintenance is not taken out of it by a word about cordons.
                for wish in [Wish::Complete, Wish::Uncordon] {
                    self.wishes(&running, wish, host.as_str()).await;
                }
            }
        }
    }

    /// Asks one planner for one thing.
    async fn wishes(&self, running: &Running, wish: Wish, host: &str) {
        let planner = &running.planner;
        let (host, by) = (host.to_owned(), "operator".to_owned());
        let job = self.world.with(|state| {
            let mut jobs = state.tables.emptyings.values().filter_map(|row| match &row.emptying {
                Emptying::Job(job) if job.host.as_str() == host => Some(job.id.to_string()),
                Emptying::Job(_) | Emptying::Drain(_) => None,
            });
            jobs.next_back().unwrap_or_default()
        });
        let asks = async {
            let told = match wish {
                Wish::Maintenance => {
                    let asked = v1::MaintenanceRequest { host: host.clone(), by, policy: None };
                    planner.execute_maintenance(asked).await.map(|_| ())
                }
                Wish::Drain | Wish::Retire => {
                    let asked = v1::DrainHostRequest { host: host.clone(), by, policy: None };
                    match wish {
                        Wish::Retire => planner.retire_host(asked).await.map(|_| ()),
                        Wish::Maintenance
                        | Wish::Drain
                        | Wish::Cordon
                        | Wish::Uncordon
                        | Wish::Cancel
                        | Wish::Complete
                        | Wish::Return => planner.drain_host(asked).await.map(|_| ()),
                    }
                }
                Wish::Cordon => {
                    let reason = "it is to be looked at".to_owned();
                    let asked =
                        v1::CordonHostRequest { host: host.clone(), by, reason, for_ms: 20_000 };
                    planner.cordon_host(asked).await.map(|_| ())
                }
                Wish::Uncordon => {
                    let asked = v1::UncordonHostRequest { host: host.clone(), by };
                    planner.uncordon_host(asked).await.map(|_| ())
                }
                Wish::Cancel => {
                    let asked = v1::CancelEmptyingRequest { id: job, by };
                    planner.cancel_emptying(asked).await.map(|_| ())
                }
                Wish::Complete | Wish::Return => {
                    let return_vms = wish == Wish::Return;
                    let asked = v1::CompleteMaintenanceRequest { id: job, return_vms, by };
                    planner.complete_maintenance(asked).await.map(|_| ())
                }
            };
            told.map_err(|error| error.code().to_owned())
        };
        let told = on(running, asks).await;
        self.world.note(|| format!("{wish:?} of {host}: {told:?}"));
    }
}

impl State {
    /// I6: a host enters maintenance, or is granted its retirement, only while it is empty.
    pub(crate) fn check_empty(&mut self, changes: &[EmptyingChange]) {
        for change in changes {
            let of = &change.after;
            let (kind, host, phase) = (of.kind().label(), of.host(), of.label());
            self.note(|| format!("{kind} of {host}: {} -> {phase}", change.event.label()));
        }
        let of = |change: &EmptyingChange| match &change.after {
            Emptying::Job(job) => {
                let enters = matches!(job.phase, job::Phase::Maintenance { .. });
                enters.then(|| job.host.clone())
            }
            Emptying::Drain(drain) => {
                let granted = matches!(drain.phase, drain::Phase::Granted { .. });
                granted.then(|| drain.host.clone())
            }
        };
        let Some(host) = changes.iter().rev().find_map(of) else { return };
        let label = changes.last().map_or("", |change| change.after.label());
        *self.counts.emptied.entry(label).or_default() += 1;
        self.note(|| format!("host {host} is {label}"));
        let mut there = Vec::new();
        if let Some(known) = self.host(&host) {
            // What a host had forgotten with its journal it names as a stranger; here nobody looks.
            let forgotten = &known.journal.forgot_launches;
            let qemus = known.qemus.values().filter(|qemu| !forgotten.contains(&qemu.launch));
            there.extend(qemus.map(|qemu| format!("QEMU {} of {}", qemu.pid, qemu.vm)));
        }
        // A VM that is off and leaves keeps its place until it is away; nothing of it runs.
        let leaves = |of: &Reservation| {
            let row = self.tables.migrations.get(&of.admission);
            row.is_some_and(|row| row.migration.source == host)
        };
        let held = self.tables.reservations.values();
        let held = held.filter(|(of, open)| of.host == host && *open == Open::Yes && !leaves(of));
        there.extend(held.map(|(of, _)| format!("a reservation of {}", of.vm)));
        if !there.is_empty() && self.by_hand.is_empty() {
            let what = format!("host {host} is {label}, and has {}", there.join(", "));
            self.violated(Invariant::SeenEmpty, what);
        }
    }

    /// Returns the hosts of jobs and drains that have to end and have not.
    pub(crate) fn emptyings_open(&self) -> Vec<HostId> {
        let rows = self.tables.emptyings.values();
        let driven = rows.filter(|row| row.emptying.is_driven());
        driven.map(|row| row.emptying.host().clone()).collect()
    }

    /// I4, of what empties hosts: each ends, unless its host cannot be asked any more, or one of its
    /// VMs is stuck.
    pub(crate) fn check_emptied(&mut self) {
        let stuck = self.tables.migrations.values().any(|row| row.ended_us.is_none());
        let hopeless = |state: &Self, host: &HostId| {
            state.host(host).is_none_or(|there| {
                (there.for_good && !there.declared) || !there.journal.forgot.is_empty()
            })
        };
        let rows = self.tables.emptyings.values();
        let open = rows.filter(|row| row.emptying.is_driven() && !stuck);
        let found: Vec<String> = open
            .filter(|row| !hopeless(self, row.emptying.host()))
            .map(|row| {
                let of = &row.emptying;
                format!("the {} of {} does not end: {of:?}", of.kind().label(), of.host())
            })
            .collect();
        for what in found {
            self.violated(Invariant::Ends, what);
        }
    }
}
