//! Cases from public bug reports that are told in words: what drains and jobs have to do.

use vmferry_proto::v1;

use crate::bench::{Bench, definition, found, until};

fn drain(host: &str) -> v1::DrainHostRequest {
    v1::DrainHostRequest { host: host.to_owned(), by: "alice".to_owned(), policy: None }
}

fn maintenance(host: &str) -> v1::MaintenanceRequest {
    v1::MaintenanceRequest { host: host.to_owned(), by: "alice".to_owned(), policy: None }
}

async fn moves_ever(bench: &Bench) -> usize {
    let all = v1::ListMigrationsRequest::default();
    bench.planner.list_migrations(&all).await.unwrap().migrations.len()
}

/// C74: a drain that is given up moves nothing any more, also after the planner was restarted.
#[tokio::test]
async fn a_drain_that_was_given_up_moves_nothing_once_there_is_room() {
    let bench = Bench::new(&["a", "b"]).await;
    for of in 1..=2 {
        bench.start(&format!("web{of}"), of, "a").await;
    }
    bench.world.memory("b", 512 << 20);
    bench.report(&["a", "b"]).await;
    let drained = bench.planner.drain_host(drain("a")).await.unwrap();
    let planner = &bench.planner;
    found(async || {
        let now = planner.get_emptying(&drained.id).await.unwrap();
        (now.blocked.len() == 2).then_some(())
    })
    .await;
    let open = v1::UncordonHostRequest { host: "a".to_owned(), by: "alice".to_owned() };
    assert!(bench.planner.uncordon_host(open).await.unwrap().cordons.is_empty());
    bench.world.memory("b", 8 << 30);
    bench.report(&["a", "b"]).await;
    let bench = bench.restart().await;
    bench.report(&["a", "b"]).await;
    // What a planner does of itself has been done by the time that it has done this.
    bench.start("web3", 3, "b").await;
    let over = bench.planner.get_emptying(&drained.id).await.unwrap();
    assert_eq!((over.state.as_str(), over.waits_for.len()), ("CANCELLED", 0));
    assert_eq!(moves_ever(&bench).await, 0);
    assert!(bench.planner.get_host("a").await.unwrap().cordons.is_empty());
}

/// C79: without room the plan says so of each VM, and a drain goes on once there is some.
#[tokio::test]
async fn a_host_whose_only_neighbour_is_full_is_emptied_once_that_has_room() {
    let bench = Bench::new(&["a", "b"]).await;
    let mut vms = Vec::new();
    for of in 1..=2 {
        vms.push(bench.start(&format!("web{of}"), of, "a").await);
    }
    bench.world.memory("b", 512 << 20);
    bench.report(&["a", "b"]).await;
    let plan = bench.planner.execute_maintenance(maintenance("a")).await.unwrap();
    let codes: Vec<&str> = plan.blocked.iter().map(|of| of.code.as_str()).collect();
    assert_eq!((plan.state.as_str(), codes), ("BLOCKED", vec!["insufficient_capacity"; 2]));
    assert!(bench.planner.get_host("a").await.unwrap().cordons.is_empty());
    let drained = bench.planner.drain_host(drain("a")).await.unwrap();
    let planner = &bench.planner;
    let since = found(async || {
        let now = planner.get_emptying(&drained.id).await.unwrap();
        (now.blocked.len() == 2).then(|| now.blocked[0].since.clone())
    })
    .await;
    assert!(!since.is_empty());
    bench.world.memory("b", 8 << 30);
    bench.report(&["b"]).await;
    let world = bench.world.clone();
    until(|| vms.iter().all(|vm| world.running(&vm.id) == ["b"])).await;
}

/// C72: asked again while it is under way, what has left is not touched again.
#[tokio::test]
async fn a_second_request_for_maintenance_moves_nothing_a_second_time() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    for of in 1..=2 {
        bench.start(&format!("web{of}"), of, "a").await;
    }
    bench.report(&["a", "b", "c"]).await;
    let job = bench.planner.execute_maintenance(maintenance("a")).await.unwrap();
    let planner = &bench.planner;
    found(async || {
        let now = planner.get_emptying(&job.id).await.unwrap();
        (now.progress.unwrap_or_default().moved > 0).then_some(())
    })
    .await;
    let again = bench.planner.execute_maintenance(maintenance("a")).await.unwrap_err();
    assert!(again.to_string().contains(&job.id), "{again}");
    found(async || {
        let now = planner.get_emptying(&job.id).await.unwrap();
        (now.state == "MAINTENANCE").then_some(())
    })
    .await;
    assert_eq!(moves_ever(&bench).await, 2);
    for name in ["web1", "web2"] {
        assert_eq!(bench.planner.get_vm(name).await.unwrap().power, "running");
    }
}

/// C113, C125: each VM that cannot leave has its own reason, in the same order each time.
#[tokio::test]
async fn every_vm_that_cannot_leave_has_its_own_reason() {
    let bench = Bench::new(&["a", "b"]).await;
    let wide = definition("wide", 1).replace("896MiB", "3GiB");
    let pinned = format!("{}pin = \"a\"\n", definition("pinned", 2));
    bench.world.memory("a", 16 << 30);
    bench.world.memory("b", 2 << 30);
    bench.report(&["a", "b"]).await;
    for text in [wide, pinned, definition("fits", 3)] {
        let asked = v1::StartVmRequest {
            definition: text,
            host: "a".to_owned(),
            wait_ms: 10_000,
            ..v1::StartVmRequest::default()
        };
        bench.planner.start_vm(asked).await.unwrap();
    }
    bench.report(&["a", "b"]).await;
    for _ in 0..2 {
        let plan = bench.planner.plan_maintenance(maintenance("a")).await.unwrap();
        let told: Vec<(&str, &str)> =
            plan.blocked.iter().map(|of| (of.vm_name.as_str(), of.code.as_str())).collect();
        assert_eq!(told, [("wide", "insufficient_capacity"), ("pinned", "pinned_to_source")]);
        assert_eq!(plan.moves.len(), 1);
        assert!(plan.blocked.iter().all(|of| !of.fix.is_empty()));
    }
}
