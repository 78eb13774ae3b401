//! The destination's commands.

use vmferry_planner_core::evidence::{RunState, TransferState};
use vmferry_proto::v1;
use vmferry_types::VmId;

use super::learn::Judged;
use super::{Agent, Refusal};
use crate::bugs::Bug;
use crate::fence::Word;
use crate::host::Why;
use crate::journal::{Cont, Ended, Part, Process, Record};

impl Agent {
    /// Starts the receiver, or finds the one already there.
    pub(super) async fn arm(&self, vm: VmId, word: &Word) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        match &record.part {
            Part::Receiver { process, migration, port, .. } if *migration == word.migration => {
                return self.rearm(vm, process, *port).await;
            }
            Part::Receiver { .. } => {
                return Err(Refusal::new("wrong_state", "another receiver of the VM is here"));
            }
            // A VM whose process is proven gone may come back from elsewhere.
            Part::Running { process, .. } => match self.judge(process) {
                Some(Judged::Gone { .. }) => self.forget_tap(process),
                Some(Judged::Alive(_)) | None => {
                    return Err(Refusal::new("wrong_state", "the VM runs here"));
                }
            },
            Part::Absent | Part::Stopped => {}
        }
        self.alone(vm)?;
        let blocked = self.world.with(|state| {
            let odds = state.weather.blocked;
            state.dice.agent.chance(odds)
        });
        if blocked {
            return Err(Refusal::new("blocked", "the bridge br9 is missing"));
        }
        let process = self.plan(vm, word);
        let acts_first = self.world.with(|state| state.bugged(Bug::AgentActsBeforeNote));
        if acts_first {
            self.world.with(|state| {
                state.start_process(&self.host, vm, process.launch, RunState::InMigrate)
            });
            self.step().await;
        }
        self.write(vm, |record| {
            record.ended = None;
            record.part = Part::Receiver {
                process: process.clone(),
                migration: word.migration,
                port: None,
                cont: Cont::Never,
            };
        });
        self.step().await;
        if acts_first {
            return self.rearm(vm, &process, None).await;
        }
        self.launch(vm, &process).await
    }

    /// Removes the tap of a launch whose process is proven gone.
    pub(super) fn forget_tap(&self, process: &Process) {
        self.world.with(|state| {
            if let Some(host) = state.hosts.get_mut(&self.host) {
                host.taps.remove(&process.launch);
            }
        });
    }

    /// Names a launch that has not begun.
    pub(super) fn plan(&self, vm: VmId, word: &Word) -> Process {
        self.world.with(|state| {
            let launch = state.fresh();
            let boot_id =
                state.host(&self.host).map(|host| host.boot_id(&self.host)).unwrap_or_default();
            if let Some(agent) = state.agent_mut(&self.host) {
                agent.launching.insert(vm);
                agent.launched.insert(launch);
            }
            Process {
                launch,
                boot_id,
                identity: None,
                generation: word.generation,
                admission: word.migration,
            }
        })
    }

    /// Starts the process that the journal names, and notes who it is.
    async fn launch(&self, vm: VmId, process: &Process) -> Result<v1::ExecuteReply, Refusal> {
        let started = self.world.with(|state| {
            let pid = state.start_process(&self.host, vm, process.launch, RunState::InMigrate)?;
            Some((pid, state.qemu(&self.host, pid)?.start_time))
        });
        let Some(identity) = started else {
            return Err(Refusal::new("internal", "QEMU could not be started"));
        };
        self.step().await;
        self.write(vm, |record| {
            if let Some(process) = record.process_mut() {
                process.identity = Some(identity);
            }
        });
        self.world.with(|state| {
            if let Some(agent) = state.agent_mut(&self.host) {
                agent.launching.remove(&vm);
            }
        });
        self.step().await;
        self.listen(vm, identity.0).await
    }

    /// Makes the receiver listen, and notes where.
    async fn listen(&self, vm: VmId, pid: u32) -> Result<v1::ExecuteReply, Refusal> {
        let port = self.world.with(|state| {
            let port =
                state.hosts.get_mut(&self.host).map_or(0, super::super::host::Host::fresh_port);
            match state.qemu_mut(&self.host, pid) {
                Some(qemu) => qemu
                    .listen(port)
                    .map(|()| port)
                    .map_err(|error| Refusal::new("internal", error)),
                None => Err(Refusal::new("receiver_gone", "the receiver ended")),
            }
        })?;
        self.step().await;
        self.write(vm, |record| {
            if let Part::Receiver { port: known, .. } = &mut record.part {
                *known = Some(port);
            }
        });
        Ok(self.listener(port))
    }

    fn listener(&self, port: u16) -> v1::ExecuteReply {
        v1::ExecuteReply {
            listener: Some(v1::Listener {
                address: self.host.to_string(),
                port: port.into(),
                postcopy: true,
                ..v1::Listener::default()
            }),
            ..v1::ExecuteReply::default()
        }
    }

    /// Goes on with a receiver that was begun, from wherever the last agent died.
    async fn rearm(
        &self,
        vm: VmId,
        process: &Process,
        port: Option<u16>,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let pid = match self.judge(process) {
            Some(Judged::Alive(pid)) => pid,
            Some(Judged::Gone { proof, .. }) => {
                return Err(Refusal::new("receiver_gone", proof.ended));
            }
            None => return Err(Refusal::new("internal", "the host is gone")),
        };
        if let Some(port) = port {
            return Ok(self.listener(port));
        }
        let (identity, listening) = self.world.with(|state| {
            let qemu = state.qemu(&self.host, pid);
            (qemu.map(|qemu| (qemu.pid, qemu.start_time)), qemu.and_then(|qemu| qemu.port))
        });
        self.write(vm, |record| {
            if let Some(process) = record.process_mut() {
                process.identity = identity;
            }
        });
        self.step().await;
        match listening {
            Some(port) => {
                self.write(vm, |record| {
                    if let Part::Receiver { port: known, .. } = &mut record.part {
                        *known = Some(port);
                    }
                });
                Ok(self.listener(port))
            }
            None => self.listen(vm, pid).await,
        }
    }

    /// Lets the guest go on here.
    pub(super) async fn go_on(&self, vm: VmId, word: &Word) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let process = match &record.part {
            Part::Receiver { process, migration, .. } if *migration == word.migration => process,
            Part::Running { process, .. } if process.admission == word.migration => process,
            Part::Running { .. } | Part::Receiver { .. } | Part::Absent | Part::Stopped => {
                return Err(Refusal::new(
                    "receiver_gone",
                    "there is no receiver of this migration",
                ));
            }
        };
        let pid = match self.judge(process) {
            Some(Judged::Alive(pid)) => pid,
            Some(Judged::Gone { proof, .. }) => {
                return Err(Refusal::new("receiver_gone", proof.ended));
            }
            None => return Err(Refusal::new("internal", "the host is gone")),
        };
        let complete = self.world.with(|state| {
            state.qemu(&self.host, pid).is_some_and(|qemu| {
                let arrived =
                    qemu.transfer == TransferState::Completed || qemu.transfer.is_divided();
                arrived && qemu.run != RunState::InMigrate
            })
        });
        if !complete {
            return Err(Refusal::new("wrong_state", "the receiver has not everything"));
        }
        self.note_cont(vm, word);
        self.step().await;
        self.world.with(|state| state.cont(&self.host, pid, Why::Continued))?;
        self.step().await;
        self.write(vm, |record| {
            if let Part::Receiver { process, .. } = &record.part {
                let process = process.clone();
                record.part = Part::Running { process, outgoing: None, held: None };
            }
        });
        Ok(v1::ExecuteReply::default())
    }

    /// Notes, before QEMU hears it, that the guest may have run here.
    fn note_cont(&self, vm: VmId, word: &Word) {
        self.write(vm, |record| {
            if let Some(process) = record.process_mut() {
                process.generation = word.generation;
            }
            if let Part::Receiver { cont, .. } = &mut record.part {
                *cont = Cont::Ordered;
            }
        });
    }

    /// Ends the receiver, proven.
    pub(super) async fn destroy(
        &self,
        vm: VmId,
        word: &Word,
        source_gone: Option<&v1::GoneProof>,
    ) -> Result<v1::ExecuteReply, Refusal> {
        let record = self.record(vm).unwrap_or_default();
        let halved = source_gone.is_some() && self.is_paused_half(&record);
        let proof = match &record.part {
            Part::Running { process, .. } => {
                let alive = matches!(self.judge(process), Some(Judged::Alive(_)));
                if (alive && !halved) || process.admission != word.migration {
                    return Err(Refusal::new("wrong_state", "the guest runs here"));
                }
                let proof = self.kill(process).await?;
                self.tombstone(vm, &proof, Cont::Ordered);
                proof
            }
            Part::Receiver { process, migration, cont, .. } => {
                let alive = matches!(self.judge(process), Some(Judged::Alive(_)));
                if *migration != word.migration && alive {
                    return Err(Refusal::new(
                        "wrong_state",
                        "the receiver is of another migration",
                    ));
                }
                if *cont == Cont::Ordered && alive && !halved {
                    return Err(Refusal::new("wrong_state", "the guest may have run here"));
                }
                let proof = self.kill(process).await?;
                self.tombstone(vm, &proof, *cont);
                proof
            }
            Part::Absent | Part::Stopped => self.never_armed(vm, &record, word)?,
        };
        Ok(v1::ExecuteReply { gone: Some(proof), ..v1::ExecuteReply::default() })
    }

    /// There is no receiver: the one there was has its proof, or the whole journal is one.
    pub(super) fn never_armed(
        &self,
        vm: VmId,
        record: &Record,
        word: &Word,
    ) -> Result<v1::GoneProof, Refusal> {
        if let Some(ended) = &record.ended
            && ended.migration == Some(word.migration)
        {
            return Ok(ended.proof.clone());
        }
        self.alone(vm)?;
        let proof = self.world.with(|state| v1::GoneProof {
            kind: v1::ProofKind::NeverStarted.into(),
            host_id: self.host.to_string(),
            boot_id: state
                .host(&self.host)
                .map(|host| host.boot_id(&self.host))
                .unwrap_or_default(),
            at_ms: state.at_ms(),
            ..v1::GoneProof::default()
        });
        self.write(vm, |record| {
            record.ended = Some(Ended {
                migration: Some(word.migration),
                proof: proof.clone(),
                cont: Cont::Never,
            });
        });
        Ok(proof)
    }
}
