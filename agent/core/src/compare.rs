//! Whether a receiver is built like the source (rule R12).
//!
//! QEMU lets several differences "complete" with a dead guest: another CPU model, a smaller disk,
//! another MAC address or queue size. So both ends are read as they really are and compared here.

use std::collections::{BTreeMap, BTreeSet};

/// A VM as its QEMU process really is, as far as both ends must agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// The versioned machine type.
    pub machine: String,
    /// The accelerator.
    pub accelerator: String,
    /// The CPU model with its flags, as it was asked for.
    pub cpu_model: String,
    /// CPU features that the guest sees, `+name` each.
    pub cpu_features: BTreeSet<String>,
    /// How many vCPUs.
    pub vcpus: u32,
    /// Memory from `-m`, in bytes.
    pub memory_bytes: u64,
    /// What the guest sees of each disk, in bytes, by disk id.
    pub disks: BTreeMap<String, u64>,
    /// The MAC address of each NIC, by NIC id.
    pub nics: BTreeMap<String, String>,
    /// One line a device: type, address, id and the properties that must be equal.
    pub devices: BTreeSet<String>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Stable, for programs: `machine`, `cpu_model`, `disk_size`, ...
    pub code: &'static str,
    /// For people.
    pub message: String,
}

/// Returns every difference between what a source is and what its receiver is.
#[must_use]
pub fn differences(source: &Shape, receiver: &Shape) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut scalar =
        |code, what: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            let (here, there) = (here.to_string(), there.to_string());
            if here != there {
                let message = format!("{what}: the source has {here}, the receiver {there}");
                found.push(Difference { code, message });
            }
        };
    scalar("machine_differs", "machine type", &source.machine, &receiver.machine);
    scalar("accelerator_differs", "accelerator", &source.accelerator, &receiver.accelerator);
    scalar("cpu_model_differs", "CPU model", &source.cpu_model, &receiver.cpu_model);
    scalar("vcpus_differ", "vCPUs", &source.vcpus, &receiver.vcpus);
    scalar("memory_differs", "memory in bytes", &source.memory_bytes, &receiver.memory_bytes);
    maps("disk_differs", "disk", &source.disks, &receiver.disks, &mut found);
    maps("nic_differs", "NIC", &source.nics, &receiver.nics, &mut found);
    sets("device_differs", "device", &source.devices, &receiver.devices, &mut found);
    for feature in source.cpu_features.difference(&receiver.cpu_features) {
        let message =
            format!("CPU feature {feature}: the guest was given it, the receiver lacks it");
        found.push(Difference { code: "cpu_feature_missing", message });
    }
    found
}

fn maps<V: std::fmt::Display + PartialEq>(
    code: &'static str,
    what: &str,
    source: &BTreeMap<String, V>,
    receiver: &BTreeMap<String, V>,
    found: &mut Vec<Difference>,
) {
    let ids: BTreeSet<&String> = source.keys().chain(receiver.keys()).collect();
    for id in ids {
        let message = match (source.get(id), receiver.get(id)) {
            (Some(here), Some(there)) if here == there => continue,
            (Some(here), Some(there)) => {
                format!("{what} {id}: the source has {here}, the receiver {there}")
            }
            (Some(_), None) => format!("{what} {id}: only the source has it"),
            (None, _) => format!("{what} {id}: only the receiver has it"),
        };
        found.push(Difference { code, message });
    }
}

fn sets(
    code: &'static str,
    what: &str,
    source: &BTreeSet<String>,
    receiver: &BTreeSet<String>,
    found: &mut Vec<Difference>,
) {
    for (only, side) in
        [(source.difference(receiver), "source"), (receiver.difference(source), "receiver")]
    {
        found.extend(only.map(|line| Difference {
            code,
            message: format!("{what} {line}: only the {side} has it"),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            machine: "pc-q35-10.0".to_owned(),
            accelerator: "tcg".to_owned(),
            cpu_model: "qemu64".to_owned(),
            cpu_features: BTreeSet::from(["+sse2".to_owned()]),
            vcpus: 1,
            memory_bytes: 512 << 20,
            disks: BTreeMap::from([("disk0".to_owned(), 64 << 20)]),
            nics: BTreeMap::from([("nic0".to_owned(), "52:54:00:00:00:01".to_owned())]),
            devices: BTreeSet::from(["virtio-net-pci 08.0 nic0".to_owned()]),
        }
    }

    /// One change of a shape.
    type Change = fn(&mut Shape);

    #[test]
    fn equal_ends_have_no_difference() {
        assert_eq!(differences(&shape(), &shape()), []);
    }

    #[test]
    fn each_difference_is_named() {
        let cases: [(Change, &str); 9] = [
            (|s| s.machine = "pc-q35-9.2".to_owned(), "machine_differs"),
            (|s| s.accelerator = "kvm".to_owned(), "accelerator_differs"),
            (|s| s.cpu_model = "max".to_owned(), "cpu_model_differs"),
            (|s| s.cpu_features.clear(), "cpu_feature_missing"),
            (|s| s.vcpus = 2, "vcpus_differ"),
            (|s| s.memory_bytes = 1, "memory_differs"),
            (|s| s.disks.insert("disk0".to_owned(), 32 << 20).map_or((), |_| ()), "disk_differs"),
            (|s| s.nics.clear(), "nic_differs"),
            (
                |s| s.devices = BTreeSet::from(["virtio-net-pci 09.0 nic0".to_owned()]),
                "device_differs",
            ),
        ];
        for (change, code) in cases {
            let mut receiver = shape();
            change(&mut receiver);
            let found = differences(&shape(), &receiver);
            assert!(!found.is_empty() && found.iter().all(|d| d.code == code), "{code}: {found:?}");
        }
    }

    #[test]
    fn a_feature_that_only_the_receiver_has_does_not_hurt() {
        let mut receiver = shape();
        receiver.cpu_features.insert("+avx2".to_owned());
        assert_eq!(differences(&shape(), &receiver), []);
    }
}
