//! What operators ask of hosts: cordons, maintenance, drains and retirements.

use std::num::NonZeroU32;
use std::sync::Arc;

use vmferry_planner_core::fleet::Lifecycle;
use vmferry_planner_core::lifecycle::drain::{self, Drain, Goal};
use vmferry_planner_core::lifecycle::job::{self, Job, Returning};
use vmferry_planner_core::lifecycle::request::Asked;
use vmferry_planner_core::lifecycle::{Emptying, EmptyingEvent, EmptyingId, Kind, Policy, Refusal};
use vmferry_planner_core::maintenance::{Crossing, PinsToSource, Strategy};
use vmferry_planner_core::migration::Blocker;
use vmferry_proto::v1;
use vmferry_types::{DrainId, HostId, JobId, Percent, PowerState, Timestamp};

use super::ApiError;
use super::hosts::text;
use crate::driver::emptying::facts;
use crate::planner::{Drives, Planner};
use crate::store::{
    AskHost, Commit, Cordon, EmptyingChange, EmptyingFilter, EmptyingRow, HostAnswer, HostDone,
    NewEmptying, VmRow, Which,
};
use crate::{clock, plan, view};

/// How many migrations of one host are open at once, if nobody says otherwise: two fill a link.
const MAX_PARALLEL: NonZeroU32 = NonZeroU32::new(2).expect("two is not zero");

impl Planner {
    /// Keeps a host from taking placements, in the name of who asks.
    ///
    /// # Errors
    ///
    /// Fails if there is no such host, or without a reason.
    pub async fn cordon_host(
        self: &Arc<Self>,
        asked: v1::CordonHostRequest,
    ) -> Result<v1::Host, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        let by = operator(&asked.by)?;
        let reason = text("reason", &asked.reason)?;
        if reason.is_empty() {
            let problem = "is missing: say why, for whoever finds the host closed".to_owned();
            return Err(ApiError::Invalid { field: "reason", problem });
        }
        let since = clock::now();
        let expires =
            (asked.for_ms > 0).then(|| Timestamp(since.value().saturating_add(asked.for_ms)));
        let cordon = Cordon { host: host.clone(), owner: by.clone(), reason, since, expires };
        let ask = AskHost { cordon: Some(cordon), ..self.ask(&host, Asked::Cordon, by) };
        self.ask_host(&ask).await?;
        tracing::info!(host_id = %host, by = ask.by, "host cordoned");
        self.get_host(host.as_str()).await
    }

    /// Lets a host take placements again, and cancels the drain that holds it.
    ///
    /// # Errors
    ///
    /// Refuses it while a maintenance job has the host.
    pub async fn uncordon_host(
        self: &Arc<Self>,
        asked: v1::UncordonHostRequest,
    ) -> Result<v1::Host, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        let ask = self.ask(&host, Asked::Uncordon, operator(&asked.by)?);
        let done = self.ask_host(&ask).await?;
        tracing::info!(host_id = %host, by = ask.by, lifted = done.lifted.join(", "),
            "host uncordoned");
        self.room_changed();
        self.get_host(host.as_str()).await
    }

    /// Says where the VMs of a host would go, and keeps the answer.
    ///
    /// # Errors
    ///
    /// Refuses it while something else has the host, which is named.
    pub async fn plan_maintenance(
        self: &Arc<Self>,
        asked: v1::MaintenanceRequest,
    ) -> Result<v1::Emptying, ApiError> {
        self.maintain(asked, Asked::Plan).await
    }

    /// Plans anew, and empties the host if every VM has a place.
    ///
    /// # Errors
    ///
    /// Refuses it while something else has the host, which is named.
    pub async fn execute_maintenance(
        self: &Arc<Self>,
        asked: v1::MaintenanceRequest,
    ) -> Result<v1::Emptying, ApiError> {
        self.maintain(asked, Asked::Execute).await
    }

    async fn maintain(
        self: &Arc<Self>,
        asked: v1::MaintenanceRequest,
        what: Asked,
    ) -> Result<v1::Emptying, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        let by = operator(&asked.by)?;
        let policy = self.emptying_policy(&asked.policy.unwrap_or_default())?;
        let job = self.planned(&host, policy, by.clone()).await?;
        let id = job.id;
        let at = job.opened;
        let emptying = Emptying::Job(job);
        let mut changes = Vec::new();
        if what == Asked::Execute {
            let event = EmptyingEvent::Job(job::Event::ExecuteRequested { at });
            // One with blockers, or that is only to be planned, is answered as it is.
            if let Ok(after) = emptying.apply(&event) {
                changes.push(EmptyingChange { event, after });
            }
        }
        let ask = self.opening(
            &host,
            what,
            by,
            NewEmptying { emptying, changes, boot_id: self.boot_of(&host) },
        );
        self.parts.faults.pass("before_commit", "job_opened").await;
        self.ask_host(&ask).await?;
        self.parts.faults.pass("after_commit", "job_opened").await;
        tracing::info!(host_id = %host, emptying_id = %id, asked = what.label(), by = ask.by,
            "maintenance planned");
        self.shown(EmptyingId::Job(id)).await
    }

    /// Plans for all that has to leave a host.
    async fn planned(&self, host: &HostId, policy: Policy, by: String) -> Result<Job, ApiError> {
        let here = self.store().vms_on(host).await?;
        let residents: Vec<&VmRow> = here.iter().filter(|vm| facts::has_to_leave(vm)).collect();
        let preflight = plan::preflight(self, host, &policy, &residents).await?;
        let opening =
            job::Opening { id: fresh_job(), host: host.clone(), policy, by, at: clock::now() };
        let mut job = Job::open(opening, &preflight.plan, &preflight.workloads);
        for one in &mut job.unplaced {
            one.blockers.extend(preflight.refused.get(&one.vm).into_iter().flatten().cloned());
        }
        Ok(job)
    }

    /// Empties a host and keeps it so.
    ///
    /// # Errors
    ///
    /// Refuses it while something else has the host, which is named.
    pub async fn drain_host(
        self: &Arc<Self>,
        asked: v1::DrainHostRequest,
    ) -> Result<v1::Emptying, ApiError> {
        self.drain_for(asked, Goal::Drain).await
    }

    /// Empties a host to be rid of it.
    ///
    /// # Errors
    ///
    /// Refuses it while something else has the host, which is named.
    pub async fn retire_host(
        self: &Arc<Self>,
        asked: v1::DrainHostRequest,
    ) -> Result<v1::Emptying, ApiError> {
        self.drain_for(asked, Goal::Retire).await
    }

    async fn drain_for(
        self: &Arc<Self>,
        asked: v1::DrainHostRequest,
        goal: Goal,
    ) -> Result<v1::Emptying, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        let by = operator(&asked.by)?;
        let policy = self.emptying_policy(&asked.policy.unwrap_or_default())?;
        let id = fresh_drain();
        let opening = drain::Opening {
            id,
            host: host.clone(),
            goal,
            policy,
            by: by.clone(),
            at: clock::now(),
        };
        let what = match goal {
            Goal::Drain => Asked::Drain,
            Goal::Retire => Asked::Retire,
        };
        let ask = self.opening(
            &host,
            what,
            by,
            NewEmptying {
                emptying: Emptying::Drain(Drain::open(opening)),
                changes: Vec::new(),
                boot_id: self.boot_of(&host),
            },
        );
        self.parts.faults.pass("before_commit", "drain_opened").await;
        self.ask_host(&ask).await?;
        self.parts.faults.pass("after_commit", "drain_opened").await;
        tracing::info!(host_id = %host, emptying_id = %id, asked = what.label(), by = ask.by,
            "host is emptied");
        self.shown(EmptyingId::Drain(id)).await
    }

    /// Forgets a host that is retired, or dead with nothing left of it.
    ///
    /// # Errors
    ///
    /// Says why it cannot be forgotten now.
    pub async fn delete_host(
        self: &Arc<Self>,
        asked: v1::DeleteHostRequest,
    ) -> Result<v1::DeleteHostReply, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        let name = self.parts.inventory.row(&host).map(|row| row.name).unwrap_or_default();
        let ask = self.ask(&host, Asked::Delete, operator(&asked.by)?);
        self.nothing_runs_on(&host).await?;
        self.ask_host(&ask).await?;
        self.parts.inventory.forget(&host);
        tracing::info!(host_id = %host, by = ask.by, "host deleted");
        Ok(v1::DeleteHostReply { id: host.to_string(), name })
    }

    /// Refuses to forget a host that has VMs which run: one that was granted its retirement may have
    /// got a guest since, by a move without a planner.
    async fn nothing_runs_on(&self, host: &HostId) -> Result<(), ApiError> {
        let running = |vm: &&VmRow| match vm.power {
            PowerState::Running | PowerState::Starting | PowerState::Stopping => true,
            PowerState::Stopped | PowerState::Lost => false,
        };
        if self.store().lifecycles().await?.get(host) != Some(&Lifecycle::Retired) {
            // Then it is not to be deleted for another reason, which is told.
            return Ok(());
        }
        let vms = self.store().vms_on(host).await?;
        let blockers: Vec<Blocker> = vms
            .iter()
            .filter(running)
            .map(|vm| Blocker {
                code: "vm_on_host".to_owned(),
                message: format!(
                    "VM {} is {} there: move it away or stop it first",
                    vm.name, vm.power
                ),
                host: Some(host.clone()),
            })
            .collect();
        if blockers.is_empty() { Ok(()) } else { Err(ApiError::Blocked { blockers }) }
    }

    /// Takes a host in maintenance back into service.
    ///
    /// # Errors
    ///
    /// Refuses it for a job whose host is not in maintenance.
    pub async fn complete_maintenance(
        self: &Arc<Self>,
        asked: v1::CompleteMaintenanceRequest,
    ) -> Result<v1::Emptying, ApiError> {
        let id = EmptyingId::Job(asked.id.parse().map_err(|_| no_emptying(&asked.id))?);
        let returning = if asked.return_vms { Returning::Return } else { Returning::Stay };
        let event = |row: &EmptyingRow| match row.emptying {
            Emptying::Job(_) => {
                let at = clock::now();
                Ok(EmptyingEvent::Job(job::Event::CompleteRequested { returning, at }))
            }
            Emptying::Drain(_) => Err(no_emptying(&asked.id)),
        };
        let shown = self.say(id, "complete", event).await?;
        self.room_changed();
        Ok(shown)
    }

    /// Gives up a job, a drain or a retirement; what is under way of it is taken back.
    ///
    /// # Errors
    ///
    /// Refuses it for one that is past that.
    pub async fn cancel_emptying(
        self: &Arc<Self>,
        asked: v1::CancelEmptyingRequest,
    ) -> Result<v1::Emptying, ApiError> {
        let row = self.emptying_row(&asked.id).await?;
        let by = operator(&asked.by)?;
        let event = |row: &EmptyingRow| {
            let (by, at) = (by.clone(), clock::now());
            Ok(match row.emptying {
                Emptying::Job(_) => EmptyingEvent::Job(job::Event::CancelRequested { by, at }),
                Emptying::Drain(_) => {
                    EmptyingEvent::Drain(drain::Event::CancelRequested { by, at })
                }
            })
        };
        let shown = self.say(row.id(), "cancel", event).await?;
        self.room_changed();
        Ok(shown)
    }

    /// Writes an operator's word into a row, whoever drives it.
    async fn say(
        self: &Arc<Self>,
        id: EmptyingId,
        what: &'static str,
        event: impl Fn(&EmptyingRow) -> Result<EmptyingEvent, ApiError>,
    ) -> Result<v1::Emptying, ApiError> {
        loop {
            let row = self.emptying_row(&id.to_string()).await?;
            let event = event(&row)?;
            let after = match row.emptying.apply(&event) {
                Ok(after) => after,
                Err(Refusal::Stale) => return self.shown(id).await,
                Err(Refusal::Denied | Refusal::Illegal) => {
                    return Err(ApiError::NotInPhase {
                        what,
                        kind: row.emptying.kind().label(),
                        id: id.to_string(),
                        phase: row.emptying.label(),
                    });
                }
            };
            let changes = [EmptyingChange { event, after }];
            let points = crate::faults::emptying_points(&row.emptying, &changes);
            self.parts.faults.pass_all("before_commit", &points).await;
            match self.store().commit_emptying(&row, &changes, clock::now_us()).await? {
                Commit::Raced => {}
                Commit::Done(after) => {
                    self.parts.faults.pass_all("after_commit", &points).await;
                    tracing::info!(emptying_id = %id, phase = after.emptying.label(), asked = what,
                        "phase changed");
                    return self.shown(id).await;
                }
            }
        }
    }

    /// Lists jobs, drains and retirements, the newest first.
    ///
    /// # Errors
    ///
    /// Fails if there is no such host.
    pub async fn list_emptyings(
        &self,
        asked: &v1::ListEmptyingsRequest,
    ) -> Result<v1::ListEmptyingsReply, ApiError> {
        let host = if asked.host.is_empty() {
            None
        } else {
            Some(self.resolve_host("host", &asked.host)?)
        };
        let kind = match asked.kind.as_str() {
            "" => None,
            label => Some(Kind::from_label(label).ok_or_else(|| ApiError::Invalid {
                field: "kind",
                problem: format!("`{label}` is none of maintenance, drain, retire"),
            })?),
        };
        let which = if asked.open { Which::Open } else { Which::All };
        let filter = EmptyingFilter { host, which };
        let mut emptyings = Vec::new();
        for row in self.store().emptyings(&filter).await? {
            if kind.is_none_or(|kind| row.emptying.kind() == kind) {
                emptyings.push(view::emptying(self, &row).await?);
            }
        }
        Ok(v1::ListEmptyingsReply { emptyings })
    }

    /// Shows one with its log.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub async fn get_emptying(&self, id: &str) -> Result<v1::Emptying, ApiError> {
        let row = self.emptying_row(id).await?;
        view::emptying_with_log(self, &row).await
    }

    /// Lists what waits for room, in the order in which it is tried.
    ///
    /// # Errors
    ///
    /// Fails if the store does.
    pub async fn list_queue(&self) -> Result<v1::ListQueueReply, ApiError> {
        Ok(v1::ListQueueReply { entries: view::queue(self).await? })
    }

    async fn emptying_row(&self, id: &str) -> Result<EmptyingRow, ApiError> {
        let number: JobId = id.parse().map_err(|_| no_emptying(id))?;
        let row = self.store().emptying(EmptyingId::Job(number)).await?;
        row.ok_or_else(|| no_emptying(id))
    }

    /// Gives a row to its driver and shows it.
    async fn shown(self: &Arc<Self>, id: EmptyingId) -> Result<v1::Emptying, ApiError> {
        let row = self.emptying_row(&id.to_string()).await?;
        if row.emptying.is_driven() {
            self.drive(Drives::Emptying(row.id()));
        }
        self.nudge_emptying(row.id());
        view::emptying_with_log(self, &row).await
    }

    fn ask(&self, host: &HostId, asked: Asked, by: String) -> AskHost {
        let presence = facts::presence(self, host);
        AskHost { host: host.clone(), asked, presence, by, cordon: None, opens: None }
    }

    fn opening(&self, host: &HostId, asked: Asked, by: String, new: NewEmptying) -> AskHost {
        AskHost { opens: Some(new), ..self.ask(host, asked, by) }
    }

    async fn ask_host(self: &Arc<Self>, ask: &AskHost) -> Result<HostDone, ApiError> {
        match self.store().ask_host(ask, clock::now_us()).await? {
            HostAnswer::Done(done) => {
                for row in done.ended.iter().chain(&done.opened) {
                    if row.emptying.is_driven() {
                        self.drive(Drives::Emptying(row.id()));
                    }
                    self.nudge_emptying(row.id());
                }
                self.hosts_changed();
                Ok(*done)
            }
            HostAnswer::Denied(denied) => Err(ApiError::HostHeld(denied)),
            HostAnswer::UnknownHost => {
                Err(ApiError::NotFound { kind: "host", name: ask.host.to_string() })
            }
        }
    }

    fn boot_of(&self, host: &HostId) -> String {
        self.parts.inventory.row(host).map(|row| row.boot_id).unwrap_or_default()
    }

    /// There may be room where there was none: whoever waits for it is tried at once.
    pub(crate) fn room_changed(&self) {
        self.wake.notify_one();
        self.room.notify_one();
    }

    fn emptying_policy(&self, asked: &v1::MaintenancePolicy) -> Result<Policy, ApiError> {
        let own = &self.parts.config.policy;
        let percent = |field: &'static str, asked: Option<u32>, own: Percent| match asked {
            None => Ok(own),
            Some(value) => u8::try_from(value).ok().and_then(Percent::new).ok_or_else(|| {
                ApiError::Invalid { field, problem: format!("{value} is above 100") }
            }),
        };
        let strategy = match asked.strategy.as_str() {
            // To shut a guest down has to be granted by name (rule R8).
            "" | "live_only" => Strategy::LiveOnly,
            "prefer_live" => Strategy::PreferLive,
            "cold_only" => Strategy::ColdOnly,
            other => {
                let problem = format!("`{other}` is none of live_only, prefer_live, cold_only");
                return Err(ApiError::Invalid { field: "policy.strategy", problem });
            }
        };
        Ok(Policy {
            strategy,
            max_parallel: at_once(asked.max_parallel)?,
            reserve_cpu_percent: percent(
                "policy.reserve_cpu_percent",
                asked.reserve_cpu_percent,
                own.reserve_cpu,
            )?,
            reserve_memory_percent: percent(
                "policy.reserve_memory_percent",
                asked.reserve_memory_percent,
                own.reserve_memory,
            )?,
            crossing: if asked.allow_cross_cluster { Crossing::Allowed } else { Crossing::Refused },
            pins: if asked.allow_pinned { PinsToSource::MayLeave } else { PinsToSource::Hold },
            dry_run: asked.dry_run,
        })
    }
}

/// Reads how many moves of a host may be under way at once.
fn at_once(asked: Option<u32>) -> Result<NonZeroU32, ApiError> {
    let Some(asked) = asked else { return Ok(MAX_PARALLEL) };
    NonZeroU32::new(asked).ok_or_else(|| ApiError::Invalid {
        field: "policy.max_parallel",
        problem: "0 would move nothing: it must be at least 1".to_owned(),
    })
}

/// Reads in whose name something is asked. Owners of another kind cannot be spoken for.
fn operator(by: &str) -> Result<String, ApiError> {
    let by = text("by", by)?;
    if by.starts_with("job:") || by.starts_with("drain:") {
        let problem = "must not begin with job: or drain:, which own cordons themselves".to_owned();
        return Err(ApiError::Invalid { field: "by", problem });
    }
    Ok(if by.is_empty() { "operator".to_owned() } else { by })
}

fn no_emptying(id: &str) -> ApiError {
    ApiError::NotFound { kind: "maintenance job or drain", name: id.to_owned() }
}

fn fresh_job() -> JobId {
    JobId::from_u128(uuid::Uuid::now_v7().as_u128())
}

fn fresh_drain() -> DrainId {
    DrainId::from_u128(uuid::Uuid::now_v7().as_u128())
}
