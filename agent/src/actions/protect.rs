//! Keeps the stream between two QEMUs secret, and to the two that it is between.
//!
//! Each attempt gives QEMU the certificates that the agent has loaded by then, and says whom to
//! expect: parameters and objects of an earlier attempt are sticky, and so is what they were for.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry_qmp::command::{MigrateSetParameters, ObjectAdd, ObjectDel};
use vmferry_tls::{Identity, Live, QemuEnd, Role};

use crate::error::CommandError;
use crate::lane::Lane;
use crate::monitor::Monitor;
use crate::process::QemuProcess;

/// QEMU's name for its credentials.
const CREDENTIALS: &str = "vmferry-tls";
/// QEMU's name for whom a receiver takes a stream from.
const SENDERS: &str = "vmferry-senders";

/// Sets a receiver up to take a stream from the host `source_host` alone, over TLS; or over plain
/// text, if this is what the agent speaks.
pub(super) async fn receiver(
    lane: &Lane,
    process: &QemuProcess,
    source_host: &str,
) -> Result<(), CommandError> {
    let monitor = process.monitor();
    let Some(live) = lane.agent.security.live() else { return plain(monitor).await };
    let source = peer("arm_receiver.source.tls_host", source_host)?;
    credentials(process, live, QemuEnd::Server).await?;
    let senders = ObjectAdd::new("authz-list", SENDERS).with("policy", "deny").with(
        "rules",
        json!([{"match": source.distinguished_name(), "policy": "allow", "format": "exact"}]),
    );
    replace(monitor, senders).await?;
    set(monitor, CREDENTIALS, "", SENDERS).await
}

/// Sets a source up to send to the host `receiver_host` alone, over TLS; or over plain text, if this
/// is what the agent speaks.
pub(super) async fn sender(
    lane: &Lane,
    process: &QemuProcess,
    receiver_host: &str,
) -> Result<(), CommandError> {
    let monitor = process.monitor();
    let Some(live) = lane.agent.security.live() else { return plain(monitor).await };
    let receiver = peer("start_transfer.receiver_host", receiver_host)?;
    credentials(process, live, QemuEnd::Client).await?;
    set(monitor, CREDENTIALS, &receiver.dns_name(), "").await
}

fn peer(field: &str, host: &str) -> Result<Identity, CommandError> {
    Identity::new(Role::Host, host).map_err(|_invalid| {
        CommandError::invalid(
            field,
            format!(
                "`{host}` is no host that could prove who it is, and this host speaks TLS; both ends need a [tls] dir, or neither"
            ),
        )
    })
}

/// What QEMU was given for an earlier attempt counts no more.
async fn plain(monitor: &Monitor) -> Result<(), CommandError> {
    set(monitor, "", "", "").await
}

async fn set(
    monitor: &Monitor,
    credentials: &str,
    hostname: &str,
    senders: &str,
) -> Result<(), CommandError> {
    let parameters = MigrateSetParameters::default()
        .with("tls-creds", credentials)
        .with("tls-hostname", hostname)
        .with("tls-authz", senders);
    let answer = monitor.execute(parameters).await;
    answer.map(drop).map_err(|error| CommandError::failed("set up who is at the other end", &error))
}

/// Gives QEMU the certificates that are loaded now.
async fn credentials(process: &QemuProcess, live: &Live, end: QemuEnd) -> Result<(), CommandError> {
    let files = Handed::put(&process.dir().path().join("tls"), live, end)
        .map_err(|error| CommandError::failed("hand certificates to QEMU", &error))?;
    let object = ObjectAdd::new("tls-creds-x509", CREDENTIALS)
        .with("endpoint", end.label())
        .with("dir", files.dir.display().to_string())
        .with("verify-peer", true);
    // QEMU reads them all before it answers.
    replace(process.monitor(), object).await
}

/// Makes an object, in place of one of the same name.
async fn replace(monitor: &Monitor, object: ObjectAdd) -> Result<(), CommandError> {
    let failed = |error| CommandError::failed("give QEMU its certificates", &error);
    match monitor.execute(ObjectDel { id: object.id.clone() }).await {
        Ok(_) => {}
        // There was none.
        Err(error) if error.refused().is_some() => {}
        Err(error) => return Err(failed(error)),
    }
    monitor.execute(object).await.map(drop).map_err(failed)
}

/// Certificates and a key, where QEMU reads them. They go when QEMU has.
struct Handed {
    dir: PathBuf,
}

impl Handed {
    fn put(dir: &Path, live: &Live, end: QemuEnd) -> io::Result<Self> {
        match fs::remove_dir_all(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        DirBuilder::new().mode(0o700).create(dir)?;
        let handed = Self { dir: dir.to_owned() };
        let loaded = live.current();
        let files = loaded
            .qemu_files(end)
            .ok_or_else(|| io::Error::other("nothing is served under this identity"))?;
        for (name, bytes) in files {
            let path = dir.join(name);
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(bytes)?;
        }
        Ok(handed)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!(dir = %self.dir.display(), %error, "certificates handed to QEMU stay there");
        }
    }
}
