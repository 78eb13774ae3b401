//! Moves that reach the destination, whoever dies on the way.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::world::{Side, World, code, freeze};

pub(crate) fn continue_destination() -> Action {
    Action::ContinueDestination(v1::ContinueDestination {})
}

pub(crate) fn release_source() -> Action {
    Action::ReleaseSource(v1::ReleaseSource::default())
}

/// Restarts both agents, so that each step finds an agent that knows the journal alone.
async fn restart(world: &mut World) {
    world.a.restart().await;
    world.b.restart().await;
    for side in [Side::A, Side::B] {
        let knows = |seen: &v1::VmObservation| match seen.knowledge() {
            v1::Knowledge::Known | v1::Knowledge::UnknownVm => true,
            v1::Knowledge::Unspecified
            | v1::Knowledge::Learning
            | v1::Knowledge::Unresponsive
            | v1::Knowledge::Unreadable => false,
        };
        world.wait(side, "the agent to know", knows).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_moves_and_its_source_is_released() {
    let mut world = World::new().await.with_disk();
    let started = world.start().await;
    assert!(started.resolved_machine.starts_with("pc-i440fx-"));
    world.admit(&[Side::A, Side::B]).await;
    let began = std::time::Instant::now();
    let lap = |what: &str| println!("{what} after {:?}", std::time::Instant::now() - began);
    let listener = world.arm().await;
    lap("armed");
    world.transfer(listener).await.unwrap();
    lap("sent");
    world.wait_standing().await;
    lap("standing");
    let ordered = world.order().await.unwrap().observation.unwrap();
    lap("ordered");
    assert!(ordered.handed);
    world.wait_complete().await;
    lap("complete");
    world.generation = 2;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    lap("continued");
    assert_eq!(
        (seen.run_state.as_str(), seen.disks_active, seen.ever_continued, seen.role.as_str()),
        ("running", true, true, "running")
    );
    let gone = world.execute(Side::A, release_source()).await.unwrap().gone.unwrap();
    lap("released");
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    assert_eq!(world.observe(Side::A).await.role, "absent");
    assert_eq!(world.a.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_goes_on_though_both_agents_restart_at_each_step() {
    let mut world = World::new().await.with_disk();
    world.start().await;
    restart(&mut world).await;
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    restart(&mut world).await;
    world.transfer(listener.clone()).await.unwrap();
    restart(&mut world).await;
    // A driver that lost the answer says it again, under the next step.
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    restart(&mut world).await;
    world.order().await.unwrap();
    restart(&mut world).await;
    world.wait_complete().await;
    restart(&mut world).await;
    world.wait_complete().await;
    world.generation = 2;
    world.execute(Side::B, continue_destination()).await.unwrap();
    restart(&mut world).await;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!(seen.run_state, "running");
    world.execute(Side::A, release_source()).await.unwrap();
    restart(&mut world).await;
    let again = world.execute(Side::A, release_source()).await.unwrap().gone.unwrap();
    assert_eq!(again.kind(), v1::ProofKind::ExitRecord);
    assert_eq!(world.observe(Side::B).await.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_goes_on_at_the_destination_under_a_newer_generation_only() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    let early = world.execute(Side::B, continue_destination()).await.unwrap_err();
    assert_eq!(code(&early).1, "wrong_state");
    world.order().await.unwrap();
    world.wait_complete().await;
    let old = world.execute(Side::B, continue_destination()).await.unwrap_err();
    assert_eq!(code(&old).1, "wrong_state", "{old:?}");
    assert!(!world.observe(Side::B).await.ever_continued);
    let kept = world.execute(Side::A, release_source()).await.unwrap_err();
    assert_eq!(code(&kept).1, "wrong_state");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_is_killed_by_decision_is_proven_gone_and_the_guest_goes_on() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    let kill = |cause: &str| Action::KillSource(v1::KillSource { cause: cause.to_owned() });
    let unordered = world.execute(Side::A, kill("too early")).await.unwrap_err();
    assert_eq!(code(&unordered).1, "wrong_state");
    world.order().await.unwrap();
    world.wait_complete().await;
    let gone = world.execute(Side::A, kill("forward")).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    world.generation = 2;
    world.execute(Side::B, continue_destination()).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_went_on_is_no_receiver_any_more() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.generation = 2;
    world.execute(Side::B, continue_destination()).await.unwrap();
    let destroy = Action::DestroyReceiver(v1::DestroyReceiver {
        cause: "late".to_owned(),
        source_gone: None,
    });
    let refused = world.execute(Side::B, destroy).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    assert_eq!(world.observe(Side::B).await.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_moves_there_and_back() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.generation = 2;
    world.execute(Side::B, continue_destination()).await.unwrap();
    world.execute(Side::A, release_source()).await.unwrap();
    world.swap();
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.generation = 3;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!((seen.host_id.as_str(), seen.run_state.as_str()), ("a", "running"));
    world.execute(Side::A, release_source()).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_hangs_after_its_end_is_killed_by_decision_even_by_a_new_agent() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    freeze(world.observe(Side::A).await.qemu.unwrap().pid);
    world.a.restart().await;
    let silent = |seen: &v1::VmObservation| seen.knowledge() == v1::Knowledge::Unresponsive;
    let seen = world.wait(Side::A, "the silence", silent).await;
    assert!(seen.qemu.unwrap().alive && seen.gone.is_none(), "silent is not gone");
    let kill = Action::KillSource(v1::KillSource { cause: "forward".to_owned() });
    let gone = world.execute(Side::A, kill).await.unwrap().gone.unwrap();
    assert_eq!(gone.ended, "was ended by signal 9");
    world.generation = 2;
    world.execute(Side::B, continue_destination()).await.unwrap();
    world.end().await;
}
