//! How a move ends when a part dies, cell by cell: for precopy.
//!
//! "Goes on" is the same end as without the death. In no cell does a guest run twice, which the
//! model itself asserts at every command.

use vmferry_planner_core::evidence::Continued;
use vmferry_planner_core::migration::{
    Cause, Downgrade, Event, Gate, Gates, Phase, Side, Switchover,
};
use vmferry_types::{Generation, Method, PhaseLabel};

use crate::model::{Agent, Channel, FIRST, Life};
use crate::planner::{Luck, World};

/// Where in its life a migration is when a part dies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the guest stands still.
    Transferring,
    /// The guest stands still, not ordered.
    Withheld,
    /// Ordered; the destination lacks the rest.
    OrderedIncomplete,
    /// Ordered; the destination has everything, the source does not know.
    OrderedComplete,
    /// Both said that all has arrived.
    Restored,
    /// Ownership moved; the destination was not continued.
    Committed,
    /// Ownership moved; the destination was continued and not seen.
    Continued,
    /// The guest was seen on the destination.
    Attached,
}

const GATED: Gates = Gates { start: Gate::Open, ..Gates::CLOSED };

fn world(when: When) -> World {
    by(when, Method::Precopy)
}

/// Returns a world whose migration carries its guest by `method`.
pub(crate) fn by(when: When, method: Method) -> World {
    let gates = match when {
        When::Withheld => GATED,
        When::Restored => Gates { commit: Gate::Closed, ..Gates::OPEN },
        When::Transferring
        | When::OrderedIncomplete
        | When::OrderedComplete
        | When::Committed
        | When::Continued
        | When::Attached => Gates::OPEN,
    };
    let mut world = World::open(gates, method, Downgrade::Never);
    match when {
        When::Transferring => world.until(|w| {
            w.hosts.source.transfer == vmferry_planner_core::evidence::TransferState::Active
        }),
        When::Withheld => world.until(|w| {
            matches!(&w.row.phase, Phase::Captured { switchover: Switchover::Withheld, .. })
        }),
        When::OrderedIncomplete => {
            world.until(ordered);
            world.observe(Side::Source);
            world.drive(Luck::Answered);
        }
        When::OrderedComplete => {
            world.until(ordered);
            world.drive(Luck::Answered);
            world.hosts.progress();
        }
        When::Restored => world.until(|w| w.row.label() == PhaseLabel::Restored),
        When::Committed => world.until(|w| w.row.label() == PhaseLabel::Committed),
        When::Continued => {
            world.until(|w| w.row.label() == PhaseLabel::Committed);
            world.drive(Luck::AnswerLost);
            assert_eq!(world.hosts.destination.continued, Continued::Yes);
        }
        When::Attached => world.until(|w| w.row.label() == PhaseLabel::Attached),
    }
    world
}

fn ordered(world: &World) -> bool {
    matches!(&world.row.phase, Phase::Captured { switchover: Switchover::Ordered, .. })
}

pub(crate) fn cause(world: &World) -> &'static str {
    world.row.phase.cause().map_or("-", Cause::label)
}

/// Lets it end, and checks where the guest is.
pub(crate) fn ends(mut world: World, label: PhaseLabel, guest: Option<Side>) -> World {
    world.settle();
    let phase = &world.row.phase;
    assert_eq!(world.row.label(), label, "{phase:?}, waits for {:?}", world.waits_for());
    assert_eq!(world.hosts.source.runs(), guest == Some(Side::Source), "{phase:?}");
    assert_eq!(world.hosts.destination.runs(), guest == Some(Side::Destination), "{phase:?}");
    assert!(world.over());
    world
}

pub(crate) fn done(world: World) {
    let world = ends(world, PhaseLabel::Done, Some(Side::Destination));
    assert_eq!(world.hosts.source.life, Life::Cleared);
    assert_eq!(world.row.books().generation, FIRST.next());
}

pub(crate) fn aborted(world: World, generation: Generation) {
    let world = ends(world, PhaseLabel::Aborted, Some(Side::Source));
    assert_ne!(world.hosts.destination.life, Life::Alive);
    assert_eq!(world.row.books().generation, generation);
}

pub(crate) fn failed(world: World, label: &str) {
    let world = ends(world, PhaseLabel::Failed, None);
    assert_eq!(cause(&world), label);
}

/// Opens the gates that kept a world in its phase.
pub(crate) fn opened(mut world: World) -> World {
    world.apply(Event::SwitchoverAllowed);
    world.until(|w| w.row.label() != PhaseLabel::Captured);
    world.apply(Event::CommitAllowed);
    world
}

#[test]
fn without_a_death_the_guest_moves() {
    done(World::new(Gates::OPEN));
}

#[test]
fn a_planner_that_dies_goes_on() {
    for when in [
        When::Transferring,
        When::OrderedIncomplete,
        When::OrderedComplete,
        When::Committed,
        When::Continued,
        When::Attached,
    ] {
        let mut world = world(when);
        world.planner_dies();
        done(world);
    }
    let mut world = world(When::Restored);
    world.planner_dies();
    world.apply(Event::CommitAllowed);
    done(world);
}

#[test]
fn a_planner_that_dies_before_the_order_goes_on_within_the_hold_limit() {
    let mut world = world(When::Withheld);
    world.planner_dies();
    done(opened(world));
}

#[test]
fn a_planner_that_dies_before_the_order_aborts_past_the_hold_limit() {
    let mut world = world(When::Withheld);
    world.planner_dies();
    world.hosts.hold_limit();
    assert!(world.hosts.source.runs());
    aborted(world, FIRST);
}

#[test]
fn an_order_that_meets_a_source_that_gave_up_aborts() {
    let mut world = world(When::Withheld);
    world.hosts.hold_limit();
    world.apply(Event::SwitchoverAllowed);
    aborted(world, FIRST);
}

#[test]
fn an_agent_that_dies_goes_on() {
    for side in [Side::Source, Side::Destination] {
        for when in [
            When::Transferring,
            When::OrderedIncomplete,
            When::OrderedComplete,
            When::Committed,
            When::Continued,
            When::Attached,
        ] {
            let mut world = world(when);
            world.hosts.end_mut(side).agent = Agent::Down;
            for _ in 0..10 {
                world.turn();
            }
            world.hosts.end_mut(side).agent = Agent::Up;
            done(world);
        }
        let mut held = world(When::Withheld);
        held.hosts.end_mut(side).agent = Agent::Down;
        for _ in 0..10 {
            held.turn();
        }
        held.hosts.end_mut(side).agent = Agent::Up;
        done(opened(held));
    }
}

#[test]
fn a_receiver_that_dies_before_the_guest_stood_still_aborts() {
    let mut world = world(When::Transferring);
    world.hosts.kill(Side::Destination);
    aborted(world, FIRST);
}

#[test]
fn a_receiver_that_dies_before_the_order_aborts() {
    let mut world = world(When::Withheld);
    world.hosts.kill(Side::Destination);
    aborted(world, FIRST);
}

#[test]
fn a_receiver_that_dies_after_the_order_aborts() {
    for when in [When::OrderedIncomplete, When::OrderedComplete, When::Restored] {
        let mut world = world(when);
        world.hosts.kill(Side::Destination);
        aborted(world, FIRST);
    }
}

#[test]
fn a_receiver_that_dies_before_its_first_cont_aborts_under_the_next_generation() {
    let mut world = world(When::Committed);
    world.hosts.kill(Side::Destination);
    aborted(world, FIRST.next().next());
}

#[test]
fn a_receiver_that_dies_after_its_first_cont_fails_as_a_crash() {
    let mut world = world(When::Continued);
    world.hosts.kill(Side::Destination);
    failed(world, "guest_crashed");
}

#[test]
fn a_destination_that_dies_once_attached_fails_as_a_crash() {
    let mut world = world(When::Attached);
    world.hosts.kill(Side::Destination);
    failed(world, "guest_crashed");
}

#[test]
fn a_source_that_dies_before_the_guest_stood_still_is_lost() {
    let mut world = world(When::Transferring);
    world.hosts.kill(Side::Source);
    failed(world, "guest_lost");
}

#[test]
fn a_source_that_dies_before_the_order_is_lost() {
    let mut world = world(When::Withheld);
    world.hosts.kill(Side::Source);
    failed(world, "guest_lost");
}

#[test]
fn a_source_that_dies_after_the_order_is_lost_unless_the_destination_has_everything() {
    let mut lacking = world(When::OrderedIncomplete);
    lacking.hosts.kill(Side::Source);
    failed(lacking, "guest_lost");

    let mut complete = world(When::OrderedComplete);
    complete.hosts.kill(Side::Source);
    done(complete);

    let mut restored = world(When::Restored);
    restored.hosts.kill(Side::Source);
    restored.apply(Event::CommitAllowed);
    done(restored);
}

#[test]
fn a_source_that_dies_after_ownership_moved_is_not_missed() {
    for when in [When::Committed, When::Continued, When::Attached] {
        let mut world = world(when);
        world.hosts.kill(Side::Source);
        done(world);
    }
}

#[test]
fn both_dying_after_the_order_is_a_loss() {
    let mut world = world(When::OrderedComplete);
    world.hosts.kill(Side::Source);
    world.hosts.kill(Side::Destination);
    failed(world, "guest_lost");
}

#[test]
fn a_receiver_is_kept_until_the_source_says_that_it_can_go_on() {
    let mut world = world(When::OrderedComplete);
    world.apply(Event::CancelRequested);
    world.planner_dies();
    world.hosts.source.agent = Agent::Down;
    world.hosts.kill(Side::Source);
    for _ in 0..10 {
        world.turn();
    }
    assert_eq!(world.row.label(), PhaseLabel::RollingBack);
    assert_eq!(world.hosts.destination.life, Life::Alive, "the only whole guest is destroyed");
    world.hosts.source.agent = Agent::Up;
    done(world);
}

#[test]
fn a_source_that_ran_on_and_died_is_not_brought_back_from_its_past() {
    // The channel breaks after the destination got everything: the source resumes, runs, and dies.
    let mut world = world(When::OrderedComplete);
    world.hosts.channel = Channel::Cut;
    world.hosts.now += 1;
    world.hosts.source_notices();
    assert!(world.hosts.source.runs());
    world.hosts.kill(Side::Source);
    failed(world, "guest_lost");
}

#[test]
fn a_source_that_resumes_by_itself_is_the_only_way() {
    for when in [When::OrderedIncomplete, When::OrderedComplete] {
        let mut world = world(when);
        world.hosts.channel = Channel::Cut;
        aborted(world, FIRST);
    }
}

#[test]
fn a_channel_that_breaks_while_memory_crosses_aborts() {
    let mut world = world(When::Transferring);
    world.hosts.channel = Channel::Cut;
    aborted(world, FIRST);
}

#[test]
fn a_silent_source_whose_destination_has_everything_is_decided_forward() {
    let mut world = world(When::OrderedComplete);
    world.hosts.source.monitor = crate::model::Monitor::Silent;
    world.hosts.now += 40_000;
    world
        .until(|w| matches!(&w.row.phase, Phase::Captured { switchover: Switchover::Forward, .. }));
    done(world);
}

#[test]
fn an_overdue_switchover_whose_source_answers_is_decided_back() {
    let mut world = world(When::OrderedIncomplete);
    world.hosts.now += 40_000;
    world.observe(Side::Source);
    world.observe(Side::Destination);
    world.drive(Luck::Answered);
    assert_eq!(cause(&world), "switchover_overdue");
    aborted(world, FIRST);
}

#[test]
fn a_silent_source_whose_destination_lacks_the_rest_waits_and_says_so() {
    let mut world = world(When::OrderedIncomplete);
    world.hosts.source.monitor = crate::model::Monitor::Silent;
    world.hosts.now += 40_000;
    for _ in 0..20 {
        world.turn();
    }
    assert_eq!(world.row.label(), PhaseLabel::Captured);
    assert!(world.waits_for().is_some());
    world.hosts.source.monitor = crate::model::Monitor::Answers;
    world.settle();
    assert!(world.over());
}

#[test]
fn a_cancel_ends_at_the_source_until_ownership_moved() {
    for when in [
        When::Transferring,
        When::Withheld,
        When::OrderedIncomplete,
        When::OrderedComplete,
        When::Restored,
    ] {
        let mut world = world(when);
        world.apply(Event::CancelRequested);
        assert_eq!(world.row.label(), PhaseLabel::RollingBack);
        aborted(world, FIRST);
    }
    for when in [When::Committed, When::Continued, When::Attached] {
        let mut world = world(when);
        world.apply(Event::CancelRequested);
        done(world);
    }
}
