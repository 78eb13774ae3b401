//! What a simulated agent writes down: survives its death, and its host's.

use std::collections::{BTreeMap, BTreeSet};

use vmferry_proto::v1::{ExecuteReply, ExecuteRequest, GoneProof};
use vmferry_types::{Generation, MigrationId, Role, VmId};

use crate::fence::Fence;
use crate::qemu::{Qemu, Snapshot};

/// A host's journal.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    pub(crate) records: BTreeMap<VmId, Record>,
    /// It was lost: what it does not hold proves nothing until a planner has seeded it (rule R3).
    pub(crate) lost: bool,
    /// Whose processes it named when it was lost, or who else ran there: what has become of them, and
    /// of what they ran, is for a person to find out.
    pub(crate) forgot: BTreeSet<VmId>,
    /// The launches that it named then.
    pub(crate) forgot_launches: BTreeSet<u64>,
}

impl Journal {
    /// Forgets everything, as a disk that is lost does.
    pub(crate) fn lose(&mut self, qemus: &BTreeMap<u32, Qemu>, taps: &BTreeSet<u64>) {
        let named = self.records.iter().filter(|(_, record)| record.process().is_some());
        self.forgot.extend(named.map(|(vm, _)| *vm));
        self.records.clear();
        self.lost = true;
        self.forgot.extend(qemus.values().map(|qemu| qemu.vm));
        self.forgot_launches.extend(qemus.values().map(|qemu| qemu.launch).chain(taps.clone()));
    }
}

/// What is written down of one VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    pub(crate) fence: Fence<ExecuteRequest, ExecuteReply>,
    pub(crate) hold_limit_ms: u64,
    pub(crate) part: Part,
    pub(crate) ended: Option<Ended>,
}

/// What the host has of the VM.
#[derive(Clone, Debug, Default)]
pub(crate) enum Part {
    #[default]
    Absent,
    /// A definition, and no process.
    Stopped,
    Running {
        process: Process,
        outgoing: Option<Outgoing>,
        /// Its guest is stopped on purpose by this migration.
        held: Option<MigrationId>,
    },
    Receiver {
        process: Process,
        migration: MigrationId,
        port: Option<u16>,
        cont: Cont,
    },
}

/// A QEMU process, written down before it is started.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    /// Names the launch: its directory, in which the shim writes the exit.
    pub(crate) launch: u64,
    pub(crate) boot_id: String,
    pub(crate) identity: Option<(u32, u64)>,
    pub(crate) generation: Generation,
    pub(crate) admission: MigrationId,
}

/// An attempt to send the guest.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    pub(crate) migration: MigrationId,
    /// What QEMU said of its migration before it was told to send.
    pub(crate) before: Snapshot,
    pub(crate) issue: Issue,
    pub(crate) order: Order,
    pub(crate) timeout_ms: u64,
    pub(crate) stall_ms: u64,
}

/// Whether QEMU took the command to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Issue {
    Intended,
    Accepted,
    Refused,
}

/// What was decided about an attempt's end, before QEMU hears it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Open,
    Handed,
    GaveUp(String),
    TakenBack(String),
}

/// Whether a receiver was told to let its guest run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cont {
    Never,
    Ordered,
}

/// How the last process of a VM ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) migration: Option<MigrationId>,
    pub(crate) proof: GoneProof,
    pub(crate) cont: Cont,
}

impl Record {
    pub(crate) const fn role(&self) -> Role {
        match self.part {
            Part::Absent => Role::Absent,
            Part::Stopped => Role::Stopped,
            Part::Running { held: Some(_), .. } => Role::Held,
            Part::Running { held: None, .. } => Role::Running,
            Part::Receiver { .. } => Role::Receiver,
        }
    }

    pub(crate) const fn process(&self) -> Option<&Process> {
        match &self.part {
            Part::Absent | Part::Stopped => None,
            Part::Running { process, .. } | Part::Receiver { process, .. } => Some(process),
        }
    }

    pub(crate) const fn process_mut(&mut self) -> Option<&mut Process> {
        match &mut self.part {
            Part::Absent | Part::Stopped => None,
            Part::Running { process, .. } | Part::Receiver { process, .. } => Some(process),
        }
    }

    /// Returns the attempt to send that belongs to the current admission.
    pub(crate) fn outgoing(&self) -> Option<&Outgoing> {
        match &self.part {
            Part::Running { outgoing, .. } => {
                outgoing.as_ref().filter(|sent| Some(sent.migration) == self.fence.migration)
            }
            Part::Absent | Part::Stopped | Part::Receiver { .. } => None,
        }
    }

    /// Returns the last attempt to send, whichever admission it belongs to: a guest must not stand
    /// still because another one began.
    pub(crate) const fn sent(&self) -> Option<&Outgoing> {
        match &self.part {
            Part::Running { outgoing, .. } => outgoing.as_ref(),
            Part::Absent | Part::Stopped | Part::Receiver { .. } => None,
        }
    }

    /// Returns the migration whose order is not settled: the guest may be elsewhere, whoever commands
    /// now.
    pub(crate) fn unsettled(&self) -> Option<MigrationId> {
        match &self.part {
            Part::Running { outgoing: Some(sent), .. } if sent.order == Order::Handed => {
                Some(sent.migration)
            }
            Part::Running { .. } | Part::Absent | Part::Stopped | Part::Receiver { .. } => None,
        }
    }

    /// Says whether the last attempt to send was given up, whichever admission it belongs to.
    pub(crate) fn gave_up(&self) -> bool {
        match &self.part {
            Part::Running { outgoing: Some(sent), .. } => match sent.order {
                Order::GaveUp(_) => true,
                Order::Open | Order::Handed | Order::TakenBack(_) => false,
            },
            Part::Running { outgoing: None, .. }
            | Part::Absent
            | Part::Stopped
            | Part::Receiver { .. } => false,
        }
    }

    pub(crate) fn outgoing_mut(&mut self) -> Option<&mut Outgoing> {
        let migration = self.fence.migration;
        match &mut self.part {
            Part::Running { outgoing, .. } => {
                outgoing.as_mut().filter(|sent| Some(sent.migration) == migration)
            }
            Part::Absent | Part::Stopped | Part::Receiver { .. } => None,
        }
    }

    /// Says whether the guest is held and nothing was ordered: its hold limit counts.
    pub(crate) fn holds(&self) -> bool {
        let ordered = self.outgoing().is_some_and(|sent| sent.order == Order::Handed);
        self.held().is_some() && self.held() == self.fence.migration && !ordered
    }

    /// Returns the migration that holds the guest.
    pub(crate) const fn held(&self) -> Option<MigrationId> {
        match &self.part {
            Part::Running { held, .. } => *held,
            Part::Absent | Part::Stopped | Part::Receiver { .. } => None,
        }
    }

    /// Returns the admission that has begun something here and not ended it, or was given the VM and
    /// has not begun.
    pub(crate) fn open_admission(&self) -> Option<MigrationId> {
        let begun = match &self.part {
            Part::Absent | Part::Stopped => None,
            Part::Receiver { migration, .. } => Some(*migration),
            Part::Running { held: Some(held), .. } => Some(*held),
            Part::Running { held: None, outgoing, .. } => outgoing
                .as_ref()
                .filter(|sent| match (&sent.order, sent.issue) {
                    (Order::Handed, _) | (Order::Open, Issue::Intended | Issue::Accepted) => true,
                    (Order::Open, Issue::Refused) | (Order::GaveUp(_) | Order::TakenBack(_), _) => {
                        false
                    }
                })
                .map(|sent| sent.migration),
        };
        begun.or_else(|| self.unused_claim())
    }

    /// Returns the admission that took the claim and has commanded nothing yet.
    fn unused_claim(&self) -> Option<MigrationId> {
        let migration = self.fence.migration.filter(|_| self.fence.last.is_none())?;
        let sent = self.outgoing().is_some();
        let arrived = self.process().is_some_and(|process| process.admission == migration);
        let ended = self.ended.as_ref().is_some_and(|ended| ended.migration == Some(migration));
        (!sent && !arrived && !ended).then_some(migration)
    }

    /// Says whether the guest may have run in the process of this record, or in its last one.
    pub(crate) fn continued(&self) -> Cont {
        match &self.part {
            Part::Running { .. } => Cont::Ordered,
            Part::Receiver { cont, .. } => *cont,
            Part::Absent | Part::Stopped => {
                self.ended.as_ref().map_or(Cont::Never, |ended| ended.cont)
            }
        }
    }
}
