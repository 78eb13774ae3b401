//! The limits that a source's agent keeps by itself: hold, stall, time (rule R10).

use std::time::Duration;

use tokio::time::Instant;
use vmferry_planner_core::evidence::TransferState;
use vmferry_types::VmId;

use super::Agent;
use super::learn::{Judged, age};
use crate::bugs::Bug;
use crate::journal::Order;

/// How often limits are looked at.
const TICK: Duration = Duration::from_millis(250);
const HOLD_MS: u64 = 10_000;
const SERVING_STALL: Duration = Duration::from_secs(5);

impl Agent {
    /// Keeps the limits of all transfers, for good.
    pub(super) async fn watch_limits(&self) {
        loop {
            tokio::time::sleep(TICK).await;
            let vms: Vec<VmId> = self.world.with(|state| {
                let Some(host) = state.host(&self.host) else { return Vec::new() };
                host.journal
                    .records
                    .iter()
                    .filter(|(_, record)| {
                        record.sent().is_some_and(|sent| sent.order == Order::Open)
                            || record.sent().is_some_and(|sent| sent.order == Order::Handed)
                            || record.holds()
                            || record.gave_up()
                    })
                    .map(|(vm, _)| *vm)
                    .collect()
            });
            for vm in vms {
                if self.due(vm).is_some() {
                    self.give_up(vm).await;
                } else if let Some(pid) = self.silent(vm) {
                    // By its own word: QEMU detects no stall.
                    self.world.with(|state| state.force_pause(&self.host, pid));
                } else if self.unfinished(vm).is_some() {
                    self.finish_giving_up(vm).await;
                }
            }
        }
    }

    /// Returns the process whose transfer was given up, and goes on all the same: whoever noted that
    /// did not live to say it, or was not heard.
    fn unfinished(&self, vm: VmId) -> Option<u32> {
        let record = self.record(vm).filter(|record| record.gave_up())?;
        let Some(Judged::Alive(pid)) = self.judge(record.process()?) else { return None };
        let busy = self.world.with(|state| {
            state.qemu(&self.host, pid).is_some_and(|qemu| qemu.busy() && !qemu.silent)
        });
        busy.then_some(pid)
    }

    async fn finish_giving_up(&self, vm: VmId) {
        let _lane = self.lock(vm).await;
        self.step().await;
        let Some(pid) = self.unfinished(vm) else { return };
        if let Err(refusal) = self.call_back(vm, pid).await {
            self.world.note(|| format!("host {}: {}", self.host, refusal.message));
        }
    }

    /// Returns the source of a divided guest that has served nothing for too long.
    fn silent(&self, vm: VmId) -> Option<u32> {
        let record = self.record(vm)?;
        record.sent().filter(|sent| sent.order == Order::Handed)?;
        let Some(Judged::Alive(pid)) = self.judge(record.process()?) else { return None };
        self.world.with(|state| {
            let (transfer, bytes) = state.qemu(&self.host, pid).map(|q| (q.transfer, q.bytes))?;
            let now = Instant::now();
            let lane = state.agent_mut(&self.host)?.lane(vm);
            let serves =
                matches!(transfer, TransferState::PostcopyActive | TransferState::PostcopyRecover);
            if bytes != lane.bytes || !serves {
                lane.bytes = bytes;
                lane.progressed = now;
            }
            (serves && age(lane.progressed) >= SERVING_STALL).then_some(pid)
        })
    }

    /// Says why a transfer is to be called back, if it is.
    fn due(&self, vm: VmId) -> Option<String> {
        let record = self.record(vm)?;
        let sent = record.sent().filter(|sent| sent.order == Order::Open).cloned();
        let held = record.holds();
        if sent.is_none() && !held {
            return None;
        }
        let Some(Judged::Alive(pid)) = self.judge(record.process()?) else { return None };
        let forgets = self.world.with(|state| state.bugged(Bug::AgentForgetsHold));
        let hold = if record.hold_limit_ms == 0 { HOLD_MS } else { record.hold_limit_ms };
        let limit =
            |value: u64, default| Duration::from_millis(if value == 0 { default } else { value });
        self.world.with(|state| {
            let (transfer, bytes) = state.qemu(&self.host, pid).map(|q| (q.transfer, q.bytes))?;
            let now = Instant::now();
            let lane = state.agent_mut(&self.host)?.lane(vm);
            let began = *lane.began.get_or_insert(now);
            if bytes != lane.bytes {
                lane.bytes = bytes;
                lane.progressed = now;
            }
            if held || transfer == TransferState::PreSwitchover {
                let since = *lane.still_since.get_or_insert(now);
                let quiet = age(since).min(age(lane.heard));
                if quiet >= Duration::from_millis(hold) && !(forgets && self.incarnation > 1) {
                    return Some("no driver was heard".to_owned());
                }
                if !held {
                    return None;
                }
            } else {
                lane.still_since = None;
            }
            let sent = sent?;
            let moving = matches!(transfer, TransferState::Setup | TransferState::Active);
            if !moving {
                return None;
            }
            if age(lane.progressed.max(began)) >= limit(sent.stall_ms, 30_000) {
                return Some("no byte crossed".to_owned());
            }
            (age(began) >= limit(sent.timeout_ms, 3_600_000)).then(|| "out of time".to_owned())
        })
    }

    /// Takes the transfer back by itself, behind any command in progress.
    async fn give_up(&self, vm: VmId) {
        let _lane = self.lock(vm).await;
        self.step().await;
        let Some(cause) = self.due(vm) else { return };
        let Some(record) = self.record(vm) else { return };
        let migration = record.held().or_else(|| record.sent().map(|sent| sent.migration));
        let Some(migration) = migration else { return };
        let pid = match record.process().and_then(|process| self.judge(process)) {
            Some(Judged::Alive(pid)) => pid,
            Some(Judged::Gone { .. }) | None => return,
        };
        self.world.note(|| format!("host {}: gives up: {cause}", self.host));
        self.gives_up(vm, migration, cause);
        self.step().await;
        // What is not called back now is by the next command, or by the next agent's first look.
        if let Err(refusal) = self.call_back(vm, pid).await {
            self.world.note(|| format!("host {}: {}", self.host, refusal.message));
        }
    }
}
