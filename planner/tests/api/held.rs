//! Moves whose guest is held still, from request to end.

use vmferry_proto::v1;

use crate::bench::Bench;
use crate::world::Pace;

fn asked(method: &str, downgrade: &str) -> v1::MigrateVmRequest {
    v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        method: method.to_owned(),
        downgrade: downgrade.to_owned(),
        ..v1::MigrateVmRequest::default()
    }
}

#[tokio::test]
async fn a_guest_is_held_before_anything_is_sent_where_that_was_asked_for() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let opened = bench.planner.migrate_vm(asked("snapshot", "")).await.unwrap();
    let done = bench.ended(&opened.id).await;
    assert_eq!((done.phase.as_str(), done.method.as_str()), ("done", "snapshot"));
    assert_eq!(done.downgraded_from, "");
    assert_eq!(
        bench.world.commands()[1..],
        [
            "arm_receiver@b",
            "hold_guest@a",
            "start_transfer@a",
            "order_switchover@a",
            "continue_destination@b",
            "release_source@a"
        ]
    );
    assert!(done.pause_us > 0, "it is told how long the guest stood still");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn a_live_move_that_is_refused_goes_on_held_in_its_row() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Hopeless);
    let opened = bench.planner.migrate_vm(asked("", "snapshot")).await.unwrap();
    let done = bench.ended(&opened.id).await;
    assert_eq!((done.phase.as_str(), done.method.as_str()), ("done", "snapshot"));
    assert_eq!(done.downgraded_from, "precopy");
    assert!(done.downgrade_cause.contains("the transfer failed"), "{}", done.downgrade_cause);
    assert_eq!(
        bench.world.commands()[1..],
        [
            "arm_receiver@b",
            "start_transfer@a",
            // It failed and the guest runs: nothing is left to be taken back.
            "destroy_receiver@b",
            "arm_receiver@b",
            "hold_guest@a",
            "start_transfer@a",
            "order_switchover@a",
            "continue_destination@b",
            "release_source@a"
        ]
    );
    let notes: Vec<&str> = done.log.iter().map(|entry| entry.note.as_str()).collect();
    for told in ["was refused, the guest will be held", "goes on as snapshot", "held still"] {
        assert!(notes.iter().any(|note| note.contains(told)), "{told}: {notes:?}");
    }
    assert_eq!(bench.world.running(&vm.id), ["b"]);
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_live_move_that_is_refused_ends_where_nobody_allowed_more() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Hopeless);
    for downgrade in ["", "never"] {
        let opened = bench.planner.migrate_vm(asked("", downgrade)).await.unwrap();
        let ended = bench.ended(&opened.id).await;
        assert_eq!((ended.phase.as_str(), ended.method.as_str()), ("aborted", "precopy"));
        assert_eq!((ended.downgraded_from.as_str(), ended.downgrade_cause.as_str()), ("", ""));
        assert_eq!(bench.world.running(&vm.id), ["a"]);
    }
    let unknown = bench.planner.migrate_vm(asked("", "freeze")).await.unwrap_err();
    assert!(unknown.to_string().contains("downgrade"), "{unknown}");
}

#[tokio::test]
async fn a_planner_that_restarts_goes_on_with_a_guest_that_is_held() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let opened = bench.planner.migrate_vm(asked("snapshot", "")).await.unwrap();
    let crossing = |seen: &v1::Migration| seen.phase == "captured" && seen.state == "syncing";
    bench.see(&opened.id, crossing).await;
    assert_eq!(bench.world.running(&vm.id), [""; 0]);
    let bench = bench.restart().await;
    bench.see(&opened.id, crossing).await;
    bench.planner.cancel_migration(&opened.id).await.unwrap();
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.state.as_str()), ("aborted", "cancelled"));
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_guest_that_is_held_while_nothing_can_be_sent_is_brought_back() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    // Its agent answers all the time, so no limit of its own lets the guest go on.
    for code in ["unresponsive", "learning"] {
        bench.world.refuse("start_transfer", code);
        let opened = bench.planner.migrate_vm(asked("snapshot", "")).await.unwrap();
        bench.see(&opened.id, |seen| seen.phase == "captured").await;
        assert_eq!(bench.world.running(&vm.id), [""; 0]);
        let ended = bench.ended(&opened.id).await;
        assert_eq!((ended.phase.as_str(), ended.state.as_str()), ("aborted", "failed"));
        assert!(ended.error.contains("within its time limit"), "{}", ended.error);
        assert_eq!(bench.world.running(&vm.id), ["a"]);
        let tried = bench.world.commands();
        assert!(tried.contains(&"start_transfer@a".to_owned()), "{tried:?}");
    }
    bench.world.refuse_nothing();
    let opened = bench.planner.migrate_vm(asked("snapshot", "")).await.unwrap();
    assert_eq!(bench.ended(&opened.id).await.phase, "done");
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}
