//! From what stands in the file to what is true.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_types::{Bytes, HostId, VmId};

use super::{
    Accelerator, Access, Definition, Disk, DiskFormat, FieldError, Kernel, Nic, Sharing, raw,
};

/// Options of QEMU's command line that the agent sets itself.
const OWNED_OPTIONS: [&str; 29] = [
    "incoming",
    "S",
    "uuid",
    "name",
    "machine",
    "M",
    "accel",
    "enable-kvm",
    "cpu",
    "smp",
    "m",
    "daemonize",
    "pidfile",
    "qmp",
    "qmp-pretty",
    "monitor",
    "kernel",
    "initrd",
    "append",
    "bios",
    "preconfig",
    "loadvm",
    "snapshot",
    "only-migratable",
    "sandbox",
    "runas",
    "run-with",
    "chroot",
    "D",
];

/// As many PCI slots as are set aside for disks, and as many for NICs.
const DEVICES_MAX: usize = 8;

/// The most vCPUs that QEMU's machine types take without further options.
const VCPUS_MAX: i64 = 255;

const MIB: u64 = 1 << 20;

/// Collects errors while values are read.
struct Checker {
    errors: Vec<FieldError>,
}

impl Checker {
    fn error(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.errors.push(FieldError { field: field.into(), message: message.into() });
    }

    /// Returns the text of a field that must be there and satisfy `legal`.
    fn text(
        &mut self,
        field: &str,
        value: Option<String>,
        legal: fn(&str) -> bool,
        rule: &str,
    ) -> String {
        match value {
            Some(text) if legal(&text) => return text,
            Some(_) => self.error(field, format!("must be {rule}")),
            None => self.error(field, format!("is missing: {rule}")),
        }
        String::new()
    }

    fn optional_path(&mut self, field: &str, value: Option<String>) -> Option<String> {
        value.map(|text| self.text(field, Some(text), is_absolute, ABSOLUTE))
    }

    fn size(&mut self, field: &str, value: &str) -> Bytes {
        match parse_size(value) {
            Some(bytes) if bytes >= MIB && bytes % MIB == 0 => return Bytes(bytes),
            Some(_) => self.error(field, "must be whole mebibytes, at least 1MiB"),
            None => self.error(field, "must be a size like \"512MiB\" or \"4GiB\""),
        }
        Bytes::ZERO
    }
}

const ABSOLUTE: &str = "an absolute path without control characters";

pub(super) fn definition(raw: raw::Definition) -> Result<Definition, Vec<FieldError>> {
    let mut check = Checker { errors: Vec::new() };
    let name = check.text(
        "name",
        raw.name,
        is_name,
        "1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or digit",
    );
    let uuid = uuid(&mut check, raw.uuid.as_deref());
    let machine = check.text(
        "machine",
        raw.machine,
        is_word,
        "a machine type such as \"q35\" or \"pc-q35-10.0\"",
    );
    let accelerator = accelerator(&mut check, raw.accel.as_deref());
    let cpu = check.text(
        "cpu",
        Some(raw.cpu.unwrap_or_else(|| "qemu64".to_owned())),
        is_cpu,
        "a CPU model with its flags, such as \"qemu64\" or \"host,-arch-capabilities\"",
    );
    let vcpus = vcpus(&mut check, raw.vcpus);
    let (memory, memory_max) = memory(&mut check, raw.memory, raw.max_memory);
    let firmware = check.optional_path("firmware", raw.firmware);
    let pin = raw.pin.and_then(|pin| match pin.parse::<HostId>() {
        Ok(host) => Some(host),
        Err(error) => {
            check.error("pin", error.to_string());
            None
        }
    });
    labels(&mut check, "labels", &raw.labels);
    labels(&mut check, "required_labels", &raw.required_labels);
    extra_args(&mut check, &raw.extra_args);
    let kernel = raw.kernel.map(|raw| kernel(&mut check, raw));
    let disks = disks(&mut check, raw.disk);
    let nics = nics(&mut check, raw.nic);
    unique_ids(&mut check, &disks, &nics);
    let no_devices = disks.is_empty() && nics.is_empty();
    if !no_devices && !has_pci(&machine) {
        check.error("machine", "disks and NICs need a pc or q35 machine");
    }
    if !check.errors.is_empty() {
        return Err(check.errors);
    }
    Ok(Definition {
        name,
        uuid,
        machine,
        accelerator,
        cpu,
        vcpus,
        memory,
        memory_max,
        firmware,
        labels: raw.labels,
        pin,
        required_labels: raw.required_labels,
        extra_args: raw.extra_args,
        kernel,
        disks,
        nics,
    })
}

fn uuid(check: &mut Checker, value: Option<&str>) -> VmId {
    match value.map(str::parse::<VmId>) {
        Some(Ok(id)) if id.as_u128() != 0 => return id,
        Some(_) => check.error("uuid", "must be a UUID that is not all zero"),
        None => check.error("uuid", "is missing: a UUID of its own"),
    }
    VmId::from_u128(0)
}

fn accelerator(check: &mut Checker, value: Option<&str>) -> Accelerator {
    match value {
        Some("tcg") => return Accelerator::Tcg,
        Some("kvm") | None => {}
        Some(_) => check.error("accel", "must be \"kvm\" or \"tcg\""),
    }
    Accelerator::Kvm
}

fn vcpus(check: &mut Checker, value: Option<i64>) -> u32 {
    let value = value.unwrap_or(1);
    match u32::try_from(value) {
        Ok(count) if (1..=VCPUS_MAX).contains(&value) => return count,
        Ok(_) | Err(_) => check.error("vcpus", format!("must be 1 to {VCPUS_MAX}")),
    }
    1
}

fn memory(check: &mut Checker, memory: Option<String>, max: Option<String>) -> (Bytes, Bytes) {
    let memory = if let Some(text) = memory {
        check.size("memory", &text)
    } else {
        check.error("memory", "is missing: a size like \"512MiB\"");
        Bytes::ZERO
    };
    let Some(text) = max else { return (memory, memory) };
    let max = check.size("max_memory", &text);
    if max != Bytes::ZERO && max < memory {
        check.error("max_memory", "must not be below memory");
    }
    (memory, max)
}

fn labels(check: &mut Checker, field: &str, labels: &BTreeMap<String, String>) {
    for (key, value) in labels {
        if !is_word(key) || value.len() > 63 || value.chars().any(char::is_control) {
            check.error(
                format!("{field}.{key}"),
                "a label is a word of letters, digits, '.', '_' and '-' with a value of up to 63 bytes",
            );
        }
    }
}

fn extra_args(check: &mut Checker, args: &[String]) {
    for (at, arg) in args.iter().enumerate() {
        if arg.contains('\0') {
            check.error(format!("extra_args[{at}]"), "must not contain a NUL character");
        }
        let option = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-'));
        if let Some(option) = option.filter(|option| OWNED_OPTIONS.contains(option)) {
            check.error(
                format!("extra_args[{at}]"),
                format!("-{option} is set by the agent itself"),
            );
        }
    }
}

fn kernel(check: &mut Checker, raw: raw::Kernel) -> Kernel {
    if raw.cmdline.as_deref().is_some_and(|line| line.contains('\0')) {
        check.error("kernel.cmdline", "must not contain a NUL character");
    }
    Kernel {
        image: check.text("kernel.image", raw.image, is_absolute, ABSOLUTE),
        initrd: check.optional_path("kernel.initrd", raw.initrd),
        cmdline: raw.cmdline,
    }
}

fn disks(check: &mut Checker, raw: Vec<raw::Disk>) -> Vec<Disk> {
    if raw.len() > DEVICES_MAX {
        check.error("disk", format!("at most {DEVICES_MAX} disks"));
    }
    let mut disk = |(at, raw): (usize, raw::Disk)| {
        let format = match raw.format.as_deref() {
            Some("raw") | None => DiskFormat::Raw,
            Some("qcow2") => DiskFormat::Qcow2,
            Some(_) => {
                check.error(format!("disk[{at}].format"), "must be \"raw\" or \"qcow2\"");
                DiskFormat::Raw
            }
        };
        Disk {
            id: device_id(check, &format!("disk[{at}].id"), raw.id, || format!("disk{at}")),
            path: check.text(&format!("disk[{at}].path"), raw.path, is_absolute, ABSOLUTE),
            format,
            sharing: if raw.shared.unwrap_or(false) { Sharing::Shared } else { Sharing::Local },
            access: if raw.read_only.unwrap_or(false) {
                Access::ReadOnly
            } else {
                Access::ReadWrite
            },
        }
    };
    raw.into_iter().enumerate().map(&mut disk).collect()
}

fn nics(check: &mut Checker, raw: Vec<raw::Nic>) -> Vec<Nic> {
    if raw.len() > DEVICES_MAX {
        check.error("nic", format!("at most {DEVICES_MAX} NICs"));
    }
    let mut nic = |(at, raw): (usize, raw::Nic)| {
        let mac = check.text(
            &format!("nic[{at}].mac"),
            raw.mac.map(|mac| mac.to_ascii_lowercase()),
            is_unicast_mac,
            "a unicast MAC address such as \"52:54:00:00:00:01\"",
        );
        let mtu = raw.mtu.and_then(|mtu| match u32::try_from(mtu) {
            Ok(mtu @ 68..=65535) => Some(mtu),
            Ok(_) | Err(_) => {
                check.error(format!("nic[{at}].mtu"), "must be 68 to 65535");
                None
            }
        });
        Nic {
            id: device_id(check, &format!("nic[{at}].id"), raw.id, || format!("nic{at}")),
            mac,
            bridge: check.text(
                &format!("nic[{at}].bridge"),
                raw.bridge,
                is_interface,
                "the name of a bridge, at most 15 bytes",
            ),
            mtu,
        }
    };
    raw.into_iter().enumerate().map(&mut nic).collect()
}

fn device_id(
    check: &mut Checker,
    field: &str,
    value: Option<String>,
    default: impl FnOnce() -> String,
) -> String {
    let value = value.unwrap_or_else(default);
    check.text(
        field,
        Some(value),
        is_device_id,
        "a letter, then up to 31 letters, digits, '-' and '_'",
    )
}

fn unique_ids(check: &mut Checker, disks: &[Disk], nics: &[Nic]) {
    let mut seen = BTreeSet::new();
    let ids = disks.iter().map(|disk| &disk.id).chain(nics.iter().map(|nic| &nic.id));
    for id in ids.filter(|id| !id.is_empty()) {
        if !seen.insert(id.clone()) {
            check.error("id", format!("{id:?} names two devices"));
        }
    }
    let mut macs = BTreeSet::new();
    for (at, nic) in nics.iter().enumerate() {
        if !nic.mac.is_empty() && !macs.insert(&nic.mac) {
            check.error(format!("nic[{at}].mac"), "is another NIC's address");
        }
    }
}

/// Says whether a machine type has the PCI bus that addresses are given on.
pub(crate) fn has_pci(machine: &str) -> bool {
    machine == "pc" || machine == "q35" || machine.starts_with("pc-")
}

fn is_name(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'.' || b == b'-';
    text.len() <= 63
        && text.bytes().all(legal)
        && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

fn is_word(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    (1..=63).contains(&text.len()) && text.bytes().all(legal) && !text.starts_with('-')
}

fn is_cpu(text: &str) -> bool {
    let legal =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b',' | b'+' | b'=');
    (1..=1024).contains(&text.len()) && text.bytes().all(legal) && !text.starts_with('-')
}

fn is_device_id(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    text.len() <= 32
        && text.bytes().all(legal)
        && text.bytes().next().is_some_and(|b| b.is_ascii_alphabetic())
}

fn is_interface(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_graphic() && b != b'/' && b != b',')
        && text != "."
        && text != ".."
}

fn is_absolute(text: &str) -> bool {
    text.starts_with('/') && text.len() < 4096 && !text.chars().any(char::is_control)
}

fn is_unicast_mac(text: &str) -> bool {
    let octets: Option<Vec<u8>> = text
        .split(':')
        .map(|octet| (octet.len() == 2).then(|| u8::from_str_radix(octet, 16).ok()).flatten())
        .collect();
    octets.is_some_and(|octets| {
        octets.len() == 6 && octets[0] & 1 == 0 && octets.iter().any(|octet| *octet != 0)
    })
}

/// Reads a size with a binary unit, such as `512MiB`; `G` alone stands for `GiB`.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(at);
    let shift = match unit.trim() {
        "B" => 0,
        "KiB" | "K" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        "TiB" | "T" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}
