//! Looking.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt as _};
use vmferry_planner_core::doctor::open_halves;
use vmferry_planner_core::evidence::RunState;
use vmferry_proto::v1;
use vmferry_types::{HostId, MigrationId, PowerState, Role, VmId};

use super::{ApiError, migration_id};
use crate::inventory::{Doubted, EndedBy};
use crate::planner::Planner;
use crate::store::{Filter, Followed, OnlyOpen, StoreError, VmRow};
use crate::{clock, picture, view};

/// Watchers are told of changes at most this often; several times a second is what eyes follow.
const WATCH_PACE: Duration = Duration::from_millis(100);
/// A watcher is told this often though nothing changed, so that ages move on.
const WATCH_IDLE: Duration = Duration::from_secs(1);
/// As many migrations as a list shows if no limit is asked for.
const LIST_LIMIT: u32 = 1000;

impl Planner {
    /// Takes an agent's report.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn report(&self, report: v1::HostReport) -> Result<v1::ReportReply, ApiError> {
        let taken = self.parts.inventory.report(self.store(), report, clock::now()).await?;
        for doubted in &taken.doubted {
            self.look_again(doubted).await?;
        }
        // Capacity has changed; that matters only to those who wait for it.
        if self.queue_waits.load(Ordering::Relaxed) {
            self.wake.notify_one();
        }
        Ok(taken.reply)
    }

    /// Marks a VM as lost if its host still says so: the row was read before it is asked, and is
    /// only written if nothing was admitted since.
    async fn look_again(&self, doubted: &Doubted) -> Result<(), StoreError> {
        let lost = &doubted.lost;
        let look = v1::ObserveRequest { vm_id: lost.vm.to_string(), claim: 0 };
        // One that does not answer is asked again at its next report.
        let Ok(seen) = self.parts.agents.observe(&lost.host, look).await else { return Ok(()) };
        let runs = matches!(Role::from_label(&seen.role), Some(Role::Running | Role::Held));
        let gone = runs && seen.knowledge() == v1::Knowledge::Known && seen.gone.is_some();
        let same = seen.generation == lost.generation.value() && seen.claim <= lost.claim.value();
        let shut_down = RunState::from_qemu(&seen.run_state) == RunState::Shutdown;
        // What the report said of an end counts for that process, and not for one started since.
        let told = seen.gone.as_ref().is_some_and(|now| {
            doubted.by == EndedBy::Guest && (now.pid, now.start_time) == doubted.process
        });
        if gone && same && (shut_down || told) {
            // Its guest turned itself off: nothing was lost.
            let (host, power) = (lost.host.clone(), PowerState::Stopped);
            let (generation, claim) = (lost.generation, lost.claim);
            let followed = Followed { vm: lost.vm, host, power, generation, claim };
            self.store().follow_vm(&followed, clock::now()).await?;
        } else if gone && same {
            let marked = self.store().mark_lost(lost, clock::now()).await?;
            if marked {
                tracing::warn!(vm_id = %lost.vm, host_id = %lost.host, cause = lost.cause,
                    "VM is lost: its QEMU ended by itself");
            }
        }
        Ok(())
    }

    /// Lists all hosts.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn list_hosts(&self) -> Result<v1::ListHostsReply, ApiError> {
        Ok(v1::ListHostsReply { hosts: view::hosts(self).await? })
    }

    /// Shows one host, by name or id.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub async fn get_host(&self, name: &str) -> Result<v1::Host, ApiError> {
        let id = self.resolve_host("host", name)?;
        let not_found = || ApiError::NotFound { kind: "host", name: name.to_owned() };
        let all = view::hosts(self).await?;
        let host = all.into_iter().find(|host| host.id == id.as_str()).ok_or_else(not_found)?;
        view::with_past(self, host).await
    }

    /// Lists VMs, of all hosts or one.
    ///
    /// # Errors
    ///
    /// Fails if there is no such host.
    pub async fn list_vms(&self, host: &str) -> Result<v1::ListVmsReply, ApiError> {
        let host = if host.is_empty() { None } else { Some(self.resolve_host("host", host)?) };
        let rows = self.store().vms().await?;
        let wanted = rows.iter().filter(|row| host.is_none() || row.host == host);
        let vms = view::vms(self, wanted).await?;
        Ok(v1::ListVmsReply { vms })
    }

    /// Shows one VM, by name or id.
    ///
    /// # Errors
    ///
    /// Fails if there is none, or several of that name.
    pub async fn get_vm(&self, name: &str) -> Result<v1::Vm, ApiError> {
        let row = self.resolve_vm("vm", name).await?;
        view::vm(self, &row).await
    }

    /// Lists migrations, the newest first.
    ///
    /// # Errors
    ///
    /// Fails if there is no such VM.
    pub async fn list_migrations(
        &self,
        asked: &v1::ListMigrationsRequest,
    ) -> Result<v1::ListMigrationsReply, ApiError> {
        let vm = if asked.vm.is_empty() {
            None
        } else {
            Some(self.resolve_vm("vm", &asked.vm).await?.id)
        };
        let open = if asked.open || asked.stuck { OnlyOpen::Open } else { OnlyOpen::All };
        let limit = if asked.limit == 0 { LIST_LIMIT } else { asked.limit };
        let rows = self.store().migrations(&Filter { vm, open, limit }).await?;
        let mut migrations = view::summaries(self, &rows).await?;
        if asked.stuck {
            migrations.retain(|migration| migration.stuck.is_some());
        }
        let seen = picture::reported(self).await?;
        let halves = open_halves(&seen)
            .iter()
            .filter(|half| vm.is_none_or(|vm| half.vm() == vm))
            .map(view::half)
            .collect();
        Ok(v1::ListMigrationsReply { migrations, halves })
    }

    /// Shows one migration with its log.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub async fn get_migration(&self, id: &str) -> Result<v1::Migration, ApiError> {
        let row = self.migration_row(migration_id(id)?).await?;
        view::migration(self, &row).await
    }

    /// Streams one migration: at once, at each change, and while data crosses; ends after its last
    /// phase.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub async fn watch_migration(
        self: &Arc<Self>,
        id: &str,
    ) -> Result<BoxStream<'static, Result<v1::Migration, ApiError>>, ApiError> {
        let id = migration_id(id)?;
        let bell = self.live.subscribe(id);
        let first = self.migration_row(id).await?;
        let first = view::migration(self, &first).await?;
        let watching = Watching { planner: Arc::clone(self), id, bell, last: first.clone() };
        let rest = stream::unfold(Some(watching), next_change);
        Ok(stream::once(async move { Ok(first) }).chain(rest).boxed())
    }

    /// Finds a VM by id, or else by name.
    pub(super) async fn resolve_vm(
        &self,
        field: &'static str,
        name: &str,
    ) -> Result<VmRow, ApiError> {
        if name.is_empty() {
            return Err(ApiError::Invalid { field, problem: "is missing".to_owned() });
        }
        if let Ok(id) = name.parse::<VmId>()
            && let Some(vm) = self.store().vm(id).await?
        {
            return Ok(vm);
        }
        let mut named = self.store().vms_named(name).await?;
        match named.len() {
            0 => Err(ApiError::NotFound { kind: "VM", name: name.to_owned() }),
            1 => Ok(named.remove(0)),
            count => Err(ApiError::Ambiguous { name: name.to_owned(), count }),
        }
    }

    /// Finds a host by id, or else by display name.
    pub(super) fn resolve_host(&self, field: &'static str, name: &str) -> Result<HostId, ApiError> {
        if name.is_empty() {
            return Err(ApiError::Invalid { field, problem: "is missing".to_owned() });
        }
        self.parts
            .inventory
            .resolve(name)
            .ok_or_else(|| ApiError::NotFound { kind: "host", name: name.to_owned() })
    }
}

struct Watching {
    planner: Arc<Planner>,
    id: MigrationId,
    bell: tokio::sync::watch::Receiver<u64>,
    last: v1::Migration,
}

/// Waits for the next difference that is worth telling; `None` once nothing more will happen.
async fn next_change(
    watching: Option<Watching>,
) -> Option<(Result<v1::Migration, ApiError>, Option<Watching>)> {
    let mut watching = watching?;
    if !watching.last.completed.is_empty() {
        return None;
    }
    tokio::select! {
        changed = watching.bell.changed() => { changed.ok()?; }
        () = tokio::time::sleep(WATCH_IDLE) => {}
        () = watching.planner.parts.shutdown.requested() => return None,
    }
    let pace = tokio::time::sleep(WATCH_PACE);
    tokio::pin!(pace);
    let mut due = false;
    loop {
        let now = match look(&watching).await {
            Ok(now) => now,
            Err(error) => return Some((Err(error), None)),
        };
        // A phase is told at once; figures only as fast as anyone looks.
        if due || now.seq != watching.last.seq || !now.completed.is_empty() {
            watching.last = now.clone();
            return Some((Ok(now), Some(watching)));
        }
        tokio::select! {
            () = &mut pace => due = true,
            changed = watching.bell.changed() => { changed.ok()?; }
        }
    }
}

async fn look(watching: &Watching) -> Result<v1::Migration, ApiError> {
    let row = watching.planner.migration_row(watching.id).await?;
    view::migration(&watching.planner, &row).await
}
