//! Beginning one move for the sake of an emptying.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, info};
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, drain, job};
use vmferry_planner_core::maintenance::Mode;
use vmferry_planner_core::migration::{Blocker, Guest, Migration, Opening};
use vmferry_proto::v1;
use vmferry_types::{HostId, Method, MigrationId, PowerState, VmId};

use super::{Run, Written};
use crate::admission::{self, Found};
use crate::clock;
use crate::planner::fresh_admission;
use crate::queue::passes;
use crate::store::{
    Admission, BegunFor, EmptyingChange, Grant, NewMigration, Notes, Refused, Sake, StoreError,
    VmRow,
};

/// One that could not be begun, for a reason that passes, is tried again after so long.
const AGAIN: Duration = Duration::from_secs(2);

/// One move that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) vm: VmId,
    pub(super) planned: HostId,
    pub(super) mode: Mode,
    pub(super) way: Way,
    /// Where it is to be by now. Somebody else may have moved it since that was decided.
    pub(super) from: HostId,
}

/// Which way a VM goes, and whether it may wait for room on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Out for a job: anywhere if not where it was planned, and in the queue if nowhere now.
    Out,
    /// Out for a drain, which plans again all the time: nothing of it waits in the queue.
    Drained,
    /// Back: there or nowhere.
    Back,
}

/// How a VM is carried, and how its guest is.
#[derive(Clone, Copy)]
struct Carried {
    method: Method,
    found: Guest,
}

impl Carried {
    const LIVE: Self = Self { method: Method::Precopy, found: Guest::Present };
    /// Granted by the policy, by name.
    const SHUT_DOWN: Self = Self { method: Method::Cold, found: Guest::Present };
    const OFF: Self = Self { method: Method::Cold, found: Guest::PoweredOff };
}

/// Where a VM may go now.
enum Door {
    Go(Result<Grant, String>),
    Later,
    Never(Vec<Blocker>),
}

impl Run<'_> {
    pub(super) async fn begin(&mut self, begin: Begin) -> Result<Written, StoreError> {
        let now = Instant::now();
        if self.begins_due.get(&begin.vm).is_some_and(|due| now < *due) {
            return Ok(Written::Nothing);
        }
        self.begins_due.insert(begin.vm, now + AGAIN);
        let Some(vm) = self.planner.store().vm(begin.vm).await? else {
            return Ok(Written::Nothing);
        };
        // What else is so is seen with the next facts.
        let (Some(source), None) = (&vm.host, vm.admission) else {
            return Ok(Written::Nothing);
        };
        if *source != begin.from {
            return Ok(Written::Nothing);
        }
        let carried = match (vm.power, begin.mode) {
            (PowerState::Running, Mode::Live) => Carried::LIVE,
            (PowerState::Running, Mode::Cold) => Carried::SHUT_DOWN,
            (PowerState::Stopped, Mode::Live | Mode::Cold) => Carried::OFF,
            (PowerState::Starting | PowerState::Stopping | PowerState::Lost, _) => {
                return Ok(Written::Nothing);
            }
        };
        let sake = self.sake();
        match self.look(&begin, &vm, source, (carried.method, &sake)).await? {
            Door::Go(grant) => self.open(&vm, (source.clone(), carried), sake, grant).await,
            Door::Later => Ok(Written::Nothing),
            Door::Never(blockers) => self.not_begun(vm.id, words(&blockers)).await,
        }
    }

    /// Returns for whose sake it is, and what that allows.
    fn sake(&self) -> Sake {
        let policy = self.row.emptying.policy();
        Sake {
            priority: self.row.emptying.kind().priority(),
            emptying: self.row.id().to_string(),
            crossing: policy.crossing,
            pins: policy.pins,
            reserve_memory_percent: Some(policy.reserve_memory_percent.value()),
            reserve_cpu_percent: Some(policy.reserve_cpu_percent.value()),
            max_parallel: Some(policy.max_parallel.get()),
        }
    }

    async fn look(
        &self,
        begin: &Begin,
        vm: &VmRow,
        source: &HostId,
        how: (Method, &Sake),
    ) -> Result<Door, StoreError> {
        let there =
            admission::destination(self.planner, vm, source, Some(&begin.planned), how).await?;
        let refused = match there {
            Found::Destination(grant) => return Ok(Door::Go(Ok(grant))),
            Found::Wait { blockers, .. } | Found::Never { blockers } => blockers,
        };
        // As many as may are on their way there: their turn ends by itself.
        let busy = |blocker: &Blocker| {
            blocker.host.as_ref() != Some(&begin.planned)
                || matches!(blocker.code.as_str(), "inbound_cap" | "outbound_cap")
        };
        if refused.iter().any(|of| of.host.as_ref() == Some(&begin.planned))
            && refused.iter().all(busy)
        {
            return Ok(Door::Later);
        }
        if begin.way == Way::Back {
            return Ok(never_or_later(refused));
        }
        Ok(match admission::destination(self.planner, vm, source, None, how).await? {
            Found::Destination(grant) => Door::Go(Ok(grant)),
            Found::Wait { note, blockers } => match begin.way {
                Way::Out => Door::Go(Err(note)),
                Way::Back => Door::Later,
                // The plan, which is made of figures, would choose the same host again.
                Way::Drained => Door::Never(together(refused, blockers)),
            },
            Found::Never { blockers } => match begin.way {
                Way::Out | Way::Back => never_or_later(blockers),
                Way::Drained => Door::Never(blockers),
            },
        })
    }

    /// Opens the migration together with the row that names it.
    async fn open(
        &mut self,
        vm: &VmRow,
        (source, carried): (HostId, Carried),
        sake: Sake,
        grant: Result<Grant, String>,
    ) -> Result<Written, StoreError> {
        let id = fresh_admission();
        let terms = match self.planner.terms(&v1::MigrateVmRequest::default()) {
            Ok(terms) => terms,
            Err(error) => return self.not_begun(vm.id, error.to_string()).await,
        };
        let opening = Opening {
            id,
            vm: vm.id,
            source,
            method: carried.method,
            found: carried.found,
            terms,
            generation: vm.generation,
            deadline: self.planner.queue_deadline(0),
        };
        let migration = match Migration::open(opening) {
            Ok(migration) => migration,
            Err(error) => return self.not_begun(vm.id, error.to_string()).await,
        };
        let Some(change) = self.begun(vm.id, id) else { return Ok(Written::Nothing) };
        let demand = admission::demand_on(self.planner, vm);
        let asked = v1::MigrateVmRequest { vm_name: vm.name.clone(), ..Default::default() };
        let notes = Notes {
            memory_bytes: demand.memory.value(),
            cpu_milli: demand.cpu.value(),
            asked,
            sake,
            ..Notes::default()
        };
        let new = NewMigration {
            migration,
            vm_name: vm.name.clone(),
            request: None,
            notes,
            grant,
            begun_for: Some(Box::new(BegunFor { row: self.row.clone(), change })),
        };
        let points = &self.planner.parts.faults;
        points.pass("before_commit", "emptying_begun").await;
        let admission = self.planner.store().admit(&new, clock::now_us()).await?;
        match admission {
            Admission::Admitted(row) => {
                points.pass("after_commit", "emptying_begun").await;
                info!(migration_id = %id, vm_id = %vm.id,
                    phase = row.migration.label().label(), "migration opened");
                self.planner.take_up(&row);
                self.planner.hosts_changed();
                self.reread().await
            }
            Admission::Known(_) | Admission::Raced => self.reread().await,
            Admission::Refused(refused) => self.refused(vm.id, &refused).await,
        }
    }

    fn begun(&self, vm: VmId, migration: MigrationId) -> Option<EmptyingChange> {
        let event = match &self.row.emptying {
            Emptying::Job(_) => EmptyingEvent::Job(job::Event::Begun { vm, migration }),
            Emptying::Drain(_) => EmptyingEvent::Drain(drain::Event::Begun { vm, migration }),
        };
        let after = self.row.emptying.apply(&event).ok()?;
        Some(EmptyingChange { event, after })
    }

    async fn refused(&mut self, vm: VmId, refused: &Refused) -> Result<Written, StoreError> {
        match refused {
            Refused::Pinned { .. } => self.not_begun(vm, refused.to_string()).await,
            // It passes, or is seen with the next facts.
            Refused::UnknownVm
            | Refused::InFlight { .. }
            | Refused::Power { .. }
            | Refused::Moved { .. }
            | Refused::Cordoned { .. }
            | Refused::InboundCap { .. }
            | Refused::OwnLimit { .. }
            | Refused::NoRoom { .. } => {
                debug!(vm_id = %vm, %refused, "not begun now");
                Ok(Written::Nothing)
            }
        }
    }
}

/// A host that could not be asked is not a reason for good, whatever speaks against the others.
fn never_or_later(blockers: Vec<Blocker>) -> Door {
    if blockers.iter().any(|blocker| passes(&blocker.code)) {
        Door::Later
    } else {
        Door::Never(blockers)
    }
}

/// Returns what speaks against the planned host, and then against the others.
fn together(mut planned: Vec<Blocker>, others: Vec<Blocker>) -> Vec<Blocker> {
    let known = |of: &Blocker, all: &[Blocker]| {
        all.iter().any(|one| one.code == of.code && one.host == of.host)
    };
    for other in others {
        if !known(&other, &planned) {
            planned.push(other);
        }
    }
    planned
}

/// Writes reasons as one text.
fn words(blockers: &[Blocker]) -> String {
    let texts: Vec<String> =
        blockers.iter().map(|of| format!("{}: {}", of.code, of.message)).collect();
    if texts.is_empty() { "it was refused without a reason".to_owned() } else { texts.join("; ") }
}
