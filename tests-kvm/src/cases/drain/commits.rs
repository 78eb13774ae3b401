//! The planner dies before and after each commit that it takes to empty a host.

use anyhow::{Context as _, Result, bail};
use vmferry_proto::v1::{Emptying, MaintenanceRequest};

use super::{BOUND, EMPTY_BOUND, drain, expect_off, see, start_all, wait_heard_from};
use crate::cases::{Case, Note, Tier};
use crate::cluster::Cluster;
use crate::story::Moment;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("planner-killed-at-each-commit-of-a-retirement", Tier::All, |cluster| {
            Box::pin(at_each_commit(cluster, Asked::Retire))
        })
        .on_three_hosts(),
        Case::new("planner-killed-at-each-commit-of-a-job", Tier::All, |cluster| {
            Box::pin(at_each_commit(cluster, Asked::Maintain))
        })
        .on_three_hosts(),
    ]
}

/// What is asked of host a.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Retire,
    Maintain,
}

impl Asked {
    /// The commits that it comes to, in order.
    const fn points(self) -> &'static [&'static str] {
        match self {
            Self::Retire => &["emptying_begun", "drain_granted"],
            Self::Maintain => &["emptying_begun", "job_verifying", "job_maintenance"],
        }
    }

    const fn opened(self) -> &'static str {
        match self {
            Self::Retire => "drain_opened",
            Self::Maintain => "job_opened",
        }
    }

    const fn end(self) -> &'static str {
        match self {
            Self::Retire => "GRANTED",
            Self::Maintain => "MAINTENANCE",
        }
    }

    const fn told(self) -> &'static str {
        match self {
            Self::Retire => "retired since",
            Self::Maintain => "in maintenance since",
        }
    }

    async fn ask(self, cluster: &Cluster<'_>) -> Result<Emptying, tonic::Status> {
        let mut planner = cluster.clients.planner();
        let reply = match self {
            Self::Retire => planner.retire_host(drain("a")).await?,
            Self::Maintain => {
                let asked =
                    MaintenanceRequest { host: "a".to_owned(), policy: None, by: "e2e".to_owned() };
                planner.execute_maintenance(asked).await?
            }
        };
        Ok(reply.into_inner())
    }
}

async fn at_each_commit(cluster: &mut Cluster<'_>, asked: Asked) -> Result<Note> {
    let vms = start_all(cluster, &["one", "two"], "a").await?;
    let mut deaths = 0;
    for side in ["before_commit", "after_commit"] {
        cluster.planner.faults.kill_at(&format!("{side}.{}", asked.opened()))?;
        if asked.ask(cluster).await.is_ok() {
            bail!("a planner answered that was to die at {side}.{}", asked.opened());
        }
        cluster.planner.daemon.wait_end(BOUND).await?;
        deaths += 1;
        if side == "before_commit" {
            cluster.planner.daemon.start()?;
            cluster.wait_heard().await?;
        }
    }
    for point in asked.points() {
        for side in ["before_commit", "after_commit"] {
            cluster.planner.faults.kill_at(&format!("{side}.{point}"))?;
            cluster.planner.daemon.start()?;
            cluster.planner.daemon.wait_end(EMPTY_BOUND).await?;
            deaths += 1;
        }
    }
    cluster.planner.daemon.start()?;
    wait_heard_from(cluster).await?;
    let of = Moment::of(cluster, "a", &vms).await?;
    let id = of.emptying()["id"].as_str().context("nothing empties host a")?.to_owned();
    see(cluster, &id, asked.end(), EMPTY_BOUND, |seen| seen.state == asked.end()).await?;
    Moment::of(cluster, "a", &vms).await?.tells(&[asked.told(), "its own agent said"])?;
    expect_off(cluster, &vms, &["a"]).await?;
    Ok(format!("{deaths} deaths"))
}
