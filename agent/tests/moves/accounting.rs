//! What a host says its VMs take, held against real QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

use vmferry_proto::v1;

use crate::rom;
use crate::world::{Side, World, kill};

const MIB: u64 = 1 << 20;
/// The guest's memory.
const GUEST: u64 = 64 * MIB;
/// What is expected of QEMU beside a guest of 64 MiB under TCG: 128 MiB, and 1/256 of the guest.
const EXPECTED: u64 = 128 * MIB + GUEST / 256;
/// The balloon, where the guest looks for it.
const BALLOON: [&str; 2] = ["-device", "virtio-balloon-pci,addr=0x1e"];

fn only(report: &v1::HostReport) -> &v1::VmReport {
    assert_eq!(report.vms.len(), 1, "{report:#?}");
    &report.vms[0]
}

/// Returns how much of the guest's own memory is there, as the kernel tells it of the one mapping of
/// that size.
fn guests_part(pid: u32) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let kib = |line: &str| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
    let mut of_the_guest = false;
    let mut part = 0;
    for line in smaps.lines() {
        if line.starts_with("Size:") {
            of_the_guest = kib(line) * 1024 == GUEST;
        } else if of_the_guest && (line.starts_with("Pss:") || line.contains("_Hugetlb:")) {
            part += kib(line) * 1024;
        }
    }
    part
}

/// Says whether a report counts the guest's part, and QEMU's own: what QEMUs share is counted in
/// parts that change when others begin and end, so that part is bounded only.
fn counts(report: &v1::HostReport, part: u64) -> bool {
    let own = only(report).observed_memory_bytes.saturating_sub(part);
    (4 * MIB..64 * MIB).contains(&own)
}

/// Makes sure that the figures that do not depend on the guest are right.
fn check_what_may_be_taken(report: &v1::HostReport) {
    let vm = only(report);
    assert!(vm.overhead_measured_bytes > 5 * MIB, "{vm:#?}");
    assert_eq!(vm.overhead_memory_bytes, vm.overhead_measured_bytes.max(EXPECTED));
    assert_eq!(vm.configured_memory_bytes, GUEST + vm.overhead_memory_bytes);
    assert_eq!(vm.cpu_milli, 1000);
    let host = report.capacity.as_ref().unwrap();
    assert!(host.unreadable.is_empty(), "{:?}", host.unreadable);
    assert!(host.total_memory_bytes > host.available_memory_bytes);
    assert!(host.total_memory_bytes - host.available_memory_bytes > vm.observed_memory_bytes);
    assert!(host.cpu_total_milli >= 1000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_touched_little_is_promised_all_of_its_memory() {
    let mut world = World::new().await;
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let report = world.a.report().await;
    check_what_may_be_taken(&report);
    let vm = only(&report);
    let part = guests_part(pid);
    assert!(part < GUEST / 2 && counts(&report, part), "{part} of {vm:#?}");
    assert!(vm.configured_memory_bytes > vm.observed_memory_bytes);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_touched_all_of_its_memory_is_seen_to_use_it() {
    let mut world = World::new().await.with_rom(&rom::touching(), &[]);
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let touched = |report: &v1::HostReport| {
        let part = guests_part(pid);
        part > GUEST - MIB && counts(report, part)
    };
    let report = world.report_when(Side::A, "all of the memory", touched).await;
    check_what_may_be_taken(&report);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ballooned_guest_is_seen_to_use_less_and_keeps_its_promise() {
    let mut world = World::new().await.with_rom(&rom::touching(), &BALLOON);
    world.start().await;
    // It may be seen while it still touches its first half: less than that half is not it.
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let ballooned = |report: &v1::HostReport| {
        let part = guests_part(pid);
        (GUEST / 2 - 2 * MIB..GUEST / 2 + 4 * MIB).contains(&part) && counts(report, part)
    };
    let report = world.report_when(Side::A, "half of the memory", ballooned).await;
    check_what_may_be_taken(&report);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_counts_before_anything_was_sent_to_it() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    world.arm().await;
    let report = world.b.report().await;
    let vm = only(&report);
    assert_eq!(vm.role, "receiver");
    assert_eq!(vm.configured_memory_bytes, GUEST + vm.overhead_memory_bytes);
    assert!(vm.overhead_memory_bytes >= EXPECTED && vm.cpu_milli == 1000);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ceiling_of_memory_counts_from_the_start() {
    let mut world = World::new().await;
    world.definition += "max_memory = '256MiB'\n";
    world.start().await;
    let report = world.a.report().await;
    let vm = only(&report);
    assert_eq!(vm.configured_memory_bytes, 256 * MIB + vm.overhead_memory_bytes);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_qemu_ended_takes_nothing_any_more() {
    let mut world = World::new().await;
    world.start().await;
    kill(world.observe(Side::A).await.qemu.unwrap().pid);
    world.wait(Side::A, "the proof", |seen| seen.gone.is_some()).await;
    let report = world.report_when(Side::A, "nothing", |report| only(report).gone.is_some()).await;
    let vm = only(&report);
    assert_eq!((vm.configured_memory_bytes, vm.observed_memory_bytes, vm.cpu_milli), (0, 0, 0));
    assert!(report.capacity.as_ref().unwrap().unreadable.is_empty());
    world.end().await;
}

/// A pool of huge pages of 2 MiB that is large enough for the guest, for as long as a test lasts.
struct HugePages {
    before: String,
    mounted: tempfile::TempDir,
}

impl HugePages {
    const COUNT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    /// Returns the pool, or why there is none.
    fn new() -> Result<Self, String> {
        let before = std::fs::read_to_string(Self::COUNT).map_err(|error| error.to_string())?;
        let count = |text: &str| text.trim().parse::<u64>().unwrap_or(0);
        let wanted = count(&before) + GUEST / (2 * MIB) + 4;
        let mounted = tempfile::Builder::new().prefix("vf").tempdir().unwrap();
        let pool = Self { before, mounted };
        std::fs::write(Self::COUNT, wanted.to_string()).map_err(|error| error.to_string())?;
        let now = std::fs::read_to_string(Self::COUNT).map_err(|error| error.to_string())?;
        if count(&now) < wanted {
            return Err(format!("{} of {wanted} pages were to be had", count(&now)));
        }
        let mount = ["-t", "hugetlbfs", "-o", "pagesize=2M", "none"];
        match Command::new("mount").args(mount).arg(pool.path()).status() {
            Ok(status) if status.success() => Ok(pool),
            other => Err(format!("mount hugetlbfs: {other:?}")),
        }
    }

    fn path(&self) -> PathBuf {
        self.mounted.path().to_owned()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(Path::new(&self.path())).status();
        let given_back = std::fs::write(Self::COUNT, self.before.trim());
        assert!(std::thread::panicking() || (unmounted.is_ok() && given_back.is_ok()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_pages_count_like_any_other() {
    let pool = match HugePages::new() {
        Ok(pool) => pool,
        Err(why) => {
            eprintln!("NOT RUN: huge_pages_count_like_any_other: no pool of huge pages: {why}");
            return;
        }
    };
    let path = pool.path();
    let args = ["-mem-path", path.to_str().unwrap()];
    let mut world = World::new().await.with_rom(&rom::touching(), &args);
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let touched = |report: &v1::HostReport| {
        let part = guests_part(pid);
        part > GUEST - MIB && counts(report, part)
    };
    let report = world.report_when(Side::A, "all of the memory", touched).await;
    check_what_may_be_taken(&report);
    let pools = &report.capacity.as_ref().unwrap().hugepages;
    let pages = pools.iter().find(|pool| pool.page_bytes == 2 * MIB).unwrap();
    assert!(pages.total >= pages.free + GUEST / (2 * MIB), "{pages:?}");
    world.end().await;
}
