//! Hosts and VMs.

use vmferry_planner::store::{
    Adopted, Declaration, Declared, Defined, Deleted, Followed, HostRow, Lost, Refused, SavedHost,
    Tombstone, VmRow,
};
use vmferry_types::{Claim, HostId, PowerState, Timestamp, VmId};

use super::Tables;

impl Tables {
    pub(crate) fn save_host(&mut self, host: &HostRow) -> SavedHost {
        match self.deleted_hosts.get(&host.id) {
            Some((boot_id, at)) if *boot_id == host.boot_id => {
                return SavedHost::Deleted { at: *at };
            }
            Some(_) => {
                self.deleted_hosts.remove(&host.id);
            }
            None => {}
        }
        let other = self.hosts.values().find(|row| row.name == host.name && row.id != host.id);
        if let Some(row) = other {
            return SavedHost::NameTaken { by: row.id.clone() };
        }
        let dead = self.hosts.get(&host.id).and_then(|row| row.declared_dead.clone());
        self.hosts.insert(host.id.clone(), HostRow { declared_dead: dead, ..host.clone() });
        SavedHost::Saved
    }

    pub(crate) fn declare_dead(&mut self, host: &HostId, declaration: &Declaration) -> Declared {
        let Some(row) = self.hosts.get_mut(host) else { return Declared::UnknownHost };
        if row.boot_id != declaration.boot_id {
            return Declared::Rebooted { boot_id: row.boot_id.clone() };
        }
        row.declared_dead = Some(declaration.clone());
        let mut lost = Vec::new();
        for vm in self.vms.values_mut() {
            let swept = vm.host.as_ref() == Some(host)
                && vm.admission.is_none()
                && vm.power == PowerState::Running;
            if swept {
                vm.power = PowerState::Lost;
                vm.error = format!("host {host} was declared dead by {}", declaration.by);
                lost.push(vm.id);
            }
        }
        Declared::Written { lost }
    }

    pub(crate) fn void_declaration(
        &mut self,
        host: &HostId,
        boot_id: &str,
        now: Timestamp,
    ) -> bool {
        let held = self
            .hosts
            .get_mut(host)
            .and_then(|row| row.declared_dead.as_mut())
            .filter(|dead| dead.boot_id == boot_id && dead.void.is_none());
        let Some(dead) = held else { return false };
        dead.void = Some(now);
        true
    }

    /// Writes a VM; counters never go back.
    pub(super) fn write_vm(&mut self, vm: &VmRow) {
        let older = self
            .vms
            .get(&vm.id)
            .is_some_and(|known| known.generation > vm.generation || known.claim > vm.claim);
        if !older {
            self.vms.insert(vm.id, vm.clone());
        }
    }

    pub(crate) fn define_vm(&mut self, vm: &VmRow) -> Defined {
        let other = self.vms.values().find(|row| row.id == vm.id || row.name == vm.name);
        if let Some(row) = other {
            return Defined::Taken(row.clone());
        }
        let mut row = vm.clone();
        if let Some(before) = self.deleted.remove(&vm.id) {
            row.host = before.host;
            row.generation = before.generation;
            row.claim = before.claim;
        }
        self.write_vm(&row);
        Defined::New(row)
    }

    pub(crate) fn adopt_vm(&mut self, vm: &VmRow) -> Adopted {
        if let Some(row) = self.vms.get(&vm.id) {
            return Adopted::Known(row.clone());
        }
        if let Some(before) = self.deleted.get(&vm.id) {
            return Adopted::Deleted(before.clone());
        }
        self.write_vm(vm);
        Adopted::New
    }

    pub(crate) fn delete_vm(&mut self, id: VmId, now: Timestamp) -> Deleted {
        let Some(vm) = self.vms.get(&id).cloned() else { return Deleted::Unknown };
        if let Some(admission) = vm.admission {
            return Deleted::Refused(Refused::InFlight { admission });
        }
        match (vm.power, &vm.host) {
            (PowerState::Stopped | PowerState::Lost, _) | (PowerState::Running, None) => {}
            (power @ (PowerState::Starting | PowerState::Stopping), _)
            | (power @ PowerState::Running, Some(_)) => {
                return Deleted::Refused(Refused::Power { power });
            }
        }
        self.vms.remove(&id);
        self.deleted.insert(
            id,
            Tombstone {
                vm: id,
                name: vm.name,
                host: vm.host,
                generation: vm.generation,
                claim: vm.claim,
                deleted: now,
            },
        );
        Deleted::Done
    }

    pub(crate) fn raise_claim(&mut self, vm: VmId, claim: Claim) -> bool {
        let known = self.vms.get_mut(&vm).map(|row| &mut row.claim);
        let deleted = self.deleted.get_mut(&vm).map(|row| &mut row.claim);
        let mut raised = false;
        for of in known.into_iter().chain(deleted).filter(|of| **of < claim) {
            *of = claim;
            raised = true;
        }
        raised
    }

    pub(crate) fn follow_vm(&mut self, followed: &Followed) -> bool {
        let Some(row) = self.vms.get_mut(&followed.vm) else { return false };
        let follows = row.admission.is_none()
            && row.generation <= followed.generation
            && row.claim <= followed.claim;
        if follows {
            row.host = Some(followed.host.clone());
            row.power = followed.power;
            row.generation = followed.generation;
            row.claim = followed.claim;
            row.error.clear();
        }
        follows
    }

    pub(crate) fn mark_lost(&mut self, lost: &Lost) -> bool {
        let Some(row) = self.vms.get_mut(&lost.vm) else { return false };
        let is = row.host.as_ref() == Some(&lost.host)
            && row.generation == lost.generation
            && row.claim <= lost.claim
            && row.admission.is_none()
            && row.power == PowerState::Running;
        if is {
            row.power = PowerState::Lost;
            row.error.clone_from(&lost.cause);
        }
        is
    }
}
