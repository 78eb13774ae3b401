//! What empties hosts, what waits in the queue, and who has a link: as every store has it.

use std::collections::BTreeMap;

use vmferry_planner::store::{
    AskHost, Commit, Cordon, EmptyingChange, EmptyingFilter, EmptyingLogRow, EmptyingRow,
    HostAnswer, HostDone, MigrationRow, NewEmptying, QueueStart, QueuedStart, Refused, Slot,
    SlotRow, SlotState, StoreError, TakeEmptying, Which, slot_of,
};
use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::job::{self, Cordoned};
use vmferry_planner_core::lifecycle::request::{Asked, Granted, Standing, lifted, may};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, EmptyingId, Kind, drain};
use vmferry_planner_core::queue::Ranking;
use vmferry_planner_core::queue::slot::Limits;
use vmferry_types::{HostId, MigrationId, PhaseLabel, PowerState, Seq, Timestamp};

use super::Tables;
use super::tables::Read;
use crate::bugs::Bug;

impl Tables {
    pub(crate) fn hold_cordon(&mut self, cordon: &Cordon) {
        self.cordons.retain(|known| known.host != cordon.host || known.owner != cordon.owner);
        self.cordons.push(cordon.clone());
    }

    pub(crate) fn lift_cordon(&mut self, host: &HostId, owner: &str) {
        self.cordons.retain(|known| known.host != *host || known.owner != owner);
    }

    /// As the database picks it: the one that is not over, or else the newest.
    fn newest(&self, host: &HostId, wanted: impl Fn(Kind) -> bool) -> Option<EmptyingRow> {
        let of = |row: &&EmptyingRow| row.emptying.host() == host && wanted(row.emptying.kind());
        let newest = self.emptyings.values().filter(of);
        let open = |row: &EmptyingRow| row.ended_us.is_none();
        newest.max_by_key(|row| (open(row), row.created_us, row.id().as_u128())).cloned()
    }

    pub(crate) fn lifecycles(&self) -> BTreeMap<HostId, Lifecycle> {
        let held = self.emptyings.values().map(|row| &row.emptying);
        held.filter(|one| {
            self.mistake != Some(Bug::StoreForgetsCordons)
                && one.lifecycle() != Lifecycle::Active
                && self.hosts.contains_key(one.host())
        })
        .map(|one| (one.host().clone(), one.lifecycle()))
        .collect()
    }

    pub(crate) fn ask_host(
        &mut self,
        ask: &AskHost,
        now_us: u64,
    ) -> Result<HostAnswer, StoreError> {
        if !self.hosts.contains_key(&ask.host) {
            return Ok(HostAnswer::UnknownHost);
        }
        let job_row = self.newest(&ask.host, |kind| kind == Kind::Maintenance);
        let drain_row = self.newest(&ask.host, |kind| kind != Kind::Maintenance);
        let job = job_row.as_ref().and_then(|row| match &row.emptying {
            Emptying::Job(job) => Some(job),
            Emptying::Drain(_) => None,
        });
        let drain = drain_row.as_ref().and_then(|row| match &row.emptying {
            Emptying::Drain(drain) => Some(drain),
            Emptying::Job(_) => None,
        });
        let vms = self.vms.values().filter(|vm| vm.host.as_ref() == Some(&ask.host)).count();
        let standing = Standing { host: &ask.host, presence: &ask.presence, vms, job, drain };
        let granted = match may(standing, ask.asked) {
            Ok(granted) => granted,
            Err(denied) => return Ok(HostAnswer::Denied(denied)),
        };
        let at = Timestamp(now_us / 1000);
        let opens = ask.opens.as_ref().map(|new| new.emptying.id());
        let other = match (granted, job_row, drain_row, opens) {
            (Granted::Superseding(_), Some(row), _, Some(EmptyingId::Job(by))) => {
                Some((row, EmptyingEvent::Job(job::Event::Superseded { by, at })))
            }
            (Granted::Cancelling(_), _, Some(row), _) => {
                let event = drain::Event::CancelRequested { by: ask.by.clone(), at };
                Some((row, EmptyingEvent::Drain(event)))
            }
            (Granted::Alone | Granted::Superseding(_) | Granted::Cancelling(_), ..) => None,
        };
        let mut done = HostDone::default();
        if let Some((row, event)) = other {
            let after = row.emptying.apply(&event);
            let after = after.map_err(|source| StoreError::Emptying { source })?;
            done.ended = self.write_emptying(&row, &[EmptyingChange { event, after }], now_us)?;
        }
        match ask.asked {
            Asked::Cordon => ask.cordon.iter().for_each(|cordon| self.hold_cordon(cordon)),
            Asked::Uncordon => {
                let all: Vec<_> = self.cordons.iter().map(Cordon::in_core).collect();
                for one in lifted(&all, &ask.host, &ask.by, at) {
                    let owner = one.owner.to_string();
                    self.lift_cordon(&ask.host, &owner);
                    done.lifted.push(owner);
                }
            }
            Asked::Plan | Asked::Execute | Asked::Drain | Asked::Retire => {
                if let Some(new) = &ask.opens {
                    done.opened = Some(self.open_emptying(new, now_us)?);
                }
            }
            Asked::Delete => self.forget_host(&ask.host, at),
        }
        Ok(HostAnswer::Done(Box::new(done)))
    }

    fn forget_host(&mut self, host: &HostId, at: Timestamp) {
        for vm in self.vms.values_mut().filter(|vm| vm.host.as_ref() == Some(host)) {
            let ended = matches!(vm.power, PowerState::Stopped | PowerState::Lost);
            if ended && vm.admission.is_none() {
                vm.host = None;
                vm.generation = vm.generation.next();
            }
        }
        self.cordons.retain(|known| known.host != *host);
        self.heard.retain(|(of, _), _| of != host);
        if let Some(row) = self.hosts.remove(host) {
            self.deleted_hosts.insert(host.clone(), (row.boot_id, at));
        }
    }

    fn open_emptying(&mut self, new: &NewEmptying, now_us: u64) -> Result<EmptyingRow, StoreError> {
        let opened = EmptyingRow::opened(new, now_us);
        let row = opened.after(&new.changes, now_us)?;
        let first = EmptyingLogRow {
            seq: Seq::FIRST,
            at_us: now_us,
            event: "opened".to_owned(),
            phase: opened.emptying.label().to_owned(),
            body: super::tables::json(&opened.emptying)?,
        };
        self.emptying_logs.insert(row.id(), vec![first]);
        self.log_emptying(row.id(), Seq::FIRST, &new.changes, now_us)?;
        self.emptyings.insert(row.id(), row.clone());
        self.keep_cordon(None, &row.emptying, Timestamp(now_us / 1000));
        Ok(row)
    }

    fn log_emptying(
        &mut self,
        id: EmptyingId,
        mut seq: Seq,
        changes: &[EmptyingChange],
        now_us: u64,
    ) -> Result<(), StoreError> {
        for change in changes {
            seq = seq.next();
            let row = EmptyingLogRow {
                seq,
                at_us: now_us,
                event: change.event.label().to_owned(),
                phase: change.after.label().to_owned(),
                body: super::tables::json(&change.event)?,
            };
            self.emptying_logs.entry(id).or_default().push(row);
        }
        Ok(())
    }

    fn keep_cordon(&mut self, before: Option<&Emptying>, after: &Emptying, now: Timestamp) {
        if before.map(Emptying::cordon) == Some(after.cordon()) {
            return;
        }
        let owner = after.id().owner().to_string();
        match after.cordon() {
            Cordoned::Held => self.hold_cordon(&Cordon {
                host: after.host().clone(),
                owner,
                reason: after.reason(),
                since: now,
                expires: None,
            }),
            Cordoned::Lifted => self.lift_cordon(after.host(), &owner),
            Cordoned::AsItIs => {}
        }
    }

    /// Writes changes of a row, if it is still the one that they were decided on.
    pub(super) fn write_emptying(
        &mut self,
        before: &EmptyingRow,
        changes: &[EmptyingChange],
        now_us: u64,
    ) -> Result<Option<EmptyingRow>, StoreError> {
        let id = before.id();
        let Some(known) = self.emptyings.get(&id) else { return Ok(None) };
        if known.claim != before.claim || known.seq != before.seq {
            return Ok(None);
        }
        let (lease_owner, lease_until) = (known.lease_owner.clone(), known.lease_until);
        let after = before.after(changes, now_us)?;
        let row = EmptyingRow { lease_owner, lease_until, ..after };
        self.log_emptying(id, before.seq, changes, now_us)?;
        self.keep_cordon(Some(&before.emptying), &row.emptying, Timestamp(now_us / 1000));
        self.emptyings.insert(id, row.clone());
        Ok(Some(row))
    }

    pub(crate) fn commit_emptying(
        &mut self,
        before: &EmptyingRow,
        changes: &[EmptyingChange],
        now_us: u64,
    ) -> Result<Commit<Box<EmptyingRow>>, StoreError> {
        let written = self.write_emptying(before, changes, now_us)?;
        Ok(written.map_or(Commit::Raced, |row| Commit::Done(Box::new(row))))
    }

    pub(crate) fn list_emptyings(&self, filter: &EmptyingFilter) -> Vec<EmptyingRow> {
        let of = |row: &&EmptyingRow| {
            filter.host.as_ref().is_none_or(|host| row.emptying.host() == host)
                && match filter.which {
                    Which::All => true,
                    Which::Open => row.ended_us.is_none(),
                    Which::Driven => row.emptying.is_driven(),
                }
        };
        let mut rows: Vec<EmptyingRow> = self.emptyings.values().filter(of).cloned().collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.created_us, row.id().as_u128())));
        rows
    }

    pub(crate) fn take_over_emptying(
        &mut self,
        id: EmptyingId,
        owner: &str,
        lease_until: Timestamp,
        now: Read,
    ) -> TakeEmptying {
        let Some(row) = self.emptyings.get_mut(&id) else { return TakeEmptying::Ended };
        if !row.emptying.is_driven() {
            return TakeEmptying::Ended;
        }
        let another = row.lease_owner.as_deref().is_some_and(|holder| holder != owner);
        if another && now.keeps_away(row.lease_until, lease_until.since(now.then)) {
            return TakeEmptying::Busy;
        }
        row.claim = row.claim.next();
        row.lease_owner = Some(owner.to_owned());
        row.lease_until = lease_until;
        TakeEmptying::Taken(Box::new(row.clone()))
    }

    pub(crate) fn renew_emptying_lease(
        &mut self,
        row: &EmptyingRow,
        owner: &str,
        lease_until: Timestamp,
    ) -> bool {
        let Some(known) = self.emptyings.get_mut(&row.id()) else { return false };
        let held = known.claim == row.claim && known.lease_owner.as_deref() == Some(owner);
        if held {
            known.lease_until = lease_until;
        }
        held
    }

    pub(crate) fn take_slot(
        &mut self,
        row: &MigrationRow,
        limits: &Limits,
        ranking: &Ranking,
        now: Timestamp,
    ) -> Slot {
        let id = row.migration.id;
        let current = |of: &MigrationRow| of.claim == row.claim && of.ended_us.is_none();
        if !self.migrations.get(&id).is_some_and(current) {
            return Slot::Full(Vec::new());
        }
        let asked = self.slots.entry(id).or_insert((SlotState::Wanted, now, now));
        asked.2 = now;
        if asked.0 == SlotState::Held {
            return Slot::Held;
        }
        let crosses = |row: &&MigrationRow| {
            let label = row.migration.label();
            row.ended_us.is_none() && matches!(label, PhaseLabel::Admitted | PhaseLabel::Captured)
        };
        let rows: Vec<SlotRow> = self
            .migrations
            .values()
            .filter(crosses)
            .filter_map(|row| {
                let (state, since, seen) = *self.slots.get(&row.migration.id)?;
                Some(SlotRow {
                    id: row.migration.id,
                    source: row.migration.source.clone(),
                    destination: row.migration.destination()?.clone(),
                    priority: row.notes.sake.priority,
                    created_us: row.created_us,
                    state,
                    since,
                    seen,
                })
            })
            .collect();
        let slot = slot_of(id, &rows, limits, ranking, now);
        if slot == Slot::Held {
            self.slots.insert(id, (SlotState::Held, now, now));
        }
        slot
    }

    pub(crate) fn queue_start(&mut self, new: &QueuedStart) -> QueueStart {
        if let Some(request) = &new.request {
            let known = self.queued.values().find(|of| of.request.as_ref() == Some(request));
            if let Some(known) = known {
                return QueueStart::Known(known.clone());
            }
        }
        let Some(vm) = self.vms.get_mut(&new.vm) else {
            return QueueStart::Refused(Refused::UnknownVm);
        };
        if let Some(admission) = vm.admission {
            return QueueStart::Refused(Refused::InFlight { admission });
        }
        match vm.power {
            PowerState::Stopped | PowerState::Lost => {}
            power @ (PowerState::Starting | PowerState::Running | PowerState::Stopping) => {
                return QueueStart::Refused(Refused::Power { power });
            }
        }
        vm.admission = Some(new.id);
        vm.error.clear();
        self.queued.insert(new.id, new.clone());
        QueueStart::Queued(new.clone())
    }

    pub(crate) fn queued_starts(&self) -> Vec<QueuedStart> {
        let mut open: Vec<QueuedStart> =
            self.queued.values().filter(|of| of.ended_us.is_none()).cloned().collect();
        open.sort_by_key(|of| (of.asked_us, of.id));
        open
    }

    fn waiting_start(&mut self, id: MigrationId, seq: Seq) -> Option<&mut QueuedStart> {
        self.queued.get_mut(&id).filter(|of| of.seq == seq && of.ended_us.is_none())
    }

    pub(crate) fn note_queued_start(&mut self, id: MigrationId, seq: Seq, note: &str) -> bool {
        let Some(start) = self.waiting_start(id, seq) else { return false };
        note.clone_into(&mut start.note);
        start.seq = start.seq.next();
        true
    }

    pub(crate) fn end_queued_start(
        &mut self,
        id: MigrationId,
        seq: Seq,
        outcome: &str,
        now_us: u64,
    ) -> bool {
        let Some(start) = self.waiting_start(id, seq) else { return false };
        start.ended_us = Some(now_us);
        outcome.clone_into(&mut start.outcome);
        start.seq = start.seq.next();
        let vm = start.vm;
        if let Some(vm) = self.vms.get_mut(&vm).filter(|vm| vm.admission == Some(id)) {
            vm.admission = None;
            outcome.clone_into(&mut vm.error);
        }
        true
    }

    /// Takes a start out of the queue for it is admitted; `false` if it does not wait any more.
    pub(super) fn leave_queue(&mut self, id: MigrationId, now_us: u64) -> bool {
        let Some(start) = self.queued.get_mut(&id).filter(|of| of.ended_us.is_none()) else {
            return false;
        };
        start.ended_us = Some(now_us);
        "admitted".clone_into(&mut start.outcome);
        start.seq = start.seq.next();
        true
    }
}
