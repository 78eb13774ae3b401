//! Which accelerator a guest is run with: KVM where it can run the guest, else TCG.
//!
//! A `/dev/kvm` alone says little: where the machine is itself a guest, KVM may
//! emulate so slowly that an operating system never comes up. So it is tried,
//! with a bound, once per boot of the machine.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::guest::GuestKind;
use crate::serial::Serial;

/// How a QEMU process runs its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Accelerator {
    /// The kernel's.
    Kvm,
    /// QEMU's own translation.
    Tcg,
}

impl Accelerator {
    /// Returns its name in QEMU's words.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// How long a guest may take to say something under KVM before it is run under TCG. TCG needs
/// 0.2 s for the one and 3 s for the other.
const fn boot_bound(kind: GuestKind) -> Duration {
    match kind {
        GuestKind::Rom => Duration::from_secs(3),
        GuestKind::Linux => Duration::from_secs(8),
    }
}

/// Chooses the accelerator for a guest by trying, and remembers it until the machine boots.
///
/// # Errors
///
/// Fails if the trial cannot be made at all. A guest that does not come up is an answer, not a failure.
pub async fn choose(kind: GuestKind, guests: &Path, dir: &Path) -> Result<Accelerator> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(Accelerator::Tcg);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the boot id")?;
    let memory = guests.join(format!("accel-{}-{}", kind.label(), boot.trim()));
    match fs::read_to_string(&memory).as_deref() {
        Ok("kvm") => return Ok(Accelerator::Kvm),
        Ok("tcg") => return Ok(Accelerator::Tcg),
        Ok(_) | Err(_) => {}
    }
    let chosen = try_kvm(kind, guests, dir).await?;
    fs::write(&memory, chosen.label()).with_context(|| format!("write {}", memory.display()))?;
    Ok(chosen)
}

async fn try_kvm(kind: GuestKind, guests: &Path, dir: &Path) -> Result<Accelerator> {
    let serial = Serial::listen(&dir.join("trial"))?;
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            "q35",
            "-m",
            "192M",
        ])
        .args(["-accel", "kvm", "-cpu", "qemu64"])
        .args(serial.qemu_arguments())
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    match kind {
        GuestKind::Rom => command.arg("-bios").arg(guests.join("rom.bin")),
        GuestKind::Linux => command
            .arg("-kernel")
            .arg(guests.join("vmlinuz"))
            .arg("-initrd")
            .arg(guests.join("initrd.gz"))
            .args(["-append", "console=ttyS0 quiet"]),
    };
    let qemu = Trial(command.spawn().context("start QEMU")?);
    let came_up = serial.wait_ticks(10, boot_bound(kind)).await.is_ok();
    drop(qemu);
    Ok(if came_up { Accelerator::Kvm } else { Accelerator::Tcg })
}

/// A QEMU process that does not outlive its trial.
struct Trial(Child);

impl Drop for Trial {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}
