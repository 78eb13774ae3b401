//! What every agent says, held against what the store says.
//!
//! A pure comparison: it names for each VM the one host that runs it, or what contradicts, and
//! changes nothing. Silence is shown as silence (rule R1): a VM whose host did not answer has an
//! unknown runner, never none.

mod halves;
mod hosts;
mod picture;
#[cfg(test)]
mod tests;
mod vms;

pub use halves::{HalfSide, OpenHalf, open_halves};
pub use picture::{
    Answer, Declared, GaveUp, HostSaid, Known, Move, Orphan, Picture, Process, Remains, Standing,
    Under, Waits,
};

use vmferry_types::{HostId, MigrationId, VmId};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A human is needed.
    Error,
    /// It may pass by itself, or should be looked at some day.
    Warning,
    /// Worth knowing.
    Note,
}

impl Severity {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        }
    }
}

/// One thing that contradicts, or that somebody should know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// Stable, for programs.
    pub code: &'static str,
    /// The host that it is about.
    pub host: Option<HostId>,
    /// The VM that it is about.
    pub vm: Option<VmId>,
    /// The migration that it is about.
    pub migration: Option<MigrationId>,
    /// For people: what contradicts, and what to do.
    pub message: String,
}

/// Who runs a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Runner {
    /// One host.
    One(HostId),
    /// None, and all who would know have said so.
    None,
    /// A host that would know did not say.
    Unknown,
    /// More than one: what must never be.
    Several(Vec<HostId>),
}

impl Runner {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::One(_) => "one",
            Self::None => "none",
            Self::Unknown => "unknown",
            Self::Several(_) => "several",
        }
    }
}

/// What the comparison came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The gravest first.
    pub findings: Vec<Finding>,
    /// For each VM of the store, in its order.
    pub runners: Vec<(VmId, Runner)>,
    /// Halves of migrations that nobody drives.
    pub halves: Vec<OpenHalf>,
}

impl Diagnosis {
    /// Says whether nobody has to do anything.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity != Severity::Error)
    }
}

/// Compares what all hosts say with what the store says.
#[must_use]
pub fn examine(picture: &Picture) -> Diagnosis {
    let halves = open_halves(picture);
    let mut findings = hosts::findings(picture);
    findings.extend(vms::findings(picture));
    findings.extend(halves.iter().map(halves::finding));
    findings.extend(vms::moves(picture));
    findings.extend(picture.queue.iter().map(|waits| vms::waits(picture, waits)));
    findings.sort();
    findings.dedup();
    let runners = picture.vms.iter().map(|vm| (vm.id, vms::runner(picture, vm))).collect();
    Diagnosis { findings, runners, halves }
}
