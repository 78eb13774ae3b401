//! One end of an admission, as its driver sees it.
//!
//! A side claims the VM at its agent, watches it, and lets itself be heard about once a second.
//! It never commands and never gives up: an agent that does not answer is asked again, with a
//! growing wait, until it does (rule R9). It speaks for a driver only while that driver lives: one
//! that hangs, on its store for example, must not keep a guest waiting for its order.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::stream::StreamExt as _;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;
use vmferry_planner_core::evidence::Heard;
use vmferry_proto::v1::{ClaimRequest, ObserveRequest, VmObservation};
use vmferry_types::{Claim, Generation, HostId, Millis, Timestamp};

use crate::agents::{AgentError, Agents};
use crate::clock;

/// How often a driver lets its agents hear of it; well below any hold limit.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A driver that has not come by for so long is not spoken for. It comes by twice a second.
const DRIVER_SILENT: Duration = Duration::from_secs(3);
/// An agent that has not answered for so long may be gone. It is asked every [`HEARTBEAT`].
const ANSWERS: Millis = Millis(3_000);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Who knows a newer owner says so until a human has looked.
const RETRY_BEHIND: Duration = Duration::from_secs(30);

/// What is known of one end, and how.
#[derive(Clone, Debug, Default)]
pub struct SideView {
    /// The agent has answered this driver's claim: it may be commanded.
    pub claimed: bool,
    /// The claim was refused: another driver, or an older history of the store, is behind.
    pub fenced: Option<AgentError>,
    /// The agent knows a newer owner of the VM than this driver's row: no claim mends that.
    pub behind: Option<AgentError>,
    /// The newest observation under this claim.
    pub observation: Option<VmObservation>,
    /// Why nothing newer is known; `None` while the agent answers.
    pub trouble: Option<AgentError>,
    /// When it last answered, in milliseconds since 1970.
    pub heard_ms: u64,
}

impl SideView {
    /// Says whether the agent still answers.
    #[must_use]
    pub fn heard(&self, now: Timestamp) -> Heard {
        let silent = now.since(Timestamp(self.heard_ms)) > ANSWERS;
        if self.trouble.is_some() || silent { Heard::Before } else { Heard::Now }
    }

    /// Takes an observation unless it is older than what is known.
    fn take(&mut self, observation: VmObservation) {
        self.trouble = None;
        self.heard_ms = clock::now().value();
        // Not by the host's wall clock, which may be put back.
        let newer = self.observation.as_ref().is_none_or(|known| {
            observation.boot_id != known.boot_id || observation.sequence > known.sequence
        });
        if newer {
            self.observation = Some(observation);
        }
    }
}

/// A handle to one end. Dropping it ends its task.
#[derive(Debug)]
pub struct Side {
    view: Arc<watch::Sender<SideView>>,
    pulse: Arc<Pulse>,
    _task: AbortOnDrop,
}

/// When a driver last came by.
#[derive(Debug)]
struct Pulse(Mutex<Instant>);

impl Pulse {
    fn beat(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns what may be said for the driver: a look under its claim, or just a look.
    fn look(&self, look: &ObserveRequest) -> ObserveRequest {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let claim = if last.elapsed() < DRIVER_SILENT { look.claim } else { 0 };
        ObserveRequest { claim, ..look.clone() }
    }
}

#[derive(Debug)]
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Side {
    /// Claims a VM at one host and watches it from then on.
    #[expect(
        clippy::disallowed_methods,
        reason = "the task dies with its handle, which the driver's tracked task owns"
    )]
    pub fn open(agents: Arc<dyn Agents>, host: HostId, claim: ClaimRequest) -> Self {
        let (view, _) = watch::channel(SideView::default());
        let view = Arc::new(view);
        let pulse = Arc::new(Pulse(Mutex::new(Instant::now())));
        let beats = Arc::clone(&pulse);
        let follows = follow(agents, host, claim, Arc::clone(&view), beats);
        let task = tokio::spawn(clock::inherit(follows));
        Self { view, pulse, _task: AbortOnDrop(task) }
    }

    /// Says that the driver lives. One that does not come by again is not spoken for, and the
    /// source's agent lets its guest go on at the hold limit.
    pub fn beat(&self) {
        self.pulse.beat();
    }

    /// Subscribes to changes.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<SideView> {
        self.view.subscribe()
    }

    /// Takes the observation that came with the answer to a command.
    pub fn take(&self, observation: VmObservation) {
        self.view.send_modify(|view| view.take(observation));
    }

    /// Takes a failure of a command, for people to see.
    pub fn trouble(&self, error: AgentError) {
        self.view.send_modify(|view| view.trouble = Some(error));
    }
}

async fn follow(
    agents: Arc<dyn Agents>,
    host: HostId,
    claim: ClaimRequest,
    view: Arc<watch::Sender<SideView>>,
    pulse: Arc<Pulse>,
) {
    if !claim_until_answered(agents.as_ref(), &host, &claim, &view).await {
        return;
    }
    let look = ObserveRequest { vm_id: claim.vm_id.clone(), claim: claim.claim };
    let driver = (pulse.as_ref(), &look);
    let watching = watch_for_good(Arc::clone(&agents), &host, driver, &view);
    let beating = heartbeat(agents.as_ref(), &host, driver, &view);
    tokio::join!(watching, beating);
}

/// Claims until the agent answers; `false` if it answered that someone newer is there.
async fn claim_until_answered(
    agents: &dyn Agents,
    host: &HostId,
    claim: &ClaimRequest,
    view: &watch::Sender<SideView>,
) -> bool {
    let mut wait = RETRY_FIRST;
    let mut next = claim.clone();
    loop {
        match agents.claim(host, next.clone()).await {
            // On the way to a claim that was out of reach.
            Ok(_) if next != *claim => {
                next = towards(claim, (next.generation, next.claim));
                continue;
            }
            Ok(observation) => {
                view.send_modify(|view| {
                    view.claimed = true;
                    view.behind = None;
                    view.take(observation);
                });
                return true;
            }
            Err(error) if error.code() == "stale_generation" => {
                view.send_modify(|view| {
                    view.trouble = Some(error.clone());
                    view.behind = Some(error);
                });
                wait = RETRY_BEHIND;
            }
            Err(error) if error.code() == "stale_claim" => {
                view.send_modify(|view| {
                    view.trouble = Some(error.clone());
                    view.fenced = Some(error);
                });
                return false;
            }
            Err(AgentError::Refused { detail, .. })
                if detail.code == "leap" && claim.claim > detail.known_claim =>
            {
                next = towards(claim, (detail.known_generation, detail.known_claim));
            }
            Err(error) => {
                debug!(host_id = %host, %error, "claim not answered");
                view.send_modify(|view| view.trouble = Some(error));
            }
        }
        tokio::time::sleep(wait).await;
        wait = if wait == RETRY_BEHIND { RETRY_MAX } else { (wait * 2).min(RETRY_MAX) };
    }
}

/// Returns the claim to make first where an agent knows so little of a VM that the one that is
/// due is out of its reach: somebody leapt at another agent, and this one has to catch up.
fn towards(claim: &ClaimRequest, (generation, known): (u64, u64)) -> ClaimRequest {
    let generation = Generation::towards(
        Generation::from_stored(generation),
        Generation::from_stored(claim.generation),
    );
    let step = Claim::towards(Claim::from_stored(known), Claim::from_stored(claim.claim));
    ClaimRequest { generation: generation.value(), claim: step.value(), ..claim.clone() }
}

async fn watch_for_good(
    agents: Arc<dyn Agents>,
    host: &HostId,
    (pulse, look): (&Pulse, &ObserveRequest),
    view: &watch::Sender<SideView>,
) {
    let mut wait = RETRY_FIRST;
    loop {
        let mut stream = agents.watch(host, pulse.look(look));
        while let Some(item) = stream.next().await {
            match item {
                Ok(observation) => {
                    wait = RETRY_FIRST;
                    view.send_modify(|view| view.take(observation));
                }
                Err(error) => {
                    debug!(host_id = %host, %error, "watch broke");
                    view.send_modify(|view| view.trouble = Some(error));
                    break;
                }
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RETRY_MAX);
    }
}

/// Lets the agent hear that this driver lives, and sees what a silent stream would hide.
async fn heartbeat(
    agents: &dyn Agents,
    host: &HostId,
    (pulse, look): (&Pulse, &ObserveRequest),
    view: &watch::Sender<SideView>,
) {
    let mut tick = tokio::time::interval(HEARTBEAT);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    tick.tick().await;
    loop {
        tick.tick().await;
        match agents.observe(host, pulse.look(look)).await {
            Ok(observation) => view.send_modify(|view| view.take(observation)),
            Err(error) => view.send_modify(|view| view.trouble = Some(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(boot: &str, sequence: u64, observed_at_ms: u64) -> VmObservation {
        VmObservation {
            boot_id: boot.to_owned(),
            sequence,
            observed_at_ms,
            ..VmObservation::default()
        }
    }

    #[test]
    fn a_clock_that_was_put_back_or_forward_orders_nothing() {
        let mut view = SideView::default();
        let known = |view: &SideView| view.observation.as_ref().map(|seen| seen.sequence);
        view.take(said("one", 5, 9_000));
        view.take(said("one", 6, 1_000));
        assert_eq!(known(&view), Some(6));
        // It was overtaken, and says a later time than the one that overtook it.
        view.take(said("one", 5, 9_000));
        assert_eq!(known(&view), Some(6));
        view.take(said("two", 1, 500));
        assert_eq!(known(&view), Some(1));
    }

    #[test]
    fn an_agent_that_fell_silent_is_not_taken_to_answer() {
        let mut view = SideView::default();
        view.take(said("one", 1, 0));
        let heard = view.heard_ms;
        assert_eq!(view.heard(Timestamp(heard + 3_000)), Heard::Now);
        assert_eq!(view.heard(Timestamp(heard + 3_001)), Heard::Before);
        view.trouble = Some(AgentError::Unreachable {
            host: "a".parse().unwrap(),
            operation: "observe",
            reason: String::new(),
        });
        assert_eq!(view.heard(Timestamp(heard)), Heard::Before);
    }

    #[test]
    fn a_driver_that_hangs_is_not_spoken_for() {
        let look = ObserveRequest { vm_id: "vm".to_owned(), claim: 7 };
        let long_ago = Instant::now().checked_sub(DRIVER_SILENT * 2).unwrap();
        let pulse = Pulse(Mutex::new(long_ago));
        assert_eq!(pulse.look(&look), ObserveRequest { claim: 0, ..look.clone() });
        pulse.beat();
        assert_eq!(pulse.look(&look).claim, 7);
    }
}
