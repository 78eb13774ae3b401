//! The planner dies at each commit of what empties a host, and of what waits: the end is the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::task::JoinSet;
use vmferry_planner::api::ApiError;
use vmferry_planner::planner::Planner;
use vmferry_proto::v1;

use crate::bench::{Bench, definition, found, until};
use crate::world::Pace;

/// Either side of a commit.
const SIDES: [&str; 2] = ["before_commit", "after_commit"];

/// Points that no planner comes to: a job is planned, and begun, in the transaction that opens it.
const NEVER: [&str; 2] = ["job_planned", "job_running"];

const OF_JOBS: [&str; 4] = ["job_opened", "emptying_begun", "job_verifying", "job_maintenance"];
const OF_RETIREMENTS: [&str; 3] = ["drain_opened", "emptying_begun", "drain_granted"];
const OF_CANCELLED_JOBS: [&str; 2] = ["job_stopping", "job_cancelled"];

/// Holds the planner at a point while it does what is asked of it, and lets it die there.
async fn dies_at<F>(bench: Bench, point: &str, act: impl FnOnce(Arc<Planner>) -> F) -> Bench
where
    F: Future<Output = Result<v1::Emptying, ApiError>> + Send + 'static,
{
    let hold = bench.points().join(format!("{point}.hold"));
    let reached = bench.points().join(format!("{point}.reached"));
    std::fs::write(&hold, "").unwrap();
    let mut asked = JoinSet::new();
    asked.spawn(act(Arc::clone(&bench.planner)));
    until(|| reached.exists()).await;
    asked.shutdown().await;
    let bench = bench.restart().await;
    std::fs::remove_file(&reached).unwrap();
    std::fs::remove_file(&hold).unwrap();
    let alive: Vec<&str> = bench.hosts.iter().map(String::as_str).collect();
    bench.report(&alive).await;
    bench
}

/// What is asked of the planner in no step.
async fn nothing(_: Arc<Planner>) -> Result<v1::Emptying, ApiError> {
    Ok(v1::Emptying::default())
}

fn maintenance() -> v1::MaintenanceRequest {
    v1::MaintenanceRequest { host: "a".to_owned(), by: "alice".to_owned(), policy: None }
}

fn drain() -> v1::DrainHostRequest {
    v1::DrainHostRequest { host: "a".to_owned(), by: "alice".to_owned(), policy: None }
}

fn cancel(id: &str) -> v1::CancelEmptyingRequest {
    v1::CancelEmptyingRequest { id: id.to_owned(), by: "alice".to_owned() }
}

async fn two_on_a() -> (Bench, Vec<v1::Vm>) {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let mut vms = Vec::new();
    for of in 1..=2 {
        vms.push(bench.start(&format!("web{of}"), of, "a").await);
    }
    bench.report(&["a", "b", "c"]).await;
    (bench, vms)
}

async fn see(bench: &Bench, state: &str) -> v1::Emptying {
    let asked = v1::ListEmptyingsRequest::default();
    let newest = async || bench.planner.list_emptyings(&asked).await.unwrap().emptyings.pop();
    found(async || newest().await.filter(|of| of.state == state)).await
}

/// Where VMs are to run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Run {
    OnA,
    Elsewhere,
}

/// Every VM runs once, and nothing is held any more.
async fn settled(bench: &Bench, vms: &[v1::Vm], there: Run) {
    let planner = &bench.planner;
    let open = v1::ListMigrationsRequest { open: true, ..Default::default() };
    found(async || {
        let open = planner.list_migrations(&open).await.unwrap().migrations;
        (open.is_empty() && planner.store().reservations().await.unwrap().is_empty()).then_some(())
    })
    .await;
    for vm in vms {
        let runs = bench.world.running(&vm.id);
        assert!(
            runs.len() == 1 && (runs[0] == "a") == (there == Run::OnA),
            "{} runs on {runs:?}",
            vm.name
        );
    }
}

#[tokio::test]
async fn a_job_reaches_maintenance_though_its_planner_died_at_any_commit() {
    for point in OF_JOBS {
        for side in SIDES {
            let (bench, vms) = two_on_a().await;
            let bench =
                dies_at(bench, &format!("{side}.{point}"), async |planner: Arc<Planner>| {
                    planner.execute_maintenance(maintenance()).await
                })
                .await;
            if (side, point) == ("before_commit", "job_opened") {
                bench.planner.execute_maintenance(maintenance()).await.unwrap();
            }
            let job = see(&bench, "MAINTENANCE").await;
            assert!(job.moves.iter().all(|one| one.state == "done"), "{side}.{point}: {job:#?}");
            settled(&bench, &vms, Run::Elsewhere).await;
        }
    }
}

#[tokio::test]
async fn a_retirement_is_granted_though_its_planner_died_at_any_commit() {
    for point in OF_RETIREMENTS {
        for side in SIDES {
            let (bench, vms) = two_on_a().await;
            let bench =
                dies_at(bench, &format!("{side}.{point}"), async |planner: Arc<Planner>| {
                    planner.retire_host(drain()).await
                })
                .await;
            if (side, point) == ("before_commit", "drain_opened") {
                bench.planner.retire_host(drain()).await.unwrap();
            }
            see(&bench, "GRANTED").await;
            settled(&bench, &vms, Run::Elsewhere).await;
        }
    }
}

#[tokio::test]
async fn a_cancelled_job_opens_its_host_though_its_planner_died_meanwhile() {
    for point in OF_CANCELLED_JOBS {
        for side in SIDES {
            let (bench, vms) = two_on_a().await;
            bench.world.pace(Pace::Endless);
            let job = bench.planner.execute_maintenance(maintenance()).await.unwrap();
            let world = bench.world.clone();
            until(|| world.commands().iter().any(|of| of.starts_with("start_transfer"))).await;
            let id = job.id.clone();
            let bench =
                dies_at(bench, &format!("{side}.{point}"), async move |planner: Arc<Planner>| {
                    planner.cancel_emptying(cancel(&id)).await
                })
                .await;
            if (side, point) == ("before_commit", "job_stopping") {
                bench.planner.cancel_emptying(cancel(&job.id)).await.unwrap();
            }
            see(&bench, "CANCELLED").await;
            settled(&bench, &vms, Run::OnA).await;
            assert!(bench.planner.get_host("a").await.unwrap().cordons.is_empty());
        }
    }
}

#[tokio::test]
async fn a_failed_job_leaves_its_host_cordoned_though_its_planner_died_meanwhile() {
    for side in SIDES {
        let (bench, vms) = two_on_a().await;
        bench.world.pace(Pace::Hopeless);
        let bench = dies_at(bench, &format!("{side}.job_failed"), async |planner: Arc<Planner>| {
            planner.execute_maintenance(maintenance()).await
        })
        .await;
        let job = see(&bench, "FAILED").await;
        assert!(job.error.contains("the transfer failed"), "{}", job.error);
        settled(&bench, &vms, Run::OnA).await;
        assert_eq!(bench.planner.get_host("a").await.unwrap().cordons.len(), 1);
    }
}

#[tokio::test]
async fn a_completed_job_brings_its_vms_back_though_its_planner_died_there() {
    for side in SIDES {
        let (bench, vms) = two_on_a().await;
        let job = bench.planner.execute_maintenance(maintenance()).await.unwrap();
        see(&bench, "MAINTENANCE").await;
        bench.report(&["a", "b", "c"]).await;
        let asked = v1::CompleteMaintenanceRequest {
            id: job.id.clone(),
            return_vms: true,
            by: "alice".to_owned(),
        };
        let again = asked.clone();
        let point = format!("{side}.job_completed");
        let bench = dies_at(bench, &point, async move |planner: Arc<Planner>| {
            planner.complete_maintenance(asked).await
        })
        .await;
        if side == "before_commit" {
            bench.planner.complete_maintenance(again).await.unwrap();
        }
        let planner = &bench.planner;
        found(async || {
            let job = planner.get_emptying(&job.id).await.unwrap();
            let back = job.returns.iter().filter(|one| one.state == "returned").count();
            (back == 2).then_some(())
        })
        .await;
        settled(&bench, &vms, Run::OnA).await;
    }
}

#[tokio::test]
async fn a_drained_host_is_kept_empty_though_its_planner_died_at_any_commit() {
    for side in SIDES {
        let (bench, vms) = two_on_a().await;
        let bench =
            dies_at(bench, &format!("{side}.drain_empty"), async |planner: Arc<Planner>| {
                planner.drain_host(drain()).await
            })
            .await;
        see(&bench, "EMPTY").await;
        settled(&bench, &vms, Run::Elsewhere).await;
        // Somebody's process turns up: it is not empty, and is again once that has gone.
        let stranger = vmferry_types::VmId::from_u128(77).to_string();
        bench.world.stranger("a", &stranger);
        bench.report(&["a"]).await;
        let bench = dies_at(bench, &format!("{side}.drain_emptying"), nothing).await;
        see(&bench, "EMPTYING").await;
        bench.world.end_stranger("a", &stranger);
        bench.report(&["a"]).await;
        see(&bench, "EMPTY").await;
    }
}

#[tokio::test]
async fn a_cancelled_drain_opens_its_host_though_its_planner_died_there() {
    for side in SIDES {
        let (bench, vms) = two_on_a().await;
        bench.world.pace(Pace::Endless);
        let drained = bench.planner.drain_host(drain()).await.unwrap();
        let world = bench.world.clone();
        until(|| world.commands().iter().any(|of| of.starts_with("start_transfer"))).await;
        let id = drained.id.clone();
        let point = format!("{side}.drain_cancelled");
        let bench = dies_at(bench, &point, async move |planner: Arc<Planner>| {
            planner.cancel_emptying(cancel(&id)).await
        })
        .await;
        if side == "before_commit" {
            bench.planner.cancel_emptying(cancel(&drained.id)).await.unwrap();
        }
        see(&bench, "CANCELLED").await;
        settled(&bench, &vms, Run::OnA).await;
        assert!(bench.planner.get_host("a").await.unwrap().cordons.is_empty());
    }
}

#[tokio::test]
async fn a_drain_whose_host_died_says_so_though_its_planner_died_there() {
    for side in SIDES {
        let (mut bench, _) = two_on_a().await;
        bench.world.pace(Pace::Endless);
        bench.planner.drain_host(drain()).await.unwrap();
        let world = bench.world.clone();
        until(|| world.commands().iter().any(|of| of.starts_with("start_transfer"))).await;
        bench.world.power_off("a");
        bench.hosts.retain(|host| host != "a");
        let declared = v1::DeclareHostDeadRequest {
            host: "a".to_owned(),
            confirmation: "i-have-powered-it-off".to_owned(),
            reason: "smoke".to_owned(),
            by: "alice".to_owned(),
        };
        let bench = dies_at(bench, &format!("{side}.drain_died"), async |planner: Arc<Planner>| {
            planner.declare_host_dead(declared).await.map(|_| v1::Emptying::default())
        })
        .await;
        let died = see(&bench, "DIED").await;
        assert!(died.error.contains("smoke"), "{}", died.error);
        assert_eq!(bench.planner.get_host("a").await.unwrap().cordons.len(), 1);
    }
}

#[tokio::test]
async fn a_start_that_waits_is_one_row_though_its_planner_died_there() {
    for side in SIDES {
        let bench = Bench::new(&["a"]).await;
        for of in 1..=3 {
            bench.start(&format!("web{of}"), of, "a").await;
        }
        bench.report(&["a"]).await;
        let late = v1::StartVmRequest {
            definition: definition("late", 7),
            ..v1::StartVmRequest::default()
        };
        let asked = late.clone();
        let point = format!("{side}.start_queued");
        let bench = dies_at(bench, &point, async move |planner: Arc<Planner>| {
            planner.start_vm(asked).await.map(|_| v1::Emptying::default())
        })
        .await;
        let waits = bench.planner.list_queue().await.unwrap().entries.len();
        assert_eq!(waits, usize::from(side == "after_commit"));
        let again = bench.planner.start_vm(late).await.unwrap();
        assert_eq!(again.queued.unwrap().of, 1);
    }
}

#[test]
fn each_commit_of_what_empties_a_host_is_died_at() {
    let other = [
        "job_failed",
        "job_completed",
        "drain_empty",
        "drain_emptying",
        "drain_cancelled",
        "drain_died",
        "start_queued",
    ];
    let tried: BTreeSet<&str> = [&OF_JOBS[..], &OF_RETIREMENTS, &OF_CANCELLED_JOBS, &NEVER, &other]
        .into_iter()
        .flatten()
        .copied()
        .collect();
    let all: BTreeSet<&str> = include_str!("../../src/faults_hosts.txt").lines().collect();
    assert_eq!(tried, all);
}
