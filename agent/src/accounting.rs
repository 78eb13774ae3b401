//! What a host has and what its VMs take of it, as it is reported.
//!
//! | figure | source |
//! |---|---|
//! | total, available memory | `MemTotal`, `MemAvailable` of `/proc/meminfo`; where `[capacity] memory` makes a share of the machine count as this host, that share, and what its own QEMU processes leave of it |
//! | huge pages | `nr_hugepages`, `free_hugepages`, `resv_hugepages` below `/sys/kernel/mm/hugepages`, for each size that has any |
//! | CPU | `[capacity] cpus`, else what affinity, cpuset and quota leave this process of the CPUs |
//! | pressure | "some avg10" of `/proc/pressure/{memory,cpu}`; absent without PSI |
//! | observed memory of a VM | `Pss` of `/proc/PID/smaps_rollup`, and the huge pages that stand there beside it |
//! | configured memory of a VM | `max_memory` of its definition (or `memory`), and QEMU's overhead |
//! | QEMU's overhead | the worse of what is expected of such a VM and what was measured: `Pss` and huge pages of all mappings in `/proc/PID/smaps` but the guest's memory, and `VmPTE` of `/proc/PID/status` |
//! | vCPUs of a VM | `vcpus` of its definition |
//!
//! Receivers and held guests count like running ones: they have a process. A figure that cannot be
//! read, or cannot be, makes the host unreadable, by name: nobody may take it for a zero. While a
//! VM is being moved its process is not looked at, and the last figure is said again.

use std::time::Duration;

use tokio::time::Instant;
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::journal::Identity;
use vmferry_proto::v1;
use vmferry_types::overhead::{Execution, expected};
use vmferry_types::{Bytes, Role};

use crate::config::Config;
use crate::footprint::{self, Found};
use crate::host::{self, FigureError};
use crate::live::Shared;

/// How old a measured overhead may be: it moves slowly, and measuring reads every mapping.
const MEASURED_MAX_AGE: Duration = Duration::from_secs(60);

/// What was last found of a VM's process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Footprint {
    /// Whose figures these are; those of another incarnation say nothing.
    of: Option<Identity>,
    pub(crate) used: Bytes,
    overhead: Option<(Bytes, Instant)>,
}

impl Footprint {
    /// Returns what was measured of QEMU's own part.
    pub(crate) fn overhead(&self) -> Option<Bytes> {
        self.overhead.map(|(bytes, _)| bytes)
    }
}

/// A process whose memory is to be looked at.
pub(crate) enum Target {
    /// There is none.
    Nobody,
    /// It is being moved: looking at its memory would hold up its page faults.
    Busy(Footprint),
    /// It is there.
    Process {
        identity: Identity,
        /// The guest's memory, if the definition says it.
        guest: Option<Bytes>,
        /// What was found the last time.
        last: Footprint,
    },
}

/// What was found of a process.
#[derive(Debug)]
pub(crate) struct Looked {
    pub(crate) footprint: Footprint,
    /// Why that is not what it takes now.
    pub(crate) trouble: Option<String>,
}

impl Target {
    pub(crate) fn of(shared: &Shared) -> Self {
        let sight = shared.sight.borrow();
        let Some(identity) = sight.identity.as_ref().filter(|_| sight.gone.is_none()) else {
            return Self::Nobody;
        };
        let mut last = shared.footprint();
        if last.of.as_ref() != Some(identity) {
            last = Footprint { of: Some(identity.clone()), ..Footprint::default() };
        }
        if sight.busy() {
            return Self::Busy(last);
        }
        let record = shared.record.borrow();
        let definition = record.defined().and_then(|defined| Definition::parse(&defined.text).ok());
        let guest = definition.map(|definition| definition.memory);
        Self::Process { identity: identity.clone(), guest, last }
    }

    /// Looks at the process. Blocks.
    pub(crate) fn look(self) -> Looked {
        let (identity, guest, last) = match self {
            Self::Nobody => return Looked { footprint: Footprint::default(), trouble: None },
            Self::Busy(last) => return Looked { footprint: last, trouble: None },
            Self::Process { identity, guest, last } => (identity, guest, last),
        };
        match footprint::used(&identity) {
            Ok(Found::There(used)) => {
                let overhead = measured(&identity, guest, &last);
                let footprint = Footprint { of: Some(identity), used, overhead };
                Looked { footprint, trouble: None }
            }
            Ok(Found::Gone) => Looked { footprint: Footprint::default(), trouble: None },
            Err(error) => {
                let trouble = format!("its memory: {}", crate::error::chain(&error));
                Looked { footprint: last, trouble: Some(trouble) }
            }
        }
    }

    /// What is said of a process that could not be looked at.
    pub(crate) fn unlooked(self) -> Looked {
        match self {
            Self::Nobody => Looked { footprint: Footprint::default(), trouble: None },
            Self::Busy(last) | Self::Process { last, .. } => {
                Looked { footprint: last, trouble: None }
            }
        }
    }
}

/// Measures QEMU's own part again if that is due; keeps the last word where it cannot be measured.
fn measured(
    identity: &Identity,
    guest: Option<Bytes>,
    last: &Footprint,
) -> Option<(Bytes, Instant)> {
    let due = last.overhead.is_none_or(|(_, at)| at.elapsed() >= MEASURED_MAX_AGE);
    let Some(guest) = guest.filter(|_| due) else { return last.overhead };
    match footprint::overhead(identity, guest) {
        Ok(Found::There(bytes)) => Some((bytes, Instant::now())),
        Ok(Found::Gone) => last.overhead,
        Err(error) => {
            tracing::warn!(error = crate::error::chain(&error), "QEMU's overhead is not measured");
            last.overhead
        }
    }
}

/// What one VM may take, and may be seen to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) configured: Bytes,
    pub(crate) overhead: Bytes,
    pub(crate) measured: Bytes,
    pub(crate) cpu_milli: u64,
}

impl Share {
    /// Returns the share of a VM that has a process.
    pub(crate) fn of(vm: &Definition, measured: Option<Bytes>) -> Self {
        let execution = Execution::of_accelerator(vm.accelerator.label());
        let measured = measured.unwrap_or(Bytes::ZERO);
        let overhead = expected(vm.memory_max, execution).max(measured);
        Self {
            configured: vm.memory_max.plus(overhead),
            overhead,
            measured,
            cpu_milli: u64::from(vm.vcpus).saturating_mul(1000),
        }
    }
}

/// Says whether a VM in this role has a process.
pub(crate) const fn has_process(role: Role) -> bool {
    match role {
        Role::Running | Role::Held | Role::Receiver => true,
        Role::Absent | Role::Stopped => false,
    }
}

/// What the machine says of itself.
#[derive(Debug)]
pub(crate) struct Machine {
    memory: Result<host::Memory, FigureError>,
    huge_pages: Result<Vec<v1::HugePages>, FigureError>,
}

impl Machine {
    /// Looks at the machine. Blocks.
    pub(crate) fn look() -> Self {
        Self { memory: host::memory(), huge_pages: host::huge_pages() }
    }
}

/// Returns the figures of this host; `used` is what its own VMs take together, `troubles` what is
/// already known not to be readable.
pub(crate) fn capacity(
    config: &Config,
    machine: Option<Machine>,
    used: Bytes,
    mut troubles: Vec<String>,
) -> v1::Capacity {
    let (mut memory, mut hugepages) = (None, Vec::new());
    match machine {
        None => troubles.push("this machine's figures were not read".to_owned()),
        Some(machine) => {
            match machine.memory {
                Ok(read) => memory = Some(read),
                Err(error) => troubles.push(crate::error::chain(&error)),
            }
            match machine.huge_pages {
                Ok(pools) => hugepages = pools,
                Err(error) => troubles.push(crate::error::chain(&error)),
            }
        }
    }
    if let Some(trouble) = impossible(config, memory, used) {
        troubles.push(trouble);
    }
    let (total, available) = match config.memory {
        // A share of the machine: what its own VMs leave of it.
        Some(share) => (share.value(), share.less(used).value()),
        None => memory.map_or((0, 0), |memory| (memory.total, memory.available)),
    };
    let cpus = config.cpus.map_or_else(host::cpus, Ok).unwrap_or_else(|error| {
        troubles.push(crate::error::chain(&error));
        0
    });
    v1::Capacity {
        total_memory_bytes: total,
        available_memory_bytes: available,
        cpu_total_milli: u64::from(cpus).saturating_mul(1000),
        hugepages,
        memory_pressure: host::pressure("memory"),
        cpu_pressure: host::pressure("cpu"),
        unreadable: troubles,
    }
}

/// Says what cannot be true of these figures.
fn impossible(config: &Config, memory: Option<host::Memory>, used: Bytes) -> Option<String> {
    let total = Bytes(memory?.total);
    match config.memory {
        Some(share) if share > total => {
            Some(format!("capacity.memory is {share}, the machine has {total}"))
        }
        Some(_) | None if used > total => {
            Some(format!("its VMs take {used} together, the machine has {total}"))
        }
        Some(_) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn config(capacity: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        let text = format!(
            "host_id = 'a'\n[listen]\ngrpc = '127.0.0.1:1'\nmetrics = '127.0.0.1:2'\n\
             [migration]\naddress = '127.0.0.1'\n[security]\nplain_text = 'loopback'\n\
             [capacity]\n{capacity}"
        );
        std::fs::write(&path, text).unwrap();
        Config::load(&path).unwrap()
    }

    fn machine(total: u64, available: u64) -> Option<Machine> {
        let memory = Ok(host::Memory { total: total * MIB, available: available * MIB });
        Some(Machine { memory, huge_pages: Ok(Vec::new()) })
    }

    fn figures(capacity: &v1::Capacity) -> (u64, u64, u64) {
        let (total, available) = (capacity.total_memory_bytes, capacity.available_memory_bytes);
        (total / MIB, available / MIB, capacity.cpu_total_milli)
    }

    #[test]
    fn a_whole_machine_says_what_its_kernel_says() {
        let found = capacity(&config("cpus = 4"), machine(4096, 1000), Bytes(MIB), Vec::new());
        assert_eq!(figures(&found), (4096, 1000, 4000));
        assert!(found.unreadable.is_empty());
    }

    #[test]
    fn a_share_of_the_machine_has_what_its_own_vms_leave_of_it() {
        let share = config("memory = '1GiB'");
        let found = capacity(&share, machine(4096, 100), Bytes(300 * MIB), Vec::new());
        assert_eq!((figures(&found).0, figures(&found).1), (1024, 724));
        assert!(found.unreadable.is_empty());
        let over = capacity(&share, machine(4096, 100), Bytes(1300 * MIB), Vec::new());
        assert_eq!((figures(&over).0, figures(&over).1), (1024, 0));
    }

    #[test]
    fn what_cannot_be_read_or_cannot_be_is_named() {
        let missing = || FigureError::Missing { path: "/proc/meminfo".into(), field: "MemTotal" };
        let broken = Machine { memory: Err(missing()), huge_pages: Err(missing()) };
        for (capacity_toml, machine, used, words) in [
            ("", Some(broken), 0, vec!["MemTotal", "MemTotal"]),
            ("", None, 0, vec!["were not read"]),
            ("memory = '8GiB'", machine(4096, 1000), 0, vec!["capacity.memory is 8 GiB"]),
            ("", machine(4096, 1000), 5000, vec!["take 4.8 GiB together"]),
        ] {
            let found =
                capacity(&config(capacity_toml), machine, Bytes(used * MIB), Vec::new()).unreadable;
            assert_eq!(found.len(), words.len(), "{found:?}");
            assert!(found.iter().zip(words).all(|(text, word)| text.contains(word)), "{found:?}");
        }
        let named = capacity(&config(""), machine(2, 1), Bytes::ZERO, vec!["vm web".to_owned()]);
        assert_eq!(named.unreadable, ["vm web"]);
    }

    #[test]
    fn a_vm_may_take_its_ceiling_and_the_worse_overhead() {
        let text = format!(
            "name = 'vm'\nuuid = '{}'\nmachine = 'q35'\nvcpus = 2\nmemory = '512MiB'\nmax_memory = '1GiB'\n",
            uuid::Uuid::from_u128(1)
        );
        let vm = Definition::parse(&text).unwrap();
        let expected = Share::of(&vm, Some(Bytes(20 * MIB)));
        assert_eq!((expected.configured, expected.overhead), (Bytes(1092 * MIB), Bytes(68 * MIB)));
        assert_eq!((expected.measured, expected.cpu_milli), (Bytes(20 * MIB), 2000));
        assert_eq!(Share::of(&vm, Some(Bytes(100 * MIB))).configured, Bytes(1124 * MIB));
        assert_eq!(Share::of(&vm, None).configured, Bytes(1092 * MIB));
    }
}
