//! What an operator says and asks: dead hosts, old stores, open halves, and what is going on.

use vmferry_planner::store::VmRow;
use vmferry_proto::v1;

use crate::bench::{Bench, until};
use crate::world::{Pace, Silence, World};

/// The commands of a whole move, in order: arm, send, order, continue, release.
const CONTINUE: usize = 3;
const RELEASE: usize = 4;

pub(crate) fn dead(host: &str) -> v1::DeclareHostDeadRequest {
    v1::DeclareHostDeadRequest {
        host: host.to_owned(),
        confirmation: "i-have-powered-it-off".to_owned(),
        reason: "rack is dark".to_owned(),
        by: "ann".to_owned(),
    }
}

fn start(vm: &str, host: &str) -> v1::StartVmRequest {
    v1::StartVmRequest {
        vm: vm.to_owned(),
        host: host.to_owned(),
        wait_ms: 10_000,
        ..v1::StartVmRequest::default()
    }
}

async fn stop(bench: &Bench, vm: &str) {
    let asked = v1::StopVmRequest {
        vm: vm.to_owned(),
        how: "quit".to_owned(),
        wait_ms: 10_000,
        ..v1::StopVmRequest::default()
    };
    assert_eq!(bench.planner.stop_vm(asked).await.unwrap().power, "stopped");
}

async fn doctor(bench: &Bench) -> v1::DoctorReply {
    bench.planner.doctor(&v1::DoctorRequest::default()).await.unwrap()
}

fn codes(reply: &v1::DoctorReply) -> Vec<&str> {
    reply.findings.iter().map(|finding| finding.code.as_str()).collect()
}

#[tokio::test]
async fn the_vms_of_a_host_that_was_declared_dead_start_elsewhere() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let error = bench.planner.declare_host_dead(dead("a")).await.unwrap_err();
    assert_eq!(error.blockers()[0].code, "host_answers", "{error}");
    bench.world.power_off("a");
    let unsure = v1::DeclareHostDeadRequest { confirmation: "yes".to_owned(), ..dead("a") };
    let error = bench.planner.declare_host_dead(unsure).await.unwrap_err();
    assert_eq!((error.code(), error.field()), ("invalid", "confirmation"));
    // Silence alone moves nothing.
    let error = bench.planner.start_vm(start("web1", "b")).await.unwrap_err();
    assert_eq!(error.code(), "vm_not_running", "{error}");
    let shown = bench.planner.declare_host_dead(dead("host-a")).await.unwrap();
    assert_eq!(shown.status, "dead");
    let declared = shown.declared_dead.unwrap();
    assert_eq!((declared.by.as_str(), declared.state.as_str()), ("ann", "holds"));
    let lost = bench.planner.get_vm("web1").await.unwrap();
    assert_eq!(lost.power, "lost");
    assert!(lost.error.contains("declared dead by ann"), "{}", lost.error);
    assert!(!doctor(&bench).await.well);
    let again = bench.planner.start_vm(start("web1", "b")).await.unwrap();
    assert_eq!((again.host.as_str(), again.generation), ("b", vm.generation + 1));
    assert_eq!(bench.world.running(&vm.id), ["b"]);
    let well = doctor(&bench).await;
    assert!(well.well, "{:?}", well.findings);
    assert_eq!(well.vms[0].runs_on, "b");
}

#[tokio::test]
async fn a_host_that_answers_from_the_same_boot_was_not_dead() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.silence("a");
    bench.planner.declare_host_dead(dead("a")).await.unwrap();
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "lost");
    bench.world.all_answer();
    bench.report(&["a"]).await;
    let shown = bench.planner.get_host("a").await.unwrap();
    let declared = shown.declared_dead.unwrap();
    assert_eq!((shown.status.as_str(), declared.state.as_str()), ("connected", "void"));
    assert_ne!(declared.voided_at, "");
    // Its VM runs there, so it is what it was; and it is not started twice.
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
    assert!(bench.planner.start_vm(start("web1", "b")).await.is_err());
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    assert!(codes(&doctor(&bench).await).contains(&"death_contradicted"));
    // A void declaration is never used again, over a restart too.
    let bench = bench.restart().await;
    assert_eq!(bench.planner.parts.inventory.all_dead(), []);
}

#[tokio::test]
async fn only_a_fence_command_that_succeeds_proves_anything() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.power_off("a");
    let fence = || v1::FenceHostRequest { host: "a".to_owned(), by: "ann".to_owned() };
    let error = bench.planner.fence_host(fence()).await.unwrap_err();
    assert_eq!(error.code(), "fence_failed", "{error}");
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
    bench.power_is_off();
    let declared = bench.planner.fence_host(fence()).await.unwrap().declared_dead.unwrap();
    assert_eq!(declared.kind, "fence_command");
    assert_eq!(declared.output, "off: a");
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "lost");
}

#[tokio::test]
async fn a_source_found_dead_at_its_release_ends_done() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(RELEASE, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.phase == "attached").await;
    until(|| bench.world.fell_silent()).await;
    bench.world.power_off("a");
    bench.planner.declare_host_dead(dead("a")).await.unwrap();
    let ended = bench.ended(&asked.id).await;
    assert_eq!(ended.phase, "done", "{ended:#?}");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
}

#[tokio::test]
async fn a_destination_found_dead_after_the_commit_may_have_run_the_guest() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(CONTINUE, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.phase == "committed").await;
    until(|| bench.world.fell_silent()).await;
    bench.world.power_off("b");
    bench.planner.declare_host_dead(dead("b")).await.unwrap();
    let ended = bench.ended(&asked.id).await;
    assert_eq!(ended.phase, "failed", "{ended:#?}");
    assert!(ended.error.contains("declared dead by ann"), "{}", ended.error);
    assert!(ended.source_status.starts_with("absent, QEMU gone: signal 9"), "{ended:#?}");
    assert!(ended.destination_status.contains("run state paused"), "{ended:#?}");
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "lost");
    assert!(bench.world.running(&vm.id).is_empty());
    bench.planner.start_vm(start("web1", "a")).await.unwrap();
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_destination_found_dead_while_it_arms_leaves_the_guest_where_it_is() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(0, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |_| bench.world.commands().len() > 1).await;
    bench.world.power_off("b");
    bench.planner.declare_host_dead(dead("b")).await.unwrap();
    let ended = bench.ended(&asked.id).await;
    assert_eq!(ended.phase, "aborted", "{ended:#?}");
    assert_eq!(bench.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_start_elsewhere_waits_until_the_last_host_was_heard() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    stop(&bench, "web1").await;
    // The planner begins anew, and the store may be an old one.
    let bench = bench.restart().await;
    bench.report(&["b"]).await;
    bench.world.silence("a");
    let error = bench.planner.start_vm(start("web1", "b")).await.unwrap_err();
    assert_eq!(error.blockers()[0].code, "not_heard", "{error}");
    assert!(error.to_string().contains("declare-dead a"), "{error}");
    bench.world.all_answer();
    bench.report(&["a"]).await;
    bench.planner.start_vm(start("web1", "b")).await.unwrap();
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn a_store_that_is_behind_learns_before_it_starts_anything() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vm = bench.start("web1", 1, "a").await;
    stop(&bench, "web1").await;
    bench.world.knows("b", &vm.id, 7);
    let bench = bench.restart().await;
    bench.report(&["a", "b"]).await;
    // Somebody was given generation 7, and it may be the one that is silent.
    let error = bench.planner.start_vm(start("web1", "b")).await.unwrap_err();
    assert_eq!(error.blockers()[0].code, "newer_generation", "{error}");
    assert!(error.to_string().contains("host c may have it"), "{error}");
    bench.report(&["c"]).await;
    let started = bench.planner.start_vm(start("web1", "b")).await.unwrap();
    assert!(started.generation > 7, "{started:?}");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn a_deleted_vm_is_never_adopted_again() {
    let bench = Bench::new(&["a"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let delete = || v1::DeleteVmRequest { vm: "web1".to_owned(), ..v1::DeleteVmRequest::default() };
    assert!(bench.planner.delete_vm(delete()).await.is_err());
    stop(&bench, "web1").await;
    let left_over = bench.world.report("a");
    let deleted = bench.planner.delete_vm(delete()).await.unwrap();
    assert_eq!((deleted.id.as_str(), deleted.left.as_str()), (vm.id.as_str(), ""));
    assert!(bench.planner.list_vms("").await.unwrap().vms.is_empty());
    assert!(bench.world.commands().contains(&"forget_vm@a".to_owned()));
    // A host that has not heard still has its definition.
    let mut report = bench.world.report("a");
    report.vms = left_over.vms;
    bench.planner.report(report).await.unwrap();
    assert!(bench.planner.list_vms("").await.unwrap().vms.is_empty());
    let orphans = bench.planner.get_host("a").await.unwrap().orphans;
    assert_eq!((orphans[0].vm_name.as_str(), orphans[0].kind.as_str()), ("web1", "definition"));
    let (status, _) = bench.http("DELETE", "/api/vms/web1", "").await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn a_vm_that_runs_on_no_host_is_deleted_only_once_all_were_asked() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let delete = |confirmation: &str| {
        let (vm, confirmation) = ("web1".to_owned(), confirmation.to_owned());
        bench.planner.delete_vm(v1::DeleteVmRequest { vm, confirmation })
    };
    let code = |error: vmferry_planner::api::ApiError| error.blockers()[0].code.clone();
    assert_eq!(code(delete("it-runs-nowhere").await.unwrap_err()), "runs_elsewhere");
    bench.world.forget("a", &vm.id);
    assert!(delete("").await.is_err(), "the store takes it to run");
    assert_eq!(delete("sure").await.unwrap_err().field(), "confirmation");
    bench.world.silence("b");
    assert_eq!(code(delete("it-runs-nowhere").await.unwrap_err()), "not_heard");
    bench.planner.declare_host_dead(dead("b")).await.unwrap();
    bench.report(&["a"]).await;
    // A QEMU that no journal names is not nothing.
    bench.world.lose_journal("a", &vm.id);
    assert_eq!(code(delete("it-runs-nowhere").await.unwrap_err()), "runs_elsewhere");
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
    bench.world.end_stranger("a", &vm.id);
    assert_eq!(delete("it-runs-nowhere").await.unwrap().id, vm.id);
    assert!(bench.planner.list_vms("").await.unwrap().vms.is_empty());
}

#[tokio::test]
async fn a_vm_that_runs_by_its_record_and_on_no_host_is_named_and_can_be_forgotten() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let whole = bench.planner.store().vms().await.unwrap().remove(0);
    let id = vmferry_types::VmId::from_u128(2);
    let damaged = VmRow { id, name: "web2".to_owned(), host: None, ..whole };
    bench.planner.store().adopt_vm(&damaged, vmferry_planner::clock::now()).await.unwrap();
    let bench = bench.restart().await;
    bench.report(&["a", "b"]).await;
    let code = |error: vmferry_planner::api::ApiError| error.blockers()[0].code.clone();
    let doctor = bench.planner.doctor(&v1::DoctorRequest { vm: "web2".to_owned() }).await.unwrap();
    assert_eq!(doctor.findings[0].code, "no_host", "{doctor:#?}");
    let stop = v1::StopVmRequest { vm: "web2".to_owned(), ..v1::StopVmRequest::default() };
    assert_eq!(code(bench.planner.stop_vm(stop).await.unwrap_err()), "no_host");
    assert_eq!(code(bench.planner.start_vm(start("web2", "")).await.unwrap_err()), "no_host");
    let delete = |confirmation: &str| {
        let (vm, confirmation) = ("web2".to_owned(), confirmation.to_owned());
        bench.planner.delete_vm(v1::DeleteVmRequest { vm, confirmation })
    };
    assert_eq!(code(delete("").await.unwrap_err()), "no_host");
    bench.world.silence("b");
    assert_eq!(code(delete("it-runs-nowhere").await.unwrap_err()), "not_heard");
    bench.world.all_answer();
    assert_eq!(delete("it-runs-nowhere").await.unwrap().id, id.to_string());
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
}

#[tokio::test]
async fn a_vm_whose_last_host_was_not_heard_is_not_forgotten() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    stop(&bench, "web1").await;
    let bench = bench.restart().await;
    bench.world.silence("a");
    let delete = || v1::DeleteVmRequest { vm: "web1".to_owned(), ..v1::DeleteVmRequest::default() };
    let error = bench.planner.delete_vm(delete()).await.unwrap_err();
    assert_eq!(error.blockers()[0].code, "not_heard", "{error}");
    bench.world.all_answer();
    bench.report(&["a"]).await;
    bench.planner.delete_vm(delete()).await.unwrap();
}

/// A move whose planner and store are gone at its switchover: ordered, arrived, not committed.
async fn halves() -> (World, String, String) {
    halves_at(CONTINUE, "committed").await
}

async fn halves_at(silent: usize, phase: &str) -> (World, String, String) {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(silent, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.phase == phase).await;
    let world = bench.world.clone();
    bench.dies().await;
    world.all_answer();
    (world, vm.id, asked.id)
}

async fn resolve(bench: &Bench, id: &str, keep: &str) -> Result<v1::Migration, String> {
    let asked = v1::ResolveMigrationRequest {
        id: id.to_owned(),
        keep: keep.to_owned(),
        confirmation: "i-have-checked".to_owned(),
    };
    bench.planner.resolve_migration(asked).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn halves_of_a_move_that_an_empty_store_finds_are_shown_and_left_alone() {
    let (world, vm, id) = halves().await;
    let bench = Bench::fresh(&world, &["a", "b"]).await;
    let list = v1::ListMigrationsRequest::default();
    let halves = bench.planner.list_migrations(&list).await.unwrap().halves;
    let shown: Vec<_> =
        halves.iter().map(|half| (half.side.as_str(), half.host.as_str())).collect();
    assert_eq!(shown, [("source", "a"), ("destination", "b")]);
    assert!(halves[0].handed && halves[0].migration_id == id);
    assert_eq!(codes(&doctor(&bench).await), ["open_half", "open_half", "stands_still"]);
    assert!(world.running(&vm).is_empty());
    let (status, body) = bench.http("GET", "/api/doctor", "").await;
    assert_eq!((status, body["well"].as_bool()), (200, Some(false)));
}

#[tokio::test]
async fn a_human_keeps_either_side_of_open_halves() {
    for (keep, host) in [("source", "a"), ("destination", "b")] {
        let (world, vm, id) = halves().await;
        let bench = Bench::fresh(&world, &["a", "b"]).await;
        let resolved = resolve(&bench, &id, keep).await.unwrap();
        assert_eq!(resolved.phase, "resolved");
        assert_eq!(world.running(&vm), [host]);
        bench.report(&["a", "b"]).await;
        let well = doctor(&bench).await;
        assert!(well.well, "{keep}: {:?}", well.findings);
        assert_eq!(well.vms[0].runs_on, host);
        // There is nothing left to say a word about.
        assert!(resolve(&bench, &id, keep).await.is_err());
    }
}

#[tokio::test]
async fn a_vm_of_which_neither_half_was_kept_starts_from_its_disks() {
    let (world, vm, id) = halves().await;
    let bench = Bench::fresh(&world, &["a", "b"]).await;
    let resolved = resolve(&bench, &id, "neither").await.unwrap();
    assert!(resolved.error.contains("start the VM from its disks"), "{}", resolved.error);
    bench.report(&["a", "b"]).await;
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "lost");
    assert_eq!(bench.planner.start_vm(start("web1", "b")).await.unwrap().power, "running");
    assert_eq!(world.running(&vm), ["b"]);
}

#[tokio::test]
async fn a_side_that_is_gone_is_not_kept_and_an_unheard_host_may_have_it() {
    let (world, vm, id) = halves().await;
    world.kill("b", &vm);
    let bench = Bench::fresh(&world, &["a", "b"]).await;
    let error = resolve(&bench, &id, "destination").await.unwrap_err();
    assert!(error.contains("none has a receiver"), "{error}");
    world.silence("b");
    let error = resolve(&bench, &id, "source").await.unwrap_err();
    assert!(error.contains("host b did not say all"), "{error}");
    world.all_answer();
    resolve(&bench, &id, "source").await.unwrap();
    assert_eq!(world.running(&vm), ["a"]);
}

#[tokio::test]
async fn a_half_is_not_let_go_on_while_another_host_has_the_guest() {
    // It was moved, and only the release of its source is left.
    let (world, vm, id) = halves_at(RELEASE, "attached").await;
    let bench = Bench::fresh(&world, &["a", "b"]).await;
    assert_eq!(world.running(&vm), ["b"]);
    let error = resolve(&bench, &id, "source").await.unwrap_err();
    assert!(error.contains("host b has a QEMU process"), "{error}");
    assert_eq!(world.running(&vm), ["b"]);
    resolve(&bench, &id, "neither").await.unwrap();
    assert_eq!(world.running(&vm), ["b"]);
    bench.report(&["a", "b"]).await;
    let well = doctor(&bench).await;
    assert!(well.well, "{:?}", well.findings);
}

#[tokio::test]
async fn a_migration_that_is_driven_needs_no_word() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    bench.world.fall_silent_at(RELEASE, Silence::Before);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |migration| migration.phase == "attached").await;
    let error = resolve(&bench, &asked.id, "source").await.unwrap_err();
    assert!(error.contains("is driven"), "{error}");
}

#[tokio::test]
async fn the_doctor_prints_what_was_said_at_the_commit() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let asked = bench.migrate("web1", "b").await;
    bench.ended(&asked.id).await;
    let reply = doctor(&bench).await;
    assert!(reply.well, "{:?}", reply.findings);
    let boots: Vec<_> = reply.hosts.iter().map(|host| host.boot_id.clone()).collect();
    assert_eq!(boots, ["a", "b"].map(|host| bench.world.report(host).boot_id));
    let check = &reply.vms[0];
    assert_eq!((check.runs_on.as_str(), &check.last_move), ("b", &asked.id));
    assert!(check.proof_words.contains("said completed and postmigrate"), "{}", check.proof_words);
    bench.world.silence("b");
    let reply = doctor(&bench).await;
    assert_eq!((codes(&reply)[0], reply.vms[0].runners.as_str()), ("host_silent", "unknown"));
}

/// A row that is older than what its agents know: the store was restored from a backup.
#[tokio::test]
async fn a_migration_whose_agents_know_a_newer_owner_waits_for_a_word_and_is_closed_by_it() {
    let bench = Bench::new(&["a", "b", "c"]).await;
    let vm = bench.start("web1", 1, "a").await;
    bench.world.pace(Pace::Endless);
    let asked = bench.migrate("web1", "b").await;
    bench.see(&asked.id, |seen| seen.state == "syncing").await;
    // Nothing is overtaken yet: it is driven, whatever a host says that is no end of it.
    bench.world.knows("c", &vm.id, 9);
    bench.report(&["c"]).await;
    assert!(resolve(&bench, &asked.id, "source").await.unwrap_err().contains("is driven"));
    bench.world.knows("b", &vm.id, 9);
    let bench = bench.restart().await;
    let id = asked.id.parse().unwrap();
    let told = |text: &str| {
        let seen = bench.planner.live.seen(id);
        seen.trouble.is_some_and(|(trouble, _)| trouble.contains(text))
    };
    until(|| told("older than what happened")).await;
    let claim = bench.planner.store().migration(id).await.unwrap().unwrap().claim;
    bench.report(&["a", "b"]).await;
    let closed = resolve(&bench, &asked.id, "source").await.unwrap();
    assert_eq!((closed.phase.as_str(), closed.stuck.is_some()), ("failed", false), "{closed:#?}");
    let row = bench.planner.store().migration(id).await.unwrap().unwrap();
    assert_eq!(row.claim, claim, "it was claimed over and over");
    let shown = bench.planner.get_migration(&asked.id).await.unwrap();
    assert_eq!(shown.phase, "failed");
    assert!(shown.error.contains("host b knows generation 9"), "{}", shown.error);
    assert!(bench.planner.store().reservations().await.unwrap().is_empty());
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    assert_eq!(bench.planner.get_vm("web1").await.unwrap().power, "running");
}

#[tokio::test]
async fn a_word_on_a_vm_that_no_report_named_is_written_before_anybody_hears_it() {
    let (world, vm, id) = halves().await;
    world.kill("a", &vm);
    world.forget("a", &vm);
    // A receiver alone is taken into no store by itself.
    let bench = Bench::fresh(&world, &["a", "b"]).await;
    assert!(bench.planner.get_vm("web1").await.is_err());
    resolve(&bench, &id, "destination").await.unwrap();
    assert_eq!(world.running(&vm), ["b"]);
    let row = bench.planner.get_vm(&vm).await.unwrap();
    assert_eq!((row.host.as_str(), row.power.as_str()), ("b", "running"));
}
