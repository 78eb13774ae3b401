//! `vmferry migration`.

use clap::{Args, Subcommand, ValueEnum};
use std::time::Duration;
use vmferry_proto::v1::{
    ListMigrationsRequest, Migration, ResolveMigrationRequest, SetMigrationLimitsRequest,
};
use vmferry_types::PhaseLabel;

use crate::client::Client;
use crate::command::vm::whole_millis;
use crate::failure::Failure;
use crate::follow::{Followed, Subject, follow, verdict};
use crate::output::Output;
use crate::render;
use crate::render::quantity::quoted_or;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List migrations, newest first
    List(ListArgs),
    /// Show one migration: phases, figures, log, and what holds it
    Show {
        /// Migration id
        id: String,
    },
    /// Follow a migration until it ends; `-o json` prints each state as a line
    Watch {
        /// Migration id
        id: String,
        /// Give up watching after this long; the migration goes on
        #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
        timeout: Option<Duration>,
    },
    /// Say which side of an undecided migration is right: it is kept, the other is ended
    Resolve(ResolveArgs),
    /// Let a migration pass the gate that it waits at
    Go(super::gates::GoArgs),
    /// Change what limits a migration under way; too late once the switchover was ordered
    SetLimits(LimitsArgs),
    /// Ask to take a migration back; too late once the switchover was ordered
    Cancel {
        /// Migration id
        id: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
}

#[derive(Debug, Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "two flags that exclude each other, as clap has it"
)]
pub(crate) struct ListArgs {
    /// Only those that have not ended
    #[arg(long, conflicts_with = "stuck")]
    open: bool,
    /// Only those that wait for something that does not come
    #[arg(long)]
    stuck: bool,
    /// Only those of this VM (name or id)
    #[arg(long, value_name = "VM", default_value = "", hide_default_value = true)]
    vm: String,
    /// At most this many
    #[arg(long, value_name = "N", default_value_t = 50)]
    limit: u32,
}

#[derive(Debug, Args)]
pub(crate) struct LimitsArgs {
    /// Migration id
    id: String,
    /// Cap on the transfer, in megabits per second; 0 takes the cap away
    #[arg(long, value_name = "MBPS", required_unless_present = "downtime_limit")]
    bandwidth: Option<u64>,
    /// How long the guest may stand still at the switchover
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    downtime_limit: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct ResolveArgs {
    /// Migration id
    id: String,
    /// The side whose guest is the right one
    #[arg(long, value_enum)]
    keep: Keep,
    /// That both guests were looked at
    #[arg(long)]
    i_have_checked: bool,
}

/// Which side is kept.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Keep {
    /// The guest goes on at the source
    Source,
    /// The guest goes on at the destination
    Destination,
    /// Both are ended; the VM may be started from its disks
    Neither,
}

/// Whether a command waits for what it began.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Wait for the end, and let the exit code say which
    #[arg(long)]
    pub(crate) wait: bool,
    /// How long to wait; the work goes on after it
    #[arg(long, value_name = "TIME", default_value = "10m", requires = "wait",
          value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
}

pub(crate) async fn run(command: Command, client: &Client, output: &Output) -> Result<(), Failure> {
    match command {
        Command::List(args) => {
            let ListArgs { open, stuck, vm, limit } = args;
            let request = ListMigrationsRequest { vm, open, stuck, limit };
            let reply = client.list_migrations(request).await?;
            output.answer(&reply, |reply| {
                render::migration::list(&reply.migrations)
                    + &render::migration::halves(&reply.halves)
            });
            Ok(())
        }
        Command::Show { id } => {
            let migration = client.migration(&id).await?;
            output.answer(&migration, render::migration::show);
            Ok(())
        }
        Command::Resolve(args) => resolve(client, output, args).await,
        Command::Watch { id, timeout } => watch(client, output, &id, timeout).await,
        Command::Go(args) => super::gates::go(client, output, &args).await,
        Command::SetLimits(args) => {
            let request = SetMigrationLimitsRequest {
                id: args.id,
                bandwidth_mbps: args.bandwidth,
                downtime_limit_ms: args.downtime_limit.map(whole_millis),
            };
            let migration = client.set_migration_limits(request).await?;
            output.answer(&migration, render::migration::summary);
            Ok(())
        }
        Command::Cancel { id, wait } => cancel(client, output, &id, &wait).await,
    }
}

/// Follows what was begun on the live display and prints its end.
pub(crate) async fn wait_for_end(
    client: &Client,
    output: &Output,
    begun: Migration,
    timeout: Duration,
) -> Result<Followed, Failure> {
    let mut live = output.live();
    let id = begun.id.clone();
    let subject = Subject { id: &id, seen: Some(begun) };
    let followed = follow(client, subject, Some(timeout), &mut |update| live.show(&update)).await;
    live.finish();
    let followed = followed?;
    match &followed {
        Followed::Ended(migration) => output.answer(migration.as_ref(), render::migration::summary),
        Followed::TimedOut { last: Some(migration), .. } => {
            output.answer(migration.as_ref(), render::migration::summary);
        }
        Followed::TimedOut { last: None, .. } => {}
    }
    Ok(followed)
}

async fn watch(
    client: &Client,
    output: &Output,
    id: &str,
    timeout: Option<Duration>,
) -> Result<(), Failure> {
    let mut live = output.live();
    let subject = Subject { id, seen: None };
    let followed = follow(client, subject, timeout, &mut |update| {
        output.json_line(&update);
        live.show(&update);
    })
    .await;
    live.finish();
    let followed = followed?;
    if let Followed::Ended(migration) = &followed {
        output.table(|| render::migration::summary(migration));
    }
    verdict(&format!("watch migration {id}"), &followed)
}

async fn cancel(
    client: &Client,
    output: &Output,
    id: &str,
    wait: &WaitArgs,
) -> Result<(), Failure> {
    let migration = client.cancel_migration(id).await?;
    if !wait.wait {
        output.answer(&migration, render::migration::summary);
        return Ok(());
    }
    let operation = format!("cancel migration {id}");
    let followed = wait_for_end(client, output, migration, wait.timeout).await?;
    if let Followed::Ended(migration) = &followed {
        match PhaseLabel::from_label(&migration.phase) {
            Some(PhaseLabel::Aborted) => return Ok(()),
            Some(PhaseLabel::Done) => {
                let on = quoted_or(&migration.target_host, "the destination");
                let problem = format!("too late: the guest runs on {on}");
                return Err(Failure::Blocked { operation, problem });
            }
            Some(
                PhaseLabel::Queued
                | PhaseLabel::Admitted
                | PhaseLabel::Captured
                | PhaseLabel::Restored
                | PhaseLabel::Committed
                | PhaseLabel::Attached
                | PhaseLabel::RollingBack
                | PhaseLabel::Failed,
            )
            | None => {}
        }
    }
    verdict(&operation, &followed)
}

async fn resolve(client: &Client, output: &Output, args: ResolveArgs) -> Result<(), Failure> {
    let operation = format!("resolve migration {}", args.id);
    if !args.i_have_checked {
        let problem = "--i-have-checked is missing: nothing proves which side's guest is the right \
             one, and the other is ended for good. See `vmferry doctor`, look at both guests, and \
             say so with the flag";
        return Err(Failure::Usage { operation, problem: problem.to_owned() });
    }
    let keep = match args.keep {
        Keep::Source => "source",
        Keep::Destination => "destination",
        Keep::Neither => "neither",
    };
    let request = ResolveMigrationRequest {
        id: args.id,
        keep: keep.to_owned(),
        confirmation: "i-have-checked".to_owned(),
    };
    let migration = client.resolve_migration(&operation, request).await?;
    output.answer(&migration, render::migration::summary);
    Ok(())
}
