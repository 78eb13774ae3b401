//! What a source's QEMU is doing, and when its agent calls a transfer back by itself.
//!
//! QEMU keeps the figures of its last migration: one that was rolled back after its end still says
//! `completed`. So what it says counts only for the attempt that the journal knows, and only if it
//! changed since that attempt was begun.

use vmferry_qmp::{MigrateInfo, MigrationStatus, RunState};
use vmferry_types::Millis;

use crate::hold::Holding;
use crate::journal::{Issue, Order, Outgoing, Parting};

/// How long a guest may stand still, not ordered, while no driver is heard.
pub const HOLD_LIMIT: Millis = Millis(10_000);
/// How long a transfer may take until the switchover.
pub const TIMEOUT: Millis = Millis(3_600_000);
/// How long a transfer may move no byte. QEMU itself never gives up on a peer that fell silent.
pub const STALL_LIMIT: Millis = Millis(30_000);
/// How long QEMU may plan for the guest to stand still.
pub const DOWNTIME_LIMIT: Millis = Millis(100);
/// How long the source of a divided guest may move no byte before the channel is forced to break:
/// the guest waits meanwhile, and TCP rides a cut out for a quarter of an hour.
pub const SERVING_STALL: Millis = Millis(5000);
/// How long a transfer that was given up may go on before it is called back once more.
const CALL_BACK_AGAIN: Millis = Millis(2000);

/// What a source's QEMU is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sending {
    /// Nothing of this migration.
    Idle,
    /// It connects.
    Connecting,
    /// Memory crosses while the guest runs.
    Moving,
    /// The guest stands still and the order is awaited.
    Standing,
    /// It was ordered: the rest crosses.
    Switching,
    /// The guest went first, and its memory follows.
    Serving,
    /// The same, and the channel is broken.
    Broken,
    /// The same, and it is being mended.
    Mending,
    /// Everything was acknowledged; the guest stands still.
    Complete,
    /// It is being called back.
    CallingBack,
    /// It was called back.
    Cancelled,
    /// It failed.
    Failed,
    /// It had completed, and the guest went on here.
    TakenBack,
    /// Something that only a newer QEMU knows.
    Other,
}

impl Sending {
    /// Says whether the guest has left before its memory: QEMU neither takes that back nor lets it go
    /// on here.
    #[must_use]
    pub const fn divided(self) -> bool {
        match self {
            Self::Serving | Self::Broken | Self::Mending => true,
            Self::Idle
            | Self::Connecting
            | Self::Moving
            | Self::Standing
            | Self::Switching
            | Self::Complete
            | Self::CallingBack
            | Self::Cancelled
            | Self::Failed
            | Self::TakenBack
            | Self::Other => false,
        }
    }

    /// Says whether QEMU is busy with a migration and would refuse another one.
    #[must_use]
    pub const fn under_way(self) -> bool {
        match self {
            Self::Connecting
            | Self::Moving
            | Self::Standing
            | Self::Switching
            | Self::CallingBack
            | Self::Serving
            | Self::Broken
            | Self::Mending
            | Self::Other => true,
            Self::Idle | Self::Complete | Self::Cancelled | Self::Failed | Self::TakenBack => false,
        }
    }
}

/// Returns what QEMU says of this attempt, `None` if what it says is about an earlier one.
#[must_use]
pub fn of_this_attempt<'a>(
    outgoing: Option<&Outgoing>,
    seen: &'a MigrateInfo,
) -> Option<&'a MigrateInfo> {
    let outgoing = outgoing?;
    match outgoing.issue {
        Issue::Accepted => Some(seen),
        Issue::Refused => None,
        // The agent died between its note and QEMU's answer: what has not changed is old.
        Issue::Intended => (*seen != *outgoing.before).then_some(seen),
    }
}

/// Says what a source's QEMU is doing for the attempt that the journal knows.
#[must_use]
pub fn classify(outgoing: Option<&Outgoing>, run: &RunState, seen: &MigrateInfo) -> Sending {
    let status = of_this_attempt(outgoing, seen).and_then(|info| info.status.as_ref());
    let Some(status) = status else { return Sending::Idle };
    match status {
        MigrationStatus::None => Sending::Idle,
        MigrationStatus::Setup | MigrationStatus::WaitUnplug => Sending::Connecting,
        MigrationStatus::Active => Sending::Moving,
        MigrationStatus::PreSwitchover => Sending::Standing,
        MigrationStatus::Device => Sending::Switching,
        MigrationStatus::Cancelling => Sending::CallingBack,
        MigrationStatus::Cancelled => Sending::Cancelled,
        MigrationStatus::Failed => Sending::Failed,
        MigrationStatus::Completed if *run == RunState::PostMigrate => Sending::Complete,
        // Between the status and the run state QEMU still finishes; it has not been taken back.
        MigrationStatus::Completed if *run == RunState::FinishMigrate => Sending::Switching,
        MigrationStatus::Completed => Sending::TakenBack,
        MigrationStatus::PostcopyActive => Sending::Serving,
        MigrationStatus::PostcopyPaused => Sending::Broken,
        MigrationStatus::PostcopyRecoverSetup | MigrationStatus::PostcopyRecover => {
            Sending::Mending
        }
        MigrationStatus::Colo | MigrationStatus::Unknown(_) => Sending::Other,
    }
}

/// Why an agent calls a transfer back by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// No byte crossed for too long.
    Stalled(Millis),
    /// It did not reach the switchover in time.
    TimedOut(Millis),
    /// The guest stood still, not ordered, and no driver was heard.
    Unheard(Millis),
    /// It was given up before, and is under way all the same: the agent died between its note and
    /// the call, or QEMU did not hear it.
    Unfinished,
}

impl std::fmt::Display for GiveUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stalled(limit) => {
                write!(
                    f,
                    "no byte crossed for {} ms: the destination or the network is silent",
                    limit.0
                )
            }
            Self::TimedOut(limit) => {
                write!(f, "the switchover was not reached within {} ms", limit.0)
            }
            Self::Unheard(limit) => write!(
                f,
                "the guest stood still for the order and no driver was heard for {} ms",
                limit.0
            ),
            Self::Unfinished => f.write_str("it was given up and is still under way"),
        }
    }
}

/// How long each thing may last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until the switchover.
    pub timeout: Millis,
    /// Without a byte.
    pub stall: Millis,
    /// Still, not ordered, and unheard.
    pub hold: Millis,
}

impl Limits {
    /// Reads what was asked for; 0 stands for the default.
    #[must_use]
    pub fn new(outgoing: Option<&Outgoing>, hold_limit_ms: u64) -> Self {
        let or = |value: u64, default: Millis| if value == 0 { default } else { Millis(value) };
        Self {
            timeout: or(outgoing.map_or(0, |sent| sent.timeout_ms), TIMEOUT),
            stall: or(outgoing.map_or(0, |sent| sent.stall_ms), STALL_LIMIT),
            hold: or(hold_limit_ms, HOLD_LIMIT),
        }
    }
}

/// What is known of an attempt when its limits are looked at.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// What QEMU is doing for it.
    pub sending: Sending,
    /// What was decided about its end. `None` if nothing was begun.
    pub order: Option<&'a Order>,
    /// Whether the guest is held for it. `None` if it is not.
    pub held: Option<Holding>,
    /// Whether it was told to go before its memory.
    pub parting: Parting,
}

/// Watches one transfer's time. Times are of any clock that does not jump.
#[derive(Clone, Debug)]
pub struct Watchdog {
    began: Millis,
    bytes: u64,
    progressed: Millis,
    heard: Millis,
    still_since: Option<Millis>,
    sending: Sending,
    /// When it was last said that a transfer that was given up goes on.
    reminded: Option<Millis>,
}

impl Watchdog {
    /// Begins to watch.
    #[must_use]
    pub const fn new(now: Millis) -> Self {
        Self {
            began: now,
            bytes: 0,
            progressed: now,
            heard: now,
            still_since: None,
            sending: Sending::Idle,
            reminded: None,
        }
    }

    /// Notes that the driver was heard.
    pub fn heard(&mut self, now: Millis) {
        self.heard = self.heard.max(now);
    }

    /// Notes what QEMU said.
    pub fn saw(&mut self, now: Millis, attempt: Attempt<'_>, bytes: u64) {
        if bytes > self.bytes {
            self.bytes = bytes;
            self.progressed = now;
        }
        let stands = match attempt.sending {
            Sending::Standing => true,
            Sending::Idle => {
                // Its time counts from when it is begun.
                self.began = now;
                self.progressed = now;
                false
            }
            Sending::Connecting
            | Sending::Moving
            | Sending::Switching
            | Sending::Serving
            | Sending::Broken
            | Sending::Mending
            | Sending::Complete
            | Sending::CallingBack
            | Sending::Cancelled
            | Sending::Failed
            | Sending::TakenBack
            | Sending::Other => false,
        };
        self.serve(now, attempt.sending);
        if stands || attempt.held.is_some() {
            self.still_since.get_or_insert(now);
        } else {
            self.still_since = None;
        }
    }

    /// Returns how long the guest has stood still for the order; zero if it does not.
    #[must_use]
    pub fn still(&self, now: Millis) -> Millis {
        self.still_since.map_or(Millis::ZERO, |since| now.less(since))
    }

    /// Says whether the transfer is to be called back, and the guest let go on, and why.
    #[must_use]
    pub fn due(&mut self, now: Millis, attempt: Attempt<'_>, limits: Limits) -> Option<GiveUp> {
        match (attempt.order, attempt.held) {
            // Once ordered, nothing is called back without proof.
            (None, None) | (Some(Order::Handed), _) => return None,
            (Some(Order::GaveUp { .. } | Order::TakenBack { .. }), _)
            | (None, Some(Holding::LettingGo)) => return self.unfinished(now, attempt),
            (None, Some(Holding::Kept))
            | (Some(Order::Open), Some(Holding::Kept | Holding::LettingGo)) => {
                if let Some(unheard) = self.unheard(now, limits.hold) {
                    return Some(unheard);
                }
            }
            (Some(Order::Open), None) => {}
        }
        match attempt.sending {
            Sending::Standing => self.unheard(now, limits.hold),
            Sending::Connecting | Sending::Moving if now.less(self.began) >= limits.timeout => {
                Some(GiveUp::TimedOut(limits.timeout))
            }
            Sending::Connecting | Sending::Moving if now.less(self.progressed) >= limits.stall => {
                Some(GiveUp::Stalled(limits.stall))
            }
            Sending::Connecting
            | Sending::Moving
            | Sending::Idle
            | Sending::Switching
            | Sending::Serving
            | Sending::Broken
            | Sending::Mending
            | Sending::Complete
            | Sending::CallingBack
            | Sending::Cancelled
            | Sending::Failed
            | Sending::TakenBack
            | Sending::Other => None,
        }
    }

    /// Says whether the channel of a divided guest is to be forced to break, since nothing crosses.
    #[must_use]
    pub fn silent(&mut self, now: Millis, attempt: Attempt<'_>, limits: Limits) -> Option<Millis> {
        let limit = match attempt.sending {
            Sending::Serving | Sending::Mending => limits.stall.min(SERVING_STALL),
            // A send of the last that hangs: QEMU's main loop waits for it.
            Sending::Switching if attempt.parting == Parting::Told => limits.stall,
            Sending::Switching
            | Sending::Idle
            | Sending::Connecting
            | Sending::Moving
            | Sending::Standing
            | Sending::Broken
            | Sending::Complete
            | Sending::CallingBack
            | Sending::Cancelled
            | Sending::Failed
            | Sending::TakenBack
            | Sending::Other => return None,
        };
        if attempt.order != Some(&Order::Handed) || now.less(self.progressed) < limit {
            return None;
        }
        // Said again if nothing comes of it.
        self.progressed = now;
        Some(limit)
    }

    /// Counts the time without a byte anew where something begins.
    fn serve(&mut self, now: Millis, sending: Sending) {
        if self.sending != sending {
            self.sending = sending;
            if sending.divided() || sending == Sending::Switching {
                self.progressed = now;
            }
        }
    }

    /// Says whether the guest has stood still for as long as nobody may be heard.
    fn unheard(&self, now: Millis, limit: Millis) -> Option<GiveUp> {
        let since = self.still_since.unwrap_or(now).max(self.heard);
        (now.less(since) >= limit).then_some(GiveUp::Unheard(limit))
    }

    /// Says now and then that a transfer goes on though it was given up, or that a guest is still
    /// held though it was to go on: nobody else may be there to see that it stands still.
    fn unfinished(&mut self, now: Millis, attempt: Attempt<'_>) -> Option<GiveUp> {
        let goes_on =
            matches!(attempt.sending, Sending::Connecting | Sending::Moving | Sending::Standing);
        let quiet = self.reminded.is_some_and(|at| now.less(at) < CALL_BACK_AGAIN);
        if !(goes_on || attempt.held.is_some()) || quiet {
            return None;
        }
        self.reminded = Some(now);
        Some(GiveUp::Unfinished)
    }
}

#[cfg(test)]
mod tests {
    use vmferry_types::MigrationId;

    use super::*;
    use crate::capabilities::Carries;

    fn attempt(issue: Issue, before: MigrateInfo) -> Outgoing {
        Outgoing {
            migration: MigrationId::from_u128(1),
            before: Box::new(before),
            issue,
            timeout_ms: 1000,
            stall_ms: 100,
            downtime_ms: 0,
            tuned: crate::tuning::Tuned::default(),
            carries: Carries::Whole,
            parting: Parting::No,
            order: Order::Open,
        }
    }

    fn info(status: MigrationStatus, total_time: u64) -> MigrateInfo {
        MigrateInfo { status: Some(status), total_time: Some(total_time), ..MigrateInfo::default() }
    }

    #[test]
    fn each_status_of_this_attempt_has_one_meaning() {
        use MigrationStatus as M;
        use RunState as R;
        let sent = attempt(Issue::Accepted, MigrateInfo::default());
        let cases = [
            (M::Setup, R::Running, Sending::Connecting),
            (M::Active, R::Running, Sending::Moving),
            (M::PreSwitchover, R::FinishMigrate, Sending::Standing),
            (M::Device, R::FinishMigrate, Sending::Switching),
            (M::Completed, R::FinishMigrate, Sending::Switching),
            (M::Completed, R::PostMigrate, Sending::Complete),
            (M::Completed, R::Running, Sending::TakenBack),
            (M::Cancelling, R::Running, Sending::CallingBack),
            (M::Cancelled, R::Running, Sending::Cancelled),
            (M::Failed, R::Running, Sending::Failed),
            (M::PostcopyActive, R::FinishMigrate, Sending::Serving),
            (M::PostcopyPaused, R::FinishMigrate, Sending::Broken),
            (M::PostcopyRecoverSetup, R::FinishMigrate, Sending::Mending),
            (M::PostcopyRecover, R::FinishMigrate, Sending::Mending),
            (M::Unknown("failing".to_owned()), R::Running, Sending::Other),
        ];
        for (status, run, expected) in cases {
            let seen = info(status.clone(), 1);
            assert_eq!(classify(Some(&sent), &run, &seen), expected, "{status} {run}");
        }
    }

    #[test]
    fn what_an_earlier_attempt_left_behind_is_not_this_one() {
        let old = info(MigrationStatus::Completed, 77);
        let sent = attempt(Issue::Intended, old.clone());
        assert_eq!(classify(Some(&sent), &RunState::PostMigrate, &old), Sending::Idle);
        let new = info(MigrationStatus::Active, 1);
        assert_eq!(classify(Some(&sent), &RunState::Running, &new), Sending::Moving);
        assert_eq!(classify(None, &RunState::PostMigrate, &old), Sending::Idle);
    }

    fn attempt_of(sending: Sending, order: &Order) -> Attempt<'_> {
        Attempt { sending, order: Some(order), held: None, parting: Parting::No }
    }

    fn open(sending: Sending) -> Attempt<'static> {
        attempt_of(sending, &Order::Open)
    }

    const LIMITS: Limits = Limits { timeout: Millis(1000), stall: Millis(100), hold: Millis(50) };

    #[test]
    fn a_transfer_that_moves_no_byte_is_called_back() {
        let mut watchdog = Watchdog::new(Millis(0));
        watchdog.saw(Millis(90), open(Sending::Moving), 10);
        assert_eq!(watchdog.due(Millis(189), open(Sending::Moving), LIMITS), None);
        watchdog.saw(Millis(189), open(Sending::Moving), 10);
        let due = watchdog.due(Millis(190), open(Sending::Moving), LIMITS);
        assert_eq!(due, Some(GiveUp::Stalled(Millis(100))));
    }

    #[test]
    fn a_transfer_that_never_converges_is_called_back() {
        let mut watchdog = Watchdog::new(Millis(0));
        watchdog.saw(Millis(999), open(Sending::Moving), 10);
        let due = watchdog.due(Millis(1000), open(Sending::Moving), LIMITS);
        assert_eq!(due, Some(GiveUp::TimedOut(Millis(1000))));
    }

    #[test]
    fn a_guest_that_stands_still_goes_on_when_no_driver_is_heard() {
        let mut watchdog = Watchdog::new(Millis(0));
        watchdog.saw(Millis(500), open(Sending::Standing), 10);
        watchdog.heard(Millis(520));
        assert_eq!(watchdog.due(Millis(569), open(Sending::Standing), LIMITS), None);
        let due = watchdog.due(Millis(570), open(Sending::Standing), LIMITS);
        assert_eq!(due, Some(GiveUp::Unheard(Millis(50))));
        assert_eq!(watchdog.still(Millis(570)), Millis(70));
    }

    #[test]
    fn the_order_ends_every_limit() {
        let mut watchdog = Watchdog::new(Millis(0));
        watchdog.saw(Millis(1), open(Sending::Standing), 10);
        for sending in [Sending::Standing, Sending::Switching, Sending::Moving] {
            assert_eq!(
                watchdog.due(Millis(9999), attempt_of(sending, &Order::Handed), LIMITS),
                None
            );
        }
    }

    #[test]
    fn a_transfer_that_was_given_up_and_goes_on_is_called_back_until_it_ends() {
        let given_up = Order::GaveUp { cause: "unheard".to_owned() };
        let mut watchdog = Watchdog::new(Millis(0));
        let standing = Sending::Standing;
        let again = Some(GiveUp::Unfinished);
        assert_eq!(watchdog.due(Millis(1), attempt_of(standing, &given_up), LIMITS), again);
        assert_eq!(watchdog.due(Millis(2000), attempt_of(standing, &given_up), LIMITS), None);
        assert_eq!(watchdog.due(Millis(2001), attempt_of(standing, &given_up), LIMITS), again);
        for over in [Sending::CallingBack, Sending::Cancelled, Sending::Idle, Sending::Complete] {
            assert_eq!(watchdog.due(Millis(9999), attempt_of(over, &given_up), LIMITS), None);
        }
    }

    #[test]
    fn time_at_the_switchover_is_no_stall() {
        let mut watchdog = Watchdog::new(Millis(0));
        watchdog.saw(Millis(1), open(Sending::Standing), 10);
        watchdog.heard(Millis(5000));
        assert_eq!(watchdog.due(Millis(5001), open(Sending::Standing), LIMITS), None);
    }

    #[test]
    fn a_held_guest_goes_on_when_no_driver_is_heard_whatever_its_transfer_does() {
        let held = |sending, order| Attempt {
            sending,
            order,
            held: Some(Holding::Kept),
            parting: Parting::No,
        };
        for (sending, order) in [
            (Sending::Idle, None),
            (Sending::Moving, Some(&Order::Open)),
            (Sending::Standing, Some(&Order::Open)),
            (Sending::Failed, Some(&Order::Open)),
        ] {
            let mut watchdog = Watchdog::new(Millis(0));
            watchdog.saw(Millis(10), held(sending, order), 10);
            watchdog.heard(Millis(20));
            assert_eq!(watchdog.due(Millis(69), held(sending, order), LIMITS), None);
            let due = watchdog.due(Millis(70), held(sending, order), LIMITS);
            assert_eq!(due, Some(GiveUp::Unheard(Millis(50))), "{sending:?}");
            assert_eq!(watchdog.still(Millis(70)), Millis(60));
        }
        let mut watchdog = Watchdog::new(Millis(0));
        let handed = held(Sending::Standing, Some(&Order::Handed));
        watchdog.saw(Millis(1), handed, 10);
        assert_eq!(watchdog.due(Millis(9999), handed, LIMITS), None);
    }

    #[test]
    fn a_guest_that_is_to_go_on_is_looked_after_until_it_does() {
        let given_up = Order::GaveUp { cause: "unheard".to_owned() };
        let held = Some(Holding::LettingGo);
        let (sending, order) = (Sending::Cancelled, Some(&given_up));
        let attempt = Attempt { sending, order, held, parting: Parting::No };
        let mut watchdog = Watchdog::new(Millis(0));
        assert_eq!(watchdog.due(Millis(1), attempt, LIMITS), Some(GiveUp::Unfinished));
        assert_eq!(watchdog.due(Millis(2000), attempt, LIMITS), None);
        assert_eq!(watchdog.due(Millis(2001), attempt, LIMITS), Some(GiveUp::Unfinished));
    }

    #[test]
    fn the_time_of_a_held_transfer_counts_from_when_it_is_begun() {
        let mut watchdog = Watchdog::new(Millis(0));
        let kept = Some(Holding::Kept);
        let idle =
            Attempt { sending: Sending::Idle, order: None, held: kept, parting: Parting::No };
        watchdog.saw(Millis(950), idle, 0);
        watchdog.heard(Millis(1040));
        let begun = Attempt { sending: Sending::Moving, order: Some(&Order::Open), ..idle };
        watchdog.saw(Millis(1040), begun, 10);
        assert_eq!(watchdog.due(Millis(1060), begun, LIMITS), None);
    }

    #[test]
    fn a_source_that_serves_nothing_is_forced_to_see_the_break_again_and_again() {
        let mut watchdog = Watchdog::new(Millis(0));
        let limits = Limits { stall: Millis(30_000), ..LIMITS };
        let serving = |sending| Attempt {
            sending,
            order: Some(&Order::Handed),
            held: Some(Holding::Kept),
            parting: Parting::Told,
        };
        watchdog.saw(Millis(100), serving(Sending::Serving), 10);
        watchdog.saw(Millis(400), serving(Sending::Serving), 20);
        assert_eq!(watchdog.silent(Millis(5399), serving(Sending::Serving), limits), None);
        let forced = watchdog.silent(Millis(5400), serving(Sending::Serving), limits);
        assert_eq!(forced, Some(SERVING_STALL));
        watchdog.saw(Millis(5500), serving(Sending::Broken), 20);
        assert_eq!(watchdog.silent(Millis(99_000), serving(Sending::Broken), limits), None);
        watchdog.saw(Millis(99_000), serving(Sending::Mending), 20);
        assert_eq!(watchdog.silent(Millis(99_001), serving(Sending::Mending), limits), None);
        let again = watchdog.silent(Millis(104_000), serving(Sending::Mending), limits);
        assert_eq!(again, Some(SERVING_STALL));
        assert_eq!(watchdog.due(Millis(999_000), serving(Sending::Serving), limits), None);
    }
}
