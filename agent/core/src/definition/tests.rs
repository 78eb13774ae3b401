use super::*;

const WHOLE: &str = r#"
name = "web1"
uuid = "01234567-89AB-cdef-0123-456789abcdef"
machine = "q35"
accel = "tcg"
cpu = "qemu64,-cx16"
vcpus = 2
memory = "512MiB"
max_memory = "1GiB"
firmware = "/fw.bin"
labels = { tier = "web" }
pin = "a"
required_labels = { rack = "1" }
extra_args = ["-chardev", "null,id=c0"]
[kernel]
image = "/vmlinuz"
initrd = "/initrd"
cmdline = "console=ttyS0"
[[disk]]
path = "/shared/x.raw"
shared = true
[[nic]]
mac = "52:54:00:00:00:0A"
bridge = "br0"
mtu = 1500
"#;

const SMALL: &str = r#"
name = "x"
uuid = "01234567-89ab-cdef-0123-456789abcdef"
machine = "pc"
memory = "64MiB"
"#;

fn fields(text: &str) -> Vec<String> {
    Definition::parse(text).unwrap_err().0.into_iter().map(|error| error.field).collect()
}

#[test]
fn a_whole_definition_is_read() {
    let vm = Definition::parse(WHOLE).unwrap();
    assert_eq!(vm.uuid.to_string(), "01234567-89ab-cdef-0123-456789abcdef");
    assert_eq!((vm.memory, vm.memory_max), (Bytes(512 << 20), Bytes(1 << 30)));
    assert_eq!((vm.disks[0].id.as_str(), vm.disks[0].sharing), ("disk0", Sharing::Shared));
    assert_eq!((vm.nics[0].id.as_str(), vm.nics[0].mac.as_str()), ("nic0", "52:54:00:00:00:0a"));
}

#[test]
fn what_is_left_out_has_its_default() {
    let vm = Definition::parse(SMALL).unwrap();
    assert_eq!((vm.accelerator, vm.cpu.as_str(), vm.vcpus), (Accelerator::Kvm, "qemu64", 1));
    assert_eq!(vm.memory_max, vm.memory);
}

#[test]
fn every_error_is_named_at_once() {
    let bad = r#"
name = "Web 1"
machine = "q35,accel=kvm"
vcpus = 0
memory = "512"
max_memory = "100KiB"
pin = "-"
extra_args = ["-incoming", "--qmp"]
[[disk]]
path = "relative"
format = "vmdk"
[[disk]]
id = "nic0"
path = "/b"
[[nic]]
mac = "53:54:00:00:00:01"
bridge = "a/b"
"#;
    assert_eq!(
        fields(bad),
        [
            "name",
            "uuid",
            "machine",
            "vcpus",
            "memory",
            "max_memory",
            "pin",
            "extra_args[0]",
            "extra_args[1]",
            "disk[0].format",
            "disk[0].path",
            "nic[0].mac",
            "nic[0].bridge",
            "id",
            "machine"
        ]
    );
}

#[test]
fn unknown_fields_are_refused() {
    let error = Definition::parse(&format!("{SMALL}turbo = true\n")).unwrap_err();
    assert!(error.to_string().contains("turbo"), "{error}");
}

#[test]
fn what_is_no_toml_is_an_error_and_no_panic() {
    assert_eq!(fields("]["), [""]);
}

#[test]
fn sizes_need_their_unit_and_must_not_wrap() {
    assert_eq!(check::parse_size("2GiB"), Some(2 << 30));
    assert_eq!(check::parse_size("64M"), Some(64 << 20));
    for bad in ["", "2", "GiB", "2GB", "-1MiB", "99999999999999TiB", "ä"] {
        assert_eq!(check::parse_size(bad), None, "{bad}");
    }
}

#[test]
fn a_ceiling_below_the_memory_is_refused() {
    assert_eq!(fields(&format!("{SMALL}max_memory = \"32MiB\"\n")), ["max_memory"]);
}

#[test]
fn disks_need_a_machine_with_pci() {
    let text = SMALL.replace("\"pc\"", "\"microvm\"") + "[[disk]]\npath = \"/x\"\n";
    assert_eq!(fields(&text), ["machine"]);
}
