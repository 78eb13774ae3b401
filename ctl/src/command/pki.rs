//! `vmferry pki`: the certificates of a fleet, as files on this machine.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use vmferry_tls::issue::{Names, Validity};
use vmferry_tls::{Identity, Role};

use crate::failure::Failure;
use crate::output::Output;
use crate::pki::{self, Existing};
use crate::render;

/// Where the authority's files are.
const PKI_DIR: &str = "/etc/vmferry/pki";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make the authority that signs the fleet's certificates
    Init(InitArgs),
    /// Make the certificate and key of a host, a planner or an operator
    Issue(IssueArgs),
    /// Show what certificates say, and how many days they have left
    Show {
        /// A directory or a PEM file
        #[arg(default_value = "/etc/vmferry/tls")]
        path: PathBuf,
    },
    /// Make a new key and certificate for the same identity; who uses it takes it up by itself
    Renew(RenewArgs),
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Where to put it
    #[arg(long, value_name = "DIR", default_value = PKI_DIR)]
    pki: PathBuf,
    /// What people call it
    #[arg(long, default_value = "vmferry")]
    name: String,
    /// How many days it counts
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    #[command(flatten)]
    replace: Replace,
}

#[derive(Debug, Args)]
struct Replace {
    /// Replace what is there; an authority that is replaced stays trusted for now
    #[arg(long)]
    replace: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum For {
    /// The agent of one host; NAME is its host_id
    Host,
    /// A planner
    Planner,
    /// A person, or a program that asks in one's place
    Operator,
}

impl From<For> for Role {
    fn from(word: For) -> Self {
        match word {
            For::Host => Self::Host,
            For::Planner => Self::Planner,
            For::Operator => Self::Operator,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct IssueArgs {
    /// What it is for
    #[arg(value_name = "ROLE")]
    role: For,
    /// Its name: 1 to 63 of a-z, 0-9, '.' and '-'
    name: String,
    /// Where the authority is
    #[arg(long, value_name = "DIR", default_value = PKI_DIR)]
    pki: PathBuf,
    /// Where to put it [default: ROLE/NAME below the authority]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// A DNS name under which browsers and others find it; may be repeated
    #[arg(long, value_name = "NAME")]
    dns: Vec<String>,
    /// An address under which they do; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    ip: Vec<IpAddr>,
    /// How many days it counts
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    #[command(flatten)]
    replace: Replace,
}

#[derive(Debug, Args)]
pub(crate) struct RenewArgs {
    /// The identity's directory
    dir: PathBuf,
    /// Where the authority is
    #[arg(long, value_name = "DIR", default_value = PKI_DIR)]
    pki: PathBuf,
    /// How many days it counts [default: as many as the one before]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: Option<u32>,
    /// Only take up the authorities that are trusted now; certificate and key stay
    #[arg(long, conflicts_with = "days")]
    trust_only: bool,
}

impl Replace {
    const fn existing(&self) -> Existing {
        if self.replace { Existing::Replace } else { Existing::Keep }
    }
}

/// Carries one out.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    let now = vmferry_tls::now();
    match command {
        Command::Init(asked) => {
            let validity = Validity { now, days: asked.days };
            let made = pki::init(&asked.pki, &asked.name, validity, asked.replace.existing())?;
            output.answer(&made, render::pki::made);
        }
        Command::Issue(asked) => {
            let role = Role::from(asked.role);
            let identity = Identity::new(role, &asked.name).map_err(|error| Failure::Usage {
                operation: format!("issue the certificate of {role} {}", asked.name),
                problem: error.to_string(),
            })?;
            let out =
                asked.out.unwrap_or_else(|| asked.pki.join(role.label()).join(identity.name()));
            let names = Names { dns: asked.dns, addresses: asked.ip };
            let validity = Validity { now, days: asked.days };
            let order = pki::Order {
                pki: &asked.pki,
                identity: &identity,
                names: &names,
                out: &out,
                validity,
            };
            let made = pki::issue(&order, asked.replace.existing())?;
            output.answer(&made, render::pki::made);
        }
        Command::Show { path } => output.answer(&pki::show(&path, now)?, render::pki::shown),
        Command::Renew(asked) => {
            let made = if asked.trust_only {
                pki::trust(&asked.pki, &asked.dir)?
            } else {
                pki::renew(&asked.pki, &asked.dir, now, asked.days)?
            };
            output.answer(&made, render::pki::made);
        }
    }
    Ok(())
}
