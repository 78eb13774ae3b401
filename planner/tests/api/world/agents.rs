//! The fake agents behind the planner's port.

use super::*;

impl Agents for World {
    fn claim<'a>(
        &'a self,
        host: &'a HostId,
        request: ClaimRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>> {
        Box::pin(async move {
            self.reach(host)?;
            self.with(|state| {
                let vm = state
                    .hosts
                    .get_mut(host)
                    .unwrap()
                    .vms
                    .entry(request.vm_id.clone())
                    .or_insert_with(|| FakeVm {
                        role: "absent".to_owned(),
                        name: String::new(),
                        ..FakeVm::default()
                    });
                if request.generation < vm.generation {
                    let detail = ErrorDetail {
                        code: "stale_generation".to_owned(),
                        known_claim: vm.claim,
                        known_generation: vm.generation,
                        ..ErrorDetail::default()
                    };
                    return Err(refused_with(host, "claim: a newer owner is known", detail));
                }
                let equal = request.claim == vm.claim && request.migration_id == vm.migration;
                if request.claim < vm.claim || (request.claim == vm.claim && !equal) {
                    let detail = ErrorDetail {
                        code: "stale_claim".to_owned(),
                        known_claim: vm.claim,
                        ..ErrorDetail::default()
                    };
                    return Err(refused_with(host, "claim", detail));
                }
                if request.migration_id != vm.migration {
                    (vm.handed, vm.gave_up) = (false, false);
                    vm.transfer.clear();
                    (vm.stopped_at_us, vm.resumed_at_us) = (0, 0);
                }
                vm.migration.clone_from(&request.migration_id);
                vm.claim = request.claim;
                vm.step = 0;
                vm.generation = vm.generation.max(request.generation);
                Ok(state.observation(host, &request.vm_id))
            })
        })
    }

    fn execute<'a>(
        &'a self,
        host: &'a HostId,
        request: ExecuteRequest,
    ) -> BoxFuture<'a, Answer<ExecuteReply>> {
        Box::pin(async move { self.run(host, &request) })
    }

    fn observe<'a>(
        &'a self,
        host: &'a HostId,
        request: ObserveRequest,
    ) -> BoxFuture<'a, Answer<VmObservation>> {
        Box::pin(async move {
            self.reach(host)?;
            Ok(self.with(|state| state.observation(host, &request.vm_id)))
        })
    }

    fn watch(
        &self,
        host: &HostId,
        request: ObserveRequest,
    ) -> BoxStream<'static, Answer<VmObservation>> {
        let (world, host) = (self.clone(), host.clone());
        let bell = self.bell.subscribe();
        stream::unfold(Some((world, host, request, bell, true)), |watching| async move {
            let (world, host, request, mut bell, first) = watching?;
            if !first {
                bell.changed().await.ok()?;
            }
            if let Err(error) = world.reach_quietly(&host) {
                return Some((Err(error), None));
            }
            let seen = world.look_quietly(&host, &request.vm_id);
            bell.mark_unchanged();
            Some((Ok(seen), Some((world, host, request, bell, false))))
        })
        .boxed()
    }

    fn describe_source<'a>(
        &'a self,
        host: &'a HostId,
        vm: VmId,
    ) -> BoxFuture<'a, Answer<SourceDescription>> {
        Box::pin(async move {
            self.reach(host)?;
            self.with(|state| {
                let known = state.hosts[host].vms.get(&vm.to_string()).filter(|vm| vm.alive);
                let known = known.ok_or_else(|| refused(host, "unknown_vm", "no such VM here"))?;
                Ok(SourceDescription {
                    vm_id: vm.to_string(),
                    vm_name: known.name.clone(),
                    definition: known.definition.clone(),
                    resolved_machine: "pc-q35-10.0".to_owned(),
                    accelerator: "kvm".to_owned(),
                    run_state: known.run_state.clone(),
                    blockers: state.source_blockers.clone(),
                    ..SourceDescription::default()
                })
            })
        })
    }

    fn describe_ports<'a>(&'a self, host: &'a HostId, vm: VmId) -> BoxFuture<'a, Answer<VmPorts>> {
        Box::pin(async move {
            self.reach(host)?;
            self.with(|state| {
                let known = state.hosts[host].vms.get(&vm.to_string()).filter(|vm| vm.alive);
                let known = known.ok_or_else(|| refused(host, "unknown_vm", "no such VM here"))?;
                Ok(VmPorts { run_state: known.run_state.clone(), ..VmPorts::default() })
            })
        })
    }

    fn check_destination<'a>(
        &'a self,
        host: &'a HostId,
        _source: SourceDescription,
    ) -> BoxFuture<'a, Answer<CheckReply>> {
        Box::pin(async move {
            self.reach(host)?;
            let blockers = self.with(|state| state.hosts[host].blockers.clone());
            Ok(CheckReply { blockers })
        })
    }

    fn report<'a>(&'a self, host: &'a HostId) -> BoxFuture<'a, Answer<HostReport>> {
        Box::pin(async move {
            self.reach(host)?;
            Ok(self.with(|state| state.report(host.as_str())))
        })
    }
}
