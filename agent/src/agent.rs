//! One host's agent: what all of its parts share.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use vmferry_agent_core::journal::VmRecord;
use vmferry_tls::{Identity, Live, LoadError, Security, Use};
use vmferry_types::{Generation, VmId};

use crate::config::Config;
use crate::error::chain;
use crate::faults::Faults;
use crate::journal::{Journal, JournalError, Kept};
use crate::probe::{Probe, ProbeError};
use crate::process::{self, Launcher, ProcessDir};
use crate::shutdown::Shutdown;
use crate::told::{Owner, Told};
use crate::vm::VmHandle;

/// The file in a directory of launches that says whose they are.
const HOST_FILE: &str = "host";

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
    /// Its certificates cannot be used.
    #[error("load the certificates of this host")]
    Certificates(#[source] LoadError),
    /// They are somebody else's.
    #[error("the certificates in {path} are of {found}, and this is {expected}: make them with `vmferry pki issue host {name}`", path = dir.display(), name = expected.name())]
    OtherIdentity {
        /// Where they are.
        dir: PathBuf,
        /// Whose they are.
        found: Identity,
        /// Whose they have to be.
        expected: Identity,
    },
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
    /// How it speaks to planners, operators and other hosts.
    pub(crate) security: Security,
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
    /// What planners last said of the VMs that are known here.
    told: Mutex<Told>,
    /// Held while a VM that was never heard of is taken up.
    pub(crate) taking_up: tokio::sync::Mutex<()>,
    /// Held while a planner's word is taken up.
    pub(crate) seeding: tokio::sync::Mutex<()>,
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
        let security = secured(&config)?;
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
        let run_dir_error = |source| StartError::RunDir { path: config.run_dir.clone(), source };
        std::fs::create_dir_all(&config.run_dir).map_err(run_dir_error)?;
        // Whoever finds a QEMU with a directory in here later can tell whose it was.
        std::fs::write(config.run_dir.join(HOST_FILE), config.host_id.as_str())
            .map_err(run_dir_error)?;
        let boot_id =
            process::identity::boot_id().map_err(|error| StartError::BootId(Box::new(error)))?;
        let probe = Probe::cached(&config.qemu, &config.run_dir.join("qemu.json"))
            .await
            .map_err(|error: ProbeError| StartError::Probe(Box::new(error)))?;
        let agent = Arc::new(Self {
            faults: Faults::new(&config),
            config,
            security,
            journal,
            probe,
            launcher,
            boot_id,
            instance: uuid::Uuid::new_v4().to_string(),
            shutdown,
            strangers: Mutex::default(),
            latest_report: crate::report::Latest::default(),
            told: Mutex::default(),
            taking_up: tokio::sync::Mutex::default(),
            seeding: tokio::sync::Mutex::default(),
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
        if kept == Kept::Whole {
            agent.sweep_run_dir();
        }
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
    pub(crate) fn discard(&self, dir: &Path) {
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

    /// Returns what planners last said.
    pub(crate) fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether another host owns a VM by a newer generation than the one it runs under here.
    pub(crate) fn superseded(&self, vm: VmId, generation: Generation) -> bool {
        self.told().of(vm).is_some_and(|word| word.supersedes(generation))
    }

    /// Says whether a QEMU was launched by another host's agent on the same machine.
    pub(crate) fn is_anothers(&self, qemu: &process::QemuFound) -> bool {
        let Some(parent) = qemu.dir.as_deref().and_then(Path::parent) else { return false };
        if parent == self.config.run_dir {
            return false;
        }
        let host = std::fs::read_to_string(parent.join(HOST_FILE));
        host.is_ok_and(|host| host.trim() != self.config.host_id.as_str())
    }

    /// Removes a VM that nothing was ever done to; its lane has ended.
    pub(crate) fn drop_vm(&self, vm: &VmHandle) {
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        if vms.get(&vm.shared.id).is_some_and(|now| Arc::ptr_eq(&now.shared, &vm.shared)) {
            vms.remove(&vm.shared.id);
        }
    }

    pub(crate) fn register(&self, handle: VmHandle) {
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

    /// Notes that it does.
    pub(crate) fn trust_journal(&self) {
        self.proves.store(true, Ordering::Relaxed);
        self.changed();
    }

    /// Says whether the journal is whole, as far as anybody needs it: a record that cannot be read
    /// counts no more once a planner has said that it knows no such VM.
    pub(crate) fn journal_is_whole(&self, vms: &[VmHandle]) -> bool {
        let told = self.told();
        let disowned = |vm: VmId| told.of(vm).is_some_and(|word| word.owner == Owner::NoSuchVm);
        self.journal_proves()
            && vms.iter().filter(|vm| vm.unreadable_vm()).all(|vm| disowned(vm.shared.id))
    }

    /// Returns a QEMU process with the VM's UUID that is not ours.
    pub(crate) fn stranger_of(&self, vm: VmId) -> Option<String> {
        let strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        strangers
            .iter()
            .find(|stranger| stranger.uuid == Some(vm.as_u128()))
            .map(|stranger| stranger.text.clone())
    }

    /// Returns the host whose certificate its QEMUs show; empty if they speak plain text.
    pub(crate) fn tls_host(&self) -> String {
        self.security.live().map(|_| self.config.host_id.to_string()).unwrap_or_default()
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

/// Loads the certificates of this host, if it has any.
fn secured(config: &Config) -> Result<Security, StartError> {
    let Some(dir) = &config.tls else { return Ok(Security::PlainText) };
    let live = Live::open(dir, Use::Daemon).map_err(StartError::Certificates)?;
    let expected = Identity::host(config.host_id.clone());
    let found = live.identity();
    if found != expected {
        return Err(StartError::OtherIdentity { dir: dir.clone(), found, expected });
    }
    Ok(Security::Tls(live))
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
    if let Some(live) = agent.security.live() {
        agent.shutdown.spawn(live.clone().follow());
    }
    crate::metrics::serve(agent).await?;
    crate::reporter::start(agent);
    Ok(grpc)
}
