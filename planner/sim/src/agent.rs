//! A simulated agent: what it answers, what it writes down first, and where it may die.
//!
//! Each await is a point where its process can end; what is in the journal by then is all that
//! the next one knows.

mod act;
mod hold;
mod learn;
mod observe;
mod postcopy;
mod power;
mod receive;
mod seed;
mod send;
mod watchdog;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_proto::v1;
use vmferry_types::{Claim, Generation, HostId, MigrationId, Step, VmId};

use crate::bugs::Bug;
use crate::fence::{Stale, Verdict, Word};
use crate::host::short;
use crate::journal::{Order, Record};
use crate::world::{Invariant, Mishap, PointKind, State, World};

pub(crate) use act::label;
pub(crate) use learn::Judged;
pub(crate) use seed::{Journal, Owned};

/// What an agent's process has in memory.
#[derive(Debug)]
pub(crate) struct AgentProcess {
    pub(crate) incarnation: u64,
    pub(crate) token: CancellationToken,
    pub(crate) sequence: u64,
    pub(crate) lanes: BTreeMap<VmId, Lane>,
    /// VMs whose process was asked since this agent started.
    pub(crate) learned: BTreeSet<VmId>,
    /// VMs of which a process is being started right now.
    pub(crate) launching: BTreeSet<VmId>,
    /// Launches of this very process.
    pub(crate) launched: BTreeSet<u64>,
    /// When guests last stopped and resumed, as events told it.
    pub(crate) sights: BTreeMap<VmId, Sight>,
    /// What planners said of VMs that are known here.
    pub(crate) owners: BTreeMap<VmId, Owned>,
    pub(crate) started: Instant,
}

/// When a guest last stopped and resumed, by the host's monotonic clock; zero if that was not seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sight {
    pub(crate) stopped_at_us: u64,
    pub(crate) resumed_at_us: u64,
}

/// What it has in memory of one VM.
#[derive(Debug)]
pub(crate) struct Lane {
    lock: Arc<tokio::sync::Mutex<()>>,
    pub(crate) heard: Instant,
    pub(crate) still_since: Option<Instant>,
    pub(crate) began: Option<Instant>,
    pub(crate) progressed: Instant,
    pub(crate) bytes: u64,
}

impl AgentProcess {
    pub(crate) const fn new(incarnation: u64, token: CancellationToken, now: Instant) -> Self {
        Self {
            incarnation,
            token,
            // Later processes say later things.
            sequence: incarnation << 32,
            lanes: BTreeMap::new(),
            learned: BTreeSet::new(),
            launching: BTreeSet::new(),
            launched: BTreeSet::new(),
            sights: BTreeMap::new(),
            owners: BTreeMap::new(),
            started: now,
        }
    }

    pub(crate) fn lane(&mut self, vm: VmId) -> &mut Lane {
        let now = Instant::now();
        self.lanes.entry(vm).or_insert_with(|| Lane {
            lock: Arc::default(),
            heard: now,
            still_since: None,
            began: None,
            progressed: now,
            bytes: 0,
        })
    }
}

/// An agent's no.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) message: String,
    pub(crate) detail: v1::ErrorDetail,
}

impl Refusal {
    pub(crate) fn new(code: &str, message: impl Into<String>) -> Self {
        let detail = v1::ErrorDetail { code: code.to_owned(), ..v1::ErrorDetail::default() };
        Self { message: message.into(), detail }
    }
}

/// What is asked of an agent.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Claim(v1::ClaimRequest),
    /// The next claim, for someone without a planner.
    NextClaim(VmId, MigrationId),
    Execute(Box<v1::ExecuteRequest>),
    Observe(v1::ObserveRequest),
    Describe(VmId),
    Check,
}

/// What an agent answers.
#[derive(Clone, Debug)]
pub(crate) enum Tell {
    Observation(Box<v1::VmObservation>),
    Reply(Box<v1::ExecuteReply>),
    Description(Box<v1::SourceDescription>),
    Check(v1::CheckReply),
}

/// One agent's process, as a handle.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub(crate) world: World,
    pub(crate) host: HostId,
    pub(crate) incarnation: u64,
}

impl Agent {
    /// Answers, unless the process dies first.
    pub(crate) async fn answer(&self, ask: Ask) -> Option<Result<Tell, Refusal>> {
        let token = self.world.with(|state| Some(state.agent(&self.host)?.token.clone()))?;
        tokio::select! {
            biased;
            () = token.cancelled() => None,
            told = self.serve(ask) => Some(told),
        }
    }

    async fn serve(&self, ask: Ask) -> Result<Tell, Refusal> {
        match ask {
            Ask::Claim(request) => {
                self.claim(&request).await.map(|seen| Tell::Observation(Box::new(seen)))
            }
            Ask::NextClaim(vm, migration) => {
                self.lend(vm, migration).await.map(|seen| Tell::Observation(Box::new(seen)))
            }
            Ask::Execute(request) => {
                self.execute(*request).await.map(|reply| Tell::Reply(Box::new(reply)))
            }
            Ask::Observe(request) => {
                let vm = vm_id(&request.vm_id)?;
                self.hear(vm, Claim::from_stored(request.claim));
                Ok(Tell::Observation(Box::new(self.observe(vm))))
            }
            Ask::Describe(vm) => {
                self.describe(vm).map(|description| Tell::Description(Box::new(description)))
            }
            Ask::Check => Ok(Tell::Check(v1::CheckReply::default())),
        }
    }

    /// A point where the agent may die, or only take its time.
    pub(super) async fn step(&self) {
        let (dies, pause) = self.world.with(|state| {
            let told = state.point(PointKind::AgentStep, "step");
            if let Some(mishap) = told {
                state.strike(mishap);
            }
            let storm = state.at_ms() < state.weather.calm_at_ms;
            let odds = state.weather.agent_dies;
            let dies = told == Some(Mishap::AgentDies) || (storm && state.dice.agent.chance(odds));
            (dies, state.dice.agent.millis(0, 3))
        });
        if dies {
            self.die();
        }
        // Whatever struck here may have ended this process with it.
        let lives = self.world.with(|state| {
            state.agent(&self.host).is_some_and(|agent| agent.incarnation == self.incarnation)
        });
        if !lives {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(pause).await;
    }

    /// Ends this very process; another one is started after a moment.
    pub(crate) fn die(&self) {
        let after = self.world.with(|state| {
            state.kill_agent(&self.host);
            state.dice.agent.millis(5, 3_000)
        });
        self.world.restart_agent(self.host.clone(), after);
    }

    pub(super) fn record(&self, vm: VmId) -> Option<Record> {
        self.world.with(|state| state.host(&self.host)?.journal.records.get(&vm).cloned())
    }

    /// Changes a record, on disk when this returns.
    pub(super) fn write(&self, vm: VmId, change: impl FnOnce(&mut Record)) {
        self.world.with(|state| state.write(&self.host, vm, change));
    }

    async fn lock(&self, vm: VmId) -> Option<OwnedMutexGuard<()>> {
        let lock = self
            .world
            .with(|state| Some(Arc::clone(&state.agent_mut(&self.host)?.lane(vm).lock)))?;
        Some(lock.lock_owned().await)
    }

    /// Notes that a driver was heard: the one whose claim is held.
    fn hear(&self, vm: VmId, claim: Claim) {
        self.world.with(|state| {
            state.check_hold(&self.host, vm);
            let held = state
                .host(&self.host)
                .and_then(|host| host.journal.records.get(&vm))
                .is_some_and(|record| record.fence.claim == claim);
            if held && let Some(agent) = state.agent_mut(&self.host) {
                agent.lane(vm).heard = Instant::now();
            }
        });
    }

    async fn claim(&self, request: &v1::ClaimRequest) -> Result<v1::VmObservation, Refusal> {
        let vm = vm_id(&request.vm_id)?;
        let word = Word {
            migration: migration_id(&request.migration_id)?,
            generation: Generation::from_stored(request.generation),
            claim: Claim::from_stored(request.claim),
            step: Step::from_stored(0),
        };
        let _lane = self.lock(vm).await;
        self.step().await;
        let mut record = self.record(vm).unwrap_or_default();
        let older = self.world.with(|state| state.bugged(Bug::AgentTakesOlderClaim));
        if older && word.claim < record.fence.claim {
            record.fence.claim = Claim::from_stored(0);
        }
        record.fence.take(&word).map_err(|stale| refused(stale, &record))?;
        if request.hold_limit_ms != 0 {
            record.hold_limit_ms = request.hold_limit_ms;
        }
        self.world.with(|state| state.check_hold(&self.host, vm));
        self.write(vm, |known| *known = record);
        self.world.with(|state| {
            if let Some(agent) = state.agent_mut(&self.host) {
                agent.lane(vm).heard = Instant::now();
            }
            let heard =
                state.words.entry((self.host.clone(), vm)).or_insert((word.claim, word.step));
            *heard = (*heard).max((word.claim, word.step));
        });
        self.step().await;
        Ok(self.observe(vm))
    }

    /// Takes the next claim for a caller that has no planner to count for it.
    async fn lend(&self, vm: VmId, migration: MigrationId) -> Result<v1::VmObservation, Refusal> {
        let _lane = self.lock(vm).await;
        self.step().await;
        self.ready(vm)?;
        let Some(mut record) = self.record(vm) else {
            return Err(Refusal::new("unknown_vm", "this host knows no such VM"));
        };
        let lends = self.world.with(|state| state.bugged(Bug::AgentLendsClaim));
        if record.open_admission().is_some_and(|open| open != migration) && !lends {
            return Err(Refusal::new("migration_open", "a migration of the VM is open"));
        }
        let word = Word {
            migration,
            generation: record.fence.generation,
            claim: record.fence.claim.next(),
            step: Step::from_stored(0),
        };
        record.fence.take(&word).map_err(|stale| refused(stale, &record))?;
        self.write(vm, |known| *known = record);
        self.step().await;
        Ok(self.observe(vm))
    }

    async fn execute(&self, request: v1::ExecuteRequest) -> Result<v1::ExecuteReply, Refusal> {
        let fence = request.fence.clone().unwrap_or_default();
        let vm = vm_id(&fence.vm_id)?;
        let word = Word {
            migration: migration_id(&fence.migration_id)?,
            generation: Generation::from_stored(fence.generation),
            claim: Claim::from_stored(fence.claim),
            step: Step::from_stored(fence.step),
        };
        let _lane = self.lock(vm).await;
        self.step().await;
        self.ready(vm)?;
        let record = self.record(vm).unwrap_or_default();
        match self.verdict(&record, &word, &request) {
            Verdict::Replay(answer) => {
                return Ok(v1::ExecuteReply { replayed: true, ..answer });
            }
            Verdict::Refuse(stale) => return Err(refused(stale, &record)),
            Verdict::Execute => {}
        }
        let skips = self.world.with(|state| state.bugged(Bug::AgentSkipsFence));
        let lets_run = request.action.as_ref().is_some_and(act::lets_run);
        if lets_run && self.is_elsewhere(vm, word.generation) && !skips {
            return Err(refused(Stale::Generation, &record));
        }
        self.hear(vm, word.claim);
        self.write(vm, |record| record.fence.note(&word, request.clone()));
        self.step().await;
        let acted = self.act(vm, &word, request.action.clone()).await;
        let mut reply = match acted {
            Ok(reply) => reply,
            Err(refusal) => {
                self.write(vm, |record| record.fence.refused());
                return Err(refusal);
            }
        };
        reply.observation = Some(self.observe(vm));
        let answer = reply.clone();
        self.write(vm, |record| {
            if let Some(last) = &mut record.fence.last {
                last.1 = Some(answer);
            }
        });
        self.step().await;
        Ok(reply)
    }

    fn verdict(
        &self,
        record: &Record,
        word: &Word,
        request: &v1::ExecuteRequest,
    ) -> Verdict<v1::ExecuteReply> {
        let bug = self.world.with(|state| state.bug);
        let verdict = record.fence.command(word, request);
        match (bug, &verdict) {
            (Some(Bug::AgentSkipsFence), _) => Verdict::Execute,
            (Some(Bug::AgentObeysDelayedStep), Verdict::Refuse(Stale::Claim | Stale::Step))
                if word.claim == record.fence.claim =>
            {
                Verdict::Execute
            }
            (Some(Bug::AgentForgetsAnswers), Verdict::Replay(_)) => Verdict::Execute,
            (Some(_) | None, _) => verdict,
        }
    }
}

impl State {
    /// R10: a guest does not stand still, not ordered and unheard, past its hold limit, if its agent
    /// was there to see it.
    fn check_hold(&mut self, host: &HostId, vm: VmId) {
        const SLACK: Duration = Duration::from_secs(4);
        let stands = self.host(host).is_some_and(|there| {
            let record = there.journal.records.get(&vm);
            let open = record.is_some_and(|record| {
                record.outgoing().is_some_and(|sent| sent.order == Order::Open)
            });
            let held = record.is_some_and(Record::holds);
            there.qemus.values().any(|qemu| {
                let waits = open && qemu.transfer == TransferState::PreSwitchover;
                let stands = waits || (held && qemu.run == RunState::Paused);
                qemu.vm == vm && !qemu.silent && stands
            })
        });
        let limit = self
            .host(host)
            .and_then(|there| there.journal.records.get(&vm))
            .map_or(0, |record| record.hold_limit_ms);
        let Some(agent) = self.agent_mut(host).filter(|_| stands) else { return };
        let there = learn::age(agent.started);
        let Some(still) = agent.lane(vm).still_since.map(learn::age) else { return };
        let quiet = still.min(learn::age(agent.lane(vm).heard)).min(there);
        if quiet > Duration::from_millis(limit) + SLACK {
            self.violated(
                Invariant::Ends,
                format!(
                    "{} stood still on {host} for {quiet:?} though no driver was heard",
                    short(vm)
                ),
            );
        }
    }

    pub(crate) fn agent(&self, host: &HostId) -> Option<&AgentProcess> {
        self.host(host)?.agent.as_ref()
    }

    pub(crate) fn agent_mut(&mut self, host: &HostId) -> Option<&mut AgentProcess> {
        self.hosts.get_mut(host)?.agent.as_mut()
    }

    /// Changes a record, and checks that its counters only rise.
    fn write(&mut self, host: &HostId, vm: VmId, change: impl FnOnce(&mut Record)) {
        let Some(there) = self.hosts.get_mut(host) else { return };
        let record = there.journal.records.entry(vm).or_default();
        let before = (record.fence.generation, record.fence.claim);
        change(record);
        let after = (record.fence.generation, record.fence.claim);
        if after.0 < before.0 || after.1 < before.1 {
            self.violated(
                Invariant::Generations,
                format!("the journal of {host} goes from {before:?} back to {after:?}"),
            );
        }
        if let Some(agent) = self.agent_mut(host) {
            // A record that was just made has nothing to be learnt of.
            if before.1 == Claim::from_stored(0) {
                agent.learned.insert(vm);
            }
        }
        self.ring(host, vm);
    }
}

fn refused(stale: Stale, record: &Record) -> Refusal {
    let mut refusal = match stale {
        Stale::Generation => Refusal::new("stale_generation", "owned under a newer generation"),
        Stale::Claim => Refusal::new("stale_claim", "a newer command is known"),
        Stale::Step => Refusal::new("step_reused", "the step was another command"),
    };
    refusal.detail.known_generation = record.fence.generation.value();
    refusal.detail.known_claim = record.fence.claim.value();
    refusal.detail.known_step = record.fence.step.value();
    refusal
}

fn vm_id(text: &str) -> Result<VmId, Refusal> {
    text.parse().map_err(|_| Refusal::new("invalid", format!("no VM id: {text}")))
}

fn migration_id(text: &str) -> Result<MigrationId, Refusal> {
    text.parse().map_err(|_| Refusal::new("invalid", format!("no migration id: {text}")))
}
