//! The store in memory, as each planner sees it: any call may be slow, and any may be its last.

mod emptying;
mod fleet;
mod power;
mod tables;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmferry_planner::clock::{self, simulated};
use vmferry_planner::store::{
    Admission, AdmitPower, Adopted, AskHost, Change, Commit, Cordon, Declaration, Declared,
    Defined, Deleted, EmptyingChange, EmptyingFilter, EmptyingLogRow, EmptyingRow, Ends, Filter,
    Followed, Grant, Granted, HostAnswer, HostRow, LogRow, Lost, MigrationRow, NewMigration,
    NewPower, Notes, PowerAction, QueueStart, QueuedStart, Reservation, SavedHost, Sharing, Slot,
    Store, StoreError, Stored, TakeEmptying, TakeOver, TakePower, Tombstone, VmRow,
};
use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::EmptyingId;
use vmferry_planner_core::migration::{Event, Migration};
use vmferry_planner_core::queue::Ranking;
use vmferry_planner_core::queue::slot::Limits;
use vmferry_planner_core::stuck::Trouble;
use vmferry_types::{Claim, HostId, MigrationId, PowerState, Seq, Timestamp, VmId};

pub(crate) use tables::{Open, Read, Tables, Write};

use crate::bugs::Bug;
use crate::life::{Fate, Life};
use crate::trace::Detail;
use crate::weather::Weather;
use crate::world::{EPOCH_US, Mishap, Place, PointKind, State, World};

/// The store, for one life of a planner.
#[derive(Debug)]
pub(crate) struct SimStore {
    pub(crate) life: Arc<Life>,
}

/// Returns the store of a world in which nothing goes wrong, for what every store has to do.
#[must_use]
pub fn in_fair_weather() -> Arc<dyn Store> {
    let state = State::new(1, Weather::fair(), Detail::Nothing, None);
    Arc::new(SimStore { life: Life::new(World::new(state), 0) })
}

fn read_at(then: Timestamp) -> Read {
    Read { then, clock: Timestamp(simulated::true_us().unwrap_or(EPOCH_US) / 1000) }
}

impl SimStore {
    /// Carries one transaction out, unless the planner dies first; it may die before it hears, and
    /// it may hear that the transaction failed though it did not.
    async fn call<T>(
        &self,
        (kind, what): (PointKind, &'static str),
        work: impl FnOnce(&mut State) -> Result<T, StoreError> + Send,
    ) -> Result<T, StoreError> {
        let fate = self.life.before(kind, what).await;
        let world = &self.life.world;
        while world.with(|state| state.storeless.contains(&self.life.number)) {
            tokio::time::sleep(APART).await;
        }
        let (wait, fails, unheard) = world.with(|state| {
            let (max, odds) = (state.weather.store_max, state.weather.store_fails);
            let storm = state.at_ms() < state.weather.calm_at_ms;
            let dice = &mut state.dice.store;
            (dice.millis(0, max), storm && dice.chance(odds), dice.chance(500))
        });
        let (wait, fails, unheard) = match fate {
            Fate::Mishap(Mishap::Refused | Mishap::RequestLost) => (wait, true, false),
            Fate::Mishap(Mishap::AnswerLost) => (wait, true, true),
            Fate::Mishap(Mishap::Late(ms)) => (Duration::from_millis(ms), fails, unheard),
            Fate::Goes | Fate::DiesAfter | Fate::Mishap(_) => (wait, fails, unheard),
        };
        tokio::time::sleep(wait).await;
        let outcome = if fails && !unheard { Err(broken()) } else { world.with(work) };
        self.life.after(fate).await;
        let wait = world.with(|state| {
            state.counts.store_failures += u64::from(fails);
            state.dice.store.millis(0, 1)
        });
        tokio::time::sleep(wait).await;
        if fails { Err(broken()) } else { outcome }
    }

    /// The deliberate mistake: who is on a host that cannot be reached is lost.
    fn lose_the_silent(&self) {
        let place = Place::Planner(self.life.number);
        self.life.world.with(|state| {
            if !state.bugged(Bug::StoreTakesSilenceForLoss) {
                return;
            }
            let silent: Vec<HostId> = state
                .hosts
                .keys()
                .filter(|host| !state.connected(&place, &Place::Host((*host).clone())))
                .cloned()
                .collect();
            for vm in state.tables.vms.values_mut() {
                let there = vm.host.as_ref().is_some_and(|host| silent.contains(host));
                if there && vm.admission.is_none() && vm.power == PowerState::Running {
                    vm.power = PowerState::Lost;
                }
            }
        });
    }

    async fn read<T>(&self, work: impl FnOnce(&Tables) -> T + Send) -> Result<T, StoreError> {
        self.call((PointKind::StoreRead, "read"), |state| Ok(work(&state.tables))).await
    }

    async fn write<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut State) -> T + Send,
    ) -> Result<T, StoreError> {
        self.transact(what, |state| Ok(work(state))).await
    }

    async fn transact<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut State) -> Result<T, StoreError> + Send,
    ) -> Result<T, StoreError> {
        let life = Arc::clone(&self.life);
        self.call((PointKind::StoreWrite, what), move |state| {
            let planner = life.number;
            state.note(|| format!("planner {planner}: store: {what}"));
            let outcome = work(state);
            state.check_books();
            outcome
        })
        .await
    }
}

/// How often a planner whose store does not answer tries again.
const APART: Duration = Duration::from_millis(100);

/// The connection broke: whether the transaction was carried out is not said.
fn broken() -> StoreError {
    StoreError::Corrupt { column: "connection", value: "broken".to_owned() }
}

impl Store for SimStore {
    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn lease_clock(&self) -> Stored<'_, Timestamp> {
        // The database's own, which is right; no planner's.
        let now = simulated::true_us().map_or_else(clock::now, |now_us| Timestamp(now_us / 1000));
        Box::pin(std::future::ready(Ok(now)))
    }

    fn hosts(&self) -> Stored<'_, Vec<HostRow>> {
        Box::pin(self.read(|tables| tables.hosts.values().cloned().collect()))
    }

    fn save_host<'a>(&'a self, host: &'a HostRow) -> Stored<'a, SavedHost> {
        Box::pin(async { self.write("save_host", |state| state.tables.save_host(host)).await })
    }

    fn hear_hosts<'a>(&'a self, hosts: &'a [HostId], by: &'a str, at: Timestamp) -> Stored<'a, ()> {
        // A note on the side: whether it is written changes what an operator is told, no more.
        self.life.world.with(|state| {
            let heard = hosts.iter().map(|host| ((host.clone(), by.to_owned()), at));
            state.tables.heard.extend(heard);
        });
        Box::pin(std::future::ready(Ok(())))
    }

    fn heard_by_another<'a>(
        &'a self,
        host: &'a HostId,
        by: &'a str,
    ) -> Stored<'a, Option<Timestamp>> {
        Box::pin(self.read(move |tables| {
            let others = tables.heard.iter().filter(|((of, who), _)| of == host && who != by);
            others.map(|(_, at)| *at).max()
        }))
    }

    fn declare_dead<'a>(
        &'a self,
        host: &'a HostId,
        declaration: &'a Declaration,
    ) -> Stored<'a, Declared> {
        Box::pin(async move {
            let work = |state: &mut State| state.tables.declare_dead(host, declaration);
            self.write("declare_dead", work).await
        })
    }

    fn void_declaration<'a>(
        &'a self,
        host: &'a HostId,
        boot_id: &'a str,
        now: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(async move {
            let work = |state: &mut State| state.tables.void_declaration(host, boot_id, now);
            self.write("void_declaration", work).await
        })
    }

    fn vms(&self) -> Stored<'_, Vec<VmRow>> {
        Box::pin(self.read(|tables| tables.vms.values().cloned().collect()))
    }

    fn vms_on<'a>(&'a self, host: &'a HostId) -> Stored<'a, Vec<VmRow>> {
        Box::pin(self.read(move |tables| {
            let here = |row: &&VmRow| row.host.as_ref() == Some(host);
            tables.vms.values().filter(here).cloned().collect()
        }))
    }

    fn vm(&self, vm: VmId) -> Stored<'_, Option<VmRow>> {
        self.lose_the_silent();
        Box::pin(self.read(move |tables| tables.vms.get(&vm).cloned()))
    }

    fn vms_named<'a>(&'a self, name: &'a str) -> Stored<'a, Vec<VmRow>> {
        self.lose_the_silent();
        Box::pin(self.read(move |tables| {
            tables.vms.values().filter(|row| row.name == name).cloned().collect()
        }))
    }

    fn tombstone(&self, vm: VmId) -> Stored<'_, Option<Tombstone>> {
        Box::pin(self.read(move |tables| tables.deleted.get(&vm).cloned()))
    }

    fn define_vm<'a>(&'a self, vm: &'a VmRow, _now: Timestamp) -> Stored<'a, Defined> {
        Box::pin(async { self.write("define_vm", |state| state.tables.define_vm(vm)).await })
    }

    fn adopt_vm<'a>(&'a self, vm: &'a VmRow, _now: Timestamp) -> Stored<'a, Adopted> {
        Box::pin(async { self.write("adopt_vm", |state| state.tables.adopt_vm(vm)).await })
    }

    fn delete_vm(&self, vm: VmId, now: Timestamp) -> Stored<'_, Deleted> {
        Box::pin(
            async move { self.write("delete_vm", |state| state.tables.delete_vm(vm, now)).await },
        )
    }

    fn raise_claim(&self, vm: VmId, claim: Claim, _now: Timestamp) -> Stored<'_, bool> {
        Box::pin(async move {
            self.write("raise_claim", |state| state.tables.raise_claim(vm, claim)).await
        })
    }

    fn follow_vm<'a>(&'a self, followed: &'a Followed, _now: Timestamp) -> Stored<'a, bool> {
        Box::pin(async { self.write("follow_vm", |state| state.tables.follow_vm(followed)).await })
    }

    fn mark_lost<'a>(&'a self, lost: &'a Lost, _now: Timestamp) -> Stored<'a, bool> {
        Box::pin(async { self.write("mark_lost", |state| state.tables.mark_lost(lost)).await })
    }

    fn reservations(&self) -> Stored<'_, Vec<Reservation>> {
        Box::pin(self.read(Tables::open_reservations))
    }

    fn cordons(&self, now: Timestamp) -> Stored<'_, Vec<Cordon>> {
        Box::pin(self.read(move |tables| tables.cordons(now)))
    }

    fn cordon<'a>(&'a self, cordon: &'a Cordon) -> Stored<'a, ()> {
        Box::pin(async { self.write("cordon", |state| state.tables.hold_cordon(cordon)).await })
    }

    fn uncordon<'a>(&'a self, host: &'a HostId, owner: &'a str) -> Stored<'a, ()> {
        Box::pin(async move {
            self.write("uncordon", |state| state.tables.lift_cordon(host, owner)).await
        })
    }

    fn lifecycles(&self) -> Stored<'_, BTreeMap<HostId, Lifecycle>> {
        Box::pin(self.read(Tables::lifecycles))
    }

    fn ask_host<'a>(&'a self, ask: &'a AskHost, now_us: u64) -> Stored<'a, HostAnswer> {
        Box::pin(self.transact("ask_host", move |state| state.tables.ask_host(ask, now_us)))
    }

    fn emptying(&self, id: EmptyingId) -> Stored<'_, Option<EmptyingRow>> {
        Box::pin(self.read(move |tables| tables.emptyings.get(&id).cloned()))
    }

    fn emptyings<'a>(&'a self, filter: &'a EmptyingFilter) -> Stored<'a, Vec<EmptyingRow>> {
        Box::pin(self.read(move |tables| tables.list_emptyings(filter)))
    }

    fn emptying_log(&self, id: EmptyingId) -> Stored<'_, Vec<EmptyingLogRow>> {
        let log = move |tables: &Tables| tables.emptying_logs.get(&id).cloned();
        Box::pin(self.read(move |tables| log(tables).unwrap_or_default()))
    }

    fn take_over_emptying<'a>(
        &'a self,
        id: EmptyingId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeEmptying> {
        Box::pin(self.write("take_over_emptying", move |state| {
            state.tables.take_over_emptying(id, owner, lease_until, read_at(now))
        }))
    }

    fn renew_emptying_lease<'a>(
        &'a self,
        row: &'a EmptyingRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(self.write("renew_emptying_lease", move |state| {
            state.tables.renew_emptying_lease(row, owner, lease_until)
        }))
    }

    fn commit_emptying<'a>(
        &'a self,
        before: &'a EmptyingRow,
        changes: &'a [EmptyingChange],
        now_us: u64,
    ) -> Stored<'a, Commit<Box<EmptyingRow>>> {
        Box::pin(self.transact("commit_emptying", move |state| {
            let written = state.tables.commit_emptying(before, changes, now_us)?;
            if matches!(written, Commit::Done(_)) {
                state.check_empty(changes);
            }
            Ok(written)
        }))
    }

    fn take_slot<'a>(
        &'a self,
        row: &'a MigrationRow,
        limits: &'a Limits,
        ranking: &'a Ranking,
        now: Timestamp,
    ) -> Stored<'a, Slot> {
        Box::pin(
            self.write("take_slot", move |state| state.tables.take_slot(row, limits, ranking, now)),
        )
    }

    fn queue_start<'a>(&'a self, new: &'a QueuedStart, _now: Timestamp) -> Stored<'a, QueueStart> {
        Box::pin(self.write("queue_start", move |state| state.tables.queue_start(new)))
    }

    fn queued_starts(&self) -> Stored<'_, Vec<QueuedStart>> {
        Box::pin(self.read(Tables::queued_starts))
    }

    fn queued_start(&self, id: MigrationId) -> Stored<'_, Option<QueuedStart>> {
        Box::pin(self.read(move |tables| tables.queued.get(&id).cloned()))
    }

    fn note_queued_start<'a>(
        &'a self,
        id: MigrationId,
        seq: Seq,
        note: &'a str,
    ) -> Stored<'a, bool> {
        Box::pin(
            self.write("note_queued_start", move |state| {
                state.tables.note_queued_start(id, seq, note)
            }),
        )
    }

    fn end_queued_start<'a>(
        &'a self,
        id: MigrationId,
        seq: Seq,
        outcome: &'a str,
        now_us: u64,
    ) -> Stored<'a, bool> {
        Box::pin(self.write("end_queued_start", move |state| {
            state.tables.end_queued_start(id, seq, outcome, now_us)
        }))
    }

    fn admit<'a>(&'a self, new: &'a NewMigration, now_us: u64) -> Stored<'a, Admission> {
        Box::pin(async move {
            self.transact("admit", |state| {
                let gates = state.draw_gates();
                let admission = state.tables.admit(new, gates, now_us);
                if let Ok(Admission::Admitted(row)) = &admission {
                    state.admitted(row);
                }
                admission
            })
            .await
        })
    }

    fn migration(&self, id: MigrationId) -> Stored<'_, Option<MigrationRow>> {
        Box::pin(self.read(move |tables| tables.migrations.get(&id).cloned()))
    }

    fn migration_of_request<'a>(&'a self, request: &'a str) -> Stored<'a, Option<MigrationRow>> {
        Box::pin(self.read(move |tables| tables.of_request(request).cloned()))
    }

    fn migrations<'a>(&'a self, filter: &'a Filter) -> Stored<'a, Vec<MigrationRow>> {
        Box::pin(self.read(move |tables| tables.list(filter)))
    }

    fn log(&self, id: MigrationId) -> Stored<'_, Vec<LogRow>> {
        Box::pin(self.read(move |tables| tables.logs.get(&id).cloned().unwrap_or_default()))
    }

    fn take_over<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakeOver> {
        Box::pin(async move {
            self.transact("take_over", |state| {
                let held = state.lease(id);
                let known = state.tables.migrations.get(&id).map(|row| row.claim);
                let mut taken = state.tables.take_over(id, owner, lease_until, read_at(now))?;
                if let (TakeOver::Taken(row), Some(claim)) = (&mut taken, known)
                    && state.bugged(Bug::PlannerKeepsClaim)
                {
                    row.claim = claim;
                    if let Some(known) = state.tables.migrations.get_mut(&id) {
                        known.claim = claim;
                    }
                }
                if let TakeOver::Taken(_) = &taken {
                    state.check_lease(id, owner, held);
                }
                Ok(taken)
            })
            .await
        })
    }

    fn renew_lease<'a>(
        &'a self,
        row: &'a MigrationRow,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(async move {
            self.write("renew_lease", |state| state.tables.renew_lease(row, owner, lease_until))
                .await
        })
    }

    fn note_trouble<'a>(
        &'a self,
        row: &'a MigrationRow,
        trouble: Option<&'a Trouble>,
    ) -> Stored<'a, ()> {
        // A note on the side: nobody decides by it.
        self.life.world.with(|state| {
            let known = state.tables.migrations.get_mut(&row.migration.id);
            if let Some(known) = known.filter(|known| known.claim == row.claim) {
                known.trouble = trouble.cloned();
            }
        });
        Box::pin(std::future::ready(Ok(())))
    }

    fn release_leases<'a>(&'a self, owner: &'a str) -> Stored<'a, ()> {
        Box::pin(async move {
            self.write("release_leases", |state| state.tables.end_leases(Some(owner))).await
        })
    }

    fn clear_leases(&self) -> Stored<'_, ()> {
        Box::pin(async { self.write("clear_leases", |state| state.tables.end_leases(None)).await })
    }

    fn grant<'a>(
        &'a self,
        before: &'a MigrationRow,
        grant: &'a Grant,
        now_us: u64,
    ) -> Stored<'a, Granted> {
        Box::pin(self.transact("grant", move |state| {
            let entries = changes(&before.migration, grant);
            let granted = state.tables.grant(before, grant, now_us);
            if let Ok(Granted::Done(row)) = &granted {
                state.committed(&before.migration, row, &entries);
            }
            granted
        }))
    }

    fn commit<'a>(
        &'a self,
        before: &'a MigrationRow,
        changes: &'a [Change],
        notes: &'a Notes,
        now_us: u64,
    ) -> Stored<'a, Commit<Box<MigrationRow>>> {
        let work = move |state: &mut State| {
            let write = Write { before, entries: changes, notes, now_us };
            let loses = state.bugged(Bug::StoreLosesWrites) && state.dice.store.chance(100);
            if loses {
                return lost_write(before, changes, notes);
            }
            let outcome = if state.bugged(Bug::StoreWritesAnyway) {
                state.tables.commit_anyway(&write)
            } else {
                state.tables.commit(&write)
            };
            if let Ok(Commit::Done(row)) = &outcome {
                state.committed(&before.migration, row, changes);
                if state.bugged(Bug::StoreCommitsTwice) && state.dice.store.chance(50) {
                    return state.tables.commit_anyway(&Write { before: row, ..write });
                }
            }
            outcome
        };
        Box::pin(async move {
            self.life.mistaken_commit(before, changes).await;
            let moves = changes.iter().any(|change| change.event == Event::CommitAllowed);
            self.transact(if moves { "commit" } else { "write" }, work).await
        })
    }

    fn admit_power<'a>(&'a self, new: &'a NewPower, now_us: u64) -> Stored<'a, AdmitPower> {
        Box::pin(async move {
            self.write("admit_power", |state| {
                let admitted = state.tables.admit_power(new, now_us);
                if let AdmitPower::Admitted(action) = &admitted {
                    state.power_admitted(action);
                }
                admitted
            })
            .await
        })
    }

    fn power(&self, id: MigrationId) -> Stored<'_, Option<PowerAction>> {
        Box::pin(self.read(move |tables| tables.power.get(&id).cloned()))
    }

    fn open_power(&self) -> Stored<'_, Vec<PowerAction>> {
        Box::pin(self.read(Tables::open_power))
    }

    fn take_over_power<'a>(
        &'a self,
        id: MigrationId,
        owner: &'a str,
        lease_until: Timestamp,
        now: Timestamp,
    ) -> Stored<'a, TakePower> {
        Box::pin(self.transact("take_over_power", move |state| {
            let held = state.lease(id);
            let taken = state.tables.take_over_power(id, owner, lease_until, read_at(now));
            if let Ok(TakePower::Taken(_)) = &taken {
                state.check_lease(id, owner, held);
            }
            taken
        }))
    }

    fn renew_power_lease<'a>(
        &'a self,
        action: &'a PowerAction,
        owner: &'a str,
        lease_until: Timestamp,
    ) -> Stored<'a, bool> {
        Box::pin(async move {
            self.write("renew_power_lease", |state| {
                state.tables.renew_power_lease(action, owner, lease_until)
            })
            .await
        })
    }

    fn end_power<'a>(
        &'a self,
        action: &'a PowerAction,
        end: &'a Ends,
        now_us: u64,
    ) -> Stored<'a, Commit<()>> {
        Box::pin(async move {
            self.write("end_power", |state| {
                let ended = state.tables.end_power(action, end, now_us);
                if ended == Commit::Done(()) {
                    state.power_ended(action, end);
                }
                ended
            })
            .await
        })
    }
}

/// The deliberate mistake: the row as it would be, had it been written.
fn lost_write(
    before: &MigrationRow,
    changes: &[Change],
    notes: &Notes,
) -> Result<Commit<Box<MigrationRow>>, StoreError> {
    let mut row = MigrationRow { notes: notes.clone(), ..before.clone() };
    for change in changes {
        row.migration = change.after.clone();
        row.seq = row.seq.next();
    }
    Ok(Commit::Done(Box::new(row)))
}

/// The changes that a grant makes.
fn changes(before: &Migration, grant: &Grant) -> Vec<Change> {
    let event = Event::Granted { destination: grant.destination.clone() };
    before.advance(event).unwrap_or_default()
}
