//! Moves over TLS: between hosts that are reached over a network, with a planner that is as well.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tonic::transport::Endpoint;
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_proto::v1::{GetReportRequest, MigrateVmRequest};

use super::{Case, MOVE_BOUND, Note, Tier, move_vm, pause_note, request, settle};
use crate::client::{End, move_to};
use crate::cluster::Cluster;
use crate::guest::GuestSpec;
use crate::lab::host_address;
use crate::pki::Pki;
use crate::wait::{Holds, Level, wait_for};

/// How long an agent may take to see that its files are new.
const RELOAD_BOUND: Duration = Duration::from_secs(15);

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("guest-goes-there-and-back-over-tls", Tier::Subset, |cluster| {
            Box::pin(there_and_back(cluster))
        }),
        Case::new(
            "certificates-of-strangers-and-plain-text-get-nowhere",
            Tier::Subset,
            |cluster| Box::pin(strangers(cluster)),
        ),
        Case::new("guest-goes-before-its-memory-over-tls", Tier::All, |cluster| {
            Box::pin(postcopy(cluster))
        }),
    ]
}

async fn there_and_back(cluster: &mut Cluster<'_>) -> Result<Note> {
    let disk = cluster.disk_path("tls.raw");
    let vm = cluster.start_vm(&GuestSpec::rom("tls").with_disk(&disk, "raw"), "a").await?;
    move_vm(cluster, &vm, "b").await?;
    // New keys on both hosts and at the planner; nobody is restarted.
    let pki = cluster.pki()?;
    for (role, name) in [("host", "a"), ("host", "b"), ("planner", "pl0")] {
        pki.renew(role, name)?;
    }
    for daemon in ["agent-a", "agent-b", "planner"] {
        wait_reloaded(cluster, daemon).await?;
    }
    move_vm(cluster, &vm, "a").await?;
    Ok(pause_note(&vm))
}

async fn wait_reloaded(cluster: &Cluster<'_>, daemon: &str) -> Result<()> {
    let path = cluster.dir().join("log").join(format!("{daemon}.log"));
    wait_for(format_args!("{daemon} to load its new certificates"), RELOAD_BOUND, || async {
        let log = std::fs::read_to_string(&path).context("read the log")?;
        let loaded = log.contains("certificates loaded anew");
        Ok(Level::from_condition(Holds::from(loaded), || "not said yet".to_owned()))
    })
    .await
}

async fn strangers(cluster: &mut Cluster<'_>) -> Result<Note> {
    let address = format!("http://{}:9097", host_address("a"));
    let endpoint = Endpoint::from_shared(address).context("read the address")?;
    let mut plain = AgentClient::new(endpoint.connect_lazy());
    if plain.get_report(GetReportRequest {}).await.is_ok() {
        bail!("an agent with certificates answers plain text");
    }
    // An authority of their own makes nobody known here.
    let elsewhere = cluster.dir().join("elsewhere");
    std::fs::create_dir_all(&elsewhere).context("create a directory")?;
    Pki::create(&cluster.artifacts.binaries, &elsewhere)?;
    let stranger = elsewhere.join("pki/operator/e2e").display().to_string();
    let host = cluster.pki()?.identity("host", "a").display().to_string();
    for (who, dir) in [("a stranger", stranger), ("a host", host)] {
        let output = cluster.cli_as(&dir, &["host", "list"]).await?;
        if output.status.success() {
            bail!("{who} is told of the hosts");
        }
    }
    let output = cluster.cli(&["host", "list"]).await?;
    if !output.status.success() {
        bail!("an operator is not: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(Note::new())
}

async fn postcopy(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("divided"), "a").await?;
    let asked = MigrateVmRequest { method: "postcopy".to_owned(), ..move_to(&vm, "b") };
    let migration = request(cluster, &asked).await?;
    let migration = settle(cluster, &vm, &migration.id, End::Done).await?;
    if migration.method != "postcopy" {
        bail!("it went as {} within {MOVE_BOUND:?}", migration.method);
    }
    Ok(pause_note(&vm))
}
