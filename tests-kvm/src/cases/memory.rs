//! The strongest proof of a copy: both ends' memory, page by page, while both stand still.

use anyhow::{Result, bail};

use super::{Case, Note, POINT_BOUND, Tier, request, settle};
use crate::accel::Accelerator;
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::{GuestKind, GuestSpec, Load};
use crate::monitor::{Monitors, differing_pages};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("memory-is-equal-under-tcg", Tier::Subset, |cluster| {
            Box::pin(equal(cluster, Accelerator::Tcg))
        })
        .under(Accelerator::Tcg),
        Case::new("memory-is-equal-under-kvm", Tier::Subset, |cluster| {
            Box::pin(equal(cluster, Accelerator::Kvm))
        })
        .under(Accelerator::Kvm),
    ]
}

async fn equal(cluster: &mut Cluster<'_>, accelerator: Accelerator) -> Result<Note> {
    let best = cluster.artifacts.accelerators.get(&GuestKind::Rom).copied();
    if accelerator == Accelerator::Kvm && best != Some(Accelerator::Kvm) {
        return Ok("skipped: KVM cannot run the guest here".to_owned());
    }
    let monitors = Monitors::listen(&cluster.dir().join("m"))?;
    let mut spec = GuestSpec::rom("twin").with_load(Load::Busy);
    spec.extra_args = monitors.qemu_arguments();
    let bytes = u64::from(spec.memory_mib) << 20;
    let vm = cluster.start_vm_with(&spec, "a", accelerator).await?;
    let mut source = monitors.next().await?;
    vm.serial.wait_ticks(spec.ticks_per_check(), POINT_BOUND).await?;
    // Ownership has moved and the destination was not told yet: both ends have everything, and stand still.
    cluster.planner.faults.hold("after_commit.committed")?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner.faults.wait_reached("after_commit.committed", POINT_BOUND).await?;
    let mut destination = monitors.next().await?;
    let here = source.memory(bytes, &cluster.dir().join("source.mem")).await?;
    let there = destination.memory(bytes, &cluster.dir().join("destination.mem")).await?;
    cluster.planner.faults.release("after_commit.committed")?;
    let differing = differing_pages(&here, &there);
    if !differing.is_empty() {
        bail!("{} pages differ, the first at {:#x}", differing.len(), differing[0]);
    }
    let written = here.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count();
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(format!("{} pages compared, {written} of them not empty", here.len() / 4096))
}
