//! Declarations that a host is dead, and what they are worth.

use std::collections::{BTreeMap, BTreeSet};

use tracing::{error, warn};
use vmferry_planner_core::migration::{GoneProof, ProofKind};
use vmferry_proto::v1::{Knowledge, VmReport};
use vmferry_types::{HostId, PowerState, Role, Timestamp};

use super::{Entry, Inventory};
use crate::store::{Declaration, DeclarationKind, Followed, HostRow, Store, StoreError, VmRow};

/// What a declaration of death is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// It is proof now.
    Holds,
    /// The host is back under another boot, which proves the same.
    History,
    /// The host was heard from the same boot again: it was not dead.
    Void,
}

impl Worth {
    /// Says what a host's declaration is worth; `None` if it has none.
    #[must_use]
    pub fn of(row: &HostRow) -> Option<Self> {
        let declaration = row.declared_dead.as_ref()?;
        Some(if declaration.void.is_some() {
            Self::Void
        } else if declaration.proves_gone(&row.boot_id) {
            Self::Holds
        } else {
            Self::History
        })
    }

    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::History => "history",
            Self::Void => "void",
        }
    }
}

/// Writes a declaration as proof that no QEMU runs on its host.
#[must_use]
pub fn proof(host: &HostId, declaration: &Declaration) -> GoneProof {
    GoneProof {
        kind: ProofKind::HostDeclaredDead,
        host: host.clone(),
        boot_id: declaration.boot_id.clone(),
        pid: 0,
        start_time: 0,
        ended: words(declaration),
        at: declaration.at,
        stderr_tail: declaration.evidence.clone(),
    }
}

/// Says who declared a host dead, and why.
#[must_use]
pub fn words(declaration: &Declaration) -> String {
    let by = match declaration.by.as_str() {
        "" => "somebody",
        by => by,
    };
    let reason = match declaration.reason.trim() {
        "" => String::new(),
        reason => format!(": {reason}"),
    };
    match declaration.kind {
        DeclarationKind::Operator => format!("declared dead by {by}{reason}"),
        DeclarationKind::FenceCommand => {
            format!("powered off by the fence command for {by}{reason}")
        }
    }
}

/// Returns what is known of a death when the store is read. What was void stays so: the store may
/// have been read before that was written.
fn merged(known: Option<Declaration>, stored: Option<Declaration>) -> Option<Declaration> {
    let mut stored = stored?;
    if let Some(known) = known
        && known.at == stored.at
        && known.boot_id == stored.boot_id
    {
        stored.void = stored.void.or(known.void);
    }
    Some(stored)
}

impl Inventory {
    /// Returns a host's last declaration of death.
    pub(super) fn declaration(&self, host: &HostId) -> Option<Declaration> {
        self.locked().get(host)?.row.as_ref()?.declared_dead.clone()
    }

    /// Returns the declaration that proves a host's processes gone now, if there is one.
    #[must_use]
    pub fn dead(&self, host: &HostId) -> Option<Declaration> {
        let entries = self.locked();
        let row = entries.get(host)?.row.as_ref()?;
        row.declared_dead.clone().filter(|declaration| declaration.proves_gone(&row.boot_id))
    }

    /// Says whether a host was asked by this planner after it was declared dead so.
    #[must_use]
    pub fn was_asked_after(&self, host: &HostId, declaration: &Declaration) -> bool {
        self.locked().get(host).is_some_and(|entry| entry.asked_after.as_ref() == Some(declaration))
    }

    /// Notes that a host was asked after it was declared dead so.
    pub fn note_asked_after(&self, host: &HostId, declaration: &Declaration) {
        if let Some(entry) = self.locked().get_mut(host) {
            entry.asked_after = Some(declaration.clone());
        }
    }

    /// Returns the hosts that are declared dead now.
    #[must_use]
    pub fn all_dead(&self) -> Vec<(HostId, Declaration)> {
        let hosts: Vec<HostId> = self.locked().keys().cloned().collect();
        hosts
            .into_iter()
            .filter_map(|host| self.dead(&host).map(|declaration| (host, declaration)))
            .collect()
    }

    /// Returns what the store holds of a host, as this planner knows it.
    #[must_use]
    pub fn row(&self, host: &HostId) -> Option<HostRow> {
        self.locked().get(host)?.row.clone()
    }

    /// Reads again what other planners write: hosts, and declarations of their death.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn reread(&self, store: &dyn Store) -> Result<(), StoreError> {
        let before = self.boots();
        let rows = store.hosts().await?;
        self.forget_deleted(&before, &rows);
        for row in rows {
            let mut entries = self.locked();
            let entry = entries.entry(row.id.clone()).or_default();
            match &mut entry.row {
                // Who the host is, it says itself; who else would know better?
                Some(known) if entry.heard.is_some() => {
                    let newer = merged(known.declared_dead.take(), row.declared_dead);
                    known.declared_dead = newer;
                    // Under a later boot another planner has heard it. Whoever hears a boot writes it
                    // before it keeps it, so what is known since before the reading is no later one.
                    if before.get(&row.id).and_then(Option::as_ref) == Some(&known.boot_id) {
                        known.boot_id = row.boot_id;
                    }
                }
                Some(_) | None => {
                    self.directory.learn(&row.id, &row.agent_address);
                    entry.row = Some(row);
                }
            }
        }
        Ok(())
    }

    /// Returns the boot that each host is known under.
    fn boots(&self) -> BTreeMap<HostId, Option<String>> {
        let boot = |entry: &Entry| entry.row.as_ref().map(|row| row.boot_id.clone());
        self.locked().iter().map(|(id, entry)| (id.clone(), boot(entry))).collect()
    }

    /// Forgets hosts that were known before all were read, and are gone: they were deleted. Who has
    /// introduced itself since is not among those that were read. A deleted host comes back under
    /// another boot only.
    fn forget_deleted(&self, known: &BTreeMap<HostId, Option<String>>, rows: &[HostRow]) {
        let read: BTreeSet<&HostId> = rows.iter().map(|row| &row.id).collect();
        self.locked().retain(|id, entry| {
            let boot = entry.row.as_ref().map(|row| &row.boot_id);
            let since = known.get(id).is_none_or(|known| known.as_ref() != boot);
            let stays = since || read.contains(id);
            if !stays {
                self.stands_no_more(entry);
                self.speaks(id, entry.heard.as_ref().map(|heard| &*heard.report), None);
            }
            stays
        });
    }

    /// Takes note that a host lives under a boot: a declaration of that boot's death was wrong.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn hear_from(
        &self,
        store: &dyn Store,
        host: &HostId,
        boot_id: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let Some(declaration) = self.declaration(host) else { return Ok(()) };
        if !declaration.proves_gone(boot_id) {
            return Ok(());
        }
        if store.void_declaration(host, boot_id, now).await? {
            error!(host_id = %host, boot_id, declared = words(&declaration),
                "a host that was declared dead lives: the declaration is void; look at every VM that was started elsewhere since");
        }
        let mut entries = self.locked();
        if let Some(row) = entries.get_mut(host).and_then(|entry| entry.row.as_mut())
            && let Some(known) = row.declared_dead.as_mut().filter(|known| **known == declaration)
        {
            known.void = Some(now);
        }
        Ok(())
    }

    /// Takes back that a VM is lost, if only a void declaration of its host's death says so and the
    /// host says that it runs.
    pub(super) async fn lives_after_all(
        &self,
        store: &dyn Store,
        host: &HostId,
        (vm, row): (&VmReport, VmRow),
        now: Timestamp,
    ) -> Result<VmRow, StoreError> {
        let lost = row.power == PowerState::Lost && row.admission.is_none();
        let here = row.host.as_ref() == Some(host) && row.generation.value() == vm.generation;
        let runs = Role::from_label(&vm.role) == Some(Role::Running)
            && vm.knowledge() == Knowledge::Known
            && vm.gone.is_none();
        let void = || self.declaration(host).is_some_and(|of| of.void.is_some());
        if !(lost && here && runs && void()) {
            return Ok(row);
        }
        let followed = Followed {
            vm: row.id,
            host: host.clone(),
            power: PowerState::Running,
            generation: row.generation,
            claim: row.claim,
        };
        if store.follow_vm(&followed, now).await? {
            warn!(vm_id = %row.id, host_id = %host,
                "VM was taken for lost by a declaration that is void: it runs");
        }
        Ok(store.vm(row.id).await?.unwrap_or(row))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmferry_planner_core::fleet::Policy;
    use vmferry_types::{Millis, Percent};

    use super::*;

    fn row(host: &str, boot_id: &str) -> HostRow {
        HostRow {
            id: host.parse().unwrap(),
            name: host.to_owned(),
            boot_id: boot_id.to_owned(),
            agent_address: format!("{host}:1"),
            last_report: Timestamp(1),
            declared_dead: None,
        }
    }

    fn introduce(inventory: &Inventory, row: HostRow) {
        let id = row.id.clone();
        inventory.locked().entry(id).or_default().row = Some(row);
    }

    #[test]
    fn a_host_that_introduces_itself_while_all_are_read_stays() {
        let policy = Policy {
            reserve_memory: Percent::new(0).unwrap(),
            reserve_cpu: Percent::new(0).unwrap(),
            cpu_overcommit_percent: 100,
            report_max_age: Millis(1),
            inbound_max: 1,
            outbound_max: 1,
        };
        let settings = (BTreeMap::new(), policy);
        let inventory = Inventory::of(settings, Arc::default(), BTreeMap::new());
        for host in ["a", "deleted", "back"] {
            introduce(&inventory, row(host, "boot"));
        }
        let (known, read) = (inventory.boots(), [row("a", "boot")]);
        introduce(&inventory, row("new", "boot"));
        introduce(&inventory, row("back", "next boot"));
        inventory.forget_deleted(&known, &read);
        let left: Vec<HostId> = inventory.locked().keys().cloned().collect();
        assert_eq!(left, ["a", "back", "new"].map(|host| host.parse().unwrap()));
    }
}
