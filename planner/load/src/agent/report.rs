//! What a host tells each planner of itself, every few seconds and when something changed.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use vmferry_proto::reporting::Reporting;
use vmferry_proto::v1;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_types::VmId;

use super::Agent;
use super::observe::{ACCELERATOR, MACHINE};
use crate::console::complain;
use crate::fleet::{OVERHEAD, VM_MEMORY, wall_ms};

/// A real agent's: the least time between two reports, and how close changes are one.
const GAP: Duration = Duration::from_secs(1);
const SETTLE: Duration = Duration::from_millis(250);
const INTERVAL: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(10);

impl Agent {
    /// Makes the report of now.
    pub(super) fn report(&self) -> v1::HostReport {
        let address = self.address();
        self.fleet.with(|state| {
            let Some(host) = state.hosts.get_mut(&self.host) else {
                return v1::HostReport::default();
            };
            let sequence = host.fresh_sequence();
            let count = u64::try_from(host.qemus.len()).unwrap_or(u64::MAX);
            let mut report = v1::HostReport {
                host_id: self.host.to_string(),
                name: self.host.to_string(),
                boot_id: host.boot_id.clone(),
                agent_instance: host.agent_instance.clone(),
                agent_version: "load".to_owned(),
                agent_address: address,
                sequence,
                sent_at_ms: wall_ms(),
                capacity: Some(v1::Capacity {
                    total_memory_bytes: host.memory,
                    available_memory_bytes: host.memory.saturating_sub(count * VM_MEMORY),
                    cpu_total_milli: 1_000_000,
                    ..v1::Capacity::default()
                }),
                capabilities: Some(v1::HostCapabilities {
                    architecture: std::env::consts::ARCH.to_owned(),
                    accelerators: vec![ACCELERATOR.to_owned()],
                    machine_types: vec![MACHINE.to_owned()],
                    ..v1::HostCapabilities::default()
                }),
                ..v1::HostReport::default()
            };
            let vms: Vec<VmId> = host.records.keys().copied().collect();
            report.vms = vms.into_iter().filter_map(|vm| self.report_vm(state, vm)).collect();
            report
        })
    }

    fn report_vm(&self, state: &crate::fleet::State, vm: VmId) -> Option<v1::VmReport> {
        let host = state.hosts.get(&self.host)?;
        let record = host.records.get(&vm)?;
        let guest = state.guests.get(&vm)?;
        let qemu = record.process().and_then(|process| host.qemus.get(&process.pid));
        let is_there = |value: u64| if qemu.is_some() { value } else { 0 };
        Some(v1::VmReport {
            vm_id: vm.to_string(),
            vm_name: guest.name.clone(),
            role: record.role(qemu.map(|qemu| qemu.run)).label().to_owned(),
            generation: record.fence.generation.value(),
            claim: record.fence.claim.value(),
            knowledge: v1::Knowledge::Known.into(),
            configured_memory_bytes: is_there(VM_MEMORY + OVERHEAD),
            observed_memory_bytes: is_there(VM_MEMORY),
            cpu_milli: is_there(1000),
            run_state: qemu.map(|qemu| qemu.run.label().to_owned()).unwrap_or_default(),
            migration_id: record.fence.migration.map(|id| id.to_string()).unwrap_or_default(),
            definition: guest.definition.clone(),
            resolved_machine: MACHINE.to_owned(),
            ..v1::VmReport::default()
        })
    }

    fn address(&self) -> String {
        let all = self.fleet.addresses();
        let own = all.into_iter().find(|(host, _)| *host == self.host);
        own.map(|(_, address)| address.to_string()).unwrap_or_default()
    }

    /// Tells one planner how this host is, for as long as the fleet lives.
    pub(super) async fn keep_reporting(self, planner: String) {
        let endpoint = match Endpoint::from_shared(planner.clone()) {
            Ok(endpoint) => endpoint.connect_timeout(DEADLINE).timeout(DEADLINE).tcp_nodelay(true),
            Err(error) => {
                complain(&format!("{planner} is no address: {error}"));
                return;
            }
        };
        let mut client = PlannerClient::new(endpoint.connect_lazy());
        let Some(mut changes) = self.fleet.host_bell(&self.host) else { return };
        let mut call = None;
        loop {
            changes.mark_unchanged();
            call = self.tell(&mut client, call).await;
            tokio::time::sleep(GAP).await;
            tokio::select! {
                () = tokio::time::sleep(INTERVAL.saturating_sub(GAP)) => {}
                _ = changes.changed() => tokio::time::sleep(SETTLE).await,
            }
        }
    }

    /// Returns the call to go on with.
    async fn tell(
        &self,
        client: &mut PlannerClient<Channel>,
        kept: Option<Reporting<v1::HostReport>>,
    ) -> Option<Reporting<v1::HostReport>> {
        let call = match kept {
            Some(call) => call,
            None => Reporting::open(DEADLINE, |reports| client.report(reports)).await.ok()?,
        };
        // One that is not there now is told again in a moment.
        let (reply, call) = call.send(self.report()).await.ok()?;
        if reply.refused.is_empty() {
            self.fleet.with(|state| state.counts.reports += 1);
        } else {
            complain(&format!("{}: report refused: {}", self.host, reply.refused));
        }
        Some(call)
    }
}
