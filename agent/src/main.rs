//! The agent's command line.

use std::process::ExitCode;

use clap::Parser;
use vmferry_agent::shim::{self, ShimArgs};

/// Own the QEMU processes of this host
#[derive(Debug, Parser)]
#[command(name = "vmferry-agent", version)]
enum Cli {
    /// Be the parent of one QEMU process (started by the agent itself)
    Shim(ShimArgs),
}

fn main() -> ExitCode {
    match Cli::parse() {
        // Before any runtime: a shim forks first.
        Cli::Shim(args) => shim::run(&args),
    }
}
