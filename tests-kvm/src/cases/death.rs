//! QEMU processes that die while memory crosses. What happens around each commit is the crash
//! matrix's.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmferry_proto::v1::VmObservation;

use super::cancel::start_endless;
use super::{Case, MOVE_BOUND, Note, Tier, move_vm, settle};
use crate::client::End;
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestSpec;
use crate::proof::qemu_processes;

/// Which QEMU process dies.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Source,
    Receiver,
}

impl Victim {
    const fn label(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Receiver => "receiver",
        }
    }

    const fn host(self) -> &'static str {
        match self {
            Self::Source => "a",
            Self::Receiver => "b",
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    let copying = [(Victim::Receiver, End::Aborted), (Victim::Source, End::Failed)];
    let case = |(victim, end): (Victim, End)| {
        let name = format!("{}-dies-while-copying-is-{}", victim.label(), end.phase());
        Case::new(name, Tier::Subset, move |cluster| Box::pin(while_copying(cluster, victim, end)))
    };
    copying.into_iter().map(case).collect()
}

/// Kills the QEMU process of a VM on a host, as the kernel's memory killer would, and waits until
/// the host's agent has seen it: before that, whatever is commanded is commanded in good faith.
pub(crate) async fn kill_qemu(cluster: &Cluster<'_>, vm: &GuestVm, host: &str) -> Result<()> {
    let uuid = vm.uuid.to_string();
    let found = qemu_processes(cluster.lab, [host])?;
    let process = found.iter().find(|process| process.uuid == uuid);
    let process = process.with_context(|| format!("no QEMU process of {} on {host}", vm.name))?;
    let pid = Pid::from_raw(process.pid);
    kill(pid, Signal::SIGKILL).with_context(|| format!("kill {pid}"))?;
    let seen = |seen: &VmObservation| seen.gone.is_some() || seen.role == "absent";
    cluster.clients.wait_observation(host, vm, MOVE_BOUND, seen).await?;
    Ok(())
}

async fn while_copying(cluster: &mut Cluster<'_>, victim: Victim, end: End) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("mortal"), "a").await?;
    let migration = start_endless(cluster, &vm).await?;
    kill_qemu(cluster, &vm, victim.host()).await?;
    conclude(cluster, &vm, &migration.id, end).await
}

async fn conclude(cluster: &mut Cluster<'_>, vm: &GuestVm, id: &str, end: End) -> Result<Note> {
    let migration = settle(cluster, vm, id, end).await?;
    match end {
        End::Done => {}
        // A guest that stayed can be moved as if nothing had been.
        End::Aborted => {
            if migration.state != "failed" {
                bail!("nobody asked for it, but the state is {}", migration.state);
            }
            move_vm(cluster, vm, "b").await?;
        }
        End::Failed => expect_lost(cluster, vm).await?,
    }
    Ok(migration.error)
}

/// Proves that a lost guest is reported as lost and was not started anywhere.
async fn expect_lost(cluster: &Cluster<'_>, vm: &GuestVm) -> Result<()> {
    let lost = cluster.clients.wait_vm(vm, MOVE_BOUND, |seen| seen.power == "lost").await?;
    if lost.error.is_empty() {
        bail!("{} is lost without a cause", vm.name);
    }
    crate::proof::expect_processes(cluster.lab, &cluster.host_names(), &[]).await?;
    let printed = vm.serial.history().ticks.len();
    vm.serial.wait_still(Duration::from_millis(500), MOVE_BOUND).await?;
    cluster.expect_one_guest(vm)?;
    if vm.serial.history().ticks.len() < printed {
        bail!("the guest's history shrank");
    }
    Ok(())
}
