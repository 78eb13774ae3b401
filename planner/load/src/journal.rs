//! What a simulated agent writes down of one VM.

use vmferry_agent_core::fence::FenceState;
use vmferry_proto::v1::GoneProof;
use vmferry_types::{Generation, MigrationId, Role};

use crate::qemu::Run;

/// What is written down of one VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    /// Who may command it: the real agent's own code.
    pub(crate) fence: FenceState,
    pub(crate) hold_limit_ms: u64,
    pub(crate) part: Part,
    pub(crate) ended: Option<Ended>,
}

/// What the host has of the VM.
#[derive(Clone, Debug, Default)]
pub(crate) enum Part {
    #[default]
    Absent,
    Running {
        process: Process,
        outgoing: Option<Outgoing>,
        /// Which migration stopped the guest on purpose.
        held: Option<MigrationId>,
    },
    Receiver {
        process: Process,
        port: u16,
        cont: Cont,
    },
}

/// A QEMU process that the journal knows.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) generation: Generation,
    pub(crate) admission: Option<MigrationId>,
}

/// An attempt to send the guest.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    pub(crate) migration: MigrationId,
    pub(crate) order: Order,
    pub(crate) timeout_ms: u64,
    pub(crate) stall_ms: u64,
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
    /// A guest that was stopped for its move or handed over is held here, unless QEMU let it go on by
    /// itself.
    pub(crate) fn role(&self, run: Option<Run>) -> Role {
        let handed = self.sent().is_some_and(|sent| sent.order == Order::Handed);
        let held = (handed || self.held().is_some()) && run != Some(Run::Running);
        match self.part {
            Part::Absent => Role::Absent,
            Part::Running { .. } if held => Role::Held,
            Part::Running { .. } => Role::Running,
            Part::Receiver { .. } => Role::Receiver,
        }
    }

    pub(crate) const fn process(&self) -> Option<&Process> {
        match &self.part {
            Part::Absent => None,
            Part::Running { process, .. } | Part::Receiver { process, .. } => Some(process),
        }
    }

    /// Returns the attempt to send that belongs to the current admission.
    pub(crate) fn outgoing(&self) -> Option<&Outgoing> {
        self.sent().filter(|sent| Some(sent.migration) == self.fence.migration)
    }

    /// Returns the same, to be changed.
    pub(crate) fn outgoing_mut(&mut self) -> Option<&mut Outgoing> {
        let migration = self.fence.migration;
        match &mut self.part {
            Part::Running { outgoing, .. } => {
                outgoing.as_mut().filter(|sent| Some(sent.migration) == migration)
            }
            Part::Absent | Part::Receiver { .. } => None,
        }
    }

    /// Returns the last attempt to send, whichever admission it belongs to.
    pub(crate) const fn sent(&self) -> Option<&Outgoing> {
        match &self.part {
            Part::Running { outgoing, .. } => outgoing.as_ref(),
            Part::Absent | Part::Receiver { .. } => None,
        }
    }

    /// Returns the migration that holds the guest.
    pub(crate) const fn held(&self) -> Option<MigrationId> {
        match &self.part {
            Part::Running { held, .. } => *held,
            Part::Absent | Part::Receiver { .. } => None,
        }
    }

    /// Says whether the guest is sent or held for a move, and nothing was decided about its end.
    pub(crate) fn is_open(&self) -> bool {
        let held = self.held().is_some() && self.held() == self.fence.migration;
        self.outgoing().map_or(held, |sent| sent.order == Order::Open)
    }

    /// Notes that an unordered transfer is given up, even if it never began: it must not begin later.
    pub(crate) fn give_up(&mut self, cause: String) {
        let Some(migration) = self.fence.migration else { return };
        if let Some(sent) = self.outgoing_mut() {
            if sent.order == Order::Open {
                sent.order = Order::GaveUp(cause);
            }
        } else if let Part::Running { outgoing, .. } = &mut self.part {
            let order = Order::GaveUp(cause);
            *outgoing = Some(Outgoing { migration, order, timeout_ms: 0, stall_ms: 0 });
        }
    }

    /// Says whether the guest may have run in the process of this record, or in its last one.
    pub(crate) fn continued(&self) -> Cont {
        match &self.part {
            Part::Running { .. } => Cont::Ordered,
            Part::Receiver { cont, .. } => *cont,
            Part::Absent => self.ended.as_ref().map_or(Cont::Never, |ended| ended.cont),
        }
    }
}
