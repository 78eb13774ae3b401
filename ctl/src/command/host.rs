//! `vmferry host`.

use clap::Subcommand;

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
    }
    Ok(())
}
