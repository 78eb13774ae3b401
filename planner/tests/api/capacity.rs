//! What the fleet has left, and that no crowd gets more than that.

use futures::future::join_all;
use vmferry_planner::inventory::snapshot;
use vmferry_proto::v1;

use crate::bench::{Bench, definition, until};
use crate::planners::Database;
use crate::world::World;

const GIB: u64 = 1 << 30;

fn asked(without: &str, fit_memory_bytes: u64, fit_cpu_milli: u64) -> v1::CapacityRequest {
    v1::CapacityRequest { without: without.to_owned(), fit_memory_bytes, fit_cpu_milli }
}

#[tokio::test]
async fn the_fleet_is_told_with_what_binds_each_host() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.world.memory("a", 10 * GIB);
    bench.start("web1", 1, "a").await;
    bench.report(&["a", "b"]).await;
    let told = bench.planner.capacity(&asked("", 0, 0)).await.unwrap();
    let memory = told.hosts[0].memory.unwrap();
    assert_eq!((memory.total_bytes, memory.reserve_bytes), (10 * GIB, GIB));
    assert_eq!((memory.observed_bytes, memory.committed_bytes), (GIB, GIB));
    assert_eq!((memory.reserved_bytes, memory.free_bytes), (0, 8 * GIB));
    assert_eq!((told.hosts[0].vms, told.hosts[0].binds.as_str()), (1, "cpu"));
    let fleet = told.fleet.unwrap();
    assert_eq!((fleet.open_hosts, fleet.closed_hosts), (2, 0));
    let (status, over_rest) = bench.http("GET", "/api/capacity", "").await;
    assert_eq!(status, 200);
    assert_eq!(over_rest["hosts"][0]["memory"]["free_bytes"], 8 * GIB);
    assert_eq!(over_rest["hosts"][0]["name"], "host-a");
}

#[tokio::test]
async fn figures_that_an_agent_cannot_read_make_its_host_count_for_nothing_by_name() {
    let bench = Bench::new(&["a", "b"]).await;
    let mut report = bench.world.report("a");
    report.capacity.as_mut().unwrap().unreadable = vec!["VM web1: its memory is hidden".into()];
    bench.planner.report(report).await.unwrap();
    let told = bench.planner.capacity(&asked("", 1 << 20, 1000)).await.unwrap();
    assert!(told.hosts[0].memory.is_none());
    assert!(told.hosts[0].unreadable.contains("VM web1: its memory is hidden"), "{told:#?}");
    assert_eq!(told.hosts[0].blockers[0].code, "unreadable");
    assert!(told.warnings.iter().any(|text| text.contains("host a counts for nothing")));
    let fit = told.fit.unwrap();
    assert!(fit.count > 0 && fit.hosts.iter().all(|host| host.host == "b"));
    assert_eq!(bench.planner.get_host("a").await.unwrap().status, "unreadable");
}

#[tokio::test]
async fn whether_a_host_can_be_lost_is_told_with_each_vm_and_each_reason() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.start("web2", 2, "a").await;
    bench.world.memory("b", 2 * GIB);
    bench.report(&["a", "b"]).await;
    let told = bench.planner.capacity(&asked("host-a", 0, 0)).await.unwrap().without.unwrap();
    assert!(!told.can_be_lost && told.host == "a");
    assert_eq!((told.placed.len(), told.blocked.len()), (1, 1));
    assert_eq!((told.placed[0].vm_name.as_str(), told.placed[0].host.as_str()), ("web1", "b"));
    assert_eq!(told.blocked[0].code, "insufficient_capacity");
    assert_eq!(told.blocked[0].blockers[0].code, "memory");
    bench.world.memory("b", 4 * GIB);
    bench.report(&["b"]).await;
    let (status, told) =
        bench.http("GET", &format!("/api/capacity?without=a&fit_memory_bytes={GIB}"), "").await;
    assert_eq!(status, 200, "{told}");
    assert_eq!(told["without"]["can_be_lost"], true);
    // 3.6 GiB, less two VMs: 1.6 GiB are one more of 1 GiB and QEMU's own part.
    assert_eq!(told["fit"]["count"], 1);
    assert_eq!(bench.http("GET", "/api/capacity?without=z", "").await.0, 404);
    assert_eq!(bench.http("GET", "/api/capacity?fit_cpu_milli=1", "").await.0, 400);
    assert_eq!(bench.http("GET", "/api/capacity?colour=red", "").await.0, 400);
}

#[tokio::test]
async fn what_no_host_has_is_refused_by_its_name_and_does_not_wait() {
    let bench = Bench::new(&["a"]).await;
    for (of, (line, code)) in [
        ("machine = \"pc-q35-99.0\"", "machine_type_missing"),
        ("machine = \"q35\"\ncpu = \"Nowhere-v1\"", "cpu_model_missing"),
        ("machine = \"q35\"\n[[disk]]\npath = \"/elsewhere/x.raw\"\nshared = true", "missing_path"),
        (
            "machine = \"q35\"\n[[nic]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"br9\"",
            "missing_bridge",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let mut report = bench.world.report("a");
        let has = report.capabilities.as_mut().unwrap();
        has.cpu_models = vec!["qemu64".into()];
        has.shared_paths = Some(v1::SharedPaths { paths: vec!["/shared".into()] });
        bench.planner.report(report).await.unwrap();
        let text = definition(&format!("odd{of}"), 9 + u128::try_from(of).unwrap())
            .replace("machine = \"q35\"\n", "")
            + line;
        let asked = v1::StartVmRequest { definition: text, ..v1::StartVmRequest::default() };
        let refused = bench.planner.start_vm(asked).await.unwrap_err();
        let codes: Vec<&str> = refused.blockers().iter().map(|one| one.code.as_str()).collect();
        assert_eq!(codes, [code], "{line}");
        assert_eq!(refused.code(), "blocked");
    }
}

/// Lets a crowd ask planners for one host, which has room for six of them.
async fn crowd(benches: &[&Bench]) {
    const CROWD: u32 = 50;
    const ROOM: usize = 6;
    let first = benches[0];
    first.world.memory("a", 7 * GIB);
    for bench in benches {
        bench.report(&["a"]).await;
    }
    let asking = (0..CROWD).map(|of| {
        let bench = benches[usize::try_from(of).unwrap() % benches.len()];
        let asked = v1::StartVmRequest {
            // What the host reports of each: 1 GiB.
            definition: definition(&format!("vm{of}"), u128::from(of) + 1)
                .replace("896MiB", "950MiB"),
            host: "a".to_owned(),
            wait_ms: 10_000,
            ..v1::StartVmRequest::default()
        };
        bench.planner.start_vm(asked)
    });
    let ended = join_all(asking).await;
    let running = |vm: &v1::Vm| vm.power == "running";
    let started = ended.iter().flatten().filter(|vm| running(vm)).count();
    let world = first.world.clone();
    until(|| (1..=u128::from(CROWD)).filter(|vm| runs(&world, *vm)).count() >= started).await;
    let run = (1..=u128::from(CROWD)).filter(|vm| runs(&world, *vm)).count();
    assert_eq!(run, ROOM, "{started} were started");
    for bench in benches {
        bench.report(&["a"]).await;
        let parts = &bench.planner.parts;
        let now = vmferry_planner::clock::now();
        let fleet =
            snapshot(&parts.inventory, bench.planner.store(), &parts.config.policy, now).await;
        assert_eq!(fleet.unwrap().check(), []);
    }
}

fn runs(world: &World, vm: u128) -> bool {
    !world.running(&vmferry_types::VmId::from_u128(vm).to_string()).is_empty()
}

#[tokio::test]
async fn fifty_at_once_never_get_more_of_a_host_than_it_has() {
    let bench = Bench::new(&["a"]).await;
    crowd(&[&bench]).await;
}

#[tokio::test]
async fn fifty_at_once_never_get_more_of_a_host_than_it_has_from_two_planners() {
    let (world, database) = (World::new(&["a"]), Database::new().await);
    let one = Bench::sharing(&world, &database.url(), &["a"]).await;
    let two = Bench::sharing(&world, &database.url(), &["a"]).await;
    crowd(&[&one, &two]).await;
}
