//! Hosts that are closed, emptied, taken back and got rid of.

use vmferry_planner::clock;
use vmferry_planner::store::{Followed, VmRow};
use vmferry_proto::v1;
use vmferry_types::PowerState;

use crate::bench::{Bench, definition, found, until};
use crate::world::{Pace, Silence};

fn maintenance(host: &str) -> v1::MaintenanceRequest {
    v1::MaintenanceRequest { host: host.to_owned(), by: "alice".to_owned(), policy: None }
}

fn drain(host: &str) -> v1::DrainHostRequest {
    v1::DrainHostRequest { host: host.to_owned(), by: "alice".to_owned(), policy: None }
}

async fn emptying(bench: &Bench, id: &str) -> v1::Emptying {
    bench.planner.get_emptying(id).await.unwrap()
}

/// Waits until a job or drain is in a state.
async fn see(bench: &Bench, id: &str, state: &str) -> v1::Emptying {
    let mut changes = bench.planner.host_changes();
    let looking = async {
        loop {
            let now = emptying(bench, id).await;
            if now.state == state {
                return now;
            }
            let pause = std::time::Duration::from_millis(50);
            let _rang = tokio::time::timeout(pause, changes.changed()).await;
        }
    };
    match tokio::time::timeout(std::time::Duration::from_secs(30), looking).await {
        Ok(seen) => seen,
        Err(_) => panic!("never {state}: {:#?}", emptying(bench, id).await),
    }
}

async fn three_on_a(bench: &Bench) -> Vec<v1::Vm> {
    let mut vms = Vec::new();
    for of in 1..=3 {
        vms.push(bench.start(&format!("web{of}"), of, "a").await);
    }
    bench.report(&["a", "b", "c"]).await;
    vms
}

async fn host(bench: &Bench, name: &str) -> v1::Host {
    bench.planner.get_host(name).await.unwrap()
}

fn off_a(bench: &Bench, vms: &[v1::Vm]) {
    for vm in vms {
        let runs = bench.world.running(&vm.id);
        assert!(runs.len() == 1 && runs[0] != "a", "{} runs on {runs:?}", vm.name);
    }
}

#[tokio::test]
async fn a_plan_says_where_each_vm_goes_and_touches_nothing() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vms = three_on_a(&bench).await;
    let before = bench.world.commands();
    let plan = bench.planner.plan_maintenance(maintenance("a")).await.unwrap();
    assert_eq!((plan.state.as_str(), plan.moves.len()), ("PLANNED", 3), "{plan:#?}");
    assert!(plan.moves.iter().all(|one| one.planned_host != "a" && one.mode == "live"));
    assert_eq!(bench.world.commands(), before);
    assert!(host(&bench, "a").await.cordons.is_empty());
    for vm in &vms {
        assert_eq!(bench.world.running(&vm.id), ["a"]);
    }
    // A newer plan takes its place.
    let newer = bench.planner.plan_maintenance(maintenance("a")).await.unwrap();
    let older = emptying(&bench, &plan.id).await;
    assert_eq!(older.state, "CANCELLED");
    assert!(older.error.contains(&newer.id), "{}", older.error);
}

#[tokio::test]
async fn maintenance_empties_a_host_and_brings_its_vms_back() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vms = three_on_a(&bench).await;
    let job = bench.planner.execute_maintenance(maintenance("a")).await.unwrap();
    let job = see(&bench, &job.id, "MAINTENANCE").await;
    off_a(&bench, &vms);
    let progress = job.progress.unwrap();
    assert_eq!((progress.moved, progress.total), (3, 3));
    let closed = host(&bench, "a").await;
    assert_eq!(closed.lifecycle, "maintenance");
    assert_eq!(closed.cordons[0].owner, format!("job:{}", job.id));
    assert!(closed.blockers.iter().any(|of| of.code == "in_maintenance"));
    assert!(closed.story.iter().any(|line| line.contains("in maintenance since")));
    let refused = bench
        .planner
        .uncordon_host(v1::UncordonHostRequest { host: "a".to_owned(), by: "bob".to_owned() });
    assert_eq!(refused.await.unwrap_err().code(), "in_maintenance");

    bench.report(&["a", "b", "c"]).await;
    let asked = v1::CompleteMaintenanceRequest {
        id: job.id.clone(),
        return_vms: true,
        by: "alice".to_owned(),
    };
    bench.planner.complete_maintenance(asked).await.unwrap();
    let back = found(async || {
        let job = emptying(&bench, &job.id).await;
        job.returns.iter().all(|one| one.state == "returned").then_some(job)
    })
    .await;
    assert_eq!((back.state.as_str(), back.returns.len()), ("COMPLETED", 3));
    for vm in &vms {
        assert_eq!(bench.world.running(&vm.id), ["a"]);
    }
    let open = host(&bench, "a").await;
    assert!(open.cordons.is_empty() && open.blockers.is_empty(), "{open:#?}");
}

/// What is asked of host a.
#[derive(Clone, Copy)]
enum Asked {
    Maintain,
    Retire,
}

/// Lets a planner die when the `nth` command of an emptying meets a silent agent, and another one go
/// on.
async fn dies_at(nth: usize, silence: Silence, asked: Asked) {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vms = three_on_a(&bench).await;
    bench.world.fall_silent_at(nth, silence);
    let reached = bench.world.commands().len() + nth;
    let (id, end) = match asked {
        Asked::Retire => (bench.planner.retire_host(drain("a")).await.unwrap().id, "GRANTED"),
        Asked::Maintain => {
            let job = bench.planner.execute_maintenance(maintenance("a")).await.unwrap();
            (job.id, "MAINTENANCE")
        }
    };
    let world = bench.world.clone();
    until(|| world.commands().len() > reached).await;
    let bench = bench.restart().await;
    bench.world.all_answer();
    bench.report(&["a", "b", "c"]).await;
    see(&bench, &id, end).await;
    off_a(&bench, &vms);
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
}

/// The commands of three migrations that go through.
const COMMANDS: usize = 15;

#[tokio::test]
async fn a_job_goes_on_after_the_planner_died_at_any_command() {
    for nth in (0..COMMANDS).step_by(2) {
        dies_at(nth, Silence::Before, Asked::Maintain).await;
    }
}

#[tokio::test]
async fn a_retirement_goes_on_after_the_planner_died_at_any_command() {
    for nth in (1..COMMANDS).step_by(2) {
        dies_at(nth, Silence::After, Asked::Retire).await;
    }
}

#[tokio::test]
async fn a_second_word_is_refused_and_named_the_first() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    three_on_a(&bench).await;
    bench.world.pace(Pace::Endless);
    let first = bench.planner.execute_maintenance(maintenance("a")).await.unwrap();
    assert_eq!(first.state, "RUNNING");
    let second = bench.planner.execute_maintenance(maintenance("a")).await.unwrap_err();
    assert_eq!(second.code(), "maintenance_active");
    assert!(second.to_string().contains(&first.id), "{second}");
    let drained = bench.planner.drain_host(drain("a")).await.unwrap_err();
    assert!(drained.to_string().contains(&first.id), "{drained}");
    let (status, body) = bench.http("POST", "/api/hosts/a/maintenance/execute", "{}").await;
    assert_eq!(status, 409, "{body}");
    assert!(body["message"].as_str().unwrap().contains(&first.id), "{body}");
    // What is under way is taken back where it can be, and the host opened.
    let cancel = v1::CancelEmptyingRequest { id: first.id.clone(), by: "alice".to_owned() };
    bench.planner.cancel_emptying(cancel).await.unwrap();
    see(&bench, &first.id, "CANCELLED").await;
    assert!(host(&bench, "a").await.cordons.is_empty());
}

#[tokio::test]
async fn a_cordon_is_its_owners_and_ends_when_it_said() {
    let bench = Bench::new(&["a"]).await;
    let cordon = |by: &str, for_ms| v1::CordonHostRequest {
        host: "a".to_owned(),
        by: by.to_owned(),
        reason: "new disks".to_owned(),
        for_ms,
    };
    let closed = bench.planner.cordon_host(cordon("alice", 0)).await.unwrap();
    assert_eq!(closed.cordons.len(), 1);
    bench.planner.cordon_host(cordon("bob", 300)).await.unwrap();
    let open = |by: &str| v1::UncordonHostRequest { host: "a".to_owned(), by: by.to_owned() };
    let left = bench.planner.uncordon_host(open("alice")).await.unwrap();
    assert_eq!(left.cordons.iter().map(|of| of.owner.as_str()).collect::<Vec<_>>(), ["bob"]);
    assert!(!left.cordons[0].expires.is_empty());
    found(async || host(&bench, "a").await.blockers.is_empty().then_some(())).await;
    bench.start("web1", 1, "a").await;
}

#[tokio::test]
async fn a_drain_moves_the_rest_and_shows_who_cannot_leave() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let pinned = format!("{}pin = \"a\"\n", definition("stays", 9));
    let asked =
        v1::StartVmRequest { definition: pinned, wait_ms: 10_000, ..v1::StartVmRequest::default() };
    let stays = bench.planner.start_vm(asked).await.unwrap();
    let goes = [bench.start("web1", 1, "a").await, bench.start("web2", 2, "a").await];
    bench.report(&["a", "b", "c"]).await;
    let plan = bench.planner.plan_maintenance(maintenance("a")).await.unwrap();
    assert_eq!((plan.state.as_str(), plan.blocked.len(), plan.moves.len()), ("BLOCKED", 1, 2));
    let drained = bench.planner.drain_host(drain("a")).await.unwrap();
    let world = bench.world.clone();
    let elsewhere = |vm: &v1::Vm| world.running(&vm.id).iter().any(|host| host != "a");
    until(|| goes.iter().all(elsewhere)).await;
    off_a(&bench, &goes);
    assert_eq!(bench.world.running(&stays.id), ["a"]);
    let now = see(&bench, &drained.id, "EMPTYING").await;
    assert_eq!(now.blocked.len(), 1, "{now:#?}");
    assert_eq!(
        (now.blocked[0].vm_name.as_str(), now.blocked[0].code.as_str()),
        ("stays", "pinned_to_source")
    );
    assert!(!now.blocked[0].fix.is_empty() && !now.blocked[0].since.is_empty());
    let story = host(&bench, "a").await.story.join("\n");
    assert!(story.contains("VM stays cannot leave"), "{story}");
    // Uncordon is the word that ends it.
    let open = v1::UncordonHostRequest { host: "a".to_owned(), by: "alice".to_owned() };
    let open = bench.planner.uncordon_host(open).await.unwrap();
    assert!(open.cordons.is_empty());
    assert_eq!(emptying(&bench, &drained.id).await.state, "CANCELLED");
}

#[tokio::test]
async fn a_drain_says_why_the_host_of_its_plan_will_not_have_a_vm() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.block("b", "disk_missing", "there is no /shared/web1.raw");
    bench.world.memory("c", 256 << 20);
    bench.report(&["a", "b", "c"]).await;
    let drained = bench.planner.drain_host(drain("a")).await.unwrap();
    found(async || {
        let now = format!("{:?}", emptying(&bench, &drained.id).await);
        (now.contains("disk_missing") && now.contains("there is no /shared/web1.raw")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn two_hosts_are_drained_at_once_and_neither_takes_the_others_vms() {
    let bench = Bench::new(&["a", "b", "c", "d"]).await;
    let vms = [
        bench.start("web1", 1, "a").await,
        bench.start("web2", 2, "a").await,
        bench.start("web3", 3, "b").await,
        bench.start("web4", 4, "b").await,
    ];
    bench.report(&["a", "b", "c", "d"]).await;
    let (one, other) =
        tokio::join!(bench.planner.drain_host(drain("a")), bench.planner.drain_host(drain("b")));
    see(&bench, &one.unwrap().id, "EMPTY").await;
    see(&bench, &other.unwrap().id, "EMPTY").await;
    for vm in &vms {
        let runs = bench.world.running(&vm.id);
        assert!(runs == ["c"] || runs == ["d"], "{runs:?}");
    }
    assert_eq!(host(&bench, "a").await.lifecycle, "draining");
}

#[tokio::test]
async fn a_retired_host_is_deleted_and_not_taken_back_until_it_was_booted() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vms = three_on_a(&bench).await;
    let early = v1::DeleteHostRequest { host: "a".to_owned(), by: "alice".to_owned() };
    assert_eq!(bench.planner.delete_host(early.clone()).await.unwrap_err().code(), "not_retired");
    let retired = bench.planner.retire_host(drain("a")).await.unwrap();
    see(&bench, &retired.id, "GRANTED").await;
    off_a(&bench, &vms);
    assert_eq!(host(&bench, "a").await.lifecycle, "retired");
    // Agents know of no cordon: a move without a planner may bring it a guest again.
    let row = bench.planner.store().vms().await.unwrap().swap_remove(0);
    let follow = async |to: &str, before: &VmRow| {
        let followed = Followed {
            vm: before.id,
            host: to.parse().unwrap(),
            power: PowerState::Running,
            generation: before.generation.next(),
            claim: before.claim,
        };
        assert!(bench.planner.store().follow_vm(&followed, clock::now()).await.unwrap());
        bench.planner.store().vm(before.id).await.unwrap().unwrap()
    };
    let there = follow("a", &row).await;
    assert_eq!(bench.planner.delete_host(early.clone()).await.unwrap_err().code(), "blocked");
    follow(row.host.as_ref().unwrap().as_str(), &there).await;
    assert_eq!(bench.planner.delete_host(early).await.unwrap().id, "a");
    let hosts = bench.planner.list_hosts().await.unwrap().hosts;
    assert_eq!(hosts.iter().map(|of| of.id.as_str()).collect::<Vec<_>>(), ["b", "c"]);
    let again = bench.planner.report(bench.world.report("a")).await.unwrap();
    assert!(again.refused.contains("was deleted"), "{}", again.refused);
    let booted = v1::HostReport { boot_id: "another".to_owned(), ..bench.world.report("a") };
    assert_eq!(bench.planner.report(booted).await.unwrap().refused, "");
    assert_eq!(host(&bench, "a").await.lifecycle, "active");
}

#[tokio::test]
async fn a_job_stops_at_its_first_failure_and_leaves_the_host_cordoned() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vms = three_on_a(&bench).await;
    bench.world.pace(Pace::Hopeless);
    let policy =
        v1::MaintenancePolicy { max_parallel: Some(1), ..v1::MaintenancePolicy::default() };
    let asked = v1::MaintenanceRequest { policy: Some(policy), ..maintenance("a") };
    let job = bench.planner.execute_maintenance(asked).await.unwrap();
    let failed = see(&bench, &job.id, "FAILED").await;
    assert!(failed.error.contains("the transfer failed"), "{}", failed.error);
    let states: Vec<&str> = failed.moves.iter().map(|one| one.state.as_str()).collect();
    assert_eq!(states, ["failed", "not_begun", "not_begun"]);
    for vm in &vms {
        assert_eq!(bench.world.running(&vm.id), ["a"]);
    }
    let closed = host(&bench, "a").await;
    assert_eq!((closed.cordons.len(), closed.lifecycle.as_str()), (1, "active"));
    let open = v1::UncordonHostRequest { host: "a".to_owned(), by: "bob".to_owned() };
    assert!(bench.planner.uncordon_host(open).await.unwrap().cordons.is_empty());
}

#[tokio::test]
async fn a_host_that_dies_while_it_is_drained_ends_it_so() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    three_on_a(&bench).await;
    bench.world.pace(Pace::Endless);
    let drained = bench.planner.drain_host(drain("a")).await.unwrap();
    let world = bench.world.clone();
    until(|| world.commands().iter().any(|of| of.starts_with("start_transfer"))).await;
    bench.world.power_off("a");
    let declared = v1::DeclareHostDeadRequest {
        host: "a".to_owned(),
        confirmation: "i-have-powered-it-off".to_owned(),
        reason: "smoke".to_owned(),
        by: "alice".to_owned(),
    };
    bench.planner.declare_host_dead(declared).await.unwrap();
    let died = see(&bench, &drained.id, "DIED").await;
    assert!(died.error.contains("smoke"), "{}", died.error);
    let story = host(&bench, "a").await.story.join("\n");
    assert!(story.contains("died while it was emptied"), "{story}");
    assert_eq!(host(&bench, "a").await.cordons.len(), 1);
}

#[tokio::test]
async fn a_prepared_receiver_waits_while_the_link_is_busy() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    three_on_a(&bench).await;
    bench.world.pace(Pace::Endless);
    let policy =
        v1::MaintenancePolicy { max_parallel: Some(3), ..v1::MaintenancePolicy::default() };
    let asked = v1::MaintenanceRequest { policy: Some(policy), ..maintenance("a") };
    let job = bench.planner.execute_maintenance(asked).await.unwrap();
    let world = bench.world.clone();
    let count = |what: &str| {
        let commands = world.commands();
        commands.iter().filter(|of| of.starts_with(what)).count()
    };
    until(|| count("arm_receiver") == 3 && count("start_transfer") == 2).await;
    let planner = &bench.planner;
    let waits = found(async || {
        let open = v1::ListMigrationsRequest { open: true, ..Default::default() };
        let all = planner.list_migrations(&open).await.unwrap().migrations;
        let waits: Vec<_> = all.into_iter().filter(|of| !of.waits_for_link.is_empty()).collect();
        (!waits.is_empty()).then_some(waits)
    })
    .await;
    assert_eq!(waits.len(), 1);
    assert!(waits[0].waits_for_link.contains("2 of 2 transferring from a"), "{waits:#?}");
    assert_eq!(count("start_transfer"), 2);
    // Ended, the first leave the link to the last.
    bench.world.pace(Pace::Quick);
    let cancel = v1::CancelEmptyingRequest { id: job.id.clone(), by: "alice".to_owned() };
    bench.planner.cancel_emptying(cancel).await.unwrap();
    see(&bench, &job.id, "CANCELLED").await;
}

#[tokio::test]
async fn a_stopped_vm_stays_behind_unless_its_disk_is_only_there() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let local = "[[disk]]\npath = \"/local/x.raw\"\nformat = \"raw\"\nshared = false\n";
    for (name, of, more) in [("light", 1, ""), ("heavy", 2, local)] {
        let asked = v1::StartVmRequest {
            definition: format!("{}{more}", definition(name, of)),
            host: "a".to_owned(),
            wait_ms: 10_000,
            ..v1::StartVmRequest::default()
        };
        bench.planner.start_vm(asked).await.unwrap();
        let stop = v1::StopVmRequest {
            vm: name.to_owned(),
            how: "quit".to_owned(),
            wait_ms: 10_000,
            ..v1::StopVmRequest::default()
        };
        bench.planner.stop_vm(stop).await.unwrap();
    }
    bench.report(&["a", "b", "c"]).await;
    let plan = bench.planner.plan_maintenance(maintenance("a")).await.unwrap();
    assert_eq!((plan.state.as_str(), plan.moves.len()), ("BLOCKED", 0), "{plan:#?}");
    let blocked: Vec<&str> = plan.blocked.iter().map(|one| one.vm_name.as_str()).collect();
    assert_eq!(blocked, ["heavy"]);
    assert_eq!(plan.blocked[0].code, "live_migration_required");
    assert!(plan.blocked[0].message.contains("/local/x.raw"), "{}", plan.blocked[0].message);
}

#[tokio::test]
async fn a_host_that_was_booted_anew_while_it_was_drained_died_meanwhile() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    three_on_a(&bench).await;
    bench.world.pace(Pace::Endless);
    let drained = bench.planner.drain_host(drain("a")).await.unwrap();
    let world = bench.world.clone();
    until(|| world.commands().iter().any(|of| of.starts_with("start_transfer"))).await;
    let booted = v1::HostReport {
        boot_id: "another".to_owned(),
        agent_instance: "another".to_owned(),
        vms: Vec::new(),
        ..bench.world.report("a")
    };
    assert_eq!(bench.planner.report(booted).await.unwrap().refused, "");
    let died = see(&bench, &drained.id, "DIED").await;
    assert!(died.error.contains("booted anew"), "{}", died.error);
}

#[tokio::test]
async fn jobs_are_planned_carried_out_and_listed_over_rest() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    three_on_a(&bench).await;
    let (status, plan) =
        bench.http("POST", "/api/hosts/a/maintenance/plan?by=alice", "{\"max_parallel\":3}").await;
    assert_eq!((status, plan["state"].as_str()), (200, Some("PLANNED")), "{plan}");
    assert_eq!(
        (plan["by"].as_str(), plan["policy"]["max_parallel"].as_u64()),
        (Some("alice"), Some(3))
    );
    let (status, refused) =
        bench.http("POST", "/api/hosts/a/maintenance/plan", "{\"max_paralel\":3}").await;
    assert_eq!((status, refused["code"].as_str()), (400, Some("invalid")), "{refused}");
    // To move nothing at once is no limit, and not the usual one either.
    let (status, refused) =
        bench.http("POST", "/api/hosts/a/maintenance/plan", "{\"max_parallel\":0}").await;
    assert_eq!((status, refused["code"].as_str()), (400, Some("invalid")), "{refused}");
    let told = refused["message"].as_str().unwrap();
    assert!(told.contains("policy.max_parallel"), "{told}");
    let (status, job) = bench.http("POST", "/api/hosts/a/maintenance/execute", "").await;
    assert_eq!((status, job["state"].as_str()), (202, Some("RUNNING")), "{job}");
    let id = job["id"].as_str().unwrap().to_owned();
    see(&bench, &id, "MAINTENANCE").await;
    let (_, jobs) = bench.http("GET", "/api/hosts/a/maintenance/jobs", "").await;
    let states: Vec<&str> = jobs["emptyings"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|of| of["state"].as_str())
        .collect();
    assert_eq!(states, ["MAINTENANCE", "CANCELLED"]);
    let (status, done) =
        bench.http("POST", &format!("/api/maintenance/jobs/{id}/complete"), "{}").await;
    assert_eq!((status, done["state"].as_str()), (200, Some("COMPLETED")), "{done}");
    // Asked again it is answered the same; a plan cannot be completed.
    let (status, _) =
        bench.http("POST", &format!("/api/maintenance/jobs/{id}/complete"), "{}").await;
    assert_eq!(status, 200);
    let (_, plan) = bench.http("POST", "/api/hosts/a/maintenance/plan", "{}").await;
    let path = format!("/api/maintenance/jobs/{}/complete", plan["id"].as_str().unwrap());
    let (status, refused) = bench.http("POST", &path, "{}").await;
    assert_eq!((status, refused["code"].as_str()), (409, Some("not_in_phase")), "{refused}");
    let (status, queue) = bench.http("GET", "/api/queue", "").await;
    assert_eq!((status, queue["entries"].as_array().map(Vec::len)), (200, Some(0)));
}
