//! A human's word on what nothing proves: which side of a migration is the right one.
//!
//! Two kinds of migrations need it: a row that failed undecided, and halves that no row drives. The
//! first goes on in its row. The second is ended here, step by step under one new claim; whatever
//! was done before a crash is seen by the next attempt, which goes on from there.

use std::sync::Arc;

use vmferry_planner_core::doctor::{HalfSide, HostSaid, OpenHalf, Picture, Standing, open_halves};
use vmferry_planner_core::evidence::{Continued, RunState};
use vmferry_planner_core::migration::{Blocker, Cleanup, Event, GoneProof, Keep, Phase, ProofKind};
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{Bytes, Claim, Generation, HostId, MigrationId, MilliCpu, PowerState, VmId};

use super::{ApiError, migration_id, too_late};
use crate::driver::seen::gone_message;
use crate::planner::Planner;
use crate::store::{Adopted, Commit, Followed, Lost, MigrationRow, Refused, VmRow};
use crate::{clock, picture, view};

/// What whoever resolves a migration has to have done.
const CONFIRMATION: &str = "i-have-checked";

/// Which side is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
    Neither,
}

impl Side {
    fn read(text: &str) -> Result<Self, ApiError> {
        match text {
            "source" => Ok(Self::Source),
            "destination" => Ok(Self::Destination),
            "neither" => Ok(Self::Neither),
            other => Err(ApiError::Invalid {
                field: "keep",
                problem: format!("`{other}` is none of source, destination, neither"),
            }),
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Neither => "neither",
        }
    }
}

impl Planner {
    /// Keeps one side of an undecided migration and ends the other, proven.
    ///
    /// # Errors
    ///
    /// Refuses a migration that is driven, a side that is proven gone, and whatever is not known.
    pub async fn resolve_migration(
        self: &Arc<Self>,
        asked: v1::ResolveMigrationRequest,
    ) -> Result<v1::Migration, ApiError> {
        let id = migration_id(&asked.id)?;
        let keep = Side::read(&asked.keep)?;
        if asked.confirmation != CONFIRMATION {
            return Err(ApiError::Invalid {
                field: "confirmation",
                problem: format!(
                    "has to be \"{CONFIRMATION}\": nothing proves which side is right, so look at both guests first"
                ),
            });
        }
        let row = self.store().migration(id).await?;
        if let Some(row) = row.as_ref().filter(|row| row.ended_us.is_none()) {
            let Some(overtaken) = overtaken(row, &picture::live(self).await?) else {
                return self.resolve_row(row, keep).await;
            };
            // What is left of it on hosts is shown as open halves, and is for the next word.
            let closed = self.close(row.clone(), overtaken).await?;
            return view::migration(self, &closed).await;
        }
        let seen = picture::live(self).await?;
        let halves: Vec<OpenHalf> =
            open_halves(&seen).into_iter().filter(|half| half.migration == id).collect();
        let Some(first) = halves.first() else {
            return match row {
                Some(row) => Err(blocked(
                    "ended",
                    None,
                    format!(
                        "migration {id} has ended as {}, and no host has a half of it: there is nothing to resolve",
                        row.migration.label()
                    ),
                )),
                None => Err(ApiError::NotFound { kind: "migration", name: asked.id }),
            };
        };
        let vm = match self.store().vm(first.vm()).await? {
            Some(row) => Some(row),
            None => self.adopt_half(&halves).await?,
        };
        let destination = row.as_ref().and_then(|row| row.migration.destination());
        let expected = self.parts.config.hosts.keys().chain(destination).cloned();
        let ends = Ends::of(&seen, id, &halves, vm, expected)?;
        let words = self.end_halves(&ends, keep).await?;
        tracing::warn!(migration_id = %id, vm_id = %ends.vm, keep = keep.label(), words, "halves resolved by an operator");
        Ok(ends.message(keep, words))
    }

    async fn resolve_row(
        self: &Arc<Self>,
        row: &MigrationRow,
        keep: Side,
    ) -> Result<v1::Migration, ApiError> {
        let undecided =
            matches!(&row.migration.phase, Phase::Failed { cleanup: Cleanup::Undecided, .. });
        if !undecided {
            return Err(blocked(
                "driven",
                None,
                format!(
                    "migration {} is {} and is driven: it needs no word (see what it waits for with `vmferry migration show {}`)",
                    row.migration.id,
                    row.migration.label(),
                    row.migration.id
                ),
            ));
        }
        let keep = match keep {
            Side::Destination => {
                let host = row.migration.destination().cloned();
                return Err(blocked(
                    "proven_gone",
                    host,
                    format!(
                        "the destination's QEMU is proven gone ({}): keep the source, or neither",
                        row.migration.phase.cause().map(ToString::to_string).unwrap_or_default()
                    ),
                ));
            }
            Side::Source => {
                self.source_lives(row).await?;
                Keep::Source
            }
            Side::Neither => Keep::Neither,
        };
        let mut row = row.clone();
        loop {
            let event = Event::Resolved { keep };
            let entries =
                row.migration.advance(event).map_err(|refusal| too_late(&row, refusal))?;
            match self.store().commit(&row, &entries, &row.notes, clock::now_us()).await? {
                Commit::Raced => row = self.migration_row(row.migration.id).await?,
                Commit::Done(after) => {
                    tracing::warn!(migration_id = %after.migration.id, event = "resolved",
                        phase = after.migration.label().label(), "phase changed");
                    self.nudge(after.migration.id);
                    self.take_up(&after);
                    return view::migration(self, &after).await;
                }
            }
        }
    }

    /// Closes a row that agents know better than. Nothing is touched.
    async fn close(
        &self,
        mut row: MigrationRow,
        (host, known): (HostId, Generation),
    ) -> Result<MigrationRow, ApiError> {
        loop {
            let event = Event::Overtaken { host: host.clone(), known };
            let entries =
                row.migration.advance(event).map_err(|refusal| too_late(&row, refusal))?;
            match self.store().commit(&row, &entries, &row.notes, clock::now_us()).await? {
                Commit::Raced => row = self.migration_row(row.migration.id).await?,
                Commit::Done(after) => {
                    tracing::warn!(migration_id = %after.migration.id, event = "overtaken",
                        host_id = %host, %known, "migration closed by an operator");
                    self.nudge(after.migration.id);
                    return Ok(*after);
                }
            }
        }
    }

    /// Takes a VM into the store of which only halves are left: what is decided about it has to be
    /// written somewhere before anybody hears it. Its host is where its guest is, as far as that is
    /// known.
    async fn adopt_half(&self, halves: &[OpenHalf]) -> Result<Option<VmRow>, ApiError> {
        let source = halves.iter().find(|half| half.side == HalfSide::Source);
        let Some(half) = source.or_else(|| halves.first()) else { return Ok(None) };
        let reported = self.parts.inventory.reported(half.vm());
        let told = reported.iter().find(|(host, _)| *host == half.host).map(|(_, told)| told);
        let told = told.cloned().unwrap_or_default();
        let row = VmRow {
            id: half.vm(),
            name: half.there.name.clone(),
            host: Some(half.host.clone()),
            power: PowerState::Running,
            generation: halves.iter().map(OpenHalf::generation).fold(half.generation(), Ord::max),
            claim: halves.iter().map(OpenHalf::claim).fold(half.claim(), Ord::max),
            admission: None,
            error: String::new(),
            definition: told.definition,
            resolved_machine: told.resolved_machine,
            memory: Bytes(told.configured_memory_bytes),
            cpu: MilliCpu(told.cpu_milli),
        };
        Ok(match self.store().adopt_vm(&row, clock::now()).await? {
            Adopted::New => Some(row),
            Adopted::Known(row) => Some(row),
            Adopted::Deleted(_) => None,
        })
    }

    /// Makes sure that the source's QEMU is there to go on.
    async fn source_lives(&self, row: &MigrationRow) -> Result<(), ApiError> {
        let source = &row.migration.source;
        let look = v1::ObserveRequest { vm_id: row.migration.vm.to_string(), claim: 0 };
        let seen = self.parts.agents.observe(source, look).await?;
        let alive = seen.qemu.as_ref().is_some_and(|qemu| qemu.alive) && seen.gone.is_none();
        if alive {
            return Ok(());
        }
        Err(blocked(
            "proven_gone",
            Some(source.clone()),
            format!(
                "host {source} has no QEMU of the VM any more: the source cannot be kept; give --keep neither, and start the VM from its disks"
            ),
        ))
    }

    /// Ends halves that no row drives. Every step is safe to be the last.
    async fn end_halves(&self, ends: &Ends, keep: Side) -> Result<String, ApiError> {
        match keep {
            Side::Source => ends.nobody_else_has_it(ends.source.as_ref())?,
            Side::Destination => ends.nobody_else_has_it(ends.destination.as_ref())?,
            Side::Neither => {}
        }
        // The next claim, written down before anybody hears it. Whoever else counted as far has it:
        // under one claim two contrary words would each end one side.
        if let Some(row) = &ends.row
            && !self.store().raise_claim(row.id, ends.claim, clock::now()).await?
        {
            return Err(begun_meanwhile(&row.name));
        }
        match keep {
            Side::Source => self.keep_source(ends).await,
            Side::Destination => self.keep_destination(ends).await,
            Side::Neither => self.keep_neither(ends).await,
        }
    }

    async fn keep_source(&self, ends: &Ends) -> Result<String, ApiError> {
        let Some(source) = &ends.source else {
            return Err(blocked(
                "proven_gone",
                None,
                "every host was asked, and none has a source of this migration: it cannot be kept"
                    .to_owned(),
            ));
        };
        if let Some(destination) = ends.destination.as_ref().filter(|half| continued(half)) {
            return Err(blocked(
                "continued",
                Some(destination.host.clone()),
                format!(
                    "the guest was continued on host {}: what stands on host {} is an older past of it. Keep the destination",
                    destination.host, source.host
                ),
            ));
        }
        let seen = self.claim_half(ends, &source.host, ends.generation).await?;
        if !seen.qemu.as_ref().is_some_and(|qemu| qemu.alive) || seen.gone.is_some() {
            return Err(blocked(
                "proven_gone",
                Some(source.host.clone()),
                format!("the source's QEMU on host {} is gone: it cannot be kept", source.host),
            ));
        }
        let proof = match &ends.destination {
            Some(destination) => {
                self.claim_half(ends, &destination.host, ends.generation).await?;
                let destroy = Action::DestroyReceiver(v1::DestroyReceiver {
                    cause: by_word(),
                    source_gone: None,
                });
                self.ended(ends, &destination.host, destroy).await?
            }
            None => ends.nowhere_else(&source.host)?,
        };
        let resume = Action::ResumeSource(v1::ResumeSource { receiver_gone: Some(proof) });
        self.command(ends, &source.host, ends.generation, resume).await?;
        Ok(format!("the guest goes on on host {}; the receiver is gone", source.host))
    }

    async fn keep_destination(&self, ends: &Ends) -> Result<String, ApiError> {
        let Some(destination) = &ends.destination else {
            return Err(blocked("proven_gone", None, "every host was asked, and none has a receiver of this migration: it cannot be kept".to_owned()));
        };
        let host = &destination.host;
        let generation =
            if continued(destination) { ends.generation } else { ends.generation.next() };
        let seen = self.claim_half(ends, host, ends.generation).await?;
        if !seen.qemu.as_ref().is_some_and(|qemu| qemu.alive) || seen.gone.is_some() {
            return Err(blocked(
                "proven_gone",
                Some(host.clone()),
                format!("the receiver on host {host} is gone: it cannot be kept"),
            ));
        }
        if !continued(destination) {
            let complete = seen.transfer.as_ref().is_some_and(|transfer| transfer.complete)
                && RunState::from_qemu(&seen.run_state) == RunState::Paused;
            if !complete {
                return Err(blocked(
                    "incomplete",
                    Some(host.clone()),
                    format!(
                        "the receiver on host {host} does not have everything: it cannot be kept"
                    ),
                ));
            }
        }
        if let Some(source) = &ends.source {
            let seen = self.claim_half(ends, &source.host, generation).await?;
            if RunState::from_qemu(&seen.run_state).has_run() {
                return Err(blocked(
                    "source_runs",
                    Some(source.host.clone()),
                    format!(
                        "the guest runs on host {}: to keep the receiver would undo what it has written since. Keep the source",
                        source.host
                    ),
                ));
            }
            let kill = if continued(destination) {
                Action::ReleaseSource(v1::ReleaseSource::default())
            } else {
                Action::KillSource(v1::KillSource { cause: by_word() })
            };
            self.ended_under(ends, &source.host, generation, kill).await?;
        }
        if let Some(row) = &ends.row {
            let followed = Followed {
                vm: row.id,
                host: host.clone(),
                power: PowerState::Running,
                generation,
                claim: ends.claim,
            };
            if !self.store().follow_vm(&followed, clock::now()).await? {
                return Err(begun_meanwhile(&row.name));
            }
        }
        let go_on = Action::ContinueDestination(v1::ContinueDestination {});
        self.command(ends, host, generation, go_on).await?;
        Ok(format!("the guest goes on on host {host}; the source is gone"))
    }

    async fn keep_neither(&self, ends: &Ends) -> Result<String, ApiError> {
        for half in ends.source.iter().chain(&ends.destination) {
            let seen = self.claim_half(ends, &half.host, ends.generation).await?;
            if RunState::from_qemu(&seen.run_state).has_run() {
                return Err(blocked(
                    "runs",
                    Some(half.host.clone()),
                    format!(
                        "the guest runs on host {}: stop it with `vmferry vm stop`, or keep that side",
                        half.host
                    ),
                ));
            }
        }
        let cause = by_word;
        if let Some(half) = &ends.destination {
            let destroy =
                Action::DestroyReceiver(v1::DestroyReceiver { cause: cause(), source_gone: None });
            self.ended(ends, &half.host, destroy).await?;
        }
        if let Some(half) = &ends.source {
            let kill = Action::KillSource(v1::KillSource { cause: cause() });
            self.ended(ends, &half.host, kill).await?;
        }
        let Some(lost) = ends.lost() else {
            return Ok("what was left of the migration is gone".to_owned());
        };
        self.store().mark_lost(&lost, clock::now()).await?;
        Ok("both ends are gone; start the VM from its disks".to_owned())
    }

    async fn claim_half(
        &self,
        ends: &Ends,
        host: &HostId,
        generation: Generation,
    ) -> Result<v1::VmObservation, ApiError> {
        let claim = v1::ClaimRequest {
            vm_id: ends.vm.to_string(),
            migration_id: ends.migration.to_string(),
            generation: generation.value(),
            claim: ends.claim.value(),
            hold_limit_ms: 0,
        };
        Ok(self.parts.agents.claim(host, claim).await?)
    }

    async fn command(
        &self,
        ends: &Ends,
        host: &HostId,
        generation: Generation,
        action: Action,
    ) -> Result<v1::ExecuteReply, ApiError> {
        // One command at each end under this claim.
        let fence = v1::Fence {
            vm_id: ends.vm.to_string(),
            migration_id: ends.migration.to_string(),
            generation: generation.value(),
            claim: ends.claim.value(),
            step: 1,
        };
        let request = v1::ExecuteRequest { fence: Some(fence), action: Some(action) };
        Ok(self.parts.agents.execute(host, request).await?)
    }

    async fn ended(
        &self,
        ends: &Ends,
        host: &HostId,
        action: Action,
    ) -> Result<v1::GoneProof, ApiError> {
        self.ended_under(ends, host, ends.generation, action).await
    }

    /// Ends a process, and asks for the proof.
    async fn ended_under(
        &self,
        ends: &Ends,
        host: &HostId,
        generation: Generation,
        action: Action,
    ) -> Result<v1::GoneProof, ApiError> {
        let reply = self.command(ends, host, generation, action).await?;
        let seen = reply.observation.and_then(|seen| seen.gone);
        reply.gone.or(seen).ok_or_else(|| {
            blocked(
                "not_proven",
                Some(host.clone()),
                format!(
                    "host {host} did not prove that the process is gone; give the command again"
                ),
            )
        })
    }
}

/// Returns the newest owner that an end's agent knows of, if the row does not know of it: that end
/// obeys the row no more. What other hosts say keeps no driver from going on.
fn overtaken(row: &MigrationRow, seen: &Picture) -> Option<(HostId, Generation)> {
    let is_end =
        |host: &HostId| *host == row.migration.source || row.migration.destination() == Some(host);
    let ends = seen.hosts.iter().filter(|host| is_end(&host.id));
    let said = ends.flat_map(|host| host.vms.iter().map(|there| (&host.id, there)));
    said.filter(|(_, there)| there.vm == row.migration.vm)
        .map(|(host, there)| (host.clone(), there.generation))
        .max_by_key(|(_, generation)| *generation)
        .filter(|(_, known)| *known > row.migration.books().generation)
        .filter(|_| row.migration.destination().is_some())
}

fn by_word() -> String {
    "ended by an operator's word".to_owned()
}

fn continued(half: &OpenHalf) -> bool {
    half.there.continued == Continued::Yes
}

/// Both ends of a migration that no row drives.
struct Ends {
    migration: MigrationId,
    vm: VmId,
    name: String,
    row: Option<VmRow>,
    source: Option<OpenHalf>,
    destination: Option<OpenHalf>,
    hosts: Vec<HostSaid>,
    /// The newest generation that anybody knows.
    generation: Generation,
    /// A claim that is newer than all that anybody knows.
    claim: Claim,
}

impl Ends {
    fn of(
        seen: &Picture,
        migration: MigrationId,
        halves: &[OpenHalf],
        row: Option<VmRow>,
        expected: impl Iterator<Item = HostId>,
    ) -> Result<Self, ApiError> {
        let mut silent = picture::not_whole(seen);
        // One that never introduced itself to this store may have the other half as well.
        silent.extend(expected.filter(|id| !seen.hosts.iter().any(|host| host.id == *id)));
        if !silent.is_empty() {
            let blockers = silent
                .into_iter()
                .map(|host| Blocker {
                    code: "not_connected".to_owned(),
                    message: format!(
                        "host {host} did not say all that it has: the other half may be there. Wait for it, or, if it is down for good, power it off and declare it dead"
                    ),
                    host: Some(host),
                })
                .collect();
            return Err(ApiError::Blocked { blockers });
        }
        if let Some(admission) = row.as_ref().and_then(|row| row.admission) {
            return Err(Refused::InFlight { admission }.into());
        }
        let one = |side: HalfSide| {
            let mut of = halves.iter().filter(|half| half.side == side);
            match (of.next(), of.next()) {
                (half, None) => Ok(half.cloned()),
                (_, Some(second)) => Err(blocked(
                    "several",
                    Some(second.host.clone()),
                    format!(
                        "several hosts have a {} of migration {migration}: end one of them at its host first",
                        side.label()
                    ),
                )),
            }
        };
        let (source, destination) = (one(HalfSide::Source)?, one(HalfSide::Destination)?);
        let either = source.as_ref().or(destination.as_ref());
        let Some(vm) = either.map(OpenHalf::vm) else {
            return Err(ApiError::NotFound { kind: "migration", name: migration.to_string() });
        };
        let name = either.map(|half| half.there.name.clone()).unwrap_or_default();
        let said = seen.hosts.iter().flat_map(|host| &host.vms).filter(|there| there.vm == vm);
        let generations = said.clone().map(|there| there.generation);
        let claims = said.map(|there| there.claim);
        let floor = row.as_ref().map(|row| (row.generation, row.claim));
        let (generation, claim) =
            floor.unwrap_or((Generation::from_stored(0), Claim::from_stored(0)));
        Ok(Self {
            migration,
            vm,
            name,
            source,
            destination,
            hosts: seen.hosts.clone(),
            generation: generations.fold(generation, Ord::max),
            claim: claims.fold(claim, Ord::max).next(),
            row,
        })
    }

    /// Makes sure that the guest of one half is not let go on while a host that has no half of this
    /// migration has the VM as well: it may have arrived there, and gone on from there, since.
    fn nobody_else_has_it(&self, kept: Option<&OpenHalf>) -> Result<(), ApiError> {
        let Some(kept) = kept else { return Ok(()) };
        let halves = || self.source.iter().chain(&self.destination);
        let others = self.hosts.iter().filter(|host| halves().all(|half| half.host != host.id));
        let blockers: Vec<Blocker> = others
            .filter(|host| picture::names_process(host, self.vm))
            .map(|host| Blocker {
                code: "runs_elsewhere".to_owned(),
                message: format!(
                    "host {} has a QEMU process of VM {}, or cannot say that it has none: the guest on host {} must not go on beside it. See `vmferry doctor {}`; to clear the halves away, give --keep neither",
                    host.id, self.name, kept.host, self.name
                ),
                host: Some(host.id.clone()),
            })
            .collect();
        if blockers.is_empty() { Ok(()) } else { Err(ApiError::Blocked { blockers }) }
    }

    /// Returns what is lost once no half is left, unless the VM is, or may be, elsewhere. What its
    /// row says would stay true for ever else: no agent has anything of it to tell of.
    fn lost(&self) -> Option<Lost> {
        let row = self.row.as_ref()?;
        let halves = || self.source.iter().chain(&self.destination);
        let host = row.host.clone().filter(|host| halves().any(|half| half.host == *host))?;
        self.nobody_else_has_it(halves().next()).ok()?;
        Some(Lost {
            vm: self.vm,
            host,
            generation: row.generation,
            claim: self.claim,
            cause: format!("both ends of migration {} were {}", self.migration, by_word()),
        })
    }

    /// Returns the proof that no host but one has a process of the VM: all were asked, and those
    /// that did not answer are dead.
    fn nowhere_else(&self, source: &HostId) -> Result<v1::GoneProof, ApiError> {
        let others = || self.hosts.iter().filter(|host| host.id != *source);
        let holds = |host: &&HostSaid| {
            host.declared.as_ref().is_some_and(|of| of.standing == Standing::Holds)
        };
        let dead = others().find(holds);
        let Some(other) = dead.or_else(|| others().next()) else {
            return Err(blocked(
                "no_destination",
                None,
                "no other host is known: nothing shows that the receiver is gone".to_owned(),
            ));
        };
        let kind =
            if dead.is_some() { ProofKind::HostDeclaredDead } else { ProofKind::NeverStarted };
        Ok(gone_message(&GoneProof {
            kind,
            host: other.id.clone(),
            boot_id: String::new(),
            pid: 0,
            start_time: 0,
            ended: "every other host says that it has no process of the VM".to_owned(),
            at: clock::now(),
            stderr_tail: String::new(),
        }))
    }

    fn message(&self, keep: Side, words: String) -> v1::Migration {
        let host = |half: &Option<OpenHalf>| half.as_ref().map(|half| half.host.to_string());
        let state = match keep {
            Side::Destination => "completed",
            Side::Source => "cancelled",
            Side::Neither => "failed",
        };
        v1::Migration {
            id: self.migration.to_string(),
            vm_id: self.vm.to_string(),
            vm_name: self.name.clone(),
            source_host: host(&self.source).unwrap_or_default(),
            target_host: host(&self.destination).unwrap_or_default(),
            state: state.to_owned(),
            phase: "resolved".to_owned(),
            error: words,
            completed: clock::rfc3339(clock::now()),
            claim: self.claim.value(),
            ..v1::Migration::default()
        }
    }
}

fn begun_meanwhile(vm: &str) -> ApiError {
    let message = format!("something else was begun for VM {vm} meanwhile: look again");
    blocked("moved", None, message)
}

fn blocked(code: &str, host: Option<HostId>, message: String) -> ApiError {
    let blocker = Blocker { code: code.to_owned(), message, host };
    ApiError::Blocked { blockers: vec![blocker] }
}
