//! What the fleet has left.

use std::collections::BTreeMap;

use vmferry_planner_core::fleet::{Demand, Fleet};
use vmferry_planner_core::headroom::{self, HostRoom, Totals};
use vmferry_planner_core::maintenance::{Crossing, Left, Live, Plan, PlanState, Workload};
use vmferry_proto::v1;
use vmferry_types::overhead::{Execution, expected};
use vmferry_types::{Bytes, HostId, MilliCpu, PowerState, VmId};

use super::ApiError;
use crate::admission::{demand_on, needs_of_definition};
use crate::clock;
use crate::definition::Outline;
use crate::inventory::snapshot;
use crate::planner::Planner;
use crate::store::VmRow;
use crate::view;

impl Planner {
    /// Says what each host and the fleet has and has left; if asked, where the VMs of a host would
    /// go if it were lost, and how many more VMs of a size fit.
    ///
    /// # Errors
    ///
    /// Fails if the store does, or if what is asked for cannot be.
    pub async fn capacity(
        &self,
        asked: &v1::CapacityRequest,
    ) -> Result<v1::CapacityReply, ApiError> {
        let parts = &self.parts;
        let size = size(asked)?;
        let lost = match asked.without.as_str() {
            "" => None,
            name => Some(self.resolve_host("without", name)?),
        };
        let fleet =
            snapshot(&parts.inventory, self.store(), &parts.config.policy, clock::now()).await?;
        let (rooms, totals) = headroom::rooms(&fleet);
        let mut reply = v1::CapacityReply {
            hosts: rooms.iter().map(|room| self.host_capacity(&fleet, room)).collect(),
            fleet: Some(fleet_capacity(&totals)),
            warnings: warnings(&rooms),
            ..v1::CapacityReply::default()
        };
        let mut left = headroom::left(&rooms);
        if let Some(lost) = lost {
            let rows = self.store().vms().await?;
            let plan = self.without(&fleet, &lost, &rows);
            reply.without = Some(loss(&lost, &plan, &rows, self));
            left = plan.left;
        }
        reply.fit = size.map(|size| fit(&left, size));
        Ok(reply)
    }

    /// Plans the VMs that a host runs as if it were gone.
    fn without(&self, fleet: &Fleet, lost: &HostId, rows: &[VmRow]) -> Plan {
        let workloads: Vec<Workload> = rows
            .iter()
            .filter(|row| row.host.as_ref() == Some(lost) && runs(row.power))
            .map(|row| self.workload(row))
            .collect();
        headroom::without(fleet, lost, Crossing::Refused, &workloads)
    }

    fn workload(&self, row: &VmRow) -> Workload {
        let outline = Outline::read(&row.definition).ok();
        let mut needs = outline.as_ref().map(needs_of_definition).unwrap_or_default();
        if !row.resolved_machine.is_empty() {
            needs.machine_type = Some(row.resolved_machine.clone());
        }
        let demand = demand_on(self, row);
        Workload { vm: row.id, host: row.host.clone(), demand, live: Live::Able, needs }
    }

    fn host_capacity(&self, fleet: &Fleet, room: &HostRoom<'_>) -> v1::HostCapacity {
        let host = room.host;
        let heard = self.parts.inventory.heard(&host.id);
        let mut message = v1::HostCapacity {
            id: host.id.to_string(),
            name: self.parts.inventory.display_name(&host.id),
            cluster: host.policy.cluster.clone(),
            blockers: room
                .closed
                .iter()
                .map(|reason| view::blocker(&reason.blocker(&host.id)))
                .collect(),
            ..v1::HostCapacity::default()
        };
        match &room.figures {
            Ok(figures) => {
                message.memory = Some(memory(figures));
                message.cpu = Some(cpu(figures));
                headroom::binds(figures).label().clone_into(&mut message.binds);
            }
            Err(why) => message.unreadable = why.to_string(),
        }
        if let Some(heard) = heard {
            message.report_age_ms = fleet.now.since(heard.at).value();
            let with_process = |vm: &&v1::VmReport| vm.configured_memory_bytes > 0;
            let vms = heard.report.vms.iter().filter(with_process).count();
            message.vms = u32::try_from(vms).unwrap_or(u32::MAX);
            if let Some(capacity) = &heard.report.capacity {
                message.hugepages.clone_from(&capacity.hugepages);
                message.memory_pressure = capacity.memory_pressure;
                message.cpu_pressure = capacity.cpu_pressure;
            }
        }
        message
    }
}

/// Reads the size that is asked about.
fn size(asked: &v1::CapacityRequest) -> Result<Option<Demand>, ApiError> {
    match (asked.fit_memory_bytes, asked.fit_cpu_milli) {
        (0, 0) => Ok(None),
        (0, _) => Err(ApiError::Invalid {
            field: "fit_memory_bytes",
            problem: "is 0: a VM takes memory".to_owned(),
        }),
        (memory, cpu) => Ok(Some(Demand { memory: Bytes(memory), cpu: MilliCpu(cpu) })),
    }
}

/// Says whether a VM in this state would have to be started elsewhere.
const fn runs(power: PowerState) -> bool {
    match power {
        PowerState::Starting | PowerState::Running | PowerState::Stopping => true,
        PowerState::Stopped | PowerState::Lost => false,
    }
}

/// Says what of the figures deserves a look.
fn warnings(rooms: &[HostRoom<'_>]) -> Vec<String> {
    let mut warnings = Vec::new();
    for room in rooms {
        let host = &room.host.id;
        match &room.figures {
            Ok(figures) if figures.observed_memory > figures.committed_memory => {
                warnings.push(format!(
                    "host {host}: {} are in use, {} are promised to VMs: something beside them uses \
                     memory, and a new reservation does not show until it is used; raise \
                     reserve_memory_percent or find out what it is",
                    figures.observed_memory, figures.committed_memory
                ));
            }
            Ok(_) => {}
            Err(why) => warnings.push(format!("host {host} counts for nothing: {why}")),
        }
    }
    warnings
}

const fn memory(figures: &vmferry_planner_core::capacity::Figures) -> v1::MemoryCapacity {
    v1::MemoryCapacity {
        total_bytes: figures.total_memory.value(),
        reserve_bytes: figures.reserve_memory.value(),
        observed_bytes: figures.observed_memory.value(),
        committed_bytes: figures.committed_memory.value(),
        reserved_bytes: figures.reserved_memory.value(),
        free_bytes: figures.free_memory.value(),
        available_bytes: figures.available_memory.value(),
    }
}

const fn cpu(figures: &vmferry_planner_core::capacity::Figures) -> v1::CpuCapacity {
    v1::CpuCapacity {
        total_milli: figures.total_cpu.value(),
        usable_milli: figures.usable_cpu.value(),
        committed_milli: figures.committed_cpu.value(),
        free_milli: figures.free_cpu.value(),
    }
}

fn fleet_capacity(totals: &Totals) -> v1::FleetCapacity {
    let figures = totals.figures.as_ref();
    v1::FleetCapacity {
        open_hosts: totals.open,
        closed_hosts: totals.closed,
        memory: figures.map(memory),
        cpu: figures.map(cpu),
        binds: figures.map(|of| headroom::binds(of).label()).unwrap_or_default().to_owned(),
    }
}

fn loss(lost: &HostId, plan: &Plan, rows: &[VmRow], planner: &Planner) -> v1::HostLoss {
    let rows: BTreeMap<VmId, &VmRow> = rows.iter().map(|row| (row.id, row)).collect();
    let shown = |vm: VmId| {
        let row = rows.get(&vm);
        let demand = row.map(|row| demand_on(planner, row)).unwrap_or_default();
        let name = row.map(|row| row.name.clone()).unwrap_or_default();
        (vm.to_string(), name, demand.memory.value(), demand.cpu.value())
    };
    let placed = plan.assignments.iter().map(|one| {
        let (vm_id, vm_name, memory_bytes, cpu_milli) = shown(one.vm);
        v1::LossPlacement {
            vm_id,
            vm_name,
            memory_bytes,
            cpu_milli,
            host: one.destination.to_string(),
            left_memory_bytes: one.left.memory.value(),
            left_cpu_milli: one.left.cpu.value(),
        }
    });
    let blocked = plan.blocked.iter().map(|one| {
        let (vm_id, vm_name, memory_bytes, cpu_milli) = shown(one.vm);
        let blockers = one.rejected.iter().flat_map(|rejected| rejected.blockers());
        v1::LossBlocked {
            vm_id,
            vm_name,
            memory_bytes,
            cpu_milli,
            code: one.code.label().to_owned(),
            message: one.code.to_string(),
            blockers: blockers.map(|reason| view::blocker(&reason)).collect(),
        }
    });
    v1::HostLoss {
        host: lost.to_string(),
        can_be_lost: plan.state() == PlanState::Planned,
        placed: placed.collect(),
        blocked: blocked.collect(),
        left: plan
            .left
            .iter()
            .map(|(host, left)| v1::HostLeft {
                host: host.to_string(),
                memory_bytes: left.memory.value(),
                cpu_milli: left.cpu.value(),
            })
            .collect(),
    }
}

/// Counts VMs of a size; what QEMU takes beside a guest under KVM is added.
fn fit(left: &BTreeMap<HostId, Left>, size: Demand) -> v1::CapacityFit {
    let overhead = expected(size.memory, Execution::Native);
    let whole = Demand { memory: size.memory.plus(overhead), cpu: size.cpu };
    let fits = headroom::fit(left, whole);
    v1::CapacityFit {
        count: fits.count,
        memory_bytes: whole.memory.value(),
        overhead_bytes: overhead.value(),
        cpu_milli: whole.cpu.value(),
        hosts: fits
            .hosts
            .iter()
            .map(|(host, count)| v1::HostFit { host: host.to_string(), count: *count })
            .collect(),
    }
}
