//! What has no room waits, says why, and is served when there is some.

use serde_json::json;
use vmferry_proto::v1;

use crate::bench::{Bench, definition, found, until};

fn start(name: &str, of: u128) -> v1::StartVmRequest {
    v1::StartVmRequest { definition: definition(name, of), ..v1::StartVmRequest::default() }
}

/// Fills one host with what fits: three VMs.
async fn full(bench: &Bench) {
    for of in 1..=3 {
        bench.start(&format!("web{of}"), of, "a").await;
    }
    bench.report(&["a"]).await;
}

async fn stop(bench: &Bench, vm: &str) {
    let asked = v1::StopVmRequest {
        vm: vm.to_owned(),
        how: "quit".to_owned(),
        wait_ms: 10_000,
        ..v1::StopVmRequest::default()
    };
    bench.planner.stop_vm(asked).await.unwrap();
}

#[tokio::test]
async fn a_start_without_room_waits_and_starts_once_there_is_some() {
    let bench = Bench::new(&["a"]).await;
    full(&bench).await;
    let waits = bench.planner.start_vm(start("late", 7)).await.unwrap();
    let entry = waits.queued.unwrap();
    assert_eq!((waits.power.as_str(), entry.position, entry.of), ("stopped", 1, 1));
    assert!(entry.note.contains("fleet_at_capacity") && entry.note.contains("needed"), "{entry:?}");
    let since = entry.blocked_since.clone();
    // Asked again it is the same one, and it is kept over a restart.
    let again = bench.planner.start_vm(start("late", 7)).await.unwrap();
    assert_eq!(again.queued.unwrap().id, entry.id);
    let bench = bench.restart().await;
    bench.report(&["a"]).await;
    let queue = bench.planner.list_queue().await.unwrap().entries;
    assert_eq!((queue.len(), &queue[0].blocked_since), (1, &since));
    assert!(queue[0].words.contains("1 of 1 in the queue"), "{}", queue[0].words);

    stop(&bench, "web2").await;
    bench.report(&["a"]).await;
    let world = bench.world.clone();
    until(|| world.running(&waits.id) == ["a"]).await;
    assert!(bench.planner.list_queue().await.unwrap().entries.is_empty());
}

#[tokio::test]
async fn a_start_that_waits_is_given_up_by_a_stop_or_its_deadline() {
    let bench = Bench::new(&["a"]).await;
    full(&bench).await;
    bench.planner.start_vm(start("late", 7)).await.unwrap();
    stop(&bench, "late").await;
    let late = bench.planner.get_vm("late").await.unwrap();
    assert!(late.queued.is_none() && late.power == "stopped");
    let short = v1::StartVmRequest { queue_deadline_ms: 1, ..start("short", 8) };
    bench.planner.start_vm(short).await.unwrap();
    let ended = found(async || {
        let vm = bench.planner.get_vm("short").await.unwrap();
        vm.queued.is_none().then_some(vm)
    })
    .await;
    assert!(ended.error.starts_with("capacity_wait_expired"), "{}", ended.error);
}

#[tokio::test]
async fn who_fits_is_not_held_up_by_an_older_one_that_does_not() {
    let bench = Bench::new(&["a"]).await;
    full(&bench).await;
    let large = definition("large", 7).replace("896MiB", "2GiB");
    let large = v1::StartVmRequest { definition: large, ..v1::StartVmRequest::default() };
    let large = bench.planner.start_vm(large).await.unwrap();
    assert!(large.queued.is_some());
    let small = bench.planner.start_vm(start("small", 8)).await.unwrap();
    assert_eq!(small.queued.unwrap().position, 2);
    stop(&bench, "web1").await;
    bench.report(&["a"]).await;
    let world = bench.world.clone();
    until(|| world.running(&small.id) == ["a"]).await;
    let queue = bench.planner.list_queue().await.unwrap().entries;
    assert_eq!((queue.len(), queue[0].vm_name.as_str()), (1, "large"));
}

#[tokio::test]
async fn what_no_host_could_ever_take_does_not_wait() {
    let bench = Bench::new(&["a"]).await;
    let text = format!("{}required_labels = {{ rack = \"9\" }}\n", definition("never", 7));
    let asked = v1::StartVmRequest { definition: text, ..v1::StartVmRequest::default() };
    let refused = bench.planner.start_vm(asked).await.unwrap_err();
    assert_eq!(refused.code(), "blocked");
    assert!(bench.planner.list_queue().await.unwrap().entries.is_empty());
}

#[tokio::test]
async fn what_waits_is_told_why_a_host_with_room_does_not_take_it() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.memory("b", 1 << 30);
    bench.world.block("c", "missing_bridge", "no bridge br7");
    bench.report(&["a", "b", "c"]).await;
    let asked = bench.migrate("web1", "").await;
    assert_eq!((asked.state.as_str(), asked.phase.as_str()), ("pending", "queued"));
    let note = &asked.capacity_note;
    assert!(note.contains("b: ") && note.contains("c: no bridge br7"), "{note}");
    // The bridge was made.
    bench.world.unblock("c");
    assert_eq!(bench.ended(&asked.id).await.state, "completed");
}

#[tokio::test]
async fn a_new_vm_is_placed_by_the_same_gate_over_every_edge() {
    let bench = Bench::new(&["a"]).await;
    full(&bench).await;
    let body = json!({ "definition": definition("posted", 7) }).to_string();
    let (status, posted) = bench.http("POST", "/api/vms", &body).await;
    assert_eq!((status, posted["power"].as_str()), (202, Some("stopped")), "{posted}");
    assert_eq!(posted["queued"]["position"], 1, "{posted}");
    assert!(posted["queued"]["note"].as_str().unwrap().contains("fleet_at_capacity"), "{posted}");
    let mut client = bench.grpc().await;
    let called = client.start_vm(start("called", 8)).await.unwrap().into_inner();
    let entry = called.queued.unwrap();
    assert_eq!((entry.position, entry.of, entry.kind.as_str()), (2, 2, "start"));
    let text = format!("{}required_labels = {{ rack = \"9\" }}\n", definition("never", 9));
    let never = v1::StartVmRequest { definition: text.clone(), ..Default::default() };
    let refused = client.start_vm(never).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused:?}");
    let body = json!({ "definition": text }).to_string();
    let (status, refused) = bench.http("POST", "/api/vms", &body).await;
    assert_eq!((status, refused["code"].as_str()), (409, Some("blocked")), "{refused}");
    let (_, queue) = bench.http("GET", "/api/queue", "").await;
    let names: Vec<&str> = queue["entries"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|of| of["vm_name"].as_str())
        .collect();
    assert_eq!(names, ["posted", "called"]);
}

#[tokio::test]
async fn what_waits_is_told_as_waiting_by_the_doctor_and_to_monitoring() {
    let bench = Bench::new(&["a", "b"]).await;
    full(&bench).await;
    bench.world.memory("b", 512 << 20);
    bench.report(&["a", "b"]).await;
    bench.planner.start_vm(start("late", 7)).await.unwrap();
    let moved = v1::MigrateVmRequest { vm_name: "web1".to_owned(), ..Default::default() };
    bench.planner.migrate_vm(moved).await.unwrap();
    let told = bench.planner.doctor(&v1::DoctorRequest::default()).await.unwrap();
    let waits: Vec<_> = told.findings.iter().filter(|of| of.code == "waits_for_room").collect();
    let [first, second] = waits.as_slice() else { panic!("{told:#?}") };
    assert!(told.well && first.severity == "note");
    let both = [&first.message, &second.message];
    let start = both.iter().find(|text| text.starts_with("the start of VM late waits: since "));
    let start = start.unwrap_or_else(|| panic!("{both:#?}"));
    assert!(start.contains("1 of 2 in the queue") && start.contains("needed"), "{start}");
    assert!(both.iter().any(|text| text.starts_with("the migration of VM web1 waits: since ")));

    let drain = v1::DrainHostRequest { host: "a".to_owned(), by: "alice".to_owned(), policy: None };
    bench.planner.drain_host(drain).await.unwrap();
    let text = found(async || {
        let (status, text) = bench.http("GET", "/metrics", "").await;
        assert_eq!(status, 200);
        let text = text.as_str().unwrap().to_owned();
        text.contains("vmferry_emptying_vms_blocked{kind=\"drain\"} 2").then_some(text)
    })
    .await;
    for line in [
        "vmferry_emptyings_open{kind=\"drain\",state=\"EMPTYING\"} 1",
        "vmferry_emptyings_open{kind=\"maintenance\",state=\"RUNNING\"} 0",
        // One of the three waits for room by itself, and is no business of the drain.
        "vmferry_emptying_vms_left{kind=\"drain\"} 3",
        "vmferry_emptying_vms_left{kind=\"retire\"} 0",
        "vmferry_queue_waiting{kind=\"migration\",priority=\"operator\"} 1",
        "vmferry_queue_waiting{kind=\"start\",priority=\"operator\"} 1",
        "vmferry_queue_waiting{kind=\"start\",priority=\"maintenance\"} 0",
        "vmferry_queue_oldest_age_seconds{kind=\"start\",priority=\"drain\"} 0",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
