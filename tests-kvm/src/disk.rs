//! What a guest left on its disk: the ring described in `guests/disk_format.h`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::guest::GuestDisk;

const SECTOR: usize = 512;
const RING_SECTORS: u64 = 64;
const MAGIC: &[u8] = b"VFRING01";

/// One record of the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    boot_id: String,
    seq: u64,
}

/// Makes an empty image of 1 MiB.
///
/// # Errors
///
/// Fails where `qemu-img` does.
pub fn create(path: &Path, format: &str) -> Result<()> {
    qemu_img(&["create", "-q", "-f", format, &path.display().to_string(), "1M"])
}

/// Checks the image of a guest that stands still: whole as a file, and the ring consistent and
/// written by the guest of this boot alone. Returns the last turn.
///
/// # Errors
///
/// Says what is wrong with it.
pub fn check(disk: &GuestDisk, boot_id: &str) -> Result<u64> {
    let path = disk.path.display().to_string();
    if disk.format == "qcow2" {
        qemu_img(&["check", "-q", "-f", disk.format, &path])?;
    }
    let raw = disk.path.with_extension("checked");
    qemu_img(&["convert", "-f", disk.format, "-O", "raw", &path, &raw.display().to_string()])?;
    let bytes = fs::read(&raw).with_context(|| format!("read {}", raw.display()))?;
    fs::remove_file(&raw).with_context(|| format!("remove {}", raw.display()))?;
    check_ring(&bytes, boot_id).with_context(|| format!("the ring on {path}"))
}

fn check_ring(bytes: &[u8], boot_id: &str) -> Result<u64> {
    let head = record(bytes, 0)?.context("has no head")?;
    if head.boot_id != boot_id {
        bail!("was written last by boot {}, not {boot_id}", head.boot_id);
    }
    for slot in 0..RING_SECTORS {
        let Some(found) = record(bytes, 1 + slot)? else {
            if head.seq >= RING_SECTORS {
                bail!("has nothing in slot {slot}");
            }
            continue;
        };
        // The turn in progress may have written its slot and not yet the head.
        let newest = (0..=RING_SECTORS).filter_map(|back| (head.seq + 1).checked_sub(back));
        let legal: Vec<u64> = newest.filter(|seq| seq % RING_SECTORS == slot).collect();
        if found.boot_id != boot_id || !legal.contains(&found.seq) {
            bail!("holds {found:?} in slot {slot} under head {}", head.seq);
        }
    }
    Ok(head.seq)
}

fn record(bytes: &[u8], sector: u64) -> Result<Option<Record>> {
    let start = usize::try_from(sector).context("sector")? * SECTOR;
    let found =
        bytes.get(start..start + 56).with_context(|| format!("ends before sector {sector}"))?;
    if !found.starts_with(MAGIC) {
        return Ok(None);
    }
    let boot_id = String::from_utf8_lossy(&found[8..40]).trim_end_matches('\0').to_owned();
    let number =
        |at: usize| -> Result<u64> { Ok(u64::from_le_bytes(found[at..at + 8].try_into()?)) };
    let (seq, inverted) = (number(40)?, number(48)?);
    if seq != !inverted {
        bail!("sector {sector} is half written: {seq:#x}, {inverted:#x}");
    }
    Ok(Some(Record { boot_id, seq }))
}

fn qemu_img(arguments: &[&str]) -> Result<()> {
    let output = Command::new("qemu-img").args(arguments).output().context("run qemu-img")?;
    if !output.status.success() {
        let complaint = [output.stdout, output.stderr].concat();
        bail!("qemu-img {}: {}", arguments.join(" "), String::from_utf8_lossy(&complaint).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(head: u64, boot_id: &str) -> Vec<u8> {
        let mut bytes = vec![0; 65 * SECTOR];
        for seq in head.saturating_sub(63).max(1)..=head {
            let slot = usize::try_from(1 + seq % 64).unwrap();
            write(&mut bytes, slot, seq, boot_id);
        }
        write(&mut bytes, 0, head, boot_id);
        bytes
    }

    fn write(bytes: &mut [u8], sector: usize, seq: u64, boot_id: &str) {
        let at = sector * SECTOR;
        bytes[at..at + 8].copy_from_slice(MAGIC);
        bytes[at + 8..at + 8 + boot_id.len()].copy_from_slice(boot_id.as_bytes());
        bytes[at + 40..at + 48].copy_from_slice(&seq.to_le_bytes());
        bytes[at + 48..at + 56].copy_from_slice(&(!seq).to_le_bytes());
    }

    #[test]
    fn a_whole_ring_passes() {
        assert_eq!(check_ring(&image(5, "1234abcd"), "1234abcd").unwrap(), 5);
        assert_eq!(check_ring(&image(1000, "1234abcd"), "1234abcd").unwrap(), 1000);
    }

    #[test]
    fn a_turn_in_progress_passes() {
        let mut bytes = image(200, "1234abcd");
        write(&mut bytes, 1 + 201 % 64, 201, "1234abcd");
        assert_eq!(check_ring(&bytes, "1234abcd").unwrap(), 200);
    }

    #[test]
    fn a_lost_write_is_seen() {
        let mut bytes = image(200, "1234abcd");
        write(&mut bytes, 1 + 190 % 64, 190 - 64, "1234abcd");
        assert!(check_ring(&bytes, "1234abcd").is_err());
    }

    #[test]
    fn a_second_writer_is_seen() {
        let mut bytes = image(200, "1234abcd");
        write(&mut bytes, 1 + 190 % 64, 190, "99999999");
        assert!(check_ring(&bytes, "1234abcd").is_err());
        assert!(check_ring(&image(200, "99999999"), "1234abcd").is_err());
    }
}
