//! Migrations from request to end.

use futures::StreamExt as _;
use vmferry_proto::v1;

use crate::bench::Bench;
use crate::world::Pace;

#[tokio::test]
async fn a_vm_moves_and_everything_is_given_back() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let asked = bench.migrate("web1", "").await;
    let done = bench.ended(&asked.id).await;
    assert_eq!((done.state.as_str(), done.phase.as_str()), ("completed", "done"));
    assert_eq!(done.target_host, "b");
    assert_eq!(done.downtime_ms, 7);
    assert!(done.pause_us > 0);
    assert!(done.proof.contains("post-migrate"), "{}", done.proof);
    let phases: Vec<&str> = done.phases.iter().map(|phase| phase.phase.as_str()).collect();
    assert_eq!(
        phases,
        ["queued", "admitted", "captured", "restored", "committed", "attached", "done"]
    );
    assert_eq!(
        bench.world.commands()[1..],
        [
            "arm_receiver@b",
            "start_transfer@a",
            "order_switchover@a",
            "continue_destination@b",
            "release_source@a"
        ]
    );
    let after = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((after.host.as_str(), after.generation), ("b", vm.generation + 1));
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn two_decisions_are_two_commits_on_the_way_through_the_pause() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let asked = bench.migrate("web1", "b").await;
    let done = bench.ended(&asked.id).await;
    let at = |event: &str| done.log.iter().find(|entry| entry.event == event).unwrap();
    // Two entries with one time are one transaction.
    assert_eq!(at("both_complete").at, at("commit_allowed").at);
    assert_eq!(at("source_stopped").phase, "captured");
    assert_eq!(at("both_complete").seq, at("source_stopped").seq + 1);
}

#[tokio::test]
async fn the_same_request_answers_the_same_migration() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let asked = v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        request_id: "01234567-89ab-cdef-0123-456789abcdef".to_owned(),
        ..v1::MigrateVmRequest::default()
    };
    let first = bench.planner.migrate_vm(asked.clone()).await.unwrap();
    bench.ended(&first.id).await;
    let again = bench.planner.migrate_vm(asked).await.unwrap();
    assert_eq!(again.id, first.id);
    assert_eq!(again.state, "completed");
}

#[tokio::test]
async fn a_named_destination_is_refused_with_every_reason() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.block("b", "disk_missing", "no such disk");
    bench.world.memory("b", 1 << 30);
    bench.report(&["b"]).await;
    let asked = v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        target_host: "host-b".to_owned(),
        ..v1::MigrateVmRequest::default()
    };
    let error = bench.planner.migrate_vm(asked).await.unwrap_err();
    let codes: Vec<&str> = error.blockers().iter().map(|of| of.code.as_str()).collect();
    assert_eq!(codes, ["memory", "disk_missing"]);
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}

#[tokio::test]
async fn the_next_best_host_is_asked_if_the_best_one_cannot() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.block("b", "missing_bridge", "no bridge br0");
    let asked = bench.migrate("web1", "").await;
    assert_eq!(asked.target_host, "c");
    assert_eq!(bench.ended(&asked.id).await.state, "completed");
}

#[tokio::test]
async fn without_room_it_waits_and_goes_on_when_there_is_some() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.memory("b", 1 << 30);
    bench.report(&["b"]).await;
    let asked = bench.migrate("web1", "").await;
    assert_eq!((asked.state.as_str(), asked.phase.as_str()), ("pending", "queued"));
    assert!(asked.capacity_note.contains("memory"), "{}", asked.capacity_note);
    assert!(!asked.capacity_blocked_since.is_empty());
    bench.world.memory("b", 4 << 30);
    bench.report(&["b"]).await;
    assert_eq!(bench.ended(&asked.id).await.state, "completed");
}

#[tokio::test]
async fn a_queued_migration_expires() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.memory("b", 1 << 30);
    bench.report(&["b"]).await;
    let asked = v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        queue_deadline_ms: 1,
        ..v1::MigrateVmRequest::default()
    };
    let asked = bench.planner.migrate_vm(asked).await.unwrap();
    let ended = bench.ended(&asked.id).await;
    assert_eq!((ended.state.as_str(), ended.phase.as_str()), ("failed", "aborted"));
    assert!(ended.error.contains("capacity_wait_expired"), "{}", ended.error);
}

#[tokio::test]
async fn a_cancel_while_data_crosses_leaves_the_guest_where_it_was() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.state == "syncing").await;
    let cancelled = bench.planner.cancel_migration(&asked.id).await.unwrap();
    assert!(cancelled.cancel_requested);
    let ended = bench.ended(&asked.id).await;
    assert_eq!((ended.state.as_str(), ended.phase.as_str()), ("cancelled", "aborted"));
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
    // Asked again, it is as it is.
    assert_eq!(bench.planner.cancel_migration(&asked.id).await.unwrap().state, "cancelled");
}

#[tokio::test]
async fn a_second_migration_of_the_same_vm_is_refused() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    bench.migrate("web1", "b").await;
    let asked =
        v1::MigrateVmRequest { vm_name: "web1".to_owned(), ..v1::MigrateVmRequest::default() };
    let error = bench.planner.migrate_vm(asked).await.unwrap_err();
    assert_eq!(error.code(), "migration_open");
}

#[tokio::test]
async fn an_agent_that_is_silent_is_waited_for_and_named() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.state == "syncing").await;
    bench.world.silence("a");
    bench.planner.cancel_migration(&asked.id).await.unwrap();
    let id = asked.id.parse().unwrap();
    crate::bench::until(|| bench.planner.live.seen(id).trouble.is_some()).await;
    assert_eq!(bench.planner.get_migration(&asked.id).await.unwrap().phase, "rolling_back");
    assert_eq!(bench.planner.store().reservations().await.unwrap().len(), 2);
    bench.world.all_answer();
    assert_eq!(bench.ended(&asked.id).await.state, "cancelled");
}

#[tokio::test]
async fn a_watcher_sees_the_first_and_the_last_phase() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    let changes = bench.planner.watch_migration(&asked.id).await.unwrap();
    bench.see(&asked.id, |migration| migration.state == "syncing").await;
    bench.planner.cancel_migration(&asked.id).await.unwrap();
    let seen: Vec<v1::Migration> = changes.map(|change| change.unwrap()).collect().await;
    assert_eq!(seen.first().unwrap().phase, "admitted");
    assert_eq!(seen.last().unwrap().phase, "aborted");
    assert!(seen.is_sorted_by_key(|migration| migration.seq));
}

#[tokio::test]
async fn what_keeps_the_vm_and_what_keeps_the_host_are_told_together() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.block_source("disk_not_shared", "disk0 is local");
    bench.world.block("b", "missing_bridge", "no bridge br0");
    let asked = |target: &str| v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        target_host: target.to_owned(),
        ..v1::MigrateVmRequest::default()
    };
    for (target, expected) in
        [("b", &["disk_not_shared", "missing_bridge"][..]), ("", &["disk_not_shared"][..])]
    {
        let error = bench.planner.migrate_vm(asked(target)).await.unwrap_err();
        let codes: Vec<&str> = error.blockers().iter().map(|of| of.code.as_str()).collect();
        assert_eq!(codes, expected);
    }
}
