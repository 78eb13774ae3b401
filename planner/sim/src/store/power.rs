//! Starts and stops.

use vmferry_planner::store::{
    AdmitPower, Commit, Ends, FromQueue, NewPower, PowerAction, PowerKind, PowerPhase, Refused,
    Reservation, StoreError, TakePower, VmRow,
};
use vmferry_types::{MigrationId, PowerState, Seq, Timestamp};

use super::Tables;
use super::tables::{Open, Read};

impl Tables {
    /// Decides whether a VM may be started or stopped; `None` if it may.
    fn power_refusal(&self, new: &NewPower, vm: &VmRow, now: Timestamp) -> Option<Refused> {
        let waited = match new.from_queue {
            FromQueue::No => None,
            FromQueue::Yes => Some(new.id),
        };
        if vm.admission != waited {
            return Some(vm.admission.map_or(Refused::Power { power: vm.power }, |admission| {
                Refused::InFlight { admission }
            }));
        }
        match (new.kind, vm.power) {
            (PowerKind::Start, PowerState::Stopped | PowerState::Lost)
            | (PowerKind::Stop, PowerState::Running) => {}
            (PowerKind::Start, power) | (PowerKind::Stop, power) => {
                return Some(Refused::Power { power });
            }
        }
        match new.kind {
            PowerKind::Start if self.cordons(now).iter().any(|held| held.host == new.host) => {
                Some(Refused::Cordoned { host: new.host.clone() })
            }
            PowerKind::Start => {
                let reserved = self.reserved_on(&new.host);
                new.room.check(&reserved).err().map(|note| Refused::NoRoom { note })
            }
            PowerKind::Stop if vm.host.as_ref() != Some(&new.host) => {
                Some(Refused::Moved { host: vm.host.clone() })
            }
            PowerKind::Stop => None,
        }
    }

    pub(crate) fn admit_power(&mut self, new: &NewPower, now_us: u64) -> AdmitPower {
        if let Some(request) = &new.request {
            let known = self.power.values().find(|action| action.request.as_ref() == Some(request));
            if let Some(action) = known {
                return AdmitPower::Known(action.clone());
            }
        }
        let Some(mut vm) = self.vms.get(&new.vm).cloned() else {
            return AdmitPower::Refused(Refused::UnknownVm);
        };
        if let Some(refused) = self.power_refusal(new, &vm, Timestamp(now_us / 1000)) {
            return AdmitPower::Refused(refused);
        }
        if new.from_queue == FromQueue::Yes && !self.leave_queue(new.id, now_us) {
            return AdmitPower::Refused(Refused::InFlight { admission: new.id });
        }
        let record = new.begin(&mut vm);
        self.write_vm(&vm);
        self.reserve(Reservation {
            admission: new.id,
            host: new.host.clone(),
            vm: new.vm,
            memory: new.memory,
            cpu: new.cpu,
        });
        let action = PowerAction {
            id: new.id,
            request: new.request.clone(),
            vm: new.vm,
            host: new.host.clone(),
            kind: new.kind,
            phase: PowerPhase::Open,
            generation: vm.generation,
            claim: vm.claim,
            seq: Seq::FIRST,
            lease_owner: None,
            lease_until: Timestamp(0),
            created_us: now_us,
            ended_us: None,
            record,
        };
        self.power.insert(action.id, action.clone());
        AdmitPower::Admitted(action)
    }

    pub(crate) fn open_power(&self) -> Vec<PowerAction> {
        let mut open: Vec<PowerAction> =
            self.power.values().filter(|action| action.ended_us.is_none()).cloned().collect();
        open.sort_by_key(|action| action.created_us);
        open
    }

    pub(crate) fn take_over_power(
        &mut self,
        id: MigrationId,
        owner: &str,
        lease_until: Timestamp,
        now: Read,
    ) -> Result<TakePower, StoreError> {
        let Some(mut action) = self.power.get(&id).cloned() else { return Ok(TakePower::Ended) };
        if action.phase != PowerPhase::Open {
            return Ok(TakePower::Ended);
        }
        let another = action.lease_owner.as_deref().is_some_and(|holder| holder != owner);
        if another && now.keeps_away(action.lease_until, lease_until.since(now.then)) {
            return Ok(TakePower::Busy);
        }
        let orphan = || StoreError::Orphan { migration: id };
        let mut vm = self.vms.get(&action.vm).cloned().ok_or_else(orphan)?;
        vm.claim = vm.claim.max(action.claim).next();
        self.write_vm(&vm);
        action.claim = vm.claim;
        action.seq = action.seq.next();
        action.lease_owner = Some(owner.to_owned());
        action.lease_until = lease_until;
        self.power.insert(id, action.clone());
        Ok(TakePower::Taken(Box::new(action)))
    }

    pub(crate) fn renew_power_lease(
        &mut self,
        action: &PowerAction,
        owner: &str,
        lease_until: Timestamp,
    ) -> bool {
        let Some(known) = self.power.get_mut(&action.id) else { return false };
        let held = known.claim == action.claim && known.lease_owner.as_deref() == Some(owner);
        if held {
            known.lease_until = lease_until;
        }
        held
    }

    pub(crate) fn end_power(
        &mut self,
        action: &PowerAction,
        end: &Ends,
        now_us: u64,
    ) -> Commit<()> {
        let Some(known) = self.power.get_mut(&action.id).filter(|known| {
            known.claim == action.claim && known.seq == action.seq && known.ended_us.is_none()
        }) else {
            return Commit::Raced;
        };
        known.phase = end.phase;
        known.seq = known.seq.next();
        known.ended_us = Some(now_us);
        known.record.error.clone_from(&end.error);
        known.record.gone.clone_from(&end.gone);
        let Some(mut vm) = self.vms.get(&action.vm).cloned() else { return Commit::Raced };
        vm.admission = None;
        vm.power = end.power;
        vm.error.clone_from(&end.error);
        if !end.resolved_machine.is_empty() {
            vm.resolved_machine.clone_from(&end.resolved_machine);
        }
        self.write_vm(&vm);
        for (_, open) in self
            .reservations
            .iter_mut()
            .filter(|((admission, _), _)| *admission == action.id)
            .map(|(_, entry)| (&entry.0, &mut entry.1))
        {
            *open = Open::No;
        }
        Commit::Done(())
    }
}
