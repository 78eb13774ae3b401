//! Hosts, their reports, and VMs.

use vmferry_proto::v1;

use crate::bench::{Bench, until};
use crate::world::World;

#[tokio::test]
async fn a_host_with_anothers_name_is_told_so() {
    let bench = Bench::new(&["a", "b"]).await;
    let mut report = bench.world.report("b");
    report.name = "host-a".to_owned();
    let reply = bench.planner.report(report).await.unwrap();
    assert!(reply.refused.contains("host b") && reply.refused.contains("host a"), "{reply:?}");
}

#[tokio::test]
async fn two_agents_under_one_id_are_told_apart() {
    let bench = Bench::new(&["a"]).await;
    let mut second = bench.world.report("a");
    second.agent_instance = "another".to_owned();
    assert_eq!(bench.planner.report(second).await.unwrap().refused, "");
    let reply = bench.planner.report(bench.world.report("a")).await.unwrap();
    assert!(reply.refused.contains("another agent process"), "{reply:?}");
}

#[tokio::test]
async fn a_second_agent_under_a_living_hosts_id_is_not_taken_for_it() {
    let bench = Bench::new(&["a"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let mut typo = bench.world.report("a");
    typo.agent_instance = "another".to_owned();
    typo.agent_address = "elsewhere:9097".to_owned();
    typo.boot_id = "another-machine".to_owned();
    typo.vms.clear();
    let reply = bench.planner.report(typo).await.unwrap();
    assert!(reply.refused.contains("two agents must not share"), "{reply:?}");
    bench.report(&["a"]).await;
    assert_eq!(bench.planner.get_host("a").await.unwrap().agent_address, "a:9097");
    assert_eq!(bench.planner.get_vm(&vm.id).await.unwrap().power, "running");
}

#[tokio::test]
async fn a_host_that_lost_its_journal_is_told_what_it_forgot() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.start("web2", 2, "b").await;
    bench.world.lose_journal("a", &vm.id);
    let told = bench.planner.report(bench.world.report("a")).await.unwrap();
    assert!(told.generations.is_empty(), "a journal that is whole forgot nothing: {told:?}");
    let mut report = bench.world.report("a");
    report.journal_unreadable = true;
    let told = bench.planner.report(report).await.unwrap().generations;
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0].vm_id, told[0].host_id.as_str()), (&vm.id, "a"));
    assert_eq!((told[0].generation, told[0].claim), (vm.generation, vm.claim));
    // Once it knows them again, that it has nothing of the VM is shown, and moves nothing.
    let mut report = bench.world.report("a");
    report.vms.push(v1::VmReport {
        vm_id: vm.id.clone(),
        role: "absent".to_owned(),
        knowledge: v1::Knowledge::Known.into(),
        generation: vm.generation,
        claim: vm.claim,
        ..v1::VmReport::default()
    });
    bench.planner.report(report).await.unwrap();
    let shown = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((shown.power.as_str(), shown.host.as_str()), ("running", "a"));
    assert!(shown.error.contains("host a knows of no process of it"), "{}", shown.error);
}

#[tokio::test]
async fn a_host_that_lost_its_journal_is_told_of_what_left_it_lately() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let moved = bench.migrate("web1", "b").await;
    assert_eq!(bench.ended(&moved.id).await.phase, "done");
    for (host, forgot) in [("a", 1), ("c", 0)] {
        let mut report = bench.world.report(host);
        report.journal_unreadable = true;
        report.vms.clear();
        let told = bench.planner.report(report).await.unwrap().generations;
        assert_eq!(told.len(), forgot, "{host}: {told:?}");
        for known in told {
            assert_eq!((&known.vm_id, known.host_id.as_str()), (&vm.id, "b"));
            assert!(known.generation > vm.generation && known.claim > vm.claim);
        }
    }
}

#[tokio::test]
async fn hostile_reports_are_refused() {
    let bench = Bench::new(&["a"]).await;
    for spoil in [
        |report: &mut v1::HostReport| report.host_id = "../a".to_owned(),
        |report: &mut v1::HostReport| report.host_id.clear(),
        |report: &mut v1::HostReport| report.agent_address.clear(),
        |report: &mut v1::HostReport| report.agent_instance.clear(),
        |report: &mut v1::HostReport| report.name = "x".repeat(300),
    ] {
        let mut report = bench.world.report("a");
        spoil(&mut report);
        assert_ne!(bench.planner.report(report).await.unwrap().refused, "");
    }
}

#[tokio::test]
async fn a_planner_with_an_empty_store_learns_from_reports() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let fresh = Bench::new(&[]).await;
    let reply = fresh.planner.report(bench.world.report("a")).await.unwrap();
    assert_eq!(reply.generations.len(), 1);
    let adopted = fresh.planner.get_vm("web1").await.unwrap();
    assert_eq!(adopted.id, vm.id);
    assert_eq!((adopted.host.as_str(), adopted.power.as_str()), ("a", "running"));
    assert_eq!((adopted.generation, adopted.claim), (vm.generation, vm.claim));
}

#[tokio::test]
async fn a_vm_that_two_hosts_report_is_shown_so() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let mut report = bench.world.report("b");
    report.vms = bench.world.report("a").vms;
    bench.planner.report(report).await.unwrap();
    let shown = bench.planner.get_vm(&vm.id).await.unwrap();
    assert_eq!(shown.host, "a");
    assert!(shown.error.contains("host b reports it as running"), "{}", shown.error);
}

#[tokio::test]
async fn a_vm_is_lost_by_proof_and_never_by_silence() {
    let bench = Bench::new(&["a"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let mut report = bench.world.report("a");
    report.vms.clear();
    bench.planner.report(report).await.unwrap();
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
    bench.world.kill("a", &vm.id);
    bench.report(&["a"]).await;
    let lost = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!(lost.power, "lost");
    assert!(lost.error.contains("signal 9"), "{}", lost.error);
    bench.start("web1", 1, "a").await;
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().error, "");
}

#[tokio::test]
async fn a_guest_that_turned_itself_off_is_stopped_and_not_lost() {
    let bench = Bench::new(&["a"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.kill("a", &vm.id);
    for _ in 0..2 {
        let mut report = bench.world.report("a");
        for told in &mut report.vms {
            "shutdown".clone_into(&mut told.guest_end);
        }
        bench.planner.report(report).await.unwrap();
        let shown = bench.planner.get_vm("web1").await.unwrap();
        assert_eq!((shown.power.as_str(), shown.error.as_str()), ("stopped", ""));
    }
    bench.start("web1", 1, "a").await;
}

#[tokio::test]
async fn what_a_report_said_of_an_end_counts_for_no_process_started_since() {
    let bench = Bench::new(&["a"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.kill("a", &vm.id);
    let mut report = bench.world.report("a");
    for told in &mut report.vms {
        "shutdown".clone_into(&mut told.guest_end);
        told.gone.as_mut().unwrap().pid += 1;
    }
    bench.planner.report(report).await.unwrap();
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "lost");
}

#[tokio::test]
async fn a_vm_stops_and_starts_again_under_its_generation() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "b").await;
    let stop = v1::StopVmRequest {
        vm: vm.id.clone(),
        how: "quit".to_owned(),
        wait_ms: 10_000,
        ..v1::StopVmRequest::default()
    };
    let stopped = bench.planner.stop_vm(stop.clone()).await.unwrap();
    assert_eq!((stopped.power.as_str(), stopped.host.as_str()), ("stopped", "b"));
    assert!(bench.world.running(&vm.id).is_empty());
    assert_eq!(bench.planner.stop_vm(stop).await.unwrap().power, "stopped");
    let start = |host: &str| v1::StartVmRequest {
        vm: "web1".to_owned(),
        host: host.to_owned(),
        wait_ms: 10_000,
        ..v1::StartVmRequest::default()
    };
    // Its last host is preferred, though the other has as much room.
    let again = bench.planner.start_vm(start("")).await.unwrap();
    assert_eq!((again.host.as_str(), again.generation), ("b", vm.generation));
    assert!(again.claim > vm.claim);
}

#[tokio::test]
async fn a_vm_whose_host_forgot_it_is_not_stopped_by_that() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.lose_journal("a", &vm.id);
    let stop = v1::StopVmRequest {
        vm: vm.id.clone(),
        how: "quit".to_owned(),
        wait_ms: 10_000,
        ..v1::StopVmRequest::default()
    };
    let error = bench.planner.stop_vm(stop).await.unwrap_err();
    assert!(error.to_string().contains("the journal does not know"), "{error}");
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
    // Nor can it be started elsewhere: its guest runs.
    let elsewhere = v1::StartVmRequest {
        vm: "web1".to_owned(),
        host: "b".to_owned(),
        ..v1::StartVmRequest::default()
    };
    assert!(bench.planner.start_vm(elsewhere).await.is_err());
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_vm_that_fits_nowhere_now_waits_and_is_told_the_figures() {
    let bench = Bench::new(&["a"]).await;
    let asked = v1::StartVmRequest {
        definition: crate::bench::definition("big", 9).replace("896MiB", "64GiB"),
        ..v1::StartVmRequest::default()
    };
    let entry = bench.planner.start_vm(asked).await.unwrap().queued.unwrap();
    assert!(entry.note.contains("64.3 GiB of memory needed, 3.5 GiB free"), "{entry:?}");
}

#[tokio::test]
async fn reports_wake_what_waits_for_hosts() {
    let bench = Bench::new(&[]).await;
    let elsewhere = World::new(&["z"]);
    bench.planner.report(elsewhere.report("z")).await.unwrap();
    let hosts = bench.planner.list_hosts().await.unwrap().hosts;
    assert_eq!(hosts.len(), 1);
    assert_eq!((hosts[0].status.as_str(), hosts[0].name.as_str()), ("connected", "host-z"));
    assert_eq!(hosts[0].free_memory_bytes, (4 << 30) - (4_u64 << 30).div_ceil(10));
    assert_eq!(bench.planner.get_host("host-z").await.unwrap().id, "z");
    until(|| bench.planner.parts.inventory.resolve("z").is_some()).await;
}
