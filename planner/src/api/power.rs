//! Defining, starting and stopping VMs.

use std::sync::Arc;
use std::time::Duration;

use vmferry_planner_core::doctor::HostSaid;
use vmferry_planner_core::migration::Blocker;
use vmferry_planner_core::queue::Priority;
use vmferry_proto::v1;
use vmferry_types::{Claim, Generation, HostId, MigrationId, PowerState, Seq, VmId};

use super::ApiError;
use super::migrate::request_id;
use crate::admission::{self, Found};
use crate::agents::AgentError;
use crate::definition::{self, Outline};
use crate::planner::{Drives, Planner, fresh_admission, fresh_vm};
use crate::store::{
    AdmitPower, Defined, Deleted, Followed, FromQueue, Lost, NewPower, PowerAction, PowerKind,
    PowerPhase, QueueStart, QueuedStart, Refused, Room, StoreError, VmRow,
};
use crate::telemetry::Chain;
use crate::{clock, picture, view, whereabouts};

/// What became of a start that was asked for.
enum Admitted {
    /// It is under way.
    Start(Box<PowerAction>),
    /// It waits for room.
    Waits,
}

/// What whoever deletes a VM that should run has to say.
const RUNS_NOWHERE: &str = "it-runs-nowhere";
/// Definitions are a few kilobytes; agents take messages of a megabyte, and reports carry all of
/// a host's.
const DEFINITION_BYTES_MAX: usize = 64 << 10;

impl Planner {
    /// Defines a VM if it is new, places it and starts it.
    ///
    /// # Errors
    ///
    /// Says everything that is in the way.
    pub async fn start_vm(self: &Arc<Self>, asked: v1::StartVmRequest) -> Result<v1::Vm, ApiError> {
        let request = request_id(&asked.request_id)?;
        let vm = self.vm_to_start(&asked).await?;
        let host = if asked.host.is_empty() {
            None
        } else {
            Some(self.resolve_host("host", &asked.host)?)
        };
        if vm.admission.is_none() && vm.power == PowerState::Running {
            owned(&vm)?;
            // Asking for what is so already is no error, as long as it is so where it was asked.
            if host.is_none() || host == vm.host {
                return view::vm(self, &vm).await;
            }
            return Err(Refused::Power { power: vm.power }.into());
        }
        let action = match (vm.admission, vm.power) {
            // The same start is under way.
            (Some(admission), PowerState::Starting) => self.store().power(admission).await?,
            (None, PowerState::Starting)
            | (
                _,
                PowerState::Stopped | PowerState::Running | PowerState::Stopping | PowerState::Lost,
            ) => None,
        };
        if let Some(admission) = vm.admission
            && self.waits(admission).await?.is_some()
        {
            // The same start waits for room already.
            return view::vm(self, &vm).await;
        }
        let action = match action {
            Some(action) => Admitted::Start(Box::new(action)),
            None => self.admit_start(&vm, host.as_ref(), request, asked.queue_deadline_ms).await?,
        };
        match action {
            Admitted::Start(action) => {
                self.drive(Drives::Power(action.id));
                self.after(*action, asked.wait_ms).await
            }
            Admitted::Waits => {
                self.wake.notify_one();
                self.get_vm(&vm.id.to_string()).await
            }
        }
    }

    /// Returns the start that waits for room under an id, if there is one.
    async fn waits(&self, admission: MigrationId) -> Result<Option<QueuedStart>, StoreError> {
        let start = self.store().queued_start(admission).await?;
        Ok(start.filter(|start| start.ended_us.is_none()))
    }

    /// Takes a start out of the queue, for the VM is to be stopped.
    async fn give_up_start(&self, vm: &VmRow, start: &QueuedStart) -> Result<v1::Vm, ApiError> {
        let mut start = start.clone();
        while start.ended_us.is_none() {
            const OUTCOME: &str = "its start was cancelled while it waited for room";
            let now = clock::now_us();
            self.store().end_queued_start(start.id, start.seq, OUTCOME, now).await?;
            let known = self.store().queued_start(start.id).await?;
            start = known.ok_or(Refused::UnknownVm)?;
        }
        self.get_vm(&vm.id.to_string()).await
    }

    /// Stops a running VM.
    ///
    /// # Errors
    ///
    /// Says why it cannot be stopped now.
    pub async fn stop_vm(self: &Arc<Self>, asked: v1::StopVmRequest) -> Result<v1::Vm, ApiError> {
        /// As long as a guest that shuts down in order may need.
        const DEADLINE_MS: u64 = 120_000;
        let how = match asked.how.as_str() {
            "" | "powerdown" => "powerdown",
            "quit" => "quit",
            other => {
                return Err(ApiError::Invalid {
                    field: "how",
                    problem: format!("`{other}` is none of powerdown, quit"),
                });
            }
        };
        let vm = self.resolve_vm("vm", &asked.vm).await?;
        if vm.admission.is_none() && matches!(vm.power, PowerState::Stopped) {
            return view::vm(self, &vm).await;
        }
        if let Some(admission) = vm.admission
            && let Some(start) = self.waits(admission).await?
        {
            return self.give_up_start(&vm, &start).await;
        }
        let host = owned(&vm)?.clone();
        let new = NewPower {
            id: fresh_admission(),
            request: None,
            vm: vm.id,
            host,
            kind: PowerKind::Stop,
            how: how.to_owned(),
            deadline_ms: if asked.deadline_ms == 0 { DEADLINE_MS } else { asked.deadline_ms },
            memory: vm.memory,
            cpu: vm.cpu,
            room: Room::new(|_| Ok(())),
            from_queue: FromQueue::No,
        };
        let action = match self.admit_power(&new, "stopping").await? {
            AdmitPower::Admitted(action) | AdmitPower::Known(action) => action,
            AdmitPower::Refused(Refused::InFlight { admission })
                if vm.power == PowerState::Stopping =>
            {
                let known = self.store().power(admission).await?;
                known.ok_or(Refused::InFlight { admission })?
            }
            AdmitPower::Refused(refused) => return Err(refused.into()),
        };
        self.drive(Drives::Power(action.id));
        self.after(action, asked.wait_ms).await
    }

    /// Finds the VM that is asked for, or writes the one that is described.
    async fn vm_to_start(&self, asked: &v1::StartVmRequest) -> Result<VmRow, ApiError> {
        match (asked.vm.is_empty(), asked.definition.is_empty()) {
            (false, true) => self.resolve_vm("vm", &asked.vm).await,
            (_, false) => self.define(&asked.vm, &asked.definition).await,
            (true, true) => Err(ApiError::Invalid {
                field: "vm",
                problem: "give the name or id of a known VM, or a definition".to_owned(),
            }),
        }
    }

    async fn define(&self, name: &str, text: &str) -> Result<VmRow, ApiError> {
        let invalid = |error: definition::DefinitionError| ApiError::Invalid {
            field: "definition",
            problem: format!("{} {}", error.field, error.problem),
        };
        if text.len() > DEFINITION_BYTES_MAX {
            return Err(ApiError::Invalid {
                field: "definition",
                problem: format!("is longer than {DEFINITION_BYTES_MAX} bytes"),
            });
        }
        let text = match self.defined_without_identity(text).await? {
            Some(known) => return Ok(known),
            None => definition::with_identity(text, fresh_vm()).map_err(invalid)?,
        };
        let outline = Outline::read(&text).map_err(invalid)?;
        if !name.is_empty() && name != outline.name && name != outline.id.to_string() {
            return Err(ApiError::Invalid {
                field: "vm",
                problem: format!("`{name}` is not the VM of the definition, `{}`", outline.name),
            });
        }
        let row = VmRow {
            id: outline.id,
            name: outline.name.clone(),
            host: None,
            power: PowerState::Stopped,
            generation: Generation::from_stored(0),
            claim: Claim::from_stored(0),
            admission: None,
            error: String::new(),
            definition: text,
            resolved_machine: String::new(),
            memory: outline.memory,
            cpu: outline.cpu,
        };
        match self.store().define_vm(&row, clock::now()).await? {
            Defined::New(row) => Ok(row),
            // The same text again is the same VM.
            Defined::Taken(known) if known.id == row.id && known.definition == row.definition => {
                Ok(known)
            }
            Defined::Taken(known) if known.id == row.id => {
                Err(ApiError::Taken { field: "uuid", value: row.id.to_string(), vm: known.id })
            }
            Defined::Taken(known) => {
                Err(ApiError::Taken { field: "name", value: row.name, vm: known.id })
            }
        }
    }

    /// Finds the VM that was defined by this very text and given an identity then.
    async fn defined_without_identity(&self, text: &str) -> Result<Option<VmRow>, ApiError> {
        let Some(name) = definition::name_without_identity(text) else { return Ok(None) };
        let named = self.store().vms_named(&name).await?;
        let same = |row: &VmRow| {
            definition::with_identity(text, row.id).is_ok_and(|given| given == row.definition)
        };
        Ok(named.into_iter().find(same))
    }

    async fn admit_start(
        &self,
        vm: &VmRow,
        asked: Option<&HostId>,
        request: Option<String>,
        deadline_ms: u64,
    ) -> Result<Admitted, ApiError> {
        let outline = Outline::read(&vm.definition).map_err(|error| ApiError::Invalid {
            field: "definition",
            problem: format!("{} {}", error.field, error.problem),
        })?;
        let grant = match admission::start_host(self, vm, &outline, asked).await? {
            Found::Destination(grant) => grant,
            Found::Wait { note, .. } => {
                return self.queue(vm, asked, request, (note, deadline_ms)).await;
            }
            Found::Never { blockers } => return Err(ApiError::Blocked { blockers }),
        };
        self.nothing_runs(vm, &grant.destination).await?;
        let new = NewPower {
            id: fresh_admission(),
            request,
            vm: vm.id,
            host: grant.destination,
            kind: PowerKind::Start,
            how: String::new(),
            deadline_ms: 0,
            memory: outline.memory,
            cpu: outline.cpu,
            room: grant.room,
            from_queue: FromQueue::No,
        };
        match self.admit_power(&new, "starting").await? {
            AdmitPower::Admitted(action) | AdmitPower::Known(action) => {
                Ok(Admitted::Start(Box::new(action)))
            }
            // Another one took the room meanwhile.
            AdmitPower::Refused(Refused::NoRoom { note }) if asked.is_none() => {
                self.queue(vm, asked, new.request, (note, deadline_ms)).await
            }
            AdmitPower::Refused(refused) => Err(refused.into()),
        }
    }

    /// Lets a start wait for room.
    async fn queue(
        &self,
        vm: &VmRow,
        asked: Option<&HostId>,
        request: Option<String>,
        (note, deadline_ms): (String, u64),
    ) -> Result<Admitted, ApiError> {
        let start = QueuedStart {
            id: fresh_admission(),
            request,
            vm: vm.id,
            asked_host: asked.cloned(),
            priority: Priority::Operator,
            seq: Seq::FIRST,
            asked_us: clock::now_us(),
            blocked_since: clock::now(),
            deadline: self.queue_deadline(deadline_ms),
            note,
            ended_us: None,
            outcome: String::new(),
        };
        self.parts.faults.pass("before_commit", "start_queued").await;
        match self.store().queue_start(&start, clock::now()).await? {
            QueueStart::Queued(start) => {
                self.parts.faults.pass("after_commit", "start_queued").await;
                tracing::info!(migration_id = %start.id, vm_id = %vm.id, note = start.note,
                    "a start waits for room");
                Ok(Admitted::Waits)
            }
            QueueStart::Known(_) => Ok(Admitted::Waits),
            QueueStart::Refused(refused) => Err(refused.into()),
        }
    }

    /// Writes an admission down. The points around it are those of a test build.
    pub(crate) async fn admit_power(
        &self,
        new: &NewPower,
        point: &'static str,
    ) -> Result<AdmitPower, StoreError> {
        self.parts.faults.pass("before_commit", point).await;
        let admitted = self.store().admit_power(new, clock::now_us()).await?;
        if matches!(admitted, AdmitPower::Admitted(_)) {
            self.parts.faults.pass("after_commit", point).await;
        }
        Ok(admitted)
    }

    /// Makes sure that nothing of a VM runs anywhere before it is started, and learns from whoever
    /// knows of a newer owner than the store.
    pub(crate) async fn nothing_runs(&self, vm: &VmRow, target: &HostId) -> Result<(), ApiError> {
        // While something is under way for it, the transaction says so.
        if vm.admission.is_some() || vm.power == PowerState::Running {
            return Ok(());
        }
        // A host that is dead is not asked. Another planner may have heard it since.
        if vm.host.as_ref().is_some_and(|host| self.parts.inventory.dead(host).is_some()) {
            self.parts.inventory.reread(self.store()).await?;
        }
        let found = whereabouts::look(self, vm, Some(target)).await;
        if !found.blockers.is_empty() {
            return Err(ApiError::Blocked { blockers: found.blockers });
        }
        if let Some(newer) = found.newer {
            // Every host was heard and none has it: it is nobody's, under a generation that nobody
            // was ever given.
            let host = vm.host.clone().unwrap_or_else(|| target.clone());
            let generation = newer.next();
            let followed =
                Followed { vm: vm.id, host, power: vm.power, generation, claim: found.claim };
            self.store().follow_vm(&followed, clock::now()).await?;
            tracing::warn!(vm_id = %vm.id, known = %vm.generation, %generation,
                "the store was behind: it has learnt a newer generation");
        } else if found.claim > vm.claim {
            self.store().raise_claim(vm.id, found.claim, clock::now()).await?;
        }
        Ok(())
    }

    /// Forgets a VM that is stopped or lost. Its disks are not touched.
    ///
    /// # Errors
    ///
    /// Says why it cannot be forgotten now.
    pub async fn delete_vm(
        &self,
        asked: v1::DeleteVmRequest,
    ) -> Result<v1::DeleteVmReply, ApiError> {
        let vm = self.resolve_vm("vm", &asked.vm).await?;
        if let Some(admission) = vm.admission {
            return Err(Refused::InFlight { admission }.into());
        }
        match asked.confirmation.as_str() {
            RUNS_NOWHERE if vm.power == PowerState::Running => self.runs_nowhere(&vm).await?,
            "" if vm.power == PowerState::Running => {
                owned(&vm)?;
            }
            "" | RUNS_NOWHERE => {}
            other => {
                return Err(ApiError::Invalid {
                    field: "confirmation",
                    problem: format!("`{other}` is not \"{RUNS_NOWHERE}\""),
                });
            }
        }
        let found = whereabouts::look(self, &vm, None).await;
        if !found.blockers.is_empty() {
            return Err(ApiError::Blocked { blockers: found.blockers });
        }
        match self.store().delete_vm(vm.id, clock::now()).await? {
            Deleted::Done => {}
            Deleted::Unknown => {
                return Err(ApiError::NotFound { kind: "VM", name: asked.vm });
            }
            Deleted::Refused(refused) => return Err(refused.into()),
        }
        tracing::info!(vm_id = %vm.id, name = vm.name, "VM deleted");
        let left = self.forget(&vm).await;
        Ok(v1::DeleteVmReply { id: vm.id.to_string(), name: vm.name, left })
    }

    /// Takes a VM that should run for lost: every host that may have it was asked just now, and
    /// said that it has no process of it, or is dead.
    async fn runs_nowhere(&self, vm: &VmRow) -> Result<(), ApiError> {
        let seen = picture::live(self).await?;
        let named = seen.hosts.iter().filter(|host| may_have(host, vm.id));
        let mut blockers: Vec<Blocker> = named
            .map(|host| Blocker {
                code: "runs_elsewhere".to_owned(),
                message: format!(
                    "host {} has a QEMU process of VM {}, or cannot say that it has none: see `vmferry doctor {}`",
                    host.id, vm.name, vm.name
                ),
                host: Some(host.id.clone()),
            })
            .collect();
        let mut silent = picture::not_whole(&seen);
        // One that never introduced itself to this store may have it as well.
        let expected = self.parts.config.hosts.keys().chain(&vm.host);
        silent
            .extend(expected.filter(|id| !seen.hosts.iter().any(|host| host.id == **id)).cloned());
        blockers.extend(silent.into_iter().map(|host| Blocker {
            code: "not_heard".to_owned(),
            message: format!(
                "host {host} did not say all that it has: VM {} may run there. Wait for it, or, if it is down for good, power it off and declare it dead",
                vm.name
            ),
            host: Some(host),
        }));
        if !blockers.is_empty() {
            return Err(ApiError::Blocked { blockers });
        }
        let Some(host) = vm.host.clone() else { return Ok(()) };
        let lost = Lost {
            vm: vm.id,
            host,
            generation: vm.generation,
            claim: vm.claim,
            cause: "every host was asked, and none has it".to_owned(),
        };
        if self.store().mark_lost(&lost, clock::now()).await? {
            tracing::warn!(vm_id = %vm.id, name = vm.name, "VM runs on no host: it is lost");
        }
        Ok(())
    }

    /// Lets the host that has a deleted VM forget its definition; says what is left there if it
    /// does not. What is left harms nobody: its agent lists it as an orphan.
    async fn forget(&self, vm: &VmRow) -> String {
        let Some(host) = &vm.host else { return String::new() };
        let forgotten = self.forget_at(vm, host).await;
        match forgotten {
            Ok(()) => String::new(),
            // It has nothing of it.
            Err(error) if error.code() == "unknown_vm" => String::new(),
            Err(error) => {
                let error = Chain(&error).to_string();
                tracing::warn!(vm_id = %vm.id, host_id = %host, error, "definition not forgotten");
                format!("host {host} may still have its definition, as an orphan: {error}")
            }
        }
    }

    async fn forget_at(&self, vm: &VmRow, host: &HostId) -> Result<(), AgentError> {
        let agents = &self.parts.agents;
        let migration_id = fresh_admission().to_string();
        let claim = vm.claim.next().value();
        let (vm_id, generation) = (vm.id.to_string(), vm.generation.value());
        let claimed = v1::ClaimRequest {
            vm_id: vm_id.clone(),
            migration_id: migration_id.clone(),
            generation,
            claim,
            hold_limit_ms: 0,
        };
        agents.claim(host, claimed).await?;
        let fence = v1::Fence { vm_id, migration_id, generation, claim, step: 1 };
        let action = Some(v1::execute_request::Action::ForgetVm(v1::ForgetVm {}));
        agents.execute(host, v1::ExecuteRequest { fence: Some(fence), action }).await?;
        Ok(())
    }

    /// Waits for a start or stop as long as asked, and answers with the VM.
    async fn after(&self, action: PowerAction, wait_ms: u64) -> Result<v1::Vm, ApiError> {
        let mut changes = self.power_changes();
        let deadline = tokio::time::sleep(Duration::from_millis(wait_ms));
        tokio::pin!(deadline);
        let mut action = action;
        while action.phase == PowerPhase::Open && wait_ms > 0 {
            tokio::select! {
                changed = changes.changed() => {
                    if changed.is_err() {
                        break;
                    }
                }
                () = &mut deadline => break,
            }
            if let Some(known) = self.store().power(action.id).await? {
                action = known;
            }
        }
        let vm = self.store().vm(action.vm).await?;
        let vm =
            vm.ok_or_else(|| ApiError::NotFound { kind: "VM", name: action.vm.to_string() })?;
        if action.phase == PowerPhase::Failed {
            return Err(ApiError::Failed {
                what: action.kind.label(),
                vm: vm.name,
                error: action.record.error,
            });
        }
        view::vm(self, &vm).await
    }
}

/// Says whether a host has a process of a VM, or may have one: a journal that was lost names none,
/// and the QEMU that it forgot runs on as a stranger.
fn may_have(host: &HostSaid, vm: VmId) -> bool {
    let id = vm.to_string();
    picture::names_process(host, vm) || host.strangers.iter().any(|stranger| stranger.contains(&id))
}

/// Returns the host that a VM belongs to. One that waits for room or was lost may have none; the
/// planner writes no row of a running one without: that record was damaged, and a person has to see
/// to it.
fn owned(vm: &VmRow) -> Result<&HostId, ApiError> {
    match (&vm.host, vm.power) {
        (Some(host), _) => Ok(host),
        (None, power @ (PowerState::Stopped | PowerState::Starting | PowerState::Lost)) => {
            Err(Refused::Power { power }.into())
        }
        (None, power @ (PowerState::Running | PowerState::Stopping)) => {
            let blocker = Blocker {
                code: "no_host".to_owned(),
                message: format!(
                    "VM {} is {power} by the store, and on no host: see `vmferry doctor {}`; if none has it, forget it with `vmferry vm delete {} --it-runs-nowhere`",
                    vm.name, vm.name, vm.name
                ),
                host: None,
            };
            Err(ApiError::Blocked { blockers: vec![blocker] })
        }
    }
}
