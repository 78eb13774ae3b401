//! A guest that others talk to while it moves.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, bail};

use super::{Case, Note, Tier, move_vm, pause_note};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;
use crate::pinger::{PERIOD_US, Pinger};
use crate::wait::let_pass;

/// How long the guest may be silent on its network around a move, on a busy machine under TCG.
/// Without the announcement of its address it would be silent for ever.
const SILENCE_BOUND: Duration = Duration::from_secs(2);

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("pinged-linux-guest-moves", Tier::Subset, |cluster| Box::pin(pinged(cluster)))
            .with_linux(),
    ]
}

async fn pinged(cluster: &mut Cluster<'_>) -> Result<Note> {
    let address = Ipv4Addr::new(10, 88, 0, 10);
    let disk = cluster.disk_path("pinged.raw");
    let vm = cluster
        .start_vm(&GuestSpec::linux("pinged", &address.to_string()).with_disk(&disk, "raw"), "a")
        .await?;
    let pinger = Pinger::start(cluster.lab, address)?;
    let_pass(Duration::from_secs(1)).await;
    move_vm(cluster, &vm, "b").await?;
    move_vm(cluster, &vm, "a").await?;
    let_pass(Duration::from_secs(1)).await;
    let loss = pinger.finish()?;
    let silence = Duration::from_micros(loss.longest_gap_us);
    if loss.sent < 50 || silence > SILENCE_BOUND {
        bail!("{loss:?}: silent for longer than {SILENCE_BOUND:?}, or hardly pinged at all");
    }
    // Each move may cost the pings of its pause; more is lost network, not pause.
    let period = Duration::from_micros(PERIOD_US).as_secs_f64();
    Ok(format!(
        "{} of {} pings lost (one per {:.0} ms), longest gap {:.0} ms, {}",
        loss.lost,
        loss.sent,
        period * 1e3,
        silence.as_secs_f64() * 1e3,
        pause_note(&vm)
    ))
}
