//! What a VM is: the TOML definition that users write.
//!
//! A definition is read once and checked whole: every error is reported at once, each naming its
//! field. After that there are no invalid values.

use std::collections::BTreeMap;
use std::fmt;

use vmferry_types::{Bytes, HostId, VmId};

mod check;
mod raw;

/// A checked definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// Unique in the fleet; may be used again for another VM.
    pub name: String,
    /// The UUID that QEMU is given.
    pub uuid: VmId,
    /// The machine type as it was asked for: an alias or a versioned one.
    pub machine: String,
    /// Who runs the vCPUs.
    pub accelerator: Accelerator,
    /// QEMU's CPU model with its flags.
    pub cpu: String,
    /// How many vCPUs.
    pub vcpus: u32,
    /// Memory at the start.
    pub memory: Bytes,
    /// The ceiling of memory hotplug; equal to `memory` if there is none.
    pub memory_max: Bytes,
    /// A firmware image instead of QEMU's own.
    pub firmware: Option<String>,
    /// What operators call it by.
    pub labels: BTreeMap<String, String>,
    /// The only host that may run it.
    pub pin: Option<HostId>,
    /// Labels that a host must have.
    pub required_labels: BTreeMap<String, String>,
    /// More of QEMU's command line.
    pub extra_args: Vec<String>,
    /// A kernel that QEMU loads itself.
    pub kernel: Option<Kernel>,
    /// Its disks, in the order of their addresses.
    pub disks: Vec<Disk>,
    /// Its NICs, in the order of their addresses.
    pub nics: Vec<Nic>,
}

/// Who runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The kernel.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accelerator {
    /// Returns QEMU's word.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// A kernel that QEMU loads itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel image.
    pub image: String,
    /// The initial ramdisk.
    pub initrd: Option<String>,
    /// The kernel's command line.
    pub cmdline: Option<String>,
}

/// The format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// Bytes as the guest sees them.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl DiskFormat {
    /// Returns QEMU's word.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// Whether a disk's image is the same file on every host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// One file, seen by every host.
    Shared,
    /// This host's own.
    Local,
}

/// Whether the guest may write a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may.
    ReadWrite,
    /// It may not.
    ReadOnly,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Names the disk and its device.
    pub id: String,
    /// The image.
    pub path: String,
    /// Its format.
    pub format: DiskFormat,
    /// Whether other hosts see it.
    pub sharing: Sharing,
    /// Whether the guest may write it.
    pub access: Access,
}

/// A NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Names the NIC and its device.
    pub id: String,
    /// Its address, in lower case.
    pub mac: String,
    /// The bridge that its tap joins.
    pub bridge: String,
    /// The tap's MTU. `None` keeps the kernel's default.
    pub mtu: Option<u32>,
}

/// One thing that is wrong with a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The field, as in `disk[0].path`; empty if the text is no TOML.
    pub field: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.field, self.message)
        }
    }
}

/// Everything that is wrong with a definition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the VM definition has {} error(s): {}", .0.len(), list(.0))]
pub struct InvalidDefinition(pub Vec<FieldError>);

fn list(errors: &[FieldError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Definition {
    /// Reads a definition.
    ///
    /// # Errors
    ///
    /// Returns every error at once.
    pub fn parse(text: &str) -> Result<Self, InvalidDefinition> {
        let raw: raw::Definition = toml::from_str(text).map_err(|error| {
            let message = error.message().to_owned();
            InvalidDefinition(vec![FieldError { field: String::new(), message }])
        })?;
        check::definition(raw).map_err(InvalidDefinition)
    }
}

#[cfg(test)]
mod tests;
