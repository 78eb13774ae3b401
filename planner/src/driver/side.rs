//! One end of an admission, as its driver sees it.
//!
//! A side claims the VM at its agent, watches it, and lets itself be heard about once a second.
//! It never commands and never gives up: an agent that does not answer is asked again, with a
//! growing wait, until it does (rule R9).

use std::sync::Arc;
use std::time::Duration;

use futures::stream::StreamExt as _;
use tokio::sync::watch;
use tracing::debug;
use vmferry_proto::v1::{ClaimRequest, ObserveRequest, VmObservation};
use vmferry_types::HostId;

use crate::agents::{AgentError, Agents};
use crate::clock;

/// How often a driver lets its agents hear of it; well below any hold limit.
const HEARTBEAT: Duration = Duration::from_secs(1);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// What is known of one end, and how.
#[derive(Clone, Debug, Default)]
pub struct SideView {
    /// The agent has answered this driver's claim: it may be commanded.
    pub claimed: bool,
    /// The claim was refused: another driver, or an older history of the store, is behind.
    pub fenced: Option<AgentError>,
    /// The newest observation under this claim.
    pub observation: Option<VmObservation>,
    /// Why nothing newer is known; `None` while the agent answers.
    pub trouble: Option<AgentError>,
    /// When it last answered, in milliseconds since 1970.
    pub heard_ms: u64,
}

impl SideView {
    /// Takes an observation unless it is older than what is known.
    fn take(&mut self, observation: VmObservation) {
        self.trouble = None;
        self.heard_ms = clock::now().value();
        let newer = self.observation.as_ref().is_none_or(|known| {
            observation.boot_id != known.boot_id
                || observation.sequence > known.sequence
                || observation.observed_at_ms > known.observed_at_ms
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
    _task: AbortOnDrop,
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
        let task = tokio::spawn(follow(agents, host, claim, Arc::clone(&view)));
        Self { view, _task: AbortOnDrop(task) }
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
) {
    if !claim_until_answered(agents.as_ref(), &host, &claim, &view).await {
        return;
    }
    let look = ObserveRequest { vm_id: claim.vm_id.clone(), claim: claim.claim };
    let watching = watch_for_good(Arc::clone(&agents), &host, &look, &view);
    let beating = heartbeat(agents.as_ref(), &host, &look, &view);
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
    loop {
        match agents.claim(host, claim.clone()).await {
            Ok(observation) => {
                view.send_modify(|view| {
                    view.claimed = true;
                    view.take(observation);
                });
                return true;
            }
            Err(error) if matches!(error.code(), "stale_claim" | "stale_generation") => {
                view.send_modify(|view| {
                    view.trouble = Some(error.clone());
                    view.fenced = Some(error);
                });
                return false;
            }
            Err(error) => {
                debug!(host_id = %host, %error, "claim not answered");
                view.send_modify(|view| view.trouble = Some(error));
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RETRY_MAX);
    }
}

async fn watch_for_good(
    agents: Arc<dyn Agents>,
    host: &HostId,
    look: &ObserveRequest,
    view: &watch::Sender<SideView>,
) {
    let mut wait = RETRY_FIRST;
    loop {
        let mut stream = agents.watch(host, look.clone());
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
    look: &ObserveRequest,
    view: &watch::Sender<SideView>,
) {
    let mut tick = tokio::time::interval(HEARTBEAT);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    tick.tick().await;
    loop {
        tick.tick().await;
        match agents.observe(host, look.clone()).await {
            Ok(observation) => view.send_modify(|view| view.take(observation)),
            Err(error) => view.send_modify(|view| view.trouble = Some(error)),
        }
    }
}
