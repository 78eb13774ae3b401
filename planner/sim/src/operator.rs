//! Whoever asks: for moves, starts and stops, to take them back, and to open gates.

use std::time::Duration;

use vmferry_planner::clock::simulated;
use vmferry_planner_core::migration::{Event, Gate, Gates, Phase, Stage, Switchover};
use vmferry_proto::v1;
use vmferry_types::{HostId, MigrationId};

use crate::bugs::Bug;
use crate::cluster::{Cluster, Running};
use crate::dice::Dice;
use crate::populate::{definition, vm_id};
use crate::weather::Weather;
use crate::world::{Place, State};

/// The names of a world's hosts.
pub(crate) const HOSTS: [&str; 4] = ["a", "b", "c", "d"];

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// That a VM moves.
    Move,
    /// That a VM moves, its guest held still from the beginning.
    MoveHeld,
    /// That a VM moves live, or held if that is refused.
    MoveSomehow,
    /// That a VM moves, its guest going before its memory.
    MoveParted,
    /// That a VM moves live, and its guest goes before its memory if that does not converge.
    MoveDiverging,
    /// That a VM moves to where there is no room before another VM is stopped.
    MoveQueued,
    /// That a VM is started.
    Start,
    /// That a guest is asked to power off.
    PowerDown,
    /// That a plug is pulled.
    Quit,
}

impl Cluster {
    /// Asks for all that a weather has in it, at some planner.
    pub(crate) async fn ask(&self, seed: u64, weather: &Weather) {
        let mut dice = Dice::new(seed, "requests");
        let mut apart = Dice::new(seed, "parted");
        let (moves, powers) = (u64::from(weather.migrations), u64::from(weather.powers));
        for number in 0..moves + powers {
            if number > 0 {
                let wait = dice.millis(0, weather.migration_every);
                tokio::time::sleep(wait).await;
            }
            let asked = if dice.below(moves + powers) < moves {
                Asked::Move
            } else {
                [Asked::Start, Asked::Start, Asked::PowerDown, Asked::Quit]
                    .get(usize::try_from(dice.below(4)).unwrap_or(0))
                    .copied()
                    .unwrap_or(Asked::Start)
            };
            let vm = u32::try_from(dice.below(u64::from(weather.vms))).unwrap_or(0);
            let host = if weather.hosts == 2 || dice.chance(500) {
                ""
            } else {
                let at = usize::try_from(dice.below(u64::from(weather.hosts))).unwrap_or(0);
                HOSTS.get(at).copied().unwrap_or_default()
            };
            let cancel = dice.chance(weather.cancelled).then(|| dice.millis(0, 4_000));
            let (held, somehow) = (dice.chance(weather.held), dice.chance(weather.downgrades));
            let asked = match (asked, held, somehow) {
                (Asked::Move, true, _) => Asked::MoveHeld,
                (Asked::Move, false, true) => Asked::MoveSomehow,
                (other, _, _) => other,
            };
            let parted = apart.chance(weather.postcopy);
            let asked = match (asked, parted, apart.chance(500)) {
                (Asked::Move, true, true) => Asked::MoveParted,
                (Asked::Move | Asked::MoveSomehow, true, _) => Asked::MoveDiverging,
                (other, _, _) => other,
            };
            if dice.below(moves + powers) < u64::from(weather.by_hand) {
                let at = usize::try_from(dice.below(u64::from(weather.hosts))).unwrap_or(0);
                let to = crate::channel::host(HOSTS.get(at).copied().unwrap_or("a"));
                self.world.spawn_ask(self.world.clone().move_by_hand(vm_id(vm), to));
                continue;
            }
            let running = self.running();
            let Some(running) = dice.pick(&running).cloned() else { continue };
            let request = Request { asked, vm, host, cancel };
            self.world.spawn_ask(self.clone().asks(running, request));
        }
    }

    /// Asks one planner for one thing.
    pub(crate) async fn asks(self, running: Running, request: Request) {
        let Request { asked, vm, host, cancel } = request;
        let name = format!("vm{}", vm + 1);
        let planner = &running.planner;
        let asks = async {
            match asked {
                Asked::Move
                | Asked::MoveHeld
                | Asked::MoveSomehow
                | Asked::MoveParted
                | Asked::MoveDiverging
                | Asked::MoveQueued => {
                    let method = match asked {
                        Asked::MoveHeld => "snapshot",
                        Asked::MoveParted => "postcopy",
                        Asked::Move
                        | Asked::MoveSomehow
                        | Asked::MoveDiverging
                        | Asked::MoveQueued
                        | Asked::Start
                        | Asked::PowerDown
                        | Asked::Quit => "precopy",
                    };
                    let somehow = matches!(asked, Asked::MoveSomehow | Asked::MoveDiverging);
                    let downgrade = if somehow { "snapshot" } else { "" };
                    let answer = if asked == Asked::MoveDiverging { "postcopy" } else { "" };
                    let asked = v1::MigrateVmRequest {
                        method: method.to_owned(),
                        downgrade: downgrade.to_owned(),
                        not_converging: answer.to_owned(),
                        vm_name: name.clone(),
                        target_host: host.to_owned(),
                        queue_deadline_ms: 120_000,
                        ..v1::MigrateVmRequest::default()
                    };
                    planner.migrate_vm(asked).await.map(|migration| Some(migration.id))
                }
                Asked::Start => {
                    let asked = v1::StartVmRequest {
                        vm: name.clone(),
                        definition: definition(vm),
                        host: host.to_owned(),
                        ..v1::StartVmRequest::default()
                    };
                    planner.start_vm(asked).await.map(|_| None)
                }
                Asked::PowerDown | Asked::Quit => {
                    let how = if asked == Asked::Quit { "quit" } else { "powerdown" };
                    let asked = v1::StopVmRequest {
                        vm: name.clone(),
                        how: how.to_owned(),
                        ..v1::StopVmRequest::default()
                    };
                    planner.stop_vm(asked).await.map(|_| None)
                }
            }
        };
        match on(&running, asks).await {
            None => {}
            Some(Err(error)) => {
                self.world.note(|| format!("{asked:?} of {name}: {}", error.code()));
            }
            Some(Ok(id)) => {
                if let (Some(after), Some(id)) = (cancel, id) {
                    tokio::time::sleep(after).await;
                    self.cancel(&id).await;
                }
            }
        }
    }

    /// Asks any planner to take a migration back.
    pub(crate) async fn cancel(&self, id: &str) {
        let Some(running) = self.running().into_iter().next() else { return };
        self.world.note(|| "someone asks to cancel".to_owned());
        if let Some(Err(error)) = on(&running, running.planner.cancel_migration(id)).await {
            self.world.note(|| format!("not cancelled: {}", error.code()));
        }
    }

    /// Comes by now and then, and opens gates or takes back what waits at them; once it is calm,
    /// opens them all.
    pub(crate) async fn keep_gates(self, mut dice: Dice) {
        loop {
            tokio::time::sleep(dice.millis(300, 12_000)).await;
            let (waiting, calm) = self.world.with(|state| {
                let open = state.tables.migrations.values().filter(|row| row.ended_us.is_none());
                let waiting: Vec<(MigrationId, Event)> = open
                    .filter_map(|row| Some((row.migration.id, gate(&row.migration.phase)?)))
                    .collect();
                (waiting, state.at_ms() >= state.weather.calm_at_ms)
            });
            for (id, event) in waiting {
                if calm || dice.chance(400) {
                    self.open_gate(id, event).await;
                } else if dice.chance(300) {
                    self.cancel(&id.to_string()).await;
                }
            }
        }
    }

    /// Writes that a gate was opened, as a planner does for its operator.
    async fn open_gate(&self, id: MigrationId, event: Event) {
        let Some(running) = self.running().into_iter().next() else { return };
        let store = running.planner.store();
        let opens = async {
            let Ok(Some(row)) = store.migration(id).await else { return };
            let label = event.label();
            let Ok(entries) = row.migration.advance(event) else { return };
            let now_us = vmferry_planner::clock::now_us();
            let written = store.commit(&row, &entries, &row.notes, now_us).await;
            running.planner.nudge(id);
            self.world.with(|state| {
                state.counts.gates_opened += 1;
                state.note(|| format!("someone opens a gate: {label}, {}", written.is_ok()));
            });
        };
        on(&running, opens).await;
    }
}

impl Cluster {
    /// Comes by now and then, and says of hosts that were switched off for good that they are dead.
    pub(crate) async fn declare_the_dead(self, mut dice: Dice) {
        loop {
            tokio::time::sleep(dice.millis(500, 40_000)).await;
            let lies = self.world.with(|state| state.bugged(Bug::OperatorLies));
            let Some(running) = self.running().into_iter().next() else { continue };
            let place = Place::Planner(running.life.number);
            let dead: Vec<HostId> = self.world.with(|state| {
                let silent = |host: &HostId| !state.connected(&place, &Place::Host(host.clone()));
                let off = |host: &HostId| state.host(host).is_some_and(|there| there.for_good);
                let named = state.hosts.keys();
                named.filter(|host| off(host) || (lies && silent(host))).cloned().collect()
            });
            for host in dead {
                let asked = v1::DeclareHostDeadRequest {
                    host: host.to_string(),
                    confirmation: "i-have-powered-it-off".to_owned(),
                    reason: "it burnt".to_owned(),
                    by: "operator".to_owned(),
                };
                let told = on(&running, running.planner.declare_host_dead(asked)).await;
                self.world.with(|state| {
                    let declared = matches!(told, Some(Ok(_)));
                    if let Some(there) = state.hosts.get_mut(&host).filter(|_| declared) {
                        there.declared = true;
                    }
                    state.note(|| match told {
                        Some(Err(error)) => format!("host {host} is not dead: {error}"),
                        Some(Ok(_)) => format!("host {host} is declared dead"),
                        None => format!("nobody hears that host {host} is dead"),
                    });
                });
            }
        }
    }
}

/// One thing that is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) asked: Asked,
    /// Of which VM, counted from zero.
    pub(crate) vm: u32,
    /// Where to; empty leaves the choice to the planner.
    pub(crate) host: &'static str,
    /// After how long it is to be taken back, if it is.
    pub(crate) cancel: Option<Duration>,
}

/// Runs something within the life of a planner; `None` if it ended first.
pub(crate) async fn on<F>(running: &Running, task: F) -> Option<F::Output>
where
    F: Future + Send,
{
    let machine = std::sync::Arc::clone(&running.life.machine);
    tokio::select! {
        biased;
        () = running.life.token.cancelled() => None,
        done = simulated::on(Some(machine), task) => Some(done),
    }
}

/// What an operator would say where a migration waits for one.
fn gate(phase: &Phase) -> Option<Event> {
    match phase {
        Phase::Admitted { stage: Stage::Waiting { .. }, .. } => Some(Event::StartAllowed),
        Phase::Captured { switchover: Switchover::Withheld, .. } => Some(Event::SwitchoverAllowed),
        Phase::Restored { .. } => Some(Event::CommitAllowed),
        Phase::Captured {
            switchover:
                Switchover::Held { .. }
                | Switchover::Down { .. }
                | Switchover::Ordered
                | Switchover::Forward,
            ..
        }
        | Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => None,
    }
}

impl State {
    /// Draws where a migration is to wait for an operator.
    pub(crate) fn draw_gates(&mut self) -> Gates {
        let odds = self.weather.gated;
        let dice = &mut self.dice.operator;
        let mut gate = || if dice.chance(odds) { Gate::Closed } else { Gate::Open };
        Gates { start: gate(), switchover: gate(), commit: gate() }
    }
}
