//! What empties hosts: `vmferry host maintenance`, `drain` and `retire`.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use tokio::time::{Instant, sleep};
use vmferry_proto::v1::{
    CancelEmptyingRequest, CompleteMaintenanceRequest, DrainHostRequest, Emptying,
    ListEmptyingsRequest, MaintenancePolicy, MaintenanceRequest,
};

use super::host::who;
use super::migration::WaitArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::Output;
use crate::render;
use crate::render::quantity::duration;

/// How often a wait looks: what empties a host takes seconds to hours.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Say where each VM of a host would go, or why it cannot; touches nothing
    Plan {
        /// Id or display name
        host: String,
        #[command(flatten)]
        policy: PolicyArgs,
    },
    /// Plan anew, and empty the host if every VM has a place; then it is in maintenance
    #[command(visible_alias = "start")]
    Execute {
        /// Id or display name
        host: String,
        #[command(flatten)]
        policy: PolicyArgs,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// List the maintenance jobs of a host, or of all
    Jobs {
        /// Id or display name
        #[arg(default_value = "", hide_default_value = true)]
        host: String,
    },
    /// Show a job, drain or retirement
    Show {
        /// Its id
        id: String,
    },
    /// Give up a job, drain or retirement; what is under way of it is taken back where it can be
    Cancel {
        /// Its id
        id: String,
    },
    /// Take a host in maintenance back into service
    Complete {
        /// The job's id
        id: String,
        /// Bring back the VMs that the job moved and nobody since, where there is room
        #[arg(long = "return")]
        bring_back: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// Only while they run
    LiveOnly,
    /// While they run where that can be done
    PreferLive,
    /// Stopped
    ColdOnly,
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "two independent flags, as the message has them")]
pub(crate) struct PolicyArgs {
    /// How VMs may be carried
    #[arg(long, value_enum, value_name = "HOW")]
    strategy: Option<Strategy>,
    /// How many of its migrations may be open at once [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_parallel: Option<u32>,
    /// Share of each destination's memory that is left free [default: the planner's]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    reserve_memory: Option<u32>,
    /// Share of each destination's CPU that is left free [default: the planner's]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    reserve_cpu: Option<u32>,
    /// Let VMs leave their cluster
    #[arg(long)]
    allow_cross_cluster: bool,
    /// Let VMs leave that are pinned to the host
    #[arg(long)]
    allow_pinned: bool,
}

impl PolicyArgs {
    fn policy(&self) -> MaintenancePolicy {
        let strategy = match self.strategy {
            None => "",
            Some(Strategy::LiveOnly) => "live_only",
            Some(Strategy::PreferLive) => "prefer_live",
            Some(Strategy::ColdOnly) => "cold_only",
        };
        MaintenancePolicy {
            strategy: strategy.to_owned(),
            max_parallel: self.max_parallel,
            reserve_cpu_percent: self.reserve_cpu,
            reserve_memory_percent: self.reserve_memory,
            allow_cross_cluster: self.allow_cross_cluster,
            allow_pinned: self.allow_pinned,
            dry_run: false,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Id or display name
    host: String,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    wait: WaitArgs,
}

pub(crate) async fn run(command: Command, client: &Client, output: &Output) -> Result<(), Failure> {
    match command {
        Command::Plan { host, policy } => {
            let operation = format!("plan maintenance of host {host}");
            let request = MaintenanceRequest { host, policy: Some(policy.policy()), by: who() };
            let planned = client.plan_maintenance(&operation, request).await?;
            output.answer(&planned, render::emptying::plan);
            not_blocked(&operation, &planned)
        }
        Command::Execute { host, policy, wait } => {
            let operation = format!("maintenance of host {host}");
            let request = MaintenanceRequest { host, policy: Some(policy.policy()), by: who() };
            let begun = client.execute_maintenance(&operation, request).await?;
            if begun.state == "BLOCKED" {
                output.answer(&begun, render::emptying::plan);
                return not_blocked(&operation, &begun);
            }
            settle(client, output, &operation, begun, &wait).await
        }
        Command::Jobs { host } => {
            let request =
                ListEmptyingsRequest { host, kind: "maintenance".to_owned(), open: false };
            let reply = client.list_emptyings(request).await?;
            output.answer(&reply, |reply| render::emptying::list(&reply.emptyings));
            Ok(())
        }
        Command::Show { id } => {
            let shown = client.emptying(&id).await?;
            output.answer(&shown, render::emptying::show);
            Ok(())
        }
        Command::Cancel { id } => {
            let operation = format!("cancel {id}");
            let request = CancelEmptyingRequest { id, by: who() };
            let shown = client.cancel_emptying(&operation, request).await?;
            output.answer(&shown, render::emptying::summary);
            Ok(())
        }
        Command::Complete { id, bring_back, wait } => {
            let operation = format!("complete maintenance {id}");
            let request = CompleteMaintenanceRequest { id, return_vms: bring_back, by: who() };
            let shown = client.complete_maintenance(&operation, request).await?;
            settle(client, output, &operation, shown, &wait).await
        }
    }
}

/// Empties a host, and keeps it empty.
pub(crate) async fn drain(
    args: DrainArgs,
    client: &Client,
    output: &Output,
) -> Result<(), Failure> {
    let operation = format!("drain host {}", args.host);
    let request =
        DrainHostRequest { host: args.host, policy: Some(args.policy.policy()), by: who() };
    let begun = client.drain_host(&operation, request).await?;
    settle(client, output, &operation, begun, &args.wait).await
}

/// Empties a host to be rid of it.
pub(crate) async fn retire(
    args: DrainArgs,
    client: &Client,
    output: &Output,
) -> Result<(), Failure> {
    let operation = format!("retire host {}", args.host);
    let request =
        DrainHostRequest { host: args.host, policy: Some(args.policy.policy()), by: who() };
    let begun = client.retire_host(&operation, request).await?;
    settle(client, output, &operation, begun, &args.wait).await
}

fn not_blocked(operation: &str, of: &Emptying) -> Result<(), Failure> {
    if of.state != "BLOCKED" {
        return Ok(());
    }
    let problem = format!("{} of its VMs have no place to go", of.blocked.len());
    Err(Failure::Blocked { operation: operation.to_owned(), problem })
}

/// Says whether something goes on by itself.
fn goes_on(of: &Emptying) -> bool {
    let returning =
        of.returns.iter().any(|one| matches!(one.state.as_str(), "waiting" | "running"));
    matches!(of.state.as_str(), "RUNNING" | "EMPTYING") || returning
}

/// Waits, if asked to, until it goes on no more; prints it.
async fn settle(
    client: &Client,
    output: &Output,
    operation: &str,
    begun: Emptying,
    wait: &WaitArgs,
) -> Result<(), Failure> {
    let deadline = Instant::now().checked_add(wait.timeout);
    let mut last = begun;
    let mut told = String::new();
    while wait.wait && goes_on(&last) {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            output.answer(&last, render::emptying::summary);
            return Err(Failure::WaitTimedOut {
                operation: operation.to_owned(),
                waited: duration(wait.timeout),
                standing: render::emptying::progress(&last),
                advice: format!("see `vmferry host maintenance show {}`", last.id),
            });
        }
        output.progress(&mut told, &render::emptying::progress(&last));
        sleep(LOOK).await;
        match client.emptying(&last.id).await {
            Ok(now) => last = now,
            // A planner that restarts meanwhile drives on what it has begun.
            Err(Failure::Unreachable { .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
    output.answer(&last, render::emptying::summary);
    match last.state.as_str() {
        "FAILED" | "DIED" => Err(Failure::NeedsHuman {
            operation: operation.to_owned(),
            cause: last.error.clone(),
            advice: format!("see `vmferry host show {}`; it stays cordoned", last.host),
        }),
        "CANCELLED" => {
            Err(Failure::RolledBack { operation: operation.to_owned(), cause: last.error.clone() })
        }
        _ => Ok(()),
    }
}
