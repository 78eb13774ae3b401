//! One host of a case: its agent, and its death as a machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use uuid::Uuid;

use crate::cluster::Artifacts;
use crate::daemon::Daemon;
use crate::faults::Faults;
use crate::lab::{Lab, host_address, is_zombie};
use crate::pki::Pki;
use crate::planners::Store;
use crate::wait::{Holds, Level, wait_for};

/// How long the kernel may take to end all processes of a host.
const DEATH_BOUND: std::time::Duration = std::time::Duration::from_secs(10);

/// One host of a case.
#[derive(Debug)]
pub struct Host {
    /// Its agent.
    pub agent: Daemon,
    /// The agent's fault points.
    pub faults: Faults,
    /// Its runtime directory, which a real host keeps in memory.
    pub run_dir: PathBuf,
    name: String,
    boot_id: PathBuf,
}

impl Host {
    /// Writes the configuration of a host's agent, which reports to the planners of `store`.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be written.
    pub fn new(
        lab: &Lab,
        artifacts: &Artifacts,
        dir: &Path,
        host: &str,
        (store, pki): (Store, Option<&Pki>),
    ) -> Result<Self> {
        let address = host_address(host);
        let own = dir.join(host);
        let (scheme, security) = match pki {
            None => ("http", "[security]\nplain_text = \"namespace\"\n".to_owned()),
            Some(pki) => {
                let identity = pki.issue("host", host)?;
                ("https", format!("[tls]\ndir = {identity:?}\n"))
            }
        };
        let planners = match store.addresses() {
            [one] => format!("address = \"{scheme}://{one}:9096\""),
            several => {
                let url = |address: &&str| format!("\"{scheme}://{address}:9096\"");
                let urls: Vec<_> = several.iter().map(url).collect();
                format!("addresses = [{}]", urls.join(", "))
            }
        };
        let config = format!(
            "host_id = \"{host}\"\nstate_dir = \"{own}/s\"\nrun_dir = \"{own}/r\"\n\
             qemu = \"/usr/bin/qemu-system-x86_64\"\n\
             [listen]\ngrpc = \"{address}:9097\"\nmetrics = \"{address}:9098\"\n\
             [planner]\n{planners}\nreport_interval = \"1s\"\n\
             [migration]\naddress = \"{address}\"\nports = \"49152-49215\"\n\
             [capacity]\nmemory = \"2GiB\"\ncpus = 8\n\
             {security}{}",
            artifacts.fault_points.toml(&own.join("f")),
            own = own.display()
        );
        for sub in ["s", "r"] {
            fs::create_dir_all(own.join(sub))
                .with_context(|| format!("create {}/{sub}", own.display()))?;
        }
        let faults = Faults::new(&own.join("f"))?;
        let path = own.join("agent.toml");
        fs::write(&path, config).with_context(|| format!("write {}", path.display()))?;
        let binary = artifacts.binaries.join("vmferry-agent");
        let boot_id = own.join("boot_id");
        let daemon = format!("agent-{host}");
        let agent = Daemon::new(&daemon, &lab.namespace(host), &binary, &path, &dir.join("log"))
            .with_boot_id(&boot_id);
        let host = Self { agent, faults, run_dir: own.join("r"), name: host.to_owned(), boot_id };
        host.take_boot_id()?;
        Ok(host)
    }

    /// Ends the host as a power cut does: its agent, its QEMU processes and its shims at once, and
    /// all that it keeps in memory.
    ///
    /// # Errors
    ///
    /// Fails if something of it survives.
    pub async fn crash(&mut self, lab: &Lab) -> Result<()> {
        if self.agent.pid().is_some() {
            // All at once: nobody on it may see another die.
            for pid in lab.processes(&self.name)? {
                kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
            }
            self.agent.kill().await?;
        }
        wait_for(format_args!("host {} to be dead", self.name), DEATH_BOUND, || async {
            let mut alive = lab.processes(&self.name)?;
            alive.retain(|pid| !is_zombie(*pid));
            for pid in &alive {
                kill(Pid::from_raw(*pid), Signal::SIGKILL).ok();
            }
            Ok(Level::from_condition(Holds::from(alive.is_empty()), || format!("{alive:?}")))
        })
        .await?;
        for link in lab.extra_links(&self.name)? {
            lab.remove_link(&self.name, &link)?;
        }
        fs::remove_dir_all(&self.run_dir).context("empty the runtime directory")?;
        fs::create_dir_all(&self.run_dir).context("make the runtime directory")
    }

    /// Boots the host again after its death: its agent starts under a boot id that is new.
    ///
    /// # Errors
    ///
    /// Fails if the agent cannot be started.
    pub fn boot(&mut self) -> Result<()> {
        self.take_boot_id()?;
        self.agent.start()
    }

    fn take_boot_id(&self) -> Result<()> {
        fs::write(&self.boot_id, format!("{}\n", Uuid::new_v4())).context("write the boot id")
    }
}
