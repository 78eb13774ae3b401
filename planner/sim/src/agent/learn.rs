//! What became of processes, and how an agent finds out (rules R1, R3).

use std::time::Duration;

use tokio::time::Instant;
use vmferry_proto::v1;
use vmferry_types::{HostId, VmId};

use super::{Agent, Refusal};
use crate::bugs::Bug;
use crate::host::Why;
use crate::journal::Process;
use crate::world::{State, World};

/// What became of a process.
#[derive(Clone, Debug)]
pub(crate) enum Judged {
    Alive(u32),
    Gone { proof: v1::GoneProof, by_guest: bool },
}

impl State {
    /// Finds out what became of a process that the journal names.
    pub(crate) fn judge(&self, host: &HostId, process: &Process) -> Option<Judged> {
        let there = self.host(host)?;
        let boot_id = there.boot_id(host);
        let gone = |kind: v1::ProofKind, ended: &str, by_guest| {
            let (pid, start_time) = process.identity.unwrap_or_default();
            Judged::Gone {
                proof: v1::GoneProof {
                    kind: kind.into(),
                    host_id: host.to_string(),
                    boot_id: boot_id.clone(),
                    pid,
                    start_time,
                    ended: ended.to_owned(),
                    at_ms: self.at_ms(),
                    stderr_tail: String::new(),
                },
                by_guest,
            }
        };
        let forgotten = self.bugged(Bug::AgentForgetsProcesses)
            && there.agent.as_ref().is_some_and(|agent| {
                agent.incarnation > 1 && !agent.launched.contains(&process.launch)
            });
        if forgotten {
            return Some(gone(v1::ProofKind::ProcessAbsent, "not mine", false));
        }
        if let Some(qemu) = there.by_launch(process.launch) {
            if qemu.silent && self.bugged(Bug::AgentTakesSilenceForDeath) {
                return Some(gone(v1::ProofKind::ProcessAbsent, "silent", false));
            }
            return Some(Judged::Alive(qemu.pid));
        }
        if let Some(exit) = there.exits.get(&process.launch) {
            let mut judged = gone(v1::ProofKind::ExitRecord, &exit.ended, exit.by_guest);
            if let Judged::Gone { proof, .. } = &mut judged {
                proof.pid = exit.pid;
                proof.start_time = exit.start_time;
            }
            return Some(judged);
        }
        if process.boot_id != boot_id {
            return Some(gone(v1::ProofKind::NewBoot, "was there before the boot", false));
        }
        Some(if process.identity.is_some() {
            gone(v1::ProofKind::ProcessAbsent, "is not there", false)
        } else {
            gone(v1::ProofKind::NeverStarted, "was never started", false)
        })
    }
}

impl Agent {
    /// Refuses where a process of the VM runs that the journal does not know.
    pub(super) fn alone(&self, vm: VmId) -> Result<(), Refusal> {
        let stranger = self.world.with(|state| {
            let trusts = state.bugged(Bug::AgentTrustsLostJournal);
            !trusts && state.host(&self.host).is_some_and(|host| host.has_stranger(vm))
        });
        if stranger {
            return Err(Refusal::new("wrong_state", "a QEMU of this VM runs that is not known"));
        }
        Ok(())
    }

    /// Refuses what may not be done before the agent knows what runs.
    pub(super) fn ready(&self, vm: VmId) -> Result<(), Refusal> {
        self.world.with(|state| {
            let Some(host) = state.host(&self.host) else { return Ok(()) };
            if host.journal.lost && !state.bugged(Bug::AgentTrustsLostJournal) {
                return Err(Refusal::new("unreadable", "the journal proves nothing"));
            }
            let known = host.journal.records.contains_key(&vm);
            let learned = host.agent.as_ref().is_some_and(|agent| agent.learned.contains(&vm));
            if known && !learned {
                return Err(Refusal::new("learning", "still learning"));
            }
            Ok(())
        })
    }

    /// Learns of one VM after the other.
    async fn learn(&self) {
        let vms: Vec<VmId> = self.world.with(|state| {
            state
                .host(&self.host)
                .map(|host| host.journal.records.keys().copied().collect())
                .unwrap_or_default()
        });
        for vm in vms {
            let wait = self.world.with(|state| state.dice.agent.millis(1, 300));
            tokio::time::sleep(wait).await;
            self.world.with(|state| {
                if let Some(agent) = state.agent_mut(&self.host) {
                    agent.learned.insert(vm);
                }
                state
                    .note(|| format!("host {}: agent knows {}", self.host, crate::host::short(vm)));
                state.ring(&self.host, vm);
            });
            let by_self = self.world.with(|state| state.bugged(Bug::AgentStartsBySelf));
            if by_self && self.incarnation > 1 {
                self.start_by_self(vm);
            }
        }
    }

    /// The deliberate mistake: lets go on what it finds standing still.
    fn start_by_self(&self, vm: VmId) {
        self.world.with(|state| {
            let pid = state.host(&self.host).and_then(|host| {
                let still = |qemu: &&crate::qemu::Qemu| qemu.vm == vm && qemu.image != 0;
                host.qemus.values().find(still).map(|qemu| qemu.pid)
            });
            if let Some(pid) = pid {
                drop(state.cont(&self.host, pid, Why::Unasked));
            }
        });
    }
}

impl World {
    /// Starts an agent after a moment, if its host is up and has none by then.
    pub(crate) fn restart_agent(&self, host: HostId, after: Duration) {
        let world = self.clone();
        self.spawn(async move {
            tokio::time::sleep(after).await;
            world.start_agent(&host);
        });
    }

    /// Starts an agent, if its host is up and has none.
    pub(crate) fn start_agent(&self, host: &HostId) {
        let started = self.with(|state| {
            let incarnation = state.start_agent(host)?;
            Some((incarnation, state.agent(host)?.token.clone()))
        });
        let Some((incarnation, token)) = started else { return };
        let agent = Agent { world: self.clone(), host: host.clone(), incarnation };
        self.spawn(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = async {
                    agent.learn().await;
                    agent.watch_limits().await;
                } => {}
            }
        });
    }

    /// The agent that runs on a host now.
    pub(crate) fn agent(&self, host: &HostId) -> Option<Agent> {
        let incarnation = self.with(|state| Some(state.agent(host)?.incarnation))?;
        Some(Agent { world: self.clone(), host: host.clone(), incarnation })
    }
}

/// Whether an agent was started long enough ago to be asked.
pub(crate) fn age(started: Instant) -> Duration {
    Instant::now().saturating_duration_since(started)
}
