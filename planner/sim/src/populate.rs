//! What a world begins with.

use vmferry_planner::definition::Outline;
use vmferry_planner::store::VmRow;
use vmferry_planner_core::evidence::RunState;
use vmferry_types::{Bytes, Claim, Generation, HostId, MigrationId, MilliCpu, PowerState, VmId};

use crate::host::{Why, short};
use crate::journal::{Part, Process, Record};
use crate::world::{Guest, State};

/// What a VM is at the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begins {
    /// It runs.
    Running,
    /// It was stopped, and is defined.
    Stopped,
    /// Nobody has heard of it.
    Undefined,
}

/// The id of the so manieth VM, counted from zero.
pub(crate) fn vm_id(number: u32) -> VmId {
    VmId::from_u128(u128::from(number) + 1)
}

/// The definition of a VM: it takes a little less than a GiB with all that QEMU needs beside.
pub(crate) fn definition(number: u32) -> String {
    let vm = vm_id(number);
    format!("name = \"{}\"\nuuid = \"{vm}\"\nmemory = \"900MiB\"\n", short(vm))
}

/// What a VM needs.
fn memory(number: u32) -> Bytes {
    Outline::read(&definition(number)).map_or(Bytes(1 << 30), |outline| outline.memory)
}

impl State {
    /// Makes a VM, known to all who may know of it.
    pub(crate) fn place_vm(&mut self, number: u32, host: &HostId, begins: Begins) {
        let vm = vm_id(number);
        let guest = Guest {
            head: 0,
            runs: None,
            lost: None,
            copy_lost_ms: None,
            blindly: false,
            went_on: Why::Began,
            released_early: None,
            off: begins != Begins::Running,
            memory: memory(number),
        };
        self.guests.insert(vm, guest);
        let power = match begins {
            Begins::Undefined => return,
            Begins::Running => PowerState::Running,
            Begins::Stopped => PowerState::Stopped,
        };
        let admission = MigrationId::from_u128(u128::from(number) + 1);
        let part = match begins {
            Begins::Running => self.run_from_the_beginning(vm, host, admission),
            Begins::Stopped | Begins::Undefined => Part::Stopped,
        };
        let Some(there) = self.hosts.get_mut(host) else { return };
        let mut record = Record { part, ..Record::default() };
        record.fence.generation = Generation::FIRST;
        record.fence.claim = Claim::FIRST;
        record.fence.migration = Some(admission);
        there.journal.records.insert(vm, record);
        let row = VmRow {
            id: vm,
            name: short(vm),
            host: Some(host.clone()),
            power,
            generation: Generation::FIRST,
            claim: Claim::FIRST,
            admission: None,
            error: String::new(),
            definition: definition(number),
            resolved_machine: String::new(),
            memory: memory(number),
            cpu: MilliCpu(1_000),
        };
        self.tables.vms.insert(vm, row);
    }

    fn run_from_the_beginning(&mut self, vm: VmId, host: &HostId, admission: MigrationId) -> Part {
        let launch = self.fresh();
        if let Some(pid) = self.start_process(host, vm, launch, RunState::Prelaunch) {
            self.run_vcpus(host, pid, Why::Began);
        }
        let there = self.host(host);
        let identity =
            there.and_then(|there| there.by_launch(launch)).map(|qemu| (qemu.pid, qemu.start_time));
        let process = Process {
            launch,
            boot_id: there.map(|there| there.boot_id(host)).unwrap_or_default(),
            identity,
            generation: Generation::FIRST,
            admission,
        };
        Part::Running { process, outgoing: None, held: None }
    }
}
