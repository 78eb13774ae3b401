//! What QEMU takes beside the guest's memory, before anybody could measure it.
//!
//! Measured with QEMU 10.0.2 (`agent/tests/accounting`): a small guest under KVM takes 18 MiB of code,
//! heap and device memory, a Linux guest with two vCPUs under TCG 90 MiB, its translated code most.
//! Page tables grow with the guest: 1/512 of its memory on the host's side, and as much again in
//! KVM's own. The estimate lies above all of these; an agent that sees a process says what it
//! measured, and the worse of both counts.

use crate::Bytes;

/// Who runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// The processor, by KVM.
    Native,
    /// QEMU's translator (TCG), which keeps the code that it made.
    Translated,
}

impl Execution {
    /// Reads the name of an accelerator; what is not known is taken for the dearer one.
    #[must_use]
    pub fn of_accelerator(name: &str) -> Self {
        if name == "kvm" { Self::Native } else { Self::Translated }
    }

    /// What does not depend on the guest's size.
    const fn base(self) -> Bytes {
        match self {
            Self::Native => Bytes(64 << 20),
            Self::Translated => Bytes(128 << 20),
        }
    }
}

/// Page tables, on both sides of KVM.
const SHARE: u64 = 256;

/// Returns what QEMU is expected to take for a guest whose memory may grow to `ceiling`.
#[must_use]
pub fn expected(ceiling: Bytes, execution: Execution) -> Bytes {
    execution.base().plus(Bytes(ceiling.value() / SHARE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_with_the_guest_and_translation_costs_more() {
        let small = expected(Bytes(1 << 30), Execution::Native);
        assert_eq!(small, Bytes(68 << 20));
        assert!(expected(Bytes(1 << 34), Execution::Native) > small);
        assert!(expected(Bytes(1 << 30), Execution::of_accelerator("tcg")) > small);
    }
}
