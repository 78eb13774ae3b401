//! A live move that is refused and goes on as a held one, in the same row (rule R5).
//!
//! Both attempts have one migration id. What belongs to which is told apart by order (the live
//! transfer is taken back, and its receiver proven gone, before anything of the second attempt is
//! begun), and by the proof that is kept here: whatever is later said of that very process is about
//! the attempt that is over.

use vmferry_types::{Method, PhaseLabel};

use super::event::{Event, Stood};
use super::{Blocker, Cause, GatePoint, GoneProof, Migration, Phase, Process, Stage};

/// The live attempt that a held one came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Downgraded {
    /// How the guest was to be carried.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::method"))]
    pub from: Method,
    /// Why that was refused.
    pub cause: Cause,
    /// That its receiver is gone.
    pub receiver: GoneProof,
}

/// A live method that QEMU itself bars: what it names moves by no stream at all, held or not.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Barred {
    /// How the guest was to be carried.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::method"))]
    pub from: Method,
    /// What QEMU names.
    pub cause: Cause,
}

impl Phase {
    /// Returns why a live attempt is being undone, while it is.
    const fn undoing_live(&self) -> Option<&Cause> {
        if let Self::Admitted {
            stage: Stage::Recalling { cause } | Stage::Clearing { cause },
            ..
        } = self
        {
            Some(cause)
        } else {
            None
        }
    }
}

/// Which part of its way a migration is on: its time limits count from the beginning of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    First,
    Undoing,
    Second,
}

impl Migration {
    /// Says whether a transfer that was given up is tried again with the guest held.
    pub(super) fn may_hold_instead(&self, stood: Stood) -> bool {
        let live = match self.method {
            Method::Precopy | Method::Postcopy => true,
            Method::Snapshot | Method::Cold | Method::DiskCopy => false,
        };
        live && self.terms.downgrade.may_hold() && stood == Stood::No
    }

    /// Says whether what refused this move refuses postcopy only, so that a held one may go instead.
    pub(super) fn refuses_postcopy(&self, blockers: &[Blocker]) -> bool {
        self.method == Method::Postcopy
            && self.terms.downgrade.may_hold()
            && !blockers.is_empty()
            && blockers.iter().all(|blocker| blocker.code.starts_with("postcopy_"))
    }

    /// Returns what is kept of the live attempt once `event` has ended it.
    pub(super) fn turns_to_snapshot(&self, after: &Phase, event: &Event) -> Option<Downgraded> {
        let (
            Phase::Admitted { stage: Stage::Clearing { cause }, .. },
            Phase::Admitted { stage: Stage::Arming, .. },
            Event::ReceiverGone { proof, .. },
        ) = (&self.phase, after, event)
        else {
            return None;
        };
        Some(Downgraded { from: self.method, cause: cause.clone(), receiver: proof.clone() })
    }

    /// Returns how the guest was to be carried at first, and why that was refused. `None` if it
    /// goes as it was asked for.
    #[must_use]
    pub const fn refused_live(&self) -> Option<(Method, &Cause)> {
        if let Some(barred) = &self.barred {
            return Some((barred.from, &barred.cause));
        }
        if let Some(downgraded) = &self.downgraded {
            return Some((downgraded.from, &downgraded.cause));
        }
        match self.phase.undoing_live() {
            Some(cause) => Some((self.method, cause)),
            None => None,
        }
    }

    /// Says whether a new part of the way began since `before`: time limits count from there.
    #[must_use]
    pub fn entered_anew(&self, before: &Self) -> bool {
        self.leg() != before.leg()
    }

    const fn leg(&self) -> (PhaseLabel, Leg, Option<GatePoint>) {
        let leg = if self.downgraded.is_some() {
            Leg::Second
        } else if self.phase.undoing_live().is_some() {
            Leg::Undoing
        } else {
            Leg::First
        };
        // What is waited for at a gate is no part of what comes before or after.
        (self.label(), leg, self.waits_at())
    }

    /// Says whether `proof` is of the receiver of the attempt that is over.
    pub(crate) fn is_of_the_attempt_before(&self, proof: &GoneProof) -> bool {
        self.downgraded.as_ref().is_some_and(|before| {
            let known = &before.receiver;
            proof.pid != 0
                && (proof.pid, proof.start_time) == (known.pid, known.start_time)
                && proof.boot_id == known.boot_id
        })
    }

    /// Says whether `process` is the receiver of the attempt that is over.
    pub(crate) fn was_receiver_before(&self, process: &Process) -> bool {
        self.downgraded.as_ref().is_some_and(|before| {
            let known = &before.receiver;
            (process.pid, process.start_time) == (known.pid, known.start_time)
                && process.boot_id == known.boot_id
        })
    }
}
