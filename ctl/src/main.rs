//! The command line of vmferry.
//!
//! It asks the planner over gRPC and shows the answer as a table or as JSON. It decides nothing
//! about VMs: what may be done, and why not, is the planner's word. `vmferry plan` asks the same
//! core about a fleet in a file.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | done |
//! | 1 | the planner cannot be reached, or failed |
//! | 2 | the command line, a file or a name is wrong |
//! | 3 | blocked: all reasons are listed |
//! | 4 | the wait timed out; the work goes on |
//! | 5 | the migration was rolled back; the guest is where it was |
//! | 6 | needs a human |

mod client;
mod command;
mod config;
mod failure;
mod follow;
mod output;
mod pki;
mod plan;
mod render;
mod runtime;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

use client::Client;
use failure::Failure;
use output::{Format, Output};

/// Move running virtual machines between hosts
#[derive(Debug, Parser)]
#[command(name = "vmferry", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done; 1 the planner cannot be reached or failed; 2 usage; \
    3 blocked; 4 wait timed out, the work goes on; 5 rolled back; 6 needs a human.")]
struct Cli {
    /// Address of the planner [default: http://127.0.0.1:9096, or `planner` in the config file]
    #[arg(long, global = true, value_name = "URL")]
    planner: Option<String>,
    /// Directory of the certificate to show, with an https:// address [default: VMFERRY_TLS_DIR, or
    /// `tls_dir` in the config file]
    #[arg(long, global = true, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// Config file; may be absent
    #[arg(long, global = true, value_name = "FILE", default_value = config::DEFAULT_PATH)]
    config: PathBuf,
    /// How to print
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show hosts, close, empty and retire them, and say which is dead
    #[command(subcommand)]
    Host(command::host::Command),
    /// Show, start, stop, move and delete VMs
    #[command(subcommand)]
    Vm(command::vm::Command),
    /// Show, watch, cancel and resolve migrations
    #[command(subcommand)]
    Migration(command::migration::Command),
    /// Show what the fleet has and has left, and answer whether it can lose a host, and how many more
    /// VMs fit; exit code 3 if the host cannot be lost
    Capacity(command::capacity::Arguments),
    /// List what waits for room: migrations and starts, in the order in which they are tried
    Queue,
    /// Ask every host, hold the planner's store against the answers, and name what contradicts;
    /// exit code 0 if all is well, 6 if a human is needed
    Doctor {
        /// Only this VM (name or id)
        #[arg(default_value = "", hide_default_value = true)]
        vm: String,
    },
    /// Ask agents themselves, and move VMs between them, where there is no planner
    #[command(subcommand)]
    Runtime(command::runtime::Command),
    /// Make, show and renew the certificates of a fleet, as files on this machine
    #[command(subcommand)]
    Pki(command::pki::Command),
    /// Show where a host's VMs would go, by an inventory file and without a planner
    Plan {
        /// The inventory, as JSON; - for standard input
        file: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output::new(cli.output);
    match run(cli, &output).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output.failure(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

async fn run(cli: Cli, output: &Output) -> Result<(), Failure> {
    let given = config::Given { planner: cli.planner, tls_dir: cli.tls_dir };
    let connect = || Client::new(config::settings(given.clone(), &cli.config)?);
    match cli.command {
        Command::Host(command) => command::host::run(command, &connect()?, output).await,
        Command::Vm(command) => command::vm::run(command, &connect()?, output).await,
        Command::Migration(command) => command::migration::run(command, &connect()?, output).await,
        Command::Capacity(arguments) => {
            command::capacity::run(arguments, &connect()?, output).await
        }
        Command::Queue => command::queue::run(&connect()?, output).await,
        Command::Doctor { vm } => command::doctor::run(&vm, &connect()?, output).await,
        Command::Plan { file } => command::plan::run(&file, output),
        Command::Runtime(command) => {
            command::runtime::run(command, (given, &cli.config), output).await
        }
        Command::Pki(command) => command::pki::run(command, output),
        Command::Completions { shell } => {
            output.text(&command::completions::script(shell));
            Ok(())
        }
    }
}
