//! How many of a host's VMs are on their way at once, and who waits for what meanwhile.

use tonic::transport::Channel;
use vmferry_proto::v1;
use vmferry_proto::v1::planner_client::PlannerClient;

use crate::bench::{Bench, definition, found, until};
use crate::world::Pace;

const MIB: u64 = 1 << 20;

async fn maintain(bench: &Bench, max_parallel: u32) -> v1::Emptying {
    let policy = v1::MaintenancePolicy {
        max_parallel: Some(max_parallel),
        ..v1::MaintenancePolicy::default()
    };
    let asked = v1::MaintenanceRequest {
        host: "a".to_owned(),
        by: "alice".to_owned(),
        policy: Some(policy),
    };
    bench.planner.execute_maintenance(asked).await.unwrap()
}

async fn start(bench: &Bench, name: &str, of: u128, mib: u64) -> v1::Vm {
    let text = definition(name, of).replace("896MiB", &format!("{mib}MiB"));
    let asked = v1::StartVmRequest {
        definition: text,
        host: "a".to_owned(),
        wait_ms: 10_000,
        ..v1::StartVmRequest::default()
    };
    bench.planner.start_vm(asked).await.unwrap()
}

fn count(bench: &Bench, what: &str) -> usize {
    bench.world.commands().iter().filter(|of| of.starts_with(what)).count()
}

fn of_vm<'a>(job: &'a v1::Emptying, name: &str) -> &'a v1::EmptyingMove {
    job.moves.iter().find(|one| one.vm_name == name).unwrap()
}

/// A job of three VMs, of which the first is on its way to the only host there is, and the second
/// has no room any more since that host has less memory than it had.
async fn one_without_room(bench: &Bench) -> v1::Emptying {
    for (host, mib) in [("a", 16_384), ("b", 16_384)] {
        bench.world.memory(host, mib * MIB);
    }
    bench.report(&["a", "b"]).await;
    for (name, of, mib) in [("first", 1, 4096), ("wide", 2, 3072), ("small", 3, 896)] {
        start(bench, name, of, mib).await;
    }
    bench.report(&["a", "b"]).await;
    bench.world.pace(Pace::Endless);
    let job = maintain(bench, 1).await;
    assert_eq!(job.state, "RUNNING", "{job:#?}");
    until(|| count(bench, "start_transfer") == 1).await;
    // After the first there is room for a small one, and for no wide one.
    bench.world.memory("b", 7_168 * MIB);
    bench.report(&["a", "b"]).await;
    bench.world.let_through();
    job
}

#[tokio::test]
async fn a_migration_of_a_job_that_waits_for_room_holds_back_no_other() {
    let bench = Bench::new(&["a", "b"]).await;
    let job = one_without_room(&bench).await;
    // The second waits in the queue; the third goes though only one may be under way.
    until(|| count(&bench, "start_transfer") == 2).await;
    let queue = bench.planner.list_queue().await.unwrap().entries;
    assert_eq!((queue.len(), queue[0].vm_name.as_str()), (1, "wide"), "{queue:#?}");
    assert_eq!(queue[0].priority, "maintenance");
    let now = bench.planner.get_emptying(&job.id).await.unwrap();
    assert!(now.waits_for.iter().any(|of| of.starts_with("room for VM wide")), "{now:#?}");
    assert_eq!(of_vm(&now, "small").state, "running");
    assert_eq!(of_vm(&now, "wide").state, "queued");
    let progress = now.progress.unwrap();
    assert_eq!((progress.moved, progress.running, progress.waiting, progress.total), (1, 1, 1, 3));
    // Its migration says itself where it stands.
    let of = bench.planner.get_migration(&queue[0].id).await.unwrap();
    assert_eq!((of.queued.unwrap().position, of.emptying_id), (1, job.id));
}

#[tokio::test]
async fn no_more_of_a_job_are_under_way_than_may_be_when_room_comes_back() {
    let bench = Bench::new(&["a", "b"]).await;
    let job = one_without_room(&bench).await;
    until(|| count(&bench, "start_transfer") == 2).await;
    bench.world.memory("b", 16_384 * MIB);
    bench.report(&["a", "b"]).await;
    let planner = &bench.planner;
    let note = found(async || {
        let queue = planner.list_queue().await.unwrap().entries;
        let note = queue.first().map(|of| of.note.clone()).unwrap_or_default();
        note.starts_with("max_parallel: 1 of 1").then_some(note)
    })
    .await;
    assert!(note.contains(&job.id), "{note}");
    assert_eq!(count(&bench, "arm_receiver"), 2, "one at a time");
    bench.world.pace(Pace::Quick);
    bench.world.let_through();
    let done = found(async || {
        let job = planner.get_emptying(&job.id).await.unwrap();
        (job.state == "MAINTENANCE").then_some(job)
    })
    .await;
    assert!(done.moves.iter().all(|one| one.state == "done" && one.target_host == "b"));
}

#[tokio::test]
async fn a_host_says_itself_how_many_leave_it_at_once() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    for of in 1..=3 {
        bench.start(&format!("web{of}"), of, "a").await;
    }
    bench.world.outbound_max("a", 1);
    bench.report(&["a", "b", "c"]).await;
    bench.world.pace(Pace::Endless);
    maintain(&bench, 3).await;
    until(|| count(&bench, "arm_receiver") == 3 && count(&bench, "start_transfer") == 1).await;
    let planner = &bench.planner;
    let waits = found(async || {
        let open = v1::ListMigrationsRequest { open: true, ..Default::default() };
        let all = planner.list_migrations(&open).await.unwrap().migrations;
        let waits: Vec<String> =
            all.into_iter().map(|of| of.waits_for_link).filter(|of| !of.is_empty()).collect();
        (waits.len() == 2).then_some(waits)
    })
    .await;
    assert!(waits.iter().all(|of| of.contains("1 of 1 transferring from a")), "{waits:?}");
    assert_eq!(count(&bench, "start_transfer"), 1);
}

#[tokio::test]
async fn how_far_a_job_is_is_told_in_vms_bytes_and_time_over_every_edge() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    for of in 1..=3 {
        bench.start(&format!("web{of}"), of, "a").await;
    }
    bench.report(&["a", "b", "c"]).await;
    bench.world.pace(Pace::Endless);
    let job = maintain(&bench, 1).await;
    let mut client = bench.grpc().await;
    let shown = async |client: &mut PlannerClient<Channel>| {
        let asked = v1::GetEmptyingRequest { id: job.id.clone() };
        client.get_emptying(asked).await.unwrap().into_inner().progress.unwrap()
    };
    until(|| count(&bench, "start_transfer") == 1).await;
    let mut ticks = tokio::time::interval(std::time::Duration::from_millis(20));
    let looking = async {
        loop {
            let seen = shown(&mut client).await;
            if seen.bytes_per_second > 0 {
                return seen;
            }
            ticks.tick().await;
        }
    };
    let bound = std::time::Duration::from_secs(20);
    let seen = tokio::time::timeout(bound, looking).await.unwrap();
    assert_eq!((seen.total, seen.moved, seen.running, seen.waiting), (3, 0, 1, 2));
    assert_eq!((seen.bytes_transferred, seen.bytes_per_second), (1 << 19, 1 << 18));
    // Three of 1 GiB, of which none has left.
    assert_eq!((seen.bytes_total, seen.remaining_ms), (3 << 30, (3 << 30) * 1000 / (1 << 18)));
    let (status, job) = bench.http("GET", &format!("/api/maintenance/jobs/{}", job.id), "").await;
    assert_eq!((status, &job["progress"]["bytes_per_second"]), (200, &(1 << 18).into()), "{job}");
    assert_eq!(job["progress"]["remaining_ms"], seen.remaining_ms);
}
