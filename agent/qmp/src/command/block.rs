//! Disks: nodes, devices, jobs.

use serde::{Deserialize, Serialize};

use super::{Nothing, command};
use crate::Command;

/// Lists the block nodes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryNamedBlockNodes {
    /// `Some(true)` leaves the backing chains out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flat: Option<bool>,
}
command!(QueryNamedBlockNodes, "query-named-block-nodes" -> Vec<BlockNode>);

/// One block node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BlockNode {
    /// Its name.
    pub node_name: String,
    /// The driver's name.
    pub drv: String,
    /// Whether it is read-only.
    pub ro: bool,
    /// The file name, as QEMU shows it.
    pub file: String,
    /// Whether this process may write and holds the lock. `None` before
    /// QEMU 10.0, which does not say.
    pub active: Option<bool>,
    /// What is known of the image.
    pub image: Option<BlockImage>,
}

/// An image behind a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BlockImage {
    /// The file name.
    pub filename: String,
    /// The format's name.
    pub format: String,
    /// What the guest sees, in bytes.
    pub virtual_size: u64,
    /// What it occupies, in bytes.
    pub actual_size: Option<u64>,
    /// The backing file, if there is one.
    pub full_backing_filename: Option<String>,
    /// The backing file as it stands in the image.
    pub backing_filename: Option<String>,
}

/// Lists the guest's block devices.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryBlock {}
command!(QueryBlock, "query-block" -> Vec<BlockDevice>);

/// One of the guest's block devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockDevice {
    /// The backend's name; empty for `-blockdev`.
    pub device: String,
    /// The device's id or its path in the object tree.
    pub qdev: Option<String>,
    /// What is in it.
    pub inserted: Option<BlockDeviceInserted>,
}

/// The medium in a block device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BlockDeviceInserted {
    /// The node's name.
    pub node_name: Option<String>,
    /// The driver's name.
    pub drv: String,
    /// Whether it is read-only.
    pub ro: bool,
    /// The file name, as QEMU shows it.
    pub file: String,
    /// As in [`BlockNode::active`].
    pub active: Option<bool>,
    /// What is known of the image.
    pub image: Option<BlockImage>,
}

/// Takes or gives up the right to write. New in QEMU 10.0.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockdevSetActive {
    /// The node; `None` means all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// What it shall be.
    pub active: bool,
}
command!(BlockdevSetActive, "blockdev-set-active" -> Nothing);

/// Lists the jobs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryJobs {}
command!(QueryJobs, "query-jobs" -> Vec<Job>);

/// One job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Job {
    /// Its id.
    pub id: String,
    /// QEMU's word for its kind, such as `mirror`.
    #[serde(rename = "type")]
    pub kind: String,
    /// QEMU's word for its status, such as `running` or `ready`.
    pub status: String,
    /// How far it is, in units of its own.
    pub current_progress: i64,
    /// Where it ends, as far as known now.
    pub total_progress: i64,
    /// Why it failed.
    pub error: Option<String>,
}

/// Lists the block jobs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryBlockJobs {}
command!(QueryBlockJobs, "query-block-jobs" -> Vec<BlockJob>);

/// One block job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[expect(clippy::struct_excessive_bools, reason = "QEMU's own flags, as it sends them")]
pub struct BlockJob {
    /// The job's id, under its old name.
    pub device: String,
    /// QEMU's word for its kind.
    #[serde(rename = "type")]
    pub kind: String,
    /// How much there is, in bytes.
    pub len: i64,
    /// How much is done, in bytes.
    pub offset: i64,
    /// Whether it is doing something.
    pub busy: bool,
    /// Whether it is paused.
    pub paused: bool,
    /// Whether it has caught up. A move must not be ordered before.
    pub ready: bool,
    /// QEMU's word for its status.
    pub status: String,
    /// QEMU's word for its last I/O, `ok` if all went well.
    pub io_status: String,
    /// Its bound, in bytes per second; 0 is none.
    pub speed: i64,
    /// Why it failed.
    pub error: Option<String>,
}
