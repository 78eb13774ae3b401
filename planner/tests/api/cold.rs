//! Moves whose guest is shut down, or was off, from request to end.

use vmferry_proto::v1;

use crate::bench::Bench;
use crate::world::Pace;

fn asked() -> v1::MigrateVmRequest {
    v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        method: "cold".to_owned(),
        allow_shutdown: true,
        ..v1::MigrateVmRequest::default()
    }
}

#[tokio::test]
async fn a_guest_is_shut_down_only_where_that_was_granted() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let ungranted = v1::MigrateVmRequest { allow_shutdown: false, ..asked() };
    let refused = bench.planner.migrate_vm(ungranted).await.unwrap_err();
    assert!(refused.to_string().contains("allow_shutdown"), "{refused}");
    assert_eq!(bench.world.commands().len(), 1, "nothing was asked of any agent");
    let granted = v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        migration_type: "offline".to_owned(),
        ..v1::MigrateVmRequest::default()
    };
    let opened = bench.planner.migrate_vm(granted).await.unwrap();
    assert_eq!(bench.ended(&opened.id).await.method, "cold");
}

#[tokio::test]
async fn a_guest_that_is_shut_down_is_started_at_its_destination() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let opened = bench.planner.migrate_vm(asked()).await.unwrap();
    let done = bench.ended(&opened.id).await;
    assert_eq!((done.phase.as_str(), done.method.as_str()), ("done", "cold"), "{done:?}");
    assert_eq!(done.migration_type, "offline");
    assert_eq!(
        bench.world.commands()[1..],
        ["shut_down_guest@a", "start_receiver@b", "continue_destination@b", "release_source@a"]
    );
    assert_eq!(bench.world.running(&vm.id), ["b"]);
    let moved = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((moved.host.as_str(), moved.power.as_str()), ("b", "running"));
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_guest_that_ignores_its_power_button_runs_on_and_the_move_says_so() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let soon = v1::MigrateVmRequest { shutdown_limit_ms: 300, ..asked() };
    let opened = bench.planner.migrate_vm(soon).await.unwrap();
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.state.as_str()), ("aborted", "failed"));
    assert!(ended.error.starts_with("shutdown_refused"), "{}", ended.error);
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_guest_that_heard_too_late_that_it_need_not_is_started_again() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let opened = bench.planner.migrate_vm(asked()).await.unwrap();
    bench
        .see(&opened.id, |_| bench.world.commands().iter().any(|c| c == "shut_down_guest@a"))
        .await;
    bench.planner.cancel_migration(&opened.id).await.unwrap();
    bench.see(&opened.id, |seen| seen.phase == "rolling_back").await;
    bench.world.shut_down("a", &vm.id);
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.state.as_str()), ("aborted", "cancelled"));
    assert!(bench.world.commands().iter().any(|command| command == "start_vm@a"));
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_guest_whose_destination_cannot_start_it_is_started_again_where_it_was() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.refuse("start_receiver", "disk_in_use");
    let opened = bench.planner.migrate_vm(asked()).await.unwrap();
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.state.as_str()), ("aborted", "failed"));
    assert!(ended.error.contains("disk_in_use"), "{}", ended.error);
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    let vm = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((vm.host.as_str(), vm.power.as_str()), ("a", "running"));
}

#[tokio::test]
async fn a_planner_that_restarts_goes_on_with_a_guest_that_is_off() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let opened = bench.planner.migrate_vm(asked()).await.unwrap();
    bench
        .see(&opened.id, |_| bench.world.commands().iter().any(|c| c == "shut_down_guest@a"))
        .await;
    let bench = bench.restart().await;
    bench.world.shut_down("a", &vm.id);
    let done = bench.ended(&opened.id).await;
    assert_eq!(done.phase, "done");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn of_a_stopped_vm_only_the_definition_moves() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let stop = v1::StopVmRequest {
        vm: "web1".to_owned(),
        how: "quit".to_owned(),
        wait_ms: 10_000,
        ..v1::StopVmRequest::default()
    };
    bench.planner.stop_vm(stop).await.unwrap();
    let asked = v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        target_host: "b".to_owned(),
        ..v1::MigrateVmRequest::default()
    };
    let opened = bench.planner.migrate_vm(asked).await.unwrap();
    let done = bench.ended(&opened.id).await;
    assert_eq!((done.phase.as_str(), done.method.as_str()), ("done", "cold"), "{done:?}");
    assert_eq!(bench.world.running(&vm.id), [""; 0]);
    let moved = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((moved.host.as_str(), moved.power.as_str()), ("b", "stopped"));
    assert!(moved.generation > vm.generation);
}

#[tokio::test]
async fn what_qemu_bars_from_moving_is_shut_down_where_that_was_granted() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.block_source("qemu_blocked", "non-migratable device: 0000:00:02.0/nvme");
    let live = |downgrade: &str| v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        downgrade: downgrade.to_owned(),
        ..v1::MigrateVmRequest::default()
    };
    let refused = bench.planner.migrate_vm(live("snapshot")).await.unwrap_err();
    assert!(refused.to_string().contains("non-migratable device"), "{refused}");
    let opened = bench.planner.migrate_vm(live("cold")).await.unwrap();
    let done = bench.ended(&opened.id).await;
    assert_eq!((done.phase.as_str(), done.method.as_str()), ("done", "cold"));
    assert_eq!(done.downgraded_from, "precopy");
    assert!(done.downgrade_cause.contains("nvme"), "{}", done.downgrade_cause);
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}
