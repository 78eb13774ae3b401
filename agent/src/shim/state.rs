//! What the tasks of a shim share.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use tokio::sync::{Notify, watch};

use super::protocol::{MigrationSeen, OobState, ShimStatus};
use crate::monitor::Monitor;
use crate::process::pidfd::PidFd;
use crate::process::{ExitRecord, GuestRecord, ProcessDir, ProcessIdentity};

/// How many migration events are kept. A migration has about ten of them.
const MIGRATIONS_KEPT: usize = 64;

/// The way into QEMU, or why there is none.
#[derive(Clone, Debug)]
pub(super) enum Oob {
    Connected(Monitor),
    Disconnected { reason: String },
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) dir: ProcessDir,
    /// `None` if it could not be started.
    pub(super) identity: Option<ProcessIdentity>,
    pub(super) process: Option<PidFd>,
    pub(super) exit: watch::Sender<Option<ExitRecord>>,
    pub(super) oob: watch::Sender<Oob>,
    /// A client has read the exit record.
    pub(super) bye: Notify,
    /// A signal came. Remembered until QEMU has ended.
    pub(super) asked_to_end: Notify,
    migrations: Mutex<VecDeque<MigrationSeen>>,
    guest: Mutex<GuestRecord>,
}

impl State {
    pub(super) fn new(
        dir: ProcessDir,
        identity: Option<ProcessIdentity>,
        process: Option<PidFd>,
    ) -> Self {
        let not_yet = Oob::Disconnected { reason: "not connected yet".to_owned() };
        Self {
            dir,
            identity,
            process,
            exit: watch::channel(None).0,
            oob: watch::channel(not_yet).0,
            bye: Notify::new(),
            asked_to_end: Notify::new(),
            migrations: Mutex::default(),
            guest: Mutex::default(),
        }
    }

    pub(super) fn saw_migration(&self, seen: MigrationSeen) {
        // Nothing in here can be left half done by a panic.
        let mut migrations = self.migrations.lock().unwrap_or_else(PoisonError::into_inner);
        if migrations.len() == MIGRATIONS_KEPT {
            migrations.pop_front();
        }
        migrations.push_back(seen);
    }

    /// Changes what is known of the guest; returns it if it is news.
    pub(super) fn hear_guest(
        &self,
        hear: impl FnOnce(&mut GuestRecord) -> bool,
    ) -> Option<GuestRecord> {
        let mut guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        hear(&mut guest).then(|| guest.clone())
    }

    /// Waits until all that QEMU said on the second monitor was heard: once that is closed.
    pub(super) async fn heard_all(&self) {
        let mut oob = self.oob.subscribe();
        // The sender lives as long as this does.
        drop(oob.wait_for(|oob| matches!(oob, Oob::Disconnected { .. })).await);
    }

    pub(super) fn status(&self) -> ShimStatus {
        let migrations = self.migrations.lock().unwrap_or_else(PoisonError::into_inner);
        ShimStatus {
            identity: self.identity.clone(),
            exit: self.exit.borrow().clone(),
            oob: match &*self.oob.borrow() {
                Oob::Connected(_) => OobState::Connected,
                Oob::Disconnected { .. } => OobState::Disconnected,
            },
            migrations: migrations.iter().cloned().collect(),
        }
    }

    /// Waits for the exit to be on the disk.
    pub(super) async fn exited(&self) -> Option<ExitRecord> {
        let mut exit = self.exit.subscribe();
        let seen = exit.wait_for(Option::is_some).await;
        seen.ok().and_then(|record| record.clone())
    }
}
