//! `vmferry host`.

use clap::{Args, Subcommand};
use vmferry_proto::v1::{DeclareHostDeadRequest, FenceHostRequest};

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
fn who() -> String {
    let name = ["SUDO_USER", "USER", "LOGNAME"].into_iter().find_map(|of| std::env::var(of).ok());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "an operator".to_owned())
}
