//! `vmferry host`.

use clap::{Args, Subcommand};
use std::time::Duration;
use vmferry_proto::v1::{
    CordonHostRequest, DeclareHostDeadRequest, DeleteHostRequest, FenceHostRequest,
    UncordonHostRequest,
};

use crate::client::Client;
use crate::failure::Failure;
use crate::output::Output;
use crate::render;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List hosts with their free capacity
    List,
    /// Show one host, its VMs and every reason why it takes no placements
    Show {
        /// Id or display name
        host: String,
    },
    /// Keep a host from taking placements, in your name
    Cordon(CordonArgs),
    /// Let a host take placements again; cancels the drain or retirement that holds it
    Uncordon {
        /// Id or display name
        host: String,
        /// Lift what this operator holds
        #[arg(long, value_name = "NAME")]
        owner: Option<String>,
    },
    /// Plan, carry out, cancel and complete maintenance
    #[command(subcommand)]
    Maintenance(super::emptying::Command),
    /// Empty a host and keep it empty, until it is uncordoned
    Drain(super::emptying::DrainArgs),
    /// Empty a host to be rid of it: once its own agent says that it is empty it may be deleted
    Retire(super::emptying::DrainArgs),
    /// Forget a retired host, or a dead one that nothing is left of
    Delete {
        /// Id or display name
        host: String,
    },
    /// Say that a host is dead, after its power was switched off by hand: its VMs are lost and may
    /// be started elsewhere, and migrations that wait for it end
    DeclareDead(DeclareArgs),
    /// Run the planner's fence command for a host; only if it succeeds the host is declared dead
    Fence {
        /// Id or display name
        host: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CordonArgs {
    /// Id or display name
    host: String,
    /// Why; for whoever finds the host closed
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Let it end by itself after so long
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    time: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct DeclareArgs {
    /// Id or display name
    host: String,
    /// That its power is off, and stays off until its VMs were seen to elsewhere
    #[arg(long)]
    i_have_powered_it_off: bool,
    /// What happened to it; kept with the declaration
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub(crate) async fn run(command: Command, client: &Client, output: &Output) -> Result<(), Failure> {
    match command {
        Command::List => {
            let reply = client.list_hosts().await?;
            output.answer(&reply, |reply| render::host::list(&reply.hosts));
        }
        Command::Show { host } => {
            let host = client.host(&host).await?;
            output.answer(&host, render::host::show);
        }
        Command::Cordon(args) => {
            let operation = format!("cordon host {}", args.host);
            let millis =
                |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
            let for_ms = args.time.map_or(0, millis);
            let request =
                CordonHostRequest { host: args.host, by: who(), reason: args.reason, for_ms };
            let host = client.cordon_host(&operation, request).await?;
            output.answer(&host, render::host::story);
        }
        Command::Uncordon { host, owner } => {
            let operation = format!("uncordon host {host}");
            let request = UncordonHostRequest { host, by: owner.unwrap_or_else(who) };
            let host = client.uncordon_host(&operation, request).await?;
            output.answer(&host, render::host::story);
        }
        Command::Maintenance(command) => super::emptying::run(command, client, output).await?,
        Command::Drain(args) => super::emptying::drain(args, client, output).await?,
        Command::Retire(args) => super::emptying::retire(args, client, output).await?,
        Command::Delete { host } => {
            let operation = format!("delete host {host}");
            let request = DeleteHostRequest { host, by: who() };
            let reply = client.delete_host(&operation, request).await?;
            output.answer(&reply, |reply| format!("host {} is deleted", reply.id));
        }
        Command::DeclareDead(args) => declare_dead(client, output, args).await?,
        Command::Fence { host } => {
            let operation = format!("fence host {host}");
            let request = FenceHostRequest { host, by: who() };
            let host = client.fence_host(&operation, request).await?;
            output.answer(&host, render::host::declared);
        }
    }
    Ok(())
}

async fn declare_dead(client: &Client, output: &Output, args: DeclareArgs) -> Result<(), Failure> {
    let operation = format!("declare host {} dead", args.host);
    if !args.i_have_powered_it_off {
        return Err(Failure::Usage {
            operation,
            problem: format!(
                "--i-have-powered-it-off is missing. Its VMs will be started elsewhere: if it still \
                 runs, or comes back by itself, they run twice and damage their disks. Switch its \
                 power off, make sure of it, and say so with the flag; or let `vmferry host fence \
                 {}` do it",
                args.host
            ),
        });
    }
    let request = DeclareHostDeadRequest {
        host: args.host,
        confirmation: "i-have-powered-it-off".to_owned(),
        reason: args.reason,
        by: who(),
    };
    let host = client.declare_host_dead(&operation, request).await?;
    output.answer(&host, render::host::declared);
    Ok(())
}

/// Names who gives the command, as far as this machine knows.
pub(super) fn who() -> String {
    let name = ["SUDO_USER", "USER", "LOGNAME"].into_iter().find_map(|of| std::env::var(of).ok());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "an operator".to_owned())
}
