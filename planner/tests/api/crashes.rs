//! The planner dies, or an agent falls silent, at every step: the end is the same.

use crate::bench::{Bench, until};
use crate::world::Silence;

/// The commands of a migration that goes through.
const COMMANDS: usize = 5;

async fn at_the_end(bench: &Bench, id: &str, vm: &str) {
    let done = bench.ended(id).await;
    assert_eq!(done.state, "completed", "{done:#?}");
    assert_eq!(bench.world.running(vm), ["b"]);
    let after = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((after.host.as_str(), after.generation, after.power.as_str()), ("b", 2, "running"));
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}

/// Runs a migration whose `nth` command meets a silent agent, restarts the planner there, and lets
/// the agent answer again.
async fn dies_at(nth: usize, silence: Silence) {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(nth, silence);
    let asked = bench.migrate("web1", "b").await;
    let started = bench.world.commands().len();
    let world = bench.world.clone();
    until(|| world.commands().len() > nth + 1 || started > nth + 1).await;
    let bench = bench.restart().await;
    bench.world.all_answer();
    bench.report(&["a", "b"]).await;
    at_the_end(&bench, &asked.id, &vm.id).await;
}

#[tokio::test]
async fn a_planner_that_dies_before_any_command_goes_on_after() {
    for nth in 0..COMMANDS {
        dies_at(nth, Silence::Before).await;
    }
}

#[tokio::test]
async fn a_planner_that_dies_after_any_command_goes_on_after() {
    for nth in 0..COMMANDS {
        dies_at(nth, Silence::After).await;
    }
}

#[tokio::test]
async fn an_agent_that_falls_silent_at_any_command_is_asked_again() {
    for nth in 0..COMMANDS {
        for silence in [Silence::Before, Silence::After] {
            let bench = Bench::new(&["a", "b"]).await;
            let vm = bench.start("web1", 1, "a").await;
            bench.world.fall_silent_at(nth, silence);
            let asked = bench.migrate("web1", "b").await;
            let world = bench.world.clone();
            until(|| world.commands().len() > nth + 1).await;
            bench.world.all_answer();
            at_the_end(&bench, &asked.id, &vm.id).await;
        }
    }
}

#[tokio::test]
async fn a_start_goes_on_after_the_planner_died() {
    for silence in [Silence::Before, Silence::After] {
        let bench = Bench::new(&["a"]).await;
        bench.world.fall_silent_at(0, silence);
        let asked = vmferry_proto::v1::StartVmRequest {
            definition: crate::bench::definition("web1", 1),
            ..vmferry_proto::v1::StartVmRequest::default()
        };
        let vm = bench.planner.start_vm(asked).await.unwrap();
        assert_eq!(vm.power, "starting");
        let world = bench.world.clone();
        until(|| !world.commands().is_empty()).await;
        let bench = bench.restart().await;
        bench.world.all_answer();
        until(|| !bench.world.running(&vm.id).is_empty()).await;
        let asked = vmferry_proto::v1::StartVmRequest {
            vm: "web1".to_owned(),
            wait_ms: 10_000,
            ..vmferry_proto::v1::StartVmRequest::default()
        };
        assert_eq!(bench.planner.start_vm(asked).await.unwrap().power, "running");
        assert!(bench.planner.store().open_power().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_receiver_that_dies_before_the_guest_went_on_leaves_it_on_the_source() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    // The fourth command is the destination's first `cont`, and never reaches it.
    bench.world.fall_silent_at(3, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    let world = bench.world.clone();
    until(|| world.commands().len() == 5).await;
    bench.world.kill("b", &vm.id);
    bench.world.all_answer();
    let ended = bench.ended(&asked.id).await;
    assert_eq!(ended.phase, "aborted", "{ended:#?}");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    let after = bench.planner.get_vm("web1").await.unwrap();
    // There and back: two changes of owner.
    assert_eq!((after.host.as_str(), after.generation), ("a", 3));
}

#[tokio::test]
async fn a_command_that_failed_half_way_is_made_sure_of() {
    for nth in 0..COMMANDS {
        let bench = Bench::new(&["a", "b"]).await;
        let vm = bench.start("web1", 1, "a").await;
        bench.world.fall_silent_at(nth, Silence::Failing);
        let asked = bench.migrate("web1", "b").await;
        if nth < 2 {
            // Before the guest was touched, a failure is an answer.
            let ended = bench.ended(&asked.id).await;
            assert_eq!((ended.phase.as_str(), ended.state.as_str()), ("aborted", "failed"));
            assert!(ended.error.contains("the monitor was silent"), "{}", ended.error);
            assert_eq!(bench.world.running(&vm.id), ["a"]);
            assert!(bench.planner.store().reservations().await.unwrap().is_empty());
        } else {
            at_the_end(&bench, &asked.id, &vm.id).await;
        }
    }
}
