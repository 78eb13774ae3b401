//! What must hold at every moment, and what must hold once all is calm.

use std::collections::BTreeMap;

use vmferry_planner::clock::simulated;
use vmferry_planner::store::{Ends, LogRow, MigrationRow, PowerAction, PowerKind};
use vmferry_planner_core::evidence::RunState;
use vmferry_planner_core::migration::{
    Cause, Entry, Event, Handover, Migration, Phase, ProofKind, SourceWord,
};
use vmferry_types::{
    Bytes, Generation, HostId, MigrationId, PhaseLabel, PowerState, Timestamp, VmId,
};

use crate::bugs::Bug;
use crate::host::{Host, Why, short};
use crate::journal::Part;
use crate::store::Open;
use crate::weather::Blow;
use crate::world::{EPOCH_US, Invariant, State};

/// Checked at every write of the store.
impl State {
    /// A migration was opened.
    pub(crate) fn admitted(&mut self, row: &MigrationRow) {
        self.counts.opened += 1;
        if let Some(guest) = self.guests.get_mut(&row.migration.vm) {
            guest.blindly = false;
        }
        let (vm, phase) = (short(row.migration.vm), row.migration.label());
        let destination = row.migration.destination().cloned();
        self.note(|| {
            format!("migration of {vm} from {} to {destination:?} is {phase}", row.migration.source)
        });
        let generation = row.migration.books().generation;
        self.ledger.entry(row.migration.vm).or_insert(generation);
        self.owes(&row.migration);
    }

    /// A start or a stop was admitted.
    pub(crate) fn power_admitted(&mut self, action: &PowerAction) {
        let name = match action.kind {
            PowerKind::Start => "start_vm",
            PowerKind::Stop => "stop_vm",
        };
        *self.counts.asked.entry(name).or_default() += 1;
        self.owed.insert((action.id, name));
        self.note(|| format!("{name} of {} on {} is admitted", short(action.vm), action.host));
        self.gives_out(action.vm, action.generation);
    }

    /// A start or a stop has ended.
    pub(crate) fn power_ended(&mut self, action: &PowerAction, end: &Ends) {
        let (kind, phase) = (action.kind.label(), end.phase.label());
        *self.counts.powers.entry((kind, phase)).or_default() += 1;
        self.note(|| {
            format!("{kind} of {} is {phase}: {} {}", short(action.vm), end.power, end.error)
        });
    }

    /// Notes what a row has owed since it was written: only that may be done for it.
    fn owes(&mut self, migration: &Migration) {
        if let Some(effect) = migration.outstanding() {
            self.owed.insert((migration.id, effect.label()));
        }
        // What mends the channel of a divided guest follows from what both halves say.
        if migration.may_be_divided() {
            self.owed.insert((migration.id, "recover_receiver"));
            self.owed.insert((migration.id, "resume_transfer"));
        }
    }

    /// I2: generations never go back.
    pub(crate) fn gives_out(&mut self, vm: VmId, generation: Generation) {
        let unheard = self.by_hand.contains(&vm);
        let newest = self.ledger.entry(vm).or_insert(generation);
        if generation < *newest && unheard {
            // Its row follows with the next report; until then agents refuse what it owes.
        } else if generation < *newest {
            let newest = *newest;
            self.violated(
                Invariant::Generations,
                format!(
                    "a row of {} goes from generation {newest} back to {generation}",
                    short(vm)
                ),
            );
        } else {
            *newest = generation;
        }
    }

    /// Returns who holds a row, and until when.
    pub(crate) fn lease(&mut self, id: MigrationId) -> Option<(String, Timestamp)> {
        let breaks = self.bugged(Bug::StoreBreaksLeases);
        let migrations = self.tables.migrations.get_mut(&id);
        let of_migration = migrations.map(|row| (&mut row.lease_owner, row.lease_until));
        let powers = self.tables.power.get_mut(&id);
        let of_power = powers.map(|action| (&mut action.lease_owner, action.lease_until));
        let (owner, until) = of_migration.or(of_power)?;
        let held = owner.clone().map(|owner| (owner, until));
        if breaks {
            *owner = None;
        }
        held
    }

    /// R2: no row is taken from a planner whose lease has not ended.
    pub(crate) fn check_lease(
        &mut self,
        id: MigrationId,
        by: &str,
        held: Option<(String, Timestamp)>,
    ) {
        let jumps = self.weather.blows.contains(&Blow::Clock);
        let now = Timestamp(simulated::true_us().unwrap_or(EPOCH_US) / 1000);
        let Some((owner, until)) = held.filter(|(owner, until)| owner != by && *until > now) else {
            return;
        };
        if !jumps {
            let left = until.since(now);
            let what = format!("{by} takes {id} from {owner}, whose lease ends in {left:?}");
            self.violated(Invariant::LeaseHolds, what);
        }
    }

    /// Commit, then act: what is done for an admission was owed by its row at some time.
    pub(crate) fn check_owed(&mut self, vm: VmId, admission: MigrationId, name: &'static str) {
        if !self.owed.contains(&(admission, name)) {
            let what = format!("{name} of {} is done, and no row ever owed it", short(vm));
            self.violated(Invariant::CommitThenAct, what);
        }
    }

    /// A row was written: I2, I8.
    pub(crate) fn committed(&mut self, before: &Migration, row: &MigrationRow, entries: &[Entry]) {
        let vm = row.migration.vm;
        let mut at = before.clone();
        for entry in entries {
            let phase = entry.after.label();
            self.note(|| {
                format!(
                    "migration of {}: {} -> {phase} (claim {})",
                    short(vm),
                    entry.event.label(),
                    row.claim
                )
            });
            match at.apply(&entry.event) {
                Ok(after) if after == entry.after => {
                    self.owes(&after);
                    at = after;
                }
                Ok(_) | Err(_) => {
                    self.violated(
                        Invariant::Replays,
                        format!("{} does not lead there", entry.event.label()),
                    );
                }
            }
        }
        if at != row.migration {
            self.violated(
                Invariant::Replays,
                format!("the row of {} is not what was decided", short(vm)),
            );
        }
        self.gives_out(vm, row.migration.books().generation);
        if let Phase::Restored { proof: Handover { source: SourceWord::Gone(_), .. }, .. }
        | Phase::Committed { proof: Handover { source: SourceWord::Gone(_), .. }, .. } =
            &row.migration.phase
        {
            let known = self.host(&row.migration.source).is_some_and(|host| {
                host.agent.as_ref().and_then(|agent| agent.sights.get(&vm)).is_some_and(|sight| {
                    sight.resumed_at_us > 0 && sight.resumed_at_us >= sight.stopped_at_us
                })
            });
            if let Some(guest) = self.guests.get_mut(&vm) {
                // Whoever commanded it knew.
                guest.blindly = !known && guest.went_on == Why::ByItself;
            }
        }
        if row.migration.label() == PhaseLabel::Failed && before.label() != PhaseLabel::Failed {
            self.check_given_up(&row.migration);
        }
        if row.migration.label().is_terminal() && !before.label().is_terminal() {
            *self.counts.ended.entry(row.migration.label()).or_default() += 1;
        }
    }

    /// I5: a guest is given up only if something happened to it.
    fn check_given_up(&mut self, migration: &Migration) {
        let lost = self
            .guests
            .get(&migration.vm)
            .is_some_and(|guest| guest.lost.is_some() || guest.off || guest.blindly);
        // It was let go on, or not, at a host that only a person can speak for by now.
        let dead = matches!(migration.phase.cause(), Some(Cause::GuestCrashed { proof })
            if proof.kind == ProofKind::HostDeclaredDead);
        if dead && !lost {
            self.counts.unknowable += 1;
            if let Some(guest) = self.guests.get_mut(&migration.vm) {
                guest.lost = Some("it may have run on a host that is dead".to_owned());
            }
        } else if !lost {
            let what = format!(
                "{} is given up though nothing happened to it: {:?}",
                short(migration.vm),
                migration.phase.cause()
            );
            self.violated(Invariant::NotLost, what);
        }
    }

    /// Checked at every point, whatever led there: I1 by counting, I2 by looking.
    pub(crate) fn check_step(&mut self) {
        let mut running: BTreeMap<VmId, u32> = BTreeMap::new();
        for qemu in self.hosts.values().flat_map(|host| host.qemus.values()) {
            if qemu.run == RunState::Running {
                *running.entry(qemu.vm).or_default() += 1;
            }
        }
        if let Some((vm, count)) = running.iter().find(|(_, count)| **count > 1) {
            let what = format!("{count} QEMU processes of {} run", short(*vm));
            self.violated(Invariant::OneRuns, what);
        }
        let mut back = None;
        for row in self.tables.vms.values() {
            let newest = self.rows_seen.entry(row.id).or_insert(row.generation);
            if row.generation < *newest {
                back = Some(format!(
                    "the row of {} goes from {newest} to {}",
                    row.name, row.generation
                ));
            }
            *newest = row.generation;
        }
        if let Some(what) = back {
            self.violated(Invariant::Generations, what);
        }
    }

    /// I3: what is promised on a host fits into it; and a VM is given to one migration at a time.
    pub(crate) fn check_books(&mut self) {
        let mut over = Vec::new();
        for (id, host) in &self.hosts {
            let mut promised: BTreeMap<VmId, Bytes> = host
                .qemus
                .values()
                .map(|qemu| {
                    let memory =
                        self.guests.get(&qemu.vm).map_or(Bytes::ZERO, |guest| guest.memory);
                    (qemu.vm, memory)
                })
                .collect();
            for (reservation, open) in self.tables.reservations.values() {
                if reservation.host == *id && *open == Open::Yes {
                    let entry = promised.entry(reservation.vm).or_default();
                    *entry = (*entry).max(reservation.memory);
                }
            }
            let sum = promised.values().fold(Bytes::ZERO, |sum, memory| sum.plus(*memory));
            if sum > host.memory {
                over.push(format!("{sum} of {} are promised on {id}", host.memory));
            }
        }
        for what in over {
            self.violated(Invariant::Capacity, what);
        }
        let mut open: BTreeMap<VmId, u32> = BTreeMap::new();
        for row in self.tables.migrations.values().filter(|row| row.ended_us.is_none()) {
            *open.entry(row.migration.vm).or_default() += 1;
        }
        if let Some((vm, _)) = open.iter().find(|(_, count)| **count > 1) {
            let what = format!("{} is given to two migrations", short(*vm));
            self.violated(Invariant::NothingLeaks, what);
        }
    }
}

/// Checked once all is calm.
impl State {
    /// Checks what must have come of everything; `trouble` says what open migrations wait for.
    pub(crate) fn check_end(&mut self, trouble: &BTreeMap<VmId, String>) {
        let mut found: Vec<(Invariant, String)> = Vec::new();
        for row in self.tables.migrations.values() {
            self.check_row(row, trouble, &mut found);
        }
        for (reservation, open) in self.tables.reservations.values() {
            let migration = self.tables.migrations.get(&reservation.admission);
            let power = self.tables.power.get(&reservation.admission);
            let ended = migration.is_none_or(|row| row.ended_us.is_some())
                && power.is_none_or(|action| action.ended_us.is_some());
            if *open == Open::Yes && ended {
                let what =
                    format!("{} is still reserved on {}", short(reservation.vm), reservation.host);
                found.push((Invariant::Capacity, what));
            }
        }
        let powers = self.tables.open_power();
        for action in powers.iter().filter(|action| {
            !self.hopeless(action.vm, &action.host)
                || trouble.get(&action.vm).is_none_or(String::is_empty)
        }) {
            let what = format!(
                "the {} of {} on {} does not end; it waits for {:?}",
                action.kind.label(),
                short(action.vm),
                action.host,
                trouble.get(&action.vm)
            );
            found.push((Invariant::Ends, what));
        }
        let open = self.tables.migrations.values().filter(|row| row.ended_us.is_none());
        let stuck: Vec<VmId> =
            open.map(|row| row.migration.vm).chain(powers.iter().map(|action| action.vm)).collect();
        let vms: Vec<VmId> = self.guests.keys().copied().collect();
        for vm in vms.into_iter().filter(|vm| !stuck.contains(vm)) {
            self.check_guest(vm, &mut found);
            self.check_leaks(vm, &mut found);
        }
        for (invariant, what) in found {
            self.violated(invariant, what);
        }
    }

    /// Whether a host is gone for good and no planner was told so, or had a process of the VM when
    /// its journal was lost: what hangs on it may stay stuck, until a person ends it.
    fn hopeless(&self, vm: VmId, host: &HostId) -> bool {
        self.host(host)
            .is_none_or(|host| (host.for_good && !host.declared) || self.forgot(vm, host))
    }

    /// Whether a host had a process of the VM when its journal was lost.
    fn forgot(&self, vm: VmId, host: &Host) -> bool {
        host.journal.forgot.contains(&vm) && !self.bugged(Bug::AgentTrustsLostJournal)
    }

    fn check_row(
        &self,
        row: &MigrationRow,
        trouble: &BTreeMap<VmId, String>,
        found: &mut Vec<(Invariant, String)>,
    ) {
        let migration = &row.migration;
        let vm = short(migration.vm);
        if row.ended_us.is_none() {
            // What was moved by hand under a migration is a person's to resolve.
            let excused = self.by_hand.contains(&migration.vm)
                || self.hopeless(migration.vm, &migration.source)
                || migration.destination().is_some_and(|host| self.hopeless(migration.vm, host));
            let named = trouble.get(&migration.vm).filter(|text| !text.is_empty());
            if !excused || named.is_none() {
                let what = format!(
                    "the migration of {vm} is stuck: {:?}; it waits for {named:?}",
                    migration.phase
                );
                found.push((Invariant::Ends, what));
            }
        } else if let Some(effect) = migration.outstanding() {
            let what = format!("the ended migration of {vm} still owes {}", effect.label());
            found.push((Invariant::NothingLeaks, what));
        }
        let log = self.tables.logs.get(&migration.id).map(Vec::as_slice).unwrap_or_default();
        match replay(log) {
            Ok(replayed) if replayed == *migration => {}
            Ok(_) => found.push((Invariant::Replays, format!("the log of {vm} leads elsewhere"))),
            Err(why) => found.push((Invariant::Replays, format!("the log of {vm}: {why}"))),
        }
    }

    /// I5: who was not lost runs, where the store says.
    fn check_guest(&self, vm: VmId, found: &mut Vec<(Invariant, String)>) {
        let (Some(guest), Some(row)) = (self.guests.get(&vm), self.tables.vms.get(&vm)) else {
            return;
        };
        let owner = row.host.clone();
        if guest.lost.is_none() && !guest.off {
            let runs = guest.runs.as_ref().map(|(host, _)| host.clone());
            if runs.is_none() || runs != owner {
                let what =
                    format!("{} runs on {runs:?}, and is the store's on {owner:?}", short(vm));
                found.push((Invariant::NotLost, what));
            }
            if row.power != PowerState::Running {
                let what =
                    format!("{} runs, and the store says {}: {}", short(vm), row.power, row.error);
                found.push((Invariant::NotLost, what));
            }
        } else if row.power == PowerState::Running && guest.runs.is_none() {
            let excused = owner.is_none_or(|host| self.hopeless(vm, &host));
            if !excused {
                let what = format!(
                    "{} is gone ({:?}), and the store says that it runs",
                    short(vm),
                    guest.lost
                );
                found.push((Invariant::NothingLeaks, what));
            }
        }
    }

    /// I7: no process and no tap that nobody owns.
    fn check_leaks(&self, vm: VmId, found: &mut Vec<(Invariant, String)>) {
        let owner = self.tables.vms.get(&vm).and_then(|row| row.host.clone());
        for (id, host) in &self.hosts {
            if !host.up {
                continue;
            }
            for qemu in host.qemus.values().filter(|qemu| qemu.vm == vm) {
                let forgotten = host.journal.forgot_launches.contains(&qemu.launch);
                if owner.as_ref() != Some(id) && !forgotten {
                    let what = format!("QEMU {} of {} is left on {id}", qemu.pid, short(vm));
                    found.push((Invariant::NothingLeaks, what));
                }
            }
        }
    }

    /// I7: no tap without a process that is known.
    pub(crate) fn check_taps(&mut self) {
        let mut found = Vec::new();
        for (id, host) in &self.hosts {
            let forgotten = &host.journal.forgot_launches;
            for tap in host.taps.difference(forgotten) {
                let known = host.journal.records.values().any(|record| match &record.part {
                    Part::Running { process, .. } | Part::Receiver { process, .. } => {
                        process.launch == *tap
                    }
                    Part::Absent | Part::Stopped => false,
                });
                if !known {
                    found.push(format!("tap {tap} is left on {id}"));
                }
            }
        }
        for what in found {
            self.violated(Invariant::NothingLeaks, what);
        }
    }
}

/// Reads a log back into a row.
fn replay(log: &[LogRow]) -> Result<Migration, String> {
    let (opened, rest) = log.split_first().ok_or("there is none")?;
    let mut migration: Migration =
        serde_json::from_str(&opened.body).map_err(|error| error.to_string())?;
    for row in rest {
        let event: Event = serde_json::from_str(&row.body).map_err(|error| error.to_string())?;
        migration = migration.apply(&event).map_err(|error| format!("{}: {error}", row.event))?;
        if migration.label() != row.phase {
            return Err(format!("{} leads to {}, not {}", row.event, migration.label(), row.phase));
        }
    }
    Ok(migration)
}
