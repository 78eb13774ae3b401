//! The test guests and their VM definitions.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use uuid::Uuid;

use crate::accel::Accelerator;

/// Where the parameters are in the ROM image, behind their magic.
const ROM_PARAMETERS: usize = 0x1008;

/// Which guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuestKind {
    /// Our own ROM: up in a fraction of a second, with a memory checker and a disk driver.
    Rom,
    /// A Debian kernel with our own init: with a network.
    Linux,
}

impl GuestKind {
    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Rom => "rom",
            Self::Linux => "linux",
        }
    }
}

/// How busy a guest is with its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// It touches nothing.
    Idle,
    /// It rewrites 25 MiB a second of an 8 MiB range.
    Light,
    /// It rewrites 100 MiB a second of a 24 MiB range.
    Busy,
    /// It fills that much and rewrites all of it in turn, that many MiB a second: what is measured
    /// has to be said in figures. The Linux guest only; the ROM guest is busy instead.
    Filled {
        /// How many MiB it fills.
        fill_mib: u32,
        /// How many MiB of them it rewrites in a second.
        dirty_mib_per_s: u32,
    },
}

/// The disk of a guest.
#[derive(Clone, Debug)]
pub struct GuestDisk {
    /// The image.
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: &'static str,
    /// Whether the hosts are told that all of them see it.
    pub sharing: Sharing,
}

/// Whether a disk is declared as shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// All hosts see it.
    Shared,
    /// Only one host does.
    Local,
}

/// Whether a guest heeds its power button.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Button {
    /// It turns itself off.
    Heeded,
    /// It runs on.
    Ignored,
}

/// A guest to be defined.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// The VM's name.
    pub name: String,
    /// Which guest.
    pub kind: GuestKind,
    /// `pc` or `q35`.
    pub machine: &'static str,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// What it does with its memory.
    pub load: Load,
    /// Whether it heeds its power button; the Linux guest does.
    pub button: Button,
    /// Its disk.
    pub disk: Option<GuestDisk>,
    /// Its address on the guests' network; `None` for no NIC.
    pub address: Option<String>,
    /// Lines of the definition's top level that a case needs besides.
    pub extra_toml: String,
    /// QEMU arguments that a case needs besides.
    pub extra_args: Vec<String>,
}

impl GuestSpec {
    /// Describes a lightly loaded ROM guest.
    #[must_use]
    pub fn rom(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: GuestKind::Rom,
            machine: "q35",
            memory_mib: 64,
            load: Load::Light,
            button: Button::Heeded,
            disk: None,
            address: None,
            extra_toml: String::new(),
            extra_args: Vec::new(),
        }
    }

    /// Describes a lightly loaded Linux guest with a NIC.
    #[must_use]
    pub fn linux(name: &str, address: &str) -> Self {
        let rom = Self::rom(name);
        Self { kind: GuestKind::Linux, memory_mib: 192, address: Some(address.to_owned()), ..rom }
    }

    /// Adds a shared disk.
    #[must_use]
    pub fn with_disk(mut self, path: &Path, format: &'static str) -> Self {
        self.disk = Some(GuestDisk { path: path.to_owned(), format, sharing: Sharing::Shared });
        self
    }

    /// Sets the load.
    #[must_use]
    pub fn with_load(mut self, load: Load) -> Self {
        self.load = load;
        self
    }

    /// Returns how many lines the guest prints until it has checked all its memory once.
    #[must_use]
    pub fn ticks_per_check(&self) -> usize {
        match self.load {
            Load::Idle => 10,
            Load::Light => 40,
            Load::Busy => 40,
            Load::Filled { fill_mib, dirty_mib_per_s } => {
                usize::try_from(100 * fill_mib / dirty_mib_per_s.max(1)).unwrap_or(usize::MAX)
            }
        }
    }

    /// Writes the VM definition for an accelerator; the guest's images are below `guests`, and
    /// what has to be made for it goes to `dir`.
    ///
    /// # Errors
    ///
    /// Fails if the guest's image has not been built.
    pub fn definition(
        &self,
        uuid: Uuid,
        accelerator: Accelerator,
        guests: &Path,
        dir: &Path,
    ) -> Result<String> {
        let mut top = format!(
            "name = {:?}\nuuid = \"{uuid}\"\nmachine = {:?}\naccel = {:?}\ncpu = \"qemu64\"\nvcpus = 1\n\
             memory = \"{}MiB\"\n{}",
            self.name,
            self.machine,
            accelerator.label(),
            self.memory_mib,
            self.extra_toml
        );
        let mut tables = String::new();
        match self.kind {
            GuestKind::Rom => {
                let rom = self.write_rom(guests, dir)?;
                top.push_str(&format!("firmware = {:?}\n", rom.display().to_string()));
            }
            GuestKind::Linux => tables.push_str(&format!(
                "[kernel]\nimage = {:?}\ninitrd = {:?}\ncmdline = {:?}\n",
                guests.join("vmlinuz").display().to_string(),
                guests.join("initrd.gz").display().to_string(),
                self.command_line()
            )),
        }
        let arguments = self.extra_args.iter().map(|arg| format!("{arg:?}")).collect::<Vec<_>>();
        top.push_str(&format!("extra_args = [{}]\n", arguments.join(", ")));
        if let Some(disk) = &self.disk {
            tables.push_str(&format!(
                "[[disk]]\nid = \"disk0\"\npath = {:?}\nformat = {:?}\nshared = {}\n",
                disk.path.display().to_string(),
                disk.format,
                disk.sharing == Sharing::Shared
            ));
        }
        if self.address.is_some() {
            tables.push_str(&format!(
                "[[nic]]\nid = \"nic0\"\nmac = \"{}\"\nbridge = \"br0\"\n",
                mac(uuid)
            ));
        }
        Ok(top + &tables)
    }

    /// Returns the Linux guest's kernel command line.
    #[must_use]
    pub fn command_line(&self) -> String {
        let (fill, rate, rewritten) = match self.load {
            Load::Idle => (0, 0, 8),
            Load::Light => (16, 10, 8),
            Load::Busy => (64, 40, 8),
            Load::Filled { fill_mib, dirty_mib_per_s } => (fill_mib, dirty_mib_per_s, fill_mib),
        };
        let net =
            self.address.as_ref().map(|address| format!(" NET={address}/24")).unwrap_or_default();
        format!(
            "console=ttyS0 quiet loglevel=3 panic=-1 FILL_MIB={fill} DIRTY_MIBS={rate} WS_MIB={rewritten} TICK_MS=10{net}"
        )
    }

    /// Writes a copy of the ROM with this guest's parameters.
    ///
    /// # Errors
    ///
    /// Fails if the ROM has not been built.
    pub fn write_rom(&self, guests: &Path, dir: &Path) -> Result<PathBuf> {
        let from = guests.join("rom.bin");
        let mut image = fs::read(&from)
            .with_context(|| format!("read {} (run scripts/guest-image)", from.display()))?;
        const MIB: u32 = 1 << 20;
        let (range_end, pages_per_tick) = match self.load {
            Load::Idle => (10 * MIB, 0),
            Load::Light => (10 * MIB, 64),
            Load::Busy | Load::Filled { .. } => (26 * MIB, 256),
        };
        let button = match self.button {
            Button::Heeded => 1,
            Button::Ignored => 0,
        };
        let parameters = [2 * MIB, range_end, pages_per_tick, 1, 11_932, 5, button];
        for (at, value) in parameters.into_iter().enumerate() {
            let offset = ROM_PARAMETERS + at * 4;
            image[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        }
        let path = dir.join(format!("{}.rom", self.name));
        fs::write(&path, image).with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    }
}

/// Returns a locally administered address of the VM's own.
fn mac(uuid: Uuid) -> String {
    let [a, b, c, ..] = uuid.into_bytes();
    format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_readable_toml() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rom.bin"), vec![0; 65536]).unwrap();
        let spec =
            GuestSpec::rom("one").with_disk(Path::new("/x/d.raw"), "raw").with_load(Load::Busy);
        let text =
            spec.definition(Uuid::new_v4(), Accelerator::Kvm, dir.path(), dir.path()).unwrap();
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["accel"].as_str(), Some("kvm"));
        assert_eq!(table["disk"][0]["shared"].as_bool(), Some(true));
        let rom = fs::read(dir.path().join("one.rom")).unwrap();
        assert_eq!(rom[0x1010..0x1014], 256u32.to_le_bytes());
    }
}
