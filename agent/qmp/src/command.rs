//! The commands vmferry gives, and what QEMU answers.
//!
//! Every command implements [`Command`], the trait of the generated
//! [`schema`](crate::schema), so both kinds are executed alike:
//! `schema::cont {}` and [`QueryMigrate`]. There is a type of our own where
//! the generated one is too strict (it declares a field mandatory that QEMU
//! leaves out, or an enum that a newer QEMU extends), lacks what QEMU 10
//! added, or is a burden to build.
//!
//! Reply types ignore what they do not know and make optional what any
//! version leaves out.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::Command;

pub mod block;
pub mod guest;

pub use block::{
    BlockDevice, BlockDeviceInserted, BlockImage, BlockJob, BlockNode, BlockdevSetActive, Job,
    QueryBlock, QueryBlockJobs, QueryJobs, QueryNamedBlockNodes,
};
pub use guest::{
    BalloonInfo, CpuFast, CpuModel, CpuModelExpansion, CpuModelExpansionKind, MemorySizeSummary,
    QueryBalloon, QueryCommands, QueryCpuModelExpansion, QueryCpusFast, QueryMemorySizeSummary,
    QueryName, QueryStatus, QueryUuid, StatusInfo,
};

use crate::migration::MigrateInfo;

/// The commands that QEMU executes out of band. There are no others in 10.0.
pub const OUT_OF_BAND: [&str; 4] = ["migrate-pause", "migrate-recover", "query-yank", "yank"];

macro_rules! command {
    ($type:ty, $name:literal -> $ok:ty) => {
        command!($type, $name -> $ok, false);
    };
    ($type:ty, $name:literal -> $ok:ty, oob) => {
        command!($type, $name -> $ok, true);
    };
    ($type:ty, $name:literal -> $ok:ty, $oob:literal) => {
        impl Command for $type {
            type Ok = $ok;
            const NAME: &'static str = $name;
            const ALLOW_OOB: bool = $oob;
        }
    };
}
pub(crate) use command;

/// What a command returns that has nothing to say.
///
/// QEMU answers `{}`; should a version ever say more, that is no failure.
pub type Nothing = serde::de::IgnoredAny;

/// Reads where the migration stands.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrate {}
command!(QueryMigrate, "query-migrate" -> MigrateInfo);

/// Reads which migration capabilities this QEMU has, and which are on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrateCapabilities {}
command!(QueryMigrateCapabilities, "query-migrate-capabilities" -> Vec<Capability>);

/// One migration capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Capability {
    /// QEMU's name for it.
    pub capability: String,
    /// Whether it is on.
    pub state: bool,
}

/// Turns migration capabilities on and off. Refused while one migrates.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateSetCapabilities {
    /// Those to change; the others stay.
    pub capabilities: Vec<Capability>,
}
command!(MigrateSetCapabilities, "migrate-set-capabilities" -> Nothing);

impl MigrateSetCapabilities {
    /// Turns `on` on and `off` off.
    #[must_use]
    pub fn new(on: &[&str], off: &[&str]) -> Self {
        let to = |state| move |name: &&str| Capability { capability: (*name).to_owned(), state };
        Self { capabilities: on.iter().map(to(true)).chain(off.iter().map(to(false))).collect() }
    }
}

/// Reads the migration parameters.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrateParameters {}
command!(QueryMigrateParameters, "query-migrate-parameters" -> Map<String, Value>);

/// Changes migration parameters; most take effect while one migrates.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct MigrateSetParameters(pub Map<String, Value>);
command!(MigrateSetParameters, "migrate-set-parameters" -> Nothing);

impl MigrateSetParameters {
    /// Adds one parameter under QEMU's name.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }
}

/// Starts or resumes sending.
#[derive(Clone, Debug, Serialize)]
pub struct Migrate {
    /// Where to, as in `tcp:10.0.0.2:49152`, `unix:/path` or `fd:name`.
    pub uri: String,
    /// `Some(true)` takes a paused postcopy up again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<bool>,
}
command!(Migrate, "migrate" -> Nothing);

/// Arms a receiver that was started with `-incoming defer`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrateIncoming {
    /// Where to listen.
    pub uri: String,
    /// `Some(false)` keeps the process and its error after a failure. Older
    /// than 9.1 does not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_on_error: Option<bool>,
}
command!(MigrateIncoming, "migrate-incoming" -> Nothing);

/// Calls a migration back. Refused in postcopy.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateCancel {}
command!(MigrateCancel, "migrate_cancel" -> Nothing);

/// Orders the switchover of a guest that stands at `pre-switchover`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateContinue {
    /// The state to leave; QEMU refuses if it is in another one.
    pub state: ContinueFrom,
}
command!(MigrateContinue, "migrate-continue" -> Nothing);

/// The state that `migrate-continue` leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContinueFrom {
    /// The guest stands still, nothing was handed over yet.
    PreSwitchover,
}

/// Orders the switch to postcopy: the point of no return.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateStartPostcopy {}
command!(MigrateStartPostcopy, "migrate-start-postcopy" -> Nothing);

/// Forces a postcopy to `postcopy-paused`. Out of band.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigratePause {}
command!(MigratePause, "migrate-pause" -> Nothing, oob);

/// Makes a paused destination listen anew. Out of band.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateRecover {
    /// Where to listen.
    pub uri: String,
}
command!(MigrateRecover, "migrate-recover" -> Nothing, oob);

/// Lists the connections that could be yanked. Out of band.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryYank {}
command!(QueryYank, "query-yank" -> Vec<YankInstance>, oob);

/// Breaks connections at once. Out of band.
#[derive(Clone, Debug, Serialize)]
pub struct Yank {
    /// Which ones.
    pub instances: Vec<YankInstance>,
}
command!(Yank, "yank" -> Nothing, oob);

/// One connection that can be broken.
#[derive(Clone, Debug, PartialEq, Serialize, serde::Deserialize)]
pub struct YankInstance {
    /// QEMU's word, such as `migration`, `block-node` or `chardev`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What names it among its kind, such as `node-name`.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl YankInstance {
    /// The migration's connections.
    #[must_use]
    pub fn migration() -> Self {
        Self { kind: "migration".to_owned(), rest: Map::new() }
    }
}

/// Makes an object of QEMU's: credentials, or a list of who may.
#[derive(Clone, Debug, Serialize)]
pub struct ObjectAdd {
    /// Its kind under QEMU's name.
    #[serde(rename = "qom-type")]
    pub kind: String,
    /// Its name from now on.
    pub id: String,
    /// What it is made of, under QEMU's names.
    #[serde(flatten)]
    pub properties: Map<String, Value>,
}
command!(ObjectAdd, "object-add" -> Nothing);

impl ObjectAdd {
    /// Names an object that has nothing yet.
    #[must_use]
    pub fn new(kind: &str, id: &str) -> Self {
        Self { kind: kind.to_owned(), id: id.to_owned(), properties: Map::new() }
    }

    /// Adds one property under QEMU's name.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.properties.insert(name.to_owned(), value.into());
        self
    }
}

/// Removes an object. Refused where there is none of that name.
#[derive(Clone, Debug, Serialize)]
pub struct ObjectDel {
    /// Its name.
    pub id: String,
}
command!(ObjectDel, "object-del" -> Nothing);

/// Runs the guest.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cont {}
command!(Cont, "cont" -> Nothing);

/// Stops the guest's vCPUs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stop {}
command!(Stop, "stop" -> Nothing);

/// Ends the QEMU process in good order.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quit {}
command!(Quit, "quit" -> Nothing);

/// Asks the guest to power off.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SystemPowerdown {}
command!(SystemPowerdown, "system_powerdown" -> Nothing);

/// Makes the guest's NICs known to the switches.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AnnounceSelf {
    /// Before the second round, in milliseconds.
    pub initial: u64,
    /// The longest wait, in milliseconds.
    pub max: u64,
    /// How many rounds.
    pub rounds: u64,
    /// By how much the wait grows, in milliseconds.
    pub step: u64,
}
command!(AnnounceSelf, "announce-self" -> Nothing);

/// Names a file descriptor that travels along with this command.
#[derive(Clone, Debug, Serialize)]
pub struct Getfd {
    /// Its name from now on.
    pub fdname: String,
}
command!(Getfd, "getfd" -> Nothing);

/// Closes a descriptor that was named with [`Getfd`].
#[derive(Clone, Debug, Serialize)]
pub struct Closefd {
    /// Its name.
    pub fdname: String,
}
command!(Closefd, "closefd" -> Nothing);
