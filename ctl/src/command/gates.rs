//! Migrations that are made step by step.

use clap::{Args, ValueEnum};
use std::time::Duration;
use tokio::time::{Instant, sleep};
use vmferry_proto::v1::{Migration, OpenGateRequest};

use super::migration::WaitArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::follow::{Followed, is_over, verdict};
use crate::output::Output;
use crate::render;
use crate::render::quantity::quoted_or;

/// How often a wait for a gate looks.
const LOOK: Duration = Duration::from_millis(100);

/// Where a migration is to wait for its operator.
#[derive(Debug, Args)]
pub(crate) struct GateArgs {
    /// Wait for `vmferry migration go` at these gates; without names, at all of them
    #[arg(long, value_enum, value_name = "GATES", num_args = 0.., value_delimiter = ',',
          require_equals = true, default_missing_value = "start,switchover,commit")]
    step_by_step: Option<Vec<Gate>>,
    /// How long it waits at each gate before it is taken back [default: the planner's, 10m]
    #[arg(long, value_name = "TIME", requires = "step_by_step",
          value_parser = humantime::parse_duration)]
    pub(crate) gate_deadline: Option<Duration>,
}

impl GateArgs {
    /// Returns the gates that are closed.
    pub(crate) fn labels(&self) -> Vec<String> {
        let closed = self.step_by_step.iter().flatten();
        closed.map(|gate| gate.label().to_owned()).collect()
    }
}

#[derive(Debug, Args)]
pub(crate) struct GoArgs {
    /// Migration id
    id: String,
    /// The gate that is meant [default: the one that it waits at now]
    #[arg(long, value_enum)]
    gate: Option<Gate>,
    /// Open every gate that is left, once the guest's memory has crossed
    #[arg(long, conflicts_with = "gate")]
    all: bool,
    #[command(flatten)]
    wait: WaitArgs,
}

/// A point where a migration may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Gate {
    /// The receiver is ready, and nothing is sent; the guest runs
    Start,
    /// The guest stands still at the source, and nothing is ordered
    Switchover,
    /// The destination has everything, and the guest stands still
    Commit,
}

impl Gate {
    const fn label(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Switchover => "switchover",
            Self::Commit => "commit",
        }
    }
}

/// Opens the gate that is named, or else the one that is waited at: never one that the caller has
/// not seen, so a command that is given twice opens one gate.
pub(crate) async fn go(client: &Client, output: &Output, args: &GoArgs) -> Result<(), Failure> {
    let operation = format!("let migration {} go on", args.id);
    let gate = match args.gate {
        _ if args.all => "all".to_owned(),
        Some(gate) => gate.label().to_owned(),
        None => {
            let seen = client.migration(&args.id).await?;
            if seen.waits_at_gate.is_empty() {
                output.answer(&seen, render::migration::summary);
                let cause = quoted_or(&seen.error, "see `vmferry migration show`");
                let cause = format!("it waits at no gate, it is {}: {cause}", seen.phase);
                return Err(Failure::Failed { operation, cause });
            }
            seen.waits_at_gate
        }
    };
    let request = OpenGateRequest { id: args.id.clone(), gate, ..OpenGateRequest::default() };
    let migration = client.open_gate(&operation, request).await?;
    if !args.wait.wait {
        output.answer(&migration, render::migration::summary);
        return Ok(());
    }
    settle_at_gate(client, output, (&operation, migration), &args.wait).await
}

/// Waits until a migration has ended or waits at a gate, and prints it.
pub(crate) async fn settle_at_gate(
    client: &Client,
    output: &Output,
    (operation, begun): (&str, Migration),
    wait: &WaitArgs,
) -> Result<(), Failure> {
    let deadline = Instant::now().checked_add(wait.timeout);
    let mut seen = begun;
    loop {
        let ended = is_over(&seen);
        if ended || !seen.waits_at_gate.is_empty() {
            output.answer(&seen, render::migration::summary);
            return if ended {
                verdict(operation, &Followed::Ended(Box::new(seen)))
            } else {
                Ok(())
            };
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let last = Some(Box::new(seen));
            return verdict(operation, &Followed::TimedOut { last, waited: wait.timeout });
        }
        sleep(LOOK).await;
        match client.migration(&seen.id).await {
            Ok(now) => seen = now,
            // A planner that restarts meanwhile drives on what it has begun.
            Err(Failure::Unreachable { .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
}
