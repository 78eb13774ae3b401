//! Daemons that are killed while memory crosses: the migration ends as if they had not been. What
//! happens around each commit is the crash matrix's.

use anyhow::Result;
use vmferry_proto::v1::{MigrateVmRequest, Migration};

use super::{Case, Note, POINT_BOUND, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;

/// Who is killed.
#[derive(Clone, Copy, Debug)]
enum Victims {
    Planner,
    SourceAgent,
    DestinationAgent,
    All,
}

impl Victims {
    const EACH: [Self; 4] = [Self::Planner, Self::SourceAgent, Self::DestinationAgent, Self::All];

    const fn label(self) -> &'static str {
        match self {
            Self::Planner => "planner",
            Self::SourceAgent => "source-agent",
            Self::DestinationAgent => "destination-agent",
            Self::All => "all-daemons",
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |victims: Victims| {
        let name = format!("{}-killed-while-copying-goes-on", victims.label());
        let tier = match victims {
            Victims::All => Tier::Subset,
            Victims::Planner | Victims::SourceAgent | Victims::DestinationAgent => Tier::All,
        };
        Case::new(name, tier, move |cluster| Box::pin(while_copying(cluster, victims)))
    };
    Victims::EACH.into_iter().map(case).collect()
}

/// Kills daemons with SIGKILL, all of them before the first is started again.
async fn kill_and_start(cluster: &mut Cluster<'_>, victims: Victims) -> Result<()> {
    let (planner, agents): (bool, &[&str]) = match victims {
        Victims::Planner => (true, &[]),
        Victims::SourceAgent => (false, &["a"]),
        Victims::DestinationAgent => (false, &["b"]),
        Victims::All => (true, &["a", "b"]),
    };
    if planner {
        cluster.planner.daemon.kill().await?;
    }
    for host in agents {
        cluster.host(host)?.agent.kill().await?;
    }
    for host in agents {
        cluster.host(host)?.agent.start()?;
    }
    if planner { cluster.planner.daemon.start() } else { Ok(()) }
}

async fn while_copying(cluster: &mut Cluster<'_>, victims: Victims) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("carried"), "a").await?;
    let slow = MigrateVmRequest { bandwidth_mbps: 240, ..move_to(&vm, "b") };
    let migration = request(cluster, &slow).await?;
    let copying = |m: &Migration| m.phase == "admitted" && m.bytes_transferred > 0;
    cluster.clients.wait_migration(&migration.id, "to copy", POINT_BOUND, copying).await?;
    kill_and_start(cluster, victims).await?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}
