//! What all parts of the planner share, and who drives what.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::warn;
use uuid::Uuid;
use vmferry_types::{MigrationId, Millis, RequestId, Timestamp, VmId};

use crate::agents::Agents;
use crate::config::Config;
use crate::driver;
use crate::faults::FaultPoints;
use crate::inventory::Inventory;
use crate::live::Live;
use crate::shutdown::Shutdown;
use crate::store::{Store, StoreError};
use crate::telemetry::Chain;

/// The store's clock is read this often.
const CLOCK_READ_EVERY: Duration = Duration::from_secs(1);
/// A planner that ends waits for the store no longer than this.
const GOODBYE: Duration = Duration::from_secs(3);

/// The parts that a planner is made of.
#[derive(Debug)]
pub struct Parts {
    /// What it was told from outside.
    pub config: Config,
    /// What it holds to be true.
    pub store: Arc<dyn Store>,
    /// Whom it commands.
    pub agents: Arc<dyn Agents>,
    /// Whom it heard of.
    pub inventory: Inventory,
    /// Where a test may hold it.
    pub faults: FaultPoints,
    /// What ends it.
    pub shutdown: Shutdown,
}

/// One running planner.
#[derive(Debug)]
pub struct Planner {
    /// Its parts.
    pub parts: Parts,
    /// What is seen of migrations under way.
    pub live: Live,
    /// The name under which it holds leases: fresh for every start.
    pub owner: String,
    /// Wakes the reconciler.
    pub wake: Notify,
    /// Wakes the queue: there may be room.
    pub room: Notify,
    /// Whether a migration waits in the queue, as the reconciler last saw it.
    pub queue_waits: AtomicBool,
    drivers: Mutex<BTreeMap<MigrationId, Arc<Notify>>>,
    power: watch::Sender<u64>,
    /// When the store's clock was read last, and what it said.
    lease_clock: Mutex<Option<(Instant, Timestamp)>>,
}

/// What kind of admission a driver is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drives {
    /// A migration.
    Migration,
    /// A start or a stop.
    Power,
}

impl Planner {
    /// Puts a planner together. Nothing is driven until the reconciler runs.
    #[must_use]
    pub fn new(parts: Parts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            live: Live::default(),
            owner: Uuid::new_v4().to_string(),
            wake: Notify::new(),
            room: Notify::new(),
            queue_waits: AtomicBool::new(false),
            drivers: Mutex::new(BTreeMap::new()),
            power: watch::channel(0).0,
            lease_clock: Mutex::new(None),
        })
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        self.parts.store.as_ref()
    }

    /// Makes sure that an open admission has a driver in this process.
    pub fn drive(self: &Arc<Self>, id: MigrationId, kind: Drives) {
        let nudge = Arc::new(Notify::new());
        {
            let mut drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
            if drivers.contains_key(&id) {
                return;
            }
            drivers.insert(id, Arc::clone(&nudge));
        }
        let registration = Registration { planner: Arc::clone(self), id };
        let planner = Arc::clone(self);
        self.parts.shutdown.spawn(async move {
            // Dropped however the task ends, so that the reconciler can give the row a new driver.
            let _registration = registration;
            match kind {
                Drives::Migration => driver::migration::drive(&planner, id, &nudge).await,
                Drives::Power => driver::power::drive(&planner, id).await,
            }
        });
    }

    /// Tells the driver of a migration, if it is in this process, that the row has changed.
    pub fn nudge(&self, id: MigrationId) {
        let drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nudge) = drivers.get(&id) {
            nudge.notify_one();
        }
        drop(drivers);
        self.live.ring(id);
    }

    /// Rings for everyone who waits for a start or stop to end.
    pub fn power_changed(&self) {
        self.power.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Subscribes to ends of starts and stops.
    #[must_use]
    pub fn power_changes(&self) -> watch::Receiver<u64> {
        self.power.subscribe()
    }

    /// Returns how long a lease holds.
    #[must_use]
    pub fn lease_term(&self) -> Millis {
        millis(self.parts.config.policy.lease)
    }

    /// Reads the clock that leases are counted by. The store is asked now and then only: between,
    /// its time passes as it does here.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn lease_clock(&self) -> Result<Timestamp, StoreError> {
        let known = *self.lease_clock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, said)) = known.filter(|(at, _)| at.elapsed() < CLOCK_READ_EVERY) {
            return Ok(said.plus(Timestamp(millis(at.elapsed()).value())));
        }
        let said = self.store().lease_clock().await?;
        let mut known = self.lease_clock.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some((Instant::now(), said));
        Ok(said)
    }

    /// Returns the time by which leases are counted, and until when one that is taken now holds.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn lease(&self) -> Result<(Timestamp, Timestamp), StoreError> {
        let now = self.lease_clock().await?;
        Ok((now, now.plus(Timestamp(self.lease_term().value()))))
    }

    /// Ends everything that this planner does, and lets go of what it drives, so that another one
    /// need not wait for leases to end. One that cannot say so is waited for, as after a crash.
    pub async fn leave(&self) {
        self.parts.shutdown.finish().await;
        let said = tokio::time::timeout(GOODBYE, self.store().release_leases(&self.owner)).await;
        match said {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(error = %Chain(&error), "leases could not be released; they end by themselves");
            }
            Err(_) => {
                warn!(waited = ?GOODBYE, "leases could not be released; they end by themselves");
            }
        }
    }

    /// Returns how often a lease is renewed: twice before it ends.
    #[must_use]
    pub fn lease_renewal(&self) -> Duration {
        self.parts.config.policy.lease / 3
    }
}

/// Returns a span in milliseconds.
#[must_use]
pub fn millis(of: Duration) -> Millis {
    Millis(u64::try_from(of.as_millis()).unwrap_or(u64::MAX))
}

struct Registration {
    planner: Arc<Planner>,
    id: MigrationId,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The reconciler finds the row without a driver at its next tick. Not at once: whoever holds
        // the row, or whatever keeps the store from answering, would be asked without a pause.
        let mut drivers = self.planner.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        drivers.remove(&self.id);
    }
}

/// Mints the id of an admission; ordered by time, so that lists read naturally.
#[must_use]
pub fn fresh_admission() -> MigrationId {
    MigrationId::from_u128(Uuid::now_v7().as_u128())
}

/// Mints the id of a VM that came without one.
#[must_use]
pub fn fresh_vm() -> VmId {
    VmId::from_u128(Uuid::new_v4().as_u128())
}

/// Mints the id of a request that came without one.
#[must_use]
pub fn fresh_request() -> RequestId {
    RequestId::from_u128(Uuid::new_v4().as_u128())
}
