//! `vmferry vm`.

use clap::{Args, Subcommand, ValueEnum};
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use vmferry_proto::v1::{DeleteVmRequest, MigrateVmRequest, StartVmRequest, StopVmRequest, Vm};
use vmferry_types::PowerState;

use super::gates::{GateArgs, settle_at_gate};
use super::migration::{WaitArgs, wait_for_end};
use crate::client::Client;
use crate::failure::Failure;
use crate::follow::verdict;
use crate::output::Output;
use crate::render;
use crate::render::quantity::{duration, quoted_or};

/// How often a wait for a start or a stop looks. A guest takes seconds for either.
const LOOK: Duration = Duration::from_millis(250);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List VMs
    List {
        /// Only those on this host
        #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
        host: String,
    },
    /// Show one VM
    Show {
        /// Name or id
        vm: String,
    },
    /// Start a VM: one that is known by NAME, or a new one from a definition FILE.toml
    Start(StartArgs),
    /// Stop a VM: ask the guest, or pull the plug
    Stop(StopArgs),
    /// Forget a VM that is stopped or lost; its disks are not touched
    Delete {
        /// Name or id
        vm: String,
        /// It is taken to run, and you have made sure that no host has it: all are asked, and have
        /// to answer or to be declared dead
        #[arg(long)]
        it_runs_nowhere: bool,
    },
    /// Move a running VM to another host
    Migrate(MigrateArgs),
    /// Show a VM's ports at both ends of its migration
    Network {
        /// Name or id
        vm: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// Name or id of a known VM, or a definition file that ends in .toml
    #[arg(value_name = "NAME|FILE.toml")]
    vm: String,
    /// Start it on this host; without, the planner chooses
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    on: String,
    /// How long it may wait for room [default: the planner's own limit, 2h]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    queue_deadline: Option<Duration>,
    #[command(flatten)]
    request: RequestArgs,
    #[command(flatten)]
    wait: WaitArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Name or id
    vm: String,
    /// How to stop it
    #[arg(long, value_enum, default_value_t = StopHow::Powerdown)]
    how: StopHow,
    /// How long a guest that is asked may take; past it the VM is left running
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    deadline: Duration,
    #[command(flatten)]
    wait: WaitArgs,
}

/// How a VM is stopped.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum StopHow {
    /// Press the power button; the guest decides
    Powerdown,
    /// Pull the plug
    Quit,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// Name or id
    vm: String,
    /// Move it to this host; without, the planner chooses
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    to: String,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    gates: GateArgs,
    #[command(flatten)]
    request: RequestArgs,
    #[command(flatten)]
    wait: WaitArgs,
}

/// What one migration does other than the planner's policy says.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "independent flags, as the message has them")]
struct PolicyArgs {
    /// How the guest is carried: precopy while it runs, postcopy, going before its memory, snapshot,
    /// held still meanwhile, or cold, shut down and started anew
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// What may be done if it cannot be moved while it runs: nothing, hold it still instead, or, where
    /// QEMU bars that too, shut it down
    /// [default: the planner's]
    #[arg(long, value_enum)]
    downgrade: Option<Downgrade>,
    /// What is done if a precopy does not converge: nothing until its time limit, or let the guest go
    /// before its memory [default: the planner's]
    #[arg(long, value_enum)]
    not_converging: Option<NotConverging>,
    /// Let the guest be shut down: method cold needs this leave, unless the VM is stopped already
    #[arg(long)]
    allow_shutdown: bool,
    /// How long a guest that is to be shut down may take to power off [default: the planner's, 2m]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    shutdown_limit: Option<Duration>,
    /// Send at most this many megabits per second (100 is 12 500 000 bytes per second)
    #[arg(long, value_name = "MBIT/S", default_value_t = 0, hide_default_value = true)]
    bandwidth: u64,
    /// How long QEMU may plan to stand still, like 100ms
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    downtime_limit: Option<Duration>,
    /// Slow the guest down where it dirties memory faster than it can be sent
    #[arg(long)]
    auto_converge: bool,
    /// Take it back where it has not reached the switchover after this long
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    transfer_timeout: Option<Duration>,
    /// How long the guest may stand still before the switchover is ordered
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    hold_limit: Option<Duration>,
    /// How long it may wait for room
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    queue_deadline: Option<Duration>,
}

/// How a guest is carried.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Method {
    /// Its memory crosses while it runs
    Precopy,
    /// It goes first, and its memory follows: from the switchover on there is no way back
    Postcopy,
    /// It stands still while its memory crosses
    Snapshot,
    /// It is shut down and started anew at the destination
    Cold,
}

impl Method {
    const fn label(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Snapshot => "snapshot",
            Self::Cold => "cold",
        }
    }
}

/// What may be done if a live move is refused.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Downgrade {
    /// Nothing: it stays where it is
    Never,
    /// Hold it still while its memory crosses
    Snapshot,
    /// Shut it down where QEMU lets it move in no other way; else as snapshot
    Cold,
}

impl Downgrade {
    const fn label(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Snapshot => "snapshot",
            Self::Cold => "cold",
        }
    }
}

/// What is done if a precopy does not converge.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum NotConverging {
    /// It is taken back, or its guest held where --downgrade says so
    Abort,
    /// The guest is slowed down until it does
    AutoConverge,
    /// The guest goes before its memory, if both ends can do that
    Postcopy,
    /// The guest is held while its memory crosses
    Pause,
    /// It goes on until its time limit
    Wait,
}

impl NotConverging {
    const fn label(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::AutoConverge => "auto_converge",
            Self::Postcopy => "postcopy",
            Self::Pause => "pause",
            Self::Wait => "wait",
        }
    }
}

/// What makes a repeated command the same request.
#[derive(Debug, Args)]
struct RequestArgs {
    /// Answer with what this id began before, if it did [default: a fresh id]
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,
}

impl RequestArgs {
    fn id(&self) -> String {
        self.request_id.clone().unwrap_or_else(|| Uuid::new_v4().to_string())
    }
}

pub(crate) async fn run(command: Command, client: &Client, output: &Output) -> Result<(), Failure> {
    match command {
        Command::List { host } => {
            let reply = client.list_vms(&host).await?;
            output.answer(&reply, |reply| render::vm::list(&reply.vms));
            Ok(())
        }
        Command::Show { vm } => {
            let vm = client.vm(&vm).await?;
            output.answer(&vm, render::vm::show);
            Ok(())
        }
        Command::Start(args) => start(client, output, &args).await,
        Command::Stop(args) => stop(client, output, &args).await,
        Command::Delete { vm, it_runs_nowhere } => {
            let confirmation = if it_runs_nowhere { "it-runs-nowhere" } else { "" };
            let operation = format!("delete VM {vm}");
            let request = DeleteVmRequest { vm, confirmation: confirmation.to_owned() };
            let reply = client.delete_vm(&operation, request).await?;
            output.answer(&reply, render::vm::deleted);
            Ok(())
        }
        Command::Migrate(args) => migrate(client, output, &args).await,
        Command::Network { vm } => {
            let state = client.network_state(&vm).await?;
            output.answer(&state, render::vm::network);
            Ok(())
        }
    }
}

async fn start(client: &Client, output: &Output, args: &StartArgs) -> Result<(), Failure> {
    let operation = match args.on.as_str() {
        "" => format!("start VM {}", args.vm),
        host => format!("start VM {} on {host}", args.vm),
    };
    let is_file = Path::new(&args.vm).extension().is_some_and(|extension| extension == "toml");
    let (vm, definition) = if is_file {
        let text = std::fs::read_to_string(&args.vm).map_err(|error| Failure::Usage {
            operation: operation.clone(),
            problem: format!("read the definition {}: {error}", args.vm),
        })?;
        (String::new(), text)
    } else {
        (args.vm.clone(), String::new())
    };
    let host = args.on.clone();
    let request_id = args.request.id();
    let queue_deadline_ms = args.queue_deadline.map_or(0, whole_millis);
    let request =
        StartVmRequest { vm, definition, host, request_id, wait_ms: 0, queue_deadline_ms };
    let vm = client.start_vm(&operation, request).await?;
    settle(client, output, &operation, vm, &args.wait).await
}

async fn stop(client: &Client, output: &Output, args: &StopArgs) -> Result<(), Failure> {
    let operation = format!("stop VM {}", args.vm);
    let how = match args.how {
        StopHow::Powerdown => "powerdown",
        StopHow::Quit => "quit",
    };
    let request = StopVmRequest {
        vm: args.vm.clone(),
        how: how.to_owned(),
        deadline_ms: whole_millis(args.deadline),
        wait_ms: 0,
    };
    let vm = client.stop_vm(&operation, request).await?;
    settle(client, output, &operation, vm, &args.wait).await
}

/// Waits, if asked to, until a start or a stop has ended; prints the VM.
async fn settle(
    client: &Client,
    output: &Output,
    operation: &str,
    begun: Vm,
    wait: &WaitArgs,
) -> Result<(), Failure> {
    let wanted = goal(&begun);
    let deadline = Instant::now().checked_add(wait.timeout);
    let mut vm = begun;
    while wait.wait && wanted.is_some() && goal(&vm).is_some() {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            output.answer(&vm, render::vm::summary);
            return Err(Failure::WaitTimedOut {
                operation: operation.to_owned(),
                waited: duration(wait.timeout),
                standing: vm.power,
                advice: format!("see `vmferry vm show {}`", vm.name),
            });
        }
        sleep(LOOK).await;
        match client.vm(&vm.id).await {
            Ok(now) => vm = now,
            // A planner that restarts meanwhile drives on what it has begun.
            Err(Failure::Unreachable { .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
    output.answer(&vm, render::vm::summary);
    settled(operation, wanted, &vm)
}

/// Returns the power that a VM under way to it will have; `None` if it is not under way.
fn goal(vm: &Vm) -> Option<PowerState> {
    if vm.queued.is_some() {
        return Some(PowerState::Running);
    }
    match PowerState::from_label(&vm.power) {
        Some(PowerState::Starting) => Some(PowerState::Running),
        Some(PowerState::Stopping) => Some(PowerState::Stopped),
        Some(PowerState::Running | PowerState::Stopped | PowerState::Lost) | None => None,
    }
}

fn settled(operation: &str, wanted: Option<PowerState>, vm: &Vm) -> Result<(), Failure> {
    let power = PowerState::from_label(&vm.power);
    let operation = operation.to_owned();
    let cause = quoted_or(&vm.error, "no cause was recorded");
    if power == Some(PowerState::Lost) {
        let advice = format!("see `vmferry vm show {}`", vm.name);
        return Err(Failure::NeedsHuman { operation, cause, advice });
    }
    if wanted.is_none() || power == wanted || goal(vm).is_some() {
        return Ok(());
    }
    Err(Failure::Failed { operation, cause })
}

async fn migrate(client: &Client, output: &Output, args: &MigrateArgs) -> Result<(), Failure> {
    let operation = match args.to.as_str() {
        "" => format!("migrate VM {}", args.vm),
        host => format!("migrate VM {} to {host}", args.vm),
    };
    let policy = &args.policy;
    let limit = |limit: Option<Duration>| limit.map_or(0, whole_millis);
    let request = MigrateVmRequest {
        vm_name: args.vm.clone(),
        target_host: args.to.clone(),
        method: policy.method.map_or("", Method::label).to_owned(),
        downgrade: policy.downgrade.map_or("", Downgrade::label).to_owned(),
        not_converging: policy.not_converging.map_or("", NotConverging::label).to_owned(),
        bandwidth_mbps: policy.bandwidth,
        request_id: args.request.id(),
        downtime_limit_ms: limit(policy.downtime_limit),
        auto_converge: policy.auto_converge,
        allow_shutdown: policy.allow_shutdown,
        shutdown_limit_ms: limit(policy.shutdown_limit),
        timeout_ms: limit(policy.transfer_timeout),
        hold_limit_ms: limit(policy.hold_limit),
        queue_deadline_ms: limit(policy.queue_deadline),
        gates: args.gates.labels(),
        gate_deadline_ms: limit(args.gates.gate_deadline),
        ..MigrateVmRequest::default()
    };
    let migration = client.migrate_vm(&operation, request).await?;
    if !args.wait.wait {
        output.answer(&migration, render::migration::summary);
        return Ok(());
    }
    if !args.gates.labels().is_empty() {
        return settle_at_gate(client, output, (&operation, migration), &args.wait).await;
    }
    let followed = wait_for_end(client, output, migration, args.wait.timeout).await?;
    verdict(&operation, &followed)
}

/// A limit below a millisecond is one millisecond: 0 means the planner's own.
pub(super) fn whole_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}
