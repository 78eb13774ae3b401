//! How a held move ends when a part dies, and one that was live before: cell by cell.

use vmferry_planner_core::evidence::{Continued, Held, TransferState};
use vmferry_planner_core::migration::{Downgrade, Event, Gates, Phase, Side, Stage, Switchover};
use vmferry_types::{Method, PhaseLabel};

use crate::deaths::{When, aborted, by, done, failed, opened};
use crate::model::{Agent, Channel, FIRST, Monitor};
use crate::planner::{Luck, World};

const BEFORE_OWNERSHIP: [When; 5] = [
    When::Transferring,
    When::Withheld,
    When::OrderedIncomplete,
    When::OrderedComplete,
    When::Restored,
];

const AFTER: [When; 3] = [When::Committed, When::Continued, When::Attached];

fn held(when: When) -> World {
    let world = by(when, Method::Snapshot);
    if BEFORE_OWNERSHIP.contains(&when) {
        assert_eq!(world.hosts.source.hold, Held::Yes);
        assert!(!world.hosts.source.runs());
    }
    world
}

/// Opens whatever gate keeps the world in its phase, until it ends well.
fn goes_on(mut world: World) {
    for event in [Event::SwitchoverAllowed, Event::CommitAllowed] {
        for _ in 0..20 {
            world.turn();
        }
        world.apply(event);
    }
    done(world);
}

/// It is back, and was let go on as often as it was held.
fn is_back(mut world: World) {
    world.settle();
    assert_eq!(world.hosts.source.holds.0, world.hosts.source.holds.1);
    aborted(world, FIRST);
}

#[test]
fn without_a_death_a_held_guest_moves() {
    done(World::open(Gates::OPEN, Method::Snapshot, Downgrade::Never));
}

#[test]
fn a_planner_or_an_agent_that_dies_goes_on() {
    for when in BEFORE_OWNERSHIP.into_iter().chain(AFTER) {
        let mut world = held(when);
        world.planner_dies();
        goes_on(world);
        for side in [Side::Source, Side::Destination] {
            let mut world = held(when);
            world.hosts.end_mut(side).agent = Agent::Down;
            for _ in 0..10 {
                world.turn();
            }
            world.hosts.end_mut(side).agent = Agent::Up;
            goes_on(world);
        }
    }
}

#[test]
fn a_receiver_that_dies_costs_nothing_until_ownership_moved() {
    for when in BEFORE_OWNERSHIP {
        let mut world = held(when);
        world.hosts.kill(Side::Destination);
        is_back(world);
    }
    let mut world = held(When::Continued);
    world.hosts.kill(Side::Destination);
    failed(world, "guest_crashed");
}

#[test]
fn a_source_that_dies_is_lost_unless_the_destination_has_everything() {
    for when in [When::Transferring, When::Withheld, When::OrderedIncomplete] {
        let mut world = held(when);
        world.hosts.kill(Side::Source);
        failed(world, "guest_lost");
    }
    for when in [When::OrderedComplete, When::Restored].into_iter().chain(AFTER) {
        let mut world = held(when);
        world.hosts.kill(Side::Source);
        goes_on(world);
    }
}

#[test]
fn a_held_source_does_not_run_on_when_its_channel_breaks() {
    for when in [When::Transferring, When::OrderedIncomplete, When::OrderedComplete] {
        let mut world = held(when);
        world.hosts.channel = Channel::Cut;
        world.hosts.now += 1;
        world.hosts.source_notices();
        assert!(!world.hosts.source.runs(), "QEMU let it go on");
        is_back(world);
    }
    // So it may die then: the destination has the newest there is.
    let mut world = held(When::OrderedComplete);
    world.hosts.channel = Channel::Cut;
    world.hosts.now += 1;
    world.hosts.source_notices();
    world.hosts.kill(Side::Source);
    done(world);
}

#[test]
fn a_held_guest_whose_drivers_are_all_gone_goes_on_at_the_hold_limit() {
    for when in [When::Transferring, When::Withheld] {
        let mut world = held(when);
        world.planner_dies();
        world.hosts.hold_limit();
        assert!(world.hosts.source.runs());
        is_back(world);
    }
    let mut ordered = held(When::OrderedIncomplete);
    ordered.planner_dies();
    ordered.hosts.hold_limit();
    assert!(!ordered.hosts.source.runs(), "it was ordered");
    done(ordered);
}

#[test]
fn a_held_guest_that_somebody_lets_run_is_not_moved() {
    let mut world = held(When::Transferring);
    world.hosts.someone_resumes();
    world.observe(Side::Source);
    world.drive(Luck::Answered);
    world.settle();
    assert_eq!(crate::deaths::cause(&world), "source_ran_again");
    assert_eq!(world.hosts.source.hold, Held::No);
    aborted(world, FIRST);
}

#[test]
fn a_cancel_lets_a_held_guest_go_on_until_ownership_moved() {
    for when in BEFORE_OWNERSHIP {
        let mut world = held(when);
        world.apply(Event::CancelRequested);
        is_back(world);
    }
    for when in AFTER {
        let mut world = held(when);
        world.apply(Event::CancelRequested);
        done(world);
    }
}

/// Where on its way from live to held a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Recalling,
    Clearing,
    Arming,
    Holding,
    Crossing,
    Ordered,
}

const STEPS: [Step; 6] =
    [Step::Recalling, Step::Clearing, Step::Arming, Step::Holding, Step::Crossing, Step::Ordered];

fn at(step: Step, world: &World) -> bool {
    let again = world.row.downgraded.is_some();
    match &world.row.phase {
        Phase::Admitted { stage, .. } => match stage {
            Stage::Recalling { .. } => step == Step::Recalling,
            Stage::Clearing { .. } => step == Step::Clearing,
            Stage::Arming => again && step == Step::Arming,
            Stage::Holding { .. } => step == Step::Holding,
            Stage::Waiting { .. }
            | Stage::Transferring { .. }
            | Stage::Parting { .. }
            | Stage::ShuttingDown => false,
        },
        Phase::Captured { switchover, .. } => match switchover {
            Switchover::Held { .. } => {
                step == Step::Crossing && world.hosts.source.transfer == TransferState::Active
            }
            Switchover::Ordered => step == Step::Ordered,
            Switchover::Withheld | Switchover::Forward | Switchover::Down { .. } => false,
        },
        Phase::Queued { .. }
        | Phase::Restored { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => false,
    }
}

/// A live move that stalled, on its way to a held one.
fn refused(step: Step) -> World {
    let mut world = World::open(Gates::OPEN, Method::Precopy, Downgrade::Snapshot);
    world.until(|w| w.hosts.source.transfer == TransferState::Active);
    world.hosts.stall();
    world.until(|w| at(step, w));
    world
}

#[test]
fn a_refused_live_move_arrives_held_whoever_drives_it() {
    for step in STEPS {
        let mut world = refused(step);
        world.planner_dies();
        world.settle();
        assert_eq!(world.row.method, Method::Snapshot, "{step:?}");
        assert_eq!(world.hosts.source.holds.0, 1, "{step:?}");
        done(world);
        for side in [Side::Source, Side::Destination] {
            let mut world = refused(step);
            world.hosts.end_mut(side).agent = Agent::Down;
            for _ in 0..10 {
                world.turn();
            }
            world.hosts.end_mut(side).agent = Agent::Up;
            done(opened(world));
        }
    }
}

#[test]
fn a_cancel_on_the_way_from_live_to_held_leaves_the_guest_where_it_was() {
    for step in STEPS {
        let mut world = refused(step);
        world.apply(Event::CancelRequested);
        is_back(world);
    }
}

#[test]
fn a_part_that_dies_on_the_way_from_live_to_held_ends_as_it_would_live() {
    for step in STEPS {
        let mut world = refused(step);
        world.hosts.kill(Side::Source);
        failed(world, "guest_lost");
    }
    for step in [Step::Recalling, Step::Holding, Step::Crossing, Step::Ordered] {
        let mut world = refused(step);
        world.hosts.kill(Side::Destination);
        is_back(world);
    }
    // It was to be ended anyway.
    let mut world = refused(Step::Clearing);
    world.hosts.kill(Side::Destination);
    done(world);
}

#[test]
fn what_was_sent_for_the_live_attempt_and_arrives_late_changes_nothing() {
    let mut world = World::open(Gates::OPEN, Method::Precopy, Downgrade::Snapshot);
    world.until(|w| w.hosts.destination.transfer == TransferState::Setup);
    // The order to begin is lost on its way, and so is the next one's answer.
    world.observe(Side::Source);
    world.observe(Side::Destination);
    world.drive(Luck::Delayed);
    world.until(|w| w.hosts.source.transfer == TransferState::Active);
    world.hosts.stall();
    world.until(|w| at(Step::Crossing, w));
    let late = world.under_way.len();
    for _ in 0..late {
        world.arrives(0);
        assert_eq!(world.hosts.source.hold, Held::Yes);
        assert_eq!(world.hosts.destination.continued, Continued::No);
    }
    done(world);
}

#[test]
fn a_source_that_falls_silent_on_the_way_to_held_is_waited_for() {
    let mut world = refused(Step::Recalling);
    world.hosts.source.monitor = Monitor::Silent;
    for _ in 0..50 {
        world.turn();
    }
    assert_eq!(world.row.label(), PhaseLabel::Admitted);
    assert!(world.waits_for().is_some());
    world.hosts.source.monitor = Monitor::Answers;
    done(world);
}
