//! The same migrations, asked for the way people and programs do.

use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::cancel::start_endless;
use super::{Case, MOVE_BOUND, Note, Tier, settle};
use crate::client::End;
use crate::cluster::Cluster;
use crate::guest::GuestSpec;
use crate::lab::PLANNER_ADDRESS;
use crate::rest;
use crate::wait::{Level, wait_for};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("command-line-moves-and-its-exit-code-tells", Tier::Subset, |cluster| {
            Box::pin(command_line(cluster))
        }),
        Case::new("rest-moves-and-reports", Tier::Subset, |cluster| Box::pin(over_rest(cluster)))
            .in_plain_text(),
        Case::new("guest-is-asked-to-power-off", Tier::Subset, |cluster| {
            Box::pin(powerdown(cluster))
        }),
    ]
}

/// Fails unless a command ended with the expected exit code, and returns what it printed.
fn expect_code(output: &Output, code: i32, command: &str) -> Result<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.code() != Some(code) {
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        bail!("`vmferry {command}` ended with {} instead of {code}: {out} {err}", output.status);
    }
    Ok(text(&output.stdout))
}

pub(super) async fn cli(cluster: &Cluster<'_>, command: &str, code: i32) -> Result<String> {
    let arguments: Vec<&str> = command.split(' ').collect();
    expect_code(&cluster.cli(&arguments).await?, code, command)
}

async fn command_line(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("typed"), "a").await?;
    cli(cluster, "host list", 0).await?;
    let hosts: Value = serde_json::from_str(&cli(cluster, "host list -o json", 0).await?)?;
    if !hosts.to_string().contains("\"connected\"") {
        bail!("`host list -o json` says {hosts}");
    }
    cli(cluster, "vm migrate typed --to b --wait", 0).await?;
    cluster.expect_running(&vm, "b").await?;
    cli(cluster, "vm migrate typed --to b", 3).await?;
    cli(cluster, "vm migrate nobody --to b", 2).await?;
    // 10 MB/s and a guest that dirties 25: it does not end by itself.
    cli(cluster, "vm migrate typed --to a --bandwidth 80 --wait --timeout 300ms", 4).await?;
    let open: Value =
        serde_json::from_str(&cli(cluster, "migration list --open -o json", 0).await?)?;
    let id = first_id(&open).with_context(|| format!("no open migration in {open}"))?;
    cli(cluster, &format!("migration cancel {id}"), 0).await?;
    settle(cluster, &vm, &id, End::Aborted).await?;
    cli(cluster, &format!("migration show {id}"), 0).await?;
    cli(cluster, "vm stop typed --how quit --wait", 0).await?;
    Ok(Note::new())
}

/// Finds the `id` of the first migration in a list of them.
fn first_id(list: &Value) -> Option<String> {
    list["migrations"][0]["id"].as_str().map(str::to_owned)
}

async fn over_rest(cluster: &mut Cluster<'_>) -> Result<Note> {
    let vm = cluster.start_vm(&GuestSpec::rom("posted"), "a").await?;
    let address = format!("{PLANNER_ADDRESS}:9095");
    for path in ["/healthz", "/readyz", "/metrics", "/api/hosts", "/api/vms", "/api/vms/posted"] {
        let answer = rest::request(&address, "GET", path, None).await?;
        if answer.status != 200 {
            bail!("GET {path} answered {}: {}", answer.status, answer.body);
        }
    }
    let wanted = json!({"vm_name": "posted", "target_host": "b", "migration_type": "live"});
    let taken = rest::request(&address, "POST", "/api/migrations", Some(&wanted)).await?;
    if taken.status != 202 {
        bail!("POST /api/migrations answered {}: {}", taken.status, taken.body);
    }
    let id = taken.body["id"].as_str().context("the answer has no id")?.to_owned();
    let path = format!("/api/migrations/{id}");
    wait_for("REST to report the end", MOVE_BOUND, || async {
        let answer = rest::request(&address, "GET", &path, None).await?;
        let ended = answer.body["state"] == "completed";
        Ok(Level::from_option(ended.then_some(()), || answer.body.to_string()))
    })
    .await?;
    settle(cluster, &vm, &id, End::Done).await?;
    let nobody = json!({"vm_name": "nobody", "target_host": "b", "migration_type": "live"});
    let refused = rest::request(&address, "POST", "/api/migrations", Some(&nobody)).await?;
    if refused.status != 404
        || !refused.body["code"].is_string()
        || !refused.body["message"].is_string()
    {
        bail!("a VM that nobody knows is answered with {}: {}", refused.status, refused.body);
    }
    let same = rest::request(&address, "POST", "/api/migrations", Some(&wanted)).await?;
    if same.status != 409 {
        bail!("a move to where the VM is is answered with {}: {}", same.status, same.body);
    }
    Ok(Note::new())
}

async fn powerdown(cluster: &mut Cluster<'_>) -> Result<Note> {
    let disk = cluster.disk_path("polite.raw");
    let vm = cluster.start_vm(&GuestSpec::rom("polite").with_disk(&disk, "raw"), "a").await?;
    // A migration under way is in the way of a stop, and says so.
    let migration = start_endless(cluster, &vm).await?;
    if cluster.cli(&["vm", "stop", "polite"]).await?.status.success() {
        bail!("a VM that is being migrated was stopped");
    }
    cluster.clients.cancel(&migration.id).await?;
    settle(cluster, &vm, &migration.id, End::Aborted).await?;
    cli(cluster, "vm stop polite --wait --deadline 5s", 0).await?;
    cluster.clients.wait_vm(&vm, MOVE_BOUND, |seen| seen.power == "stopped").await?;
    vm.serial.wait_still(Duration::from_millis(300), MOVE_BOUND).await?;
    Ok(Note::new())
}
