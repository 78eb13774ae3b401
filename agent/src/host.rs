//! How much this host has, and how much its VMs use.

use std::fs;

use vmferry_agent_core::journal::Identity;
use vmferry_proto::v1;

/// Memory of the whole machine, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) available: u64,
}

/// Reads the machine's memory. Blocks.
pub(crate) fn memory() -> Memory {
    let refresh = sysinfo::MemoryRefreshKind::nothing().with_ram();
    let mut system = match sysinfo::System::new() {
        Ok(system) => system,
        Err(error) => {
            tracing::warn!(%error, "cannot read the machine's memory");
            return Memory::default();
        }
    };
    system.refresh_memory_specifics(refresh);
    Memory { total: system.total_memory(), available: system.available_memory() }
}

/// Returns how many CPUs this process may use.
pub(crate) fn cpus() -> u32 {
    std::thread::available_parallelism()
        .ok()
        .and_then(|count| u32::try_from(count.get()).ok())
        .unwrap_or(1)
}

/// Reads the proportional set size of a process, huge pages included; `None` if it is gone. Blocks.
pub(crate) fn used_bytes(identity: &Identity) -> Option<u64> {
    let pid = i32::try_from(identity.pid).ok()?;
    let process = procfs::process::Process::new(pid).ok()?;
    if process.stat().ok()?.starttime != identity.start_time {
        return None;
    }
    let rollup = process.smaps_rollup().ok()?;
    let of = |key: &str| {
        rollup
            .memory_map_rollup
            .iter()
            .filter_map(|map| map.extension.map.get(key).copied())
            .fold(0, u64::saturating_add)
    };
    Some(of("Pss").saturating_add(of("Private_Hugetlb")).saturating_add(of("Shared_Hugetlb")))
}

/// Reads "some avg10" of a pressure file, in hundredths of a percent; `None` without PSI.
pub(crate) fn pressure(resource: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/pressure/{resource}")).ok()?;
    let avg10 = text.lines().find(|line| line.starts_with("some"))?.split("avg10=").nth(1)?;
    let (whole, hundredths) = avg10.split_whitespace().next()?.split_once('.')?;
    let whole: u32 = whole.parse().ok()?;
    whole.checked_mul(100)?.checked_add(hundredths.parse().ok()?)
}

/// Reads the pools of huge pages. Blocks.
pub(crate) fn huge_pages() -> Vec<v1::HugePages> {
    let Ok(entries) = fs::read_dir("/sys/kernel/mm/hugepages") else { return Vec::new() };
    let mut pools: Vec<v1::HugePages> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let kib: u64 =
                name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let number = |file: &str| {
                fs::read_to_string(entry.path().join(file)).ok()?.trim().parse::<u64>().ok()
            };
            Some(v1::HugePages {
                page_bytes: kib.checked_mul(1024)?,
                total: number("nr_hugepages")?,
                free: number("free_hugepages")?,
            })
        })
        .filter(|pool| pool.total > 0)
        .collect();
    pools.sort_by_key(|pool| pool.page_bytes);
    pools
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_and_this_process_uses_some() {
        let memory = memory();
        assert!(memory.total >= memory.available && memory.available > 0);
        let own = crate::process::ProcessIdentity::read(std::process::id()).unwrap().unwrap();
        assert!(used_bytes(&crate::wire::identity(&own)).unwrap() > 100_000);
        let other = Identity { start_time: 1, ..crate::wire::identity(&own) };
        assert_eq!(used_bytes(&other), None);
    }
}
