//! How much this machine has.
//!
//! A figure that cannot be read, or cannot be, is an error that names its source: nobody may take
//! it for a zero.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use vmferry_proto::v1;

/// Where the kernel says how much memory there is.
const MEMINFO: &str = "/proc/meminfo";
/// Where the kernel says which pools of huge pages there are.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Memory of the whole machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// `MemTotal`: what the kernel manages. Pools of huge pages are part of it.
    pub(crate) total: u64,
    /// `MemAvailable`: what can be had without swapping, by the kernel's own estimate. Pools of
    /// huge pages are not part of it, taken or not.
    pub(crate) available: u64,
}

/// A figure of this machine that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FigureError {
    #[error("{path} cannot be read: {source}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} has no usable {field}", path = path.display())]
    Missing { path: PathBuf, field: &'static str },
    #[error("{MEMINFO} has {available} bytes available of {total}")]
    Impossible { available: u64, total: u64 },
}

/// Reads a file of the kernel.
fn read(path: &Path) -> Result<String, FigureError> {
    fs::read_to_string(path).map_err(|source| FigureError::Read { path: path.to_owned(), source })
}

/// Reads the machine's memory. Blocks.
pub(crate) fn memory() -> Result<Memory, FigureError> {
    parse_memory(&read(Path::new(MEMINFO))?)
}

fn parse_memory(text: &str) -> Result<Memory, FigureError> {
    let of = |field: &'static str| {
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let missing = || FigureError::Missing { path: MEMINFO.into(), field };
        kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(missing)
    };
    let (total, available) = (of("MemTotal")?, of("MemAvailable")?);
    if total == 0 || available > total {
        return Err(FigureError::Impossible { available, total });
    }
    Ok(Memory { total, available })
}

/// Returns how many CPUs this process may use: what its affinity, its cpuset and its quota leave of
/// those that are online.
pub(crate) fn cpus() -> Result<u32, FigureError> {
    let count = std::thread::available_parallelism()
        .map_err(|source| FigureError::Read { path: "the CPUs of this process".into(), source })?;
    Ok(u32::try_from(count.get()).unwrap_or(u32::MAX))
}

/// Reads "some avg10" of a pressure file, in hundredths of a percent; `None` without PSI.
pub(crate) fn pressure(resource: &str) -> Option<u32> {
    parse_pressure(&fs::read_to_string(format!("/proc/pressure/{resource}")).ok()?)
}

fn parse_pressure(text: &str) -> Option<u32> {
    let avg10 = text.lines().find(|line| line.starts_with("some"))?.split("avg10=").nth(1)?;
    let (whole, hundredths) = avg10.split_whitespace().next()?.split_once('.')?;
    let whole: u32 = whole.parse().ok()?;
    whole.checked_mul(100)?.checked_add(hundredths.parse().ok()?)
}

/// Reads the pools of huge pages that hold any, smallest pages first. Blocks.
pub(crate) fn huge_pages() -> Result<Vec<v1::HugePages>, FigureError> {
    pools(Path::new(HUGE_PAGES))
}

fn pools(folder: &Path) -> Result<Vec<v1::HugePages>, FigureError> {
    let cannot = |source| FigureError::Read { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        // A kernel without huge pages has no such folder.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(cannot(error)),
    };
    let mut pools = Vec::new();
    for entry in entries {
        let entry = entry.map_err(cannot)?;
        let name = entry.file_name();
        let kib = name.to_str().and_then(|name| {
            name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()
        });
        let Some(page_bytes) = kib.and_then(|kib| kib.checked_mul(1024)) else { continue };
        let number = |field: &'static str| {
            let path = entry.path().join(field);
            let number = read(&path)?.trim().parse::<u64>();
            number.map_err(|_| FigureError::Missing { path, field: "number" })
        };
        let (total, free) = (number("nr_hugepages")?, number("free_hugepages")?);
        let reserved = number("resv_hugepages")?;
        if total > 0 {
            pools.push(v1::HugePages { page_bytes, total, free, reserved });
        }
    }
    pools.sort_by_key(|pool| pool.page_bytes);
    Ok(pools)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_and_cpus() {
        let memory = memory().unwrap();
        assert!(memory.total >= memory.available && memory.available > 0);
        assert!(cpus().unwrap() > 0);
        huge_pages().unwrap();
    }

    #[test]
    fn a_figure_that_is_missing_or_cannot_be_is_an_error_and_never_zero() {
        let read = |text: &str| parse_memory(text).map_err(|error| error.to_string());
        let good = read("MemTotal:       100 kB\nMemFree: 1 kB\nMemAvailable:    40 kB\n");
        assert_eq!(good, Ok(Memory { total: 102_400, available: 40_960 }));
        for (text, word) in [
            ("", "MemTotal"),
            ("MemTotal: 100 kB\n", "MemAvailable"),
            ("MemTotal: much\nMemAvailable: 1 kB\n", "MemTotal"),
            ("MemTotal: 0 kB\nMemAvailable: 0 kB\n", "0 bytes available of 0"),
            ("MemTotal: 1 kB\nMemAvailable: 2 kB\n", "2048 bytes available of 1024"),
            ("MemTotal: 18446744073709551615 kB\nMemAvailable: 2 kB\n", "MemTotal"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(word), "{text:?}: {error}");
        }
    }

    #[test]
    fn pressure_is_read_in_hundredths_of_a_percent() {
        let text = "some avg10=12.34 avg60=0.18 avg300=0.61 total=86606129\nfull avg10=0.00\n";
        assert_eq!(parse_pressure(text), Some(1234));
        assert_eq!(parse_pressure("full avg10=0.00\n"), None);
    }

    #[test]
    fn pools_of_huge_pages_are_read_by_size_and_a_broken_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let write = |pool: &str, file: &str, text: &str| {
            let pool = folder.path().join(pool);
            fs::create_dir_all(&pool).unwrap();
            fs::write(pool.join(file), text).unwrap();
        };
        for (pool, total) in
            [("hugepages-1048576kB", "1\n"), ("hugepages-2048kB", "8\n"), ("hugepages-64kB", "0\n")]
        {
            write(pool, "nr_hugepages", total);
            write(pool, "free_hugepages", "1\n");
            write(pool, "resv_hugepages", "1\n");
        }
        let read: Vec<_> = pools(folder.path())
            .unwrap()
            .iter()
            .map(|pool| (pool.page_bytes, pool.total, pool.free, pool.reserved))
            .collect();
        assert_eq!(read, [(2 << 20, 8, 1, 1), (1 << 30, 1, 1, 1)]);
        write("hugepages-2048kB", "free_hugepages", "some\n");
        assert!(pools(folder.path()).unwrap_err().to_string().contains("free_hugepages"));
        assert!(pools(&folder.path().join("none")).unwrap().is_empty());
    }
}
