//! What a guest was last seen to do, as its shim wrote it down.

use serde::{Deserialize, Serialize};
use vmferry_qmp::event::Origin;
use vmferry_qmp::{EventView, MigrationStatus};

/// What a guest was last seen to do.
///
/// Kept on the disk, since whether a source ran again after the order decides whose copy counts,
/// and neither the agent nor QEMU may be there any more to say so. Times are of `CLOCK_MONOTONIC`,
/// in microseconds, and rise with every event; 0 stands for never.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestRecord {
    /// When QEMU last began to send or to receive it.
    pub move_began_at_us: u64,
    /// When it last stopped.
    pub stopped_at_us: u64,
    /// When it last went on.
    pub resumed_at_us: u64,
    /// How it ended by itself, if it did.
    pub end: Option<GuestEnd>,
}

/// How a guest ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestEnd {
    /// It turned itself off.
    Shutdown,
    /// Its kernel panicked.
    Panicked,
}

/// For so long two listeners to one QEMU may hear the same event apart.
const APART_US: u64 = 1_000_000;

impl GuestRecord {
    /// Takes up an event that came at `now_us`; returns whether it says anything of the guest.
    pub fn hear(&mut self, event: &EventView<'_>, now_us: u64) -> bool {
        // Two events of one microsecond came one after the other.
        let last = self.move_began_at_us.max(self.stopped_at_us).max(self.resumed_at_us);
        let now = now_us.max(last.saturating_add(1));
        match event {
            EventView::Migration(MigrationStatus::Setup) => self.move_began_at_us = now,
            EventView::Stop => self.stopped_at_us = now,
            EventView::Resume => {
                self.resumed_at_us = now;
                self.end = None;
            }
            EventView::GuestPanicked => self.end = Some(GuestEnd::Panicked),
            EventView::Shutdown { origin: Origin::Guest, reason: "guest-shutdown" } => {
                self.end = Some(GuestEnd::Shutdown);
            }
            EventView::Migration(_)
            | EventView::Shutdown { .. }
            | EventView::MigrationPass(_)
            | EventView::Suspend
            | EventView::Wakeup
            | EventView::Reset
            | EventView::Powerdown
            | EventView::JobStatus { .. }
            | EventView::BlockJobReady { .. }
            | EventView::BlockJobCompleted { .. }
            | EventView::BlockJobCancelled { .. }
            | EventView::BlockJobError { .. }
            | EventView::BlockExportDeleted { .. }
            | EventView::BlockIoError { .. }
            | EventView::BalloonChange { .. }
            | EventView::DeviceDeleted { .. }
            | EventView::UnplugPrimary { .. }
            | EventView::Other => return false,
        }
        true
    }

    /// Returns when the guest last stopped and went on in its last move. What was before it counts
    /// only if the guest has stood still ever since.
    #[must_use]
    pub fn of_last_move(&self) -> (u64, u64) {
        let stood = self.stopped_at_us > self.resumed_at_us;
        let stopped = stood || self.stopped_at_us >= self.move_began_at_us;
        let resumed = self.resumed_at_us >= self.move_began_at_us;
        (if stopped { self.stopped_at_us } else { 0 }, if resumed { self.resumed_at_us } else { 0 })
    }

    /// Joins what another listener heard, who may have missed the end of it.
    ///
    /// Both hear the same events, a moment apart. So a guest that either of them heard going on
    /// last is taken to have gone on, unless the other heard it stop well after that.
    #[must_use]
    pub fn joined(&self, (stopped, resumed): (u64, u64)) -> (u64, u64) {
        let (ours_stopped, ours_resumed) = self.of_last_move();
        let (both_stopped, mut both_resumed) =
            (stopped.max(ours_stopped), resumed.max(ours_resumed));
        let ran_last = |stopped: u64, resumed: u64| resumed > 0 && resumed >= stopped;
        let either = ran_last(ours_stopped, ours_resumed) || ran_last(stopped, resumed);
        if either && both_resumed.saturating_add(APART_US) >= both_stopped {
            both_resumed = both_resumed.max(both_stopped);
        }
        (both_stopped, both_resumed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(events: &[EventView<'_>]) -> GuestRecord {
        let mut record = GuestRecord::default();
        for event in events {
            record.hear(event, 100);
        }
        record
    }

    const SETUP: EventView<'static> = EventView::Migration(MigrationStatus::Setup);

    #[test]
    fn what_happened_before_the_last_move_is_not_of_it() {
        let moved = heard(&[SETUP, EventView::Stop, EventView::Resume]);
        let (stopped, resumed) = moved.of_last_move();
        assert!(0 < stopped && stopped < resumed);
        let again = heard(&[SETUP, EventView::Stop, EventView::Resume, SETUP]);
        assert_eq!(again.of_last_move(), (0, 0));
    }

    #[test]
    fn a_guest_that_stood_still_when_its_move_began_still_stands() {
        let (stopped, resumed) = heard(&[EventView::Stop, SETUP]).of_last_move();
        assert!(stopped > 0 && resumed == 0);
    }

    #[test]
    fn a_guest_that_went_on_after_its_end_has_not_ended() {
        let off = EventView::Shutdown { origin: Origin::Guest, reason: "guest-shutdown" };
        assert_eq!(heard(&[off]).end, Some(GuestEnd::Shutdown));
        let off = EventView::Shutdown { origin: Origin::Guest, reason: "guest-reset" };
        assert_eq!(heard(&[off]).end, None);
        let panic = heard(&[EventView::GuestPanicked]);
        assert_eq!(panic.end, Some(GuestEnd::Panicked));
        assert_eq!(heard(&[EventView::GuestPanicked, EventView::Resume]).end, None);
    }

    #[test]
    fn whoever_missed_that_the_guest_went_on_is_told_by_the_other() {
        let shim = GuestRecord { stopped_at_us: 10, resumed_at_us: 20, ..GuestRecord::default() };
        assert_eq!(shim.joined((0, 0)), (10, 20));
        assert_eq!(shim.joined((12, 0)), (12, 20));
        // The agent heard the stop later than the shim heard both.
        assert_eq!(shim.joined((25, 0)), (25, 25));
        let missed = GuestRecord { stopped_at_us: 10, ..GuestRecord::default() };
        assert_eq!(missed.joined((11, 19)), (11, 19));
    }

    #[test]
    fn a_shim_that_died_long_before_the_stop_does_not_make_the_guest_run() {
        let shim = GuestRecord { resumed_at_us: 20, ..GuestRecord::default() };
        assert_eq!(shim.joined((5_000_000, 0)), (5_000_000, 20));
    }
}
