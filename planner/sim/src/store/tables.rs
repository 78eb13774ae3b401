//! The tables, and each transaction as one plain function.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_planner::definition::Outline;
use vmferry_planner::store::{
    Admission, Commit, Cordon, EmptyingLogRow, EmptyingRow, Filter, Grant, Granted, HostRow,
    LogRow, MigrationRow, NewMigration, Notes, OnlyOpen, PowerAction, QueuedStart, Refused,
    Reservation, Sake, SlotState, StoreError, TakeOver, Tombstone, VmRow, check_changes,
    lease_holds,
};
use vmferry_planner::view;
use vmferry_planner_core::lifecycle::EmptyingId;
use vmferry_planner_core::migration::{
    Entry, Event, Flight, Gates, Guest, Migration, Phase, Terms,
};
use vmferry_types::{
    Bytes, Claim, HostId, MigrationId, MilliCpu, Millis, PowerState, Seq, Timestamp, VmId,
};

use crate::bugs::Bug;

/// All that the store keeps.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) hosts: BTreeMap<HostId, HostRow>,
    /// Under which boot, and when.
    pub(crate) deleted_hosts: BTreeMap<HostId, (String, Timestamp)>,
    /// When each planner heard each host last.
    pub(crate) heard: BTreeMap<(HostId, String), Timestamp>,
    pub(crate) vms: BTreeMap<VmId, VmRow>,
    pub(crate) deleted: BTreeMap<VmId, Tombstone>,
    pub(crate) migrations: BTreeMap<MigrationId, MigrationRow>,
    pub(crate) logs: BTreeMap<MigrationId, Vec<LogRow>>,
    /// Open and closed ones; a closed one is never opened again.
    pub(crate) reservations: BTreeMap<(MigrationId, HostId), (Reservation, Open)>,
    pub(crate) cordons: Vec<Cordon>,
    pub(crate) power: BTreeMap<MigrationId, PowerAction>,
    pub(crate) emptyings: BTreeMap<EmptyingId, EmptyingRow>,
    pub(crate) emptying_logs: BTreeMap<EmptyingId, Vec<EmptyingLogRow>>,
    /// Who has a link, or waits for one: since when, and when its driver last asked.
    pub(crate) slots: BTreeMap<MigrationId, (SlotState, Timestamp, Timestamp)>,
    pub(crate) queued: BTreeMap<MigrationId, QueuedStart>,
    /// A mistake made on purpose.
    pub(crate) mistake: Option<Bug>,
}

/// Whether a reservation still counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Open {
    Yes,
    No,
}

/// When whoever asks read the clock, and what it says now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    pub(crate) then: Timestamp,
    pub(crate) clock: Timestamp,
}

impl Read {
    /// Whether another's lease until `until` still holds.
    pub(super) fn keeps_away(self, until: Timestamp, term: Millis) -> bool {
        let anew = || lease_holds(until, self.clock, term);
        until > self.then && (lease_holds(until, self.then, term) || anew())
    }
}

/// One write of a row.
#[derive(Debug)]
pub(crate) struct Write<'a> {
    pub(crate) before: &'a MigrationRow,
    pub(crate) entries: &'a [Entry],
    pub(crate) notes: &'a Notes,
    pub(crate) now_us: u64,
}

impl Tables {
    pub(crate) fn open_reservations(&self) -> Vec<Reservation> {
        let mut open: Vec<Reservation> = self
            .reservations
            .values()
            .filter(|(_, open)| *open == Open::Yes)
            .map(|(reservation, _)| reservation.clone())
            .collect();
        open.sort_by(|a, b| (&a.host, a.admission).cmp(&(&b.host, b.admission)));
        open
    }

    /// What is promised on a host: open reservations, and the VMs that it owns.
    pub(super) fn reserved_on(&self, host: &HostId) -> Vec<Reservation> {
        if self.mistake == Some(Bug::StoreOverbooks) {
            return Vec::new();
        }
        let owned = self.vms.values().filter(|vm| {
            let runs = match vm.power {
                PowerState::Running | PowerState::Starting | PowerState::Stopping => true,
                PowerState::Stopped | PowerState::Lost => false,
            };
            runs && vm.host.as_ref() == Some(host)
        });
        let owned = owned.map(|vm| Reservation {
            admission: MigrationId::from_u128(vm.id.as_u128()),
            host: host.clone(),
            vm: vm.id,
            memory: vm.memory,
            cpu: vm.cpu,
        });
        let held = self.open_reservations().into_iter().filter(|held| held.host == *host);
        held.chain(owned).collect()
    }

    pub(super) fn reserve(&mut self, reservation: Reservation) {
        let key = (reservation.admission, reservation.host.clone());
        self.reservations.entry(key).or_insert((reservation, Open::Yes));
    }

    pub(crate) fn cordons(&self, now: Timestamp) -> Vec<Cordon> {
        if self.mistake == Some(Bug::StoreForgetsCordons) {
            return Vec::new();
        }
        let holds = |cordon: &&Cordon| cordon.expires.is_none_or(|at| at > now);
        self.cordons.iter().filter(holds).cloned().collect()
    }

    pub(crate) fn of_request(&self, request: &str) -> Option<&MigrationRow> {
        self.migrations.values().find(|row| row.request.as_deref() == Some(request))
    }

    pub(crate) fn list(&self, filter: &Filter) -> Vec<MigrationRow> {
        let mut rows: Vec<MigrationRow> = self
            .migrations
            .values()
            .filter(|row| filter.vm.is_none_or(|vm| row.migration.vm == vm))
            .filter(|row| match filter.open {
                OnlyOpen::All => true,
                OnlyOpen::Open => row.ended_us.is_none(),
            })
            .cloned()
            .collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.created_us, row.migration.id)));
        if filter.limit > 0 {
            rows.truncate(usize::try_from(filter.limit).unwrap_or(usize::MAX));
        }
        rows
    }

    fn grant_refusal(
        &self,
        grant: &Grant,
        vm: &VmRow,
        sake: &Sake,
        now: Timestamp,
    ) -> Option<Refused> {
        let host = &grant.destination;
        let pin = Outline::read(&vm.definition).ok().and_then(|outline| outline.pin);
        if let Some(pin) = grant.pinned_elsewhere(pin, vm.host.as_ref()) {
            return Some(Refused::Pinned { pin });
        }
        if self.cordons(now).iter().any(|cordon| cordon.host == *host) {
            return Some(Refused::Cordoned { host: host.clone() });
        }
        let inbound = self
            .migrations
            .values()
            .filter(|row| row.migration.destination() == Some(host) && row.ended_us.is_none())
            .count();
        let inbound = u32::try_from(inbound).unwrap_or(u32::MAX);
        if inbound >= grant.inbound_max {
            return Some(Refused::InboundCap { host: host.clone(), inbound });
        }
        if let Err(note) = grant.room.check(&self.reserved_on(host)) {
            return Some(Refused::NoRoom { note });
        }
        let max = sake.max_parallel?;
        let own = self.migrations.values().filter(|row| {
            let of = &row.notes.sake.emptying;
            let same = *of == sake.emptying && !of.is_empty();
            same && row.ended_us.is_none() && row.migration.destination().is_some()
        });
        let running = u32::try_from(own.count()).unwrap_or(u32::MAX);
        let emptying = sake.emptying.clone();
        (running >= max).then_some(Refused::OwnLimit { emptying, running, max })
    }

    pub(crate) fn admit(
        &mut self,
        new: &NewMigration,
        gates: Gates,
        now_us: u64,
    ) -> Result<Admission, StoreError> {
        if let Some(request) = &new.request
            && let Some(row) = self.of_request(request)
        {
            return Ok(Admission::Known(Box::new(row.clone())));
        }
        let terms = Terms { gates, ..new.migration.terms.clone() };
        let opened_as = Migration { terms, ..new.migration.clone() };
        let Some(mut vm) = self.vms.get(&opened_as.vm).cloned() else {
            return Ok(Admission::Refused(Refused::UnknownVm));
        };
        if let Some(refused) = vm_refusal(&opened_as, &vm) {
            return Ok(Admission::Refused(refused));
        }
        let now = Timestamp(now_us / 1000);
        let event = match &new.grant {
            Ok(grant) => {
                if let Some(refused) = self.grant_refusal(grant, &vm, &new.notes.sake, now) {
                    return Ok(Admission::Refused(refused));
                }
                Event::Granted { destination: grant.destination.clone() }
            }
            Err(note) => Event::NoRoom { at: now, note: note.clone() },
        };
        let entries = applied(&opened_as, event)?;
        if let Some(begun) = &new.begun_for {
            let change = std::slice::from_ref(&begun.change);
            if self.write_emptying(&begun.row, change, now_us)?.is_none() {
                return Ok(Admission::Raced);
            }
        }
        vm.claim = vm.claim.next();
        vm.admission = Some(opened_as.id);
        self.write_vm(&vm);
        let row = admitted_row(new, &opened_as, &entries, vm.claim, now_us);
        self.migrations.insert(row.migration.id, row.clone());
        let opened = LogRow {
            seq: Seq::FIRST,
            at_us: now_us,
            event: "opened".to_owned(),
            phase: opened_as.label(),
            note: String::new(),
            body: json(&opened_as)?,
        };
        self.logs.insert(row.migration.id, vec![opened]);
        self.log(row.migration.id, Seq::FIRST, &entries, now_us)?;
        self.keep_books(&opened_as, &row)?;
        Ok(Admission::Admitted(Box::new(row)))
    }

    fn log(
        &mut self,
        id: MigrationId,
        mut seq: Seq,
        entries: &[Entry],
        now_us: u64,
    ) -> Result<(), StoreError> {
        for entry in entries {
            seq = seq.next();
            let row = LogRow {
                seq,
                at_us: now_us,
                event: entry.event.label().to_owned(),
                phase: entry.after.label(),
                note: view::note(entry),
                body: json(&entry.event)?,
            };
            self.logs.entry(id).or_default().push(row);
        }
        Ok(())
    }

    /// Makes true beside the row what its phase says.
    fn keep_books(&mut self, before: &Migration, row: &MigrationRow) -> Result<(), StoreError> {
        let books = row.migration.books();
        if before.books() == books {
            return Ok(());
        }
        let id = row.migration.id;
        let orphan = || StoreError::Orphan { migration: id };
        let mut vm = self.vms.get(&row.migration.vm).cloned().ok_or_else(orphan)?;
        if vm.admission != Some(id) {
            return Err(orphan());
        }
        vm.host = Some(books.host);
        vm.generation = vm.generation.max(books.generation);
        if let Some(power) = books.power {
            vm.power = power;
        }
        if let Phase::Failed { cause, .. } = &row.migration.phase {
            vm.error = cause.to_string();
        }
        if books.flight == Flight::Released {
            vm.admission = None;
        }
        self.write_vm(&vm);
        let held: BTreeSet<HostId> = before.books().reserved;
        for host in held.difference(&books.reserved) {
            if let Some(entry) = self.reservations.get_mut(&(id, host.clone())) {
                entry.1 = Open::No;
            }
        }
        for host in books.reserved.difference(&held) {
            self.reserve(Reservation {
                admission: id,
                host: host.clone(),
                vm: row.migration.vm,
                memory: Bytes(row.notes.memory_bytes),
                cpu: MilliCpu(row.notes.cpu_milli),
            });
        }
        Ok(())
    }

    pub(crate) fn take_over(
        &mut self,
        id: MigrationId,
        owner: &str,
        lease_until: Timestamp,
        now: Read,
    ) -> Result<TakeOver, StoreError> {
        let Some(mut row) = self.migrations.get(&id).cloned() else { return Ok(TakeOver::Ended) };
        if row.ended_us.is_some() {
            return Ok(TakeOver::Ended);
        }
        let another = row.lease_owner.as_deref().is_some_and(|holder| holder != owner);
        if another && now.keeps_away(row.lease_until, lease_until.since(now.then)) {
            return Ok(TakeOver::Busy);
        }
        let orphan = || StoreError::Orphan { migration: id };
        let mut vm = self.vms.get(&row.migration.vm).cloned().ok_or_else(orphan)?;
        vm.claim = vm.claim.max(row.claim).next();
        self.write_vm(&vm);
        row.claim = vm.claim;
        row.lease_owner = Some(owner.to_owned());
        row.lease_until = lease_until;
        self.migrations.insert(id, row.clone());
        Ok(TakeOver::Taken(Box::new(row)))
    }

    pub(crate) fn renew_lease(
        &mut self,
        row: &MigrationRow,
        owner: &str,
        lease_until: Timestamp,
    ) -> bool {
        let Some(known) = self.migrations.get_mut(&row.migration.id) else { return false };
        let held = known.claim == row.claim && known.lease_owner.as_deref() == Some(owner);
        if held {
            known.lease_until = lease_until;
        }
        held
    }

    /// Ends the leases of one planner, or all.
    pub(crate) fn end_leases(&mut self, owner: Option<&str>) {
        let ends = |held: &Option<String>| owner.is_none() || held.as_deref() == owner;
        for row in self.migrations.values_mut() {
            if row.ended_us.is_none() && ends(&row.lease_owner) {
                (row.lease_owner, row.lease_until) = (None, Timestamp(0));
            }
        }
        for action in self.power.values_mut() {
            if action.ended_us.is_none() && ends(&action.lease_owner) {
                (action.lease_owner, action.lease_until) = (None, Timestamp(0));
            }
        }
        for row in self.emptyings.values_mut() {
            if row.emptying.is_driven() && ends(&row.lease_owner) {
                (row.lease_owner, row.lease_until) = (None, Timestamp(0));
            }
        }
    }

    pub(crate) fn grant(
        &mut self,
        before: &MigrationRow,
        grant: &Grant,
        now_us: u64,
    ) -> Result<Granted, StoreError> {
        let Some(known) = self.migrations.get(&before.migration.id).cloned() else {
            return Ok(Granted::Raced);
        };
        if known.claim != before.claim || known.seq != before.seq {
            return Ok(Granted::Raced);
        }
        let Some(vm) = self.vms.get(&known.migration.vm).cloned() else {
            return Ok(Granted::Refused(Refused::UnknownVm));
        };
        let (sake, now) = (&known.notes.sake, Timestamp(now_us / 1000));
        if let Some(refused) = self.grant_refusal(grant, &vm, sake, now) {
            return Ok(Granted::Refused(refused));
        }
        let event = Event::Granted { destination: grant.destination.clone() };
        let entries = applied(&known.migration, event)?;
        let write = Write { before: &known, entries: &entries, notes: &known.notes, now_us };
        match self.commit(&write)? {
            Commit::Done(row) => Ok(Granted::Done(row)),
            Commit::Raced => Ok(Granted::Raced),
        }
    }

    /// Writes a row if it is still the one that the change was decided on.
    pub(crate) fn commit(
        &mut self,
        write: &Write<'_>,
    ) -> Result<Commit<Box<MigrationRow>>, StoreError> {
        let before = write.before;
        let id = before.migration.id;
        let same = self
            .migrations
            .get(&id)
            .is_some_and(|known| known.claim == before.claim && known.seq == before.seq);
        if !same {
            return Ok(Commit::Raced);
        }
        check_changes(&before.migration, write.entries)?;
        self.commit_anyway(write)
    }

    /// Writes a row whatever became of it.
    pub(crate) fn commit_anyway(
        &mut self,
        write: &Write<'_>,
    ) -> Result<Commit<Box<MigrationRow>>, StoreError> {
        let before = write.before;
        let id = before.migration.id;
        let (lease_owner, lease_until) = self
            .migrations
            .get(&id)
            .map_or((None, Timestamp(0)), |known| (known.lease_owner.clone(), known.lease_until));
        let mut row = MigrationRow {
            notes: write.notes.clone(),
            updated_us: write.now_us,
            lease_owner,
            lease_until,
            ..before.clone()
        };
        for entry in write.entries {
            row.migration = entry.after.clone();
            row.seq = row.seq.next();
        }
        if row.migration.entered_anew(&before.migration) {
            row.notes.entered_us = write.now_us;
        }
        row.ended_us = match row.migration.books().flight {
            Flight::Held => None,
            Flight::Released => before.ended_us.or(Some(write.now_us)),
        };
        self.keep_books(&before.migration, &row)?;
        self.migrations.insert(id, row.clone());
        self.log(id, before.seq, write.entries, write.now_us)?;
        Ok(Commit::Done(Box::new(row)))
    }
}

/// Says whether the VM may be given to a new migration.
fn vm_refusal(migration: &Migration, vm: &VmRow) -> Option<Refused> {
    if let Some(admission) = vm.admission {
        return Some(Refused::InFlight { admission });
    }
    let found = match migration.found {
        Guest::Present => PowerState::Running,
        Guest::PoweredOff => PowerState::Stopped,
    };
    if vm.power != found {
        return Some(Refused::Power { power: vm.power });
    }
    if vm.host.as_ref() != Some(&migration.source) || vm.generation != migration.generation {
        return Some(Refused::Moved { host: vm.host.clone() });
    }
    None
}

fn applied(migration: &Migration, event: Event) -> Result<Vec<Entry>, StoreError> {
    migration.advance(event).map_err(|source| StoreError::Machine { source })
}

pub(super) fn json<T: serde::Serialize>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|source| StoreError::Record { what: "migration", source })
}

fn admitted_row(
    new: &NewMigration,
    opened_as: &Migration,
    entries: &[Entry],
    claim: Claim,
    now_us: u64,
) -> MigrationRow {
    let mut seq = Seq::FIRST;
    let mut migration = opened_as;
    for entry in entries {
        seq = seq.next();
        migration = &entry.after;
    }
    MigrationRow {
        migration: migration.clone(),
        vm_name: new.vm_name.clone(),
        request: new.request.clone(),
        claim,
        seq,
        lease_owner: None,
        lease_until: Timestamp(0),
        trouble: None,
        created_us: now_us,
        updated_us: now_us,
        ended_us: None,
        notes: Notes { entered_us: now_us, ..new.notes.clone() },
    }
}
