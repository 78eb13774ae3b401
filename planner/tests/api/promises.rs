//! What operators of other systems were once surprised by, and must not be here.

use futures::future::join_all;
use vmferry_planner::live::Seen;
use vmferry_planner::store::{Declaration, DeclarationKind, HostRow, SavedHost};
use vmferry_planner_core::migration::{Event, Stood};
use vmferry_proto::v1;
use vmferry_types::{HostId, Timestamp};

use crate::bench::{Bench, definition, until};
use crate::world::{Pace, Silence};

fn to(vm: &str, target: &str) -> v1::MigrateVmRequest {
    v1::MigrateVmRequest {
        vm_name: vm.to_owned(),
        target_host: target.to_owned(),
        ..v1::MigrateVmRequest::default()
    }
}

fn start_on(vm: &str, host: &str) -> v1::StartVmRequest {
    v1::StartVmRequest {
        vm: vm.to_owned(),
        host: host.to_owned(),
        wait_ms: 10_000,
        ..v1::StartVmRequest::default()
    }
}

/// The helper step after a move failed there, and the VM was recorded where it no longer was.
#[tokio::test]
async fn a_step_that_fails_after_ownership_moved_is_tried_again_and_the_vm_is_where_it_runs() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    // The fourth command lets the guest go on at the destination: done, and answered as a failure.
    bench.world.fall_silent_at(3, Silence::Failing);
    let asked = bench.migrate("web1", "b").await;
    let ended = bench.ended(&asked.id).await;
    assert_eq!((ended.phase.as_str(), ended.target_host.as_str()), ("done", "b"), "{ended:#?}");
    let phases: Vec<&str> = ended.phases.iter().map(|of| of.phase.as_str()).collect();
    assert!(!phases.contains(&"rolling_back"), "{phases:?}");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
    for host in [bench.planner.get_vm("web1").await.unwrap().host, ended.target_host] {
        assert_eq!(host, "b");
    }
}

/// A destination that cannot be reached after the commit is waited for; nothing goes back.
#[tokio::test]
async fn a_destination_that_is_silent_after_ownership_moved_is_waited_for_and_named() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(3, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    let id = asked.id.parse().unwrap();
    until(|| bench.planner.live.seen(id).trouble.is_some()).await;
    let waiting = bench.planner.get_migration(&asked.id).await.unwrap();
    assert_eq!(waiting.phase, "committed", "{waiting:#?}");
    assert!(bench.world.running(&vm.id).is_empty(), "nobody may go on without the order");
    let error = bench.planner.cancel_migration(&asked.id).await.unwrap_err();
    assert_eq!(error.code(), "too_late");
    bench.world.all_answer();
    assert_eq!(bench.ended(&asked.id).await.phase, "done");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

/// A first attempt that was refused left a flag behind, and every later one was told of it.
#[tokio::test]
async fn an_attempt_that_its_destination_refused_does_not_stand_in_the_way_of_the_next() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vm = bench.start("web1", 1, "a").await;
    // The first command arms the receiver: refused there, after the row was admitted.
    bench.world.fall_silent_at(0, Silence::Failing);
    let asked = bench.migrate("web1", "b").await;
    assert_eq!(bench.ended(&asked.id).await.phase, "aborted");
    bench.world.block("b", "machine_type_missing", "no such machine type");
    let error = bench.planner.migrate_vm(to("web1", "b")).await.unwrap_err();
    assert_eq!(error.code(), "blocked");
    let second = bench.migrate("web1", "c").await;
    assert_eq!(bench.ended(&second.id).await.phase, "done");
    assert_eq!(bench.world.running(&vm.id), ["c"]);
}

/// A terminal state was overwritten there by what came late.
#[tokio::test]
async fn what_comes_after_the_end_changes_nothing() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let asked = bench.migrate("web1", "b").await;
    let ended = bench.ended(&asked.id).await;
    let row = bench.planner.store().migration(asked.id.parse().unwrap()).await.unwrap().unwrap();
    let late = [
        Event::TransferFailed { error: "destroyed".to_owned(), stood: Stood::Yes },
        Event::SourceGaveUp { error: "late".to_owned(), stood: Stood::Yes },
        Event::SourceRunsAgain { error: "late".to_owned() },
        Event::DestinationRuns,
        Event::SourceContinued,
        Event::CancelRequested,
    ];
    for event in late {
        assert!(row.migration.advance(event.clone()).is_err(), "{event:?}");
    }
    // The source reports what it was told to do long ago; so does a restarted planner's first look.
    bench.report(&["a", "b", "a"]).await;
    let bench = bench.restart().await;
    bench.report(&["a", "b"]).await;
    let after = bench.planner.get_migration(&asked.id).await.unwrap();
    assert_eq!((after.phase, after.seq), (ended.phase, ended.seq));
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

/// The check that there is no other move raced with the writing of one.
#[tokio::test]
async fn of_two_moves_asked_for_at_once_one_is_accepted_and_the_other_told_which() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let mut at = bench.start("web1", 1, "a").await.host;
    for round in 0..50 {
        let targets: Vec<&str> = ["a", "b", "c"].into_iter().filter(|host| *host != at).collect();
        let asked = targets.iter().map(|target| bench.planner.migrate_vm(to("web1", target)));
        let mut accepted = Vec::new();
        let mut refused = Vec::new();
        for answer in join_all(asked).await {
            match answer {
                Ok(migration) => accepted.push(migration),
                Err(error) => refused.push(error),
            }
        }
        // One that asked so late that the first had arrived is a move of its own, from there.
        accepted.sort_by(|a, b| a.id.cmp(&b.id));
        let chained = accepted.windows(2).all(|two| two[0].target_host == two[1].source_host);
        assert!(chained, "round {round}: {accepted:#?}");
        assert_eq!(accepted.len() + refused.len(), 2);
        if let Some(error) = refused.iter().find(|error| error.code() == "migration_open") {
            assert!(error.to_string().contains(&accepted[0].id), "{error}");
        }
        let mut ended = bench.ended(&accepted[0].id).await;
        for next in accepted.iter().skip(1) {
            assert_eq!(ended.phase, "done", "round {round}: {ended:#?}");
            ended = bench.ended(&next.id).await;
        }
        assert_eq!(ended.phase, "done", "round {round}: {ended:#?}");
        assert!(bench.planner.store().reservations().await.unwrap().is_empty());
        at = ended.target_host;
        bench.report(&["a", "b", "c"]).await;
    }
}

/// A move that had timed out was taken for one that had not happened, and a second copy was started.
#[tokio::test]
async fn a_vm_is_not_started_anywhere_while_its_move_is_in_doubt() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    // The order was carried out; nobody heard so.
    bench.world.fall_silent_at(2, Silence::After);
    let asked = bench.migrate("web1", "b").await;
    let id = asked.id.parse().unwrap();
    until(|| bench.planner.live.seen(id).trouble.is_some()).await;
    for host in ["a", "b"] {
        let answer = bench.planner.start_vm(start_on("web1", host)).await;
        match answer {
            Ok(vm) => panic!("started on {host}: {vm:?}"),
            Err(error) => assert!(
                ["migration_open", "wrong_power_state"].contains(&error.code()),
                "{}: {error}",
                error.code()
            ),
        }
    }
    let stop = v1::StopVmRequest { vm: "web1".to_owned(), ..v1::StopVmRequest::default() };
    assert_eq!(bench.planner.stop_vm(stop).await.unwrap_err().code(), "migration_open");
    bench.world.all_answer();
    assert_eq!(bench.ended(&asked.id).await.phase, "done");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

/// A stop that comes from outside while the guest exists twice, still, ended the wrong one.
#[tokio::test]
async fn a_vm_is_not_stopped_while_it_moves() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.state == "syncing").await;
    let stop = v1::StopVmRequest {
        vm: "web1".to_owned(),
        how: "quit".to_owned(),
        ..v1::StopVmRequest::default()
    };
    assert_eq!(bench.planner.stop_vm(stop).await.unwrap_err().code(), "migration_open");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    bench.planner.cancel_migration(&asked.id).await.unwrap();
    assert_eq!(bench.ended(&asked.id).await.phase, "aborted");
}

/// A cancel that was handled in one phase only left moves that nobody could end.
#[tokio::test]
async fn a_cancel_while_it_waits_for_room_ends_it_at_once() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.memory("b", 1 << 30);
    bench.report(&["b"]).await;
    let asked = bench.migrate("web1", "").await;
    assert_eq!(asked.phase, "queued");
    let cancelled = bench.planner.cancel_migration(&asked.id).await.unwrap();
    assert_eq!((cancelled.phase.as_str(), cancelled.state.as_str()), ("aborted", "cancelled"));
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    bench.world.memory("b", 4 << 30);
    bench.report(&["b"]).await;
    let again = bench.migrate("web1", "").await;
    assert_eq!(bench.ended(&again.id).await.phase, "done");
}

/// A broken link to an agent was read as the death of its guests.
#[tokio::test]
async fn guests_of_a_host_that_is_not_heard_are_neither_stopped_nor_started_elsewhere() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let before = bench.world.commands();
    bench.world.silence("a");
    let bench = bench.restart().await;
    bench.report(&["b"]).await;
    let shown = bench.planner.get_host("a").await.unwrap();
    assert_eq!(shown.status, "disconnected", "{shown:#?}");
    let answer = bench.planner.start_vm(start_on("web1", "b")).await;
    assert!(answer.is_err(), "{answer:?}");
    assert_eq!(bench.world.commands(), before);
    bench.world.all_answer();
    bench.report(&["a"]).await;
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
}

/// An agent that took its time to start was declared dead, and its guests were started elsewhere.
#[tokio::test]
async fn a_host_that_is_still_learning_loses_no_vm_and_takes_none() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let mut report = bench.world.report("a");
    report.learning = true;
    report.vms.clear();
    bench.planner.report(report).await.unwrap();
    assert_eq!(bench.planner.get_host("a").await.unwrap().status, "learning");
    let kept = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!((kept.power.as_str(), kept.host.as_str()), ("running", "a"));
    assert!(bench.planner.start_vm(start_on("web1", "b")).await.is_err());
    let new = v1::StartVmRequest { definition: definition("web2", 2), ..start_on("", "a") };
    let refused = bench.planner.start_vm(new).await.unwrap_err();
    assert_eq!(refused.blockers()[0].code, "learning", "{refused}");
    bench.report(&["a"]).await;
    assert_eq!(bench.planner.get_host("a").await.unwrap().status, "connected");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_death_that_a_fast_clock_wrote_is_void_while_the_host_answers() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(4, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.phase == "attached").await;
    let id = asked.id.parse().unwrap();
    // Its driver has asked both anew, and only the destination answers.
    let settled = |seen: &Seen| seen.trouble.is_some() && seen.destination.is_some();
    until(|| settled(&bench.planner.live.seen(id))).await;
    // Another planner, which cannot reach the host and whose clock is far ahead, declares it dead.
    let host: HostId = "b".parse().unwrap();
    let death = Declaration {
        boot_id: bench.world.report("b").boot_id,
        at: Timestamp(vmferry_planner::clock::now().value() + 3_600_000),
        by: "ann".to_owned(),
        kind: DeclarationKind::Operator,
        reason: "rack is dark".to_owned(),
        evidence: String::new(),
        void: None,
    };
    bench.planner.store().declare_dead(&host, &death).await.unwrap();
    bench.planner.parts.inventory.reread(bench.planner.store()).await.unwrap();
    bench.planner.nudge(id);
    until(|| bench.planner.parts.inventory.dead(&host).is_none()).await;
    bench.world.all_answer();
    assert_eq!(bench.ended(&asked.id).await.state, "completed");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn a_death_is_not_believed_by_a_planner_that_has_not_asked_the_host_once() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |seen| seen.state == "syncing").await;
    let host: HostId = "a".parse().unwrap();
    let death = Declaration {
        boot_id: bench.world.report("a").boot_id,
        at: vmferry_planner::clock::now(),
        by: "ann".to_owned(),
        kind: DeclarationKind::Operator,
        reason: "it says nothing".to_owned(),
        evidence: String::new(),
        void: None,
    };
    bench.planner.store().declare_dead(&host, &death).await.unwrap();
    // The next driver reads of the death before anybody has answered it.
    let bench = bench.restart().await;
    until(|| bench.planner.parts.inventory.dead(&host).is_none()).await;
    bench.see(&asked.id, |seen| seen.phase == "admitted").await;
    bench.planner.cancel_migration(&asked.id).await.unwrap();
    assert_eq!(bench.ended(&asked.id).await.phase, "aborted");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_host_that_answers_from_another_boot_than_the_dead_one_is_asked_and_not_taken_for_dead() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |seen| seen.state == "syncing").await;
    let host: HostId = "a".parse().unwrap();
    let known = bench.planner.parts.inventory.row(&host).unwrap();
    let before = HostRow { boot_id: "an older boot".to_owned(), ..known };
    let store = bench.planner.store();
    assert_eq!(store.save_host(&before).await.unwrap(), SavedHost::Saved);
    let death = Declaration {
        boot_id: before.boot_id,
        at: vmferry_planner::clock::now(),
        by: "ann".to_owned(),
        kind: DeclarationKind::Operator,
        reason: "it says nothing".to_owned(),
        evidence: String::new(),
        void: None,
    };
    store.declare_dead(&host, &death).await.unwrap();
    let bench = bench.restart().await;
    bench.planner.cancel_migration(&asked.id).await.unwrap();
    assert_eq!(bench.ended(&asked.id).await.phase, "aborted");
    assert_eq!(bench.planner.parts.inventory.dead(&host), Some(death), "it has not reported since");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
}
