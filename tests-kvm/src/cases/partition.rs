//! Hosts that cannot be reached for a while: unknown is not gone.

use std::time::Duration;

use anyhow::Result;

use super::{Case, Note, POINT_BOUND, Tier, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;
use crate::lab::Plug;
use crate::wait::let_pass;

/// Longer than a lease, so that whoever gives up on silence would have done so.
const CUT_OFF: Duration = Duration::from_secs(4);

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for phase in ["ordered", "restored", "committed", "attached"] {
        for (label, host) in [("source", "a"), ("destination", "b")] {
            // Ordered and cut off: the source's word and the destination's are both out of reach in turn.
            let usual = phase == "committed" && label == "destination";
            let tier = if usual { Tier::Subset } else { Tier::All };
            let name = format!("{label}-cut-off-at-{phase}-goes-on");
            cases.push(Case::new(name, tier, move |cluster| {
                Box::pin(cut_off(cluster, host, phase))
            }));
        }
    }
    cases
}

async fn cut_off(cluster: &mut Cluster<'_>, host: &str, phase: &str) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("distant"), "a").await?;
    let point = format!("after_commit.{phase}");
    cluster.planner.faults.hold(&point)?;
    let migration = request(cluster, &move_to(&vm, "b")).await?;
    cluster.planner.faults.wait_reached(&point, POINT_BOUND).await?;
    cluster.lab.set_plug(host, Plug::Out)?;
    cluster.planner.faults.release(&point)?;
    let_pass(CUT_OFF).await;
    cluster.lab.set_plug(host, Plug::In)?;
    settle(cluster, &vm, &migration.id, End::Done).await?;
    Ok(pause_note(&vm))
}
