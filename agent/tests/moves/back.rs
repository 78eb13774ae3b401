//! Moves that end where they began.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::world::{Side, World, code, freeze, kill};

fn cancel() -> Action {
    Action::CancelTransfer(v1::CancelTransfer { cause: "asked".to_owned() })
}

fn destroy() -> Action {
    Action::DestroyReceiver(v1::DestroyReceiver { cause: "back".to_owned(), source_gone: None })
}

fn resume(proof: Option<v1::GoneProof>) -> Action {
    Action::ResumeSource(v1::ResumeSource { receiver_gone: proof })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_that_is_cancelled_at_the_switchover_leaves_the_guest_where_it_was() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert_eq!((seen.run_state.as_str(), seen.gave_up, seen.handed), ("running", true, false));
    let refused = world.order().await.unwrap_err();
    assert_eq!(code(&refused).1, "gave_up");
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    assert_eq!(world.observe(Side::B).await.role, "absent");
    assert_eq!(world.b.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_died_between_its_note_and_the_call_still_lets_the_guest_go_on() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    let path = world.a.state_dir().join("vms").join(format!("{}.json", world.vm));
    let text = std::fs::read_to_string(&path).unwrap();
    let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
    record["part"]["outgoing"]["order"] =
        serde_json::json!({ "order": "gave_up", "cause": "nobody was heard" });
    std::fs::write(&path, record.to_string()).unwrap();
    world.a.restart().await;
    let seen = world.wait(Side::A, "the guest", |seen| seen.run_state == "running").await;
    assert!(seen.gave_up && !seen.handed, "{seen:?}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_came_back_moves_at_the_next_try() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    world.execute(Side::A, cancel()).await.unwrap();
    world.execute(Side::B, destroy()).await.unwrap();
    world.admit(&[Side::A, Side::B]).await;
    let seen = world.observe(Side::A).await;
    assert!(!seen.gave_up && seen.transfer.is_none(), "of an earlier migration: {seen:?}");
    let listener = world.arm().await;
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_is_killed_before_the_order_costs_nothing() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    kill(world.observe(Side::B).await.qemu.unwrap().pid);
    let dead = world.wait(Side::B, "the receiver's end", |seen| seen.gone.is_some()).await;
    assert_eq!(dead.gone.unwrap().ended, "was ended by signal 9");
    assert!(!dead.ever_continued);
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert_eq!(seen.run_state, "running");
    let failed = seen.transfer.unwrap();
    assert!(failed.bytes_transferred > 0, "how much had crossed is still known: {failed:?}");
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_source_goes_on_only_with_proof() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    let refused = world.execute(Side::A, cancel()).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    let refused = world.execute(Side::A, resume(None)).await.unwrap_err();
    assert_eq!(code(&refused).1, "invalid");
    assert_eq!(world.observe(Side::A).await.run_state, "postmigrate");
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone;
    let seen = world.execute(Side::A, resume(gone.clone())).await.unwrap().observation.unwrap();
    assert_eq!((seen.run_state.as_str(), seen.gave_up), ("running", true));
    assert!(!seen.transfer.unwrap().complete, "it was taken back");
    let again = world.execute(Side::A, resume(gone)).await.unwrap().observation.unwrap();
    assert_eq!(again.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_committed_comes_back_under_the_next_generation() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    kill(world.observe(Side::B).await.qemu.unwrap().pid);
    world.wait(Side::B, "the receiver's end", |seen| seen.gone.is_some()).await;
    world.generation = 2;
    let lost = world
        .execute(Side::B, Action::ContinueDestination(v1::ContinueDestination {}))
        .await
        .unwrap_err();
    assert_eq!(code(&lost).1, "receiver_gone");
    assert!(!world.observe(Side::B).await.ever_continued);
    world.generation = 3;
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone;
    let seen = world.execute(Side::A, resume(gone)).await.unwrap().observation.unwrap();
    assert_eq!((seen.run_state.as_str(), seen.generation), ("running", 3));
    // It is this host's again: the old generation releases nothing.
    let release = Action::ReleaseSource(v1::ReleaseSource::default());
    assert!(world.execute(Side::A, release).await.is_err());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_hears_nobody_lets_its_guest_go_on_and_refuses_a_late_order() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let hold = v1::ClaimRequest {
        vm_id: world.vm.clone(),
        migration_id: world.migration.clone(),
        generation: 1,
        claim: world.claim,
        hold_limit_ms: 300,
    };
    world.a.client.claim(hold).await.unwrap();
    let listener = world.arm().await;
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    let seen = world
        .wait(Side::A, "the source to give up", |seen| seen.gave_up && seen.run_state == "running")
        .await;
    assert!(seen.gave_up_cause.contains("no driver was heard"), "{}", seen.gave_up_cause);
    let late = world.order().await.unwrap_err();
    assert_eq!(code(&late).1, "gave_up");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_destination_is_a_stall_and_the_guest_runs_on() {
    let mut world = World::new().await;
    // So much that even its empty pages do not fit into the sockets' buffers.
    world.definition = world.definition.replace("64MiB", "1GiB");
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    // Takes the connection and never reads: what a destination does that hangs.
    let deaf = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    nix::sys::socket::setsockopt(&deaf, nix::sys::socket::sockopt::RcvBuf, &2048).unwrap();
    let port = u32::from(deaf.local_addr().unwrap().port());
    let listener =
        v1::Listener { address: "127.0.0.1".to_owned(), port, ..v1::Listener::default() };
    let policy = v1::TransferPolicy { stall_ms: 300, ..v1::TransferPolicy::default() };
    let transfer = v1::StartTransfer {
        listener: Some(listener),
        policy: Some(policy),
        ..v1::StartTransfer::default()
    };
    world.execute(Side::A, Action::StartTransfer(transfer)).await.unwrap();
    let seen = world.wait(Side::A, "the source to give up", |seen| seen.gave_up).await;
    assert!(seen.gave_up_cause.contains("no byte crossed"), "{}", seen.gave_up_cause);
    // QEMU calls it failed where the cancelled channel's error overtakes the cancel: in both ends
    // the guest is the source's.
    world
        .wait(Side::A, "the guest to run", |seen| {
            let ended = |status: &str| matches!(status, "cancelled" | "failed");
            seen.run_state == "running"
                && seen.transfer.as_ref().is_some_and(|transfer| ended(&transfer.status))
        })
        .await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_was_never_armed_is_proven_gone_by_the_journal() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let late = {
        let source = Some(world.describe().await);
        world.request(Action::ArmReceiver(v1::ArmReceiver { source, policy: None }))
    };
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::NeverStarted);
    let refused = world.send(Side::B, late).await.unwrap_err();
    assert_eq!(code(&refused).1, "stale_claim");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_is_built_otherwise_is_refused_with_every_difference() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let mut source = world.describe().await;
    source.devices.push("virtio-balloon-pci bal addr=16".to_owned());
    source.memory_bytes = 1;
    let arm = v1::ArmReceiver { source: Some(source), policy: None };
    let refused = world.execute(Side::B, Action::ArmReceiver(arm)).await.unwrap_err();
    let detail: v1::ErrorDetail = prost::Message::decode(refused.details()).unwrap();
    let codes: Vec<_> = detail.blockers.iter().map(|blocker| blocker.code.as_str()).collect();
    assert_eq!(codes, ["memory_differs", "device_differs"]);
    assert_eq!(world.observe(Side::B).await.role, "absent");
    assert_eq!(world.b.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_handed_over_stays_so_for_whoever_commands_next() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.admit(&[Side::A, Side::B]).await;
    assert!(world.observe(Side::A).await.handed);
    let quit = Action::StopVm(v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 });
    let listener =
        v1::Listener { address: "127.0.0.1".to_owned(), port: 1, ..v1::Listener::default() };
    let transfer = v1::StartTransfer { listener: Some(listener), ..v1::StartTransfer::default() };
    for action in [quit, cancel(), Action::StartTransfer(transfer), resume(None)] {
        let refused = world.execute(Side::A, action).await.unwrap_err();
        assert_eq!(code(&refused).1, "wrong_state");
    }
    assert!(world.observe(Side::A).await.handed);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_that_hangs_after_the_order_is_ended_and_the_guest_goes_on_at_its_source() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    freeze(world.observe(Side::B).await.qemu.unwrap().pid);
    world.order().await.unwrap();
    let seen = world.observe(Side::A).await;
    assert!(seen.handed && !seen.transfer.unwrap().complete);
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone;
    let seen = world.execute(Side::A, resume(gone)).await.unwrap().observation.unwrap();
    assert_eq!((seen.run_state.as_str(), seen.gave_up), ("running", true));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_that_hangs_before_the_order_holds_nothing_up() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    freeze(world.observe(Side::B).await.qemu.unwrap().pid);
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert_eq!(seen.run_state, "running");
    let gone = world.execute(Side::B, destroy()).await.unwrap().gone.unwrap();
    assert_eq!(gone.ended, "was ended by signal 9");
    world.end().await;
}
