//! A guest that goes before its memory, and is divided over two QEMUs until the last page.
//!
//! The order is its point of no return (rule R6): from there QEMU neither takes the transfer back nor
//! lets the source's guest go on. What breaks is mended; what dies takes the guest with it.

use vmferry_types::Method;

use super::event::Event;
use super::{Migration, Phase, SourceWord, Switchover};

/// The channel between the halves of a divided guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Channel {
    /// Nobody has said that it is broken.
    #[default]
    Whole,
    /// Both halves say that it is broken: the guest stands still wherever it needs a page.
    Broken,
}

impl Migration {
    /// Says whether this migration may have a guest that is divided over two QEMUs.
    #[must_use]
    pub fn may_be_divided(&self) -> bool {
        let past_the_order = match &self.phase {
            Phase::Captured { switchover: Switchover::Ordered, .. } | Phase::Restored { .. } => {
                true
            }
            Phase::Committed { proof, .. } | Phase::Attached { proof, .. } => {
                matches!(proof.source, SourceWord::Serves(_))
            }
            Phase::Captured { .. }
            | Phase::Queued { .. }
            | Phase::Admitted { .. }
            | Phase::Done { .. }
            | Phase::RollingBack { .. }
            | Phase::Aborted { .. }
            | Phase::Failed { .. } => false,
        };
        self.method == Method::Postcopy && past_the_order
    }

    /// Says whether ownership has moved, or is about to, while the source still serves memory.
    pub(crate) fn is_served(&self) -> bool {
        self.phase.handover().is_some_and(|proof| matches!(proof.source, SourceWord::Serves(_)))
    }

    /// Notes what `event` says of the division, beside the phase.
    pub(super) fn divides(self, event: &Event) -> Self {
        if let Event::PostcopyDue { verdict } = event
            && self.method == Method::Precopy
        {
            return Self { method: Method::Postcopy, diverged: verdict.clone(), ..self };
        }
        if matches!(event, Event::ChannelBroke) {
            let breaks = self.breaks.saturating_add(1);
            return Self { channel: Channel::Broken, breaks, ..self };
        }
        if matches!(event, Event::ChannelMended) {
            return Self { channel: Channel::Whole, ..self };
        }
        self
    }
}
