//! What is refused, and how.

use anyhow::{Context as _, Result, bail};
use prost::Message as _;
use tonic::{Code, Status};
use vmferry_proto::v1::{ErrorDetail, MigrateVmRequest};

use super::{Case, Note, Tier};
use crate::client::move_to;
use crate::cluster::Cluster;
use crate::guest::{GuestSpec, Sharing};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("refusal-names-all-reasons", Tier::Subset, |cluster| {
            Box::pin(all_reasons(cluster))
        }),
        Case::new("unknown-host-vm-and-method-are-refused", Tier::Subset, |cluster| {
            Box::pin(unknown(cluster))
        }),
    ]
}

/// Returns the stable codes of all reasons in a refusal.
fn codes(status: &Status) -> Result<Vec<String>> {
    let detail = ErrorDetail::decode(status.details()).context("read the refusal's details")?;
    let mut codes: Vec<_> = detail.blockers.iter().map(|blocker| blocker.code.clone()).collect();
    if let Some(blank) = detail.blockers.iter().find(|blocker| blocker.message.is_empty()) {
        bail!("the reason {} has no message", blank.code);
    }
    codes.push(detail.code);
    Ok(codes)
}

async fn refused(cluster: &Cluster<'_>, request: &MigrateVmRequest) -> Result<Status> {
    match cluster.clients.migrate(request).await {
        Ok(migration) => bail!("the migration was taken: {}", crate::client::describe(&migration)),
        Err(status) => Ok(status),
    }
}

async fn all_reasons(cluster: &mut Cluster<'_>) -> Result<Note> {
    let disk = cluster.disk_path("local.raw");
    let mut spec = GuestSpec::rom("stuck").with_disk(&disk, "raw");
    if let Some(disk) = spec.disk.as_mut() {
        disk.sharing = Sharing::Local;
    }
    spec.extra_toml = "pin = \"a\"\n".to_owned();
    let vm = cluster.start_vm(&spec, "a").await?;
    let elsewhere = refused(cluster, &move_to(&vm, "b")).await?;
    let found = codes(&elsewhere)?;
    for code in ["pinned", "disk_not_shared"] {
        if !found.iter().any(|found| found == code) {
            bail!("{code} is not among the reasons {found:?}: {elsewhere}");
        }
    }
    let nowhere = refused(cluster, &move_to(&vm, "a")).await?;
    if !codes(&nowhere)?.iter().any(|found| found == "same_host") {
        bail!("a move to where the VM is was refused for another reason: {nowhere}");
    }
    cluster.expect_running(&vm, "a").await?;
    if vm.serial.connections() != 1 {
        bail!("a receiver was started for a migration that was refused");
    }
    Ok(found.join(", "))
}

async fn unknown(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("known"), "a").await?;
    let no_host = refused(cluster, &move_to(&vm, "nowhere")).await?;
    let no_vm =
        refused(cluster, &MigrateVmRequest { vm_name: "nobody".into(), ..move_to(&vm, "b") })
            .await?;
    let no_type =
        refused(cluster, &MigrateVmRequest { migration_type: "magic".into(), ..move_to(&vm, "b") })
            .await?;
    let no_method =
        refused(cluster, &MigrateVmRequest { method: "magic".into(), ..move_to(&vm, "b") }).await?;
    for (status, code) in [
        (&no_host, Code::NotFound),
        (&no_vm, Code::NotFound),
        (&no_type, Code::InvalidArgument),
        (&no_method, Code::InvalidArgument),
    ] {
        if status.code() != code {
            bail!("refused with {:?} instead of {code:?}: {status}", status.code());
        }
    }
    cluster.expect_running(&vm, "a").await?;
    Ok(Note::new())
}
