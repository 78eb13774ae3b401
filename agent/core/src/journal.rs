//! What an agent writes down about a VM, before it acts on it.
//!
//! One record a VM, replaced as a whole. It is the second copy of the fleet's truth (rule R13),
//! and the only one that says what was ordered and what may have run. A record never vanishes: of
//! a VM that left stay its generation and claim.

use serde::{Deserialize, Serialize};
use vmferry_qmp::MigrateInfo;
use vmferry_types::{Claim, Generation, MigrationId, Role, Step, VmId};

use crate::capabilities::Carries;
use crate::fence::FenceState;
use crate::hold::Hold;
use crate::tuning::Tuned;

/// The version that this code writes.
///
/// A field that older agents do not know raises it; reading an older record must always work.
pub const VERSION: u32 = 4;

/// What is written down of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmRecord {
    /// The version of this record's form.
    pub version: u32,
    /// The VM.
    #[serde(with = "as_id")]
    pub vm: VmId,
    /// Its name, for people.
    pub name: String,
    /// Who may command it.
    pub fence: FenceState,
    /// How long its guest may stand still, not ordered, while no driver is heard, in milliseconds.
    /// 0 is the agent's default.
    pub hold_limit_ms: u64,
    /// What this host has of it.
    pub part: Part,
    /// How the last process of it here ended, and what is proven by that.
    pub ended: Option<Ended>,
}

/// What a host has of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Part {
    /// Nothing but the memory of who commanded it.
    Absent,
    /// A definition and no process.
    Stopped {
        /// What it is.
        defined: Defined,
        /// The migration that brings it here, while the VM is not this host's yet. Records of
        /// version 3 know of no such thing.
        #[serde(default, with = "as_id_option")]
        brought_by: Option<MigrationId>,
    },
    /// A process that runs the guest, or ran it until it was sent away.
    Running {
        /// What it is.
        defined: Defined,
        /// The process.
        process: Process,
        /// The last attempt to send it, if there was one.
        outgoing: Option<Outgoing>,
        /// What keeps its guest still on purpose. Records of version 1 know of no such thing.
        #[serde(default)]
        held: Option<Hold>,
        /// The migration for whose sake the guest was asked to turn itself off. Records of version 3
        /// know of no such thing.
        #[serde(default, with = "as_id_option")]
        leaving: Option<MigrationId>,
    },
    /// A process that was started to receive the guest.
    Receiver {
        /// What it is.
        defined: Defined,
        /// The process.
        process: Process,
        /// What it waits for.
        incoming: Incoming,
    },
}

/// A VM's definition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defined {
    /// The TOML text.
    pub text: String,
    /// The versioned machine type; empty before the first start.
    pub resolved_machine: String,
}

/// A QEMU process, written down before it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The directory of its sockets and of its shim's records: names the launch.
    pub dir: String,
    /// The boot in which it was to be started.
    pub boot_id: String,
    /// Who it is. `None` until it was started, and after a crash in the middle of that.
    pub identity: Option<Identity>,
    /// Its tap interfaces, in the order of the NICs.
    pub taps: Vec<String>,
    /// The generation under which it may run the guest; a receiver: under which it was armed.
    #[serde(with = "as_counter")]
    pub generation: Generation,
    /// The admission that started it.
    #[serde(with = "as_id")]
    pub admission: MigrationId,
    /// When the switches were told that its guest is here, in milliseconds since 1970; 0 if they were
    /// not.
    #[serde(default)]
    pub announced_ms: u64,
}

/// Tells a process apart from every other that this machine ever had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its process id.
    pub pid: u32,
    /// When it started, in the kernel's ticks since the boot.
    pub start_time: u64,
    /// The boot it belongs to.
    pub boot_id: String,
}

/// An attempt to send a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outgoing {
    /// The migration that it belongs to.
    #[serde(with = "as_id")]
    pub migration: MigrationId,
    /// What QEMU said of its migration just before it was told to send: what it says unchanged is
    /// not about this attempt.
    pub before: Box<MigrateInfo>,
    /// Whether QEMU took the command.
    pub issue: Issue,
    /// How long it may take until the switchover, in milliseconds.
    pub timeout_ms: u64,
    /// How long it may move no byte, in milliseconds.
    pub stall_ms: u64,
    /// How long QEMU may plan to let the guest stand still, in milliseconds. 0 is the default.
    #[serde(default)]
    pub downtime_ms: u64,
    /// What else limits it now, as QEMU was told.
    #[serde(default)]
    pub tuned: Tuned,
    /// Whether the guest may go before its memory: as both ends were set up. Records of version 2 know
    /// of no such thing.
    #[serde(default)]
    pub carries: Carries,
    /// Whether it was told to.
    #[serde(default)]
    pub parting: Parting,
    /// What was decided about its end.
    pub order: Order,
}

/// Whether QEMU took the command to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Issue {
    /// It was about to be told.
    Intended,
    /// It took it.
    Accepted,
    /// It refused it.
    Refused,
}

/// Whether a guest was told to go before its memory; written before QEMU hears it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parting {
    /// It was not.
    #[default]
    No,
    /// It was: once ordered it does not go on here, unless QEMU says that it never left.
    Told,
}

/// What was decided about an attempt's end; each is written before QEMU hears it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Nothing.
    Open,
    /// The switchover was ordered: from here on only proof that the receiver is gone lets the
    /// guest go on here.
    Handed,
    /// It was called back, by itself or by command; a later order is refused.
    GaveUp {
        /// Why, for people.
        cause: String,
    },
    /// It was ordered, and the guest went on here after the receiver was proven gone.
    TakenBack {
        /// The proof, for people.
        cause: String,
    },
}

/// What a receiver waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incoming {
    /// The migration that it belongs to.
    #[serde(with = "as_id")]
    pub migration: MigrationId,
    /// Where it listens. `None` until it does.
    pub port: Option<u16>,
    /// Whether the guest may come before its memory.
    #[serde(default)]
    pub carries: Carries,
    /// How the guest gets here.
    #[serde(default)]
    pub arrives: Arrival,
    /// Whether its guest may have run.
    pub cont: Continued,
}

impl Incoming {
    /// Says whether anybody was told that the receiver is there.
    #[must_use]
    pub const fn told(&self) -> bool {
        match self.arrives {
            Arrival::Streamed => self.port.is_some(),
            Arrival::FromDisks => false,
            Arrival::Stands => true,
        }
    }
}

/// How a guest gets to its receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// Its state is sent.
    #[default]
    Streamed,
    /// It was shut down, and is to be started from its disks; its QEMU is being launched.
    FromDisks,
    /// The same, and its QEMU stands still with the disks locked.
    Stands,
}

/// Whether a receiver was told to let its guest run; written before QEMU hears it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Continued {
    /// Never.
    Never,
    /// It may have run.
    Ordered,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The admission under which it was seen to have ended.
    #[serde(with = "as_id_option")]
    pub migration: Option<MigrationId>,
    /// The proof.
    pub gone: Gone,
    /// Whether the guest may have run in it.
    pub cont: Continued,
}

/// Proof that a process does not exist (rule R1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gone {
    /// How it is known.
    pub kind: GoneKind,
    /// Who it was. `None` if it was never started.
    pub identity: Option<Identity>,
    /// The boot in which this was seen.
    pub boot_id: String,
    /// How it ended, for people.
    pub ended: String,
    /// When this was seen, in milliseconds since 1970.
    pub at_ms: u64,
    /// The last of what it wrote to stderr.
    pub stderr_tail: String,
}

/// How it is known that a process is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoneKind {
    /// The shim recorded the exit.
    ExitRecord,
    /// Pid and start time are absent under the same boot.
    ProcessAbsent,
    /// The boot is another.
    NewBoot,
    /// It was never started.
    NeverStarted,
}

/// Says why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It is no record.
    #[error("read the record")]
    Malformed(#[source] serde_json::Error),
    /// A newer agent wrote it.
    #[error("the record has version {found}, this agent reads up to {VERSION}; upgrade it")]
    Newer {
        /// The record's version.
        found: u32,
    },
    /// What it says cannot be.
    #[error("the record contradicts itself: {0}")]
    Contradiction(&'static str),
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl VmRecord {
    /// Makes the record of a VM that is not known yet.
    #[must_use]
    pub fn new(vm: VmId) -> Self {
        Self {
            version: VERSION,
            vm,
            name: String::new(),
            fence: FenceState::default(),
            hold_limit_ms: 0,
            part: Part::Absent,
            ended: None,
        }
    }

    /// Reads a record.
    ///
    /// # Errors
    ///
    /// Fails if it is broken or written by a newer agent: nothing is guessed from half a record.
    pub fn from_json(bytes: &[u8]) -> Result<Self, RecordError> {
        let Versioned { version } =
            serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
        if version > VERSION {
            return Err(RecordError::Newer { found: version });
        }
        let mut record: Self = serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
        record.version = VERSION;
        record.check()?;
        Ok(record)
    }

    /// Writes the record.
    ///
    /// # Errors
    ///
    /// Fails if it contradicts itself, which only a mistake in this program brings about.
    pub fn to_json(&self) -> Result<Vec<u8>, RecordError> {
        self.check()?;
        serde_json::to_vec_pretty(self).map_err(RecordError::Malformed)
    }

    fn check(&self) -> Result<(), RecordError> {
        let generation = self.process().map(|process| process.generation);
        if generation.is_some_and(|generation| generation > self.fence.generation) {
            return Err(RecordError::Contradiction("a process of a generation nobody was given"));
        }
        if self.fence.claim.value() == 0 && self.fence.last.is_some() {
            return Err(RecordError::Contradiction("a command without a claim"));
        }
        Ok(())
    }

    /// Returns the role in the fleet's words.
    ///
    /// A guest that was stopped for its move is held, and so is one that was handed over: it stands still here on purpose, and only proof that
    /// the receiver is gone lets it go on (rule R4).
    #[must_use]
    pub const fn role(&self) -> Role {
        match &self.part {
            Part::Absent => Role::Absent,
            Part::Stopped { .. } => Role::Stopped,
            Part::Running { held: Some(_), .. }
            | Part::Running { outgoing: Some(Outgoing { order: Order::Handed, .. }), .. } => {
                Role::Held
            }
            Part::Running { .. } => Role::Running,
            Part::Receiver { .. } => Role::Receiver,
        }
    }

    /// Returns the definition, if there is one.
    #[must_use]
    pub const fn defined(&self) -> Option<&Defined> {
        match &self.part {
            Part::Absent => None,
            Part::Stopped { defined, .. }
            | Part::Running { defined, .. }
            | Part::Receiver { defined, .. } => Some(defined),
        }
    }

    /// Returns the process that was written down, whether it still exists or not.
    #[must_use]
    pub const fn process(&self) -> Option<&Process> {
        match &self.part {
            Part::Absent | Part::Stopped { .. } => None,
            Part::Running { process, .. } | Part::Receiver { process, .. } => Some(process),
        }
    }

    /// Returns the same, to be changed.
    #[must_use]
    pub const fn process_mut(&mut self) -> Option<&mut Process> {
        match &mut self.part {
            Part::Absent | Part::Stopped { .. } => None,
            Part::Running { process, .. } | Part::Receiver { process, .. } => Some(process),
        }
    }

    /// Returns the attempt to send that belongs to the current admission.
    #[must_use]
    pub fn outgoing(&self) -> Option<&Outgoing> {
        self.sent().filter(|sent| Some(sent.migration) == self.fence.migration)
    }

    /// Returns the same, to be changed.
    #[must_use]
    pub fn outgoing_mut(&mut self) -> Option<&mut Outgoing> {
        let migration = self.fence.migration;
        self.sent_mut().filter(|sent| Some(sent.migration) == migration)
    }

    /// Returns the last attempt to send, whichever admission it belongs to.
    #[must_use]
    pub const fn sent(&self) -> Option<&Outgoing> {
        match &self.part {
            Part::Running { outgoing, .. } => outgoing.as_ref(),
            Part::Absent | Part::Stopped { .. } | Part::Receiver { .. } => None,
        }
    }

    /// Returns the same, to be changed.
    #[must_use]
    pub const fn sent_mut(&mut self) -> Option<&mut Outgoing> {
        match &mut self.part {
            Part::Running { outgoing, .. } => outgoing.as_mut(),
            Part::Absent | Part::Stopped { .. } | Part::Receiver { .. } => None,
        }
    }

    /// Returns the order of any migration that is not settled: while there is one, the guest may be
    /// elsewhere, whoever commands now.
    #[must_use]
    pub fn unsettled_order(&self) -> Option<&Outgoing> {
        self.sent().filter(|sent| sent.order == Order::Handed)
    }

    /// Returns what a receiver waits for.
    #[must_use]
    pub const fn incoming(&self) -> Option<&Incoming> {
        match &self.part {
            Part::Receiver { incoming, .. } => Some(incoming),
            Part::Absent | Part::Stopped { .. } | Part::Running { .. } => None,
        }
    }

    /// Says whether the guest may have run in the process of this record, or in its last one.
    #[must_use]
    pub fn ever_continued(&self) -> bool {
        let cont = match &self.part {
            Part::Running { .. } => Continued::Ordered,
            Part::Receiver { incoming, .. } => incoming.cont,
            Part::Absent | Part::Stopped { .. } => {
                self.ended.as_ref().map_or(Continued::Never, |ended| ended.cont)
            }
        };
        cont == Continued::Ordered
    }
}

/// Counters of ownership as numbers.
pub(crate) mod as_counter {
    use serde::{Deserialize as _, Deserializer, Serializer};

    use super::{Claim, Generation, Step};

    /// What is a number in a record.
    pub(crate) trait Counter: Copy {
        fn from_number(number: u64) -> Self;
        fn number(self) -> u64;
    }

    macro_rules! counters {
        ($($name:ident),+) => {$(
            impl Counter for $name {
                fn from_number(number: u64) -> Self {
                    Self::from_stored(number)
                }
                fn number(self) -> u64 {
                    self.value()
                }
            }
        )+};
    }
    counters!(Generation, Claim, Step);

    pub(crate) fn serialize<C: Counter, S: Serializer>(
        value: &C,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u64(value.number())
    }

    pub(crate) fn deserialize<'de, C: Counter, D: Deserializer<'de>>(
        from: D,
    ) -> Result<C, D::Error> {
        u64::deserialize(from).map(C::from_number)
    }
}

/// Ids as text.
pub(crate) mod as_id {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Ids that may be missing, as text.
pub(crate) mod as_id_option {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(id) => to.collect_str(id),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text: Option<String> = Option::deserialize(from)?;
        text.map(|text| text.parse()).transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receiver() -> VmRecord {
        let mut record = VmRecord::new(VmId::from_u128(1));
        record.fence.claim(MigrationId::from_u128(2), Generation::from_stored(3), Claim::FIRST);
        record.part = Part::Receiver {
            defined: Defined { text: "name = 'x'".to_owned(), resolved_machine: "pc".to_owned() },
            process: Process {
                dir: "/run/vmferry/x".to_owned(),
                boot_id: "b".to_owned(),
                identity: Some(Identity { pid: 1, start_time: 2, boot_id: "b".to_owned() }),
                taps: vec!["vf0".to_owned()],
                generation: Generation::from_stored(3),
                admission: MigrationId::from_u128(2),
                announced_ms: 0,
            },
            incoming: Incoming {
                migration: MigrationId::from_u128(2),
                port: Some(49152),
                carries: Carries::Whole,
                arrives: Arrival::Streamed,
                cont: Continued::Never,
            },
        };
        record
    }

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let mut running = receiver();
        let Part::Receiver { defined, process, .. } = running.part else { panic!("a receiver") };
        running.part = Part::Running {
            defined,
            process,
            outgoing: Some(Outgoing {
                migration: MigrationId::from_u128(2),
                before: Box::default(),
                issue: Issue::Accepted,
                timeout_ms: 1,
                stall_ms: 2,
                downtime_ms: 0,
                tuned: Tuned::default(),
                carries: Carries::Whole,
                parting: Parting::No,
                order: Order::GaveUp { cause: "asked".to_owned() },
            }),
            held: None,
            leaving: None,
        };
        for record in [VmRecord::new(VmId::from_u128(9)), receiver(), running] {
            assert_eq!(VmRecord::from_json(&record.to_json().unwrap()).unwrap(), record);
        }
    }

    #[test]
    fn a_newer_record_is_refused_even_if_it_has_other_fields() {
        let error = VmRecord::from_json(br#"{"version": 99, "novel": true}"#).unwrap_err();
        assert!(matches!(error, RecordError::Newer { found: 99 }));
    }

    #[test]
    fn half_a_record_is_an_error() {
        let whole = receiver().to_json().unwrap();
        for cut in [0, 1, whole.len() / 2, whole.len() - 2] {
            assert!(VmRecord::from_json(&whole[..cut]).is_err());
        }
    }

    #[test]
    fn a_process_of_a_generation_nobody_was_given_is_a_contradiction() {
        let mut record = receiver();
        record.process_mut().unwrap().generation = Generation::from_stored(4);
        assert!(record.to_json().is_err());
    }

    #[test]
    fn a_receiver_never_ran_until_its_cont_was_written_down() {
        let mut record = receiver();
        assert!(!record.ever_continued());
        let Part::Receiver { incoming, .. } = &mut record.part else { panic!("a receiver") };
        incoming.cont = Continued::Ordered;
        assert!(record.ever_continued());
    }

    #[test]
    fn an_attempt_of_an_earlier_admission_is_not_the_current_one() {
        let mut record = receiver();
        let Part::Receiver { defined, process, .. } = record.part else { panic!("a receiver") };
        let outgoing = Some(Outgoing {
            migration: MigrationId::from_u128(1),
            before: Box::default(),
            issue: Issue::Accepted,
            timeout_ms: 0,
            stall_ms: 0,
            downtime_ms: 0,
            tuned: Tuned::default(),
            carries: Carries::Whole,
            parting: Parting::No,
            order: Order::Handed,
        });
        record.part = Part::Running { defined, process, outgoing, held: None, leaving: None };
        assert_eq!(record.outgoing(), None);
        assert!(record.unsettled_order().is_some(), "whoever commands now, it was handed over");
    }

    #[test]
    fn a_guest_is_held_from_the_order_until_it_is_taken_back() {
        let Part::Receiver { defined, process, .. } = receiver().part else { panic!() };
        let cause = || "asked".to_owned();
        for (order, role) in [
            (Order::Open, Role::Running),
            (Order::Handed, Role::Held),
            (Order::GaveUp { cause: cause() }, Role::Running),
            (Order::TakenBack { cause: cause() }, Role::Running),
        ] {
            let mut record = receiver();
            let (defined, process) = (defined.clone(), process.clone());
            let outgoing = Some(Outgoing {
                migration: MigrationId::from_u128(2),
                before: Box::default(),
                issue: Issue::Accepted,
                timeout_ms: 0,
                stall_ms: 0,
                downtime_ms: 0,
                tuned: Tuned::default(),
                carries: Carries::Whole,
                parting: Parting::No,
                order,
            });
            record.part = Part::Running { defined, process, outgoing, held: None, leaving: None };
            let read = VmRecord::from_json(&record.to_json().unwrap()).unwrap();
            assert_eq!(read.role(), role);
        }
    }
}
