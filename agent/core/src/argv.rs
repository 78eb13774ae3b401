//! QEMU's command line.
//!
//! Both ends of a move must be built alike, so every device has its address written out: disks
//! from slot 0x10 on, NICs from 0x08 on. What else is on the command line (`extra_args`) finds its
//! own place, in the same order on both ends.

use serde_json::json;

use crate::definition::{Access, Definition, Disk, Nic};

/// The first PCI slot of disks.
const DISK_SLOT: usize = 0x10;
/// The first PCI slot of NICs.
const NIC_SLOT: usize = 0x08;
/// How many DIMMs may be plugged where memory has a ceiling above its start.
const MEMORY_SLOTS: u32 = 4;

/// What a QEMU process is started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To run the guest from its boot.
    Boot,
    /// To stand still with its disks locked until the guest may be booted.
    Stand,
    /// To receive the guest: its vCPUs stand still until they are told to run.
    Receive,
}

/// Returns QEMU's arguments, all but the program, the monitors and what belongs to the process.
///
/// `taps` are the names of the tap interfaces, one for each NIC in order.
#[must_use]
pub fn argv(
    vm: &Definition,
    resolved_machine: &str,
    purpose: Purpose,
    taps: &[String],
) -> Vec<String> {
    let mut args: Vec<String> = Vec::new();
    let mut push = |option: &str, value: String| args.extend([option.to_owned(), value]);
    push("-name", format!("guest={},debug-threads=on", vm.name));
    push("-uuid", vm.uuid.to_string());
    push("-machine", resolved_machine.to_owned());
    push("-accel", vm.accelerator.label().to_owned());
    push("-cpu", vm.cpu.clone());
    push("-smp", vm.vcpus.to_string());
    push("-m", memory(vm));
    if let Some(firmware) = &vm.firmware {
        push("-bios", firmware.clone());
    }
    if let Some(kernel) = &vm.kernel {
        push("-kernel", kernel.image.clone());
        if let Some(initrd) = &kernel.initrd {
            push("-initrd", initrd.clone());
        }
        if let Some(cmdline) = &kernel.cmdline {
            push("-append", cmdline.clone());
        }
    }
    let bus = root_bus(resolved_machine);
    for (at, disk) in vm.disks.iter().enumerate() {
        push("-blockdev", file_node(disk));
        push("-blockdev", format_node(disk));
        push("-device", disk_device(disk, bus, DISK_SLOT + at));
    }
    for (at, (nic, tap)) in vm.nics.iter().zip(taps).enumerate() {
        push("-netdev", netdev(nic, tap));
        push("-device", nic_device(nic, bus, NIC_SLOT + at));
    }
    args.extend(["-nodefaults", "-no-user-config", "-display", "none"].map(str::to_owned));
    match purpose {
        Purpose::Boot => {}
        Purpose::Stand => args.push("-S".to_owned()),
        Purpose::Receive => args.extend(["-S", "-incoming", "defer"].map(str::to_owned)),
    }
    args.extend(vm.extra_args.iter().cloned());
    args
}

fn memory(vm: &Definition) -> String {
    let size = vm.memory.value() >> 20;
    if vm.memory_max > vm.memory {
        format!("size={size}M,maxmem={}M,slots={MEMORY_SLOTS}", vm.memory_max.value() >> 20)
    } else {
        format!("size={size}M")
    }
}

/// Returns the root bus that devices are put on.
fn root_bus(machine: &str) -> &'static str {
    if machine.contains("q35") { "pcie.0" } else { "pci.0" }
}

fn file_node(disk: &Disk) -> String {
    json!({
        "driver": "file",
        "node-name": format!("{}-file", disk.id),
        "filename": disk.path,
        "cache": { "direct": true, "no-flush": false },
        "auto-read-only": false,
        "read-only": disk.access == Access::ReadOnly,
    })
    .to_string()
}

fn format_node(disk: &Disk) -> String {
    json!({
        "driver": disk.format.label(),
        "node-name": format!("{}-format", disk.id),
        "file": format!("{}-file", disk.id),
        "cache": { "direct": true, "no-flush": false },
        "read-only": disk.access == Access::ReadOnly,
    })
    .to_string()
}

fn disk_device(disk: &Disk, bus: &str, slot: usize) -> String {
    json!({
        "driver": "virtio-blk-pci",
        "id": disk.id,
        "drive": format!("{}-format", disk.id),
        "bus": bus,
        "addr": format!("{slot:#04x}"),
    })
    .to_string()
}

fn netdev(nic: &Nic, tap: &str) -> String {
    json!({
        "type": "tap",
        "id": format!("{}-net", nic.id),
        "ifname": tap,
        "script": "no",
        "downscript": "no",
    })
    .to_string()
}

fn nic_device(nic: &Nic, bus: &str, slot: usize) -> String {
    json!({
        "driver": "virtio-net-pci",
        "id": nic.id,
        "netdev": format!("{}-net", nic.id),
        "mac": nic.mac,
        "bus": bus,
        "addr": format!("{slot:#04x}"),
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: &str = r#"
name = "web1"
uuid = "01234567-89ab-cdef-0123-456789abcdef"
machine = "q35"
memory = "512MiB"
max_memory = "1GiB"
extra_args = ["-chardev", "null,id=c0"]
[[disk]]
path = "/shared/x,y.raw"
[[nic]]
mac = "52:54:00:00:00:01"
bridge = "br0"
"#;

    fn line(purpose: Purpose) -> Vec<String> {
        argv(&Definition::parse(VM).unwrap(), "pc-q35-10.0", purpose, &["vf0".to_owned()])
    }

    #[test]
    fn a_receiver_differs_from_a_boot_by_its_waiting_alone() {
        let mut receiver = line(Purpose::Receive);
        let at = receiver.iter().position(|arg| arg == "-S").unwrap();
        assert_eq!(receiver.drain(at..at + 3).collect::<Vec<_>>(), ["-S", "-incoming", "defer"]);
        assert_eq!(receiver, line(Purpose::Boot));
    }

    #[test]
    fn devices_have_their_addresses_written_out() {
        let text = line(Purpose::Boot).join(" ");
        assert!(text.contains(r#""addr":"0x10","bus":"pcie.0","drive":"disk0-format""#), "{text}");
        assert!(
            text.contains(r#""addr":"0x08","bus":"pcie.0","driver":"virtio-net-pci""#),
            "{text}"
        );
    }

    #[test]
    fn a_comma_in_a_path_is_no_option() {
        assert!(
            line(Purpose::Boot).iter().any(|arg| arg.contains(r#""filename":"/shared/x,y.raw""#))
        );
    }

    #[test]
    fn memory_with_a_ceiling_can_be_plugged() {
        assert!(line(Purpose::Boot).contains(&"size=512M,maxmem=1024M,slots=4".to_owned()));
    }

    #[test]
    fn the_versioned_machine_type_is_used() {
        let args = line(Purpose::Boot);
        let at = args.iter().position(|arg| arg == "-machine").unwrap();
        assert_eq!(args[at + 1], "pc-q35-10.0");
    }
}
