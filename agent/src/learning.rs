//! Finding out what became of a process that the journal names (rule R3).

use std::path::Path;

use vmferry_agent_core::journal::{Gone, GoneKind, Process};
use vmferry_types::VmId;

use crate::clock;
use crate::process::{
    self, AdoptError, Adopted, Presence, ProcessDir, ProcessIdentity, QemuProcess,
};
use crate::wire;

/// What became of a process.
#[derive(Debug)]
pub(crate) enum Learned {
    /// It lives and answers.
    Alive(Box<QemuProcess>),
    /// It is gone.
    Gone(Gone),
    /// It lives and says nothing.
    Unresponsive { identity: vmferry_agent_core::journal::Identity, cause: String },
    /// Nothing could be found out; that proves nothing.
    NotYet { cause: String },
}

/// Finds out what became of `written`.
pub(crate) async fn learn(vm: VmId, written: &Process, boot_id: &str) -> Learned {
    let dir = ProcessDir::new(&written.dir);
    match process::adopt(&dir).await {
        Adopted::Alive(process) => Learned::Alive(Box::new(process)),
        Adopted::Gone(proof) => Learned::Gone(wire::gone(&proof, boot_id, clock::wall_ms())),
        Adopted::Unresponsive(silent) => Learned::Unresponsive {
            identity: wire::identity(&silent.identity),
            cause: crate::error::chain(&silent.cause),
        },
        Adopted::Unknown(error) => {
            let cause = crate::error::chain(&error);
            match (by_journal(vm, written, boot_id).await, &written.identity, &error) {
                (Some(gone), _, _) => Learned::Gone(gone),
                // Its directory says nothing any more, and it was not proven gone: it is there.
                (None, Some(identity), AdoptError::Judge { .. }) => {
                    Learned::Unresponsive { identity: identity.clone(), cause }
                }
                (None, _, AdoptError::Judge { .. } | AdoptError::Starting { .. }) => {
                    Learned::NotYet { cause }
                }
            }
        }
    }
}

/// Proves by the journal alone that a process is gone, where its directory went with a boot, was
/// never made, or cannot be read.
pub(crate) async fn by_journal(vm: VmId, written: &Process, boot_id: &str) -> Option<Gone> {
    let gone = |kind, ended: &str| Gone {
        kind,
        identity: written.identity.clone(),
        boot_id: boot_id.to_owned(),
        ended: ended.to_owned(),
        at_ms: clock::wall_ms(),
        stderr_tail: String::new(),
    };
    if written.boot_id != boot_id {
        return Some(gone(GoneKind::NewBoot, "was there before the host was booted"));
    }
    if let Some(known) = &written.identity {
        let identity = ProcessIdentity {
            pid: known.pid,
            start_time: known.start_time,
            boot_id: known.boot_id.clone(),
        };
        return match identity.presence() {
            Ok(Presence::Absent) => Some(gone(GoneKind::ProcessAbsent, "is not there any more")),
            Ok(Presence::Present | Presence::NewBoot { .. }) | Err(_) => None,
        };
    }
    if Path::new(&written.dir).exists() {
        // What is in there decides, and it could not be read.
        return None;
    }
    // The agent died between its note and the launch. The directory is made first, and the parent
    // is there, so nothing was launched; a look at what runs makes sure.
    let parent = Path::new(&written.dir).parent().is_some_and(Path::exists);
    let scan = tokio::task::spawn_blocking(process::scan).await.ok()?.ok()?;
    let runs = scan.qemus.iter().any(|qemu| {
        qemu.uuid.is_none_or(|uuid| uuid.as_u128() == vm.as_u128())
            && qemu.dir.as_deref().is_none_or(|dir| dir == Path::new(&written.dir))
    });
    let shim = scan.shims.iter().any(|shim| shim.dir == Path::new(&written.dir));
    (parent && !runs && !shim).then(|| gone(GoneKind::NeverStarted, "was never started"))
}
