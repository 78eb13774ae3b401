//! What hosts report, and what follows from it.
//!
//! Reports live in memory: after a restart the fleet is known again within one report interval,
//! and until then a host that has not reported takes no placements. A missing report proves
//! nothing (rule R1); what a report does say is held against the store, and a contradiction is
//! shown, not resolved by guessing.

mod death;
mod fleet;
mod kinds;
mod shared;
mod shortlist;
mod speakers;
mod standings;
mod steady;
mod truth;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Notify, Semaphore};
use tracing::{info, warn};
use vmferry_planner_core::capacity::promised;
use vmferry_planner_core::fleet::{Demand, Policy, Report, VmUse};
use vmferry_planner_core::placement::Standing;
use vmferry_proto::v1::{HostReport, ReportReply, VmGeneration, VmReport};
use vmferry_types::{Bytes, HostId, Millis, Role, Timestamp, VmId};

pub use death::{Worth, proof as proof_of_death, words as words_of_death};
pub use fleet::{core_policy, held, snapshot};
pub use shortlist::shortlist;
pub use truth::{Doubted, EndedBy};

use self::kinds::Kinds;
use self::shared::{Shared, Urgency};
use self::speakers::Speakers;
use self::standings::Standings;
use self::steady::Settled;
use crate::agents::rpc::Directory;
use crate::clock;
use crate::config::{Config, HostSettings};
use crate::store::{
    Declaration, Filter, HostRow, Mark, MigrationRow, SavedHost, Store, StoreError, VmRow,
};

/// Agent processes of one host that were followed by another are remembered, so that a straggler
/// of theirs, or a second agent under the same id, is told apart from a restart.
const SUPERSEDED_MAX: usize = 16;

/// So many of the newest migrations are told again to a host that forgot its part in them: far more
/// than begin while a command can still be under way.
const REMEMBERED: u32 = 1000;

/// As many reports are held against the store at once.
const COMPARED_AT_ONCE: usize = 2;

/// For so long after a report its address is that host's: another agent that reports under the
/// same id from elsewhere meanwhile is a second one, not the same one moved.
const ADDRESS_HELD: Millis = Millis(30_000);

/// A host as it was last heard.
#[derive(Clone, Debug)]
pub struct KnownHost {
    /// What it said.
    pub report: Arc<HostReport>,
    /// The same in the words of the core: read once, used for every decision until the next.
    pub read: Arc<Report>,
    /// What the VMs of that are promised together; `None` if it cannot be read.
    pub promised: Option<Demand>,
    /// When that arrived, by the planner's clock.
    pub at: Timestamp,
}

#[derive(Debug, Default)]
struct Entry {
    row: Option<HostRow>,
    heard: Option<KnownHost>,
    superseded: VecDeque<String>,
    shared: Shared,
    /// The declaration of death after which the host was asked once more.
    asked_after: Option<Declaration>,
    /// VMs that came to be here since the last report.
    arrived: BTreeMap<VmId, VmUse>,
    /// Whether `heard` counts VMs that its report does not name.
    counts_more: bool,
    /// The number of the last report.
    sequence: u64,
    /// Set while all that was said agrees with the store.
    settled: Option<Settled>,
    /// Where it stands among all by what it last said; `None` if that cannot be read.
    standing: Option<Standing>,
}

/// All hosts, as they introduced themselves and as they were last heard.
#[derive(Debug)]
pub struct Inventory {
    settings: BTreeMap<HostId, HostSettings>,
    /// What operators say of a host that they say nothing of.
    unsaid: HostSettings,
    directory: Arc<Directory>,
    entries: Mutex<BTreeMap<HostId, Entry>>,
    /// Locked after `entries`.
    speakers: Mutex<Speakers>,
    /// Locked after `entries`.
    standings: Mutex<Standings>,
    kinds: Kinds,
    newly_heard: Notify,
    /// So many reports are held against the store at once: a fleet that is heard for the first time
    /// must not keep those who decide from it.
    comparing: Semaphore,
}

/// What a report came to.
#[derive(Debug, Default)]
pub struct Taken {
    /// What the agent is answered.
    pub reply: ReportReply,
    /// Ends that may be old news: each needs a look that is younger than the row.
    pub doubted: Vec<Doubted>,
}

/// What a report says beside what the store has.
struct Compared {
    generations: Vec<VmGeneration>,
    doubted: Vec<Doubted>,
    /// All of it is as the store has it.
    agreed: bool,
}

/// Whether a report is news.
enum Reception {
    New {
        introduce: bool,
    },
    /// A straggler: an older report of the same agent process.
    Old,
    Refused(String),
}

impl Inventory {
    /// Knows the hosts of the store, none of which has been heard yet.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn load(
        config: &Config,
        directory: Arc<Directory>,
        store: &dyn Store,
    ) -> Result<Self, StoreError> {
        let mut entries = BTreeMap::new();
        for row in store.hosts().await? {
            directory.learn(&row.id, &row.agent_address);
            let id = row.id.clone();
            entries.insert(id, Entry { row: Some(row), ..Entry::default() });
        }
        let policy = core_policy(&config.policy);
        Ok(Self::of((config.hosts.clone(), policy), directory, entries))
    }

    fn of(
        (settings, policy): (BTreeMap<HostId, HostSettings>, Policy),
        directory: Arc<Directory>,
        entries: BTreeMap<HostId, Entry>,
    ) -> Self {
        Self {
            settings,
            unsaid: HostSettings::default(),
            directory,
            entries: Mutex::new(entries),
            speakers: Mutex::default(),
            standings: Mutex::new(Standings::new(policy)),
            kinds: Kinds::default(),
            newly_heard: Notify::new(),
            comparing: Semaphore::new(COMPARED_AT_ONCE),
        }
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, BTreeMap<HostId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns every host with what it last said, if it said anything since this planner started.
    #[must_use]
    pub fn hosts(&self) -> Vec<(HostRow, Option<KnownHost>)> {
        self.locked()
            .values()
            .filter_map(|entry| Some((entry.row.clone()?, entry.heard.clone())))
            .collect()
    }

    /// Shows every host that has introduced itself: what operators say of it, and what it last said.
    fn each(&self, mut show: impl FnMut(&HostId, Option<&HostSettings>, Option<&KnownHost>)) {
        for (id, entry) in self.locked().iter().filter(|(_, entry)| entry.row.is_some()) {
            show(id, self.settings.get(id), entry.heard.as_ref());
        }
    }

    /// Returns what a host last said, if it said anything since this planner started.
    #[must_use]
    pub fn heard(&self, host: &HostId) -> Option<KnownHost> {
        self.locked().get(host)?.heard.clone()
    }

    /// Returns what operators say of a host.
    #[must_use]
    pub fn settings(&self, host: &HostId) -> HostSettings {
        self.settings.get(host).cloned().unwrap_or_default()
    }

    /// Returns the name that a host is shown under; its id if it never said one.
    #[must_use]
    pub fn display_name(&self, host: &HostId) -> String {
        let entries = self.locked();
        let row = entries.get(host).and_then(|entry| entry.row.as_ref());
        row.map_or_else(|| host.to_string(), |row| row.name.clone())
    }

    /// Resolves a host by id, or else by display name.
    #[must_use]
    pub fn resolve(&self, name: &str) -> Option<HostId> {
        let entries = self.locked();
        let by_id = entries.keys().find(|id| id.as_str() == name);
        let by_name = || {
            entries
                .iter()
                .find(|(_, entry)| entry.row.as_ref().is_some_and(|row| row.name == name))
                .map(|(id, _)| id)
        };
        by_id.or_else(by_name).cloned()
    }

    /// Counts a VM on a host that may not have reported it yet.
    ///
    /// Call it before the reservation is closed that held its place: a report takes a second to
    /// come, and until then nothing else would say that the place is taken. The next report is
    /// believed to be older still if it does not name the VM; the one after it is not.
    pub fn note_arrival(&self, host: &HostId, vm: VmId, demand: Demand) {
        let arrived = VmUse {
            role: Role::Running,
            configured: demand.memory,
            observed: Bytes::ZERO,
            cpu: demand.cpu,
        };
        let mut entries = self.locked();
        let Some(entry) = entries.get_mut(host) else { return };
        entry.arrived.insert(vm, arrived);
        if let Some(heard) = &mut entry.heard {
            count_too(Arc::make_mut(&mut heard.read), &entry.arrived);
            heard.promised = promised(&heard.read);
        }
        self.stands(host, entry);
    }

    /// Returns what each host last said of each VM, for those who ask about many.
    #[must_use]
    pub fn all_reported(&self) -> BTreeMap<VmId, Vec<(HostId, VmReport)>> {
        let mut all: BTreeMap<VmId, Vec<(HostId, VmReport)>> = BTreeMap::new();
        for (id, entry) in self.locked().iter() {
            for vm in entry.heard.iter().flat_map(|heard| &heard.report.vms) {
                if let Ok(of) = vm.vm_id.parse() {
                    all.entry(of).or_default().push((id.clone(), vm.clone()));
                }
            }
        }
        all
    }

    /// Returns what a host last said of a VM.
    #[must_use]
    pub fn reported_by(&self, host: &HostId, vm: VmId) -> Option<VmReport> {
        let wanted = vm.to_string();
        let entries = self.locked();
        let heard = entries.get(host)?.heard.as_ref()?;
        heard.report.vms.iter().find(|vm| vm.vm_id == wanted).cloned()
    }

    /// Returns what each host last said of a VM.
    #[must_use]
    pub fn reported(&self, vm: VmId) -> Vec<(HostId, VmReport)> {
        let wanted = vm.to_string();
        let entries = self.locked();
        self.speakers_of(vm)
            .into_iter()
            .filter_map(|id| {
                let heard = entries.get(&id)?.heard.as_ref()?;
                let report = heard.report.vms.iter().find(|vm| vm.vm_id == wanted)?;
                Some((id, report.clone()))
            })
            .collect()
    }

    /// Returns the hosts that speak of a VM, in order.
    fn speakers_of(&self, vm: VmId) -> Vec<HostId> {
        self.speakers.lock().unwrap_or_else(PoisonError::into_inner).of(vm).to_vec()
    }

    /// Notes which VMs a host speaks of; its entry is locked.
    fn speaks(&self, host: &HostId, before: Option<&HostReport>, now: Option<&HostReport>) {
        self.speakers.lock().unwrap_or_else(PoisonError::into_inner).turn(host, before, now);
    }

    /// Takes a report.
    ///
    /// # Errors
    ///
    /// Fails if the store does. A host that is not wanted is told so in the answer.
    pub async fn report(
        &self,
        store: &dyn Store,
        report: HostReport,
        now: Timestamp,
    ) -> Result<Taken, StoreError> {
        let refused = |why: String| Taken {
            reply: ReportReply { refused: why, generations: Vec::new() },
            doubted: Vec::new(),
        };
        let host: HostId = match report.host_id.parse() {
            Ok(host) => host,
            Err(error) => {
                return Ok(refused(format!(
                    "host id `{}` cannot be used: {error}",
                    report.host_id
                )));
            }
        };
        if let Some(why) = unusable(&report) {
            return Ok(refused(why));
        }
        let report = Arc::new(report);
        match self.receive(&host, &report, now) {
            Reception::Refused(why) => {
                warn!(host_id = %host, reason = why, "report refused");
                return Ok(refused(why));
            }
            Reception::Old => return Ok(Taken::default()),
            Reception::New { introduce: true } => {
                if let Some(why) = self.introduce(store, &host, &report, now).await? {
                    warn!(host_id = %host, reason = why, "report refused");
                    return Ok(refused(why));
                }
            }
            Reception::New { introduce: false } => {}
        }
        let mark = store.mark_of(&host).await?;
        let nothing_new = self.nothing_new(&host, &report, mark, now);
        if nothing_new.is_none() {
            self.keep(&host, Arc::clone(&report), now);
        }
        self.hear_from(store, &host, &report.boot_id, now).await?;
        if let Some(generations) = nothing_new {
            let reply = ReportReply { refused: String::new(), generations };
            return Ok(Taken { reply, doubted: Vec::new() });
        }
        // It is never closed.
        let _turn = self.comparing.acquire().await.ok();
        let Compared { mut generations, doubted, agreed } =
            self.compare_all(store, &host, &report, now).await?;
        if report.journal_unreadable {
            let newest = Filter { limit: REMEMBERED, ..Filter::default() };
            let passed = ends_at(&host, &store.migrations(&newest).await?);
            generations.extend(forgotten(&host, &report, &store.vms().await?, &passed));
        }
        if agreed {
            self.settle(
                &host,
                report.sequence,
                Settled { generations: generations.clone(), mark, at: now },
            );
        }
        let reply = ReportReply { refused: String::new(), generations };
        Ok(Taken { reply, doubted })
    }

    /// Compares each VM of a report with what the store has of it.
    async fn compare_all(
        &self,
        store: &dyn Store,
        host: &HostId,
        report: &HostReport,
        now: Timestamp,
    ) -> Result<Compared, StoreError> {
        let mut generations = Vec::with_capacity(report.vms.len());
        let mut doubted = Vec::new();
        let mut agreed = steady::is_whole(report);
        let owned = store.vms_on(host).await?;
        let mut owned: BTreeMap<VmId, VmRow> = owned.into_iter().map(|row| (row.id, row)).collect();
        for vm in &report.vms {
            let Ok(id) = vm.vm_id.parse::<VmId>() else {
                agreed = false;
                continue;
            };
            let known = match owned.remove(&id) {
                Some(row) => Some(row),
                None => store.vm(id).await?,
            };
            agreed &= known.as_ref().is_some_and(|row| steady::agree(host, vm, row));
            if let Some(row) = truth::compare(store, host, report, (id, vm, known), now).await? {
                let row = self.lives_after_all(store, host, (vm, row), now).await?;
                doubted.extend(truth::doubted(host, report, (vm, &row)));
                generations.push(generation(&row));
            }
        }
        Ok(Compared { generations, doubted, agreed })
    }

    /// Keeps a report that says the same as the one before, all of which agrees with the store, and
    /// returns what its host is answered; `None` if there is something to be looked at.
    fn nothing_new(
        &self,
        host: &HostId,
        report: &Arc<HostReport>,
        mark: Mark,
        now: Timestamp,
    ) -> Option<Vec<VmGeneration>> {
        let mut entries = self.locked();
        let entry = entries.get_mut(host)?;
        let heard = entry.heard.as_mut()?;
        let settled = entry.settled.as_ref();
        let settled =
            settled.filter(|settled| settled.mark == mark && settled.counts(host, now))?;
        if !steady::same_but_for_figures(&heard.report, report) {
            return None;
        }
        let generations = settled.generations.clone();
        let as_read = entry.arrived.is_empty() && !entry.counts_more;
        if as_read && steady::repeats(&heard.report, report) {
            self.heard_now(&mut entry.shared, Some(heard.at), now);
            entry.sequence = report.sequence;
            heard.at = now;
            Arc::make_mut(&mut heard.read).at = now;
        } else {
            self.take_in(host, entry, Arc::clone(report), now);
        }
        Some(generations)
    }

    /// Notes that all of a report agrees with the store, if it is still the last one.
    fn settle(&self, host: &HostId, sequence: u64, settled: Settled) {
        let mut entries = self.locked();
        if let Some(entry) = entries.get_mut(host).filter(|entry| entry.sequence == sequence) {
            entry.settled = Some(settled);
        }
    }

    /// Decides what a report is, before anything is kept of it.
    fn receive(&self, host: &HostId, report: &HostReport, now: Timestamp) -> Reception {
        let entries = self.locked();
        let Some(entry) = entries.get(host) else {
            return Reception::New { introduce: true };
        };
        if entry.superseded.contains(&report.agent_instance) {
            return Reception::Refused(format!(
                "another agent process reports as host {host} since; two agents must not share a host id: stop one of them or give it its own id"
            ));
        }
        if let Some(heard) = &entry.heard
            && heard.report.agent_instance == report.agent_instance
            && entry.sequence >= report.sequence
        {
            return Reception::Old;
        }
        if let Some(heard) = &entry.heard
            && heard.report.agent_instance != report.agent_instance
            && heard.report.agent_address != report.agent_address
            && now.since(heard.at) < ADDRESS_HELD
        {
            return Reception::Refused(format!(
                "an agent at {} reports as host {host} too; two agents must not share a host id: give one of them its own, or, if the host has moved to {}, wait half a minute",
                heard.report.agent_address, report.agent_address
            ));
        }
        let same = entry.row.as_ref().is_some_and(|row| {
            row.name == display_name(report)
                && row.boot_id == report.boot_id
                && row.agent_address == report.agent_address
        });
        Reception::New { introduce: !same }
    }

    /// Writes who the host is; says why it is not wanted, if so.
    async fn introduce(
        &self,
        store: &dyn Store,
        host: &HostId,
        report: &HostReport,
        now: Timestamp,
    ) -> Result<Option<String>, StoreError> {
        let row = HostRow {
            id: host.clone(),
            name: display_name(report).to_owned(),
            boot_id: report.boot_id.clone(),
            agent_address: report.agent_address.clone(),
            last_report: now,
            declared_dead: self.declaration(host),
        };
        match store.save_host(&row).await? {
            SavedHost::Saved => {
                info!(host_id = %host, name = row.name, address = row.agent_address, "host introduced itself");
                self.locked().entry(host.clone()).or_default().row = Some(row);
                Ok(None)
            }
            SavedHost::Deleted { at } => Ok(Some(format!(
                "host {host} was deleted {}; stop its agent. Once the machine has been booted anew it may come back as a new host",
                clock::rfc3339(at)
            ))),
            SavedHost::NameTaken { by } => Ok(Some(format!(
                "host {host} reports the display name `{}`, which host {by} has; give one of the two another `name`",
                row.name
            ))),
        }
    }

    /// Forgets a host that was deleted.
    pub fn forget(&self, host: &HostId) {
        let mut entries = self.locked();
        if let Some(entry) = entries.remove(host) {
            self.speaks(host, entry.heard.as_ref().map(|heard| &*heard.report), None);
            self.stands_no_more(&entry);
        }
    }

    fn heard_now(&self, shared: &mut Shared, before: Option<Timestamp>, now: Timestamp) {
        match shared.heard(before, now) {
            Urgency::AtOnce => self.newly_heard.notify_one(),
            Urgency::InTime => {}
        }
    }

    fn keep(&self, host: &HostId, report: Arc<HostReport>, now: Timestamp) {
        self.directory.learn(host, &report.agent_address);
        let mut entries = self.locked();
        let entry = entries.entry(host.clone()).or_default();
        if let Some(before) = &entry.heard
            && before.report.agent_instance != report.agent_instance
        {
            entry.superseded.push_back(before.report.agent_instance.clone());
            if entry.superseded.len() > SUPERSEDED_MAX {
                entry.superseded.pop_front();
            }
        }
        entry.settled = None;
        self.take_in(host, entry, report, now);
    }

    /// Reads a report, with what came since the one before.
    fn take_in(&self, host: &HostId, entry: &mut Entry, report: Arc<HostReport>, now: Timestamp) {
        let before = entry.heard.as_ref();
        let capabilities = self.kinds.read(before, &report);
        let mut read = fleet::read(&report, capabilities, now);
        self.speaks(host, before.map(|before| &*before.report), Some(&report));
        self.heard_now(&mut entry.shared, before.map(|before| before.at), now);
        let arrived = std::mem::take(&mut entry.arrived);
        entry.counts_more = !arrived.is_empty();
        count_too(&mut read, &arrived);
        entry.sequence = report.sequence;
        let promised = promised(&read);
        entry.heard = Some(KnownHost { read: Arc::new(read), promised, report, at: now });
        self.stands(host, entry);
    }
}

/// Adds VMs to a report that does not name them as running.
fn count_too(report: &mut Report, arrived: &BTreeMap<VmId, VmUse>) {
    let Some(vms) = &mut report.vms else { return };
    for (vm, there) in arrived {
        match vms.get(vm).map(|said| said.role) {
            Some(Role::Running | Role::Held) => {}
            Some(Role::Absent | Role::Receiver | Role::Stopped) | None => {
                vms.insert(*vm, *there);
            }
        }
    }
}

/// Writes what is held to be true of a VM.
fn generation(row: &VmRow) -> VmGeneration {
    VmGeneration {
        vm_id: row.id.to_string(),
        generation: row.generation.value(),
        claim: row.claim.value(),
        host_id: row.host.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

/// Returns what a host whose journal is new or was lost has to know again before that proves
/// anything (rule R3): every VM that is its own, or under way, perhaps to it, or that passed by
/// lately, so that a command of then which comes late is still refused.
fn forgotten(
    host: &HostId,
    report: &HostReport,
    rows: &[VmRow],
    passed: &BTreeSet<VmId>,
) -> Vec<VmGeneration> {
    let named: BTreeSet<&str> = report.vms.iter().map(|vm| vm.vm_id.as_str()).collect();
    rows.iter()
        .filter(|row| {
            row.host.as_ref() == Some(host) || row.admission.is_some() || passed.contains(&row.id)
        })
        .map(generation)
        .filter(|row| !named.contains(row.vm_id.as_str()))
        .collect()
}

/// Returns the VMs of those migrations that had an end on a host.
fn ends_at(host: &HostId, migrations: &[MigrationRow]) -> BTreeSet<VmId> {
    let moved = migrations.iter().map(|row| &row.migration);
    let here = moved.filter(|migration| {
        migration.source == *host || migration.phase.destination() == Some(host)
    });
    here.map(|migration| migration.vm).collect()
}

/// Returns the name that a host is shown under.
fn display_name(report: &HostReport) -> &str {
    if report.name.is_empty() { &report.host_id } else { &report.name }
}

/// Says what is wrong with a report that no agent of ours sends.
fn unusable(report: &HostReport) -> Option<String> {
    const VMS_MAX: usize = 10_000;
    if report.agent_address.is_empty() {
        return Some("agent_address is empty: the planner could not reach the agent".to_owned());
    }
    if report.agent_instance.is_empty() {
        return Some("agent_instance is empty".to_owned());
    }
    for (field, text) in [
        ("name", &report.name),
        ("agent_address", &report.agent_address),
        ("agent_instance", &report.agent_instance),
        ("agent_version", &report.agent_version),
        ("boot_id", &report.boot_id),
    ] {
        if text.len() > 255 {
            return Some(format!("{field} is longer than 255 bytes"));
        }
        if text.chars().any(char::is_control) {
            return Some(format!("{field} has control characters"));
        }
    }
    if report.vms.len() > VMS_MAX {
        return Some(format!(
            "{} VMs are more than the {VMS_MAX} that one host may report",
            report.vms.len()
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_types::MilliCpu;

    #[test]
    fn a_vm_that_arrived_counts_until_its_host_says_more_of_it() {
        let vm = VmId::from_u128(7);
        let arrived = VmUse {
            role: Role::Running,
            configured: Bytes(64),
            observed: Bytes::ZERO,
            cpu: MilliCpu(1000),
        };
        let said = |vms: Vec<VmReport>| {
            let message = HostReport { vms, ..HostReport::default() };
            let mut read = fleet::read(&message, Arc::default(), Timestamp(1));
            count_too(&mut read, &BTreeMap::from([(vm, arrived)]));
            read.vms.and_then(|vms| vms.get(&vm).copied())
        };
        let named = |role: Role, bytes| VmReport {
            vm_id: vm.to_string(),
            role: role.label().to_owned(),
            configured_memory_bytes: bytes,
            ..VmReport::default()
        };
        assert_eq!(said(Vec::new()), Some(arrived));
        assert_eq!(said(vec![named(Role::Stopped, 0)]), Some(arrived));
        let better = said(vec![named(Role::Running, 65)]).map(|there| there.configured);
        assert_eq!(better, Some(Bytes(65)));
    }
}
