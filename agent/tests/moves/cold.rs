//! Moves of a guest that is shut down and started anew, or was off.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::forward::{continue_destination, release_source};
use crate::rom;
use crate::world::{Side, World, code, kill};

fn shut_down() -> Action {
    Action::ShutDownGuest(v1::ShutDownGuest {})
}

/// How the guest was before its move.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Running,
    Off,
}

fn start_receiver(world: &World, found: Found) -> Action {
    Action::StartReceiver(v1::StartReceiver {
        definition: world.definition.clone(),
        resolved_machine: "pc-i440fx-10.0".to_owned(),
        stays_off: found == Found::Off,
    })
}

fn start_again(world: &World) -> Action {
    Action::StartVm(v1::StartVm {
        definition: world.definition.clone(),
        resolved_machine: "pc-i440fx-10.0".to_owned(),
    })
}

fn cancel() -> Action {
    Action::CancelTransfer(v1::CancelTransfer { cause: "asked".to_owned() })
}

fn destroy() -> Action {
    Action::DestroyReceiver(v1::DestroyReceiver { cause: "back".to_owned(), source_gone: None })
}

/// A running guest that heeds its power button, with a disk that both hosts see.
async fn running() -> World {
    let mut world = World::new().await.with_rom(&rom::heeding(), &[]).with_disk();
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    world
}

/// A guest that was asked to turn itself off, and did.
async fn is_down() -> World {
    let mut world = running().await;
    let seen = world.execute(Side::A, shut_down()).await.unwrap().observation.unwrap();
    assert!(seen.shutdown_asked);
    let seen = world.wait(Side::A, "the guest to go", |seen| seen.gone.is_some()).await;
    assert_eq!((seen.run_state.as_str(), seen.role.as_str()), ("shutdown", "running"));
    assert!(seen.shutdown_asked);
    world
}

fn stands(seen: &v1::VmObservation) -> bool {
    seen.role == "receiver" && seen.run_state == "prelaunch" && seen.ready && !seen.ever_continued
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_shut_down_starts_elsewhere_though_agents_restart_at_every_step() {
    let mut world = is_down().await;
    world.a.restart().await;
    let seen = world.wait(Side::A, "its journal", |seen| seen.gone.is_some()).await;
    assert_eq!((seen.run_state.as_str(), seen.shutdown_asked), ("shutdown", true));
    let start = start_receiver(&world, Found::Running);
    let reply = world.execute(Side::B, start).await.unwrap();
    assert!(stands(&reply.observation.unwrap()));
    world.b.restart().await;
    world.wait(Side::B, "the receiver", stands).await;
    // Its disks are locked: nobody else can have them.
    let again = start_again(&world);
    let refused = world.execute(Side::A, again).await.unwrap_err();
    assert_eq!(code(&refused).1, "disk_in_use");
    world.generation = 2;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!((seen.role.as_str(), seen.run_state.as_str()), ("running", "running"));
    assert!(seen.disks_active && seen.ever_continued && !seen.ready);
    world.b.restart().await;
    world.wait(Side::B, "the guest", |seen| seen.run_state == "running").await;
    let gone = world.execute(Side::A, release_source()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    assert_eq!(world.observe(Side::A).await.role, "absent");
    assert_eq!(world.a.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_shut_down_in_vain_is_started_again_once_the_receiver_is_gone() {
    let mut world = is_down().await;
    let start = start_receiver(&world, Found::Running);
    world.execute(Side::B, start).await.unwrap();
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    assert_eq!(world.b.launches(), 0);
    let again = start_again(&world);
    let seen = world.execute(Side::A, again.clone()).await.unwrap().observation.unwrap();
    assert_eq!((seen.role.as_str(), seen.run_state.as_str()), ("running", "running"));
    assert!(!seen.shutdown_asked, "what was shut down is another process");
    let pid = seen.qemu.unwrap().pid;
    world.a.restart().await;
    world.wait(Side::A, "the guest", |seen| seen.run_state == "running").await;
    let seen = world.execute(Side::A, again).await.unwrap().observation.unwrap();
    assert_eq!(seen.qemu.unwrap().pid, pid, "started once");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_ignores_its_power_button_runs_on() {
    let mut world = World::new().await.with_disk();
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let seen = world.execute(Side::A, shut_down()).await.unwrap().observation.unwrap();
    assert_eq!((seen.run_state.as_str(), seen.shutdown_asked), ("running", true));
    // What would take its disks is refused while it runs.
    let start = start_receiver(&world, Found::Running);
    let refused = world.execute(Side::B, start).await.unwrap_err();
    assert_eq!(code(&refused).1, "disk_in_use");
    assert_eq!(world.b.launches(), 0);
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert!(seen.gave_up && seen.run_state == "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_dies_before_its_guest_ran_says_so() {
    let mut world = is_down().await;
    let start = start_receiver(&world, Found::Running);
    let seen = world.execute(Side::B, start).await.unwrap().observation.unwrap();
    kill(seen.qemu.unwrap().pid);
    let seen = world.wait(Side::B, "its end", |seen| seen.role == "absent").await;
    assert!(seen.gone.is_some() && !seen.ever_continued);
    assert_eq!(world.b.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_stopped_vm_only_the_definition_moves_and_goes_back() {
    let mut world = running().await;
    let quit = v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 };
    world.execute(Side::A, Action::StopVm(quit)).await.unwrap();
    world.admit(&[Side::A, Side::B]).await;
    let reply = world.execute(Side::A, shut_down()).await.unwrap();
    assert!(reply.gone.is_some());
    assert_eq!(world.observe(Side::A).await.role, "stopped");
    let bring = start_receiver(&world, Found::Off);
    let seen = world.execute(Side::B, bring.clone()).await.unwrap().observation.unwrap();
    assert_eq!((seen.role.as_str(), seen.ready), ("stopped", true));
    assert_eq!(world.b.launches(), 0);
    // Undone, nothing of it is left there.
    world.execute(Side::B, destroy()).await.unwrap();
    assert_eq!(world.observe(Side::B).await.role, "absent");
    world.execute(Side::B, bring).await.unwrap();
    world.generation = 2;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!((seen.role.as_str(), seen.ready, seen.generation), ("stopped", false, 2));
    world.execute(Side::A, release_source()).await.unwrap();
    assert_eq!(world.observe(Side::A).await.role, "absent");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_only_the_source_has_is_named() {
    let mut world = is_down().await;
    world.definition = world.definition.replace("shared = true", "shared = false");
    let start = start_receiver(&world, Found::Running);
    let refused = world.execute(Side::B, start).await.unwrap_err();
    assert!(refused.message().contains("not shared"), "{}", refused.message());
    assert_eq!(world.observe(Side::B).await.role, "absent");
    world.end().await;
}
