//! Where guests really run: what the kernel and the guests themselves say, and no part of vmferry.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::cluster::{Cluster, GuestVm};
use crate::proof::{QemuProcess, qemu_processes};

/// How long a guest may stand still: a move under TCG on a busy machine.
const SILENCE_BOUND: Duration = Duration::from_secs(10);

/// What is seen of the hosts at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// The host whose QEMU process printed the guest's last line, by the name of the VM.
    pub runs_on: BTreeMap<String, String>,
    /// Every QEMU process of a VM, running guests and receivers alike.
    pub processes: Vec<QemuProcess>,
}

impl Whereabouts {
    /// Looks: each guest has to print once more, so that a line of before proves nothing.
    ///
    /// # Errors
    ///
    /// Fails if a guest stands still, or if its process is on no host.
    pub async fn look(cluster: &Cluster<'_>, vms: &[Arc<GuestVm>]) -> Result<Self> {
        let mut printed = BTreeMap::new();
        for vm in vms {
            vm.serial
                .wait_ticks(1, SILENCE_BOUND)
                .await
                .with_context(|| format!("see where {} runs", vm.name))?;
            let process = vm.serial.last_process();
            printed.insert(vm.name.clone(), process.context("no process printed")?);
        }
        let processes = qemu_processes(cluster.lab, cluster.host_names())?;
        let mut runs_on = BTreeMap::new();
        for (name, pid) in printed {
            let there = processes.iter().find(|process| process.pid == pid);
            // It may have been released since: the next look finds its successor.
            let host = there.map_or_else(|| "nowhere".to_owned(), |there| there.host.clone());
            runs_on.insert(name, host);
        }
        Ok(Self { runs_on, processes })
    }

    /// Returns the VMs with a QEMU process on a host.
    pub fn on<'w>(&'w self, host: &'w str) -> impl Iterator<Item = &'w QemuProcess> + 'w {
        self.processes.iter().filter(move |process| process.host == host)
    }
}
