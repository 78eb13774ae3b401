//! One host's agent: what all of its parts share.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use vmferry_agent_core::journal::VmRecord;
use vmferry_types::{Claim, Generation, VmId};

use crate::config::Config;
use crate::error::chain;
use crate::faults::Faults;
use crate::journal::{Journal, JournalError, Kept};
use crate::probe::{Probe, ProbeError};
use crate::process::{self, Launcher, ProcessDir};
use crate::shutdown::Shutdown;
use crate::vm::VmHandle;

/// An agent could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its journal cannot be used.
    #[error("open the journal in {path}", path = path.display())]
    Journal {
        /// The state directory.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Its directory for sockets cannot be used.
    #[error("create {path}", path = path.display())]
    RunDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// QEMU does not say what it can.
    #[error("ask QEMU what it can do")]
    Probe(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The kernel does not say which boot this is.
    #[error("read the boot id")]
    BootId(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A port cannot be listened on.
    #[error("listen on {address}")]
    Listen {
        /// Where.
        address: std::net::SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
}

/// One host's agent.
#[derive(Debug)]
pub struct Agent {
    pub(crate) config: Config,
    pub(crate) journal: Journal,
    pub(crate) probe: Probe,
    pub(crate) launcher: Launcher,
    pub(crate) faults: Faults,
    pub(crate) boot_id: String,
    /// Fresh for every start.
    pub(crate) instance: String,
    pub(crate) shutdown: Shutdown,
    /// What runs here and is not ours, as last seen.
    pub(crate) strangers: Mutex<Vec<Stranger>>,
    pub(crate) latest_report: crate::report::Latest,
    vms: Mutex<BTreeMap<VmId, VmHandle>>,
    registered: watch::Sender<()>,
    changes: watch::Sender<()>,
    sequence: AtomicU64,
    /// Held while something is read and numbered: what has the higher number was read later.
    reading: Mutex<()>,
    /// Whether absence from the journal proves anything.
    proves: AtomicBool,
    port: Mutex<Ports>,
}

/// A QEMU process that is not the agent's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stranger {
    pub(crate) uuid: Option<u128>,
    /// For people.
    pub(crate) text: String,
}

#[derive(Debug, Default)]
struct Ports {
    used: BTreeSet<u16>,
    previous: Option<u16>,
}

impl Agent {
    /// Reads the journal, learns what QEMU can do, and takes up every VM that the journal knows.
    ///
    /// # Errors
    ///
    /// Fails where this host cannot be an agent's: see [`StartError`].
    pub async fn start(
        config: Config,
        launcher: Launcher,
        shutdown: Shutdown,
    ) -> Result<Arc<Self>, StartError> {
        let journal_error = |error: JournalError| StartError::Journal {
            path: config.state_dir.clone(),
            source: Box::new(error),
        };
        let (journal, found) =
            Journal::open(&config.state_dir, &config.host_id).map_err(journal_error)?;
        let kept = match (found.kept, &config.planners) {
            // Nobody else holds a second copy that could say more.
            (Kept::NewOrLost, None) => {
                Journal::mark_kept(&config.state_dir, &config.host_id).map_err(journal_error)?;
                Kept::Whole
            }
            (kept, _) => kept,
        };
        std::fs::create_dir_all(&config.run_dir)
            .map_err(|source| StartError::RunDir { path: config.run_dir.clone(), source })?;
        let boot_id =
            process::identity::boot_id().map_err(|error| StartError::BootId(Box::new(error)))?;
        let probe = Probe::cached(&config.qemu, &config.run_dir.join("qemu.json"))
            .await
            .map_err(|error: ProbeError| StartError::Probe(Box::new(error)))?;
        let agent = Arc::new(Self {
            faults: Faults::new(&config),
            config,
            journal,
            probe,
            launcher,
            boot_id,
            instance: uuid::Uuid::new_v4().to_string(),
            shutdown,
            strangers: Mutex::default(),
            latest_report: crate::report::Latest::default(),
            vms: Mutex::default(),
            registered: watch::Sender::new(()),
            changes: watch::Sender::new(()),
            // Above all that an earlier process of this boot gave out: none gives one out a
            // microsecond.
            sequence: AtomicU64::new(crate::clock::monotonic_us()),
            reading: Mutex::default(),
            proves: AtomicBool::new(kept == Kept::Whole),
            port: Mutex::default(),
        });
        for record in found.records {
            if let Some(port) = record.incoming().and_then(|incoming| incoming.port) {
                agent.ports().used.insert(port);
            }
            agent.register(VmHandle::known(&agent, record));
        }
        for (vm, error) in found.broken {
            tracing::error!(vm_id = %vm, error = %chain(&error), "record cannot be read");
            agent.register(VmHandle::unreadable(&agent, vm, chain(&error)));
        }
        agent.sweep_run_dir();
        crate::report::look_for_strangers(&agent).await;
        Ok(agent)
    }

    /// Removes directories of launches that nobody knows any more and whose process is gone.
    fn sweep_run_dir(&self) {
        let known: BTreeSet<PathBuf> = self
            .vms()
            .iter()
            .filter_map(|vm| {
                vm.shared.record.borrow().process().map(|process| (&process.dir).into())
            })
            .collect();
        let Ok(entries) = std::fs::read_dir(&self.config.run_dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
            let gone = || {
                matches!(process::judge(&ProcessDir::new(&path)), Ok(process::Judgement::Gone(_)))
            };
            if !known.contains(&path) && gone() {
                self.discard(&path);
            }
        }
    }

    /// Removes the directory of a launch whose end is written down.
    pub(crate) fn discard(&self, dir: &std::path::Path) {
        let ours = dir.parent() == Some(self.config.run_dir.as_path());
        if ours && let Err(error) = std::fs::remove_dir_all(dir) {
            tracing::debug!(dir = %dir.display(), %error, "directory was not removed");
        }
    }

    /// Returns a VM that is known here.
    pub(crate) fn vm(&self, id: VmId) -> Option<VmHandle> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Returns every VM that is known here, gone ones included.
    pub(crate) fn vms(&self) -> Vec<VmHandle> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns the VM, known or new.
    pub(crate) fn vm_or_new(self: &Arc<Self>, id: VmId) -> VmHandle {
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        let handle =
            vms.entry(id).or_insert_with(|| VmHandle::known(self, VmRecord::new(id))).clone();
        drop(vms);
        self.registered.send_replace(());
        handle
    }

    fn register(&self, handle: VmHandle) {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner).insert(handle.shared.id, handle);
        self.registered.send_replace(());
    }

    /// Tells when a VM was added.
    pub(crate) fn registrations(&self) -> watch::Receiver<()> {
        self.registered.subscribe()
    }

    /// Says that something worth a report has changed.
    pub(crate) fn changed(&self) {
        self.changes.send_replace(());
    }

    /// Tells when something worth a report has changed.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Lets one observation at a time be read and numbered.
    pub(crate) fn reading(&self) -> std::sync::MutexGuard<'_, ()> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Says whether a VM's absence from the journal proves anything (rule R3).
    pub(crate) fn journal_proves(&self) -> bool {
        self.proves.load(Ordering::Relaxed)
    }

    /// Takes up what the planner knows of this host's VMs: from here on the journal proves
    /// something again.
    pub(crate) async fn seed(self: &Arc<Self>, generations: Vec<(VmId, Generation, Claim)>) {
        let broken = self.vms().into_iter().filter(VmHandle::unreadable_vm);
        let mut wanted: BTreeMap<VmId, (Generation, Claim)> = generations
            .into_iter()
            .map(|(vm, generation, claim)| (vm, (generation, claim)))
            .collect();
        for vm in broken {
            if let Some((generation, claim)) = wanted.remove(&vm.shared.id)
                && self.reseed_broken(&vm, generation, claim).await.is_err()
            {
                return;
            }
        }
        if self.journal_proves() {
            return;
        }
        for (vm, (generation, claim)) in wanted {
            if let Err(error) = self.vm_or_new(vm).seed(generation, claim).await {
                tracing::error!(vm_id = %vm, %error, "cannot take up what the planner knows");
                return;
            }
        }
        match Journal::mark_kept(&self.config.state_dir, &self.config.host_id) {
            Ok(()) => {
                tracing::info!("journal is seeded by the planner");
                self.proves.store(true, Ordering::Relaxed);
                self.changed();
            }
            Err(error) => {
                tracing::error!(error = %chain(&error), "cannot mark the journal as kept");
            }
        }
    }

    /// Replaces a broken record, if no QEMU of that VM runs here.
    async fn reseed_broken(
        self: &Arc<Self>,
        vm: &VmHandle,
        generation: Generation,
        claim: Claim,
    ) -> Result<(), ()> {
        let id = vm.shared.id;
        if self.stranger_of(id).is_some() {
            // Its process was launched by this agent once; what it is cannot be known any more.
            return Ok(());
        }
        self.journal.set_aside(id).map_err(|error| {
            tracing::error!(vm_id = %id, error = %chain(&error), "cannot set a broken record aside");
        })?;
        self.register(VmHandle::known(self, VmRecord::new(id)));
        let Some(fresh) = self.vm(id) else { return Ok(()) };
        fresh.seed(generation, claim).await.map_err(|error| {
            tracing::error!(vm_id = %id, %error, "cannot take up what the planner knows");
        })
    }

    /// Returns a QEMU process with the VM's UUID that is not ours.
    pub(crate) fn stranger_of(&self, vm: VmId) -> Option<String> {
        let strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        strangers
            .iter()
            .find(|stranger| stranger.uuid == Some(vm.as_u128()))
            .map(|stranger| stranger.text.clone())
    }

    fn ports(&self) -> std::sync::MutexGuard<'_, Ports> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a free port; it is in use until it is given back.
    pub(crate) fn take_port(&self) -> Option<u16> {
        let mut ports = self.ports();
        let port = *self.config.migration_ports.candidates(&ports.used, ports.previous).first()?;
        ports.used.insert(port);
        ports.previous = Some(port);
        Some(port)
    }

    pub(crate) fn give_port_back(&self, port: u16) {
        self.ports().used.remove(&port);
    }
}

/// Serves an agent: gRPC, metrics, and reports to the planner.
///
/// Returns where gRPC is served; all of it runs until the agent's shutdown begins.
///
/// # Errors
///
/// Fails if an address cannot be listened on.
pub async fn serve(agent: &Arc<Agent>) -> Result<std::net::SocketAddr, StartError> {
    let grpc = crate::server::serve(agent).await?;
    crate::metrics::serve(agent).await?;
    crate::reporter::start(agent);
    Ok(grpc)
}
