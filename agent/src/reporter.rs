//! Tells every planner how this host is, every few seconds and when something changed.

use std::sync::Arc;
use std::time::Duration;

use tonic::Status;
use tonic::transport::Channel;
use vmferry_proto::reporting::Reporting;
use vmferry_proto::v1;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_tls::{Expected, Role};
use vmferry_types::{Millis, spread};

use crate::agent::Agent;
use crate::report;

/// Changes that come this close together are one report.
const SETTLE: Duration = Duration::from_millis(250);
/// The least time between two reports: each looks at every process of the machine.
const GAP: Duration = Duration::from_secs(1);
/// How often a host without a planner looks for what runs on it.
const LOOK: Duration = Duration::from_secs(5);
/// How long a planner may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// Reports to every planner of the configuration, until the agent's shutdown begins.
///
/// Each has a task of its own: one that is silent holds up none of the others.
pub(crate) fn start(agent: &Arc<Agent>) {
    let Some(planners) = agent.config.planners.clone() else {
        agent.shutdown.spawn(look(agent.clone()));
        return;
    };
    for address in planners.addresses {
        agent.shutdown.spawn(run(agent.clone(), address, planners.report_interval));
    }
}

/// Keeps looking for what runs here and is nobody's, where no report does.
async fn look(agent: Arc<Agent>) {
    loop {
        report::look_for_strangers(&agent).await;
        tokio::time::sleep(LOOK).await;
    }
}

/// Tells one planner how this host is, for as long as the agent lives.
async fn run(agent: Arc<Agent>, planner: String, interval: Duration) {
    let endpoint = match vmferry_tls::endpoint(&planner) {
        Ok((endpoint, _)) => endpoint
            .connect_timeout(DEADLINE)
            .timeout(DEADLINE)
            .http2_keep_alive_interval(DEADLINE)
            .keep_alive_timeout(DEADLINE)
            .keep_alive_while_idle(true)
            .tcp_nodelay(true),
        Err(error) => {
            tracing::error!(planner, %error, "planner's address cannot be used");
            return;
        }
    };
    let expected = Expected::Any(Role::Planner);
    let client = PlannerClient::new(vmferry_tls::channel(&endpoint, &agent.security, expected));
    let mut teller = Teller { client, call: None };
    let mut changes = agent.changes();
    let mut reached = Reached::NotYet;
    loop {
        changes.mark_unchanged();
        let mut report = report::current(&agent).await;
        reached = match teller.tell(&agent, &mut report).await {
            Ok(reply) => {
                let now = take_up(&agent, &planner, &report, reply).await;
                if now != reached {
                    tracing::info!(planner, ?now, "planner reached");
                }
                now
            }
            Err(status) => {
                if reached != Reached::Lost {
                    tracing::warn!(planner, error = %said(&status), "planner cannot be reached");
                }
                Reached::Lost
            }
        };
        let turn = spread(millis(interval), &report.agent_instance, report.sequence);
        let turn = Duration::from_millis(turn.value());
        tokio::time::sleep(GAP.min(turn)).await;
        tokio::select! {
            () = tokio::time::sleep(turn.saturating_sub(GAP)) => {}
            _ = changes.changed() => tokio::time::sleep(SETTLE).await,
        }
    }
}

/// Tells one planner, over a call that is kept.
struct Teller {
    client: PlannerClient<Channel>,
    call: Option<Reporting<v1::HostReport>>,
}

impl Teller {
    /// Sends a report. If the call that was kept has ended, as it does when its planner was started
    /// anew, it is sent again over another one.
    async fn tell(
        &mut self,
        agent: &Agent,
        report: &mut v1::HostReport,
    ) -> Result<v1::ReportReply, Status> {
        if let Some(kept) = self.call.take()
            && let Ok(reply) = self.over(kept, agent, report).await
        {
            return Ok(reply);
        }
        let open = Reporting::open(DEADLINE, |reports| self.client.report(reports)).await?;
        self.over(open, agent, report).await
    }

    async fn over(
        &mut self,
        call: Reporting<v1::HostReport>,
        agent: &Agent,
        report: &mut v1::HostReport,
    ) -> Result<v1::ReportReply, Status> {
        // Another planner may have been sent the same, or this one may have taken it before the
        // call broke: each time it is a report of its own.
        report.sequence = agent.next_sequence();
        let (reply, call) = call.send(report.clone()).await?;
        self.call = Some(call);
        Ok(reply)
    }
}

fn millis(time: Duration) -> Millis {
    Millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Says why a call failed: what the transport met is only in the causes.
fn said(status: &Status) -> String {
    let causes = std::error::Error::source(status).map(crate::error::chain);
    causes.map_or_else(
        || status.message().to_owned(),
        |causes| format!("{}: {causes}", status.message()),
    )
}

/// How a planner was last reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    NotYet,
    Heard,
    Refused,
    Lost,
}

async fn take_up(
    agent: &Arc<Agent>,
    planner: &str,
    report: &v1::HostReport,
    reply: v1::ReportReply,
) -> Reached {
    if !reply.refused.is_empty() {
        tracing::warn!(planner, reason = reply.refused, "planner will not have this host");
        return Reached::Refused;
    }
    crate::seed::take_up(agent, report, reply.generations).await;
    Reached::Heard
}
