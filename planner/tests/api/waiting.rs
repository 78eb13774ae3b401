//! What has no room waits, says why, and is served when there is some.

use vmferry_proto::v1;

use crate::bench::{Bench, definition, until};

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
    let planner = &bench.planner;
    let ended = async {
        loop {
            let vm = planner.get_vm("short").await.unwrap();
            if vm.queued.is_none() {
                return vm;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(std::time::Duration::from_secs(10), ended).await.unwrap();
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
