//! Moves that do not converge, and limits that are changed on the way.

use vmferry_proto::v1;

use crate::bench::{Bench, until};
use crate::world::Pace;

const VERDICT: &str = "will not converge: dirties 900 MB/s over a 300 MB/s link";

fn asked(not_converging: &str, downgrade: &str) -> v1::MigrateVmRequest {
    v1::MigrateVmRequest {
        vm_name: "web1".to_owned(),
        not_converging: not_converging.to_owned(),
        downgrade: downgrade.to_owned(),
        ..v1::MigrateVmRequest::default()
    }
}

fn limits(id: &str) -> v1::SetMigrationLimitsRequest {
    v1::SetMigrationLimitsRequest {
        id: id.to_owned(),
        bandwidth_mbps: Some(8),
        downtime_limit_ms: Some(700),
    }
}

async fn crossing(bench: &Bench, request: v1::MigrateVmRequest) -> v1::Migration {
    bench.world.pace(Pace::Endless);
    let opened = bench.planner.migrate_vm(request).await.unwrap();
    until(|| bench.world.limits("a").is_some()).await;
    opened
}

#[tokio::test]
async fn what_will_not_converge_is_taken_back_at_once_with_its_cause() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let opened = crossing(&bench, asked("abort", "never")).await;
    bench.world.diverges("a", VERDICT);
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.error.as_str()), ("aborted", VERDICT));
    assert_eq!((ended.verdict.as_str(), ended.verdict_answer.as_str()), (VERDICT, "abort"));
    let notes: Vec<&str> = ended.log.iter().map(|entry| entry.note.as_str()).collect();
    assert!(notes.contains(&format!("answered by abort: {VERDICT}").as_str()), "{notes:?}");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_guest_is_held_by_pause_though_nothing_else_may_hold_it() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let opened = crossing(&bench, asked("pause", "never")).await;
    bench.world.pace(Pace::Quick);
    bench.world.diverges("a", VERDICT);
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.method.as_str()), ("done", "snapshot"));
    assert_eq!(
        (ended.downgraded_from.as_str(), ended.downgrade_cause.as_str()),
        ("precopy", VERDICT)
    );
    assert_eq!(ended.verdict_answer, "pause");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn a_guest_that_writes_too_fast_is_slowed_down_and_taken_back_if_that_is_in_vain() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let opened = crossing(&bench, asked("auto_converge", "never")).await;
    bench.world.diverges("a", VERDICT);
    // The source is told, so the verdict that still stands is another one.
    let ended = bench.ended(&opened.id).await;
    assert_eq!((ended.phase.as_str(), ended.verdict_answer.as_str()), ("aborted", "abort"));
    let answers: Vec<&str> = ended
        .log
        .iter()
        .filter(|entry| entry.event == "diverges")
        .filter_map(|entry| entry.note.split(':').next())
        .collect();
    assert_eq!(answers, ["answered by auto_converge", "answered by abort"]);
    let told = bench.world.commands().iter().filter(|sent| *sent == "set_limits@a").count();
    assert_eq!(told, 1);
}

#[tokio::test]
async fn limits_reach_the_source_once_though_the_planner_restarts() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let opened = crossing(&bench, asked("wait", "never")).await;
    bench.world.diverges("a", VERDICT);
    let set = bench.planner.set_limits(&limits(&opened.id)).await.unwrap();
    assert_eq!((set.bandwidth_limit, set.downtime_limit_ms), (1_000_000, 700));
    let bench = bench.restart().await;
    let known =
        v1::TransferLimits { max_bandwidth: 1_000_000, downtime_limit_ms: 700, throttle: false };
    until(|| bench.world.limits("a") == Some(known)).await;
    bench.planner.set_limits(&limits(&opened.id)).await.unwrap();
    let shown = bench.planner.get_migration(&opened.id).await.unwrap();
    let noted = shown.log.iter().filter(|entry| entry.event == "limits_set").count();
    assert_eq!((noted, shown.phase.as_str()), (1, "admitted"), "it waits for better times");
    let none = v1::SetMigrationLimitsRequest { id: opened.id.clone(), ..Default::default() };
    assert!(bench.planner.set_limits(&none).await.is_err());
    bench.planner.cancel_migration(&opened.id).await.unwrap();
    bench.ended(&opened.id).await;
    let late = bench.planner.set_limits(&limits(&opened.id)).await.unwrap_err();
    assert_eq!(late.code(), "too_late");
}
