//! Hosts that are emptied while the world goes on: a planner that restarts, words that come late,
//! guests that end and starts that were admitted long ago.
//!
//! Invariant I6: a host enters maintenance, or is granted retirement, only while it is empty.

mod world;

use proptest::prelude::*;
use vmferry_planner_core::lifecycle::drain::Goal;
use vmferry_planner_core::lifecycle::job::Returning;
use world::{Act, Asked, World};

fn any_act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (1u64..4).prop_map(Act::TimePasses),
        1 => Just(Act::TimePasses(40_000)),
        1 => Just(Act::PlannerReadsStore),
        2 => Just(Act::PlannerSteps),
        6 => Just(Act::PlannerTicks),
        4 => Just(Act::AgentLooks),
        4 => (0usize..4).prop_map(Act::ReportArrives),
        1 => (0usize..4).prop_map(Act::ReportIsLost),
        1 => (0u128..5).prop_map(Act::StartIsAdmitted),
        1 => (0usize..4).prop_map(Act::StartArrives),
        1 => (0u128..5).prop_map(Act::GuestEnds),
        4 => (0usize..4, 0u8..10).prop_map(|(which, how)| Act::MigrationEnds(which, how)),
        1 => Just(Act::PlannerRestarts),
    ]
}

/// Some acts, the operator's word, more acts; and now and then a second word.
fn any_story() -> impl Strategy<Value = Vec<Act>> {
    let later = prop_oneof![
        Just(Act::OperatorCancels),
        Just(Act::OperatorAsks),
        Just(Act::OperatorCompletes(Returning::Stay)),
        Just(Act::OperatorCompletes(Returning::Return)),
    ];
    let acts = |most: usize| prop::collection::vec(any_act(), 0..most);
    (acts(6), acts(90), later, acts(40)).prop_map(|(before, mut acts, later, after)| {
        let mut story = before;
        story.push(Act::OperatorAsks);
        story.append(&mut acts);
        story.push(later);
        story.extend(after);
        story
    })
}

fn check(asked: Asked, acts: &[Act]) -> Result<(), TestCaseError> {
    let mut world = World::new(asked);
    for act in acts {
        world.act(act);
        if let Some(breach) = world.breach() {
            return Err(TestCaseError::fail(format!("after {act:?}: {breach}")));
        }
    }
    // A world that settles down ends what was begun.
    world.settle();
    match world.breach() {
        Some(breach) => Err(TestCaseError::fail(format!("settled: {breach}"))),
        None => Ok(()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_host_enters_maintenance_only_while_it_is_empty(
        acts in any_story(),
    ) {
        check(Asked::Maintenance, &acts)?;
    }

    #[test]
    fn a_host_is_granted_retirement_only_while_it_is_empty(
        acts in any_story(),
    ) {
        check(Asked::Drain(Goal::Retire), &acts)?;
    }

    #[test]
    fn a_host_is_called_drained_only_while_it_is_empty(
        acts in any_story(),
    ) {
        check(Asked::Drain(Goal::Drain), &acts)?;
    }
}

/// The acts reach what they are to reach: without that the properties would say nothing.
#[test]
fn a_quiet_world_reaches_each_end() {
    for asked in [Asked::Maintenance, Asked::Drain(Goal::Drain), Asked::Drain(Goal::Retire)] {
        let mut world = World::new(asked);
        for which in [0, 0] {
            world.act(&Act::StartArrives(which));
        }
        world.act(&Act::AgentLooks);
        world.act(&Act::ReportArrives(0));
        world.act(&Act::OperatorAsks);
        world.settle();
        assert_eq!(world.breach(), None);
        assert!(world.called_empty(), "{asked:?}: {world:?}");
        assert!(!world.was_moved_twice());
    }
}
