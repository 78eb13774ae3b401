//! How much memory one QEMU process takes, and how much of that is its own and not the guest's.
//!
//! The proportional set size of `/proc/PID/smaps_rollup` counts every page that is there, shared
//! ones by their share, so that the sum over all processes is what is really used. Huge pages are
//! not part of it and are added. What it takes beside the guest's memory is read from
//! `/proc/PID/smaps`, which names each mapping, and from the size of its page tables.

use std::fs;
use std::io;
use std::path::PathBuf;

use vmferry_agent_core::journal::Identity;
use vmferry_types::Bytes;

use crate::process::identity::{self, IdentityError};

/// What was found of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found<T> {
    /// It is there, and takes so much.
    There(T),
    /// It is not there any more, so it takes nothing.
    Gone,
}

/// How much a process takes could not be found out, which is not nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FootprintError {
    #[error("{path} cannot be read: {source}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} does not say {what}", path = path.display())]
    Missing { path: PathBuf, what: &'static str },
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Where a page counts that is of this size or that: ordinary and huge ones.
const PAGES: [&str; 3] = ["Pss", "Shared_Hugetlb", "Private_Hugetlb"];

/// Reads how much memory a process takes, huge pages included. Blocks, and holds up the process's
/// page faults meanwhile.
pub(crate) fn used(identity: &Identity) -> Result<Found<Bytes>, FootprintError> {
    look(identity, "smaps_rollup", |text| {
        let mut sum = None;
        for line in text.lines() {
            if let Some(bytes) = pages(line) {
                sum = Some(sum.unwrap_or(Bytes::ZERO).plus(bytes));
            }
        }
        sum.ok_or("Pss")
    })
}

/// Measures what QEMU takes beside the guest's memory: every mapping that is not as large as the
/// guest's memory, and its page tables. Blocks for longer than [`used`].
///
/// The guest's memory is one mapping of at least its size that is read and written: QEMU gives it
/// flags of its own, so the kernel does not join it with another.
pub(crate) fn overhead(identity: &Identity, guest: Bytes) -> Result<Found<Bytes>, FootprintError> {
    let mappings = look(identity, "smaps", |text| Ok(beside(text, guest)))?;
    let tables = look(identity, "status", |text| {
        let line = text.lines().find_map(|line| line.strip_prefix("VmPTE:"));
        line.and_then(kib).ok_or("VmPTE")
    })?;
    Ok(match (mappings, tables) {
        (Found::There(mappings), Found::There(tables)) => Found::There(mappings.plus(tables)),
        (Found::Gone, _) | (_, Found::Gone) => Found::Gone,
    })
}

/// Sums up the mappings that are not the guest's memory.
fn beside(smaps: &str, guest: Bytes) -> Bytes {
    let mut sum = Bytes::ZERO;
    let mut counts = false;
    for line in smaps.lines() {
        if let Some((size, access)) = mapping(line) {
            counts = size < guest || access != "rw";
        } else if counts && let Some(bytes) = pages(line) {
            sum = sum.plus(bytes);
        }
    }
    sum
}

/// Reads a mapping's first line, `55f2a000-55f2c000 rw-p …`: its size, and what may be done to it.
fn mapping(line: &str) -> Option<(Bytes, &str)> {
    let mut words = line.split_ascii_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let from = u64::from_str_radix(from, 16).ok()?;
    let to = u64::from_str_radix(to, 16).ok()?;
    let access = words.next()?.get(..3)?;
    Some((Bytes(to.checked_sub(from)?), access.trim_end_matches('-')))
}

/// Reads a line that says how many pages are there.
fn pages(line: &str) -> Option<Bytes> {
    let (key, value) = line.split_once(':')?;
    PAGES.contains(&key).then(|| kib(value)).flatten()
}

fn kib(value: &str) -> Option<Bytes> {
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(Bytes)
}

/// Reads a file of a process, and makes sure that it was this process's.
fn look<T>(
    identity: &Identity,
    file: &str,
    read: impl FnOnce(&str) -> Result<T, &'static str>,
) -> Result<Found<T>, FootprintError> {
    let path = PathBuf::from(format!("/proc/{}/{file}", identity.pid));
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if identity::vanished(&error) => return Ok(Found::Gone),
        Err(source) => return Err(FootprintError::Read { path, source }),
    };
    // Looked at after: whoever has the pid now and is it was it all the time.
    if !identity::runs(identity.pid, identity.start_time)? {
        return Ok(Found::Gone);
    }
    match read(&text) {
        Ok(found) => Ok(Found::There(found)),
        Err(what) => Err(FootprintError::Missing { path, what }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0004000000 rw-p 00000000 00:00 0
Size:              65536 kB
Pss:               18000 kB
Pss_Dirty:         18000 kB
Private_Hugetlb:       0 kB
7f0008000000-7f000c000000 rwxp 00000000 00:00 0
Pss:                 700 kB
7f0010000000-7f0014000000 rw-s 00000000 00:0f 7 /dev/hugepages/ram (deleted)
Pss:                   0 kB
Private_Hugetlb:   65536 kB
7f0020000000-7f0020100000 r--p 00000000 08:01 7 /usr/bin/qemu-system-x86_64
Pss:                 300 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
Pss:                   0 kB
";

    fn own() -> Identity {
        let own = crate::process::ProcessIdentity::read(std::process::id()).unwrap().unwrap();
        crate::wire::identity(&own)
    }

    #[test]
    fn the_guests_memory_is_no_overhead_and_translated_code_is() {
        assert_eq!(beside(SMAPS, Bytes(64 << 20)), Bytes(1000 << 10));
        // A guest of another size is not known from these mappings: all of it counts.
        assert_eq!(beside(SMAPS, Bytes(1 << 30)), Bytes((18_000 + 1000 + 65_536) << 10));
    }

    #[test]
    fn this_process_takes_some_and_another_that_had_its_pid_takes_nothing() {
        let Found::There(used) = used(&own()).unwrap() else { panic!("it is there") };
        assert!(used > Bytes(100_000));
        let Found::There(overhead) = overhead(&own(), Bytes(1 << 40)).unwrap() else {
            panic!("it is there")
        };
        assert!(overhead > Bytes(100_000));
        let other = Identity { start_time: 1, ..own() };
        assert_eq!(super::used(&other).unwrap(), Found::Gone);
        assert_eq!(super::overhead(&other, Bytes(1)).unwrap(), Found::Gone);
    }

    #[test]
    fn what_says_nothing_is_an_error_and_never_zero() {
        let nothing = look(&own(), "cmdline", |_| Err::<Bytes, _>("Pss"));
        assert!(nothing.unwrap_err().to_string().ends_with("/cmdline does not say Pss"));
        let no_such_file = used(&Identity { pid: u32::MAX, ..own() });
        assert_eq!(no_such_file.unwrap(), Found::Gone);
    }
}
