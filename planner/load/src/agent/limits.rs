//! The limits that a source's agent keeps by itself: hold, stall, time (rule R10).

use std::time::Duration;

use vmferry_types::VmId;

use super::Agent;
use crate::qemu::Transfer;

/// How often limits are looked at.
const TICK: Duration = Duration::from_millis(100);
const HOLD_MS: u64 = 10_000;
const STALL_MS: u64 = 30_000;
const TIMEOUT_MS: u64 = 3_600_000;

impl Agent {
    /// Keeps the limits of all transfers from this host, for good.
    pub(super) async fn keep_limits(self) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let due: Vec<VmId> = self.fleet.with(|state| {
                let Some(host) = state.hosts.get(&self.host) else { return Vec::new() };
                let open = host.records.iter().filter(|(_, record)| record.is_open());
                open.map(|(vm, _)| *vm).collect()
            });
            for vm in due {
                if self.overdue(vm).is_some() {
                    self.give_up(vm).await;
                }
            }
        }
    }

    /// Says why a transfer is to be called back, if it is.
    fn overdue(&self, vm: VmId) -> Option<String> {
        let record = self.record(vm);
        if !record.is_open() {
            return None;
        }
        let held = record.held().is_some();
        let limits = record.outgoing().map_or((0, 0), |sent| (sent.stall_ms, sent.timeout_ms));
        let place = (self.host.clone(), record.process()?.pid);
        let or = |value: u64, default: u64| if value == 0 { default } else { value } * 1000;
        self.fleet.with(|state| {
            let now = state.now_us();
            let (transfer, bytes) = state.qemu(&place).map(|qemu| (qemu.transfer, qemu.bytes))?;
            let sight = state.hosts.get_mut(&self.host)?.sight(vm);
            if bytes > sight.bytes {
                (sight.bytes, sight.progressed_us) = (bytes, now);
            }
            if held || transfer == Transfer::PreSwitchover {
                let since = *sight.still_since_us.get_or_insert(now);
                let quiet = now.saturating_sub(since.max(sight.heard_us));
                if quiet >= or(record.hold_limit_ms, HOLD_MS) {
                    return Some("the guest stood still and no driver was heard".to_owned());
                }
            }
            match transfer {
                Transfer::Setup | Transfer::Active => {
                    let stalled = now.saturating_sub(sight.progressed_us);
                    let taken = now.saturating_sub(sight.began_us);
                    if stalled >= or(limits.0, STALL_MS) {
                        Some("no byte crossed".to_owned())
                    } else {
                        (taken >= or(limits.1, TIMEOUT_MS))
                            .then(|| "the switchover was not reached in time".to_owned())
                    }
                }
                Transfer::None
                | Transfer::PreSwitchover
                | Transfer::Device
                | Transfer::Completed
                | Transfer::Cancelled
                | Transfer::Failed => None,
            }
        })
    }

    /// Takes the transfer back by itself, behind any command in progress.
    async fn give_up(&self, vm: VmId) {
        let _lane = self.fleet.lane(&self.host, vm).await;
        let Some(cause) = self.overdue(vm) else { return };
        let Ok(place) = self.running(vm) else { return };
        self.fleet.with(|state| state.note(vm, || format!("{}: gives up: {cause}", self.host)));
        self.write(vm, |record| record.give_up(cause));
        self.moment().await;
        self.fleet.with(|state| state.call_back(&place));
        self.let_go(vm, &place).await;
    }
}
