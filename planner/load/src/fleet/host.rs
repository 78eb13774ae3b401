//! A simulated host: its processes and its agent's journal.

use std::collections::BTreeMap;

use uuid::Uuid;
use vmferry_proto::v1;
use vmferry_types::{Claim, Generation, HostId, MigrationId, Step, VmId};

use super::{OVERHEAD, State, VM_MEMORY};
use crate::dice::Dice;
use crate::journal::{Part, Process, Record};
use crate::qemu::{Place, Qemu, Run, Transfer};

/// One host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) boot_id: String,
    pub(crate) agent_instance: String,
    pub(crate) memory: u64,
    pub(crate) records: BTreeMap<VmId, Record>,
    pub(crate) qemus: BTreeMap<u32, Qemu>,
    pub(crate) sights: BTreeMap<VmId, Sight>,
    /// The newest claim and step that was obeyed for each VM, kept beside the fence to check it.
    pub(crate) heard: BTreeMap<VmId, (Claim, Step)>,
    sequence: u64,
    next_pid: u32,
    next_port: u16,
}

/// What the agent has in memory of a VM, in microseconds of the hosts' clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sight {
    pub(crate) heard_us: u64,
    pub(crate) began_us: u64,
    pub(crate) progressed_us: u64,
    pub(crate) bytes: u64,
    pub(crate) still_since_us: Option<u64>,
}

impl Host {
    /// Makes a host with memory for so many VMs.
    pub(super) fn new(id: &HostId, room: u64, dice: &mut Dice) -> Self {
        Self {
            boot_id: format!("{id}-boot"),
            agent_instance: Uuid::from_u128(dice.id()).to_string(),
            // The planner keeps a tenth back.
            memory: (VM_MEMORY + OVERHEAD) * room * 10 / 9 + 1,
            records: BTreeMap::new(),
            qemus: BTreeMap::new(),
            sights: BTreeMap::new(),
            heard: BTreeMap::new(),
            sequence: 0,
            next_pid: 100,
            next_port: 0,
        }
    }

    /// Starts a VM as it was before all began.
    pub(super) fn run_from_the_start(&mut self, vm: VmId, now_us: u64, image: u64) -> u32 {
        let pid = self.fresh_pid();
        let mut qemu = Qemu::receiver(vm, pid, now_us / 10_000, 0);
        (qemu.run, qemu.transfer, qemu.port) = (Run::Running, Transfer::None, None);
        qemu.image = image;
        self.qemus.insert(pid, qemu);
        let mut record = Record::default();
        let begun = MigrationId::from_u128(1);
        record.fence.claim(begun, Generation::FIRST, Claim::FIRST);
        let process = Process { pid, generation: Generation::FIRST, admission: Some(begun) };
        record.part = Part::Running { process, outgoing: None, held: None };
        self.records.insert(vm, record);
        pid
    }

    pub(crate) const fn fresh_pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }

    pub(crate) const fn fresh_port(&mut self) -> u16 {
        self.next_port = (self.next_port + 1) % 16_000;
        49_152 + self.next_port
    }

    /// Numbers an observation or a report.
    pub(crate) const fn fresh_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    pub(crate) fn sight(&mut self, vm: VmId) -> &mut Sight {
        self.sights.entry(vm).or_default()
    }

    /// Proves that a process is not there.
    pub(crate) fn proof(&self, id: &HostId, process: Option<(u32, u64)>) -> v1::GoneProof {
        let (kind, ended) = match process {
            Some(_) => (v1::ProofKind::ExitRecord, "signal 9"),
            None => (v1::ProofKind::NeverStarted, "was never started"),
        };
        let (pid, start_time) = process.unwrap_or_default();
        v1::GoneProof {
            kind: kind.into(),
            host_id: id.to_string(),
            boot_id: self.boot_id.clone(),
            pid,
            start_time,
            ended: ended.to_owned(),
            at_ms: wall_ms(),
            stderr_tail: String::new(),
        }
    }
}

impl State {
    pub(crate) fn qemu(&self, place: &Place) -> Option<&Qemu> {
        self.hosts.get(&place.0)?.qemus.get(&place.1)
    }

    pub(crate) fn qemu_mut(&mut self, place: &Place) -> Option<&mut Qemu> {
        self.hosts.get_mut(&place.0)?.qemus.get_mut(&place.1)
    }

    pub(crate) fn record(&self, host: &HostId, vm: VmId) -> Record {
        self.hosts.get(host).and_then(|there| there.records.get(&vm)).cloned().unwrap_or_default()
    }

    /// Changes a record, on disk when this returns.
    pub(crate) fn write(&mut self, host: &HostId, vm: VmId, change: impl FnOnce(&mut Record)) {
        let Some(there) = self.hosts.get_mut(host) else { return };
        let record = there.records.entry(vm).or_default();
        let before = (record.fence.generation, record.fence.claim);
        change(record);
        let after = (record.fence.generation, record.fence.claim);
        if after.0 < before.0 || after.1 < before.1 {
            self.violated(vm, &format!("I2: the journal of {host} goes back"));
        }
        self.ring(host, vm);
    }

    /// I3: what runs on a host fits into it.
    pub(crate) fn check_memory(&mut self, host: &HostId, vm: VmId) {
        let Some(there) = self.hosts.get(host) else { return };
        let count = u64::try_from(there.qemus.len()).unwrap_or(u64::MAX);
        let (used, memory) = (count.saturating_mul(VM_MEMORY + OVERHEAD), there.memory);
        if used > memory {
            self.violated(
                vm,
                &format!("I3: {count} QEMU processes on {host} may use {used} of {memory} bytes"),
            );
        }
    }
}

/// Returns the time of day, in milliseconds since 1970.
pub(crate) fn wall_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
