//! The link that a migration needs before its memory crosses.

use tokio::time::Instant;
use vmferry_planner_core::migration::Effect;

use super::{Run, TICK};
use crate::clock;
use crate::store::{Slot, StoreError};

/// Whether the memory may cross: links and hosts carry only so many at a time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Link {
    /// It may.
    Held,
    /// It is asked for then.
    AskedAt(Instant),
}

impl Run<'_> {
    /// Says whether what is owed may go over the link: a prepared receiver waits while it is busy.
    pub(super) async fn has_link(&mut self) -> Result<bool, StoreError> {
        let Link::AskedAt(due) = self.link else { return Ok(true) };
        let crosses = match self.row.migration.outstanding() {
            Some(Effect::StartTransfer { .. } | Effect::HoldGuest) => true,
            Some(
                Effect::TryAdmit
                | Effect::ArmReceiver
                | Effect::OrderSwitchover
                | Effect::KillSource { .. }
                | Effect::Commit
                | Effect::ContinueDestination
                | Effect::StartPostcopy
                | Effect::ShutDownGuest
                | Effect::StartReceiver
                | Effect::RestartSource { .. }
                | Effect::RecoverReceiver
                | Effect::ResumeTransfer { .. }
                | Effect::SetLimits { .. }
                | Effect::ReleaseSource { .. }
                | Effect::CancelTransfer { .. }
                | Effect::DestroyReceiver { .. }
                | Effect::ResumeSource { .. },
            )
            | None => false,
        };
        if !crosses || self.pending.is_some() {
            return Ok(true);
        }
        let now = Instant::now();
        if now < due {
            return Ok(false);
        }
        let policy = &self.planner.parts.config.policy;
        let links = policy.links(self.planner.parts.inventory.own_outbound());
        let slot = self
            .planner
            .store()
            .take_slot(&self.row, &links, &policy.ranking, clock::now())
            .await?;
        let id = self.row.migration.id;
        match slot {
            Slot::Held => {
                self.link = Link::Held;
                self.planner.live.update(id, |live| live.waits_for_link = None);
                Ok(true)
            }
            Slot::Full(full) => {
                self.link = Link::AskedAt(now + TICK);
                let texts: Vec<String> = full.iter().map(ToString::to_string).collect();
                let text = if texts.is_empty() { "its turn".to_owned() } else { texts.join(", ") };
                self.planner.live.update(id, |live| live.waits_for_link = Some(text));
                Ok(false)
            }
        }
    }
}
