//! A definition as it stands in the file, nothing checked but its shape.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Definition {
    pub(super) name: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) machine: Option<String>,
    pub(super) accel: Option<String>,
    pub(super) cpu: Option<String>,
    pub(super) vcpus: Option<i64>,
    pub(super) memory: Option<String>,
    pub(super) max_memory: Option<String>,
    pub(super) firmware: Option<String>,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
    pub(super) pin: Option<String>,
    #[serde(default)]
    pub(super) required_labels: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) extra_args: Vec<String>,
    pub(super) kernel: Option<Kernel>,
    #[serde(default)]
    pub(super) disk: Vec<Disk>,
    #[serde(default)]
    pub(super) nic: Vec<Nic>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kernel {
    pub(super) image: Option<String>,
    pub(super) initrd: Option<String>,
    pub(super) cmdline: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Disk {
    pub(super) id: Option<String>,
    pub(super) path: Option<String>,
    pub(super) format: Option<String>,
    pub(super) shared: Option<bool>,
    pub(super) read_only: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Nic {
    pub(super) id: Option<String>,
    pub(super) mac: Option<String>,
    pub(super) bridge: Option<String>,
    pub(super) mtu: Option<i64>,
}
