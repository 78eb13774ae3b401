//! Moves of a guest that stands still on purpose while its memory crosses.

use std::path::{Path, PathBuf};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::forward::{continue_destination, release_source};
use crate::world::{Side, World, code, freeze, kill};

fn hold() -> Action {
    Action::HoldGuest(v1::HoldGuest {})
}

fn cancel() -> Action {
    Action::CancelTransfer(v1::CancelTransfer { cause: "asked".to_owned() })
}

fn destroy() -> Action {
    Action::DestroyReceiver(v1::DestroyReceiver { cause: "back".to_owned(), source_gone: None })
}

fn resume(proof: Option<v1::GoneProof>) -> Action {
    Action::ResumeSource(v1::ResumeSource { receiver_gone: proof })
}

/// What is seen of a guest that stands still on purpose.
fn is_held(seen: &v1::VmObservation) -> bool {
    seen.role == "held" && seen.run_state == "paused" && seen.switched_off == ["vcpus"]
}

/// What is seen of a guest that goes on, and is not held any more.
fn goes_on(seen: &v1::VmObservation) -> bool {
    seen.role == "running" && seen.run_state == "running" && seen.switched_off.is_empty()
}

/// A running guest, held, with a receiver that listens.
async fn held() -> (World, v1::Listener) {
    let mut world = World::new().await.with_disk();
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    let seen = world.execute(Side::A, hold()).await.unwrap().observation.unwrap();
    assert!(is_held(&seen), "{seen:#?}");
    assert!(seen.stopped_at_us > 0 && seen.resumed_at_us == 0);
    (world, listener)
}

async fn held_up_to_the_switchover() -> World {
    let (mut world, listener) = held().await;
    world.transfer(listener).await.unwrap();
    let seen = world.wait_standing().await;
    assert_eq!(seen.role, "held");
    world
}

fn record_of(world: &World) -> PathBuf {
    world.a.state_dir().join("vms").join(format!("{}.json", world.vm))
}

/// Changes what is written down while nobody reads it.
async fn rewrite(world: &mut World, change: impl FnOnce(&mut serde_json::Value)) {
    let path = record_of(world);
    let mut record = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut record);
    std::fs::write(&path, record.to_string()).unwrap();
    world.a.restart().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_guest_moves_though_its_agent_is_restarted_at_every_step() {
    let (mut world, listener) = held().await;
    world.a.restart().await;
    world.wait(Side::A, "the agent to keep it still", is_held).await;
    world.transfer(listener).await.unwrap();
    world.a.restart().await;
    let seen = world.wait_standing().await;
    assert_eq!((seen.role.as_str(), seen.gave_up, seen.handed), ("held", false, false));
    world.order().await.unwrap();
    world.a.restart().await;
    world.wait_complete().await;
    assert_eq!(world.observe(Side::A).await.role, "held");
    world.generation = 2;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!((seen.run_state.as_str(), seen.disks_active), ("running", true));
    let gone = world.execute(Side::A, release_source()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    let seen = world.observe(Side::A).await;
    assert_eq!((seen.role.as_str(), seen.switched_off.len()), ("absent", 0));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_guest_that_is_taken_back_goes_on_once() {
    let mut world = held_up_to_the_switchover().await;
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert!(goes_on(&seen) && seen.gave_up && !seen.handed, "{seen:#?}");
    let late = world.order().await.unwrap_err();
    assert_eq!(code(&late).1, "gave_up");
    let again = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert!(goes_on(&again), "{again:#?}");
    assert_eq!(again.resumed_at_us, seen.resumed_at_us, "it went on twice");
    world.execute(Side::B, destroy()).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_is_taken_back_before_anything_was_sent_lets_the_guest_go_on() {
    let (mut world, listener) = held().await;
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert!(goes_on(&seen) && seen.gave_up, "{seen:#?}");
    let late = world.transfer(listener).await.unwrap_err();
    assert_eq!(code(&late).1, "gave_up");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_guest_that_was_held_goes_on_only_with_proof() {
    let mut world = held_up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    assert!(world.execute(Side::A, cancel()).await.is_err());
    assert!(world.execute(Side::A, hold()).await.is_err(), "it may be elsewhere");
    assert!(world.execute(Side::A, resume(None)).await.is_err());
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone;
    let seen = world.execute(Side::A, resume(gone)).await.unwrap().observation.unwrap();
    assert!(goes_on(&seen), "{seen:#?}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_source_whose_channel_breaks_stands_still_until_it_is_let_go_on() {
    let mut world = held_up_to_the_switchover().await;
    freeze(world.observe(Side::B).await.qemu.unwrap().pid);
    world.order().await.unwrap();
    kill(world.observe(Side::B).await.qemu.unwrap().pid);
    let failed = |seen: &v1::VmObservation| {
        let ended = seen.transfer.as_ref().is_some_and(|transfer| transfer.status == "failed");
        ended && seen.run_state == "paused"
    };
    let seen = world.wait(Side::A, "the transfer to fail", failed).await;
    assert_eq!(
        (seen.role.as_str(), seen.resumed_at_us),
        ("held", 0),
        "QEMU let it go on: {seen:?}"
    );
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone;
    let seen = world.execute(Side::A, resume(gone)).await.unwrap().observation.unwrap();
    assert!(goes_on(&seen) && seen.gave_up, "{seen:#?}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_guest_goes_on_by_itself_when_no_driver_is_heard() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let claim = v1::ClaimRequest {
        vm_id: world.vm.clone(),
        migration_id: world.migration.clone(),
        generation: 1,
        claim: world.claim,
        hold_limit_ms: 300,
    };
    world.a.client.claim(claim).await.unwrap();
    let listener = world.arm().await;
    world.execute(Side::A, hold()).await.unwrap();
    let seen = world.wait(Side::A, "the guest to go on", goes_on).await;
    assert!(seen.gave_up_cause.contains("no driver was heard"), "{seen:#?}");
    let late = world.transfer(listener).await.unwrap_err();
    assert_eq!(code(&late).1, "gave_up");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_forgets_the_live_attempt_before_it_and_nothing_of_that_lands_later() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    world.transfer(listener.clone()).await.unwrap();
    let late_order = world.request(Action::OrderSwitchover(v1::OrderSwitchover {}));
    let late_start = world.request(Action::StartTransfer(v1::StartTransfer {
        listener: Some(listener),
        ..v1::StartTransfer::default()
    }));
    let late_cancel = world.request(cancel());
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert!(seen.gave_up);
    let first = world.execute(Side::B, destroy()).await.unwrap().gone.unwrap();
    let listener = world.arm().await;
    let second = world.observe(Side::B).await.qemu.unwrap();
    assert_ne!((first.pid, first.start_time), (second.pid, second.start_time));
    let seen = world.execute(Side::A, hold()).await.unwrap().observation.unwrap();
    assert!(is_held(&seen) && !seen.gave_up, "{seen:#?}");
    assert!(seen.transfer.is_none_or(|transfer| transfer.status.is_empty()));
    for late in [late_order, late_start, late_cancel] {
        let refused = world.send(Side::A, late).await.unwrap_err();
        assert_eq!(code(&refused).1, "stale_claim");
    }
    assert!(is_held(&world.observe(Side::A).await));
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_died_between_its_note_and_the_stop_stops_the_guest_at_the_next_command() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let migration = world.migration.clone();
    rewrite(&mut world, |record| {
        record["part"]["held"] = serde_json::json!({
            "migration": migration, "switched_off": ["vcpus"], "holding": "kept"
        });
    })
    .await;
    let runs =
        |seen: &v1::VmObservation| seen.run_state == "running" && seen.switched_off == ["vcpus"];
    world.wait(Side::A, "the agent to say that it runs though it is held", runs).await;
    let seen = world.execute(Side::A, hold()).await.unwrap().observation.unwrap();
    assert!(is_held(&seen), "{seen:#?}");
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert!(goes_on(&seen), "{seen:#?}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_died_between_its_note_and_the_cont_still_lets_the_guest_go_on() {
    let (mut world, _) = held().await;
    let migration = world.migration.clone();
    rewrite(&mut world, |record| {
        record["part"]["held"]["holding"] = "letting_go".into();
        record["part"]["outgoing"] = serde_json::json!({
            "migration": migration, "before": {}, "issue": "refused", "timeout_ms": 0,
            "stall_ms": 0, "order": { "order": "gave_up", "cause": "nobody was heard" }
        });
    })
    .await;
    let seen = world.wait(Side::A, "the guest to go on", goes_on).await;
    assert!(seen.gave_up, "{seen:#?}");
    world.end().await;
}

/// Stops the guest behind the agent's back, as a person at a monitor does.
async fn stop_by_hand(path: &Path) {
    let stream = tokio::net::UnixStream::connect(path).await.unwrap();
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    for command in ["qmp_capabilities", "stop"] {
        write.write_all(format!("{{\"execute\": \"{command}\"}}\n").as_bytes()).await.unwrap();
        while !lines.next_line().await.unwrap().unwrap().contains("\"return\"") {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_somebody_else_has_stopped_is_not_held() {
    let mut world = World::new().await;
    let monitor = world.a.state_dir().with_file_name("by-hand");
    world.definition += &format!(
        "extra_args = ['-chardev', 'socket,id=hand,path={},server=on,wait=off', '-mon', 'chardev=hand,mode=control']\n",
        monitor.display()
    );
    world.start().await;
    world.admit(&[Side::A]).await;
    stop_by_hand(&monitor).await;
    let refused = world.execute(Side::A, hold()).await.unwrap_err();
    let detail: v1::ErrorDetail = prost::Message::decode(refused.details()).unwrap();
    assert_eq!(detail.blockers[0].code, "guest_paused");
    let seen = world.wait(Side::A, "the agent to see it", |seen| seen.run_state == "paused").await;
    assert_eq!((seen.role.as_str(), seen.switched_off.len()), ("running", 0));
    world.end().await;
}
